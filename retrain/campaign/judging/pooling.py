"""Runs of several directories in one comparison: what may be pooled, what is kept apart, and what is refused.

Refused are numbers that measure different things: other held-out problems, or the same ones sampled otherwise. Runs of
one condition are pooled over directories when their settings agree; when not, they are kept apart as
``label@directory`` and the keys are named. Different data, base weights, code or lengths of training are noted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.campaign.judging.comparison import compare_runs
from retrain.campaign.judging.results import Measure, RunResult, first_set, read_run
from retrain.campaign.planning.changes import differences
from retrain.campaign.planning.manifest import MANIFEST, read_manifest
from retrain.config.base import Role
from retrain.config.evaluation import HELDOUT
from retrain.config.root import role_of
from retrain.errors import UsageError
from retrain.wording import listed

MAY_DIFFER = Role.RECORDS | Role.SPEED | Role.NAMES
"""In what runs of one condition may differ, whatever else it decides: replicates have seeds of their own."""
SAMPLING = ("samples", "temperature", "max_tokens", "top_p", "top_k", "min_p")
NAMED_KEYS = 4


@dataclass(frozen=True)
class Source:
    """One directory: its runs in their order, its labels with the baseline first."""

    name: str
    runs: list[RunResult]
    labels: list[str]


def compare_directories(
    directories: Sequence[Path], *, metric: str | None = None, baseline: str | None = None
) -> dict[str, Any]:
    """The comparison (as ``compare_runs`` describes it) of all runs of these campaigns and runs.

    ``metric`` and ``baseline`` are as a person writes them; unset, they are what the first campaign declared and its
    first condition. Raises UsageError when a directory holds no runs, or when what they measured differs.
    """
    directories = list({path.resolve(): path for path in directories}.values())
    sources = [read_source(path, name) for path, name in zip(directories, _names(directories), strict=True)]
    everything = [run for source in sources for run in source.runs]
    declared, margin, warnings = _declared(sources, metric)
    decisive = Measure.parse(metric or declared or "final", first_set(everything)).held_out
    if decisive:
        _same_evaluation(sources, decisive)
    warnings += _pool(sources)
    labels = list(dict.fromkeys(label for source in sources for label in source.labels))
    runs, twice = _without_repeats(everything)
    warnings += twice + _differences(runs)
    # Looks of several campaigns were not planned together: only a campaign's own rule holds, for it alone.
    rule = read_manifest(directories[0]).get("sequential") if len(sources) == 1 else None
    comparison = compare_runs(
        runs, labels, metric=metric or declared, baseline=baseline, margin=margin, warnings=warnings, sequential=rule
    )
    return comparison | {"directories": [str(path) for path in directories]}


def read_source(directory: Path, name: str = "") -> Source:
    """The runs of a campaign's or a single run's directory. Raises UsageError when it is neither."""
    if not (directory / MANIFEST).is_file():
        campaign = directory.absolute().parent.parent  # of logs/<campaign>/runs/<run>
        hint = f"; its campaign is {campaign}" if (campaign / MANIFEST).is_file() else ""
        raise UsageError(f"{directory} is not the directory of a campaign or run: it has no {MANIFEST}{hint}")
    entries = read_manifest(directory)["runs"]
    runs = [read_run(directory, entry) for entry in entries]
    return Source(name or directory.name, runs, list(dict.fromkeys(run.label for run in runs)))


def _names(directories: Sequence[Path]) -> list[str]:
    """Short names that tell the directories apart."""
    names = [path.resolve().name for path in directories]
    return [str(path) if names.count(name) > 1 else name for path, name in zip(directories, names, strict=True)]


def _declared(sources: Sequence[Source], metric: str | None) -> tuple[str | None, float | None, list[str]]:
    """What the campaigns declared as deciding, their margin, and what a reader must know of it."""
    declared = [_declaration(source) for source in sources]
    first, margin = next((pair for pair in declared if pair[0] is not None), (None, None))
    notes = []
    others = sorted({str(pair[0]) for pair in declared if pair[0] not in (None, first)})
    if others and metric is None:
        notes.append(f"The campaigns declared different metrics ({first}, {', '.join(others)}); {first} is compared.")
    if len({pair[1] for pair in declared if pair[0] is not None}) > 1:
        notes.append("The campaigns declared different equivalence margins; none is applied.")
        margin = None
    held_out = first_set([run for source in sources for run in source.runs])
    chosen, before = Measure.parse(metric or "final", held_out), Measure.parse(first or "final", held_out)
    if metric is not None and chosen != before:
        notes.append(f"{chosen.name} was not declared as deciding ({before.name} was): what it shows is exploratory.")
        margin = margin if chosen.key == before.key else None
    return (None if first == "final" else first), margin, notes


def _declaration(source: Source) -> tuple[str | None, float | None]:
    for run in source.runs:
        campaign = run.config.get("campaign")
        if campaign is not None:
            return campaign.get("primary_metric", "final"), campaign.get("equivalence_margin")
    return None, None


def _same_evaluation(sources: Sequence[Source], held_out: str) -> None:
    """Raise UsageError when the problems of a held-out set, or how they are sampled, differ between directories."""
    seen: dict[str, tuple[str, Any]] = {}
    for source in sources:
        for run in source.runs:
            evaluation = run.config.get("evaluation")
            if evaluation is None or not run.evaluations:
                continue
            hashes = run.facts.get("heldout_hashes") or {HELDOUT: run.facts.get("heldout_hash")}
            own = next((each for each in evaluation.get("sets") or () if each["name"] == held_out), {})
            own = {key: value for key, value in own.items() if value is not None}
            sampling = {key: own.get(key, evaluation.get(key)) for key in SAMPLING}
            facts = {
                "held-out problems": hashes.get(held_out) or run.facts.get("data_hash"),
                **{f"[evaluation] {key}": value for key, value in sampling.items()},
                "[data] prompt_template": (run.config.get("data", {}) | own).get("prompt_template"),
            }
            for what, value in facts.items():
                name, other = seen.setdefault(what, (source.name, value))
                if other != value:
                    values = "" if "problems" in what else f" ({other} and {value})"
                    raise UsageError(
                        f"{name} and {source.name} cannot be compared on held-out problems: {what} differ{values}; "
                        "compare them one by one, or with --metric on a number of training"
                    )


def _pool(sources: Sequence[Source]) -> list[str]:
    """Rename conditions (in place) whose settings differ from those of the same label elsewhere; say so."""
    notes: list[str] = []
    first: dict[str, tuple[Source, dict[str, Any]]] = {}
    for source in sources:
        for place, label in enumerate(list(source.labels)):
            own = next((run.config for run in source.runs if run.label == label and run.config), None)
            if own is None:
                continue
            other, settings = first.setdefault(label, (source, own))
            keys = differences(settings, own, tells_apart)
            if other is source or not keys:
                continue
            source.labels[place] = renamed = f"{label}@{source.name}"
            for run in source.runs:
                run.label = renamed if run.label == label else run.label
            notes.append(
                f"{label} has other settings in {source.name} than in {other.name} ({_changes(keys)}): kept apart."
            )
    return notes


def tells_apart(key: str) -> bool:
    """Whether runs with different values of this dotted key are no replicates of each other."""
    role = role_of(key)
    return role is None or not role & MAY_DIFFER


def _changes(keys: dict[str, tuple[Any, Any]]) -> str:
    """The first differing keys with their values."""
    return listed([f"{key} {b} instead of {a}" for key, (a, b) in keys.items()], NAMED_KEYS)


def _without_repeats(runs: Sequence[RunResult]) -> tuple[list[RunResult], list[str]]:
    """One run for each condition and seed: repeating a seed adds no replicate. A finished one is preferred."""
    chosen: dict[tuple[str, tuple[int, int]], RunResult] = {}
    repeated: list[str] = []
    for run in runs:
        key = (run.label, run.pair)
        if key not in chosen:
            chosen[key] = run
            continue
        if run.done and not chosen[key].done:
            chosen[key] = run
        repeated.append(run.run_id)
    if not repeated:
        return list(chosen.values()), []
    names = ", ".join(dict.fromkeys(repeated))
    return list(chosen.values()), [f"Some seeds were run more than once; one run of each counts: {names}."]


def _differences(runs: Sequence[RunResult]) -> list[str]:
    """What else is not the same for all runs."""
    notes = []
    for what, values in (
        ("base weights", [run.facts.get("base", {}).get("fingerprint") for run in runs]),
        ("training data", [run.facts.get("data_hash") for run in runs]),
        ("numbers of steps", [run.config.get("training", {}).get("max_steps") for run in runs]),
        ("code revisions", [(run.facts.get("git") or {}).get("revision") for run in runs]),
        ("versions of torch", [run.facts.get("packages", {}).get("torch") for run in runs]),
    ):
        known = {value for value in values if value is not None}
        if len(known) > 1:
            notes.append(f"The runs were made with different {what}.")
    return notes
