"""Run workers as tasks of a Slurm job array.

One ``sbatch`` submits all workers, and each claims tasks as soon as Slurm starts it. The script is rendered from
``slurm.sh.j2``, or from the user's ``[slurm] template``. A requeued worker keeps its slot. A worker that has started
and ended while tasks are left is submitted again; a worker that never started or was cancelled is not replaced. With
``cluster = "local"`` the same script runs on this machine.
"""

from __future__ import annotations

import os
import queue
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jinja2

from retrain.campaign.planning.plan import Plan
from retrain.campaign.running import protocol
from retrain.campaign.running.protocol import Message, WorkerEnd, command_of
from retrain.campaign.running.tasks import WORKERS, home_of, newest
from retrain.campaign.running.workers import CampaignWorkers, has_living_worker
from retrain.config import Config
from retrain.config.machine import GPU_OPTIONS
from retrain.errors import UsageError, plural
from retrain.files import existing_file, read_json_if_present, write_json, write_text, writing
from retrain.records.schema.base import Row
from retrain.util.processes import end_words, start_logged, with_imports

LOOK_SECONDS = 30.0  # Seconds between `sacct` queries for the states of all tasks
WAIT_SECONDS = 20.0  # Seconds after which the number of running workers is reported, unless all run
WAITING = {"PENDING", "REQUEUED"}
# States of a task that Slurm does not requeue
ENDED = {
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE",
}  # fmt: skip
RECORD = "slurm_jobs.json"
COMMAND_SECONDS = 60.0


@dataclass(eq=False)
class SlurmTask:
    """Newest Slurm task of a slot. ``job``: the task's id in Slurm; ``before``: number of the slot's newest process at
    submission; ``process``: with ``cluster = "local"``, the process that runs the script."""

    job: str
    log: Path
    before: int
    process: subprocess.Popen[bytes] | None = None


