"""Compare runs of several directories: decide which are pooled, kept apart or refused.

Different measurements are refused: other held-out problems, or the same problems sampled differently. Runs of one
condition are pooled over directories when their settings agree; otherwise they are kept apart as ``label@directory``
and the differing keys are named. Different data, base weights, code or lengths of training are noted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from retrain.config.campaign import DECIDING_KEYS, condition_name
from retrain.config.evaluation import HELDOUT
from retrain.config.legacy import without_removed
from retrain.config.runs import differences, distinguishes_runs
from retrain.errors import UsageError, listed
from retrain.files import write_json
from retrain.records.reader import planned_configs, read_manifest
from retrain.records.registry import history
from retrain.records.schema.base import Row, Values
from retrain.records.schema.campaign import CampaignDeclaration, RunEntry
from retrain.records.schema.layout import COMPARISON, MANIFEST
from retrain.verdicts.comparison import baseline_first, compare_pairs
from retrain.verdicts.declaration import EARLIER_RULE_KEYS, DeclaredRule, Standing, pooled, standing
from retrain.verdicts.deviations import declared_entries, deviations, seal_notes
from retrain.verdicts.planning import follow_up
from retrain.verdicts.results import (
    Measure,
    RunResult,
    first_set,
    read_run,
    require_evaluations,
    require_measure,
    value_text,
)

SAMPLING = ("samples", "temperature", "max_tokens", "top_p", "top_k", "min_p")
NAMED_KEYS = 4
TRAINING_COMPARED = "No held-out evaluation was asked for ([evaluation] problems = 0); training rewards are compared."

Reader = Callable[[Path, RunEntry], RunResult]


@dataclass(frozen=True)
class Source:
    """Records of one directory: ``runs`` in order; ``labels``, the baseline first; the declaration as JSON;
    ``changed``: lines about settings in which the file now differs from the declaration; protocol ``deviations``;
    ``notes`` for the reader; the declared ``rule``."""

    name: str
    runs: list[RunResult]
    labels: list[str]
    declared: Row
    changed: list[str]
    deviations: list[str]
    notes: list[str]
    rule: DeclaredRule


@dataclass(frozen=True)
class _Pool:
    sources: Sequence[Source]

    @property
    def runs(self) -> list[RunResult]:
        return [run for source in self.sources for run in source.runs]

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(label for source in self.sources for label in source.labels))

    @property
    def notes(self) -> list[str]:
        return list(dict.fromkeys(note for source in self.sources for note in source.notes))

    @property
    def declared(self) -> Row:
        return next((source.declared for source in self.sources if source.declared), {})

    @property
    def margins(self) -> set[float | None]:
        return {source.declared.get("equivalence_margin") for source in self.sources if source.declared}

    def disagreements(self, primary: str, metric: str | None) -> list[str]:
        notes = [line for source in self.sources for line in source.changed]
        metrics = [str(source.declared.get("primary_metric", primary)) for source in self.sources]
        others = sorted(set(metrics) - {primary})
        if others and metric is None:
            listing = ", ".join((primary, *others))
            notes.append(f"The campaigns declared different metrics ({listing}); {primary} is compared.")
        if len(self.margins) > 1:
            notes.append("The campaigns declared different equivalence margins; none is applied.")
        return notes

    def rule(self, as_declared: bool) -> DeclaredRule:
        """Return a single campaign's declared rule if metric and baseline are ``as_declared``, else a rule without
        interim analysis."""
        if len(self.sources) == 1 and as_declared:
            return self.sources[0].rule
        return DeclaredRule(earlier=next((source.rule.earlier for source in self.sources if source.rule.earlier), ""))

    def standing(self, runs: Sequence[RunResult], declared: Measure, compared: Measure, baseline: str) -> Standing:
        deviations = [clause for source in self.sources for clause in source.deviations]
        if len(self.sources) > 1:
            return pooled(len(self.sources), deviations)
        declaration = CampaignDeclaration.from_row(self.declared)
        return standing(declaration, runs, declared, compared, baseline, deviations)


def compare_directories(
    directories: Sequence[Path], *, metric: str | None = None, baseline: str | None = None, read: Reader = read_run
) -> Row:
    """Compare the runs of these campaigns and single runs. Return the ``Comparison`` as JSON, with ``directories``.

    ``metric`` (a text for ``Measure.parse``) defaults to the declared metric of the first campaign (accuracy: that of
    training if there are no held-out evaluations), ``baseline`` (a condition's name) to the first condition.
    ``read`` reads a run's files. Raises UsageError for a directory that is no campaign or run, an unknown metric or
    baseline, and runs with different held-out problems or sampling settings.
    """
    directories = list({path.resolve(): path for path in directories}.values())
    names = _names(directories)
    pool = _Pool([read_source(path, name, read) for path, name in zip(directories, names, strict=True)])
    runs, set_name = pool.runs, first_set(pool.runs)
    primary = str(pool.declared.get("primary_metric", "final"))
    declared = Measure.parse(primary, set_name)
    compared = declared if metric is None else Measure.parse(metric, set_name)
    if metric is not None:
        require_evaluations(compared, runs)
    if compared.held_out:
        _require_same_evaluation(pool.sources, compared.held_out)
    warnings = [*pool.notes, *pool.disagreements(primary, metric), *_keep_apart(pool.sources)]
    runs, repeats = _without_repeats(runs)
    warnings += [*repeats, *_differences(runs)]
    labels = baseline_first(pool.labels, baseline)
    measure = compared
    if metric is None and primary == "final" and _has_training_only(runs):
        measure = Measure("final", "correct_rate")
        warnings.append(TRAINING_COMPARED)
    require_measure(measure, runs)
    has_margin = len(pool.margins) == 1 and compared.key == declared.key
    rule = pool.rule(as_declared=compared == declared and labels == pool.labels)
    if rule.earlier:
        warnings.append(f"Declared under the rule of {rule.earlier}; judged by the present rule.")
    comparison = compare_pairs(
        runs,
        labels,
        measure,
        replace(rule, margin=next(iter(pool.margins)) if has_margin else None),
        pool.standing(runs, declared, compared, labels[0]),
        warnings,
    )
    advice = follow_up(comparison, directories[0]) if len(directories) == 1 else ""
    row = replace(comparison, follow_up=advice, declared=pool.declared).to_json()
    return row | {"directories": [str(path) for path in directories]}


def _has_training_only(runs: Sequence[RunResult]) -> bool:
    return any(run.rows for run in runs) and not any(run.evaluations for run in runs)


def conclude(directory: Path) -> Row:
    comparison = compare_directories([directory])
    del comparison["directories"]
    write_json(directory / COMPARISON, comparison)
    return comparison


def read_source(directory: Path, name: str = "", read: Reader = read_run) -> Source:
    """Read the runs of a campaign's or a single run's directory. Raises UsageError when it is neither."""
    _require_campaign(directory)
    manifest = read_manifest(directory)
    recorded = manifest.get("declared") or {}
    entries = declared_entries(directory, manifest)
    runs = [read(directory, RunEntry.from_row(entry)) for entry in entries]
    campaign = next((run.config["campaign"] for run in runs if run.config.get("campaign") is not None), {})
    for run in runs:
        run.pair = run.pair if run.config else (campaign.get("seed", 0), run.seed)
    # Early versions recorded no declaration: for these, the settings of the first run count as declared.
    keys = (*DECIDING_KEYS, *EARLIER_RULE_KEYS)
    declared = {key: campaign[key] for key in keys if key in campaign} | recorded
    configs, registered = {run.run_id: run.config for run in runs}, history(directory, manifest)
    labels = dict.fromkeys(run.label for run in runs)
    return Source(
        name or directory.name,
        runs,
        sorted(labels, key=lambda label: label != declared.get("baseline")),
        declared,
        _changed(directory, declared),
        [*deviations(directory, recorded, entries, configs), *registered.deviations],
        [*manifest.get("notes", []), *seal_notes(manifest), *registered.notes],
        DeclaredRule.of(declared, manifest.get("interim")),
    )


def _require_campaign(directory: Path) -> None:
    if not (directory / MANIFEST).is_file():
        campaign = directory.absolute().parent.parent  # if the directory is logs/<campaign>/runs/<run>
        hint = f"; its campaign is {campaign}" if (campaign / MANIFEST).is_file() else ""
        raise UsageError(f"{directory} is not the directory of a campaign or run: it has no {MANIFEST}{hint}")


def _changed(directory: Path, declared: Values) -> list[str]:
    """Return a line for each setting of the campaign's file that now differs from the declaration."""
    now = next(iter(planned_configs(directory).values()), {}).get("campaign", {})
    return [
        f"[campaign] {key} was declared as {value_text(declared[key])} and is {value_text(now[key])} in the file "
        "now: what was declared decides."
        for key in DECIDING_KEYS
        if key in declared and key in now and _present(key, declared[key]) != _present(key, now[key])
    ]


def _present(key: str, value: object) -> object:
    """Return a declared value in present terms: every stopping rule of an earlier version counts as "on"."""
    return "on" if key == "sequential" and value != "off" else value


def _names(directories: Sequence[Path]) -> list[str]:
    names = [path.resolve().name for path in directories]
    return [str(path) if names.count(name) > 1 else name for path, name in zip(directories, names, strict=True)]


def _require_same_evaluation(sources: Sequence[Source], held_out: str) -> None:
    seen: dict[str, tuple[str, object]] = {}
    for source in sources:
        for run in source.runs:
            for subject, value in _evaluation_facts(run, held_out).items():
                name, other = seen.setdefault(subject, (source.name, value))
                if other != value:
                    values = "" if "problems" in subject else f" ({other} and {value})"
                    raise UsageError(
                        f"{name} and {source.name} cannot be compared on held-out problems: {subject} differ{values}; "
                        "compare them one by one, or with --metric on a number of training"
                    )


def _evaluation_facts(run: RunResult, held_out: str) -> dict[str, object]:
    """Return the facts on which a run's held-out numbers depend, by name for messages; {} without evaluations."""
    evaluation = run.config.get("evaluation")
    if evaluation is None or not run.evaluations:
        return {}
    hashes = run.facts.get("heldout_hashes") or {HELDOUT: run.facts.get("heldout_hash")}
    sets = {section["name"]: section for section in evaluation.get("sets") or ()}
    settings = {key: value for key, value in sets.get(held_out, {}).items() if value is not None}
    return {
        "held-out problems": hashes.get(held_out) or run.facts.get("data_hash"),
        **{f"[evaluation] {key}": settings.get(key, evaluation.get(key)) for key in SAMPLING},
        "[data] prompt_template": (run.config.get("data", {}) | settings).get("prompt_template"),
    }


def _keep_apart(sources: Sequence[Source]) -> list[str]:
    """Rename, in place, conditions whose label has other settings in an earlier directory; return notes."""
    notes: list[str] = []
    first: dict[str, tuple[Source, Row]] = {}
    for source in sources:
        for index, label in enumerate(list(source.labels)):
            run = next((run for run in source.runs if run.label == label and run.config), None)
            if run is None:
                continue
            settings = {**without_removed(run.config), "rubrics of the data": run.facts.get("rubrics")}
            other, others = first.setdefault(label, (source, settings))
            keys = differences(others, settings, distinguishes_runs)
            if other is source or not keys:
                continue
            source.labels[index] = renamed = f"{label}@{source.name}"
            for run in source.runs:
                run.label = renamed if run.label == label else run.label
            changes = listed([f"{key} {b} instead of {a}" for key, (a, b) in keys.items()], NAMED_KEYS)
            notes.append(
                f"{condition_name(label)} has other settings in {source.name} than in {other.name} ({changes}): "
                "kept apart."
            )
    return notes


def _without_repeats(runs: Sequence[RunResult]) -> tuple[list[RunResult], list[str]]:
    """Return one run per condition and seed, if possible a finished one, and notes: a repeated seed is no replicate."""
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
    for subject, values in (
        ("base weights", [run.facts.get("base", {}).get("fingerprint") for run in runs]),
        ("training data", [run.facts.get("data_hash") for run in runs]),
        ("numbers of steps", [run.config.get("training", {}).get("max_steps") for run in runs]),
        ("code revisions", [(run.facts.get("git") or {}).get("revision") for run in runs]),
        ("versions of torch", [run.facts.get("packages", {}).get("torch") for run in runs]),
    ):
        if len({value for value in values if value is not None}) > 1:
            notes.append(f"The runs were made with different {subject}.")
    return notes
