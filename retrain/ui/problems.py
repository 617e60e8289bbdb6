"""Held-out problems × conditions: who solves what, how that has changed, and the same prompt under two conditions."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from retrain.errors import UsageError, plural
from retrain.files import stamp_of
from retrain.maths.statistics import holm, sign_flip_p
from retrain.records.schema.base import Row
from retrain.records.schema.layout import EVALUATIONS, ITERATIONS
from retrain.ui.differences import compared
from retrain.ui.iterations import Index, Iteration, rollouts_of
from retrain.ui.rates import rate_of
from retrain.ui.rollouts import shown_text, shown_tokens

MOST_PROMPT = 300
KEPT = 2  # Matrices that are kept: of a large set with ten conditions one takes tens of megabytes
ALPHA = 0.05
FEW = 20  # Problems below which a percentage of them says nothing

Runs = Mapping[str, Sequence[Index]]  # The runs of a campaign by condition, the baseline first
Scores = dict[str, list[int]]  # [correct, answers] of every problem in one evaluation


@dataclass(frozen=True)
class EvaluatedRuns:
    """The runs of a condition, each with its first and its last evaluation, None without a second one. ``of`` is
    "finished", or "all" while none is."""

    runs: Sequence[tuple[Index, Iteration, Iteration | None]]
    of: str

    def numbers(self, when: int) -> list[int]:
        """Return the steps of the evaluations before (1) or after (2), each once."""
        return sorted({one.number for each in self.runs if isinstance(one := each[when], Iteration)})

    def as_json(self) -> Row:
        return {"runs": len(self.runs), "of": self.of, "before": self.numbers(1), "after": self.numbers(2)}


@dataclass(frozen=True)
class Pair:
    """One run's scores before and after training; ``draw`` is the same for runs that share the answers before."""

    before: Scores
    after: Scores
    draw: int


@dataclass(frozen=True)
class Matrix:
    """Every problem with its rates by condition, in the order in which the problems came."""

    held_out: str
    evaluated: Mapping[str, EvaluatedRuns]
    common: int | None
    rows: Sequence[Row]
    overall: Mapping[str, Row]
    tests: Sequence[Row]

    def shown(self, sort: str = "differ", tag: str = "", text: str = "", first: int = 0, count: int = 200) -> Row:
        """Return the problems that pass, sorted: "differ" (most between conditions after training), "worse" (least p of
        having got worse, then the largest fall), "better", "hard" (least solved), "problem" (as they come). Raises
        UsageError for another."""
        if sort not in SORTS:
            raise UsageError(f'sort = "{sort}" is none of {", ".join(SORTS)}')
        wanted = text.casefold()
        rows = [
            row for row in self.rows
            if (not tag or tag in row["tags"]) and wanted in f"{row['id']}\n{row['prompt']}".casefold()
        ]  # fmt: skip
        rows.sort(key=SORTS[sort])
        numbers = {label: (own.numbers(1), own.numbers(2)) for label, own in self.evaluated.items()}
        steps = {label: [before[0], (after or before)[-1]] for label, (before, after) in numbers.items()}
        tags = Counter(each for row in self.rows for each in row["tags"])
        return {
            "set": self.held_out,
            "conditions": list(self.evaluated),
            "steps": steps,
            "taken": {label: own.as_json() for label, own in self.evaluated.items()},
            "common": self.common,
            "of_tag": dict(sorted(tags.items())),
            "overall": self.overall,
            "few": len(self.rows) < FEW,
            "tests": self.tests,
            "total": len(rows),
            "problems": rows[first : first + count],
        }


