"""Rollouts as the page shows them: a table to sort and filter, groups as strips, and one rollout token by token."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrain.errors import UsageError
from retrain.records.histograms import rewards
from retrain.records.schema.base import Row
from retrain.records.tokens import RolloutTokens
from retrain.ui.answers import plain
from retrain.ui.iterations import Index, Iteration, rollouts_of
from retrain.ui.rates import rate_of

NEWEST = "newest"
SHOWN = 400  # Characters of a text in the table
AROUND = 30  # Characters before what was searched for
SORTS: Mapping[str, Callable[[Row], Any]] = {
    "index": lambda one: one["index"],
    "reward": lambda one: one["reward"],
    "advantage": lambda one: one["advantage"],
    "length": lambda one: one["length"],
    "turns": lambda one: one["turns"],
    "errors": lambda one: one["tool_errors"] + bool(one["error"]),
}


@dataclass(frozen=True)
class Filter:
    """Conditions that rollouts of an iteration must meet; None and "" let all through.

    ``kept``: "discarded" or "trained"; ``stop``: a stop reason, or why the episode ended; ``text``: in the prompt or
    the answer, whatever the case; ``errors``: only those with a failed tool call, or that could not be graded; rewards
    and lengths lie between two ends, both included.
    """

    reward: tuple[float | None, float | None] = (None, None)
    length: tuple[float | None, float | None] = (None, None)
    group: int | None = None
    problem: str = ""
    tag: str = ""
    stop: str = ""
    kept: str = ""
    text: str = ""
    errors: bool = False

    def passes(self, one: Row) -> bool:
        return (
            _between(one["reward"], self.reward)
            and _between(one["length"], self.length)
            and (self.group is None or one["group"] == self.group)
            and (not self.problem or one["problem_id"] == self.problem)
            and (not self.tag or self.tag in one["tags"])
            and (not self.stop or self.stop in (one["stop_reason"], one["ended"]))
            and (not self.kept or (one["discarded"] is not None) == (self.kept == "discarded"))
            and (not self.text or self.text.casefold() in f"{one['prompt']}\n{one['text']}".casefold())
            and (not self.errors or bool(one["tool_errors"] or one["error"]))
        )


def table(
    run: Index,
    one: Iteration,
    chosen: Filter,
    sort: str = "index",
    down: bool = False,
    first: int = 0,
    count: int = 200,
) -> Row:
    """Return an iteration: the histogram of its rewards, its groups as strips, and the rollouts that pass, sorted.

    Raises UsageError for a sort that is none.
    """
    if sort not in SORTS:
        raise UsageError(f'sort = "{sort}" is none of {", ".join(SORTS)}')
    every = rollouts_of(run, one)
    passing = [each for each in every if chosen.passes(each)]
    ordered = _sorted(passing, sort, down)
    return {
        "about": one.as_json(),
        "histogram": rewards([each["reward"] for each in every]),
        "groups": _groups(every),
        "stops": sorted({str(each[key]) for each in every for key in ("stop_reason", "ended") if each[key]}),
        "tags": sorted({tag for each in every for tag in each["tags"]}),
        "correct": rate_of(sum(bool(each["correct"]) for each in every), len(every)),
        "total": len(every),
        "passing": len(passing),
        "rollouts": [each | _excerpts(each, chosen.text) for each in ordered[first : first + count]],
    }


def _sorted(rows: Sequence[Row], sort: str, down: bool) -> list[Row]:
    """Sort rows; those without the number come last."""
    known = [row for row in rows if SORTS[sort](row) is not None]
    return sorted(known, key=SORTS[sort], reverse=down) + [row for row in rows if SORTS[sort](row) is None]


def searched(
    runs: Mapping[str, Index], chosen: Filter, split: str, sort: str, down: bool, first: int, count: int, end: float
) -> Row:
    """Return the rollouts of all iterations of runs, by place, that pass: at most ``count`` of those found until
    ``end`` (of the monotonic clock), from the ``first`` iteration on, the newest being 0.

    Sorted by ``NEWEST``, the search ends where enough are found; by a number, it looks for the largest. ``next`` is the
    iteration at which another search goes on, None where all ``of`` them were looked at. ``split`` "" is all.
    """
    iterations = [
        (one.number, place, one)
        for place, index in runs.items()
        for one in index.refresh().values()
        if split in ("", one.split)
    ]
    iterations.sort(key=lambda each: (-each[0], each[1]))
    found: list[Row] = []
    passing, at = 0, first
    while at < len(iterations) and (at == first or time.monotonic() < end) and (sort != NEWEST or len(found) < count):
        _, place, one = iterations[at]
        hits = [each for each in rollouts_of(runs[place], one) if chosen.passes(each)]
        about = {"place": place, "split": one.split, "iteration": one.number}
        found += [about | each | _excerpts(each, chosen.text) for each in hits]
        passing, at = passing + len(hits), at + 1
        if sort != NEWEST:
            found = _sorted(found, sort, down)[:count]
    return {
        "rollouts": found, "passing": passing, "searched": at, "of": len(iterations),
        "next": at if at < len(iterations) else None,
    }  # fmt: skip


def _groups(every: Sequence[Row]) -> list[Row]:
    found: dict[int, Row] = {}
    for one in every:
        empty = {"problem_id": one["problem_id"], "tags": one["tags"], "discarded": one["discarded"], "samples": []}
        own = found.setdefault(one["group"], {"group": one["group"], **empty})
        own["samples"].append({key: one[key] for key in ("index", "reward", "correct", "advantage", "length")})
    for own in found.values():
        own["correct"] = rate_of(sum(bool(each["correct"]) for each in own["samples"]), len(own["samples"]))
    return list(found.values())


def rollout_in(run: Index, one: Iteration, index: int) -> Row:
    """Return one rollout as ``shown_tokens`` or, where its tokens were not recorded, as ``shown_text``, and the others
    of its group in short. Raises UsageError where there is no such rollout."""
    if (tokens := run.tokens(one)) is not None:
        with tokens as file:
            if not 0 <= index < len(file):
                raise UsageError(f"{one.name} has {len(file)} rollouts, counted from 0: there is no {index}")
            found = file.rollout(index)
            beside = file.of_group(found.line["group"])
            siblings = [
                {"index": i, "sample": line["sample"], "reward": line["reward"], "correct": line["correct"]}
                for i, line in zip(beside, file.lines(beside.start, beside.stop), strict=True)
            ]
        return {"about": one.as_json(), "siblings": siblings} | shown_tokens(found)
    every = rollouts_of(run, one)
    if not 0 <= index < len(every):
        raise UsageError(f"{one.name} has {len(every)} rollouts, counted from 0: there is no {index}")
    chosen = every[index]
    siblings = [
        {key: each[key] for key in ("index", "sample", "reward", "correct")}
        for each in every
        if each["group"] == chosen["group"]
    ]
    return {"about": one.as_json(), "siblings": siblings} | shown_text(chosen)


NUMBERS = (
    "surprisal", "entropy", "advantage", "credit", "mismatch", "planning", "trained", "version", "value", "target",
)  # fmt: skip
"""Numbers that tokens can be coloured by, in the order of the page's choices."""
LEAST_DIFFERENCE = 2e-6


