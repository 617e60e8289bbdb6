"""The executor of workers that are tasks of a Slurm job array, asked for through submitit.

All workers are asked for at once, and each takes jobs once Slurm has let it begin. Controller and workers speak through
files in the campaign's directory (``exchange``), ``slurm_task`` is the other end. A task that Slurm has put back into
the queue is waited for; for one that has ended after it had begun another is asked for; one that never began, or that
somebody cancelled, is not replaced.
"""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import retrain.campaign.running.spawning as spawning
from retrain.campaign.planning.plan import Plan
from retrain.campaign.running.exchange import CLOSED, Tail, answers_of, append, commands_of, newest
from retrain.campaign.running.processes import FOLDER
from retrain.campaign.running.session import lease_of
from retrain.campaign.running.slurm_task import Pace, Task
from retrain.campaign.running.spawning import end_words
from retrain.campaign.running.workers import PATIENCE_SECONDS, Workers
from retrain.config import Config
from retrain.config.machine import GPU_OPTIONS
from retrain.errors import UsageError, WorkersLost, plural
from retrain.extras import is_installed, missing
from retrain.files import read_json, write_json, writing

if TYPE_CHECKING:
    from submitit import Executor, Job

LOOK_SECONDS = 30.0  # Seconds between `sacct` queries for the states of all jobs
SILENCE_SECONDS = 300.0  # Seconds without output after which a worker is given up
MISSED_SECONDS = 60.0  # The same for a worker that Slurm reports as requeued; its report may lag
WAIT_SECONDS = 20.0  # Seconds after which the number of running workers is reported, unless all run
WAITING = {"PENDING", "REQUEUED"}
ENDED = {
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE",
    "FINISHED", "INTERRUPTED",
}  # fmt: skip
"""States after which a job does not come back by itself; the last two are those of submitit's local jobs."""
REQUEUES = 10_000  # Most restarts of a job at its time limit; submitit requires a number
RECORD = "jobs.json"
COMMAND_SECONDS = 60.0
SIGNAL = "SUBMITIT_PREEMPT_SIGNAL"


class Place:
    """A worker's place on the cluster: its folder and its job there. ``used`` is the number of its newest process that
    a link was about, ``over`` why there will be no further one."""

    def __init__(self, number: int, folder: Path, job: Job[None]):
        self.number, self.folder, self.job = number, folder, job
        self.used = 0
        self.over = ""

    def close(self) -> None:
        """Have whatever runs there end after its step; what has not begun will not."""
        with suppress(OSError):  # then its job is cancelled
            (self.folder / CLOSED).touch()

    def rests(self) -> bool:
        """Whether no process of it runs, as far as it has said."""
        number = newest(self.folder)
        if number == 0:
            return True
        lines = Tail(answers_of(self.folder, number)).lines()
        return bool(lines) and b'"ended"' in lines[-1]


