"""``/api/curves``: a metric by group of runs: the mean over runs with its interval, and the line of every run.

The groups are the conditions of a campaign, with their differences to the baseline; or runs of several campaigns, also
of other tools, put together by keys of their settings.
"""

from collections.abc import Mapping, Sequence
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
RUN_KEYS = (CONDITION, CAMPAIGN, RUN, SEED)  # What runs may be grouped by besides keys of their settings

CampaignRuns = list[tuple[Home, Run]]  # Runs with their campaigns
Settings = Mapping[str, Mapping[str, Any]]  # By place


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
        runs, of_conditions = [run for _, run in chosen], one_campaign and keys == [CONDITION]
        settings = {} if of_conditions else {run.place: settings_in(library.settings(run)) for run in runs}
        groups = groups_of(chosen, keys, settings)
        for index, group in enumerate(() if of_conditions else groups):
            group.index = index
        key, x, part = query.text("key"), query.choice("x", AXES), window_of_query(query)
        measure, band = Measure(key=key), query.choice("band", BANDS)
        smoothing = Smoothing() if measure.is_held_out else Smoothing.parse(query.text("smooth", "auto"))
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
            "differences": [],
        }  # fmt: skip
        if of_conditions:
            return answer | {"differences": differences_of(groups, part, band)}
        return answer | differing_settings(groups, settings)

    return [json_route("/api/curves", curves)]


def chosen_runs(library: Library, places: Sequence[str]) -> CampaignRuns:
    """Return the runs at these places, each once, the baseline's first. Raises ApiError for too many."""
    chosen: dict[str, tuple[Home, Run]] = {}
    for place in places:
        home = library.home(place)
        campaign = library.campaign(place)
        chosen |= {run.place: (campaign, run) for label in home.labels for run in home.of(label)}
    if len(chosen) > MOST_RUNS:
        raise ApiError(400, f"these are {len(chosen)} runs; at most {MOST_RUNS} are drawn together")
    return list(chosen.values())


def groups_of(chosen: CampaignRuns, keys: Sequence[str], settings: Settings) -> list[Group]:
    """Put runs together that have the same values of all keys, in the order of the runs, or of numbers. The index is
    that of a condition in its campaign."""
    groups: dict[str, Group] = {}
    for home, run in chosen:
        values = {CONDITION: run.label, CAMPAIGN: home.place, RUN: run.run_id, SEED: run.seed}
        own = tuple(values[key] if key in values else settings[run.place].get(key) for key in keys)
        groups.setdefault(repr(own), Group(own, run.index, [])).runs.append(run)
    found = list(groups.values())
    if all(isinstance(value, int | float) for group in found for value in group.values):
        found.sort(key=lambda group: group.values)
    return found


def differences_of(groups: Sequence[Group], part: Window | None, band: str) -> list[dict[str, Any]]:
    """Return the paired difference of every condition to the first, the baseline."""
    found = []
    for group in groups[1:]:
        pairs = paired(group.lines, groups[0].lines)
        difference = mean_and_band(pairs, False, part, band)
        found.append({"label": group.values[0], "index": group.index, "pairs": len(pairs)} | difference)
    return found


def differing_settings(groups: Sequence[Group], settings: Settings) -> dict[str, Any]:
    """Return in which settings the groups differ, and the keys by which the runs could be grouped."""
    grouped = [[settings[run.place] for run in group.runs] for group in groups]
    keys = [*RUN_KEYS, *varying(list(settings.values()))] if settings else []
    return {"differ": group_differences(grouped), "keys": keys}


def left_out_note(lines: Sequence[Line]) -> str | None:
    short = sum(line.left_out > 0 for line in lines)
    return f"{short} of {len(lines)} runs have {UNPLACED}" if short else None
