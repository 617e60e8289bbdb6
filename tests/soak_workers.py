"""Kill the workers and the controller of a campaign, one or both, at random and in the worst places.

    python -m tests.soak --executor processes --kills 100

The part of ``tests.soak`` for campaigns that several processes train. A campaign of eight runs has one controller, a
child of this process, and two workers of its own. Again and again something happens to one of them: SIGKILL at a random
moment, right after its start or in a place of the code that is hit rarely; SIGKILL to controller and worker at once, or
to all of them; SIGTERM to a worker; SIGSTOP for some seconds, which is what a suspended machine looks like to the
others, alone or with the controller killed meanwhile. A controller that is gone is followed by one that resumes.

In the end every record, checkpoint and adapter has to equal those of the same campaign trained in one process, and no
process may be left. What happens where is drawn from ``--seed``; which moment of training it hits is up to the clock.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests import soak

FOLDER = "RETRAIN_SOAK"
"""In the environment of controllers, workers and what these start: where the soak works."""
CAMPAIGN = """
[campaign]
seeds = [1, 2, 3, 4]
max_steps = 6
lanes = 2
executor = "processes"
workers = 2
max_restarts = 1000
[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"
[[campaign.conditions]]
advantage_mode = "rloo"
transform_mode = "gtpo_sepa"
[model]
lora_rank = 2
[data]
source = "soakproblems:problems"
[training]
batch_size = 2
group_size = 3
max_tokens = 8
lr = 0.001
num_iterations = 2
minibatches = 2
save_every = 2
eval_every = 3
keep_every = 4
[sepa]
steps = 4
[evaluation]
problems = 4
[reward]
type = "custom"
custom_module = "{module}"
workers = 1
[squeeze]
enabled = true
verify = "off"
"""
PROBLEMS = """from tests.soak_workers import ready


def problems():
    ready()
    return [{"prompt": f"{a}+{a % 7}=?", "answer": str(a + a % 7)} for a in range(11, 61)]
"""
"""The data source: code that every job runs in its worker, before anything of its runs is read or written."""
IN_WORKERS = (
    "sampling", "scoring", "update", "between updates", "record", "torn record", "torn checkpoint", "before rename",
    "after rename", "before line", "final", "pruning", "any rename", "any sync",
)  # fmt: skip
"""Places where a worker is to die, as in ``soak.POINTS``; "resuming" is one more, which a job comes to at once."""
IN_CONTROLLERS = ("event", "manifest", "any rename", "any sync")
ACTS = {
    "worker": 4, "worker, starting": 2, "worker, in place": 14, "worker, resuming": 2, "worker, suspended": 2,
    "worker, terminated": 2, "controller": 2, "controller, in place": 7, "controller, suspended": 2,
    "controller, worker suspended": 3, "controller and worker": 3, "all": 1,
}  # fmt: skip
"""What happens, and how often of all of them."""
RUNS = 8
LOG = "lives.log"
SUSPENDED_SECONDS = 6.0
MOST = 15
"""Deaths of one campaign; then it is left alone, so that it ends."""
PACE_SECONDS = 8.0
"""Most that passes between two acts."""
PLACE_SECONDS = 12.0
"""How long nothing else happens, for somebody who is to die in a place to come there."""
LIFE_SECONDS = 300.0
"""How long a campaign may take that nobody disturbs any more."""
END_SECONDS = 15.0
"""How long after its controller the last process of a campaign may be there."""


def workers_in(folder: Path) -> list[int]:
    """The process ids of the workers that train in a folder, the starting ones too."""
    found = []
    for pid in marked(folder):
        try:
            if any("retrain.campaign.running.worker" in word for word in psutil.Process(pid).cmdline()):
                found.append(pid)
        except psutil.Error:  # it has just ended
            continue
    return found


def marked(folder: Path) -> list[int]:
    """Every process that was started by a controller or worker of this folder, and still runs."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(FOLDER) == str(folder):
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def ready() -> None:
    """Said by the data source in every job: its worker takes traps, one that waits for it and later ones by SIGUSR1."""
    if FOLDER in os.environ and threading.current_thread() is threading.main_thread():
        _take_traps(Path(os.environ[FOLDER]))
        _take_trap(Path(os.environ[FOLDER]) / "trap_next")


def _take_traps(folder: Path) -> None:
    """Have SIGUSR1 set the trap that lies there for this process."""
    signal.signal(signal.SIGUSR1, lambda *_: _take_trap(folder / f"trap_{os.getpid()}"))
    (folder / f"ready_{os.getpid()}").touch()


def _take_trap(path: Path) -> None:
    """Set the trap that a file describes, unless another worker has just taken it."""
    mine = path.with_name(f"taken_{os.getpid()}")
    try:
        path.rename(mine)
    except FileNotFoundError:
        return
    soak.set_trap(*json.loads(mine.read_text()))


def train(toml: Path, out: Path, sets: Sequence[str] = ()) -> None:
    """One life of a controller, in this process: begin the campaign, or go on with it."""
    from retrain.campaign.planning.manifest import PLAN
    from retrain.campaign.running.controller import launch, resume
    from retrain.config import load
    from retrain.record.observer import NullObserver

    class Log(NullObserver):
        def message(self, text: str, level: str = "info") -> None:
            print(f"{os.getpid()} {level}: {text}", flush=True)

    _take_traps(toml.parent)
    os.environ |= {FOLDER: str(toml.parent), soak.DEATHS: str(toml.parent / "deaths")}
    begun = (out / PLAN).is_file()
    outcome = resume(out, Log()) if begun else launch(load(toml, sets), out, Log())
    os._exit(outcome.exit_status)


@dataclass
class Campaign:
    """One campaign while it is disturbed, first started with the settings ``sets``."""

    toml: Path
    out: Path
    chance: random.Random
    sets: Sequence[str] = ()
    killed: Counter[str] = field(default_factory=Counter[str])
    """How often what has died."""
    others: Counter[str] = field(default_factory=Counter[str])
    """How often what else was done."""
    wrong: list[str] = field(default_factory=list)
    controller: int = 0
    status: int | None = None
    """How the controller has ended."""
    _suspended: dict[int, float] = field(default_factory=dict)
    """When each process goes on."""
    _counted: int = 0

    @property
    def folder(self) -> Path:
        """Where all of it lies."""
        return self.toml.parent

    def begin(self) -> None:
        """Start a controller."""
        self.status = None
        self.controller = soak.child(lambda: train(self.toml, self.out, self.sets), self.folder / LOG)

    def lives_on(self, seconds: float) -> bool:
        """Let it train for so long; whether its controller is still there."""
        end = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            for pid in [pid for pid, when in self._suspended.items() if when <= now]:
                del self._suspended[pid]
                self._send(pid, signal.SIGCONT)
            if self.status is None:
                done, status = os.waitpid(self.controller, os.WNOHANG)
                self.status = status if done else None
            if self.status is not None or now >= end:
                return self.status is None
            time.sleep(0.01)

    def act(self, what: str) -> None:
        """Do one of ``ACTS`` to it."""
        who, _, how = what.partition(", ")
        worker = self._worker(starting=how == "starting")
        if how == "in place":
            pid, places = (worker, IN_WORKERS) if who == "worker" else (self.controller, IN_CONTROLLERS)
            if pid and (self.folder / f"ready_{pid}").exists():
                self._set_trap(f"trap_{pid}", self.chance.choice(places))
                self._send(pid, signal.SIGUSR1)
                end = time.monotonic() + PLACE_SECONDS
                while (
                    time.monotonic() < end and self.lives_on(0.2) and pid in (self.controller, *workers_in(self.folder))
                ):
                    pass
            return
        if how == "resuming":
            self._set_trap("trap_next", how)  # for the job that follows that of the one that is killed now
        if how == "suspended" and (pid := worker if who == "worker" else self.controller):
            self.others[what] += 1
            self._suspend([pid], SUSPENDED_SECONDS)
            return
        if how == "terminated":
            self.others[what] += bool(worker and self._send(worker, signal.SIGTERM))
            return
        if what == "controller, worker suspended":
            self.act("worker, suspended")
        one = {"worker": [worker], "controller": [self.controller]}
        several = [self.controller, *(workers_in(self.folder) if what == "all" else [worker])]
        for pid in one.get(who) or self.chance.sample(several, len(several)):
            if pid and self._send(pid, signal.SIGKILL) and pid != self.controller:
                self.killed["worker, starting" if how == "starting" else "worker, any moment"] += 1

    def count(self) -> None:
        """Count the deaths in places since the last time, and that of the controller."""
        path = self.folder / "deaths"
        rows = [line.split(" ", 1) for line in path.read_text().splitlines()] if path.exists() else []
        places = {int(pid): point for pid, point in rows[self._counted :]}
        self._counted = len(rows)
        if self.status is not None and os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL:
            self.killed["controller, " + places.pop(self.controller, "any moment")] += 1
            self._check_manifest()
        elif self.status is not None and os.waitstatus_to_exitcode(self.status) != 0:
            self.wrong.append(f"{self.out}: the controller ended with {os.waitstatus_to_exitcode(self.status)}")
        for point in places.values():
            self.killed[f"worker, {point}"] += 1

    def end(self) -> None:
        """Wake what is suspended; nothing of it may be there some seconds later."""
        for pid in self._suspended:
            self._send(pid, signal.SIGCONT)
        deadline = time.monotonic() + END_SECONDS
        while (left := marked(self.folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            self.wrong.append(f"{self.out}: process {pid} is still there")
            self._send(pid, signal.SIGKILL)
        for pattern in ("ready_*", "taken_*", "trap_*", "deaths"):
            for path in self.folder.glob(pattern):
                path.unlink()

    def _worker(self, starting: bool) -> int:
        """One of the workers that have had a job, or with ``starting`` one that has had none, as soon as there is
        such a one; 0 without any."""
        for _ in range(50):
            pids = [pid for pid in workers_in(self.folder) if (self.folder / f"ready_{pid}").exists() is not starting]
            if pids:
                return self.chance.choice(sorted(pids))
            if not self.lives_on(0.1):
                break
        return 0

    def _suspend(self, pids: Sequence[int], most: float) -> None:
        """Stop processes together for up to ``most`` seconds."""
        end = time.monotonic() + self.chance.uniform(0.1, most)
        for pid in pids:
            self._suspended[pid] = end
            self._send(pid, signal.SIGSTOP)

    def _set_trap(self, name: str, point: str) -> None:
        aside = self.folder / "new"
        aside.write_text(json.dumps([point, self.chance.random() ** 3]))  # mostly one of the next times
        aside.rename(self.folder / name)

    def _send(self, pid: int, number: signal.Signals) -> bool:
        """Whether there was such a process; the controller's is known only while nobody has waited for it."""
        if pid == self.controller and self.status is not None:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def _check_manifest(self) -> None:
        """Whoever was killed, what lies there can be read."""
        from retrain.campaign.planning.manifest import MANIFEST, read_manifest
        from retrain.errors import RetrainError

        if (self.out / MANIFEST).exists():
            try:
                if len(read_manifest(self.out)["runs"]) != RUNS:
                    self.wrong.append(f"{self.out}: the manifest lacks runs after a kill")
            except RetrainError as error:
                self.wrong.append(f"{self.out}: the manifest after a kill: {error}")


@dataclass
class Executor:
    """Who trains the campaigns: the settings that say so, what may happen to a campaign and how often, and how one is
    made for a file, a directory and the chance."""

    sets: Sequence[str] = ()
    acts: Mapping[str, int] = field(default_factory=lambda: ACTS)
    campaign: Callable[..., Campaign] = Campaign


@contextmanager
def processes(folder: Path) -> Iterator[Executor]:
    """Workers of the controller's own."""
    yield Executor()


def prepare(folder: Path) -> Path:
    """The file of the campaign, with the code that it names."""
    (folder / "soakreward.py").write_text(soak.REWARD)
    (folder / "soakproblems.py").write_text(PROBLEMS)
    path = folder / "campaign.toml"
    path.write_text(CAMPAIGN.format(module=folder / "soakreward.py"))
    return path


def records(out: Path) -> dict[str, Any]:
    """See ``soak.records``, and what the campaign itself leaves: its cohorts, its verdict, and the ranks of its
    adapters. The order in which an adapter's file names its tensors is free."""
    manifest = json.loads((out / "manifest.json").read_text())
    found = soak.records(out, stopped=True)
    for name in [name for name in found if name.endswith(".safetensors")]:
        data = bytes.fromhex(found[name])
        end = 8 + int.from_bytes(data[:8], "little")
        found[name] = [json.loads(data[8:end]), data[end:].hex()]
    found["cohorts"] = sorted(map(sorted, manifest["cohorts"]))
    compared = manifest["comparison"]["conditions"]
    found["verdicts"] = [[each[key] for key in ("label", "finished", "after_values", "verdict")] for each in compared]
    found["squeeze"] = [manifest["squeeze"][key] for key in ("run_id", "rows", "rank_pattern")]
    return found


def reference(toml: Path, out: Path) -> dict[str, Any]:
    """What one process that nobody disturbs makes of the campaign; nothing when it fails."""
    alone = ["campaign.executor=inprocess", 'campaign.workers="auto"']
    pid = soak.child(lambda: train(toml, out, alone), toml.parent / LOG)
    return records(out) if soak.ended(pid, LIFE_SECONDS) == 0 else {}


def soak_workers(folder: Path, executor: Executor, kills: int, minutes: float, seed: int) -> dict[str, Any]:
    """Disturb campaigns until there were ``kills`` deaths or ``minutes`` are over; the figures: ``wrong`` should be
    empty."""
    chance, begin, toml = random.Random(seed), time.monotonic(), prepare(folder)
    killed, others, campaigns, wrong = Counter[str](), Counter[str](), 0, list[str]()
    whole = reference(toml, folder / "reference")
    if not whole:
        wrong = [f"the undisturbed campaign failed: {folder / LOG}"]
    while not wrong and killed.total() < kills and time.monotonic() - begin < 60 * minutes:
        campaign = executor.campaign(toml, folder / f"campaign_{campaigns + 1}", chance, executor.sets)
        _disturb(campaign, executor.acts, min(MOST, kills - killed.total()))
        killed, others, wrong = killed + campaign.killed, others + campaign.others, campaign.wrong
        if not wrong:
            wrong = [f"{campaign.out}: {text}" for text in soak.differences(records(campaign.out), whole)]
        if not wrong:
            campaigns += 1
            shutil.rmtree(campaign.out)
    return {
        "kills": killed.total(),
        "of": dict(sorted(killed.items())),
        "besides": dict(sorted(others.items())),
        "campaigns": campaigns,
        "runs": RUNS * campaigns,
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "seed": seed,
        "wrong": wrong,
    }


def _disturb(campaign: Campaign, acts: Mapping[str, int], most: int) -> None:
    """Train a campaign to its end, with about ``most`` deaths on the way."""
    campaign.begin()
    alone = 0.0
    while not campaign.wrong:
        if campaign.killed.total() < most:
            if campaign.lives_on(campaign.chance.uniform(0.0, PACE_SECONDS)):
                campaign.act(campaign.chance.choices([*acts], [*acts.values()])[0])
        elif campaign.lives_on(PACE_SECONDS) and (alone := alone + PACE_SECONDS) > LIFE_SECONDS:
            campaign.wrong.append(f"{campaign.out}: no end after {LIFE_SECONDS:g} s without any kill")
            campaign.act("all")
        campaign.count()
        if campaign.status == 0:
            break
        if campaign.status is not None:
            campaign.begin()
    campaign.end()
