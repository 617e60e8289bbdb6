"""Held-out problems × conditions: who solves what, how that has changed, and the same prompt under two conditions."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrain.errors import UsageError
from retrain.ui.iterations import EVALUATIONS, Index, Iteration, Line, json_lines, rollouts_of
from retrain.ui.rollouts import shown_tokens

MOST_PROMPT = 300
_WORDS = re.compile(r"\s+|[^\s\w]|\w+")


Runs = Mapping[str, Sequence[Index]]
"""The runs of a campaign by condition, the baseline first."""


@dataclass
class _Cell:
    correct: int = 0
    answers: int = 0

    def add(self, correct: bool) -> None:
        self.correct += correct
        self.answers += 1

    @property
    def rate(self) -> float | None:
        return self.correct / self.answers if self.answers else None


def matrix(
    runs: Runs, held_out: str, *, sort: str = "differ", tag: str = "", text: str = "", first: int = 0, count: int = 200
) -> Line:
    """Solve rates of every problem under every condition, before and after training, over all seeds.

    ``sort``: "differ" (most between conditions after training), "worse" (fell most under some condition), "better",
    "hard" (least solved), "problem" (as they come). Raises UsageError for another.
    """
    problems: dict[str, Line] = {}
    cells: dict[tuple[str, str, str], _Cell] = defaultdict(_Cell)
    steps: dict[str, list[int]] = {}
    for label, own in runs.items():
        for run in own:
            evaluations = _evaluations(run, held_out)
            if not evaluations:
                continue
            ends = (evaluations[0], evaluations[-1])
            steps.setdefault(label, [one.number for one in ends])
            for when, one in zip(("before", "after"), ends, strict=True):
                for _, answer in _answers(run, held_out, [one]):
                    name = str(answer.get("problem_id"))
                    prompt = str(answer.get("prompt", ""))[:MOST_PROMPT]
                    problems.setdefault(name, {"id": name, "prompt": prompt, "tags": answer.get("tags") or []})
                    cells[name, label, when].add(bool(answer.get("correct")))
    labels = [label for label in runs if label in steps]
    rows = [problem | {"rates": _rates(cells, name, labels)} for name, problem in problems.items()]
    tags = sorted({each for row in rows for each in row["tags"]})
    wanted = text.casefold()
    rows = [
        row for row in rows if (not tag or tag in row["tags"]) and wanted in f"{row['id']}\n{row['prompt']}".casefold()
    ]
    if sort not in SORTS:
        raise UsageError(f'sort = "{sort}" is none of {", ".join(SORTS)}')
    rows.sort(key=SORTS[sort])
    return {
        "set": held_out,
        "conditions": labels,
        "steps": steps,
        "tags": tags,
        "total": len(rows),
        "problems": rows[first : first + count],
    }


def _rates(cells: Mapping[tuple[str, str, str], _Cell], name: str, labels: Sequence[str]) -> dict[str, Line]:
    empty = _Cell()
    found = {}
    for label in labels:
        before, after = (cells.get((name, label, when), empty) for when in ("before", "after"))
        found[label] = {"before": before.rate, "after": after.rate, "answers": after.answers}
    return found


def _changes(row: Line) -> list[float]:
    pairs = [(each["before"], each["after"]) for each in row["rates"].values()]
    return [after - before for before, after in pairs if before is not None and after is not None] or [0.0]


def _after(row: Line) -> list[float]:
    return [each["after"] for each in row["rates"].values() if each["after"] is not None] or [0.0]


SORTS: Mapping[str, Callable[[Line], Any]] = {
    "differ": lambda row: min(_after(row)) - max(_after(row)),
    "worse": lambda row: min(_changes(row)),
    "better": lambda row: -max(_changes(row)),
    "hard": lambda row: sum(_after(row)) / len(_after(row)),
    "problem": lambda row: 0,
}
"""What ``matrix`` may be sorted by."""


def evolution(runs: Runs, held_out: str, problem: str) -> Line:
    """One problem at every evaluation: its "prompt" and "tags", and {"conditions": {label: [{"step", "rate",
    "answers"}]}}. Raises UsageError where nothing is known of it."""
    found = evolutions(runs, held_out, problem)
    if problem not in found:
        raise UsageError(f"no evaluation on {held_out} has a problem {problem!r}")
    return found[problem]


def evolutions(runs: Runs, held_out: str, only: str | None = None) -> dict[str, Line]:
    """The same of every problem, or of one, by its name; each file is read once."""
    about: dict[str, Line] = {}
    cells: dict[str, dict[str, dict[int, _Cell]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(_Cell)))
    for label, own in runs.items():
        for run in own:
            for one, answer in _answers(run, held_out, _evaluations(run, held_out)):
                name = str(answer.get("problem_id"))
                if only is None or name == only:
                    about.setdefault(name, {"prompt": str(answer.get("prompt", "")), "tags": answer.get("tags") or []})
                    cells[name][label][one.number].add(bool(answer.get("correct")))
    found = {}
    for name, by_label in cells.items():
        shown = {
            label: [{"step": step, "rate": cell.rate, "answers": cell.answers} for step, cell in sorted(own.items())]
            for label, own in by_label.items()
        }
        found[name] = {"set": held_out, "problem": name} | about[name] | {"conditions": shown}
    return found


def _evaluations(run: Index, held_out: str) -> list[Iteration]:
    """The evaluations of a run on a held-out set, in order."""
    return [one for (split, _), one in run.refresh().items() if split == f"eval/{held_out}"]


def _answers(run: Index, held_out: str, wanted: Sequence[Iteration]) -> Iterator[tuple[Iteration, Line]]:
    """The lines of these evaluations; of a run without an index the file is read once from its beginning."""
    missing = {one.number: one for one in wanted if one.lines is None}
    for one in wanted:
        if one.lines is not None:
            yield from ((one, row) for row in json_lines(run.file(EVALUATIONS), *one.lines))
    if missing:
        for row in json_lines(run.file(EVALUATIONS)):
            if row.get("name") == held_out and row.get("step") in missing:
                yield missing[row["step"]], row


def twice(a: tuple[Index, Iteration], b: tuple[Index, Iteration], problem: str, sample: int = 0) -> Line:
    """The same prompt in two iterations: both rollouts with their tokens, the words in which they differ, and the first
    token that does. Raises UsageError where one of them has no such rollout."""
    left, right = (_found(run, one, problem, sample) for run, one in (a, b))
    texts = [_words("\n".join(turn["text"] for turn in side["line"]["turns"])) for side in (left, right)]
    matcher = difflib.SequenceMatcher(None, *texts, autojunk=False)
    return {"a": left, "b": right, "words": texts, "changes": matcher.get_opcodes(), "diverge": _diverge(left, right)}


def _found(run: Index, one: Iteration, problem: str, sample: int) -> Line:
    about = {"about": one.as_json()}
    if (tokens := run.tokens(one)) is not None:
        with tokens as file:
            named = {i for i, prompt in enumerate(file.prompts()) if prompt["problem_id"] == problem}
            own = [i for i, line in enumerate(file.lines()) if line["group"] in named]
            if sample < len(own):
                return about | {"samples": len(own), "index": own[sample]} | shown_tokens(file.rollout(own[sample]))
    else:
        rows = [row for row in rollouts_of(run, one) if row["problem_id"] == problem]
        if sample < len(rows):
            turn = {"messages": [], "text": rows[sample]["text"], "tokens": rows[sample]["length"]}
            prompt = {"problem_id": problem, "tags": rows[sample]["tags"], "messages": [], "reference": None}
            line = rows[sample] | {"turns": [turn]}
            about |= {"samples": len(rows), "index": rows[sample]["index"]}
            return about | {"prompt": prompt, "line": line, "pieces": None, "numbers": {}}
    raise UsageError(f"{one.name} of {run.run.name} has no sample {sample} of problem {problem!r}")


def _words(text: str) -> list[str]:
    """Words, single signs and white space; joined they are the text."""
    return _WORDS.findall(text)


def _diverge(left: Line, right: Line) -> list[int] | None:
    """[turn, token] of the first token at which the two differ; None where one is the beginning of the other, or their
    tokens are not known."""
    if left["pieces"] is None or right["pieces"] is None:
        return None
    for turn, (own, other) in enumerate(zip(left["pieces"], right["pieces"], strict=False)):
        for token, (a, b) in enumerate(zip(own, other, strict=False)):
            if a != b:
                return [turn, token]
        if len(own) != len(other):
            return [turn, min(len(own), len(other))]
    return None
