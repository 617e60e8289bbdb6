"""Carry a plan out: cohorts of runs over one base, one after another, until every run is done or has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Any

from retrain.campaign.changes import Approval, Restart, settings_changes, version_changes
from retrain.campaign.cohorts import planned_cohorts
from retrain.campaign.design import without_sepa
from retrain.campaign.lease import DirectoryLock
from retrain.campaign.manifest import (
    MANIFEST,
    Manifest,
    planned_configs,
    read_manifest,
    read_plan,
    run_directory,
    update_plan,
    write_plan,
)
from retrain.campaign.outputs import check_places
from retrain.campaign.plan import RunSpec, plan
from retrain.campaign.references import check_references, require_packages
from retrain.campaign.sequential import look, still_wanted
from retrain.campaign.stopping import ENDINGS, StopRequest
from retrain.config import Loaded
from retrain.errors import Interrupted, LeaseLost, RetrainError, StorageError
from retrain.files import write_json
from retrain.ownership import remove_leftovers
from retrain.record.environment import SystemInfo, run_facts
from retrain.record.observer import Observer, SpecLike

if TYPE_CHECKING:
    from retrain.campaign.models import Bases


@dataclass
class Outcome:
    """How it ended. ``summary`` has comparison, squeeze, runs and paths, as in ``manifest.json``; ``saved`` is false
    when steps after the last checkpoints were given up."""

    exit_status: int
    directory: Path
    summary: dict[str, Any]
    saved: bool = True


def launch(
    loaded: Loaded, out: Path | None, observer: Observer, retry_failed: bool = False, approval: Approval | None = None
) -> Outcome:
    """Train what the file asks for; a directory that already holds some of it is continued.

    Finished runs are not repeated, unless the file asks for more steps; failed ones only with ``retry_failed``.
    ``approval`` decides about what differs from the directory's records; without it every difference is refused.
    Raises NotOurs, with nothing touched, when something of somebody else's lies where it would write, StorageError when
    the directory cannot be written, LeaseLost when another process has taken it over.
    """
    directory, specs = Path(out or loaded.config.logging.log_dir or f"logs/{loaded.path.stem}"), plan(loaded)
    approval = approval or Approval()
    check_references(loaded)
    check_places(directory, specs)
    with DirectoryLock(directory, observer.message) as lock:
        name = loaded.config.campaign.name or loaded.path.stem
        with _open(directory, name, specs, loaded.path.parent, observer, approval) as manifest:
            manifest.files.write(lambda: write_plan(directory, specs, loaded.text, loaded.path))
            if loaded.is_campaign:
                manifest.files.write(lambda: _write_facts(directory, loaded))
            return _carry_out(manifest, specs, loaded.path.parent, observer, retry_failed, lock, approval)


def _write_facts(directory: Path, loaded: Loaded) -> None:
    """What the whole campaign is made with, beside its runs' own."""
    write_json(directory / "config.json", run_facts(loaded.config, file=loaded.path.name))
    SystemInfo.now(loaded.path.parent).write(directory)


def resume(
    directory: Path, observer: Observer, retry_failed: bool = False, approval: Approval | None = None,
    sets: Sequence[str] = (),
) -> Outcome:  # fmt: skip
    """Continue a run or campaign from its directory alone, with ``section.key=value`` settings changed for all of its
    runs; failed runs only with ``retry_failed``. As ``launch`` in all else."""
    directory = Path(directory)
    specs, folder = read_plan(directory, sets)
    check_places(directory, specs)
    approval = approval or Approval()
    with (
        DirectoryLock(directory, observer.message) as lock,
        _open(directory, directory.name, specs, folder, observer, approval) as manifest,
    ):
        if sets:
            manifest.files.write(lambda: update_plan(directory, specs))
        return _carry_out(manifest, specs, folder, observer, retry_failed, lock, approval)


