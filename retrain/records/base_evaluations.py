"""The untrained model's held-out answers, sampled once for a whole campaign and stored beside its runs.

Every run of a campaign starts as the same model and is measured on the same problems with the same random numbers, so
its first evaluation is the same for all. A cohort that starts later, or after a restart, reads the stored evaluation
instead of sampling again, so that the improvement of every run is measured from the same value. There is one ``.npz``
file for each setting (sampling, reward, data).
"""

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import repeat
from pathlib import Path

import numpy as np

from retrain.files import dumps, write_bytes
from retrain.records.schema.base import Row
from retrain.types import Action, EvalRecord, Group, Problem, Prompt, RewardResult, Rollout, Turn

Tokens = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # Ids, log-probabilities and entropies of an action
FOLDER = "base"
SAMPLING = ("temperature", "samples", "seconds", "max_tokens", "top_p", "top_k", "min_p")


class BaseEvaluations:
    """Store of evaluations of the untrained model in one directory.

    The key of an evaluation is its ``setting``: a text that names the held-out set, its problems, sampling and reward.
    ``owner`` identifies the weights of the base; evaluations of another base are not found.
    """

    def __init__(self, directory: Path, owner: str):
        self.directory, self.owner = Path(directory) / FOLDER, owner

    def path(self, setting: str) -> Path:
        digest = hashlib.blake2b(f"{self.owner}\x1f{setting}".encode(), digest_size=6).hexdigest()
        return self.directory / f"evaluation_{digest}.npz"

    def get(self, setting: str, problems: Sequence[Problem]) -> EvalRecord | None:
        """Return the stored evaluation; None if it is missing, damaged, or its problems are not exactly ``problems``,
        in this order."""
        path = self.path(setting)
        if not path.is_file():
            return None
        try:
            with np.load(path) as file:
                facts = json.loads(str(file["facts"]))
                arrays = {name: file[name] for name in ("lengths", "token_ids", "logprobs", "entropies")}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
            return None  # damaged: the caller evaluates again
        if [problem.id for problem in problems] != facts["problem_ids"] or "prompts" not in facts:
            return None
        cuts, entropies = np.cumsum(arrays["lengths"])[:-1], arrays["entropies"]
        token_ids, logprobs = (np.split(arrays[name], cuts) for name in ("token_ids", "logprobs"))
        columns = zip(token_ids, logprobs, np.split(entropies, cuts) if len(entropies) else repeat(None), strict=False)
        groups = []
        for problem, stored, rollouts in zip(problems, facts["prompts"], facts["rollouts"], strict=True):
            prompt = Prompt(problem, stored["text"], tuple(stored["token_ids"]), tuple(stored["messages"]))
            groups.append(Group(prompt, tuple(_rollout(prompt, row, columns) for row in rollouts)))
        return EvalRecord(facts["name"], 0, groups, **{key: facts[key] for key in SAMPLING})

    def put(self, setting: str, record: EvalRecord) -> None:
        """Store an evaluation, unless it has no answers or an answer could not be graded or audited: the next cohort
        then evaluates again. Raises StorageError if the file cannot be written."""
        rollouts = [rollout for group in record.groups for rollout in group.rollouts]
        rewards = [rollout.reward for rollout in rollouts]
        if not rewards or any(r.error or r.audit_error or r.total_reward is None for r in rewards):
            return
        prompts = [group.prompt for group in record.groups]
        facts: Row = {
            "name": record.name,
            **{key: getattr(record, key) for key in SAMPLING},
            "setting": setting,
            "problem_ids": [prompt.problem.id for prompt in prompts],
            "prompts": [
                {"text": prompt.text, "token_ids": prompt.token_ids, "messages": list(map(dict, prompt.messages))}
                for prompt in prompts
            ],
            "rollouts": [[_facts(rollout) for rollout in group.rollouts] for group in record.groups],
        }
        write_bytes(self.path(setting), _packed(facts, rollouts))


def _packed(facts: Row, rollouts: Sequence[Rollout]) -> bytes:
    actions = [turn.action for rollout in rollouts for turn in rollout.turns]
    entropies = [action.entropy_T for action in actions if action.entropy_T is not None]
    file = io.BytesIO()
    np.savez_compressed(
        file,
        facts=np.array(dumps(facts)),
        lengths=np.array([len(action) for action in actions]),
        token_ids=np.concatenate([np.asarray(action.token_ids, dtype=np.int64) for action in actions]),
        logprobs=np.concatenate([action.logprobs_T for action in actions]),
        entropies=np.concatenate(entropies) if len(entropies) == len(actions) else np.zeros(0),
    )
    return file.getvalue()


def _facts(rollout: Rollout) -> Row:
    turns = [
        {
            "observation_ids": turn.observation_ids,
            "messages": list(map(dict, turn.messages)),
            "text": turn.action.text,
            "stop_reason": turn.action.stop_reason,
            "fresh": turn.fresh,
            "reward": turn.reward,
            "metrics": dict(turn.metrics),
            "logs": dict(turn.logs),
        }
        for turn in rollout.turns
    ]
    reward = asdict(rollout.reward)
    if not reward["logs"]:
        del reward["logs"]
    return {"turns": turns, "reward": reward, "ended": rollout.ended}


def _rollout(prompt: Prompt, facts: Row, columns: Iterator[Tokens]) -> Rollout:
    turns = []
    for turn in facts["turns"]:
        token_ids, logprobs_T, entropy_T = next(columns)
        action = Action(token_ids.tolist(), turn["text"], logprobs_T, entropy_T, turn["stop_reason"])
        rest = {key: turn[key] for key in ("fresh", "reward", "metrics", "logs")}
        turns.append(Turn(tuple(turn["observation_ids"]), action, tuple(turn["messages"]), **rest))
    reward = facts["reward"]
    return Rollout(prompt, tuple(turns), RewardResult(**{**reward, "tags": tuple(reward["tags"])}), facts["ended"])
