"""Carry a plan out: cohorts of runs over one base, one after another, until every run is done or has failed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.campaign.manifest import DirectoryLock, Manifest, read_plan, write_plan
from retrain.campaign.plan import RunSpec, plan
from retrain.config import Loaded
from retrain.errors import Interrupted, RetrainError
from retrain.files import write_json
from retrain.record.environment import run_facts, write_environment
from retrain.record.observer import Observer

CPU_LANES, GPU_LANES = 10, 8
"""Most runs of a cohort with ``lanes = "auto"``: measured gains of a shared decode batch level off there."""


@dataclass
class Outcome:
    """How it ended. ``summary`` has comparison, squeeze, runs and paths, as in ``manifest.json``; ``saved`` is false
    when steps after the last checkpoints were given up."""

    exit_status: int
    directory: Path
    summary: dict[str, Any]
    saved: bool = True


class StopRequest:
    """SIGINT or SIGTERM while training: the first asks for an end after the step, the second ends at once."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def listening(self, observer: Observer) -> Iterator[StopRequest]:
        """Handle the signals while inside (only the main thread may)."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return

        def handle(number: int, frame: object) -> None:
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True
            observer.message("finishing the step and saving; once more to stop without saving", "warning")

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def launch(loaded: Loaded, out: Path | None, observer: Observer, retry_failed: bool = False) -> Outcome:
    """Train what the file asks for; a directory that already holds some of it is continued.

    Finished runs are not repeated, failed ones only with ``retry_failed``.
    """
    directory, specs = Path(out or loaded.config.logging.log_dir or f"logs/{loaded.path.stem}"), plan(loaded)
    with DirectoryLock(directory):
        manifest = Manifest.open(directory, loaded.config.campaign.name or loaded.path.stem, specs)
        write_plan(directory, specs, loaded.text, loaded.path)
        if loaded.is_campaign:
            write_json(directory / "config.json", run_facts(loaded.config, file=loaded.path.name))
            write_environment(directory)
        return _carry_out(manifest, specs, loaded.path.parent, observer, retry_failed)


def resume(directory: Path, observer: Observer, retry_failed: bool = False) -> Outcome:
    """Continue a run or campaign from its directory alone; failed runs only with ``retry_failed``."""
    specs, folder = read_plan(Path(directory))
    with DirectoryLock(Path(directory)):
        manifest = Manifest.open(Path(directory), Path(directory).name, specs)
        return _carry_out(manifest, specs, folder, observer, retry_failed)


def cohorts(specs: Sequence[RunSpec], lanes: int) -> list[list[RunSpec]]:
    """Consecutive runs that share a base, at most ``lanes`` together."""
    groups: list[list[RunSpec]] = []
    for spec in specs:
        if groups and len(groups[-1]) < lanes and base_key(groups[-1][0]) == base_key(spec):
            groups[-1].append(spec)
        else:
            groups.append([spec])
    return groups


def base_key(spec: RunSpec) -> str:
    """Runs with the same text here can share one base model, its wrapped layers and the held-out problems."""
    config = spec.config
    return repr(
        (
            config.model.model, config.model.revision, config.model.trust_remote_code, config.backend.devices,
            config.inference.dtype, config.lora.target_modules, config.data, config.evaluation.problems,
            config.training.max_examples, config.training.deterministic,
        )
    )  # fmt: skip


def _lane_count(specs: Sequence[RunSpec], conditions: int) -> int:
    """How many runs step together; ``auto`` keeps whole seeds together, so that pairs share their batches."""
    asked = specs[0].config.campaign.lanes
    if asked != "auto":
        return int(asked)
    import torch

    on_gpu = torch.cuda.is_available() and specs[0].config.backend.devices != "cpu"
    most = GPU_LANES if on_gpu else CPU_LANES
    return max(1, most // conditions * conditions if conditions <= most else most)


def _carry_out(
    manifest: Manifest, specs: Sequence[RunSpec], folder: Path, observer: Observer, retry_failed: bool
) -> Outcome:
    directory = manifest.directory
    observer.plan(specs)
    settled = ("done",) if retry_failed else ("done", "failed")
    todo = [spec for spec in specs if manifest.run(spec.run_id)["state"] not in settled]
    left = sum(manifest.run(spec.run_id)["state"] == "failed" for spec in specs)
    if left and not retry_failed:
        observer.message(f"{left} failed run(s) are left as they are; --retry-failed continues them", "warning")
    if todo:
        observer.message(f"loading {todo[0].config.model.model}")  # before torch and transformers are imported
    elif not left:
        observer.message(f"every run in {directory} is done; give another directory with --out to train anew")
    stop, interrupted, saved = StopRequest(), False, True
    with stop.listening(observer):
        for group in cohorts(todo, _lane_count(specs, len({spec.label for spec in specs}))) if todo else []:
            try:
                _train_cohort(manifest, group, folder, observer, lambda: stop.asked)
            except (Interrupted, KeyboardInterrupt) as end:
                interrupted, saved = True, isinstance(end, Interrupted)
                break
            _squeeze_once(manifest, specs, observer)
    if interrupted:
        for spec in todo:
            if manifest.run(spec.run_id)["state"] == "running":
                manifest.update(spec.run_id, state="interrupted", reason="stopped by the user")
                observer.run_finished(spec, "interrupted", "")
        return Outcome(130, directory, summary(manifest), saved)
    if len(specs) > 1 and any(run["state"] == "done" for run in manifest.content["runs"]):
        from retrain.campaign.comparison import compare

        runs, declared = manifest.content["runs"], specs[0].config.campaign
        labels = [spec.label for spec in specs]
        metric = None if declared.primary_metric == "final" else declared.primary_metric
        manifest.note(comparison=compare(directory, runs, labels, metric=metric, margin=declared.equivalence_margin))
    failed = any(run["state"] == "failed" for run in manifest.content["runs"])
    return Outcome(1 if failed else 0, directory, summary(manifest))


def summary(manifest: Manifest) -> dict[str, Any]:
    """What the command line prints at the end."""
    content, directory = manifest.content, manifest.directory
    paths = {"directory": str(directory), "manifest": str(directory / "manifest.json")}
    done = [run for run in content["runs"] if run["state"] == "done"]
    if done:
        paths["adapter"] = str(directory / done[0]["path"] / "final")
        paths["metrics"] = str(directory / done[0]["path"] / "metrics.jsonl")
    return {
        "name": content["name"],
        "runs": content["runs"],
        "comparison": content.get("comparison"),
        "squeeze": content.get("squeeze"),
        "paths": paths,
    }


def _train_cohort(
    manifest: Manifest, specs: Sequence[RunSpec], folder: Path, observer: Observer, stop: Callable[[], bool]
) -> None:
    """Build the runs of one cohort, restore what was saved of them, and train them together."""
    from retrain.campaign.assemble import assemble

    follower = ManifestFollower(manifest, observer)
    with ExitStack() as stack:
        try:
            cohort = assemble(manifest.directory, specs, folder, follower, stop, stack)
        except RetrainError as error:
            for spec in specs:
                follower.run_finished(spec, "failed", str(error))
            if error.exit_status == 2:
                raise  # a wrong model name or data file: nothing was trained, the message is for the user
            return
        try:
            cohort.train()
        except (Interrupted, KeyboardInterrupt):
            raise
        except Exception as error:  # the shared part failed (engine, base): none of these runs can go on
            for run in cohort.runs:
                if run.active:
                    run.fail(error)
                    follower.run_finished(run.spec, "failed", run.error or "")
        finally:
            for run in cohort.runs:
                run.recorder.close(failed=run.error is not None)


class ManifestFollower:
    """Passes everything on to the user's observer and keeps the manifest's states up to date."""

    def __init__(self, manifest: Manifest, observer: Observer):
        self.manifest, self.observer = manifest, observer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.observer, name)

    def run_started(self, spec: RunSpec, step: int, max_steps: int) -> None:
        """The run is running."""
        self.manifest.update(spec.run_id, state="running", reason=None, step=step)
        self.observer.run_started(spec, step, max_steps)

    def step(self, spec: RunSpec, row: Mapping[str, Any]) -> None:
        """Count the finished step; the next event writes it."""
        self.manifest.run(spec.run_id)["step"] = int(row["step"]) + 1
        self.observer.step(spec, row)

    def run_finished(self, spec: RunSpec, status: str, message: str = "") -> None:
        """The run is done or has failed, with the reason."""
        entry = self.manifest.run(spec.run_id)
        changes: dict[str, Any] = {"state": status, "reason": message or None}
        if status == "failed":
            changes["log"] = str(Path(entry["path"]) / "run.log")
        self.manifest.update(spec.run_id, **changes)
        self.observer.run_finished(spec, status, message)


def _squeeze_once(manifest: Manifest, specs: Sequence[RunSpec], observer: Observer) -> None:
    """After the first finished run: what rank would have been enough. A fault here costs the analysis, not the runs."""
    if manifest.content.get("squeeze"):
        return
    for spec in specs:
        if spec.config.squeeze.enabled and manifest.run(spec.run_id)["state"] == "done":
            from retrain.campaign.squeeze import squeeze_after_run

            try:
                manifest.note(squeeze=squeeze_after_run(manifest.directory, spec))
            except RetrainError as error:
                observer.message(f"squeeze analysis of {spec.run_id} failed: {error}", "warning")
            return
