"""Record a campaign or single run and the states of its runs in one file, replaced atomically after every event.

``plan.json`` beside it holds the resolved configuration of every run, from which the runs can be continued.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from retrain.campaign.planning.plan import Plan
from retrain.config import parse_dict
from retrain.config.campaign import DECIDING_KEYS
from retrain.config.evaluation import HELDOUT, PART
from retrain.config.root import defines_run, flat
from retrain.config.runs import RunSpec, condition_hash, run_directory
from retrain.errors import NotReadable, RetrainError, UsageError
from retrain.files import dumps, stamp_of, write_bytes, write_json, write_text
from retrain.ownership import MARK
from retrain.records.observer import NullObserver, Observer, SpecLike
from retrain.records.reader import checkpoint_paths, evaluation_rows, planned_configs, read_manifest, read_plan_file
from retrain.records.registry import OFF, ON, Registry
from retrain.records.schema.base import Row, Values
from retrain.records.schema.campaign import CampaignDeclaration, CampaignManifest, RunEntry
from retrain.records.schema.layout import CODE_DIFF, CONFIG, ENVIRONMENT, EVALS, FINAL, LOG, MANIFEST, METRICS, PLAN
from retrain.records.writer import RecordFiles
from retrain.util.session import LEASE, LOCK

# Keys that control execution and do not define runs
EXECUTION_KEYS = (
    "campaign.executor", "campaign.workers", "campaign.gpus_per_cohort", "campaign.max_restarts", "ray.address",
    "ray.cpus", "ray.server_cpus", "ray.server_gpus", "ray.ship", "ray.runtime_env",
)  # fmt: skip
# Facts of a campaign that become invalid when one of its runs continues
CONCLUSIONS = ("comparison", "squeeze", "squeezes", "report")
# Files of a campaign or run that are written before its first run begins
RECORDS = (MANIFEST, PLAN, CONFIG, ENVIRONMENT, CODE_DIFF)
CLAIM = {MARK, LOCK, LEASE}  # Files by which a process claims a directory
RESTORE = "restore the file from a copy, or begin anew with another --out"


def fingerprint(spec: RunSpec) -> str:
    """Return a hash of a run's resolved configuration without keys that only name outputs. Default values are left
    out, so that the hash stays the same in a later release with more keys."""
    config = flat(spec.config.model_dump(mode="json", by_alias=True, exclude_defaults=True))
    # Values made by a factory (empty tables and lists) are dumped although they are the default.
    settings = {key: value for key, value in config if defines_run(key) and value not in ({}, [])}
    if settings.get("inference.engine") == "local":  # the default of the releases that wrote the first fingerprints
        del settings["inference.engine"]
    return hashlib.sha256(dumps(settings).encode()).hexdigest()[:16]


def has_begun(entries: Iterable[RunEntry]) -> bool:
    return any(entry.state != "pending" or entry.step for entry in entries)


def recorded_entries(directory: Path, specs: Sequence[RunSpec]) -> tuple[dict[str, RunEntry], list[str]]:
    """Return the manifest's entries by run id, and one line for each record that is missing although runs have begun.
    Raises UsageError if runs have begun and the manifest or its declaration is missing."""
    path, configs = directory / MANIFEST, planned_configs(directory)
    if not path.is_file():
        names, runs = (METRICS, EVALS, f"{FINAL}/{MARK}"), (directory, *(directory / "runs").glob("*"))
        if any(checkpoint_paths(run) or any((run / name).is_file() for name in names) for run in runs):
            raise UsageError(f"{directory} has records of runs, but no {MANIFEST} with their declaration: {RESTORE}")
        return {}, []
    content = read_manifest(directory)
    entries, missing = {row["run_id"]: RunEntry.from_row(row) for row in content["runs"]}, []
    if has_begun(entries.values()) and not content.get("declared"):
        raise UsageError(f"{path} has no declaration, although runs have begun: {RESTORE}")
    for spec in specs:
        entry = entries.get(spec.run_id)
        if entry is None or not has_begun([entry]):
            continue
        if spec.run_id not in configs and entry.fingerprint != fingerprint(spec):
            missing.append(f"{PLAN} is missing, and {spec.run_id} did not begin with these settings")
        metrics = run_directory(directory, spec) / METRICS
        if entry.state == "done" and spec.config.training.max_steps and not metrics.is_file():
            missing.append(f"{metrics.relative_to(directory)} is missing, and the run counts as done")
    return entries, missing


def declaration(specs: Sequence[RunSpec]) -> CampaignDeclaration:
    campaign, by_label = specs[0].config.campaign, {spec.label: spec for spec in specs}
    hashed = by_label if specs[0].is_campaign else {}
    return CampaignDeclaration(
        **{key: getattr(campaign, key) for key in DECIDING_KEYS},
        baseline=specs[0].label,
        conditions=list(by_label),
        seeds=list(dict.fromkeys(spec.seed for spec in specs)),
        max_steps={label: spec.config.training.max_steps for label, spec in by_label.items()},
        settings={label: condition_hash(spec.config.to_dict()) for label, spec in hashed.items()},
    )


class Manifest:
    """``manifest.json`` of one directory, in memory and on disk.

    ``files`` is the thread that writes the records of the directory in order; ``files.flush()`` and the end of the
    ``with`` block wait until they are on disk. Methods that write raise StorageError if an earlier write failed.

    The cost of a change does not depend on the number of runs: only changed entries are serialised again, and at most
    one write is pending, which includes all changes up to its start.
    """

    def __init__(self, directory: Path, content: Row, guard: Callable[[], None] = lambda: None):
        self.directory, self.content = directory, content
        self.files = RecordFiles(directory, guard)
        self._by_id: dict[str, Row] = {run["run_id"]: run for run in content["runs"]}
        # Guards entries and their JSON texts, which callers change while the writing thread joins them
        self._lock = threading.Lock()
        self._run_texts: dict[str, str] = {}
        # Runs whose JSON text is older than their entry. The writing thread renews it, so that callers need not wait
        self._changed = set(self._by_id)
        self._fact_texts = {key: _fact_text(key, value) for key, value in content.items() if key != "runs"}
        self._waits = False

    def __enter__(self) -> Manifest:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self.files.close() and error is None:
            self.files.check()

    @classmethod
    def open(
        cls, directory: Path, name: str, specs: Sequence[RunSpec], guard: Callable[[], None] = lambda: None
    ) -> Manifest:
        """Create the directory's manifest, or continue the existing one. ``guard`` is called before each write.

        Adds new runs of an extended plan; if no run has begun, drops recorded runs that the plan lacks. Known runs get
        the plan's max_steps and fingerprint: the caller must have had changes approved. A finished run with more steps
        becomes pending again, and the campaign's CONCLUSIONS are dropped.
        """
        path = directory / MANIFEST
        new = CampaignManifest(format=1, name=name, created=time.time(), runs=[])
        content = read_manifest(directory) if path.exists() else new.to_row()
        if not has_begun(map(RunEntry.from_row, content["runs"])):
            planned = {spec.run_id for spec in specs}
            content["runs"] = [run for run in content["runs"] if run["run_id"] in planned]
        entries = {run["run_id"]: run for run in content["runs"]}
        for run in content["runs"]:
            run.pop("worker", None)  # left by a process that has ended
        for spec in specs:
            digest, run = fingerprint(spec), entries.get(spec.run_id)
            if run is not None:
                last = spec.config.training.max_steps
                if run["state"] == "done" and last > run["step"]:
                    run["state"] = "pending"
                    for conclusion in CONCLUSIONS:
                        content.pop(conclusion, None)
                run["max_steps"], run["fingerprint"] = last, digest
            if run is None:
                new_run = RunEntry(
                    run_id=spec.run_id,
                    label=spec.label,
                    seed=spec.config.training.seed,
                    max_steps=spec.config.training.max_steps,
                    path=str(run_directory(directory, spec).relative_to(directory)),
                    fingerprint=digest,
                )
                content["runs"].append(new_run.to_row())
        manifest = cls(directory, content, guard)
        manifest.write()
        return manifest

    def run(self, run_id: str) -> RunEntry:
        return RunEntry.from_row(self._by_id[run_id])

    @property
    def runs(self) -> list[RunEntry]:
        return [RunEntry.from_row(row) for row in self.content["runs"]]

    @property
    def declared(self) -> CampaignDeclaration:
        return CampaignDeclaration.from_row(self.content["declared"])

    def step(self, run_id: str, step: int) -> None:
        """Set the number of finished steps in memory; the next write includes it."""
        self._change(run_id, {"step": step})

    def seal(self, run_id: str, label: str, seal: Values) -> None:
        """Store the seal of a run's evaluations (empty: remove the seal). A condition's first seal also declares which
        problems the condition is evaluated on."""
        self._change(run_id, {"seal": dict(seal)} if seal else {}, () if seal else ("seal",))
        declared = self.content.get("declared") or {}
        data = declared.get("data") or {}
        if seal and label not in data:
            self.note(declared={**declared, "data": {**data, label: seal["data"]}})

    @cached_property
    def registry(self) -> Registry:
        return Registry(self.directory)

    @property
    def is_registered(self) -> bool:
        return self.content.get("registry", OFF) != OFF

    def declare(self, data: str) -> None:
        """Add the declaration to the registry, unless it is off or already has it. ``data``: hash of the problems."""
        if self.content.get("registry") == ON:
            self.note(registry=self.registry.declare(self.content["declared"], data))

    def update(self, run_id: str, without: Sequence[str] = (), **changes: object) -> None:
        self._change(run_id, changes, without)
        self._write_facts({})

    def note(self, **facts: object) -> None:
        self._write_facts(facts)

    def write(self) -> None:
        """Schedule a write of all ``content``, which a caller may have changed."""
        with self._lock:
            self._changed |= self._by_id.keys()
        self._write_facts(self.content)

    def _change(self, run_id: str, changes: Values, without: Sequence[str] = ()) -> None:
        with self._lock:
            entry = self._by_id[run_id]
            entry.update(changes)
            for key in without:
                entry.pop(key, None)
            self._changed.add(run_id)

    def _write_facts(self, facts: Values) -> None:
        # Also after a failed write, which the new one may repair
        with self._lock:
            self.content |= {**facts, "updated": time.time()}
            for key in (*facts, "updated"):
                if key != "runs":
                    self._fact_texts[key] = _fact_text(key, self.content[key])
            waits, self._waits = self._waits, True
        if not waits:
            self.files.write(self._replace, always=True)
        self.files.check()

    def _replace(self) -> None:
        with self._lock:
            self._waits = False
            self._run_texts |= {run_id: _indented(self._by_id[run_id], 4) for run_id in self._changed}
            self._changed.clear()
            runs = ",\n    ".join(self._run_texts[run_id] for run_id in self._by_id)
            facts = self._fact_texts | {"runs": f'"runs": [\n    {runs}\n  ]' if runs else '"runs": []'}
            text = "{\n  " + ",\n  ".join([facts[key] for key in [*self.content] if key in facts]) + "\n}\n"
        write_text(self.directory / MANIFEST, text)


def _fact_text(key: str, value: object) -> str:
    return f"{dumps(key)}: {_indented(value, 2)}"


def _indented(value: object, by: int) -> str:
    return dumps(value, indent=2).replace("\n", "\n" + " " * by)


class CampaignObserver(NullObserver):
    def __init__(self, manifest: Manifest, observer: Observer):
        self.manifest, self.observer = manifest, observer

    def placed(self, spec: SpecLike, worker: str) -> None:
        self.manifest.update(spec.run_id, worker=worker)
        self.observer.placed(spec, worker)

    def run_started(self, spec: SpecLike, step: int, max_steps: int) -> None:
        self.manifest.update(spec.run_id, state="running", reason=None, step=step)
        self.observer.run_started(spec, step, max_steps)

    def step(self, spec: SpecLike, row: Values) -> None:
        self.manifest.step(spec.run_id, int(row["step"]) + 1)  # the next write includes it
        self.observer.step(spec, row)

    def sealed(self, spec: SpecLike, seal: Values) -> None:
        self.manifest.seal(spec.run_id, spec.label, seal)
        self.manifest.declare(seal.get("data", ""))

    def evaluated(self, spec: SpecLike, name: str, row: Values) -> None:
        self.observer.evaluated(spec, name, row)

    def run_finished(self, spec: SpecLike, status: str, message: str = "") -> None:
        changes: dict[str, str | None] = {"state": status, "reason": message or None}
        entry = self.manifest.run(spec.run_id)
        if status == "failed":
            changes["log"] = str(Path(entry.path) / LOG)
        if status == "done" and self.manifest.is_registered:  # before the update: repeated after a kill
            self.manifest.registry.finish(entry, self.manifest.content["declared"])
        self.manifest.update(spec.run_id, without=["worker"], **changes)
        self.observer.run_finished(spec, status, message)

    def message(self, text: str, level: str = "info") -> None:
        self.observer.message(text, level)

    def note(self, facts: Values) -> None:
        content = self.manifest.content
        by_run = {key: {**content.get(key, {}), **facts[key]} for key in ("squeezes", "memory") if key in facts}
        self.manifest.note(**{**facts, **by_run})


@dataclass
class CampaignOutcome:
    """Result of a campaign or run. ``summary`` has comparison, squeeze, runs and paths, as in ``manifest.json``;
    ``saved`` is false when steps after the last checkpoints were lost."""

    exit_status: int
    directory: Path
    summary: Row
    saved: bool = True


def summary(manifest: Manifest) -> Row:
    content, directory, runs = manifest.content, manifest.directory, manifest.runs
    paths = {"directory": str(directory), "manifest": str(directory / MANIFEST)}
    if content.get("report"):
        paths["report"] = str(directory / content["report"])
    done = next((entry for entry in runs if entry.state == "done"), None)
    if done is not None:
        if (adapter := directory / done.path / FINAL).is_dir():  # the user may have removed it
            paths["adapter"] = str(adapter)
        if done.step:  # a run without steps has no rows
            paths["metrics"] = str(directory / done.path / METRICS)
    evaluations = _evaluations(directory / runs[0].path) if len(runs) == 1 else {}
    results = {key: content.get(key) for key in ("name", "runs", "comparison", "squeeze", "squeezes")}
    return results | {"evaluations": evaluations, "paths": paths}


def _evaluations(directory: Path) -> dict[str, Row]:
    """Return by held-out set a run's first and last correct rate, and the last confidence interval over problems."""
    evaluations: dict[str, Row] = {}
    for row in evaluation_rows(directory):
        name = str(row.get("name", HELDOUT))
        rate = row.get(f"eval/{name}/correct_rate")
        if rate is None or name.endswith(PART):
            continue
        last = {key: row.get(f"eval/{name}/{key}") for key in ("ci_low", "ci_high", "problems")}
        evaluations[name] = {"before": evaluations.get(name, {}).get("before", rate), "after": rate, **last}
    return evaluations