def _open(
    directory: Path, name: str, specs: Sequence[RunSpec], folder: Path, observer: Observer, approval: Approval
) -> Manifest:
    """The directory's manifest, once what differs from its records has been approved."""
    remove_leftovers(directory)
    entries = {}
    if (directory / MANIFEST).is_file():
        entries = {entry["run_id"]: entry for entry in read_manifest(directory)["runs"]}
    asked, told = settings_changes(specs, planned_configs(directory), entries)
    for spec in specs:
        entry = entries.get(spec.run_id)
        if entry and (entry["state"] != "done" or entry["step"] < spec.config.training.max_steps):
            asked += version_changes(run_directory(directory, spec), spec, folder)
    approval(directory, asked)
    for line in told:
        observer.message(f"changed since the last start: {line}")
    return Manifest.open(directory, name, specs)


def _carry_out(
    manifest: Manifest, specs: Sequence[RunSpec], folder: Path, observer: Observer, retry_failed: bool,
    lock: DirectoryLock, approval: Approval,
) -> Outcome:  # fmt: skip
    directory = manifest.directory
    _declared(manifest, specs)  # kept from now on
    observer.plan(specs)
    look(manifest, specs, observer)  # killed between the last run of a seed and the look at it
    settled = ("done", "stopped") if retry_failed else ("done", "failed", "stopped")
    todo = [spec for spec in specs if manifest.run(spec.run_id)["state"] not in settled]
    left = sum(manifest.run(spec.run_id)["state"] == "failed" for spec in specs)
    if left and not retry_failed:
        observer.message(f"{left} failed run(s) are left as they are; --retry-failed continues them", "warning")
    if todo:
        require_packages(spec.config for spec in todo)
        observer.message(f"loading {todo[0].config.model.model}")  # before torch and transformers are imported
    elif not left:
        observer.message(f"every run in {directory} is done; give another directory with --out to train anew")
    stop, interrupted, saved, bases = StopRequest(directory), False, True, None

    def ending() -> bool:
        lock.check()
        return stop.signal is not None

    with ExitStack() as stack:
        stack.enter_context(stop.listening(observer))
        if todo:
            from retrain.campaign.models import Bases  # after the message: it imports torch

            bases = stack.enter_context(Bases())
        for group, restart in _restarts(manifest, specs, retry_failed, approval) if todo else ():
            try:
                _train_fitting(manifest, group, folder, observer, ending, restart, bases)
            except (Interrupted, KeyboardInterrupt) as end:
                interrupted, saved = True, isinstance(end, Interrupted)
                break
            _squeeze_once(manifest, specs, folder, observer, bases)
            look(manifest, specs, observer)
    if interrupted:
        came = ENDINGS[stop.signal or SIGINT]
        for spec in todo:
            if manifest.run(spec.run_id)["state"] == "running":
                manifest.update(spec.run_id, state="interrupted", reason=came.reason)
                observer.run_finished(spec, "interrupted", "")
        return Outcome(came.status, directory, summary(manifest), saved)
    _squeeze_once(manifest, specs, folder, observer)  # killed after the last run and before its analysis
    if len(specs) > 1 and any(run["state"] == "done" for run in manifest.content["runs"]):
        from retrain.campaign.comparison import compare

        runs, labels = manifest.content["runs"], [spec.label for spec in specs]
        rule = manifest.content.get("sequential")
        manifest.note(comparison=compare(directory, runs, labels, sequential=rule, **_declared(manifest, specs)))
    if specs[0].is_campaign:
        _report(manifest, observer)
    failed = any(run["state"] == "failed" for run in manifest.content["runs"])
    return Outcome(1 if failed else 0, directory, summary(manifest))


def _restarts(
    manifest: Manifest, specs: Sequence[RunSpec], retry_failed: bool, approval: Approval
) -> Iterator[tuple[list[RunSpec], Restart]]:
    """The cohorts that have something left to do: what is unfinished of each, then what failed and is tried again.

    Of an unfinished cohort the failed runs are given as well: those that failed after the step at which the others
    go on have to be in its batches again, and fail again.
    """
    for planned in planned_cohorts(manifest, specs):
        group = still_wanted(manifest, planned)  # asked between cohorts: the sequential rule may have decided
        states = {spec.run_id: manifest.run(spec.run_id)["state"] for spec in group}
        failed = {name: int(manifest.run(name)["step"]) for name, state in states.items() if state == "failed"}
        if any(state not in ("done", "failed") for state in states.values()):
            members = [spec for spec in group if states[spec.run_id] != "done"]
            yield members, Restart(failed_at=failed, approve=approval)
        if retry_failed and failed:
            yield [spec for spec in group if spec.run_id in failed], Restart(together=False, approve=approval)


