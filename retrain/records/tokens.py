"""Every token of an iteration's rollouts, with whole texts, in one file that is read in pieces.

The file of a step is ``tokens_000010.safetensors``, of an evaluation ``tokens_eval_<name>_000010.safetensors``. All
rollouts are concatenated, group by group. Arrays over L have an entry for every token that the policy read or sampled,
arrays over T only for sampled tokens. Rollout ``i`` is ``offsets[i] : offsets[i + 1]`` in arrays over L and
``sampled[i] : sampled[i + 1]`` in arrays over T:

- ``ids`` int32 [L]; ``action`` uint8 [L], 1 for sampled tokens;
- ``logprobs`` and, where they are known, ``trainer_logprobs``, ``entropy``, ``values``, ``value_targets`` float32 [T];
- ``advantages`` float32 [T], the token's advantage after token credit (NaN: none); ``planning`` and ``trained``
  uint8 [T]; ``versions`` int32 [T], the policy version that sampled the token;
- ``ends`` int32 [T], the character at which the token ends within the text of its turn.

``prompts`` and ``rollouts`` are bytes (uint8): concatenated JSON objects, one per group and one per rollout, which
begin at the offsets ``prompt_at`` and ``rollout_at``. An evaluation has only ids, action, logprobs, entropy, ends and
these objects.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from retrain.errors import CheckpointError
from retrain.files import dumps, write_bytes
from retrain.records import kinds
from retrain.records.kinds import FieldKinds, checked
from retrain.records.rollouts import Batch, advantage_of, batch_name, conversation_of, metrics_of
from retrain.records.schema.base import Row, Values
from retrain.records.schema.layout import TRAIN
from retrain.types import CreditedRollout, Group
from retrain.util.tensor_file import to_bytes

SCHEMA = "1"
LINES = ("prompts", "rollouts")
INDICES = ("offsets", "sampled", "prompt_at", "rollout_at")
_LARGEST_HEADER = 1 << 24
_DTYPES = {"F32": np.float32, "I32": np.int32, "I64": np.int64, "U8": np.uint8}
_NEEDED = dict.fromkeys(INDICES, np.int64) | dict.fromkeys(LINES, np.uint8)
_NEEDED |= {"ids": np.int32, "action": np.uint8, "logprobs": np.float32, "ends": np.int32}
_NONE = (None, 0, 0)
_LINES: Mapping[str, FieldKinds] = {
    "prompt": {kinds.is_text: "problem_id", kinds.are_texts: "tags", kinds.are_objects: "messages"},
    "rollout": {
        kinds.is_anything: "reward correct advantage turn_advantages", kinds.is_count: "group sample",
        kinds.is_object: "metrics", kinds.are_objects: "turns",
    },
}  # fmt: skip
_KNOWN: FieldKinds = {
    kinds.is_number: "reward advantage",
    kinds.are_numbers: "turn_advantages",
    kinds.is_text: "stop_reason ended discarded error",
}
_TURN: FieldKinds = {kinds.is_text: "text", kinds.is_count: "tokens", kinds.are_objects: "messages"}


def tokens_name(split: str, iteration: int) -> str:
    stem, _, number = batch_name(split, iteration).rpartition("_iteration_")
    return f"tokens_{number}.safetensors" if split == TRAIN else f"tokens_{stem}_{number}.safetensors"


def write_tokens(directory: Path, batch: Batch) -> Path:
    """Write the file of a batch, without waiting for the disk; return its path."""
    path = directory / tokens_name(batch.split, batch.iteration)
    about = {"schema": SCHEMA, "split": batch.split, "iteration": str(batch.iteration), "run": batch.run}
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    tensors = _sampled(rollouts) | _texts(batch) | (_trained(rollouts) if batch.split == TRAIN else {})
    write_bytes(path, to_bytes(tensors, {**about, "condition": batch.condition}), durable=False)
    return path


def _sampled(rollouts: Sequence[CreditedRollout]) -> dict[str, np.ndarray]:
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    is_action = [np.repeat([0, 1], [len(turn.observation_ids), len(turn.action)]) for turn in turns]
    tensors: dict[str, np.ndarray] = {
        "offsets": _begins([rollout.observation_tokens + len(rollout) for rollout in rollouts]),
        "sampled": _begins(list(map(len, rollouts))),
        "ids": _joined([part for turn in turns for part in (turn.observation_ids, turn.action.token_ids)], np.int32),
        "action": _joined(is_action, np.uint8),
        "logprobs": _joined([rollout.logprobs_T for rollout in rollouts], np.float32),
    }
    entropies = [rollout.entropy_T for rollout in rollouts if rollout.entropy_T is not None]
    if rollouts and len(entropies) == len(rollouts):
        tensors["entropy"] = _joined(entropies, np.float32)
    return tensors


def _texts(batch: Batch) -> dict[str, np.ndarray]:
    """Return the tensors of prompts, rollouts and ``ends``. If tokens cannot be located in a text, all of them end at
    the end of the text."""
    lines, ends = [], []
    for index, group in enumerate(batch.groups):
        for sample, rollout in enumerate(group.rollouts):
            texts = []
            for action in (turn.action for turn in rollout.turns):
                text, spans = action.text, None
                if batch.token_text is not None:
                    text, spans = batch.token_text(action.token_ids)
                texts.append(text)
                ends.append([len(text)] * len(action) if spans is None else [end for _, end in spans])
            lines.append(rollout_line(rollout, texts, index, sample, group.discarded))
    tensors = {"ends": _joined(ends, np.int32)}
    for kind, rows in (("prompt", map(prompt_line, batch.groups)), ("rollout", lines)):
        encoded = [dumps(row).encode() for row in rows]
        tensors[f"{kind}s"] = np.frombuffer(b"".join(encoded), np.uint8)
        tensors[f"{kind}_at"] = _begins(list(map(len, encoded)))
    return tensors


def _trained(rollouts: Sequence[CreditedRollout]) -> dict[str, np.ndarray]:
    def column(name: str, dtype: DTypeLike, absent: float = np.nan) -> np.ndarray:
        parts = [(rollout, getattr(rollout, name)) for rollout in rollouts]
        return _joined([np.full(len(rollout), absent) if part is None else part for rollout, part in parts], dtype)

    actions = [turn.action for rollout in rollouts for turn in rollout.turns]
    credited = [np.full(len(rollout), rollout.token_advantages_T is not None) for rollout in rollouts]
    tensors = {
        "advantages": column("token_advantages_T", np.float32),
        "planning": column("planning_T", np.uint8, 0),
        "trained": column("loss_mask_T", np.uint8, 1) * _joined(credited, np.uint8),
        "versions": _joined([np.full(len(action), action.policy_version) for action in actions], np.int32),
    }
    optional = {"trainer_logprobs": "old_logprobs_T", "values": "values_T", "value_targets": "value_targets_T"}
    for name, attribute in optional.items():
        if any(getattr(rollout, attribute) is not None for rollout in rollouts):
            tensors[name] = column(attribute, np.float32)
    return tensors


def prompt_line(group: Group) -> Row:
    problem = group.prompt.problem
    return {
        "problem_id": problem.id,
        "tags": list(problem.tags),
        "reference": problem.answer,
        "messages": conversation_of(group.prompt),
    }


def rollout_line(rollout: CreditedRollout, texts: Sequence[str], group: int, sample: int, discarded: str | None) -> Row:
    """Return a rollout as JSON, without its tokens; ``texts`` are the texts of its turns. The ``messages`` of a turn
    are those since the previous action or, if ``fresh`` is set, the whole rewritten conversation."""
    reward = rollout.reward
    turns = [
        {
            "messages": list(map(dict, turn.messages)) if index or turn.fresh else [],
            **({"fresh": True} if turn.fresh else {}),
            "text": text,
            "tokens": len(turn.action),
            "read": len(turn.observation_ids),
            "stop_reason": turn.action.stop_reason,
            "reward": turn.reward,
            "metrics": dict(turn.metrics),
            "logs": dict(turn.logs),
        }
        for index, (turn, text) in enumerate(zip(rollout.turns, texts, strict=True))
    ]
    return {
        "group": group,
        "sample": sample,
        "reward": reward.total_reward,
        "correct": bool(reward.is_correct),
        "metrics": metrics_of(reward),
        "advantage": advantage_of(rollout),
        "turn_advantages": rollout.turn_advantages,
        "stop_reason": rollout.stop_reason,
        "ended": rollout.ended,
        "discarded": discarded,
        "error": reward.error,
        "age": rollout.staleness,
        "turns": turns,
    }


def _begins(lengths: Sequence[int]) -> np.ndarray:
    """Return the offsets at which concatenated parts of these lengths begin, then the total length: int64
    [parts + 1]."""
    return np.cumsum([0, *lengths], dtype=np.int64)


def _joined(parts: Sequence[ArrayLike], dtype: DTypeLike) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)


@dataclass(frozen=True)
class RolloutTokens:
    line: Values
    prompt: Values
    arrays: Mapping[str, np.ndarray]

    def pieces(self) -> list[list[str]]:
        pieces, at = [], 0
        for turn in self.line["turns"]:
            ends = self.arrays["ends"][at : at + turn["tokens"]].tolist()
            begins = [0, *ends[:-1]]
            pieces.append([turn["text"][a:b] for a, b in zip(begins, ends, strict=True)])
            at += turn["tokens"]
        return pieces


class TokenFile(AbstractContextManager["TokenFile"]):
    """Reader of a file of ``write_tokens``. It reads one rollout at a time, so that the time to get a rollout does not
    depend on the size of the file. Use it in a ``with`` block.

    The constructor and all reads raise CheckpointError if the file is damaged, cut short or not a file of tokens; the
    message names it as ``label``. The constructor raises OSError as ``open`` does.
    """

    def __init__(self, path: Path, label: str | None = None):
        self.path = path
        self.label = str(path) if label is None else label
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        try:
            size = os.fstat(self._file.fileno()).st_size
            length = int.from_bytes(self._file.read(8), "little")
            if not 0 < length <= min(size, _LARGEST_HEADER):
                raise ValueError("no safetensors header")
            header = json.loads(os.pread(self._file.fileno(), length, 8))
            header.pop("__metadata__", None)
            self._locations = {name: _location(entry, 8 + length, size) for name, entry in header.items()}
            if missing := [name for name, dtype in _NEEDED.items() if self._locations.get(name, _NONE)[0] is not dtype]:
                raise ValueError(f"it has no {missing[0]}")
            self._index = {name: self._read(name) for name in INDICES}
            lengths = {len(self._index[name]) for name in ("offsets", "sampled", "rollout_at")}
            if len(lengths) != 1 or 0 in lengths:
                raise ValueError("its indices are of different lengths")
        except BaseException as error:
            self._file.close()
            if isinstance(error, ValueError | KeyError | TypeError | AttributeError | RecursionError):
                raise CheckpointError(f"{self.label} is no file of tokens, or cut short: {error}") from error
            raise

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._index["rollout_at"]) - 1

    @property
    def names(self) -> list[str]:
        return [name for name in self._locations if name not in (*LINES, *INDICES)]

    def lines(self, first: int = 0, last: int | None = None) -> Iterator[Row]:
        for i in range(first, len(self) if last is None else min(last, len(self))):
            yield self._line("rollout", i)

    def prompt(self, group: int) -> Row:
        return self._line("prompt", group)

    def prompts(self) -> list[Row]:
        return [self._line("prompt", i) for i in range(len(self._index["prompt_at"]) - 1)]

    def of_group(self, group: int) -> range:
        """Return the indices of a group's rollouts. Rollouts are in the order of groups, so a bisection finds them and
        few of them are read."""

        def group_at(index: int) -> int:
            return self._line("rollout", index)["group"]

        rollouts = range(len(self))
        return range(bisect_left(rollouts, group, key=group_at), bisect_right(rollouts, group, key=group_at))

    def rollout(self, index: int) -> RolloutTokens:
        """Return one rollout with its tokens. Raises IndexError if the file has no rollout ``index``."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path.name} has {len(self)} rollouts, not {index + 1}")
        line = self._line("rollout", index)
        arrays = {}
        for name in self.names:
            begins = self._index["offsets" if name in ("ids", "action") else "sampled"]
            arrays[name] = self._read(name, int(begins[index]), int(begins[index + 1]))
        if len(arrays["ends"]) != sum(turn["tokens"] for turn in line["turns"]):
            raise self._damaged(f"rollout {index} has another number of tokens than its turns")
        return RolloutTokens(line, self._line("prompt", line["group"]), arrays)

    def _line(self, kind: str, index: int) -> Row:
        begins = self._index[f"{kind}_at"]
        if not 0 <= index < len(begins) - 1:
            raise self._damaged(f"it has no {kind} {index}")
        data = self._read(f"{kind}s", int(begins[index]), int(begins[index + 1]))
        try:
            row = checked(json.loads(data.tobytes()), _LINES[kind], _KNOWN)
            turns = [checked(turn, _TURN) for turn in row.get("turns", ())]
            if row.get("turn_advantages") is not None and len(row["turn_advantages"]) != len(turns):
                raise ValueError("turn_advantages are not one for each turn")
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"the line of {kind} {index}: {error}") from error
        return row

    def _read(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        dtype, begin, count = self._locations[name]
        last = count if last is None else last
        width = np.dtype(dtype).itemsize
        if not 0 <= first <= last <= count:
            raise self._damaged(f"{name} is shorter than its index says")
        data = os.pread(self._file.fileno(), (last - first) * width, begin + first * width)
        if len(data) != (last - first) * width:
            raise self._damaged(f"{name} is cut short")
        return np.frombuffer(data, dtype)

    def _damaged(self, how: str) -> CheckpointError:
        return CheckpointError(f"{self.label} is damaged: {how}")


def _location(entry: Values, base: int, size: int) -> tuple[DTypeLike, int, int]:
    """Return the data type, first byte and number of entries of a tensor. Raises ValueError if its type is unknown or
    it lies outside the file. ``base`` is the byte at which the data begin, ``size`` the size of the file."""
    begin, end = entry["data_offsets"]
    dtype = _DTYPES.get(entry["dtype"])
    are_integers = isinstance(begin, int) and isinstance(end, int)
    if dtype is None or not are_integers or not 0 <= begin <= end or base + end > size:
        raise ValueError("a tensor lies outside of it")
    return dtype, base + begin, (end - begin) // np.dtype(dtype).itemsize
