"""The record of a campaign's runs and their states: one file, replaced atomically whenever an event has changed it.

``plan.json`` beside it holds what was asked: the resolved configuration of every run, which is all that a later
process needs to continue. Both are also written for a single run.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from retrain.campaign.planning.plan import Plan
from retrain.config import parse_dict
from retrain.config.campaign import DECIDING_KEYS, Campaign
from retrain.config.evaluation import HELDOUT, PART
from retrain.config.root import defines_run, flat
from retrain.config.runs import RunSpec, run_directory
from retrain.errors import UsageError, plural
from retrain.files import dumps, write_json, write_text
from retrain.ownership import MARK
from retrain.records.observer import NullObserver, Observer, SpecLike
from retrain.records.reader import RunReader, planned_configs, read_manifest, read_plan_file
from retrain.records.schema.base import Values
from retrain.records.schema.campaign import CampaignManifest, RunEntry
from retrain.records.schema.layout import FINAL, LOG, MANIFEST, METRICS, PLAN
from retrain.records.writer import RecordFiles

HOW = (
    "campaign.executor", "campaign.workers", "campaign.gpus_per_cohort", "campaign.max_restarts", "ray.address",
    "ray.cpus", "ray.server_cpus", "ray.server_gpus", "ray.ship", "ray.runtime_env",
)  # fmt: skip
"""Keys that say how the runs of a campaign are carried out, not which there are."""
CONCLUSIONS = ("comparison", "squeeze", "squeezes", "report")
"""Facts of a campaign that hold only until one of its runs goes on."""


def fingerprint(spec: RunSpec) -> str:
    """Hash of everything that defines a run: its resolved configuration, without what only names outputs.

    Only what differs from the defaults counts, so that a later release with further keys still continues the run.
    """
    config = flat(spec.config.model_dump(mode="json", by_alias=True, exclude_defaults=True))
    # Values made by a factory (empty tables and lists) are dumped although they are the default.
    given = {key: value for key, value in config if defines_run(key) and value not in ({}, [])}
    return hashlib.sha256(dumps(given).encode()).hexdigest()[:16]


def begun(entries: Sequence[Mapping[str, Any]]) -> bool:
    return any(run["state"] != "pending" or run["step"] for run in entries)


def recorded_entries(directory: Path, specs: Sequence[RunSpec]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the manifest's entries by run id, and one line for each record that is missing although runs have begun.

    Where the manifest itself is missing, the entries come from ``plan.json`` and from what the runs have left: one that
    has records counts as interrupted.
    """
    path, configs = directory / MANIFEST, planned_configs(directory)
    if not path.is_file():
        entries = _entries_without_manifest(directory, specs)
        if not begun(list(entries.values())):
            return {}, []
        lost = f"{MANIFEST} is missing: which of {plural(len(entries), 'run')} are done, failed or stopped is not known"
        return entries, [lost]
    entries, missing = {entry["run_id"]: entry for entry in read_manifest(directory)["runs"]}, []
    for spec in specs:
        entry = entries.get(spec.run_id)
        if entry is None or not begun([entry]):
            continue
        if spec.run_id not in configs and entry["fingerprint"] != fingerprint(spec):
            missing.append(f"{PLAN} is missing, and {spec.run_id} did not begin with these settings")
        metrics = run_directory(directory, spec) / METRICS
        if entry["state"] == "done" and not metrics.is_file():
            missing.append(f"{metrics.relative_to(directory)} is missing, and the run counts as done")
    return entries, missing


def _entries_without_manifest(directory: Path, specs: Sequence[RunSpec]) -> dict[str, dict[str, Any]]:
    planned = [spec.to_json() for spec in specs]
    if (directory / PLAN).is_file():
        planned = read_plan_file(directory)["runs"] + planned
    entries: dict[str, dict[str, Any]] = {}
    for run in planned:
        place = directory / "runs" / run["run_id"] if run["is_campaign"] else directory
        reader = RunReader(place)
        has_records = bool(reader.checkpoint_directories()) or any(
            (place / name).is_file() for name in (METRICS, f"{FINAL}/{MARK}")
        )
        entry = RunEntry(
            run_id=run["run_id"],
            label=run["label"],
            seed=run["seed"],
            max_steps=run["config"]["training"]["max_steps"],
            state="interrupted" if has_records else "pending",
            step=reader.last_row().get("step", -1) + 1 if has_records else 0,
        )
        entries.setdefault(entry.run_id, entry.to_row())
    return entries


