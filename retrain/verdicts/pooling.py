"""Runs of several directories in one comparison: what may be pooled, what is kept apart, and what is refused.

Refused are numbers that measure different things: other held-out problems, or the same ones sampled otherwise. Runs of
one condition are pooled over directories when their settings agree; when not, they are kept apart as
``label@directory`` and the keys are named. Different data, base weights, code or lengths of training are noted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.config.campaign import DECIDING_KEYS, condition_name, find_label
from retrain.config.evaluation import HELDOUT
from retrain.config.legacy import without_removed
from retrain.config.runs import differences, distinguishes_runs
from retrain.errors import UsageError, listed
from retrain.files import write_json
from retrain.records.reader import planned_configs, read_manifest
from retrain.records.registry import history
from retrain.records.schema.layout import COMPARISON, MANIFEST
from retrain.records.seals import UNSEALED, declared_entries, deviations, is_sealed
from retrain.verdicts.comparison import compare_runs
from retrain.verdicts.declaration import EARLIER_RULE_KEYS, DeclaredRule, pooled, standing
from retrain.verdicts.planning import follow_up
from retrain.verdicts.results import Measure, RunResult, first_set, read_run, require_evaluations

SAMPLING = ("samples", "temperature", "max_tokens", "top_p", "top_k", "min_p")
NAMED_KEYS = 4

Reader = Callable[[Path, Mapping[str, Any]], RunResult]


@dataclass(frozen=True)
class Source:
    """One directory: its runs in their order, its labels with the baseline first, what it declared and what its file
    says otherwise since, protocol deviations of its records, what else a reader must know, and the rule that it
    declared."""

    name: str
    runs: list[RunResult]
    labels: list[str]
    declared: dict[str, Any]
    changed: list[str]
    deviations: list[str]
    notes: list[str]
    rule: DeclaredRule


def compare_directories(
    directories: Sequence[Path], *, metric: str | None = None, baseline: str | None = None, read: Reader = read_run
) -> dict[str, Any]:
    """Compare all runs of these campaigns and runs; the result is described at ``compare_runs``.

    ``metric`` and ``baseline`` are as a person writes them; unset, they are what the first campaign declared and its
    first condition. ``read`` reads a run's files. Raises UsageError when a directory holds no runs, or when what they
    measured differs.
    """
    directories = list({path.resolve(): path for path in directories}.values())
    sources = [read_source(path, name, read) for path, name in zip(directories, _names(directories), strict=True)]
    everything = [run for source in sources for run in source.runs]
    declared = next((source.declared for source in sources if source.declared), {})
    decides = str(declared.get("primary_metric", "final"))
    measure = Measure.parse(decides, first_set(everything))
    asked = measure if metric is None else Measure.parse(metric, first_set(everything))
    if metric is not None:
        require_evaluations(asked, everything)
    if asked.held_out:
        _same_evaluation(sources, asked.held_out)
    warnings = [
        *dict.fromkeys(note for source in sources for note in source.notes),
        *_disagreements(sources, decides, metric),
        *_pool(sources),
    ]
    labels = list(dict.fromkeys(label for source in sources for label in source.labels))
    runs, twice = _without_repeats(everything)
    warnings += twice + _differences(runs)
    first = (find_label(baseline, labels) or baseline) if baseline else labels[0]
    departures = [clause for source in sources for clause in source.deviations]
    comparison = compare_runs(
        runs,
        labels,
        metric=metric or (None if decides == "final" else decides),
        baseline=first,
        margin=_margin(sources) if asked.key == measure.key else None,
        warnings=warnings,
        rule=_rule(sources, measure == asked and first == labels[0]),
        standing=standing(declared, runs, measure, asked, first, departures)
        if len(sources) == 1
        else pooled(len(sources), departures),
    )
    comparison["follow_up"] = follow_up(comparison, directories[0]) if len(sources) == 1 else ""
    return comparison | {"declared": declared, "directories": [str(path) for path in directories]}


def conclude(directory: Path) -> dict[str, Any]:
    """Compare the runs of a campaign that has ended and write ``comparison.json``."""
    comparison = compare_directories([directory])
    del comparison["directories"]
    write_json(directory / COMPARISON, comparison)
    return comparison


def read_source(directory: Path, name: str = "", read: Reader = read_run) -> Source:
    """Read the runs of a campaign's or a single run's directory. Raises UsageError when it is neither."""
    if not (directory / MANIFEST).is_file():
        campaign = directory.absolute().parent.parent  # of logs/<campaign>/runs/<run>
        hint = f"; its campaign is {campaign}" if (campaign / MANIFEST).is_file() else ""
        raise UsageError(f"{directory} is not the directory of a campaign or run: it has no {MANIFEST}{hint}")
    manifest = read_manifest(directory)
    entries = declared_entries(directory, manifest)
    runs = [read(directory, entry) for entry in entries]
    # Before there was a record of it, the settings of the first run are what was declared.
    campaign = next((own for run in runs if (own := run.config.get("campaign")) is not None), {})
    keys = (*DECIDING_KEYS, *EARLIER_RULE_KEYS)
    declared = {key: campaign[key] for key in keys if key in campaign} | (manifest.get("declared") or {})
    for run in runs:
        run.pair = run.pair if run.config else (campaign.get("seed", 0), run.seed)
    recorded, registered = {run.run_id: run.config for run in runs}, history(directory, manifest)
    labels = dict.fromkeys(run.label for run in runs)
    first = [label for label in [declared.get("baseline")] if label in labels]
    return Source(
        name or directory.name,
        runs,
        list(dict.fromkeys([*first, *labels])),
        declared,
        _changed(directory, declared),
        [*deviations(directory, manifest.get("declared") or {}, entries, recorded), *registered.deviations],
        [*(manifest.get("notes") or []), *([] if is_sealed(manifest) else [UNSEALED]), *registered.notes],
        DeclaredRule.of(declared, manifest.get("interim")),
    )


def _changed(directory: Path, declared: Mapping[str, Any]) -> list[str]:
    """Name the settings whose present value in the campaign's file differs from the declared one, which decides."""
    now = next(iter(planned_configs(directory).values()), {}).get("campaign", {})
    return [
        f"[campaign] {key} was declared as {_said(declared[key])} and is {_said(now[key])} in the file now: what was "
        "declared decides."
        for key in DECIDING_KEYS
        if key in declared and key in now and _present(key, declared[key]) != _present(key, now[key])
    ]


