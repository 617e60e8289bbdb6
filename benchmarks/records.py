"""What a run's records cost: processor time of making and writing them, as a share of the step's.

    python benchmarks/records.py [--setting 256x64] [--steps 10]

A real cohort of one run is stepped by hand. Counted are the training thread's time in ``record_step`` and everything
that the thread which writes the files does (with ``flush``, so that no write is left for the next step), against the
processor time of the whole step in this process. Processor time, with one thread, does not depend on what else the
machine does. Means over the steps after the first; ten of them hold one step of which the pages are written, as
with the default `rollouts_every = 10`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ours
from commandline import bar, opened, parser_of, publish, table, with_verdicts
from workload import Setting

from retrain.records.recorder import RunRecorder
from retrain.threads import Thread

BAR = 0.02


@dataclass
class Clock:
    """Processor seconds of one thread's share of the records."""

    seconds: float = 0.0

    def around(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """``work``, its time in the calling thread counted here."""

        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.thread_time()
            try:
                return work(*arguments, **options)
            finally:
                self.seconds += time.thread_time() - begin

        return timed

    def take(self) -> float:
        """The seconds so far; begins anew."""
        taken, self.seconds = self.seconds, 0.0
        return taken


@contextmanager
def clocks() -> Iterator[tuple[Clock, Clock]]:
    """Clocks of the training thread and of the writing thread, for every recorder made meanwhile."""
    making, writing = Clock(), Clock()
    record_step, put = RunRecorder.record_step, Thread.put
    RunRecorder.record_step = making.around(record_step)  # type: ignore[method-assign]
    Thread.put = lambda self, work, *how, **more: put(self, writing.around(work), *how, **more)  # type: ignore[method-assign]
    try:
        yield making, writing
    finally:
        RunRecorder.record_step, Thread.put = record_step, put  # type: ignore[method-assign]


def measure(setting: Setting, models: Path, steps: int) -> list[dict[str, float]]:
    """Processor seconds per step: ``step`` in all, ``making`` and ``writing`` of it for the records."""
    import torch

    torch.set_num_threads(1)
    measured = []
    with clocks() as (making, writing), ours.cohort(setting, models) as made:
        for number in range(steps + 1):
            begin = time.process_time()
            ours.step(made)
            made.runs[0].recorder.flush()
            row = {"step": time.process_time() - begin, "making": making.take(), "writing": writing.take()}
            if number:  # the first step pays for what the others find ready
                measured.append(row)
    return measured


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--setting", default="256x64", help="SHAPExTOKENS")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if options.quick:
        options.setting, options.steps = "tinyx8", 3
    with opened(options):
        rows = measure(Setting.parse(options.setting), options.models, options.steps)
    mean = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
    share = (mean["making"] + mean["writing"]) / mean["step"]
    words = {"step": "the whole step", "making": "making the row", "writing": "writing, on its thread"}
    lines = [(words[key], f"{1e3 * mean[key]:.1f}", f"{100 * mean[key] / mean['step']:.2f} %") for key in words]
    label = f"{options.setting}: records take {100 * share:.2f} % (bar ≤ {100 * BAR:.0f} %)"
    text = with_verdicts(table(("", "processor ms per step", "share"), lines), [bar(label, share <= BAR)])
    publish(options, "records", text, {"setting": options.setting, "share": share, "steps": rows})


if __name__ == "__main__":
    main()
