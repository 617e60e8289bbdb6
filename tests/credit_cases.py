"""Groups of completions with texts, for what is made of their tokens."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from toymodels import word_tokenizer

from retrain.policy.base import BaseModel
from retrain.types import Action, Problem, Prompt, RewardResult, Sample, single_turn


def words_base() -> BaseModel:
    """A base that is a tokenizer alone."""
    tokenizer = word_tokenizer(["so x = 4 notice that we can check", "that's not right wait let me check"], 280)
    model = SimpleNamespace()
    return BaseModel("toy", model, tokenizer, torch.device("cpu"), torch.float32, (1,), 0, "")


def completion(base, text, logprobs=None):
    """The text as sampled; uncertainty grows with improbability."""
    ids = base.tokenizer(text)["input_ids"] + [base.tokenizer.eos_token_id]
    values = np.linspace(-2, -0.1, len(ids)) if logprobs is None else np.asarray(logprobs)
    return Action(ids, text, values, np.abs(values), "stop")


def group(base, rewards, texts=None):
    """A group without advantages yet."""
    texts = texts or [f"so x = {i}" for i in range(len(rewards))]
    prompt = Prompt(Problem("p", "1+1=?", "2"), "1+1=?", (5, 6, 7))
    results = [RewardResult(r) for r in rewards]
    return single_turn(prompt, [completion(base, t) for t in texts], results)


class Trained(NamedTuple):
    """What a policy is given of one rollout, for its sampled tokens."""

    token_ids: list[int]
    logprobs_T: np.ndarray
    advantages_T: np.ndarray
    loss_mask_T: np.ndarray


def sampled_tokens(samples: Iterable[Sample]) -> list[Trained]:
    """The sampled tokens of each sample; what was read has no advantage and does not train."""
    trained = []
    for sample in samples:
        own = sample.action_mask
        assert not sample.advantages[~own].any()
        assert not sample.loss_mask[~own].any()
        ids = sample.token_ids[own].tolist()
        trained.append(Trained(ids, sample.logprobs[own], sample.advantages[own], sample.loss_mask[own]))
    return trained
