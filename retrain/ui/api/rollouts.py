"""``/api/iterations``, ``/api/rollouts``, ``/api/rollout``: a run's rollouts, to sort, filter and read by token;
``/api/search``: a search over all steps of a run or campaign."""

import time

from retrain.ui.answers import JsonObject, Query
from retrain.ui.context import ApiContext
from retrain.ui.iterations import Index, IterationEntry
from retrain.ui.rollouts import NEWEST, SORTS, Filter, rollout_in, searched, table

MOST_ROLLOUTS = 500
LATEST = -1
MOST = 10**9
SEARCH_S = 1.5  # Seconds that one answer searches; the next one continues


def iterations(context: ApiContext, query: Query) -> JsonObject:
    index = context.library.index(context.library.run(query.text("at")))
    return {"iterations": [iteration.as_json() for iteration in index.refresh().values()]}


def rollouts(context: ApiContext, query: Query) -> JsonObject:
    index, iteration = _iteration(context, query)
    first, count = query.number("first", 0, 0, MOST), query.number("count", 200, 1, MOST_ROLLOUTS)
    down = query.choice("down", ("0", "1")) == "1"
    return table(index, iteration, filter_of(query), query.choice("sort", tuple(SORTS)), down, first, count)


def search(context: ApiContext, query: Query) -> JsonObject:
    library = context.library
    runs = {run.location: library.index(run) for run in library.home(query.text("at")).runs}
    split, down = query.text("split", ""), query.choice("down", ("1", "0")) == "1"
    first, count = query.number("first", 0, 0, MOST), query.number("count", 100, 1, MOST_ROLLOUTS)
    sort = query.choice("sort", (NEWEST, *SORTS))
    return searched(runs, filter_of(query), split, sort, down, first, count, time.monotonic() + SEARCH_S)


def rollout(context: ApiContext, query: Query) -> JsonObject:
    index, iteration = _iteration(context, query)
    return rollout_in(index, iteration, query.number("index", 0, 0, MOST))


def _iteration(context: ApiContext, query: Query) -> tuple[Index, IterationEntry]:
    index = context.library.index(context.library.run(query.text("at")))
    return index, index.get(query.text("split", "train"), iteration_of(query))


def filter_of(query: Query) -> Filter:
    group = query.number("group", LATEST, LATEST, MOST)
    return Filter(
        reward=(query.real("reward_min"), query.real("reward_max")),
        length=(query.real("length_min"), query.real("length_max")),
        group=None if group == LATEST else group,
        problem=query.text("problem", ""),
        tag=query.text("tag", ""),
        stop=query.text("stop", ""),
        use=query.choice("kept", ("", "trained", "discarded")),
        text=query.text("text", ""),
        errors=query.choice("errors", ("0", "1")) == "1",
    )


def iteration_of(query: Query, name: str = "iteration") -> int | None:
    number = query.number(name, LATEST, LATEST, MOST)
    return None if number == LATEST else number
