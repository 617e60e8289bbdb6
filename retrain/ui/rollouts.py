"""Return rollouts as the page shows them: a table to sort and filter, groups as strips, one rollout token by token."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from retrain.errors import UsageError
from retrain.records.histograms import rewards
from retrain.records.schema.base import Row
from retrain.records.tokens import RolloutTokens
from retrain.ui.answers import JsonObject, plain
from retrain.ui.iterations import Index, IterationEntry, rollouts_of
from retrain.ui.rates import rate_of

NEWEST = "newest"
EXCERPT = 400  # Characters of a text in the table
AROUND = 30  # Characters of an excerpt before the search text
SORTS: Mapping[str, Callable[[Row], Any]] = {
    **{key: itemgetter(key) for key in ("index", "reward", "advantage", "length", "turns")},
    "errors": lambda rollout: rollout["tool_errors"] + bool(rollout["error"]),
}


@dataclass(frozen=True)
class Filter:
    """Conditions that rollouts of an iteration must meet; None and "" accept all.

    ``use``: "discarded" or "trained"; ``stop``: a stop reason, or why the episode ended; ``text``: part of the prompt
    or answer, in any case; ``errors``: only rollouts with a failed tool call or an error of grading; ``reward`` and
    ``length``: least and largest value, both included.
    """

    reward: tuple[float | None, float | None] = (None, None)
    length: tuple[float | None, float | None] = (None, None)
    group: int | None = None
    problem: str = ""
    tag: str = ""
    stop: str = ""
    use: str = ""
    text: str = ""
    errors: bool = False

    def passes(self, rollout: Row) -> bool:
        values = (
            (self.group, (rollout["group"],)),
            (self.problem, (rollout["problem_id"],)),
            (self.tag, rollout["tags"]),
            (self.stop, (rollout["stop_reason"], rollout["ended"])),
            (self.use, ("trained" if rollout["discarded"] is None else "discarded",)),
        )
        return (
            _between(rollout["reward"], self.reward)
            and _between(rollout["length"], self.length)
            and all(chosen in (None, "") or chosen in present for chosen, present in values)
            and (not self.text or self.text.casefold() in f"{rollout['prompt']}\n{rollout['text']}".casefold())
            and (not self.errors or bool(rollout["tool_errors"] or rollout["error"]))
        )


def table(
    run: Index, iteration: IterationEntry, chosen: Filter, sort: str, down: bool, first: int, count: int
) -> JsonObject:
    every = rollouts_of(run, iteration)
    passing = [each for each in every if chosen.passes(each)]
    ordered = _sorted(passing, sort, down)
    return {
        "about": iteration.as_json(),
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
    known = [row for row in rows if SORTS[sort](row) is not None]
    return sorted(known, key=SORTS[sort], reverse=down) + [row for row in rows if SORTS[sort](row) is None]


def searched(
    runs: Mapping[str, Index], chosen: Filter, split: str, sort: str, down: bool, first: int, count: int, end: float
) -> JsonObject:
    """Return the rollouts of all iterations of ``runs`` (by location) that pass ``chosen``. The search begins at the
    ``first`` iteration (the newest is 0) and stops at ``end`` of the monotonic clock.

    Sorted by ``NEWEST``, it also stops after the iteration in which ``count`` rollouts are reached; with another
    ``sort``, it returns the first ``count`` in that order. ``next``: iteration at which to continue, None after the
    last. ``split``: "" for all.
    """
    iterations = [
        (location, iteration)
        for location, index in runs.items()
        for iteration in index.refresh().values()
        if split in ("", iteration.split)
    ]
    iterations.sort(key=lambda each: (-each[1].number, each[0]))
    hits: list[Row] = []
    passing, at = 0, first
    while at < len(iterations) and (at == first or time.monotonic() < end) and (sort != NEWEST or len(hits) < count):
        location, iteration = iterations[at]
        rollouts = [each for each in rollouts_of(runs[location], iteration) if chosen.passes(each)]
        about = {"place": location, "split": iteration.split, "iteration": iteration.number}
        hits += [about | each | _excerpts(each, chosen.text) for each in rollouts]
        passing, at = passing + len(rollouts), at + 1
        if sort != NEWEST:
            hits = _sorted(hits, sort, down)[:count]
    return {
        "rollouts": hits, "passing": passing, "searched": at, "of": len(iterations),
        "next": at if at < len(iterations) else None,
    }  # fmt: skip


def _groups(rollouts: Sequence[Row]) -> list[Row]:
    groups: dict[int, Row] = {}
    for rollout in rollouts:
        about = {key: rollout[key] for key in ("group", "problem_id", "tags", "discarded")}
        group = groups.setdefault(rollout["group"], about | {"samples": []})
        group["samples"].append({key: rollout[key] for key in ("index", "reward", "correct", "advantage", "length")})
    for group in groups.values():
        group["correct"] = rate_of(sum(bool(each["correct"]) for each in group["samples"]), len(group["samples"]))
    return list(groups.values())


def rollout_in(run: Index, iteration: IterationEntry, index: int) -> JsonObject:
    """Return one rollout as ``shown_tokens``, or as ``shown_text`` if its tokens were not recorded, and a summary of
    its group (``siblings``). Raises UsageError if there is no such rollout."""
    if (tokens := run.tokens(iteration)) is not None:
        with tokens as file:
            _check_index(iteration, index, len(file))
            rollout = file.rollout(index)
            group = file.of_group(rollout.line["group"])
            lines = file.lines(group.start, group.stop)
            siblings = [_sibling(line | {"index": i}) for i, line in zip(group, lines, strict=True)]
        return {"about": iteration.as_json(), "siblings": siblings} | shown_tokens(rollout)
    every = rollouts_of(run, iteration)
    _check_index(iteration, index, len(every))
    siblings = [_sibling(each) for each in every if each["group"] == every[index]["group"]]
    return {"about": iteration.as_json(), "siblings": siblings} | shown_text(every[index])


def _check_index(iteration: IterationEntry, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise UsageError(f"{iteration.name} has {count} rollouts, counted from 0: there is no {index}")


def _sibling(rollout: Row) -> JsonObject:
    return {key: rollout[key] for key in ("index", "sample", "reward", "correct")}


# In the order of the page's choices.
NUMBERS = (
    "surprisal", "entropy", "advantage", "credit", "mismatch", "planning", "trained", "version", "value", "target",
)  # fmt: skip
LEAST_DIFFERENCE = 2e-6


def shown_tokens(rollout: RolloutTokens) -> Row:
    """Return a rollout and, for each sampled token, its text (``pieces``, turn by turn) and the recorded ``numbers``
    [T]:

    ``surprisal`` −log π of the sampler (nats); ``entropy``; ``advantage`` that the token trains with; ``credit``, its
    difference from the advantage of the rollout (or turn); ``mismatch``, trainer minus sampler log-probability;
    ``planning``, ``trained`` 0 or 1; ``version`` of the weights; ``value`` and ``target`` of a critic.
    """
    arrays, line = rollout.arrays, rollout.line
    numbers: dict[str, np.ndarray] = {"surprisal": -arrays["logprobs"]}
    renamed = {"entropy": "entropy", "advantages": "advantage", "planning": "planning", "trained": "trained"}
    renamed |= {"versions": "version", "values": "value", "value_targets": "target"}
    numbers |= {name: arrays[key] for key, name in renamed.items() if key in arrays}
    if "advantages" in arrays and line["advantage"] is not None:
        by_turn = line["turn_advantages"] or [line["advantage"]] * len(line["turns"])
        lengths = [turn["tokens"] for turn in line["turns"]]
        numbers["credit"] = arrays["advantages"] - np.repeat(np.array(by_turn, np.float64), lengths)
    if "trainer_logprobs" in arrays:
        numbers["mismatch"] = arrays["trainer_logprobs"] - arrays["logprobs"]
    for name in {"credit", "mismatch"} & numbers.keys():  # smaller differences of float32 numbers are rounding
        numbers[name] = np.where(np.abs(numbers[name]) < LEAST_DIFFERENCE, 0.0, numbers[name])
    recorded = [name for name in NUMBERS if name in numbers and np.isfinite(numbers[name]).any()]
    return {"prompt": rollout.prompt, "line": line, "pieces": rollout.pieces(),
            "numbers": {name: plain(numbers[name]) for name in recorded}}  # fmt: skip


def shown_text(row: Row) -> Row:
    turn = {"messages": [], "text": row["text"], "tokens": row["length"], "stop_reason": row["stop_reason"]}
    prompt = {"problem_id": row["problem_id"], "tags": row["tags"], "messages": [], "reference": None}
    return {"prompt": prompt, "line": row | {"turns": [turn]}, "pieces": None, "numbers": {}}


def _excerpts(rollout: Row, search: str) -> Row:
    """Return excerpts around the search text. Without a hit, ``prompt`` is None and ``text`` the shortened answer."""
    text = rollout["text"]
    short = text if len(text) <= EXCERPT else f"{text[: EXCERPT * 2 // 3]} […] {text[-EXCERPT // 3 :]}"
    return {"prompt": _around(rollout["prompt"], search), "text": _around(text, search) or short}


def _around(text: str, search: str) -> str | None:
    at = text.casefold().find(search.casefold()) if search else -1
    if at < 0:
        return None
    begin = max(0, at - AROUND)
    return f"{'[…] ' * (begin > 0)}{text[begin : begin + EXCERPT]}{' […]' * (begin + EXCERPT < len(text))}"


def _between(value: float | None, ends: tuple[float | None, float | None]) -> bool:
    low, high = ends
    if value is None:
        return low is None and high is None
    return (low is None or value >= low) and (high is None or value <= high)