@dataclass
class Cluster:
    """Asks for jobs and looks after them. ``directory`` is the campaign's, ``name`` its own, ``cores`` how many this
    machine has. Raises UsageError when Slurm refuses."""

    config: Config
    directory: Path
    name: str
    cores: int
    pace: Pace = field(default_factory=Pace)
    places: dict[int, Place] = field(default_factory=dict, init=False)  # Newest place of each slot
    lost: dict[int, str] = field(default_factory=dict, init=False)  # Reason for each slot that is not requested again
    notes: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue, init=False)
    """What is to be told; some link does."""
    given_up: bool = field(default=False, init=False)  # Whether an immediate end was requested
    _folders: list[Path] = field(default_factory=list, init=False)
    _jobs: list[Job[None]] = field(default_factory=list, init=False)
    _asked: float = field(default=0.0, init=False)
    _looked: float = field(default=0.0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def is_slurm(self) -> bool:
        return self.config.slurm.cluster == "slurm"

    def start(self, numbers: Sequence[int]) -> Iterator[tuple[int, Remote]]:
        """Links to the workers of these slots, asked for where there is none, or none any more. Raises WorkersLost when
        nothing more is asked for any slot, UsageError when Slurm refuses the first ones."""
        if new := [n for n in numbers if n not in self.lost and (n not in self.places or self.places[n].over)]:
            try:
                self._ask(new)
            except UsageError as error:
                if not self.places:
                    raise
                self.lost |= dict.fromkeys(new, str(error))
                self.notes.put(f"{error}; the other workers go on")
        if len(self.lost) == self.config.campaign.workers:
            raise WorkersLost(f"no worker is left: {next(reversed(self.lost.values()))}")
        for number in numbers:
            if number not in self.lost:
                yield number, Remote(self, self.places[number])

    def state(self, place: Place) -> str:
        """What Slurm says of a job now, or said up to ``LOOK_SECONDS`` ago, in one word."""
        if not self.is_slurm:
            return place.job.state
        watcher = place.job.watcher
        if time.monotonic() - self._looked >= LOOK_SECONDS and self._lock.acquire(blocking=False):
            try:  # the others go on with what was said before, should it take long
                watcher.update()
                self._looked = time.monotonic()
            finally:
                self._lock.release()
        return watcher.get_state(place.job.job_id, mode="cache").partition(" ")[0].rstrip("+")

    def waiting_note(self) -> str:
        """How many workers run, once, when not all of them soon do."""
        if not self._asked or time.monotonic() - self._asked < WAIT_SECONDS:
            return ""
        self._asked = 0.0
        up, count = sum(place.used > 0 for place in self.places.values()), len(self.places)
        if up == count:
            return ""
        return f"{plural(count, 'worker')} asked of Slurm, {up} run; the others begin when Slurm has room for them"

    def finish(self) -> None:
        """Have all workers end, and cancel what has not begun."""
        for place in self.places.values():
            place.close()
        if self.is_slurm and self._jobs:
            self._cancel([job.job_id for job in self._jobs], waiting=not self.given_up)
        if left := self._left():
            self._cancel([place.job.job_id for place in left], waiting=False)
            if not self.is_slurm:
                self._left()
        for folder in self._folders:
            with suppress(OSError, ValueError):
                write_json(folder / RECORD, read_json(folder / RECORD) | {"closed": True})

    def _left(self) -> list[Place]:
        """What has not ended, after some patience."""
        end = time.monotonic() + PATIENCE_SECONDS
        while left := [place for place in self.places.values() if not self._is_gone(place)]:
            if time.monotonic() > end:
                break
            time.sleep(self.pace.poll / 5)
        return left

    def _is_gone(self, place: Place) -> bool:
        return place.rests() if self.is_slurm else place.job.state in ENDED

    def _ask(self, numbers: Sequence[int]) -> None:
        """One job array for the workers of these slots, with a folder of its own."""
        if not self._folders:
            self._cancel_leftovers()
        folder = self._new_folder()
        submitit = import_submitit()
        tasks = [self._task(folder, number) for number in numbers]
        executor = self._executor(submitit, folder)
        for task in tasks:
            with writing(folder):
                Path(task.folder).mkdir()
        try:
            with _undisturbed(submitit), redirect_stderr(io.StringIO()):  # where submitit prints what it also raises
                jobs = executor.submit_array(tasks)
        except (RuntimeError, OSError) as error:  # sbatch said no, or is not there
            words = " ".join(str(error).split()) or type(error).__name__
            raise UsageError(f"Slurm takes no job: {words}; its script is in {folder}, see [slurm]") from error
        self._jobs += jobs
        for path in folder.glob(".submission_file_*"):
            if path.is_symlink():  # submitit's second name for the script; a run's directory has no links
                path.unlink()
        self._asked, self._looked = time.monotonic(), 0.0
        for number, task, job in zip(numbers, tasks, jobs, strict=True):
            self.places[number] = Place(number + 1, Path(task.folder), job)
        ids = {str(number + 1): job.job_id for number, job in zip(numbers, jobs, strict=True)}
        write_json(folder / RECORD, {"cluster": self.config.slurm.cluster, "jobs": ids, "closed": False})
        what = f"asked Slurm for {plural(len(jobs), 'worker')}: job {jobs[0].job_id.partition('_')[0]}"
        if not self.is_slurm:
            what = f"{plural(len(jobs), 'worker')} on this machine, without Slurm"
        self.notes.put(f"{what}; logs are in {folder}")

    def _task(self, folder: Path, number: int) -> Task:
        token = (lease_of(self.directory) or {}).get("token", "")
        gpu = self.config.backend.devices != "cpu"
        threads, pace = self.config.slurm.cpus, self.pace
        if not self.is_slurm:
            assert self.config.campaign.workers != "auto"
            threads = threads or max(1, self.cores // self.config.campaign.workers)
            pace = replace(pace, kill=0.0)  # nobody follows with another signal
        own = str((folder / f"worker_{number + 1}").absolute())
        return Task(str(self.directory.absolute()), own, token, list(sys.path), spawning.BOOT, threads, gpu, pace)

    def _executor(self, submitit: ModuleType, folder: Path) -> Executor:
        slurm = self.config.slurm
        if not self.is_slurm:
            executor = submitit.LocalExecutor(folder, max_num_timeout=REQUEUES)
            setup = {"setup": slurm.setup} if slurm.setup else {}
            executor.update_parameters(
                timeout_min=slurm.minutes, signal_delay_s=slurm.notice_s, stderr_to_stdout=True, **setup
            )
            return executor
        executor = submitit.SlurmExecutor(folder, max_num_timeout=REQUEUES)
        executor.update_parameters(**sbatch_options(self.config, self.name))
        return executor

    def _new_folder(self) -> Path:
        base = self.directory / FOLDER
        with writing(base):
            base.mkdir(parents=True, exist_ok=True)
            numbers = [int(match[1]) for path in base.iterdir() if (match := re.fullmatch(r"slurm_(\d+)", path.name))]
            folder = base / f"slurm_{max(numbers, default=0) + 1}"
            folder.mkdir()
        self._folders.append(folder)
        return folder

    def _cancel_leftovers(self) -> None:
        """What an earlier controller, which was killed, has asked for: what runs ends after its step, what waits is
        taken out of the queue."""
        ids: list[str] = []
        for record in (self.directory / FOLDER).glob(f"slurm_*/{RECORD}"):
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                content = read_json(record)
                if content["closed"]:
                    continue
                for folder in record.parent.glob("worker_*/"):
                    (folder / CLOSED).touch()
                ids += [str(each) for each in content["jobs"].values()] if content["cluster"] == "slurm" else []
                write_json(record, content | {"closed": True})
        if ids and self.is_slurm:
            self._cancel(ids, waiting=True)

    def _cancel(self, ids: Sequence[str], waiting: bool) -> None:
        """Cancel jobs, with ``waiting`` those only that have not begun. Those of this machine have nobody to wait
        for."""
        if not self.is_slurm:
            for place in self.places.values():
                if place.job.job_id in ids:
                    with suppress(ProcessLookupError):
                        os.kill(int(place.job.job_id), signal.SIGTERM)
            return
        only = ["--state=PENDING"] if waiting else []
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(["scancel", *only, *ids], capture_output=True, timeout=COMMAND_SECONDS, check=False)


class Remote:
    """See ``Link``: a worker's process on a node, from when its place is waited for."""

    def __init__(self, cluster: Cluster, place: Place):
        self.cluster, self.place = cluster, place
        self.name, self.ready = str(place.number), False
        self._number, self._how = 0, ""
        self._in_order, self._taken = False, False
        self._let_go, self._over = threading.Event(), threading.Event()

    def post(self, command: Mapping[str, Any]) -> None:
        """See ``Link.post``. Raises StorageError when the file system refuses it."""
        path = commands_of(self.place.folder, self._number)
        with writing(path):
            append(path, command)

    def lines(self) -> Iterator[bytes]:
        cluster, place = self.cluster, self.place
        tail, heard = None, time.monotonic()
        try:
            while not self._let_go.is_set():
                # Both before what has been said is read: nothing follows after them.
                state, number = cluster.state(place), newest(place.folder)
                if tail is None and number > place.used:
                    self._number = place.used = number
                    tail, heard = Tail(answers_of(place.folder, number)), time.monotonic()
                for line in tail.lines() if tail is not None else ():
                    heard, said = time.monotonic(), json.loads(line)
                    if "up" in said:
                        self.name, self.ready = f"{place.number} {said['up']}", True
                    elif "ended" in said:
                        self._how, self._in_order = said["ended"], said["again"] or said["ended"] == end_words(0)
                        if said["again"]:
                            yield _note(
                                f"{self._who()} was told to make room: all is saved, and Slurm has it wait again"
                            )
                        return
                    elif "beat" not in said:
                        yield line
                yield from self._notes()
                if self._is_lost(state, tail is not None, number, time.monotonic() - heard):
                    yield from self._notes()
                    return
                self._let_go.wait(cluster.pace.poll)
        finally:
            self.ready = False
            self._over.set()

    def ended(self, why: str = "") -> str:
        self._over.wait()
        if why:
            return f"{self._who()} ended: {why}"
        more = "" if " by " in self._how else f"; what it printed is in {self.place.job.paths.stdout}"
        return f"{self._who()} {self._how or 'was let go'}{more}"

    def excused(self, begun: bool) -> bool:
        return self._taken or (self._in_order and not begun)

    def release(self) -> None:
        self._tell({"end": True})

    def kill(self) -> None:
        self.cluster.given_up = True
        self._tell({"kill": True})

    def wait(self, seconds: float) -> bool:
        return True

    def _tell(self, command: Mapping[str, Any]) -> None:
        if self._number and not self._over.is_set():
            with suppress(OSError):
                append(commands_of(self.place.folder, self._number), command)
        self._let_go.set()

    def _is_lost(self, state: str, up: bool, newest_number: int, silent: float) -> bool:
        """Whether the process is gone without a word, which ``_how`` then has; ``silent`` for so many seconds."""
        place, cluster = self.place, self.cluster
        if up and newest_number > self._number:
            self._how = "was ended with its node"
            self._take_away()
        elif up and state in WAITING and silent > MISSED_SECONDS:
            self._how = "was ended: Slurm has put its job back into the queue"
            self._take_away()
        elif state in ENDED:
            self._how = f"was ended: Slurm says {state}" if cluster.is_slurm else "was ended"
            place.over = state
            if place.used == 0 or state == "CANCELLED":
                words = f"{self._who()} {'did not begin' if place.used == 0 else 'was cancelled'}: Slurm says {state}"
                printed = f"; what it printed is in {place.job.paths.stdout}" if place.used == 0 else ""
                cluster.lost[place.number - 1] = words + printed
                cluster.notes.put(f"{words}; no other is asked for in its place{printed}")
        elif up and silent > SILENCE_SECONDS:
            self._how = f"has said nothing for {silent:.0f} s"
            place.over = "SILENT"
            place.close()
            cluster._cancel([place.job.job_id], waiting=False)
        return bool(self._how)

    def _take_away(self) -> None:
        """Slurm has begun the job anew, or will: that is not its runs' fault."""
        self._taken = True
        self.cluster.notes.put(f"{self._who()} {self._how}: what it did goes on from the last checkpoints")

    def _notes(self) -> Iterator[bytes]:
        cluster = self.cluster
        if note := cluster.waiting_note():
            cluster.notes.put(note)
        with suppress(queue.Empty):
            while True:
                yield _note(cluster.notes.get_nowait())

    def _who(self) -> str:
        return f"worker {self.name} (job {self.place.job.job_id})"


def workers_of(plan: Plan, cores: int) -> Workers:
    """The executor of a plan's configuration, on a machine of so many ``cores``. Raises MissingExtra without submitit,
    UsageError where there is no Slurm."""
    config = plan.specs[0].config
    if not is_installed("submitit"):
        raise missing('executor = "slurm"', "submitit")
    if config.slurm.cluster == "slurm" and (absent := [name for name in ("sbatch", "srun") if not shutil.which(name)]):
        raise UsageError(
            f'executor = "slurm": there is no {absent[0]} on this machine; start retrain where jobs are submitted, or '
            "type --executor processes"
        )
    cluster = Cluster(config, plan.directory, plan.name, cores, Pace())
    assert config.campaign.workers != "auto"  # a rule of the configuration
    return Workers(config.campaign.workers, config.backend.devices != "cpu", cluster.start, cluster.finish)


def sbatch_options(config: Config, name: str) -> dict[str, Any]:
    """What submitit's Slurm executor is given for workers of this campaign."""
    slurm = config.slurm
    gpus = config.gpus_per_worker
    own_gpu = config.backend.devices != "cpu" and not any(option in slurm.extra for option in GPU_OPTIONS)
    options = {
        "job_name": f"retrain-{re.sub(r'[^A-Za-z0-9._+-]+', '-', name)}",
        "partition": slurm.partition,
        "time": slurm.minutes,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "gpus_per_node": (f"{slurm.gpu_type}:{gpus}" if slurm.gpu_type else gpus) if own_gpu else None,
        "cpus_per_task": slurm.cpus,
        "mem": slurm.memory,
        # To the task's submitit, which otherwise expects SIGUSR2, and to Slurm.
        "setup": [f"export {SIGNAL}={signal_name()}", *slurm.setup],
        "stderr_to_stdout": True,
        "additional_parameters": {"requeue": True, "signal": f"{signal_name()}@{slurm.notice_s}", **slurm.extra},
    }
    return {key: value for key, value in options.items() if value is not None}


def signal_name() -> str:
    """The signal before the time limit: SIGUSR1 unless the environment says another, as submitit lets it."""
    return os.environ.get(SIGNAL, "USR1")


def import_submitit() -> ModuleType:
    """submitit, quiet: what its calls of Slurm's commands complain about shows in the states."""
    import submitit

    logging.getLogger("submitit").setLevel(logging.CRITICAL)
    return submitit


@contextmanager
def _undisturbed(submitit: ModuleType) -> Iterator[None]:
    """Jobs are asked for as if from outside of any job; and Ctrl-C, which a terminal sends to all that it sees, does
    not reach those that run on this machine, which get the signal's name with the environment."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    clean = submitit.helpers.clean_env() if "SLURM_JOB_ID" in os.environ else nullcontext()
    try:
        with clean, submitit.helpers.environment_variables(**{SIGNAL: signal_name()}):
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _note(text: str) -> bytes:
    return json.dumps({"message": text}).encode()
