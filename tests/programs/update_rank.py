"""One of several ranks that update and score the same policy with the same samples; see tests/system/test_ranks.py."""

import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from retrain.algorithms import load_modes, objective_of
from retrain.config import parse_dict
from retrain.policy.local import LocalPolicy
from retrain.ranks import RankGroup
from retrain.threads import Workers
from retrain.training.bases import Bases
from retrain.types import Denominators, StepBatch, Want

SCORES = frozenset(Want) - {Want.TEACHER}


def config_of(sections, shard="none", count=1):
    sections = {name: dict(keys) for name, keys in sections.items()}
    sections["model"] = {"lora_rank": 4}
    sections["training"] = {"micro_batch_tokens": 60, "lr": 0.01} | sections.get("training", {})
    sections["backend"] = {"devices": "cpu"} | ({"shard": shard, "ranks": count} if count > 1 else {})
    return parse_dict(sections)


def updated(config, bases, folder, samples):
    """What the first gradient, the first update and then the scores of a policy are, or the error that was raised."""
    bases.load(config)
    around = bases.ranks.agree if bases.ranks is not None else (lambda point, compute: compute())
    base, lanes = around("lanes", lambda: bases.with_lanes(config))
    policy = LocalPolicy(base, lanes, config, (0, 0), Workers(), ranks=bases.ranks)
    objective = objective_of(config, load_modes(config.algorithm, folder).loss)
    tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    batch = StepBatch(samples, Denominators(tokens, len(samples), action_tokens=tokens), 0, (0, 0), keep_logprobs=True)
    try:
        gradient = policy.gradient(batch, objective)
        before, policy.budget.checkpointing = policy.budget.checkpointing, True
        recomputed = policy.gradient(batch, objective)
        policy.budget.checkpointing = before
        result = policy.update(batch, objective, 0.01)
    except Exception as error:
        return {"error": (type(error).__name__, str(error), list(getattr(error, "__notes__", ())))}
    want = SCORES if policy.critic is not None else SCORES - {Want.VALUES}
    return {
        "gradient": gradient, "recomputed": recomputed, "adapter": policy.adapter.flat.detach(),
        "critic": [flat.detach() for flat in policy.critic.weights] if policy.critic is not None else [],
        "metrics": {key: value for key, value in result.metrics.items() if not key.startswith("timing_")},
        "logprobs": result.trainer_logprobs, "budget": policy.budget.state(), "notes": policy.notes(),
        "scores": vars(policy.score(samples, want)),
    }  # fmt: skip


def main(rank: int, count: int, port: int, shard: str, folder: str) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, folder)
    cases, samples = pickle.loads((Path(folder) / "cases.pickle").read_bytes())
    ranks = RankGroup(rank, count, dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False))
    with Bases(ranks=ranks) as bases:
        found = {}
        for name, sections in cases.items():
            found[name] = updated(config_of(sections, shard, count), bases, Path(folder), samples)
    (Path(folder) / f"{shard}_{count}_{rank}.pickle").write_bytes(pickle.dumps(found))
    ranks.leave()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *sys.argv[4:])
