"""What a campaign's controller costs by itself: a real one, whose workers train nothing.

    python benchmarks/controller.py [--runs 10 100 1000] [--workers 200]
    python benchmarks/controller.py --idle --workers 4096

Every worker is a thread that claims tasks from the campaign's directory and writes events there. Every run starts,
reports some steps and two evaluations, and ends; its files are written as a run writes them, but for the numbers, which
are random. Everything else is the product: planning, the scheduler, the task and event files, the manifest on the disk,
the comparison and the report at the end, and one printed line per event (to /dev/null). Each number of runs is measured
in a process of its own.

Times are processor time of the controller's thread. Only ``whole`` is by the clock. ``growth`` is the exponent e of
cost ~ runs^e, by least squares over the logarithms: 0 does not grow, 1 grows as the number of runs.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from random import Random
from typing import Any

from shared import table

from retrain.campaign import controller
from retrain.campaign.planning.manifest import Manifest
from retrain.campaign.planning.plan import Plan
from retrain.campaign.planning.references import check
from retrain.campaign.running.protocol import (
    EvaluationDone,
    Event,
    JobEnded,
    JobStarted,
    Message,
    RunEnded,
    RunStarted,
    StepDone,
    event_to_json,
    job_from_json,
)
from retrain.campaign.running.tasks import Tasks, append, events_of, home_of
from retrain.campaign.running.workers import CampaignWorkers
from retrain.campaign.worker import POLL_SECONDS
from retrain.cli.console import PlainConsole
from retrain.config import load
from retrain.files import dumps
from retrain.training.inputs import CohortJob
from retrain.util.session import BEAT_SECONDS
from retrain.verdicts import pooling, report

CONDITIONS = (("grpo", "none"), ("rloo", "none"), ("dr_grpo", "none"), ("maxrl", "none"), ("maxrl", "gtpo"))
STEPS, PROBLEMS = 10, 200


class StubWorkers:
    """See ``Executor``: every worker is a thread that claims tasks from the campaign's directory, writes what a cohort
    would report into its event file, one line of each run in turn, and the files of its runs."""

    def __init__(self, directory: Path, slots: int, steps: int = STEPS):
        self.directory, self.slots, self.steps = directory, slots, steps

    def has_gpu(self) -> bool:
        return True

    def start(self, slots: Sequence[int]) -> None:
        for slot in slots:
            threading.Thread(target=self._work, args=(slot,), name=f"stub {slot}", daemon=True).start()

    def look(self, slot: int) -> None:
        """See ``Executor.look``: threads do not die."""

    def notes(self) -> list[Message]:
        return []

    def kill(self, slot: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _work(self, slot: int) -> None:
        tasks, home = Tasks.of(self.directory), home_of(self.directory, slot)
        home.mkdir(parents=True, exist_ok=True)
        events = events_of(home, 1)
        append(events, {"up": f"{slot} stub", "process": os.getpid()})
        while not tasks.is_closed():
            claimed = tasks.claim(f"worker_{slot}-1")
            if claimed is None:
                time.sleep(POLL_SECONDS)
                continue
            task, content = claimed
            job = job_from_json(content)
            assert isinstance(job, CohortJob)
            for event in self._train(task, slot, job):
                append(events, {"task": task, "event": event_to_json(event)})
        append(events, {"ended": "ended", "in_order": True})

    def _train(self, task: str, slot: int, job: CohortJob) -> Iterator[Event]:
        names = [run.run_id for run in job.runs]
        yield JobStarted(task, f"{slot} stub", names)
        for run in job.runs:
            yield RunStarted(run.run_id, 0, self.steps)
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        numbers = {name: Random(name) for name in names}
        for step in range(self.steps):
            for name in names:
                rate = numbers[name].random()
                rows[name].append({"step": step, "mean_reward": rate, "correct_rate": rate, "loss": 0.1 * rate,
                                   "num_tokens": 1000 * (step + 1), "step_time_s": 1.0})  # fmt: skip
                yield StepDone(name, rows[name][-1])
        for run in job.runs:
            name = run.run_id
            rates = [round(PROBLEMS * numbers[name].gauss(mean, 0.03)) / PROBLEMS for mean in (0.2, 0.6)]
            evaluations = [
                {"name": "heldout", "step": step, "samples": 1, "eval/heldout/step": step,
                 "eval/heldout/correct_rate": rate, "eval/heldout/problems": PROBLEMS}
                for step, rate in zip((0, self.steps), rates, strict=True)
            ]  # fmt: skip
            self._write(job.directory / "runs" / name, run.config.to_dict(), rows[name], evaluations)
            for row in evaluations:
                yield EvaluationDone(name, "heldout", row)
            yield RunEnded(name, "done")
        yield JobEnded(task)

    def _write(self, folder: Path, config: dict[str, Any], *tables: Sequence[dict[str, Any]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({key: config[key] for key in ("training", "evaluation")}))
        for name, rows in zip(("metrics.jsonl", "evals.jsonl"), tables, strict=True):
            (folder / name).write_text("".join(dumps(row) + "\n" for row in rows))


def campaign(path: Path, runs: int) -> None:
    """Write a file of so many runs: five conditions with ever more seeds."""
    seeds = runs // len(CONDITIONS)
    modes = [f'advantage_mode = "{a}"\ntransform_mode = "{t}"' for a, t in CONDITIONS]
    conditions = "".join(f"[[campaign.conditions]]\n{text}\n" for text in modes)
    path.write_text(
        f'[campaign]\nseeds = {list(range(1, seeds + 1))}\nmax_steps = {STEPS}\nsequential = "off"\n{conditions}'
        f"[evaluation]\nproblems = {PROBLEMS}\n[squeeze]\nenabled = false\n"
    )


def timed(home: Any, name: str, times: dict[str, list[float]]) -> None:
    """Have a function of a module or class note the processor time of each of its calls."""
    function: Callable[..., Any] = getattr(home, name)

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        begin = time.thread_time()
        try:
            return function(*given, **named)
        finally:
            times[name].append(time.thread_time() - begin)

    setattr(home, name, call)


def measure(runs: int, slots: int, folder: Path) -> dict[str, float]:
    """Carry one campaign out; what its parts cost."""
    times: dict[str, list[float]] = defaultdict(list)
    for home, name in ((controller, "planned_cohorts"), (pooling, "conclude"), (report, "write_report"),
                       (Manifest, "_replace")):  # fmt: skip
        timed(home, name, times)
    file = folder / "large.toml"
    campaign(file, runs)
    before, begin = peak(), time.thread_time()
    plan = check(Plan.of(load(file), folder / "out"))
    planned = time.thread_time() - begin
    workers = CampaignWorkers(StubWorkers(plan.directory, slots), plan.directory)
    with open(os.devnull, "w") as nothing:
        begin, own = time.perf_counter(), time.thread_time()
        outcome = controller.execute(plan, PlainConsole(nothing), executor=workers)
        whole, own = time.perf_counter() - begin, time.thread_time() - own
    if outcome.exit_status:
        raise SystemExit(f"the campaign ended with exit status {outcome.exit_status}")
    events = runs * (STEPS + 4)  # start, steps, two evaluations, end
    listening = own - sum(times["conclude"]) - sum(times["write_report"]) - sum(times["planned_cohorts"])
    return {
        "plan and check, s": planned,
        "cut into cohorts, s": sum(times["planned_cohorts"]),
        "events": events,
        "controller per event, µs": 1e6 * listening / events,
        "manifest, writes": len(times["_replace"]),
        "manifest, ms per write": 1e3 * statistics.mean(times["_replace"]),
        "manifest, MB": (folder / "out/manifest.json").stat().st_size / 1e6,
        "comparison, s": sum(times["conclude"]),
        "report, s": sum(times["write_report"]),
        "memory, MB": peak() - before,
        "whole, s": whole,
    }


def idle(slots: int, folder: Path) -> dict[str, float]:
    """Return what it costs to look once at so many workers that have nothing to say, and what each of them does to the
    file system by itself."""
    workers = CampaignWorkers(StubWorkers(folder, slots), folder)
    for slot in range(1, slots + 1):
        home = home_of(folder, slot)
        home.mkdir(parents=True)
        append(events_of(home, 1), {"up": f"{slot} stub", "process": 0})
    workers._begin()
    for slot in workers._slots.values():
        slot.follow(1)
    rounds = []
    for _ in range(4):
        begin = time.perf_counter()
        for slot in workers._slots.values():
            list(workers._poll(slot))
        rounds.append(time.perf_counter() - begin)
    lanes = len(CONDITIONS)
    return {
        "look at all workers, ms": 1e3 * statistics.median(rounds[1:]),
        "directory listings of workers per s": slots / POLL_SECONDS,
        f"leases replaced per s, {lanes} runs each": slots * (1 + lanes) / BEAT_SECONDS,
    }


def peak() -> float:
    """Most memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def growth(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The exponent e of cost ~ size^e, by least squares over the logarithms."""
    x, y = [math.log(each) for each in sizes], [math.log(each) for each in costs]
    return statistics.linear_regression(x, y).slope


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--idle", action="store_true", help="look at workers that have nothing to say instead")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(options.runs[0], options.workers, Path(folder))))
        return 0
    if options.idle:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(idle(options.workers, Path(folder))))
        return 0
    found = []
    for runs in options.runs:
        command = [sys.executable, __file__, "--one", "--runs", str(runs), "--workers", str(options.workers)]
        found.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout))
    rows = []
    for key in found[0]:
        values = [costs[key] for costs in found]
        exponent = f"{growth(options.runs, values):+.2f}" if len(found) > 1 else "-"
        rows.append([key, *(f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in values), exponent])
    print(table(["", *(f"{runs:,} runs" for runs in options.runs), "growth"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
