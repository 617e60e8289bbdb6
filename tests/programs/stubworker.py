"""A worker that trains nothing: each run of its tasks takes three steps. What the name of a run says happens in it:
die, exit, full (no room on the disk), lost (the device), wait (nothing is done until it is stopped), once-… (only the
first time, as a file beside tells)."""

import os
import signal
import sys
import time
from pathlib import Path

from retrain.campaign.running.protocol import JobEnded
from retrain.campaign.worker import main
from retrain.errors import DeviceLost, StorageError
from retrain.training.inputs import CohortJob, allow_all

NAMES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RETRAIN_OWN_GPU", "RETRAIN_MEMORY_SHARE")


def first_time(directory: Path, run: str) -> bool:
    mark = directory / f"{run}.seen"
    seen = mark.exists()
    mark.touch()
    return not seen


class Stub:
    """What stands in for ``InProcess``."""

    guard, team = staticmethod(allow_all), None

    def do(self, job, observer, stop) -> JobEnded:
        assert isinstance(job, CohortJob)
        env = {name: os.environ.get(name) for name in NAMES}
        for spec in job.runs:
            observer.run_started(spec, 0, 3)
            for step in range(3):
                observer.step(spec, {"step": step, "pid": os.getpid(), **env})
                if step == 1 and ("once" not in spec.run_id or first_time(job.directory, spec.run_id)):
                    self.misbehave(spec.run_id)
                while "wait" in spec.run_id and not stop():
                    time.sleep(0.01)
                if stop():
                    return JobEnded(status="stopped")
            observer.run_finished(spec, "done")
        return JobEnded()

    def misbehave(self, run: str) -> None:
        if "die" in run:
            os.kill(os.getpid(), signal.SIGKILL)
        if "exit" in run:
            print("something is wrong", flush=True)
            os._exit(7)
        if "full" in run:
            raise StorageError("out", "no space left")
        if "lost" in run:
            raise DeviceLost("CUDA error: an illegal memory access was encountered")

    def close(self) -> None: ...


if __name__ == "__main__":
    sys.exit(main(lambda servers: Stub()))