def _present(key: str, value: object) -> object:
    """Return what a declared value means now: the stopping rules of earlier versions all mean the interim analysis."""
    return "on" if key == "sequential" and value != "off" else value


def _said(value: Any) -> str:
    return "unset" if value is None else str(value)


def _rule(sources: Sequence[Source], as_declared: bool) -> DeclaredRule:
    """Return the rule of a comparison. The interim analysis counts for its own campaign, metric and baseline alone."""
    earlier = next((source.rule.earlier for source in sources if source.rule.earlier), "")
    return sources[0].rule if len(sources) == 1 and as_declared else DeclaredRule(earlier=earlier)


def _names(directories: Sequence[Path]) -> list[str]:
    names = [path.resolve().name for path in directories]
    return [str(path) if names.count(name) > 1 else name for path, name in zip(directories, names, strict=True)]


def _disagreements(sources: Sequence[Source], decides: str, metric: str | None) -> list[str]:
    notes = [line for source in sources for line in source.changed]
    metrics = [str(source.declared["primary_metric"]) for source in sources if "primary_metric" in source.declared]
    others = sorted(set(metrics) - {decides})
    if others and metric is None:
        named = ", ".join((decides, *others))
        notes.append(f"The campaigns declared different metrics ({named}); {decides} is compared.")
    if len(_margins(sources)) > 1:
        notes.append("The campaigns declared different equivalence margins; none is applied.")
    return notes


def _margins(sources: Sequence[Source]) -> set[float | None]:
    return {source.declared.get("equivalence_margin") for source in sources if source.declared}


def _margin(sources: Sequence[Source]) -> float | None:
    margins = _margins(sources)
    return margins.pop() if len(margins) == 1 else None


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
            one = next((run for run in source.runs if run.label == label and run.config), None)
            if one is None:
                continue
            own = {**without_removed(one.config), "rubrics of the data": one.facts.get("rubrics")}
            other, settings = first.setdefault(label, (source, own))
            keys = differences(settings, own, distinguishes_runs)
            if other is source or not keys:
                continue
            source.labels[place] = renamed = f"{label}@{source.name}"
            for run in source.runs:
                run.label = renamed if run.label == label else run.label
            notes.append(
                f"{condition_name(label)} has other settings in {source.name} than in {other.name} "
                f"({_changes(keys)}): kept apart."
            )
    return notes


def _changes(keys: dict[str, tuple[Any, Any]]) -> str:
    return listed([f"{key} {b} instead of {a}" for key, (a, b) in keys.items()], NAMED_KEYS)


def _without_repeats(runs: Sequence[RunResult]) -> tuple[list[RunResult], list[str]]:
    """Keep one run for each condition and seed, a finished one if there is one: a repeated seed is no replicate."""
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
