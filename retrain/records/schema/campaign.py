"""``manifest.json`` of a campaign or a single run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from retrain.records.schema.base import Record, Row

STATES = ("pending", "running", "interrupted", "done", "failed", "stopped")
ENDED = ("done", "failed", "stopped")  # Final states of a run


@dataclass(frozen=True)
class Seal(Record):
    """Hashes of a run's evaluations. A row's hash covers the hash of the row before and the row without its seconds."""

    data: Annotated[str, "Hash of the problems, training and held-out."]
    evaluations: Annotated[int, "Rows of `evals.jsonl`."]
    evaluations_sha256: Annotated[str, "SHA-256 over them."]
    completions: Annotated[int, "Rows of `emergence/evaluations.jsonl`."]
    completions_sha256: Annotated[str, "SHA-256 over them."]


@dataclass(frozen=True)
class RunEntry(Record):
    """One run in ``manifest.json``."""

    run_id: Annotated[str, "Name of the run, unique in its campaign."]
    label: Annotated[str, "Label of its condition."] = ""
    seed: Annotated[int | None, "Seed of the run."] = None
    state: Annotated[
        str,
        "`pending`, `running`, `interrupted`, `done`, `failed` or `stopped`. A process that was killed leaves its "
        "runs `running`: `retrain status` tells by the directory's lock that nobody is.",
    ] = "pending"
    reason: Annotated[str | None, "Why it failed or was stopped."] = None
    step: Annotated[int, "Steps finished when the state was written."] = 0
    max_steps: Annotated[int, "Steps planned."] = 0
    path: Annotated[str, "The run's directory below this one; `.` for a single run."] = "."
    fingerprint: Annotated[str, "Hash of the settings that later runs under this name must agree with."] = ""
    log: Annotated[str | None, "After a failure, the log that has the traceback."] = None
    worker: Annotated[str | None, "While a worker process trains it, which."] = None
    seal: Annotated[Row | None, "Hashes of its evaluations so far; none of runs that earlier versions began."] = None
    omitted_if_empty = ("log", "worker", "seal")


@dataclass(frozen=True)
class InterimAnalysis(Record):
    """The interim analysis of a campaign."""

    metric: Annotated[str, "Name of the measure that decides, `summary:key`."]
    seeds: Annotated[list[int], "The seeds that it saw, in the declared order."]
    baseline: Annotated[str, "Label of the baseline."]
    differences: Annotated[
        dict[str, list[float | None]],
        "By condition, the paired difference of every seed; null where a run has no value.",
    ]
    p: Annotated[
        dict[str, float], "By condition, p of no typical difference, corrected for all conditions and analyses."
    ]
    decided: Annotated[list[str], "Labels of the conditions that are better or worse; their later seeds are `stopped`."]


@dataclass(frozen=True)
class CampaignDeclaration(Record):
    """The declaration of a campaign's comparison; records of earlier versions lack some of its keys."""

    primary_metric: str = "final"
    equivalence_margin: float | None = None
    sequential: str = "off"
    baseline: str = ""
    conditions: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    max_steps: dict[str, int] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    omitted_if_empty = ("settings", "data")


@dataclass(frozen=True)
class CampaignManifest(Record):
    """The runs of a directory, and facts about all of them."""

    format: Annotated[int, "Version of the format: 1."]
    name: Annotated[str, "Name of the campaign."]
    created: Annotated[float, "When it was first started (seconds since the epoch)."]
    runs: Annotated[list[Row], "Every run, in the order in which they start."]  # RunEntry
    updated: Annotated[float | None, "When the file was written (seconds since the epoch)."] = None
    declared: Annotated[
        Row,
        "Declaration of the comparison, kept when the first run began: keys of `[campaign]`, `baseline`, "
        "`conditions`, `seeds`, and by label `max_steps`, `settings` and `data` (hashes).",
    ] = field(default_factory=dict)
    registry: Annotated[
        str | None, "When the declaration went into the registry, `on` before that, `off` with `--no-registry`."
    ] = None
    notes: Annotated[list[str], "Deviations from the declaration, for a reader of the verdict."] = field(
        default_factory=list
    )
    lanes: Annotated[int | None, "Most runs that step together; taken from here on resume."] = None
    slots: Annotated[int | None, "Workers that the cohorts were cut for, where there are several."] = None
    cohorts: Annotated[list[list[str]], "Runs that step together; taken from here on resume."] = field(
        default_factory=list
    )
    memory: Annotated[
        dict[str, dict[str, int]],
        "For every run that has begun, the bytes of a decode batch (`decode_bytes`) and the tokens of a micro-batch "
        "(`micro_batch_tokens`) with which it last started; a resume takes them from the checkpoint.",
    ] = field(default_factory=dict)
    interim: Annotated[Row | None, "The interim analysis and its decision, written before it stops anything."] = None
    comparison: Annotated[Row | None, "The same as in `comparison.json`."] = None
    squeeze: Annotated[Row | None, "The same as `squeeze/analysis.json`, of the first run."] = None
    squeezes: Annotated[
        dict[str, Row], 'With `[squeeze] runs = "one per condition"`, the same of the other conditions, by label.'
    ] = field(default_factory=dict)
    report: Annotated[str | None, "File name of the report, once it is written."] = None
    omitted_if_empty = (
        "updated", "declared", "registry", "notes", "lanes", "slots", "cohorts", "memory", "interim", "comparison",
        "squeeze", "squeezes", "report",
    )  # fmt: skip


@dataclass(frozen=True)
class CheckpointFiles(Record):
    """``manifest.json`` of a checkpoint."""

    format: Annotated[int, "Layout of the checkpoint: 3."]
    sha256: Annotated[dict[str, str], "SHA-256 of every file, by its path below the checkpoint."]