class SlurmExecutor:
    """Starts workers as tasks of a job array. With ``cluster = "local"``, they share this machine's ``cores``."""

    def __init__(self, plan: Plan, cores: int):
        self.plan, self.config, self.directory = plan, plan.specs[0].config, plan.directory
        assert self.config.campaign.workers != "auto"  # guaranteed by a rule of the configuration
        self.slots, self.cores = self.config.campaign.workers, cores
        self.is_slurm = self.config.slurm.cluster == "slurm"
        self._tasks: dict[int, SlurmTask] = {}
        self._states: dict[str, str] = {}
        self._polled_at = self._submitted_at = 0.0
        self._begun = False
        self._notes: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def has_gpu(self) -> bool:
        return self.config.backend.devices != "cpu"

    def start(self, slots: Sequence[int]) -> None:
        """Submit workers; the first call adds all slots without a living worker. Raises UsageError if Slurm refuses."""
        if not self._begun:
            self._cancel_leftovers()
            living = [slot for slot in range(1, self.slots + 1) if slot not in slots]
            slots, self._begun = [slot for slot in living if not has_living_worker(self._home(slot))] + [*slots], True
            slots = sorted(slots)
        new = [slot for slot in slots if slot not in self._tasks]
        if not new:
            return
        folder = self.directory / WORKERS
        script = folder / f"slurm_{1 + len([*folder.glob('slurm_*.sh')])}.sh"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_text(script, self._script(new, folder))
        if self.is_slurm:
            job = self._submit(script)
            ids = {slot: f"{job}_{slot}" for slot in new}
            self._notes.put(Message(f"asked Slurm for {plural(len(new), 'worker')}: job {job}; logs are in {folder}"))
        else:
            ids = {slot: str(slot) for slot in new}
            self._notes.put(
                Message(f"{plural(len(new), 'worker')} on this machine, without Slurm; logs are in {folder}")
            )
        for slot, task in ids.items():
            log = Path(str(self._log(folder)).replace("%A", task.partition("_")[0]).replace("%a", str(slot)))
            self._tasks[slot] = SlurmTask(task, log, newest(self._home(slot)))
            if not self.is_slurm:
                environment = with_imports({**os.environ, "SLURM_ARRAY_TASK_ID": str(slot)})
                self._tasks[slot].process = start_logged(["bash", str(script)], log, environment)
        self._submitted_at, self._polled_at = time.monotonic(), 0.0
        self._record(closed=False)

    def look(self, slot: int) -> WorkerEnd | None:
        task = self._tasks.get(slot)
        if task is None:
            return None
        if task.process is not None:
            status = task.process.poll()
            if status is None:
                return None
            del self._tasks[slot]
            return WorkerEnd(f"{end_words(status)}; what it printed is in {task.log}", excused=status == 0)
        state = self._state(task.job)
        begun = newest(self._home(slot)) > task.before
        if state not in ENDED:
            return WorkerEnd("waits in the queue again", excused=True) if state in WAITING and begun else None
        del self._tasks[slot]
        printed = f"; what it printed is in {task.log}"
        if not begun:
            return WorkerEnd(f"(job {task.job}) did not begin: Slurm says {state}{printed}", final=True)
        if state == "CANCELLED":
            words = f"(job {task.job}) was cancelled: Slurm says {state}; it is not replaced"
            return WorkerEnd(words, final=True)
        return WorkerEnd(f"(job {task.job}) was ended: Slurm says {state}{printed}", excused=state == "COMPLETED")

    def notes(self) -> Iterator[Message]:
        while not self._notes.empty():
            yield self._notes.get()
        if self._submitted_at and time.monotonic() - self._submitted_at > WAIT_SECONDS:
            self._submitted_at = 0.0
            running = sum(newest(self._home(slot)) > task.before for slot, task in self._tasks.items())
            if running < len(self._tasks):
                count = plural(len(self._tasks), "worker")
                words = f"{count} asked of Slurm, {running} run; the others begin when Slurm has room for them"
                yield Message(words)

    def kill(self, slot: int) -> None:
        task = self._tasks.pop(slot, None)
        if task is not None and task.process is not None:
            task.process.kill()
            task.process.wait()
        elif task is not None:
            self._command("scancel", "--signal=KILL", "--full", task.job)
            self._command("scancel", task.job)

    def close(self) -> None:
        jobs = [task.job for task in self._tasks.values()]
        if self.is_slurm:
            self._cancel_leftovers()
        for slot in [*self._tasks]:
            if not self.is_slurm:
                self.kill(slot)
        if jobs or (self.directory / WORKERS / RECORD).exists():
            with suppress(OSError):
                self._record(closed=True)

    def _home(self, slot: int) -> Path:
        return home_of(self.directory, slot)

    def _state(self, job: str) -> str:
        if time.monotonic() - self._polled_at >= LOOK_SECONDS:
            self._polled_at = time.monotonic()
            ids = [word for task in self._tasks.values() for word in ("-j", task.job)]
            for line in self._command("sacct", "-o", "JobID,State,NodeList", "--parsable2", *ids).splitlines()[1:]:
                name, state, *_ = line.split("|")
                self._states[name] = state.partition(" ")[0].rstrip("+")
        return self._states.get(job, "")

    def _submit(self, script: Path) -> str:
        command = ["sbatch", str(script)]
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        try:
            environment = with_imports(outside)
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        except OSError as error:
            raise UsageError(f"Slurm takes no job: {error}; its script is {script}, see [slurm]") from error
        match = re.search(r"job (\d+)", done.stdout)
        if done.returncode or match is None:
            words_of_slurm = " ".join(done.stderr.split()) or f"sbatch ended with exit status {done.returncode}"
            raise UsageError(f"Slurm takes no job: {words_of_slurm}; its script is {script}, see [slurm]")
        return match[1]

    def _script(self, slots: Sequence[int], folder: Path) -> str:
        slurm, path = self.config.slurm, Path(__file__).with_name("slurm.sh.j2")
        if slurm.template is not None:
            path = existing_file(slurm.template, self.plan.folder, "[slurm] template", UsageError)
        threads = slurm.cpus
        if not self.is_slurm:
            threads = threads or max(1, self.cores // self.slots)
        device = "gpu" if self.has_gpu() else "cpu"
        more = ["--requeue"] if self.is_slurm else []
        command = shlex.join(command_of(protocol.PROGRAM, self.directory, "SLOT", device, *more))
        try:
            return jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined).from_string(
                path.read_text()
            ).render(
                options=sbatch_options(self.config, self.plan.name, slots, str(self._log(folder))),
                setup=slurm.setup, threads=threads, own_gpu=self.has_gpu(),
                launcher="srun" if self.is_slurm else "", command=command.replace("SLOT", '"$SLURM_ARRAY_TASK_ID"'),
            )  # fmt: skip
        except jinja2.TemplateError as error:
            raise UsageError(f"[slurm] template {path} cannot be rendered: {error}") from error

    def _log(self, folder: Path) -> Path:
        return folder.absolute() / "slurm_%A_%a.log" if self.is_slurm else folder / "worker_%a.log"

    def _record(self, closed: bool) -> None:
        jobs = {str(slot): task.job for slot, task in self._tasks.items()} if self.is_slurm else {}
        before = read_json_if_present(self.directory / WORKERS / RECORD) or {}
        jobs = {**before.get("jobs", {}), **jobs}
        write_json(self.directory / WORKERS / RECORD, {"jobs": jobs, "closed": closed})

    def _cancel_leftovers(self) -> None:
        # Tasks of an earlier controller may still be queued
        record: Row = read_json_if_present(self.directory / WORKERS / RECORD) or {}
        if self.is_slurm and record.get("jobs") and not record.get("closed"):
            self._command("scancel", "--state=PENDING", *record["jobs"].values())

    def _command(self, *arguments: str) -> str:
        # Errors of Slurm's commands show in the states of tasks
        with suppress(OSError, subprocess.TimeoutExpired):
            return subprocess.run(
                arguments, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
            ).stdout
        return ""