def shown_tokens(found: RolloutTokens) -> Row:
    """Return a rollout and, for each sampled token, its text (``pieces``, turn by turn) and ``numbers`` [T]:

    ``surprisal`` −log π of the sampler (nats); ``entropy``; ``advantage``, what it trains with; ``credit``, by how much
    that differs from the advantage of the rollout (or turn); ``mismatch``, trainer minus sampler log-probability;
    ``planning``, ``trained`` 0 or 1; ``version`` of the weights; ``value`` and ``target`` of a critic. Only what was
    recorded is there.
    """
    arrays, line = found.arrays, found.line
    numbers: dict[str, np.ndarray] = {"surprisal": -arrays["logprobs"]}
    renamed = {"entropy": "entropy", "advantages": "advantage", "planning": "planning", "trained": "trained"}
    renamed |= {"versions": "version", "values": "value", "value_targets": "target"}
    numbers |= {name: arrays[key] for key, name in renamed.items() if key in arrays}
    if "advantages" in arrays and line["advantage"] is not None:
        own = line["turn_advantages"] or [line["advantage"]] * len(line["turns"])
        lengths = [turn["tokens"] for turn in line["turns"]]
        numbers["credit"] = arrays["advantages"] - np.repeat(np.array(own, np.float64), lengths)
    if "trainer_logprobs" in arrays:
        numbers["mismatch"] = arrays["trainer_logprobs"] - arrays["logprobs"]
    for name in {"credit", "mismatch"} & numbers.keys():  # Differences of float32 numbers that are rounding alone
        numbers[name] = np.where(np.abs(numbers[name]) < LEAST_DIFFERENCE, 0.0, numbers[name])
    known = [name for name in NUMBERS if name in numbers and np.isfinite(numbers[name]).any()]
    shown = {name: plain(numbers[name]) for name in known}
    return {"prompt": found.prompt, "line": line, "pieces": found.pieces(), "numbers": shown}


def shown_text(row: Row) -> Row:
    """Return a rollout without recorded tokens in the form of ``shown_tokens``."""
    turn = {"messages": [], "text": row["text"], "tokens": row["length"], "stop_reason": row["stop_reason"]}
    prompt = {"problem_id": row["problem_id"], "tags": row["tags"], "messages": [], "reference": None}
    return {"prompt": prompt, "line": row | {"turns": [turn]}, "pieces": None, "numbers": {}}


def _excerpts(one: Row, search: str) -> Row:
    """Return the answer as the table shows it, around what was searched for; the prompt only where that is in it."""
    at_prompt, at_text = (one[key].casefold().find(search.casefold()) for key in ("prompt", "text"))
    prompt = _around(one["prompt"], at_prompt) if search and at_prompt >= 0 else None
    return {"prompt": prompt, "text": _around(one["text"], at_text) if search and at_text >= 0 else _short(one["text"])}


def _around(text: str, at: int) -> str:
    begin = max(0, at - AROUND)
    return f"{'[…] ' * (begin > 0)}{text[begin : begin + SHOWN]}{' […]' * (begin + SHOWN < len(text))}"


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN * 2 // 3]} […] {text[-SHOWN // 3 :]}"


def _between(value: float | None, ends: tuple[float | None, float | None]) -> bool:
    low, high = ends
    if value is None:
        return low is None and high is None
    return (low is None or value >= low) and (high is None or value <= high)