def write_plan(plan: Plan) -> None:
    """Write ``plan.json``: the original file, its folder (base of relative paths), the applied settings, and every run
    with its resolved configuration. A plan without a file keeps the recorded source."""
    if plan.source is None:
        content = read_plan_file(plan.directory)
        file = {key: content[key] for key in ("file", "folder", "toml", "sets") if key in content}
    else:
        path = plan.source.path
        file = {"file": path.name, "folder": str(path.resolve().parent), "toml": plan.source.text}
        file |= {"sets": list(plan.source.sets)} if plan.source.sets else {}
    runs = [spec.to_json() for spec in plan.specs]
    write_json(plan.directory / PLAN, {"format": 1, **file, "runs": runs})


def read_plan(directory: Path, sets: Sequence[str] = ()) -> Plan:
    """Return the plan in ``plan.json``, with ``section.key=value`` settings applied to each run. Raises UsageError if
    the directory has no plan, or if a setting would change what defines the runs."""
    if not (directory / PLAN).is_file():
        campaign = directory.absolute().parent.parent  # for a run in logs/<campaign>/runs/<run>
        hint = f"; it is a run of a campaign, type: retrain resume {campaign}" if (campaign / PLAN).is_file() else ""
        raise UsageError(f"{directory} is not a run or campaign directory of retrain: it has no {PLAN}{hint}")
    content = read_plan_file(directory)
    single = not all(run["is_campaign"] for run in content["runs"])
    for key in (setting.partition("=")[0].strip() for setting in sets):
        mine = [run["label"] for run in content["runs"] if key in run["overrides"]]
        if single and key in EXECUTION_KEYS:
            raise UsageError(f"{directory} is a single run, which trains in this process: {key} is for campaigns")
        if mine or (key.startswith("campaign.") and key not in EXECUTION_KEYS):
            why = f"is what makes the condition {mine[0]}" if mine else "defines the runs of the campaign"
            raise UsageError(f"--set {key} {why}: change the file and type retrain train")
    specs = [RunSpec.from_json(run, parse_dict(run["config"], sets)) for run in content["runs"]]
    return Plan(specs, directory, Path(content["folder"]), directory.name, sets=tuple(sets))


