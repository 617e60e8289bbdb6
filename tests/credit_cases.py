"""Groups of completions with texts, for what is made of their tokens."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from toymodels import word_tokenizer

from retrain.policy.base import BaseModel
from retrain.types import Completion, Group, Problem, Prompt, RewardResult


def words_base() -> BaseModel:
    """A base that is a tokenizer alone."""
    tokenizer = word_tokenizer(["so x = 4 notice that we can check", "that's not right wait let me check"], 280)
    model = SimpleNamespace()
    return BaseModel("toy", model, tokenizer, torch.device("cpu"), torch.float32, (1,), 0, "")


def completion(base, text, logprobs=None):
    """The text as sampled; uncertainty grows with improbability."""
    ids = base.tokenizer(text)["input_ids"] + [base.tokenizer.eos_token_id]
    values = np.linspace(-2, -0.1, len(ids)) if logprobs is None else np.asarray(logprobs)
    return Completion(ids, text, values, np.abs(values), "stop")


def group(base, rewards, texts=None):
    """A group without advantages yet."""
    texts = texts or [f"so x = {i}" for i in range(len(rewards))]
    prompt = Prompt(Problem("p", "1+1=?", "2"), "1+1=?", (5, 6, 7))
    results = [RewardResult(r) for r in rewards]
    return Group(prompt, [completion(base, t) for t in texts], results, np.full(len(rewards), np.nan))