def slurm_workers(plan: Plan, cores: int) -> CampaignWorkers:
    """Return the workers of a plan. Raises UsageError if ``cluster = "slurm"`` and Slurm is not installed."""
    absent = [name for name in ("sbatch", "srun") if not shutil.which(name)]
    if plan.specs[0].config.slurm.cluster == "slurm" and absent:
        raise UsageError(
            f'executor = "slurm": there is no {absent[0]} on this machine; start retrain where jobs are submitted, or '
            "type --executor processes"
        )
    return CampaignWorkers(SlurmExecutor(plan, cores), plan.directory)


def sbatch_options(config: Config, name: str, slots: Sequence[int], log: str) -> list[str]:
    slurm, gpus = config.slurm, config.gpus_per_worker
    own_gpu = config.backend.devices != "cpu" and not any(option in slurm.extra for option in GPU_OPTIONS)
    options: dict[str, str | int | bool | None] = {
        "job-name": f"retrain-{re.sub(r'[^A-Za-z0-9._+-]+', '-', name)}",
        "array": f"1-{len(slots)}" if [*slots] == [*range(1, len(slots) + 1)] else ",".join(map(str, slots)),
        "partition": slurm.partition,
        "time": slurm.minutes,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "gpus-per-node": (f"{slurm.gpu_type}:{gpus}" if slurm.gpu_type else gpus) if own_gpu else None,
        "nodes": 1,
        "ntasks": 1,
        "cpus-per-task": slurm.cpus,
        "mem": slurm.memory,
        "requeue": True,
        "signal": f"USR1@{slurm.notice_s}",
        "open-mode": "append",
        "output": log,
        **slurm.extra,
    }
    given = {key: value for key, value in options.items() if value is not None and value is not False}
    return [key if value is True else f"{key}={shlex.quote(str(value))}" for key, value in given.items()]
