"""The untrained model's held-out answers, sampled once for a whole campaign and kept beside its runs.

Every run of a campaign starts as the same model and is measured on the same problems with the same random numbers, so
its first evaluation is the same for all. A cohort that starts later, or after a restart, reads it here: what the runs
improve on is one number, not one number per cohort. One ``.npz`` file per way of measuring (sampling, reward, data).
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from retrain.files import dumps, write_bytes
from retrain.types import Action, EvalRecord, Prompt, RewardResult, single_turn

FOLDER = "base"
SAMPLING = ("temperature", "samples", "seconds", "max_tokens", "top_p", "top_k", "min_p")


class BaseEvaluations:
    """Evaluations of the untrained model by the text that says how they were made.

    ``owner`` names what must be the same for all of them: the base's weights and the held-out problems.
    """

    def __init__(self, directory: Path, owner: str):
        self.directory, self.owner = Path(directory) / FOLDER, owner

    def path(self, setting: str) -> Path:
        """The file of one way of measuring."""
        digest = hashlib.blake2b(f"{self.owner}\x1f{setting}".encode(), digest_size=6).hexdigest()
        return self.directory / f"evaluation_{digest}.npz"

    def get(self, setting: str, prompts: Sequence[Prompt]) -> EvalRecord | None:
        """The evaluation made in this way, or None; ``prompts`` are the held-out problems in order."""
        path = self.path(setting)
        if not path.is_file():
            return None
        try:
            with np.load(path) as stored:
                facts = json.loads(str(stored["facts"]))
                arrays = {name: stored[name] for name in ("lengths", "token_ids", "logprobs", "entropies")}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
            return None  # damaged: it can be made again
        if [prompt.problem.id for prompt in prompts] != facts["problem_ids"]:
            return None
        cuts = np.cumsum(arrays["lengths"])[:-1]
        columns = (np.split(arrays[name], cuts) for name in ("token_ids", "logprobs", "entropies"))
        actions = []
        for one, token_ids, logprobs_T, entropy_T in zip(facts["completions"], *columns, strict=True):
            given_T = entropy_T if len(arrays["entropies"]) else None
            actions.append(Action(token_ids.tolist(), one["text"], logprobs_T, given_T, one["stop_reason"]))
        rewards = [RewardResult(**{**one, "tags": tuple(one["tags"])}) for one in facts["rewards"]]
        samples = facts["samples"]
        groups = [
            single_turn(prompt, actions[at : at + samples], rewards[at : at + samples])
            for at, prompt in zip(range(0, len(actions), samples), prompts, strict=True)
        ]
        return EvalRecord(facts["name"], 0, groups, **{key: facts[key] for key in SAMPLING})

    def put(self, setting: str, record: EvalRecord) -> None:
        """Keep an evaluation. One in which a grading failed is not kept: the next cohort tries again.

        Raises StorageError when it cannot be written.
        """
        rollouts = [rollout for group in record.groups for rollout in group.rollouts]
        rewards = [rollout.reward for rollout in rollouts]
        if not rollouts or any(reward.error or reward.total_reward is None for reward in rewards):
            return
        facts: dict[str, Any] = {
            "name": record.name,
            **{key: getattr(record, key) for key in SAMPLING},
            "setting": setting,
            "problem_ids": [group.prompt.problem.id for group in record.groups],
            "completions": [{"text": one.text, "stop_reason": one.stop_reason} for one in rollouts],
            "rewards": [asdict(reward) for reward in rewards],
        }
        entropies = [entropy_T for one in rollouts if (entropy_T := one.entropy_T) is not None]
        packed = io.BytesIO()
        np.savez_compressed(
            packed,
            facts=np.array(dumps(facts)),
            lengths=np.array([len(one) for one in rollouts]),
            token_ids=np.concatenate([np.asarray(one.token_ids, dtype=np.int64) for one in rollouts]),
            logprobs=np.concatenate([one.logprobs_T for one in rollouts]),
            entropies=np.concatenate(entropies) if len(entropies) == len(rollouts) else np.zeros(0),
        )
        write_bytes(self.path(setting), packed.getvalue())