def _declared(manifest: Manifest, specs: Sequence[RunSpec]) -> dict[str, Any]:
    """Metric and margin that decide, as ``compare`` takes them; a change since the first start is told in it.

    The manifest keeps what was declared first: what is chosen after results were there is exploratory.
    """
    campaign = specs[0].config.campaign
    now = {"primary_metric": campaign.primary_metric, "equivalence_margin": campaign.equivalence_margin}
    first = manifest.content.setdefault("declared", now)
    changed = [
        f"{key} was {first[key]} at the first start and is {now[key]} now" for key in now if first[key] != now[key]
    ]
    return {
        "metric": None if campaign.primary_metric == "final" else campaign.primary_metric,
        "margin": campaign.equivalence_margin,
        "warnings": [
            *(f"{words}: what it shows is exploratory." for words in changed),
            *(f"{words}." for words in without_sepa(specs)),
        ],
    }


def summary(manifest: Manifest) -> dict[str, Any]:
    """What the command line prints at the end."""
    content, directory = manifest.content, manifest.directory
    paths = {"directory": str(directory), "manifest": str(directory / "manifest.json")}
    if content.get("report"):
        paths["report"] = str(directory / content["report"])
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


def _train_fitting(
    manifest: Manifest, specs: list[RunSpec], folder: Path, observer: Observer, stop: Callable[[], bool],
    restart: Restart, bases: Bases | None,
) -> None:  # fmt: skip
    """Train a cohort, in smaller ones where it does not fit into memory; how it was cut is kept in the manifest."""
    from retrain.campaign.fitting import DoesNotFit, smaller_cohorts

    try:
        return _train_cohort(manifest, specs, folder, observer, stop, restart, bases)
    except DoesNotFit as short:
        parts = smaller_cohorts(specs, short)
        observer.message(f"{short}: they train in {len(parts)} cohorts, one after another", "warning")
    names, now = {spec.run_id for spec in specs}, manifest.content["cohorts"]
    place = next(i for i, cohort in enumerate(now) if names & set(cohort))
    cut = [[spec.run_id for spec in part] for part in parts]
    rest = [[name for name in cohort if name not in names] for cohort in now]
    manifest.note(lanes=len(parts[0]), cohorts=[cohort for cohort in rest[:place] + cut + rest[place:] if cohort])
    for part in parts:
        _train_fitting(manifest, part, folder, observer, stop, restart, bases)


