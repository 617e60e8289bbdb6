"""Adapters that do something, what is asked of them, and what they sampled."""

from __future__ import annotations

import numpy as np
import torch

from retrain.engines.local import LocalEngine
from retrain.engines.protocol import SampleRequest
from retrain.policy.logprobs import TrainSequence
from retrain.policy.lora import Adapter, Lanes
from retrain.policy.update import Denominators
from retrain.rng import generator


def trained(lanes: Lanes, seed: int, rank: int = 4, size: float = 0.3) -> Adapter:
    """An adapter whose ΔW is not 0."""
    adapter = lanes.new_adapter(rank, 8.0).initialise(seed)
    noise = generator("noise", seed)
    with torch.no_grad():
        for b in adapter.B.values():
            b.copy_(torch.from_numpy(noise.normal(0, size, b.shape)))
    return adapter


def requests(lane: int = 0, *, prompts: int = 3, samples: int = 4, max_tokens: int = 12, temperature: float = 1.0):
    """Requests of one lane, with prompts of different lengths."""
    sizes = [3, 9, 5, 7, 4, 6]
    return [
        SampleRequest(
            lane,
            tuple(int(t) for t in generator("prompt", lane, p).integers(3, 200, sizes[p % len(sizes)])),
            samples,
            max_tokens,
            temperature,
            ("test", lane, p),
        )
        for p in range(prompts)
    ]


def fresh_logprobs(base, lanes, adapter, prompt_ids, token_ids, temperature):
    """Log-probabilities and entropies by one unpadded forward pass, no cache, in the plainest way."""
    ids = torch.tensor([list(prompt_ids) + list(token_ids)])
    with torch.no_grad(), lanes.single(adapter):
        logits = base.model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1]
    logprobs = torch.log_softmax((logits.float() if logits.dtype == torch.bfloat16 else logits) / temperature, -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0].numpy(), entropy.numpy()


def decoded(base, lanes, adapters, asked):
    """Everything that is sampled, exactly."""
    groups = LocalEngine(base, lanes).sample(asked, adapters)
    return [(c.token_ids, c.logprobs_T.tolist(), c.entropy_T.tolist()) for group in groups for c in group]


def rollout(base, lanes, adapter, temperature=1.0) -> list[TrainSequence]:
    """Sampled sequences with made-up, token-varying advantages."""
    asked = requests(prompts=5, samples=3, temperature=temperature)
    noise = generator("advantages")
    return [
        TrainSequence(r.prompt_ids, c.token_ids, c.logprobs_T, noise.normal(size=len(c)), np.ones(len(c), dtype=bool))
        for r, group in zip(asked, LocalEngine(base, lanes).sample(asked, [adapter]), strict=True)
        for c in group
    ]


def totals(sequences) -> Denominators:
    """What the losses of these sequences are divided by."""
    return Denominators(sum(len(s.completion_ids) for s in sequences), len(sequences))
