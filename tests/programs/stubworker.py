"""A worker that trains nothing: it speaks to its executor as ``retrain.campaign.running.worker`` does, and each run of
its jobs takes three steps. What the name of a run says happens in it: die, exit, full (no room on the disk), lost (the
device), wait (nothing is done until it is stopped), once-… (only the first time, as a file beside tells)."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

commands, answers = os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "wb", buffering=0)
stopped: set[str] = set()
jobs: list[dict] = []
came = threading.Condition()


def listen() -> None:
    for line in commands:
        command = json.loads(line)
        with came:
            if "job" in command:
                jobs.append(command)
            else:
                stopped.add(command["id"])
            came.notify()
    os._exit(0)


def say(name: str, **facts) -> None:
    answers.write(json.dumps({"id": name, **facts}).encode() + b"\n")


def event(name: str, kind: str, **facts) -> None:
    say(name, event={"kind": kind, **facts})


def first_time(job: dict, run: str) -> bool:
    mark = Path(job["directory"]) / f"{run}.seen"
    seen = mark.exists()
    mark.touch()
    return not seen


def train(name: str, job: dict) -> str | None:
    """How the job ends; None when a fault was said."""
    say(name, begun=True)
    for run in (run["run_id"] for run in job["runs"]):
        event(name, "RunStarted", run_id=run, step=0, max_steps=3)
        for step in range(3):
            event(name, "StepDone", run_id=run, row={"step": step, "pid": os.getpid(), **env})
            if step == 1 and ("once" not in run or first_time(job, run)):
                if "die" in run:
                    os.kill(os.getpid(), signal.SIGKILL)
                if "exit" in run:
                    print("something is wrong")
                    os._exit(7)
                if "full" in run:
                    return say(name, fault={"kind": "StorageError", "text": "out cannot be written: no space left"})
                if "lost" in run:
                    text = "CUDA error: an illegal memory access was encountered"
                    say(name, fault={"kind": "DeviceLost", "text": text})
                    sys.exit(1)
            while "wait" in run and name not in stopped:
                time.sleep(0.01)
            if name in stopped:
                return "stopped"
        event(name, "RunEnded", run_id=run, status="done")
    return "done"


names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RETRAIN_OWN_GPU", "RETRAIN_MEMORY_SHARE")
env = {name: os.environ.get(name) for name in names}
threading.Thread(target=listen, daemon=True).start()
while True:
    with came:
        came.wait_for(lambda: bool(jobs))
        item = jobs.pop(0)
    status = train(item["id"], item["job"])
    if status is not None:
        event(item["id"], "JobEnded", job=item["id"], status=status)