def _train_cohort(
    manifest: Manifest, specs: Sequence[RunSpec], folder: Path, observer: Observer, stop: Callable[[], bool],
    restart: Restart, bases: Bases | None,
) -> None:  # fmt: skip
    """Build the runs of one cohort, restore what was saved of them, and train them together."""
    from retrain.campaign.assemble import assemble
    from retrain.campaign.fitting import DoesNotFit
    from retrain.policy.budget import is_out_of_memory

    follower = ManifestFollower(manifest, observer)
    with ExitStack() as stack:
        try:
            cohort = assemble(manifest.directory, specs, folder, follower, stop, stack, restart, bases)
        except StorageError as error:
            raise _with_advice(error, manifest.directory) from error
        except RetrainError as error:
            if error.exit_status == 2:
                raise  # a wrong model name or data file, or changes not accepted: nothing was trained or marked
            for spec in specs:
                follower.run_finished(spec, "failed", str(error))
            return
        try:
            manifest.files.flush()  # what is trained is decided, also for a process that continues after a kill
            cohort.train()
        except (Interrupted, KeyboardInterrupt, LeaseLost):
            raise
        except StorageError as error:  # no run's fault: all of them go on once there is room
            for run in cohort.runs:
                if run.active:
                    manifest.run(run.run_id).update(state="interrupted", reason=str(error))
            with suppress(StorageError):
                manifest.write()
            raise _with_advice(error, manifest.directory) from error
        except Exception as error:  # the shared part failed (engine, base): none of these runs can go on
            active = [run for run in cohort.runs if run.active]
            if is_out_of_memory(error) and len(active) > 1 and specs[0].config.campaign.lanes == "auto":
                raise DoesNotFit(len(active) // 2, f"{len(active)} runs ran out of memory together") from error
            for run in cohort.runs:
                if run.active:
                    run.fail(error)
                    follower.run_finished(run.spec, "failed", run.error or "")
        finally:
            for run in cohort.runs:
                run.recorder.close(failed=run.error is not None)


def _with_advice(error: StorageError, directory: Path) -> RetrainError:
    return RetrainError(
        f"{error}\nEverything up to the last checkpoint is whole. Make room, or make the directory writable, "
        f"then type: retrain resume {directory}"
    )


class ManifestFollower(Observer):
    """Passes everything on to the user's observer and keeps the manifest's states up to date."""

    def __init__(self, manifest: Manifest, observer: Observer):
        self.manifest, self.observer = manifest, observer

    def plan(self, specs: Sequence[SpecLike]) -> None:
        """See ``Observer.plan``."""
        self.observer.plan(specs)

    def run_started(self, spec: SpecLike, step: int, max_steps: int) -> None:
        """The run is running."""
        self.manifest.update(spec.run_id, state="running", reason=None, step=step)
        self.observer.run_started(spec, step, max_steps)

    def step(self, spec: SpecLike, row: Mapping[str, Any]) -> None:
        """Count the finished step; the next event writes it."""
        self.manifest.run(spec.run_id)["step"] = int(row["step"]) + 1
        self.observer.step(spec, row)

    def evaluated(self, spec: SpecLike, name: str, row: Mapping[str, Any]) -> None:
        """See ``Observer.evaluated``."""
        self.observer.evaluated(spec, name, row)

    def run_finished(self, spec: SpecLike, status: str, message: str = "") -> None:
        """The run is done or has failed, with the reason."""
        entry = self.manifest.run(spec.run_id)
        changes: dict[str, Any] = {"state": status, "reason": message or None}
        if status == "failed":
            changes["log"] = str(Path(entry["path"]) / "run.log")
        self.manifest.update(spec.run_id, **changes)
        self.observer.run_finished(spec, status, message)

    def message(self, text: str, level: str = "info") -> None:
        """See ``Observer.message``."""
        self.observer.message(text, level)

    def close(self) -> None:
        """See ``Observer.close``."""
        self.observer.close()


def _report(manifest: Manifest, observer: Observer) -> None:
    """Write ``report.html``. A fault here costs the report, not the campaign: it can be made again at any time."""
    from retrain.campaign.report import REPORT, write_report

    try:
        manifest.files.flush()
        write_report(manifest.directory)
        manifest.note(report=REPORT)
    except Exception as error:  # whatever it is, all results are on the disk already
        message = f"no {REPORT}: {type(error).__name__}: {error}; type: retrain report {manifest.directory}"
        observer.message(message, "warning")


def _squeeze_once(
    manifest: Manifest, specs: Sequence[RunSpec], folder: Path, observer: Observer, bases: Bases | None = None
) -> None:
    """After the first finished run: what rank would have been enough. A fault here costs the analysis, not the runs."""
    if manifest.content.get("squeeze"):
        return
    for spec in specs:
        if spec.config.squeeze.enabled and manifest.run(spec.run_id)["state"] == "done":
            from retrain.campaign.squeeze import squeeze_after_run

            weights = run_directory(manifest.directory, spec) / "final" / "adapter_model.safetensors"
            if spec.config.backend.backend != "local" and not weights.is_file():
                return  # a backend of the user's that trains something else than a LoRA adapter
            try:
                manifest.note(squeeze=squeeze_after_run(manifest.directory, spec, folder, bases))
            except RetrainError as error:
                observer.message(f"squeeze analysis of {spec.run_id} failed: {error}", "warning")
            return
