"""Compare held-out problems across conditions: solve rates, their changes, and one prompt under two conditions."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import numpy as np

from retrain.errors import UsageError, plural
from retrain.files import Stamp, stamp_of
from retrain.maths.statistics import holm, sign_flip_p
from retrain.records.schema.base import Row
from retrain.records.schema.layout import EVALUATIONS, ITERATIONS
from retrain.ui.answers import JsonObject
from retrain.ui.differences import compared
from retrain.ui.iterations import Index, IterationEntry, rollouts_of
from retrain.ui.rates import Rate, rate_of
from retrain.ui.rollouts import shown_text, shown_tokens
from retrain.ui.sources import Home

MOST_PROMPT = 300
MOST_MATRICES = 2  # Matrices that are cached; a large set with ten conditions takes tens of megabytes
ALPHA = 0.05
FEW = 20  # Fewest problems of which a percentage means something
WHEN = ("before", "after")

Key = TypeVar("Key", bound=Hashable)
Runs = Mapping[str, Sequence[Index]]  # The runs of a campaign by condition, the baseline first
Scores = dict[str, list[int]]  # [correct, answers] of every problem in one evaluation
EvaluatedRun = tuple[Index, IterationEntry, IterationEntry | None]  # With its first and its last evaluation
ChosenRuns = dict[str, tuple[str, list[tuple[Index, list[IterationEntry]]]]]  # By condition, with all evaluations


@dataclass(frozen=True)
class Pair:
    """One run's scores before and after training. ``draw``: hash of the answers before training, equal for runs that
    share these answers."""

    before: Scores
    after: Scores
    draw: int

    def at(self, when: str) -> Scores:
        return self.before if when == "before" else self.after


PairsBySeed = Mapping[int | None, Pair]
Pairs = Mapping[str, PairsBySeed]  # By condition


@dataclass(frozen=True)
class Matrix:
    """Solve rates of problems. ``rows``: every problem with its rates by condition; ``facts``: the parts of
    ``/api/problems`` that concern all problems."""

    facts: JsonObject
    rows: Sequence[Row]

    def selection(
        self, sort: str = "differ", tag: str = "", text: str = "", first: int = 0, count: int = 200
    ) -> JsonObject:
        """Return the matching problems by ``sort``: "differ" (largest difference of conditions), "worse" (least p of
        getting worse, then largest fall), "better" (largest rise), "hard" (least solved), "problem" (unsorted)."""
        rows = [
            row for row in self.rows
            if (not tag or tag in row["tags"]) and text.casefold() in f"{row['id']}\n{row['prompt']}".casefold()
        ]  # fmt: skip
        rows.sort(key=SORTS[sort])
        return self.facts | {"total": len(rows), "problems": rows[first : first + count]}


def matrix(
    runs: Runs, held_out: str, unfinished: Collection[Path] = (), seeds: Mapping[Path, int | None] | None = None
) -> Matrix:
    """Return solve rates of every problem under every condition, before and after training, over the finished seeds.

    ``unfinished``: directories of runs that are not finished. If a condition has no finished run, all of its runs
    count, and the rates after training of every condition are those at the last step at which all runs were evaluated.
    ``seeds``: seeds by directory of a run; runs without a seed are paired in their order.
    """
    evaluated, common = _evaluated_runs(runs, held_out, unfinished)
    problems: dict[str, Row] = {}
    pairs, steps, taken = {}, {}, {}
    for label, (of, of_label) in evaluated.items():
        pairs[label] = {
            (seeds or {}).get(run.run, number): _pair(run, held_out, before, after, problems)
            for number, (run, before, after) in enumerate(of_label)
        }
        firsts = sorted({before.number for _, before, _ in of_label})
        lasts = sorted({after.number for _, _, after in of_label if after})
        steps[label] = [firsts[0], (lasts or firsts)[-1]]
        taken[label] = {"runs": len(of_label), "of": of, "before": firsts, "after": lasts}
    rows = [problem | {"rates": _rates(pairs, name)} for name, problem in problems.items()]
    facts: JsonObject = {
        "set": held_out,
        "conditions": list(evaluated),
        "steps": steps,
        "taken": taken,
        "common": common,
        "of_tag": dict(sorted(Counter(tag for row in rows for tag in row["tags"]).items())),
        "overall": {label: {when: _overall(each.values(), when) for when in WHEN} for label, each in pairs.items()},
        "few": len(rows) < FEW,
        "tests": _tested(pairs, rows),
    }
    return Matrix(facts, rows)


def matrix_of(home: Home, runs: Runs, held_out: str) -> Matrix:
    """Return the matrix of a campaign; it is computed again only after an evaluation or the end of a run."""
    unfinished = frozenset(run.path for run in home.runs if run.state != "done")
    indices = tuple((label, tuple(of_label)) for label, of_label in runs.items())
    stamps = [stamp_of(run.file(name)) for _, each in indices for run in each for name in (ITERATIONS, EVALUATIONS)]
    with _TURN:
        return _matrix(indices, held_out, unfinished, tuple((run.path, run.seed) for run in home.runs), tuple(stamps))


_TURN = Lock()  # Requests that come while a matrix is computed wait for it instead of computing it too


@lru_cache(MOST_MATRICES)
def _matrix(
    runs: tuple[tuple[str, tuple[Index, ...]], ...], held_out: str, unfinished: frozenset[Path],
    seeds: tuple[tuple[Path, int | None], ...], stamps: tuple[Stamp | None, ...],
) -> Matrix:  # fmt: skip
    return matrix(dict(runs), held_out, unfinished, dict(seeds))


def _evaluated_runs(
    runs: Runs, held_out: str, unfinished: Collection[Path]
) -> tuple[dict[str, tuple[str, list[EvaluatedRun]]], int | None]:
    """Return for each condition which runs count ("finished" ones, or "all" if none is finished), and these runs with
    their first and last evaluation (None if there is only one). If a condition has no finished run, the last evaluation
    is that of the last step at which all runs were evaluated; this step is also returned, else None."""
    chosen = _runs_that_count(runs, held_out, unfinished)
    is_unfinished = any(of == "all" for of, _ in chosen.values())
    common = _common_step(chosen) if is_unfinished else None
    ends: dict[str, tuple[str, list[EvaluatedRun]]] = {}
    for label, (of, pairs) in chosen.items():
        of_label: list[EvaluatedRun] = []
        for run, (first, *rest) in pairs:
            last = [each for each in rest if not is_unfinished or each.number == common]
            of_label.append((run, first, last[-1] if last else None))
        ends[label] = of, [each for each in of_label if each[2]] or of_label  # both rates need the same seeds
    return ends, common


def _common_step(chosen: ChosenRuns) -> int | None:
    """Return the last step, after the first evaluation, at which all runs that have such steps were evaluated."""
    later = [{each.number for each in evaluations[1:]} for _, pairs in chosen.values() for _, evaluations in pairs]
    return max(set.intersection(*filter(None, later)), default=None) if any(later) else None


def _runs_that_count(runs: Runs, held_out: str, unfinished: Collection[Path]) -> ChosenRuns:
    chosen: ChosenRuns = {}
    for label, indices in runs.items():
        evaluated = [(run, evaluations) for run in indices if (evaluations := run.of_split(f"eval/{held_out}"))]
        finished = [pair for pair in evaluated if pair[0].run not in unfinished]
        if evaluated:
            chosen[label] = ("finished", finished) if finished else ("all", evaluated)
    return chosen


def _pair(
    run: Index, held_out: str, before: IterationEntry, after: IterationEntry | None, problems: dict[str, Row]
) -> Pair:
    scores: dict[int, Scores] = {0: {}, 1: {}}
    draw = 0
    for when, evaluation in enumerate((before, after)):
        for _, answer in _answers(run, held_out, [evaluation] if evaluation else []):
            name = str(answer.get("problem_id"))
            prompt = str(answer.get("prompt", ""))[:MOST_PROMPT]
            problems.setdefault(name, {"id": name, "prompt": prompt, "tags": answer.get("tags") or []})
            _add(scores[when], name, answer)
            if evaluation is before:
                draw ^= hash((name, scores[when][name][1], answer.get("completion")))
    return Pair(scores[0], scores[1], draw)


def _add(scores: dict[Key, list[int]], key: Key, answer: Row) -> None:
    cell = scores.setdefault(key, [0, 0])
    cell[0] += bool(answer.get("correct"))
    cell[1] += 1


def _rates(pairs: Pairs, name: str) -> JsonObject:
    rates: JsonObject = {}
    for label, of_label in pairs.items():
        counts = {when: [pair.at(when).get(name, (0, 0)) for pair in of_label.values()] for when in WHEN}
        ends = {when: rate_of(sum(c for c, _ in each), sum(n for _, n in each)) for when, each in counts.items()}
        rates[label] = {"rates": ends, "tests": {}}
    return rates


def _overall(pairs: Collection[Pair], when: str) -> Rate:
    """Return the mean accuracy over runs, with the interval of a rate over the number of problems."""
    means = [np.mean([c / n for c, n in scores.values()]) for pair in pairs if (scores := pair.at(when))]
    problems = max((len(pair.at(when)) for pair in pairs), default=0)
    return rate_of(float(np.mean(means)) * problems, problems) if means else rate_of(0, 0)


def _tested(pairs: Pairs, rows: Sequence[Row]) -> list[Row]:
    tests = []
    baseline = next(iter(pairs), None)
    for label, of_label in pairs.items():
        shared = len({pair.draw for pair in of_label.values()}) < len(of_label)
        first = {seed: pair.before for seed, pair in of_label.items()}
        tests.append(_test(label, "before", of_label, first, rows, shared))
        if label != baseline and baseline is not None:
            others = {seed: pair.after for seed, pair in pairs[baseline].items()}
            tests.append(_test(label, "baseline", of_label, others, rows, shared=False))
    return tests


def _test(
    label: str, against: str, pairs: PairsBySeed, others: Mapping[int | None, Scores], rows: Sequence[Row], shared: bool
) -> Row:
    """Test each problem over seeds, and correct for the number of problems (Holm).

    ``shared``: all runs have the same answers before training, which retrain samples only once. They are then one draw
    to compare with the runs' answers, not one draw for each pair.
    """
    results: list[Row] = []
    for row in rows:
        result = _problem_test(row["id"], pairs, others, shared)
        if result is not None:
            row["rates"][label]["tests"][against] = result
            results.append(result)
    for result, adjusted in zip(results, holm([result["p"] for result in results]), strict=True):
        result |= {"holm": adjusted, "worse": adjusted <= ALPHA}
    runs = max((result["n"] for result in results), default=0)
    least = 1.0 / (runs + 1) if shared else 0.5**runs
    facts: Row = {
        "label": label, "against": against, "runs": runs, "problems": len(results), "shared": shared,
        "worse": sum(result["worse"] for result in results), "least_p": least,
        "least_holm": min(1.0, least * len(results)),
    }  # fmt: skip
    facts["can_show"] = facts["least_holm"] <= ALPHA
    return facts | {"words": _test_words(facts)}


def _problem_test(name: str, pairs: PairsBySeed, others: Mapping[int | None, Scores], shared: bool) -> Row | None:
    scores = [(pair.after[name], others[seed][name]) for seed, pair in pairs.items()
              if name in pair.after and name in others.get(seed, ())]  # fmt: skip
    if not scores:
        return None
    mine, its = ([correct / n for correct, n in side] for side in zip(*scores, strict=True))
    differences = [a - b for a, b in zip(mine, its, strict=True)]
    if shared and len(mine) > 1:  # p of the one draw's rank among the scores if all have one distribution
        p = sum(score >= its[0] for score in [its[0], *mine]) / (len(mine) + 1)
    else:
        p = sign_flip_p(differences)
    return {"change": float(np.mean(differences)), "n": len(scores), "p": p}


def _test_words(test: Row) -> str:
    than = "than before training" if test["against"] == "before" else "than under the baseline"
    if not test["problems"]:
        return f"{test['label']}: no problem was answered {test['against']} and after training in the same runs."
    worse, runs = plural(test["worse"], "problem"), plural(test["runs"], "run")
    head = f"{test['label']}: {worse} of {test['problems']} worse {than} over {runs}"
    if test["can_show"]:
        return f"{head} (p below {ALPHA:g} after Holm's correction for {plural(test['problems'], 'problem')})."
    why = " that share one draw before training" if test["shared"] else ""
    return (
        f"{head}: nothing can be shown. With {runs}{why} the least p of a problem is "
        f"{test['least_p']:.2g}, and {min(1.0, test['least_holm']):.2g} after Holm's correction."
    )


def _changes(row: Row) -> list[float]:
    ends = [[each["rates"][when]["rate"] for when in WHEN] for each in row["rates"].values()]
    return [after - before for before, after in ends if before is not None and after is not None] or [0.0]


def _after(row: Row) -> list[float]:
    rates = [each["rates"]["after"] for each in row["rates"].values()]
    return [rate["rate"] for rate in rates if rate["n"]] or [0.0]


def _least_p(row: Row) -> float:
    return min((test["p"] for each in row["rates"].values() for test in each["tests"].values()), default=1.0)


SORTS: Mapping[str, Callable[[Row], Any]] = {
    "differ": lambda row: min(_after(row)) - max(_after(row)),
    "worse": lambda row: (_least_p(row), min(_changes(row))),
    "better": lambda row: -max(_changes(row)),
    "hard": lambda row: sum(_after(row)) / len(_after(row)),
    "problem": lambda row: 0,
}


def evolutions(runs: Runs, held_out: str, only: str | None = None) -> dict[str, JsonObject]:
    """Return, by problem, its "prompt", "tags" and the "conditions": by label, the rates at every evaluation with their
    "step". ``only`` names the one problem to return. Reads each file once."""
    about: dict[str, JsonObject] = {}
    cells: dict[str, dict[str, dict[int, list[int]]]] = defaultdict(lambda: {label: {} for label in runs})
    for label, indices in runs.items():
        for run in indices:
            for evaluation, answer in _answers(run, held_out, run.of_split(f"eval/{held_out}")):
                name = str(answer.get("problem_id"))
                if only is None or name == only:
                    about.setdefault(name, {"prompt": str(answer.get("prompt", "")), "tags": answer.get("tags") or []})
                    _add(cells[name][label], evaluation.number, answer)
    evolved: dict[str, JsonObject] = {}
    for name, by_label in cells.items():
        conditions = {
            label: [{**rate_of(*cell), "step": step} for step, cell in sorted(by_step.items())]
            for label, by_step in by_label.items() if by_step
        }  # fmt: skip
        evolved[name] = {"set": held_out, "problem": name} | about[name] | {"conditions": conditions}
    return evolved


def _answers(run: Index, held_out: str, evaluations: Sequence[IterationEntry]) -> Iterator[tuple[IterationEntry, Row]]:
    """Yield (evaluation, answer) for these evaluations. Without an index, reads the file once from its beginning."""
    missing = {one.number: one for one in evaluations if one.lines is None}
    for evaluation in evaluations:
        if evaluation.lines is not None:
            yield from ((evaluation, row) for row in run.completions(EVALUATIONS, *evaluation.lines))
    if missing:
        for row in run.completions(EVALUATIONS):
            if row.get("name") == held_out and row.get("step") in missing:
                yield missing[row["step"]], row


def same_prompt(
    a: tuple[Index, IterationEntry], b: tuple[Index, IterationEntry], problem: str, sample: int = 0
) -> JsonObject:
    """Return one problem's rollouts in two iterations: both with their tokens, the words in which they differ (lines
    for long texts, see ``by``), and the first token that differs. Raises UsageError if one has no such rollout."""
    sides = [_sample(run, iteration, problem, sample) for run, iteration in (a, b)]
    one, other = ("\n".join(turn["text"] for turn in side["line"]["turns"]) for side in sides)
    *words, changes, by = compared(one, other)
    fork = _first_difference(sides[0]["pieces"], sides[1]["pieces"])
    return {"a": sides[0], "b": sides[1], "words": words, "changes": changes, "by": by, "diverge": fork}


def _sample(run: Index, iteration: IterationEntry, problem: str, sample: int) -> Row:
    if (tokens := run.tokens(iteration)) is not None:
        with tokens as file:
            indices = [i for group in run.groups(iteration, problem) for i in file.of_group(group)]
            shown = [shown_tokens(file.rollout(i)) for i in indices[sample : sample + 1]]
    else:
        rows = [row for row in rollouts_of(run, iteration) if row["problem_id"] == problem]
        indices = [row["index"] for row in rows]
        shown = [shown_text(row) for row in rows[sample : sample + 1]]
    if not shown:
        raise UsageError(f"{iteration.name} of {run.run.name} has no sample {sample} of problem {problem!r}")
    return {"about": iteration.as_json(), "samples": len(indices), "index": indices[sample]} | shown[0]


def _first_difference(a: Sequence[list[str]] | None, b: Sequence[list[str]] | None) -> list[int] | None:
    """Return [turn, token] of the first token at which two rollouts differ; None if the turns that both have are equal,
    or their tokens are not recorded."""
    for turn, (mine, its) in enumerate(zip(a or (), b or (), strict=False)):
        least = min(len(mine), len(its))
        token = next((i for i in range(least) if mine[i] != its[i]), least)
        if token < max(len(mine), len(its)):
            return [turn, token]
    return None
