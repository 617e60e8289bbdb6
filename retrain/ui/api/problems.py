"""``/api/problems``, ``/api/problem``, ``/api/prompt``: held-out problems by condition, and one prompt twice."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from retrain.ui.answers import Query, Refusal, json_route
from retrain.ui.api.rollouts import MOST, MOST_ROLLOUTS, iteration_of
from retrain.ui.iterations import Index, Iteration, rollouts_of
from retrain.ui.library import Library
from retrain.ui.problems import SORTS, evolution, matrix, twice
from retrain.ui.sources import Home


def routes(library: Library) -> list[Route]:
    """The routes of this group."""

    def runs_of(home: Home) -> dict[str, list[Index]]:
        return {label: [library.index(run) for run in home.of(label)] for label in home.labels}

    def problems(query: Query) -> dict[str, Any]:
        runs = runs_of(library.home(query.text("at")))
        first, count = query.number("first", 0, 0, MOST), query.number("count", 200, 1, MOST_ROLLOUTS)
        sets = sets_of(runs)
        held_out = query.text("set", sets[0] if sets else "heldout")
        chosen = {
            "sort": query.choice("sort", tuple(SORTS)),
            "tag": query.text("tag", ""),
            "text": query.text("text", ""),
        }
        return {"sets": sets} | matrix(runs, held_out, **chosen, first=first, count=count)

    def problem(query: Query) -> dict[str, Any]:
        runs = runs_of(library.home(query.text("at")))
        return evolution(runs, query.text("set", "heldout"), query.text("id"))

    def prompt(query: Query) -> dict[str, Any]:
        split, number = query.text("split", "eval/heldout"), query.number("sample", 0, 0, MOST)
        sides = [library.index(library.run(query.text(side))) for side in ("a", "b")]
        ones = [index.get(split, iteration_of(query, f"step_{side}")) for side, index in zip("ab", sides, strict=True)]
        named = query.text("problem", "") or first_problem(sides[0], ones[0])
        steps = [[one.number for (own, _), one in index.refresh().items() if own == split] for index in sides]
        answer = twice((sides[0], ones[0]), (sides[1], ones[1]), named, number)
        return {"split": split, "problem": named, "steps": {"a": steps[0], "b": steps[1]}} | answer

    return [
        json_route("/api/problems", problems),
        json_route("/api/problem", problem),
        json_route("/api/prompt", prompt),
    ]


def sets_of(runs: dict[str, list[Index]]) -> list[str]:
    """The held-out sets that any run was evaluated on, in their order."""
    splits = (split for own in runs.values() for index in own for split, _ in index.refresh())
    return list(dict.fromkeys(split.removeprefix("eval/") for split in splits if split.startswith("eval/")))


def first_problem(index: Index, one: Iteration) -> str:
    """The first problem of an iteration. Raises Refusal (404) where it has none."""
    found = next(iter(rollouts_of(index, one)), None)
    if found is None:
        raise Refusal(404, f"nothing was sampled in {one.name}")
    return str(found["problem_id"])
