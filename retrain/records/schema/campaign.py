"""``manifest.json`` of a campaign or a single run."""

from __future__ import annotations

from dataclasses import dataclass, field

from retrain.records.schema.base import Record, Row

STATES = ("pending", "running", "interrupted", "done", "failed", "stopped")
ENDED = ("done", "failed", "stopped")  # Final states of a run


@dataclass(frozen=True)
class Seal(Record):
    """Hashes of a run's evaluations. Each covers the hash of the row before and the row without its seconds."""

    data: str
    """Hash of the problems, training and held-out."""
    evaluations: int
    """Rows of `evals.jsonl`."""
    evaluations_sha256: str
    """SHA-256 over them."""
    completions: int
    """Rows of `emergence/evaluations.jsonl`."""
    completions_sha256: str
    """SHA-256 over them."""


@dataclass(frozen=True)
class RunEntry(Record):
    """One run in ``manifest.json``."""

    run_id: str
    """Name of the run, unique in its campaign."""
    label: str = ""
    """Label of its condition."""
    seed: int | None = None
    """Seed of the run."""
    state: str = "pending"
    """`pending`, `running`, `interrupted`, `done`, `failed` or `stopped`. A process that was killed leaves its runs
    `running`: `retrain status` tells by the directory's lock that nobody is."""
    reason: str | None = None
    """Why it failed or was stopped."""
    step: int = 0
    """Steps finished when the state was written."""
    max_steps: int = 0
    """Steps planned."""
    path: str = "."
    """The run's directory below this one; `.` for a single run."""
    fingerprint: str = ""
    """Hash of the settings that later runs under this name must agree with."""
    log: str | None = None
    """After a failure, the log that has the traceback."""
    worker: str | None = None
    """While a worker process trains it, which."""
    seal: Row | None = None
    """Hashes of its evaluations so far; none of runs that earlier versions began."""  # Seal
    omitted_if_empty = ("log", "worker", "seal")


@dataclass(frozen=True)
class InterimAnalysis(Record):
    """The interim analysis of a campaign."""

    metric: str
    """Name of the measure that decides, `summary:key`."""
    seeds: list[int]
    """The seeds that it saw, in the declared order."""
    baseline: str
    """Label of the baseline."""
    differences: dict[str, list[float | None]]
    """By condition, the paired difference of every seed; null where a run has no value."""
    p: dict[str, float]
    """By condition, p of no typical difference, corrected for all conditions and analyses."""
    decided: list[str]
    """Labels of the conditions that are better or worse; their later seeds are `stopped`."""


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
    """The runs of a directory, and what is known of all of them together."""

    format: int
    """Version of the format: 1."""
    name: str
    """Name of the campaign."""
    created: float
    """When it was first started (seconds since the epoch)."""
    runs: list[Row]
    """Every run, in the order in which they start."""  # RunEntry
    updated: float | None = None
    """When the file was written (seconds since the epoch)."""
    declared: Row = field(default_factory=dict)
    """Declaration of the comparison, kept when the first run began: keys of `[campaign]`, `baseline`, `conditions`,
    `seeds`, and by label `max_steps`, `settings` and `data` (hashes)."""  # CampaignDeclaration
    registry: str | None = None
    """When the declaration went into the registry, `on` before that, `off` with `--no-registry`."""
    notes: list[str] = field(default_factory=list)
    """Deviations from the declaration, for a reader of the verdict."""
    lanes: int | None = None
    """Most runs that step together; taken from here on resume."""
    slots: int | None = None
    """Workers that the cohorts were cut for, where there are several."""
    cohorts: list[list[str]] = field(default_factory=list)
    """Runs that step together; taken from here on resume."""
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    """For every run that has begun, the bytes of a decode batch (`decode_bytes`) and the tokens of a micro-batch
    (`micro_batch_tokens`) with which it last started; a resume takes them from the checkpoint."""
    interim: Row | None = None
    """The interim analysis and its decision, written before it stops anything."""  # InterimAnalysis
    comparison: Row | None = None
    """The same as in `comparison.json`."""
    squeeze: Row | None = None
    """The same as `squeeze/analysis.json`, of the first run."""
    squeezes: dict[str, Row] = field(default_factory=dict)
    """With `[squeeze] runs = "one per condition"`, the same of the other conditions, by label."""
    report: str | None = None
    """File name of the report, once it is written."""
    omitted_if_empty = (
        "updated", "declared", "registry", "notes", "lanes", "slots", "cohorts", "memory", "interim", "comparison",
        "squeeze", "squeezes", "report",
    )  # fmt: skip


@dataclass(frozen=True)
class CheckpointFiles(Record):
    """``manifest.json`` of a checkpoint."""

    format: int
    """Layout of the checkpoint: 3."""
    sha256: dict[str, str]
    """SHA-256 of every file, by its path below the checkpoint."""