def matrix(
    runs: Runs, held_out: str, unfinished: Collection[Path] = (), seeds: Mapping[Path, int | None] | None = None
) -> Matrix:
    """Return solve rates of every problem under every condition, before and after training, over the finished seeds.

    ``unfinished`` are the directories of runs that are to train further. A condition without a finished run is shown
    by all of its runs; then every condition is taken at the last step that all runs have in common. ``seeds`` are those
    of the runs' directories; runs without one are paired in their order.
    """
    evaluated, common = _evaluated_runs(runs, held_out, unfinished)
    problems: dict[str, Row] = {}
    pairs = {
        label: {
            (seeds or {}).get(run.run, number): _pair(run, held_out, before, after, problems)
            for number, (run, before, after) in enumerate(own.runs)
        }
        for label, own in evaluated.items()
    }
    rows = [problem | {"rates": _rates(pairs, name)} for name, problem in problems.items()]
    overall = {label: {when: _overall(own.values(), when) for when in WHEN} for label, own in pairs.items()}
    return Matrix(held_out, evaluated, common, rows, overall, _tested(pairs, rows))


class Matrices:
    """The matrices that were asked for last, made anew where a file of their runs has changed."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[Any, Matrix]] = OrderedDict()
        self._lock = Lock()

    def of(
        self, name: str, runs: Runs, held_out: str, unfinished: Collection[Path], seeds: Mapping[Path, int | None]
    ) -> Matrix:
        """Return that of the campaign of this name."""
        files = (ITERATIONS, EVALUATIONS)
        state = [(label, run.run, run.run in unfinished, *(stamp_of(run.file(file)) for file in files))
                 for label, own in runs.items() for run in own]  # fmt: skip
        with self._lock:
            stamp, found = self._kept.get((name, held_out), (None, None))
            if found is None or stamp != state:
                found = matrix(runs, held_out, unfinished, seeds)
                self._kept[name, held_out] = state, found
            self._kept.move_to_end((name, held_out))
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return found


def _evaluated_runs(
    runs: Runs, held_out: str, unfinished: Collection[Path]
) -> tuple[dict[str, EvaluatedRuns], int | None]:
    """Return the evaluations that each condition is shown by, and the common step, where all are shown at it."""
    evaluated = {
        label: [(run, evaluations) for run in own if (evaluations := _evaluations(run, held_out))]
        for label, own in runs.items()
    }
    finished = {label: [each for each in own if each[0].run not in unfinished] for label, own in evaluated.items()}
    chosen = {label: finished[label] or own for label, own in evaluated.items() if own}
    is_finished = all(finished[label] for label in chosen)
    common = None
    if not is_finished:
        steps = [{one.number for one in later} for own in chosen.values() for _, (_, *later) in own if later]
        common = max(set.intersection(*steps), default=None) if steps else None
    ends = {}
    for label, own in chosen.items():
        pairs = []
        for run, (first, *later) in own:
            at_common = (one for one in later if one.number == common)
            pairs.append((run, first, next(at_common, None) if not is_finished else (later or [None])[-1]))
        # Rates before and after are of the same seeds.
        of = "finished" if finished[label] else "all"
        ends[label] = EvaluatedRuns([each for each in pairs if each[2]] or pairs, of)
    return ends, common


def _pair(run: Index, held_out: str, before: Iteration, after: Iteration | None, problems: dict[str, Row]) -> Pair:
    """Return a run's scores, and add the problems that it has answered to ``problems``."""
    scores: tuple[Scores, Scores] = {}, {}
    draw = 0
    for when, one in enumerate((before, after)):
        for _, answer in _answers(run, held_out, [one] if one is not None else []):
            name = str(answer.get("problem_id"))
            prompt = str(answer.get("prompt", ""))[:MOST_PROMPT]
            problems.setdefault(name, {"id": name, "prompt": prompt, "tags": answer.get("tags") or []})
            cell = scores[when].setdefault(name, [0, 0])
            cell[0] += bool(answer.get("correct"))
            cell[1] += 1
            if not when:
                draw ^= hash((name, cell[1], answer.get("completion")))
    return Pair(*scores, draw)


Pairs = Mapping[str, Mapping[int | None, Pair]]  # By condition and seed
WHEN = ("before", "after")