def declaration(specs: Sequence[RunSpec]) -> dict[str, Any]:
    """Return what these runs declare: the ``DECIDING_KEYS``, ``baseline``, ``conditions`` (labels), ``seeds`` and
    ``max_steps`` by label."""
    campaign = specs[0].config.campaign
    steps = {spec.label: spec.config.training.max_steps for spec in specs}
    return {key: getattr(campaign, key) for key in DECIDING_KEYS} | {
        "baseline": specs[0].label,
        "conditions": list(steps),
        "seeds": list(dict.fromkeys(spec.seed for spec in specs)),
        "max_steps": steps,
    }


def freeze(
    content: dict[str, Any], specs: Sequence[RunSpec], before: Sequence[Mapping[str, Any]],
    configs: Mapping[str, Mapping[str, Any]],
) -> None:  # fmt: skip
    """Keep what is declared in a manifest's content; until a run has begun, a later start may declare it anew.

    ``before`` are the manifest's entries and ``configs`` the planned configurations, by run id, of the last start: what
    a record from an earlier release does not hold is taken from them, not from the file as it is now.
    """
    if begun(before):
        content["declared"] = {**declaration(specs), **_planned(before, configs), **(content.get("declared") or {})}
    else:
        content["declared"] = declaration(specs)


def _planned(before: Sequence[Mapping[str, Any]], configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the runs of an earlier start declared; keys that there were not then have their defaults."""
    defaults = Campaign(sequential="off")  # the oldest records know no analysis before the end
    campaign = next((config.get("campaign") or {} for config in configs.values()), {})
    steps = {run["label"]: run["max_steps"] for run in before if run.get("max_steps") is not None}
    return {key: campaign.get(key, getattr(defaults, key)) for key in DECIDING_KEYS if configs} | {
        "baseline": before[0]["label"],
        "conditions": list(dict.fromkeys(run["label"] for run in before)),
        "seeds": list(dict.fromkeys(run["seed"] for run in before)),
        **({"max_steps": steps} if steps else {}),
    }


class Manifest:
    """``manifest.json`` of one directory, in memory and on disk.

    ``files`` is the thread that writes it and what else belongs to the whole directory, in order; what must be read
    from there, or hold when the process is killed, is waited for with ``files.flush()``. The end of the ``with`` block
    waits as well. Each event also raises StorageError when an earlier one could not be written.

    An event costs the same whatever the number of runs: at most one write waits, which takes what all events up to its
    turn have changed, and makes only that into text anew.
    """

    def __init__(self, directory: Path, content: dict[str, Any], guard: Callable[[], None] = lambda: None):
        self.directory, self.content = directory, content
        self.files = RecordFiles(directory, guard)
        self._by_id: dict[str, dict[str, Any]] = {run["run_id"]: run for run in content["runs"]}
        self._lock = threading.Lock()
        """Held while the entries of runs change, and while the writing thread copies those that have changed."""
        self._pieces = _JsonPieces()
        self._changed_runs, self._changed_facts = set(self._by_id), set(content)
        self._waits = False

    def __enter__(self) -> Manifest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not self.files.close() and error is None:
            self.files.check()

    @classmethod
    def open(
        cls, directory: Path, name: str, specs: Sequence[RunSpec], guard: Callable[[], None] = lambda: None
    ) -> Manifest:
        """Create the directory's manifest, or continue the one that is there. ``guard`` is called before each write.

        New runs of an extended plan are added; until one has begun, runs that are no longer planned are left out.
        Settings of known runs become those of the plan, which the caller has had accepted; a finished run that is to
        take more steps is pending again, and what was concluded is forgotten.
        """
        path = directory / MANIFEST
        new = CampaignManifest(format=1, name=name, created=time.time(), runs=[])
        content = read_manifest(directory) if path.exists() else new.to_row()
        if not begun(content["runs"]):
            planned = {spec.run_id for spec in specs}
            content["runs"] = [run for run in content["runs"] if run["run_id"] in planned]
        known = {run["run_id"]: run for run in content["runs"]}
        for run in content["runs"]:
            run.pop("worker", None)  # of a process that is no more
        for spec in specs:
            digest, run = fingerprint(spec), known.get(spec.run_id)
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

    def run(self, run_id: str) -> dict[str, Any]:
        """The entry of one run, to be read; ``update`` and ``step`` change it."""
        return self._by_id[run_id]

    def step(self, run_id: str, step: int) -> None:
        """How many steps a run has done; the next event writes it."""
        self._change(run_id, {"step": step})

    def update(self, run_id: str, without: Sequence[str] = (), **changes: Any) -> None:
        """Change a run's entry (state, reason, step, …), drop the keys ``without``, and write."""
        self._change(run_id, changes, without)
        self._write_changes()

    def note(self, **facts: Any) -> None:
        """Set facts of the whole campaign (squeeze, comparison, …) and write. The values are written by another thread:
        they must not be changed in place any more."""
        with self._lock:
            self.content.update(facts)
            self._changed_facts.update(facts)
        self._write_changes()

    def write(self) -> None:
        """Have the file replaced by all that ``content`` says now."""
        with self._lock:
            self._changed_runs.update(self._by_id)
            self._changed_facts.update(self.content)
        self._write_changes()

    def _change(self, run_id: str, changes: Mapping[str, Any], without: Sequence[str] = ()) -> None:
        with self._lock:
            entry = self._by_id[run_id]
            entry.update(changes)
            for key in without:
                entry.pop(key, None)
            self._changed_runs.add(run_id)

    def _write_changes(self) -> None:
        """Have the file replaced, also after a failure, which the new one may make good."""
        with self._lock:
            self.content["updated"] = time.time()
            self._changed_facts.add("updated")
            waits, self._waits = self._waits, True
        if not waits:
            self.files.write(self._replace, always=True)
        self.files.check()

    def _replace(self) -> None:
        with self._lock:
            self._waits = False
            content = dict(self.content)
            facts = {key: content[key] for key in self._changed_facts if key in content and key != "runs"}
            runs = {run_id: dict(self._by_id[run_id]) for run_id in self._changed_runs}
            self._changed_facts, self._changed_runs = set(), set()
        self._pieces.change(facts, runs)
        write_text(self.directory / MANIFEST, self._pieces.text(content, self._by_id))


class CampaignObserver(NullObserver):
    """Records what happens to runs in the manifest, and passes it to ``observer``."""

    def __init__(self, manifest: Manifest, observer: Observer):
        self.manifest, self.observer = manifest, observer

    def placed(self, spec: SpecLike, worker: str) -> None:
        self.manifest.update(spec.run_id, worker=worker)
        self.observer.placed(spec, worker)

    def run_started(self, spec: SpecLike, step: int, max_steps: int) -> None:
        self.manifest.update(spec.run_id, state="running", reason=None, step=step)
        self.observer.run_started(spec, step, max_steps)

    def step(self, spec: SpecLike, row: Values) -> None:
        self.manifest.step(spec.run_id, int(row["step"]) + 1)  # the next event writes it
        self.observer.step(spec, row)

    def evaluated(self, spec: SpecLike, name: str, row: Values) -> None:
        self.observer.evaluated(spec, name, row)

    def run_finished(self, spec: SpecLike, status: str, message: str = "") -> None:
        changes: dict[str, Any] = {"state": status, "reason": message or None}
        if status == "failed":
            changes["log"] = str(Path(self.manifest.run(spec.run_id)["path"]) / LOG)
        self.manifest.update(spec.run_id, without=["worker"], **changes)
        self.observer.run_finished(spec, status, message)

    def message(self, text: str, level: str = "info") -> None:
        self.observer.message(text, level)

    def note(self, facts: Mapping[str, Any]) -> None:
        content = self.manifest.content
        by_run = {key: {**content.get(key, {}), **facts[key]} for key in ("squeezes", "memory") if key in facts}
        self.manifest.note(**{**facts, **by_run})


def summary(manifest: Manifest) -> dict[str, Any]:
    content, directory = manifest.content, manifest.directory
    paths = {"directory": str(directory), "manifest": str(directory / MANIFEST)}
    if content.get("report"):
        paths["report"] = str(directory / content["report"])
    done = [run for run in content["runs"] if run["state"] == "done"]
    if done:
        paths["adapter"] = str(directory / done[0]["path"] / FINAL)
        paths["metrics"] = str(directory / done[0]["path"] / METRICS)
    evaluations = _evaluations(directory / content["runs"][0]["path"]) if len(content["runs"]) == 1 else {}
    kept = {key: content.get(key) for key in ("name", "runs", "comparison", "squeeze", "squeezes")}
    return kept | {"evaluations": evaluations, "paths": paths}


def _evaluations(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the first accuracy of a run on each held-out set, and the last with its interval over problems."""
    found: dict[str, dict[str, Any]] = {}
    for row in RunReader(directory).evaluations():
        name = str(row.get("name", HELDOUT))
        rate = row.get(f"eval/{name}/correct_rate")
        if rate is None or name.endswith(PART):
            continue
        last = {key: row.get(f"eval/{name}/{key}") for key in ("ci_low", "ci_high", "problems")}
        found[name] = {"before": found.get(name, {}).get("before", rate), "after": rate, **last}
    return found


def write_plan(plan: Plan) -> None:
    """Write ``plan.json``: the file as it was given, where it lay (relative paths in it are looked up there), the
    settings that were applied to it, and every run with its resolved configuration. Of a plan without a file, what is
    there says where it came from."""
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
    """The plan in ``plan.json``, with ``section.key=value`` settings applied to each run.

    Raises UsageError when the directory holds no plan, or a setting is none for runs that are planned already.
    """
    if not (directory / PLAN).is_file():
        campaign = directory.absolute().parent.parent  # of logs/<campaign>/runs/<run>
        hint = f"; it is a run of a campaign, type: retrain resume {campaign}" if (campaign / PLAN).is_file() else ""
        raise UsageError(f"{directory} is not a run or campaign directory of retrain: it has no {PLAN}{hint}")
    content = read_plan_file(directory)
    single = not all(run["is_campaign"] for run in content["runs"])
    for key in (setting.partition("=")[0].strip() for setting in sets):
        mine = [run["label"] for run in content["runs"] if key in run["overrides"]]
        if single and key in HOW:
            raise UsageError(f"{directory} is a single run, which trains in this process: {key} is for campaigns")
        if mine or (key.startswith("campaign.") and key not in HOW):
            why = f"is what makes the condition {mine[0]}" if mine else "says which runs there are"
            raise UsageError(f"--set {key} {why}: change the file and type retrain train")
    specs = [RunSpec.from_json(run, parse_dict(run["config"], sets)) for run in content["runs"]]
    return Plan(specs, directory, Path(content["folder"]), directory.name, sets=tuple(sets))


class _JsonPieces:
    """Indented JSON of a mapping whose key ``runs`` lists mappings, as ``files.dumps`` writes it, byte by byte.

    It is held in pieces, one for each fact and run: what has not changed is not serialised again.
    """

    def __init__(self) -> None:
        self._facts: dict[str, str] = {}
        self._runs: dict[str, str] = {}

    def change(self, facts: Mapping[str, Any], runs: Mapping[str, Mapping[str, Any]]) -> None:
        """Make these facts, by key, and entries of runs, by run id, into text."""
        for key, value in facts.items():
            self._facts[key] = f"{dumps(key)}: {_indented(value, 2)}"
        for run_id, entry in runs.items():
            self._runs[run_id] = _indented(entry, 4)

    def text(self, keys: Iterable[str], run_ids: Iterable[str]) -> str:
        """The whole, with the facts and runs in this order; facts never given to ``change`` are left out."""
        runs = ",\n    ".join([self._runs[run_id] for run_id in run_ids])
        whole = f'"runs": [\n    {runs}\n  ]' if runs else '"runs": []'
        facts = [whole if key == "runs" else self._facts[key] for key in keys if key == "runs" or key in self._facts]
        return "{\n  " + ",\n  ".join(facts) + "\n}\n"


def _indented(value: Any, by: int) -> str:
    return dumps(value, indent=2).replace("\n", "\n" + " " * by)
