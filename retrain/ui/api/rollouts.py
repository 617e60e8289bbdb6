"""``/api/iterations``, ``/api/rollouts``, ``/api/rollout``: what a run sampled, to sort, filter and read by token;
``/api/search``: the same over all steps of a run or campaign."""

import time
from typing import Any

from starlette.routing import Route

from retrain.ui.answers import Query, json_route
from retrain.ui.library import Library
from retrain.ui.rollouts import NEWEST, SORTS, Filter, rollout_in, searched, table

MOST_ROLLOUTS = 500
LATEST = -1
MOST = 10**9
SEARCH_S = 1.5  # Seconds that one answer searches; the next one goes on


def routes(library: Library) -> list[Route]:
    def iterations(query: Query) -> dict[str, Any]:
        index = library.index(library.run(query.text("at")))
        return {"iterations": [one.as_json() for one in index.refresh().values()]}

    def rollouts(query: Query) -> dict[str, Any]:
        index = library.index(library.run(query.text("at")))
        one = index.get(query.text("split", "train"), iteration_of(query))
        first, count = query.number("first", 0, 0, MOST), query.number("count", 200, 1, MOST_ROLLOUTS)
        down = query.choice("down", ("0", "1")) == "1"
        return table(index, one, filter_of(query), query.choice("sort", tuple(SORTS)), down, first, count)

    def search(query: Query) -> dict[str, Any]:
        runs = {run.place: library.index(run) for run in library.home(query.text("at")).runs}
        split, down = query.text("split", ""), query.choice("down", ("1", "0")) == "1"
        first, count = query.number("first", 0, 0, MOST), query.number("count", 100, 1, MOST_ROLLOUTS)
        sort = query.choice("sort", (NEWEST, *SORTS))
        return searched(runs, filter_of(query), split, sort, down, first, count, time.monotonic() + SEARCH_S)

    def rollout(query: Query) -> dict[str, Any]:
        index = library.index(library.run(query.text("at")))
        one = index.get(query.text("split", "train"), iteration_of(query))
        return rollout_in(index, one, query.number("index", 0, 0, MOST))

    return [
        json_route("/api/iterations", iterations),
        json_route("/api/rollouts", rollouts),
        json_route("/api/rollout", rollout),
        json_route("/api/search", search),
    ]


def filter_of(query: Query) -> Filter:
    group = query.number("group", LATEST, LATEST, MOST)
    return Filter(
        reward=(query.real("reward_min"), query.real("reward_max")),
        length=(query.real("length_min"), query.real("length_max")),
        group=None if group == LATEST else group,
        problem=query.text("problem", ""),
        tag=query.text("tag", ""),
        stop=query.text("stop", ""),
        kept=query.choice("kept", ("", "trained", "discarded")),
        text=query.text("text", ""),
        errors=query.choice("errors", ("0", "1")) == "1",
    )


def iteration_of(query: Query, name: str = "iteration") -> int | None:
    """Return the number of an iteration; None for the newest."""
    number = query.number(name, LATEST, LATEST, MOST)
    return None if number == LATEST else number
