"""``/api/iterations``, ``/api/rollouts``, ``/api/rollout``: what a run sampled, to sort, filter and read by token."""

from typing import Any

from starlette.routing import Route

from retrain.ui.answers import Query, json_route
from retrain.ui.library import Library
from retrain.ui.rollouts import SORTS, Filter, table, whole

MOST_ROLLOUTS = 500
LATEST = -1
MOST = 10**9


def routes(library: Library) -> list[Route]:
    def iterations(query: Query) -> dict[str, Any]:
        index = library.index(library.run(query.text("at")))
        return {"iterations": [one.as_json() for one in index.refresh().values()]}

    def rollouts(query: Query) -> dict[str, Any]:
        index = library.index(library.run(query.text("at")))
        one = index.get(query.text("split", "train"), iteration_of(query))
        group = query.number("group", LATEST, LATEST, MOST)
        chosen = Filter(
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
        first, count = query.number("first", 0, 0, MOST), query.number("count", 200, 1, MOST_ROLLOUTS)
        down = query.choice("down", ("0", "1")) == "1"
        return table(index, one, chosen, query.choice("sort", tuple(SORTS)), down, first, count)

    def rollout(query: Query) -> dict[str, Any]:
        index = library.index(library.run(query.text("at")))
        one = index.get(query.text("split", "train"), iteration_of(query))
        return whole(index, one, query.number("index", 0, 0, MOST))

    return [
        json_route("/api/iterations", iterations),
        json_route("/api/rollouts", rollouts),
        json_route("/api/rollout", rollout),
    ]


def iteration_of(query: Query, name: str = "iteration") -> int | None:
    """A number of an iteration; None for the newest."""
    number = query.number(name, LATEST, LATEST, MOST)
    return None if number == LATEST else number
