"""What a campaign's controller costs by itself: a real one, whose workers train nothing.

    python benchmarks/controller.py [--runs 1250 2500 5000 10000] [--workers 1000] [--shape seeds|conditions]

Every run starts, reports some steps and two evaluations, and ends; its files are written as a run writes them, but for
the numbers, which are random. Everything else is the product: planning, the scheduler, the manifest on the disk, the
interim analysis, the comparison and the report at the end, and one printed line per event (to /dev/null). Each number
of runs is measured in a process of its own.

Times are processor time of the thread in question, so that what else the machine does hardly counts; that of the stub
workers, who also write the runs' files, is taken out. Only ``whole`` is by the clock. ``growth`` is the exponent e of
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
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from random import Random
from typing import Any

from retrain.campaign import controller
from retrain.campaign.planning.manifest import Manifest
from retrain.campaign.planning.plan import Plan
from retrain.campaign.planning.references import check
from retrain.campaign.running.interim import InterimMonitor
from retrain.campaign.running.protocol import (
    CohortJob,
    Evaluated,
    Event,
    Job,
    JobEnded,
    JobStarted,
    RunEnded,
    RunStarted,
    StepDone,
)
from retrain.commands.console import PlainConsole
from retrain.config import load
from retrain.files import dumps
from retrain.verdicts import pooling, report

CONDITIONS = (("grpo", "none"), ("rloo", "none"), ("dr_grpo", "none"), ("maxrl", "none"), ("maxrl", "gtpo"))
SEEDS = 20
"""Of ``--shape conditions``."""
STEPS, PROBLEMS = 10, 200


@dataclass(eq=False)
class StubHandle:
    """A job that stub workers do."""

    id: str
    stopping: bool = False

    def stop(self) -> None:
        """See ``Handle.stop``."""
        self.stopping = True


class StubWorkers:
    """See ``Executor``: each worker reports what a cohort would, one event of each in turn, and writes its runs' files.

    ``took`` has the seconds between handing out an event and being asked for the next one, by the kind of event.
    """

    def __init__(self, slots: int, steps: int = STEPS):
        self.slots, self.steps = slots, steps
        self.took: dict[str, list[float]] = defaultdict(list)
        self._jobs = deque[Iterator[Event]]()
        self._count = 0

    def has_gpu(self) -> bool:
        """See ``Executor.has_gpu``."""
        return True

    def submit(self, job: Job) -> StubHandle:
        """See ``Executor.submit``."""
        assert isinstance(job, CohortJob)
        self._count += 1
        handle = StubHandle(str(self._count))
        self._jobs.append(self._train(handle, job))
        return handle

    def events(self) -> Generator[Event, None, None]:
        """See ``Executor.events``."""
        while self._jobs:
            job = self._jobs.popleft()
            event = next(job)
            if not isinstance(event, JobEnded):
                self._jobs.append(job)
            begin = time.thread_time()
            yield event
            self.took[type(event).__name__].append(time.thread_time() - begin)

    def close(self) -> None:
        """See ``Executor.close``."""

    def _train(self, handle: StubHandle, job: CohortJob) -> Iterator[Event]:
        names = [run.run_id for run in job.runs]
        yield JobStarted(handle.id, f"{handle.id} stub", names)
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
            if handle.stopping:
                yield JobEnded(handle.id, "stopped")
                return
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
                yield Evaluated(name, "heldout", row)
            yield RunEnded(name, "done")
        yield JobEnded(handle.id)

    def _write(self, folder: Path, config: dict[str, Any], *tables: Sequence[dict[str, Any]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({key: config[key] for key in ("training", "evaluation")}))
        for name, rows in zip(("metrics.jsonl", "evals.jsonl"), tables, strict=True):
            (folder / name).write_text("".join(dumps(row) + "\n" for row in rows))


def campaign(path: Path, runs: int, shape: str) -> None:
    """A file of so many runs: five conditions with ever more seeds, or twenty seeds with ever more conditions."""
    if shape == "seeds":
        seeds = runs // len(CONDITIONS)
        modes = [f'advantage_mode = "{a}"\ntransform_mode = "{t}"' for a, t in CONDITIONS]
    else:
        seeds = SEEDS
        modes = [f'advantage_mode = "grpo"\ntransform_mode = "none"\nlr = {1e-6 * (i + 1):.3g}'
                 for i in range(runs // SEEDS)]  # fmt: skip
    conditions = "".join(f"[[campaign.conditions]]\n{text}\n" for text in modes)
    path.write_text(
        f"[campaign]\nseeds = {list(range(1, seeds + 1))}\nmax_steps = {STEPS}\n{conditions}"
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


def measure(runs: int, slots: int, shape: str, folder: Path) -> dict[str, float]:
    """Carry one campaign out; what its parts cost."""
    times: dict[str, list[float]] = defaultdict(list)
    for home, name in ((InterimMonitor, "update"), (controller, "planned_cohorts"), (pooling, "conclude"),
                       (report, "write_report"), (Manifest, "_replace")):  # fmt: skip
        timed(home, name, times)
    file = folder / "large.toml"
    campaign(file, runs, shape)
    before, begin = peak(), time.thread_time()
    plan = check(Plan.of(load(file), folder / "out"))
    planned = time.thread_time() - begin
    workers = StubWorkers(slots)
    with open(os.devnull, "w") as nothing:
        begin = time.perf_counter()
        outcome = controller.execute(plan, PlainConsole(nothing), executor=workers)
        whole = time.perf_counter() - begin
    if outcome.exit_status:
        raise SystemExit(f"the campaign ended with exit status {outcome.exit_status}")
    single = [each for kind in ("RunStarted", "StepDone", "Evaluated", "RunEnded") for each in workers.took[kind]]
    heard = [each for took in workers.took.values() for each in took]
    return {
        "plan and check, s": planned,
        "cut into cohorts, s": sum(times["planned_cohorts"]),
        "events": len(heard),
        "events per s": len(heard) / sum(heard),
        "event of a run, µs": 1e6 * statistics.mean(single),
        "end of a cohort, ms": 1e3 * statistics.mean(workers.took["JobEnded"]),
        "interim analysis, ms": 1e3 * statistics.mean(times["update"]),
        "manifest, writes": len(times["_replace"]),
        "manifest, ms per write": 1e3 * statistics.mean(times["_replace"]),
        "manifest, MB": (folder / "out/manifest.json").stat().st_size / 1e6,
        "comparison, s": sum(times["conclude"]),
        "report, s": sum(times["write_report"]),
        "memory, MB": peak() - before,
        "whole, s": whole,
    }


def peak() -> float:
    """Most memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def growth(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The exponent e of cost ~ size^e, by least squares over the logarithms."""
    x, y = [math.log(each) for each in sizes], [math.log(each) for each in costs]
    return statistics.linear_regression(x, y).slope


def main() -> int:
    """Measure every size in a process of its own, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, nargs="+", default=[1250, 2500, 5000, 10_000])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--shape", choices=["seeds", "conditions"], default="seeds")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(options.runs[0], options.workers, options.shape, Path(folder))))
        return 0
    found = []
    for runs in options.runs:
        command = [sys.executable, __file__, "--one", "--runs", str(runs), "--workers", str(options.workers),
                   "--shape", options.shape]  # fmt: skip
        found.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout))
    print("| " + " | ".join(["", *(f"{runs:,} runs" for runs in options.runs), "growth"]) + " |")
    print("|---" * (len(found) + 2) + "|")
    for key in found[0]:
        values = [each[key] for each in found]
        exponent = f"{growth(options.runs, values):+.2f}" if len(found) > 1 else "-"
        print(
            "| "
            + " | ".join([key, *(f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in values), exponent])
            + " |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
