"""Updates that ranks and one process compute, to be compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from lane_cases import drawn, rollout, totals, trained, with_tokens

from retrain.algorithms.standard import load_modes
from retrain.campaign.planning.plan import RunSpec
from retrain.config import parse_dict
from retrain.policy.local import LocalPolicy
from retrain.policy.objective import objective_of
from retrain.policy.protocol import TrainBatch, Want
from retrain.policy.ranks import Ranks
from retrain.policy.threads import Workers

LOSSES = """
import torch

def plain(logprobs, old_logprobs, advantages, mask):
    return -(logprobs - old_logprobs).exp() * advantages

def broken(logprobs, old_logprobs, advantages, mask):
    raise ZeroDivisionError("no loss today")

def large(logprobs, old_logprobs, advantages, mask):
    if len(logprobs) > 1:
        raise RuntimeError("out of memory, says the allocator")
    return plain(logprobs, old_logprobs, advantages, mask)

def elsewhere(logprobs, old_logprobs, advantages, mask):
    if torch.distributed.get_rank() == 2:
        raise ZeroDivisionError("no loss on this rank")
    return plain(logprobs, old_logprobs, advantages, mask)

def steep(logprobs, old_logprobs, advantages, mask):
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        logprobs = logprobs + (logprobs - logprobs.detach()).sqrt()
    return plain(logprobs, old_logprobs, advantages, mask)
"""
CASES = {
    "plain": {},
    "kl and entropy": {"algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01}},
    "dropout": {"lora": {"dropout": 0.2}},
    "update_dtype": {"training": {"update_dtype": "bfloat16"}},
    "own critic": {"algorithm": {"advantage_mode": "gae"}, "critic": {"lora_rank": 2}},
    "shared critic": {"algorithm": {"advantage_mode": "gae"}, "critic": {"share_adapter": True}},
    "custom loss": {"algorithm": {"loss": "ranklosses:plain"}},
    "out of memory": {"algorithm": {"loss": "ranklosses:large"}},
}


def config_of(sections):
    sections = {name: dict(keys) for name, keys in sections.items()}
    sections["model"] = {"lora_rank": 4}
    sections["training"] = {"micro_batch_tokens": 60, "lr": 0.01} | sections.get("training", {})
    return parse_dict(sections)


def loaded(ranks: Ranks, config, folder: Path) -> Ranks:
    """The ranks, with the base and the losses of this configuration."""
    run = RunSpec("run", "label", 1, 0, {}, False, config).to_json()
    ranks.ask("load", [([run], str(folder), place) for place in ranks.places], lambda: None).whole()
    return ranks


def samples_of(base, lanes, critic: bool):
    noise = np.random.default_rng(3)
    samples = [with_tokens(each) for each in rollout(base, lanes, trained(lanes, 1, size=0.05))]
    samples[4] = with_tokens(samples[4], advantages=0.0)
    for sample in samples if critic else ():
        sample.values, sample.value_targets = np.zeros(len(sample)), np.zeros(len(sample))
        sample.value_targets[sample.action_mask] = noise.normal(size=len(drawn(sample)))
        sample.values[sample.action_mask] = noise.normal(size=len(drawn(sample)))
    return samples


def updated(base, lanes, config, folder, ranks: Ranks | None, sampler=None):
    """The policy after two updates, their numbers, and what the passes left on the samples; ``sampler``: base and lanes
    that these were drawn with, where it is not the same."""
    policy = LocalPolicy(base, lanes, config, (0, 0), Workers(), ranks=ranks)
    objective = objective_of(config, load_modes(config.algorithm, folder).loss)
    rows, left = [], []
    for step in range(2):
        samples = samples_of(*(sampler or (base, lanes)), config.algorithm.critic)
        counts = totals(samples)
        counts = type(counts)(counts.tokens, counts.sequences, action_tokens=counts.tokens)
        batch = TrainBatch(samples, counts, step, (0, 0), keep_logprobs=True)
        numbers = policy.update(batch, objective, 0.01)
        rows.append({key: value for key, value in numbers.items() if not key.startswith("timing_")})
        left.append([sample.trainer_logprobs for sample in samples])
    return policy, rows, left


def check_equal(together, alone) -> None:
    """Two results of ``updated`` have the same bits."""
    (policy, rows, logprobs), (policy_alone, rows_alone, logprobs_alone) = together, alone
    assert rows == rows_alone
    assert rows[0]["optim/grad_norm"] > 0
    assert torch.equal(policy.adapter.flat, policy_alone.adapter.flat)
    for pair in zip(logprobs, logprobs_alone, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(*pair, strict=True))
    if policy_alone.critic is not None:
        for pair in zip(policy.critic.weights, policy_alone.critic.weights, strict=True):
            assert torch.equal(*pair)
    assert policy.budget.state() == policy_alone.budget.state()


def scores_of(base, lanes, config, ranks: Ranks | None, samples) -> tuple[LocalPolicy, dict]:
    """A policy that has moved away from its reference, and all that it says of these samples."""
    policy = LocalPolicy(base, lanes, config, (0, 0), Workers(), ranks=ranks)
    with torch.no_grad():
        policy.adapter.flat += 0.01
        policy.critic.head.flat += 0.1
    return policy, vars(policy.score(samples, frozenset(Want) - {Want.TEACHER}))


def facts_of(action):
    return action.token_ids, action.logprobs_T.tolist(), action.entropy_T.tolist(), action.policy_version