def _rates(pairs: Pairs, name: str) -> dict[str, Row]:
    """Return a problem's rates by condition over all runs, with their intervals."""
    found = {}
    for label, own in pairs.items():
        counts = [[getattr(pair, when).get(name, (0, 0)) for pair in own.values()] for when in WHEN]
        before, after = (rate_of(sum(c for c, _ in each), sum(n for _, n in each)) for each in counts)
        found[label] = {"rates": {"before": before, "after": after}, "tests": {}}
    return found


def _overall(pairs: Collection[Pair], when: str) -> Row:
    """Return the mean accuracy over runs, with the interval of so many problems."""
    means = [np.mean([c / n for c, n in scores.values()]) for pair in pairs if (scores := getattr(pair, when))]
    problems = max((len(getattr(pair, when)) for pair in pairs), default=0)
    return rate_of(float(np.mean(means)) * problems, problems) if means else rate_of(0, 0)


def _tested(pairs: Pairs, rows: Sequence[Row]) -> list[Row]:
    """Test for every condition which problems got worse than before, and than under the baseline; the p of each problem
    go into ``rows``. Return what each of these tests can show."""
    tests = []
    baseline = next(iter(pairs), None)
    for label, own in pairs.items():
        shared = len({pair.draw for pair in own.values()}) < len(own)
        first = {seed: pair.before for seed, pair in own.items()}
        tests.append(_test(label, "before", own, first, rows, shared))
        if label != baseline and baseline is not None:
            others = {seed: pair.after for seed, pair in pairs[baseline].items()}
            tests.append(_test(label, "baseline", own, others, rows, shared=False))
    return tests


def _test(
    label: str, against: str, own: Mapping[int | None, Pair], others: Mapping[int | None, Scores], rows: Sequence[Row],
    shared: bool,
) -> Row:  # fmt: skip
    """Test each problem over seeds, and correct for the number of problems (Holm).

    ``shared``: one set of answers before training serves all runs, as retrain samples it. It is then one draw among
    the runs' answers, and not one for each pair.
    """
    found: list[tuple[Row, Row]] = []
    for row in rows:
        pairs = [(pair.after[row["id"]], others[seed][row["id"]]) for seed, pair in own.items()
                 if row["id"] in pair.after and row["id"] in others.get(seed, ())]  # fmt: skip
        if pairs:
            mine, its = ([correct / n for correct, n in side] for side in zip(*pairs, strict=True))
            differences = [a - b for a, b in zip(mine, its, strict=True)]
            p = _draw_p(mine, its[0]) if shared and len(mine) > 1 else sign_flip_p(differences)
            result = {"change": float(np.mean(differences)), "n": len(pairs), "p": p}
            found.append((row["rates"][label]["tests"], result))
    for (tests, result), adjusted in zip(found, holm([result["p"] for _, result in found]), strict=True):
        tests[against] = result | {"holm": adjusted, "worse": adjusted <= ALPHA}
    runs = max((result["n"] for _, result in found), default=0)
    least = 1.0 / (runs + 1) if shared else 0.5**runs
    shown = sum(tests[against]["worse"] for tests, _ in found)
    facts = {"label": label, "against": against, "runs": runs, "problems": len(found), "shared": shared, "worse": shown,
             "least_p": least, "least_holm": min(1.0, least * len(found))}  # fmt: skip
    facts["can_show"] = facts["least_holm"] <= ALPHA
    return facts | {"words": _test_words(facts)}


def _draw_p(scores: Sequence[float], draw: float) -> float:
    """Return the one-sided p that a draw is not above scores of the same distribution: its rank among them."""
    return sum(score >= draw for score in [draw, *scores]) / (len(scores) + 1)


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
"""Keys by which a matrix is sorted."""


def evolution(runs: Runs, held_out: str, problem: str) -> Row:
    """Return one problem at every evaluation: its "prompt" and "tags", and by condition its rates with their "step".
    Raises UsageError where nothing is known of it."""
    found = evolutions(runs, held_out, problem)
    if problem not in found:
        raise UsageError(f"no evaluation on {held_out} has a problem {problem!r}")
    return found[problem]


