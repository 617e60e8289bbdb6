"""``/api/curves``: a metric by group of runs: the mean over runs with its interval, and the line of every run.

The groups are the conditions of a campaign, with their differences to the baseline; or runs of several campaigns, also
of other tools, put together by keys of their settings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.routing import Route

from retrain.ui.answers import ApiError, Query, json_route
from retrain.ui.decimation import Smoothing
from retrain.ui.library import Library
from retrain.ui.lines import (
    BANDS,
    Line,
    Window,
    counts,
    lines_of,
    mean_and_band,
    most_points,
    paired,
    shown,
    window_of_query,
)
from retrain.ui.metrics import about
from retrain.ui.numbers import AXES, UNPLACED
from retrain.ui.settings import group_differences, settings_in, varying
from retrain.ui.sources import Home, Run
from retrain.verdicts.results import Measure

MOST_PLACES, MOST_RUNS, MOST_KEYS = 64, 400, 4
CONDITION, CAMPAIGN, RUN, SEED = "condition", "campaign", "run", "seed"
OF_RUNS = (CONDITION, CAMPAIGN, RUN, SEED)  # What runs may be grouped by besides keys of their settings

Chosen = list[tuple[Home, Run]]  # Runs with their campaigns


@dataclass
class Group:
    """Runs with the same values of the keys that they are grouped by; the lines of those that have the metric."""

    values: tuple[Any, ...]
    index: int
    runs: list[Run]
    lines: list[Line] = field(default_factory=list)


def routes(library: Library) -> list[Route]:
    def curves(query: Query) -> dict[str, Any]:
        chosen = chosen_runs(library, query.texts("at", MOST_PLACES))
        one_campaign = len({home.path for home, _ in chosen}) < 2
        keys = query.texts("group_by", MOST_KEYS, (CONDITION,) if one_campaign else (CAMPAIGN, CONDITION))
        groups = groups_of(library, chosen, keys)
        key, x, part = query.text("key"), query.choice("x", AXES), window_of_query(query)
        measure, band = Measure(key=key), query.choice("band", BANDS)
        smoothing = Smoothing() if measure.is_held_out else Smoothing.parse(query.text("smooth", "auto"))
        runs = [run for _, run in chosen]
        lines, smoothing = lines_of(library, runs, key, x, smoothing)
        most = most_points(len(lines))
        for group in groups:
            group.lines = [lines[run.place] for run in group.runs if run.place in lines]
        conditions = [
            {
                "label": " · ".join(map(str, group.values)), "index": group.index,
                "group": dict(zip(keys, group.values, strict=True)), "places": [run.place for run in group.runs],
                **mean_and_band(group.lines, measure.is_share, part, band), "count": counts(group.lines, part),
                "runs": [shown(line, most, part) for line in group.lines],
            }
            for group in groups
        ]  # fmt: skip
        answer = {
            "key": key, "x": x, "smooth": smoothing.window, "smoothing": str(smoothing), "about": about(key),
            "share": measure.is_share, "note": left_out_note(list(lines.values())), "conditions": conditions,
            "reading": sum(library.numbers(run, refresh=False).reading for run in runs), "differences": [],
        }  # fmt: skip
        if keys == [CONDITION] and one_campaign:
            return answer | {"differences": differences_of(groups, part, band)}
        return answer | differing_settings(library, groups)

    return [json_route("/api/curves", curves)]


def chosen_runs(library: Library, places: Sequence[str]) -> Chosen:
    """Return the runs at these places, each once, the baseline's first. Raises ApiError for too many."""
    chosen: dict[str, tuple[Home, Run]] = {}
    for place in places:
        home = library.home(place)
        campaign = library.campaign(place)
        chosen |= {run.place: (campaign, run) for label in home.labels for run in home.of(label)}
    if len(chosen) > MOST_RUNS:
        raise ApiError(400, f"these are {len(chosen)} runs; at most {MOST_RUNS} are drawn together")
    return list(chosen.values())


def groups_of(library: Library, chosen: Chosen, keys: Sequence[str]) -> list[Group]:
    """Put runs together that have the same values of all keys, in the order in which they come, numbers in theirs.
    Conditions of one campaign have their index there, other groups their place in the order."""
    of_settings = any(key not in OF_RUNS for key in keys)
    groups: dict[str, Group] = {}
    for home, run in chosen:
        values = {CONDITION: run.label, CAMPAIGN: home.place, RUN: run.run_id, SEED: run.seed}
        settings = settings_in(library.settings(run)) if of_settings else {}
        own = tuple(values[key] if key in values else settings.get(key) for key in keys)
        groups.setdefault(repr(own), Group(own, run.index, [])).runs.append(run)
    found = list(groups.values())
    if all(isinstance(value, int | float) for group in found for value in group.values):
        found.sort(key=lambda group: group.values)
    if keys != [CONDITION] or len({home.path for home, _ in chosen}) > 1:
        for index, group in enumerate(found):
            group.index = index
    return found


def differences_of(groups: Sequence[Group], part: Window | None, band: str) -> list[dict[str, Any]]:
    """Return the paired difference of every condition to the first, the baseline."""
    found = []
    for group in groups[1:]:
        pairs = paired(group.lines, groups[0].lines)
        difference = mean_and_band(pairs, False, part, band)
        found.append({"label": group.values[0], "index": group.index, "pairs": len(pairs)} | difference)
    return found


def differing_settings(library: Library, groups: Sequence[Group]) -> dict[str, Any]:
    """Return in which settings the groups differ, and the keys by which the runs could be grouped."""
    settings = [[settings_in(library.settings(run)) for run in group.runs] for group in groups]
    every = [each for own in settings for each in own]
    return {"differ": group_differences(settings), "keys": [*OF_RUNS, *varying(every)] if every else []}


def left_out_note(lines: Sequence[Line]) -> str | None:
    short = sum(line.left_out > 0 for line in lines)
    return f"{short} of {len(lines)} runs have {UNPLACED}" if short else None
