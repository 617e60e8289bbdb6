"""``/api/problems``, ``/api/problem``, ``/api/prompt``: held-out problems by condition, and one prompt twice."""

from typing import Any

from starlette.routing import Route

from retrain.ui.answers import ApiError, Query, json_route
from retrain.ui.api.rollouts import MOST, MOST_ROLLOUTS, iteration_of
from retrain.ui.iterations import Index, first_problem
from retrain.ui.library import Library
from retrain.ui.problems import SORTS, Matrices, evolution, same_prompt
from retrain.ui.sources import Home, sets_of


def routes(library: Library) -> list[Route]:
    kept = Matrices()

    def runs_of(home: Home) -> dict[str, list[Index]]:
        return {label: [library.index(run) for run in home.of(label)] for label in home.labels}

    def problems(query: Query) -> dict[str, Any]:
        home = library.home(query.text("at"))
        runs, unfinished = runs_of(home), {run.path for run in home.runs if run.state != "done"}
        first, count = query.number("first", 0, 0, MOST), query.number("count", 200, 1, MOST_ROLLOUTS)
        splits = (split for own in runs.values() for index in own for split, _ in index.refresh())
        sets = sets_of(split.removeprefix("eval/") for split in splits if split.startswith("eval/"))
        held_out = query.text("set", sets[0] if sets else "heldout")
        chosen = {
            "sort": query.choice("sort", tuple(SORTS)),
            "tag": query.text("tag", ""),
            "text": query.text("text", ""),
        }
        found = kept.of(home.place, runs, held_out, unfinished, {run.path: run.seed for run in home.runs})
        return {"sets": sets} | found.shown(**chosen, first=first, count=count)

    def problem(query: Query) -> dict[str, Any]:
        runs = runs_of(library.home(query.text("at")))
        return evolution(runs, query.text("set", "heldout"), query.text("id"))

    def prompt(query: Query) -> dict[str, Any]:
        split, number = query.text("split", "eval/heldout"), query.number("sample", 0, 0, MOST)
        sides = [library.index(library.run(query.text(side))) for side in ("a", "b")]
        ones = [index.get(split, iteration_of(query, f"step_{side}")) for side, index in zip("ab", sides, strict=True)]
        named = query.text("problem", "") or first_problem(sides[0], ones[0])
        if named is None:
            raise ApiError(404, f"nothing was sampled in {ones[0].name}")
        steps = [[one.number for (own, _), one in index.refresh().items() if own == split] for index in sides]
        answer = same_prompt((sides[0], ones[0]), (sides[1], ones[1]), named, number)
        return {"split": split, "problem": named, "steps": {"a": steps[0], "b": steps[1]}} | answer

    return [
        json_route("/api/problems", problems),
        json_route("/api/problem", problem),
        json_route("/api/prompt", prompt),
    ]
