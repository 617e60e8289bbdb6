"""Slurm and Ray in this machine, workers that train nothing, and what campaigns with servers leave behind."""

import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from retrain.campaign.planning.plan import plan
from retrain.campaign.running.protocol import JobEnded, Message, StepDone, Tick
from retrain.campaign.running.workers import CampaignWorkers
from retrain.config import parse_dict
from retrain.environments.build import CompletionLengths
from retrain.files import read_json, read_jsonl
from retrain.training.inputs import CohortJob
from tests.helpers.campaigns import eventually

TESTS = Path(__file__).parents[1]
STUB = (str(TESTS / "programs/stubworker.py"),)
"""For ``protocol.PROGRAM``: workers that train nothing."""
SERVE = f"{sys.executable} -m retrain serve {{model}} --port {{port}}"
SLEEPER = f"{sys.executable} {TESTS}/programs/sleeping_server.py {{model}} --port {{port}}"


def job(directory: Path, *runs: str) -> CohortJob:
    (spec,) = plan(parse_dict({"training": {"max_steps": 3}}))
    specs = [replace(spec, run_id=run, is_campaign=True) for run in runs]
    return CohortJob(directory, directory.parent, specs, CompletionLengths(0, {}))


def events_of(executor: CampaignWorkers, on_event: Callable[[Any], object] = lambda event: None) -> list:
    """Return all events but ticks; ``on_event`` is called with each, ticks included."""
    events = []
    for event in executor.events():
        on_event(event)
        if not isinstance(event, Tick):
            events.append(event)
    return events


def of_kind(events: Iterable[Any], kind: type) -> list:
    return [event for event in events if isinstance(event, kind)]


def ends(events: Iterable[Any]) -> dict[str, JobEnded]:
    return {event.job: event for event in of_kind(events, JobEnded)}


def pids(events: Iterable[Any]) -> dict[str, int]:
    """Return the process that trained each run last."""
    return {event.run_id: event.row["pid"] for event in of_kind(events, StepDone)}


def texts(events: Iterable[Any]) -> list[str]:
    return [event.text for event in of_kind(events, Message)]


class SlurmStandin:
    """The commands of a Slurm with one machine, found through ``environment``; ``close`` ends all that runs there."""

    def __init__(self, folder: Path):
        self.home, programs = folder / "standin", folder / "bin"
        self.home.mkdir()
        programs.mkdir()
        for name in ("sbatch", "srun", "scancel", "scontrol", "sacct"):
            path = programs / name
            path.write_text(f'#!/bin/sh\nexec {sys.executable} {TESTS}/programs/slurm_standin.py {name} "$@"\n')
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        self.environment = {"STANDIN": str(self.home), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}

    def room(self, tasks: int) -> None:
        """Set how many tasks may run at a time."""
        (self.home / "room").write_text(str(tasks))

    def calls(self, name: str) -> list[list[str]]:
        """Return the arguments of a command, each time that it was called."""
        path = self.home / "calls"
        lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return [words[1:] for words in lines if words[0] == name]

    def script(self) -> list[str]:
        return (self.home / "script_4711.sh").read_text().splitlines()

    def state(self, task: str) -> str:
        path = self.home / f"state_{task}"
        return path.read_text() if path.exists() else ""

    def pid(self, task: str) -> int:
        return int((self.home / f"pid_{task}").read_text())

    def close(self) -> None:
        (self.home / "at_once").touch()
        os.system(f"scancel {' '.join(path.name[6:] for path in self.home.glob('state_*'))} 2>/dev/null")
        eventually(lambda: not list(self.home.glob("pid_*")), 30)
        shutil.rmtree(self.home, ignore_errors=True)


def _in_time(start: Callable[[], Any]) -> Any:
    """Try again: Ray gives a node 30 seconds to start, on a busy machine too few."""
    for left in (3, 2, 1, 0):
        try:
            return start()
        except Exception as error:
            if not left or "timed out" not in str(error):
                raise
    raise AssertionError


class Nodes:
    """The nodes of a cluster beside its head, in the order in which they were added."""

    def __init__(self, cluster: Any):
        self.cluster, self.address, self.members = cluster, str(cluster.address), []

    def add(self, **resources: Any) -> None:
        memory = {"object_store_memory": 80 << 20}
        self.members.append(_in_time(lambda: self.cluster.add_node(**memory, **resources)))

    def remove(self, number: int) -> None:
        """Have a node vanish, as with its power cut."""
        self.cluster.remove_node(self.members.pop(number), allow_graceful=False)

    def raylet(self, number: int) -> Any:
        return self.members[number].all_processes["raylet"][0].process

    def that_have(self, pid: int) -> list[int]:
        """Return the number of the node that runs this process; nothing where none does."""
        try:
            above = {process.pid for process in psutil.Process(pid).parents()}
        except psutil.Error:
            return []
        return [number for number in range(len(self.members)) if self.raylet(number).pid in above]


@contextmanager
def cluster_of(*nodes: dict[str, Any]) -> Iterator[Nodes]:
    """A cluster of a head that trains nothing and nodes with these resources, which import what the tests import."""
    with_tests = os.pathsep.join([str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "RAY_USAGE_STATS_ENABLED")}
    os.environ |= {"PYTHONPATH": with_tests, "RAY_USAGE_STATS_ENABLED": "0"}
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}
    made = Nodes(_in_time(lambda: Cluster(initialize_head=True, head_node_args=head)))
    try:
        for node in nodes:
            made.add(**node)
        yield made
    finally:
        made.cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def rows_of(out: Path) -> dict[str, list[dict]]:
    return {path.parent.name: read_jsonl(path) for path in sorted(out.glob("runs/*/metrics.jsonl"))}


def recorded(out: Path, text: str) -> list[bool]:
    """For every run, whether ``run.log`` and a note say this of a server."""
    return [
        text in (run / "run.log").read_text()
        and any(note["key"] == "server" and text in note["text"] for note in read_jsonl(run / "notes.jsonl"))
        for run in sorted(out.glob("runs/*"))
    ]


def check_complete(out: Path, runs: int = 4, steps: int = 3) -> None:
    """Every step of every run is there once, sampled by the weights that it trains, and nothing is left behind."""
    rows = [row for rows in rows_of(out).values() for row in rows]
    assert len(rows) == runs * steps
    assert max(row["kl_sample_train_v2"] for row in rows) < 1e-9
    assert {run["state"] for run in read_json(out / "manifest.json")["runs"]} == {"done"}
    assert not list(out.glob("server*.json"))
    assert not (out / "adapters").exists()


def ranks_of(process: int) -> list[int]:
    """Return the processes that this one has started as its ranks, in the order of their start."""
    children = sorted(psutil.Process(process).children(), key=lambda child: child.create_time())
    return [child.pid for child in children if "follow_started" in " ".join(child.cmdline())]
