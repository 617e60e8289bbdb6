"""``/api/curves``: a metric by group of runs: the mean over runs with its interval, and the line of every run.

The groups are the conditions of a campaign, with their differences to the baseline; or runs of several campaigns, also
of other tools, grouped by values of their settings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from retrain.records.schema.base import Row
from retrain.ui.answers import ApiError, JsonObject, Query
from retrain.ui.context import ApiContext
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
    run_line,
    window_of_query,
)
from retrain.ui.metrics import about
from retrain.ui.numbers import AXES, UNPLACED
from retrain.ui.settings import group_differences, settings_in, varying
from retrain.ui.sources import Home, RunSource
from retrain.verdicts.results import Measure

MOST_PLACES, MOST_RUNS, MOST_KEYS = 64, 400, 4
CONDITION, CAMPAIGN, RUN, SEED = "condition", "campaign", "run", "seed"
RUN_KEYS = (CONDITION, CAMPAIGN, RUN, SEED)  # Keys to group runs by, besides those of their settings

CampaignRuns = list[tuple[Home, RunSource]]  # Runs with their campaigns
Settings = Mapping[str, Row]  # Settings of runs by location


@dataclass
class RunGroup:
    values: tuple[object, ...]
    index: int
    runs: list[RunSource]
    lines: list[Line] = field(default_factory=list)


def curves(context: ApiContext, query: Query) -> JsonObject:
    library = context.library
    chosen = chosen_runs(library, query.texts("at", MOST_PLACES))
    is_one_campaign = len({home.path for home, _ in chosen}) < 2
    keys = query.texts("group_by", MOST_KEYS, (CONDITION,) if is_one_campaign else (CAMPAIGN, CONDITION))
    of_conditions = is_one_campaign and keys == [CONDITION]
    settings = {} if of_conditions else {run.location: settings_in(library.settings(run)) for _, run in chosen}
    groups = groups_of(chosen, keys, settings)
    if not of_conditions:
        groups = [replace(group, index=index) for index, group in enumerate(groups)]
    answer = _lines(library, query, keys, groups, of_conditions)
    return answer if of_conditions else answer | differing_settings(groups, settings)


def _lines(
    library: Library, query: Query, keys: Sequence[str], groups: Sequence[RunGroup], of_conditions: bool
) -> JsonObject:
    key, x, part = query.text("key"), query.choice("x", AXES), window_of_query(query)
    measure, band = Measure(key=key), query.choice("band", BANDS)
    smoothing = Smoothing() if measure.is_held_out else Smoothing.parse(query.text("smooth", "auto"))
    lines, smoothing = lines_of(library, [run for group in groups for run in group.runs], key, x, smoothing)
    most = most_points(len(lines))
    for group in groups:
        group.lines = [lines[run.location] for run in group.runs if run.location in lines]
    conditions = [
        {
            "label": " · ".join(map(str, group.values)), "index": group.index,
            "group": dict(zip(keys, group.values, strict=True)), "places": [run.location for run in group.runs],
            **mean_and_band(group.lines, measure.is_share, part, band), "count": counts(group.lines, part),
            "runs": [run_line(line, most, part) for line in group.lines],
        }
        for group in groups
    ]  # fmt: skip
    return {
        "key": key, "x": x, "smooth": smoothing.window, "smoothing": str(smoothing), "about": about(key),
        "share": measure.is_share, "note": left_out_note(list(lines.values())), "conditions": conditions,
        "differences": differences_of(groups, part, band) if of_conditions else [],
    }  # fmt: skip


def chosen_runs(library: Library, places: Sequence[str]) -> CampaignRuns:
    """Return the distinct runs at these places with their campaigns, baselines first. Raises ApiError for too many."""
    chosen: dict[str, tuple[Home, RunSource]] = {}
    for location in places:
        home = library.home(location)
        campaign = library.campaign(location)
        chosen |= {run.location: (campaign, run) for label in home.labels for run in home.of(label)}
    if len(chosen) > MOST_RUNS:
        raise ApiError(400, f"these are {len(chosen)} runs; at most {MOST_RUNS} are drawn together")
    return list(chosen.values())


def groups_of(chosen: CampaignRuns, keys: Sequence[str], settings: Settings) -> list[RunGroup]:
    """Group runs by their values of ``keys``; groups are in the order of the runs, or sorted if all values are numbers.
    A group's ``index`` is that of its first run's condition."""
    groups: dict[str, RunGroup] = {}
    for home, run in chosen:
        values = {CONDITION: run.label, CAMPAIGN: home.location, RUN: run.run_id, SEED: run.seed}
        chosen_values = tuple(values[key] if key in values else settings[run.location].get(key) for key in keys)
        groups.setdefault(repr(chosen_values), RunGroup(chosen_values, run.index, [])).runs.append(run)
    if all(isinstance(value, int | float) for group in groups.values() for value in group.values):
        return sorted(groups.values(), key=lambda group: group.values)
    return list(groups.values())


def differences_of(groups: Sequence[RunGroup], part: Window | None, band: str) -> list[JsonObject]:
    pairs = [(group, paired(group.lines, groups[0].lines)) for group in groups[1:]]
    return [{"label": group.values[0], "index": group.index, "pairs": len(lines)}
            | mean_and_band(lines, False, part, band) for group, lines in pairs]  # fmt: skip


def differing_settings(groups: Sequence[RunGroup], settings: Settings) -> JsonObject:
    grouped = [[settings[run.location] for run in group.runs] for group in groups]
    keys = [*RUN_KEYS, *varying(list(settings.values()))] if settings else []
    return {"differ": group_differences(grouped), "keys": keys}


def left_out_note(lines: Sequence[Line]) -> str | None:
    short = sum(line.left_out > 0 for line in lines)
    return f"{short} of {len(lines)} runs have {UNPLACED}" if short else None
