"""``/api/problems``, ``/api/problem``: held-out problems by condition; ``/api/prompt``: one problem's rollouts in two
iterations."""

from retrain.errors import UsageError
from retrain.ui.answers import ApiError, JsonObject, Query
from retrain.ui.api.rollouts import MOST, MOST_ROLLOUTS, iteration_of
from retrain.ui.context import ApiContext
from retrain.ui.iterations import Index, rollouts_of
from retrain.ui.library import Library
from retrain.ui.problems import SORTS, evolutions, matrix_of, same_prompt
from retrain.ui.sources import Home, sets_of


def problems(context: ApiContext, query: Query) -> JsonObject:
    home = context.library.home(query.text("at"))
    runs = indices_of(context.library, home)
    splits = (split for indices in runs.values() for index in indices for split, _ in index.refresh())
    sets = sets_of(split.removeprefix("eval/") for split in splits if split.startswith("eval/"))
    held_out = query.text("set", sets[0] if sets else "heldout")
    sort, tag, text = query.choice("sort", tuple(SORTS)), query.text("tag", ""), query.text("text", "")
    first, count = query.number("first", 0, 0, MOST), query.number("count", 200, 1, MOST_ROLLOUTS)
    return {"sets": sets} | matrix_of(home, runs, held_out).selection(sort, tag, text, first, count)


def problem(context: ApiContext, query: Query) -> JsonObject:
    runs = indices_of(context.library, context.library.home(query.text("at")))
    held_out, name = query.text("set", "heldout"), query.text("id")
    evolved = evolutions(runs, held_out, name)
    if name not in evolved:
        raise UsageError(f"no evaluation on {held_out} has a problem {name!r}")
    return evolved[name]


def prompt(context: ApiContext, query: Query) -> JsonObject:
    split, number = query.text("split", "eval/heldout"), query.number("sample", 0, 0, MOST)
    a, b = (context.library.index(context.library.run(query.text(side))) for side in ("a", "b"))
    at_a, at_b = a.get(split, iteration_of(query, "step_a")), b.get(split, iteration_of(query, "step_b"))
    name = query.text("problem", "") or next((str(row["problem_id"]) for row in rollouts_of(a, at_a)), None)
    if name is None:
        raise ApiError(404, f"nothing was sampled in {at_a.name}")
    steps = {side: [iteration.number for iteration in index.of_split(split)] for side, index in (("a", a), ("b", b))}
    return {"split": split, "problem": name, "steps": steps} | same_prompt((a, at_a), (b, at_b), name, number)


def indices_of(library: Library, home: Home) -> dict[str, list[Index]]:
    return {label: [library.index(run) for run in home.of(label)] for label in home.labels}