@contextmanager
def restored_when_refused(directory: Path, specs: Sequence[RunSpec]) -> Iterator[None]:
    """Restore the records in ``directory`` if the block ends with a refusal before any of the runs has begun.

    Records are written before that is known: workers need the plan on disk, and some faults are found only after
    model, data and checkpoints are loaded. A refusal is an error with exit status 2, or a PermissionError. A run has
    begun when its ``run.log`` has changed.
    """
    before = {name: _content(directory / name) for name in RECORDS}
    is_new = not (directory / MARK).exists()
    logs = [run_directory(directory, spec) / LOG for spec in specs]
    stamps = [stamp_of(log) for log in logs]
    try:
        yield
    except (RetrainError, PermissionError) as error:
        is_refusal = error.exit_status == 2 if isinstance(error, RetrainError) else True
        if is_refusal and [stamp_of(log) for log in logs] == stamps:
            for name, content in before.items():
                if content is None:
                    (directory / name).unlink(missing_ok=True)
                elif content != _content(directory / name):
                    write_bytes(directory / name, content)
            for folder in {log.parent for log in logs} - {directory}:
                _remove_claim(folder)
            if is_new:
                with suppress(OSError):
                    (directory / "runs").rmdir()
                _remove_claim(directory)
        raise


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes() if path.is_file() else None
    except PermissionError as error:
        raise NotReadable(path, error) from error


def _remove_claim(directory: Path) -> None:
    if directory.is_dir() and {path.name for path in directory.iterdir()} <= CLAIM:
        for name in CLAIM:
            (directory / name).unlink(missing_ok=True)
        with suppress(OSError):
            directory.rmdir()