def evolutions(runs: Runs, held_out: str, only: str | None = None) -> dict[str, Row]:
    """Return that of every problem, or of ``only`` one, by its name; each file is read once."""
    about: dict[str, Row] = {}
    cells: dict[str, dict[str, dict[int, list[int]]]] = defaultdict(lambda: {label: {} for label in runs})
    for label, own in runs.items():
        for run in own:
            for one, answer in _answers(run, held_out, _evaluations(run, held_out)):
                name = str(answer.get("problem_id"))
                if only is None or name == only:
                    about.setdefault(name, {"prompt": str(answer.get("prompt", "")), "tags": answer.get("tags") or []})
                    cell = cells[name][label].setdefault(one.number, [0, 0])
                    cell[0] += bool(answer.get("correct"))
                    cell[1] += 1
    found = {}
    for name, by_label in cells.items():
        shown = {
            label: [rate_of(*cell) | {"step": step} for step, cell in sorted(own.items())]
            for label, own in by_label.items() if own
        }  # fmt: skip
        found[name] = {"set": held_out, "problem": name} | about[name] | {"conditions": shown}
    return found


def _evaluations(run: Index, held_out: str) -> list[Iteration]:
    """Return the evaluations of a run on a held-out set, in order."""
    return [one for (split, _), one in run.refresh().items() if split == f"eval/{held_out}"]


def _answers(run: Index, held_out: str, wanted: Sequence[Iteration]) -> Iterator[tuple[Iteration, Row]]:
    """Yield the lines of these evaluations; of a run without an index the file is read once from its beginning."""
    missing = {one.number: one for one in wanted if one.lines is None}
    for one in wanted:
        if one.lines is not None:
            yield from ((one, row) for row in run.completions(EVALUATIONS, *one.lines))
    if missing:
        for row in run.completions(EVALUATIONS):
            if row.get("name") == held_out and row.get("step") in missing:
                yield missing[row["step"]], row


def same_prompt(a: tuple[Index, Iteration], b: tuple[Index, Iteration], problem: str, sample: int = 0) -> Row:
    """Return the same prompt in two iterations: both rollouts with their tokens, the words (``by``: or lines, of long
    texts) in which they differ, and the first token that does. Raises UsageError where one has no such rollout."""
    left, right = (_found(run, one, problem, sample) for run, one in (a, b))
    one, other = ("\n".join(turn["text"] for turn in side["line"]["turns"]) for side in (left, right))
    *words, changes, by = compared(one, other)
    return {"a": left, "b": right, "words": words, "changes": changes, "by": by, "diverge": _diverge(left, right)}


def _found(run: Index, one: Iteration, problem: str, sample: int) -> Row:
    about = {"about": one.as_json()}
    if (tokens := run.tokens(one)) is not None:
        with tokens as file:
            own = [i for group in run.groups(one, problem) for i in file.of_group(group)]
            if sample < len(own):
                return about | {"samples": len(own), "index": own[sample]} | shown_tokens(file.rollout(own[sample]))
    else:
        rows = [row for row in rollouts_of(run, one) if row["problem_id"] == problem]
        if sample < len(rows):
            return about | {"samples": len(rows), "index": rows[sample]["index"]} | shown_text(rows[sample])
    raise UsageError(f"{one.name} of {run.run.name} has no sample {sample} of problem {problem!r}")


def _diverge(left: Row, right: Row) -> list[int] | None:
    """Return [turn, token] of the first token at which the two differ; None where one is the beginning of the other, or
    their tokens are not known."""
    if left["pieces"] is None or right["pieces"] is None:
        return None
    for turn, (own, other) in enumerate(zip(left["pieces"], right["pieces"], strict=False)):
        for token, (a, b) in enumerate(zip(own, other, strict=False)):
            if a != b:
                return [turn, token]
        if len(own) != len(other):
            return [turn, min(len(own), len(other))]
    return None
