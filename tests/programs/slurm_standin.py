"""Stands in for Slurm's commands: sbatch, srun, scancel, scontrol and sacct of one machine, whose tasks are processes.

``STANDIN`` is its folder: ``calls`` has a line for each command, ``script_<id>.sh`` what sbatch was given, ``room`` how
many tasks may run at a time, ``state_<task>`` what sacct says, ``pid_<task>`` the process that srun became; with
``at_once`` nothing is waited for when it is to end. As Slurm does, signals go to all processes of a task, and what is
cancelled or requeued hears SIGTERM first.
"""

import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

HOME = Path(os.environ["STANDIN"])
KILL_WAIT = 5.0
BEAT = 0.05


@contextmanager
def locked():
    with open(HOME / "lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def state(task: str) -> str:
    return (HOME / f"state_{task}").read_text()


def set_state(task: str, word: str) -> None:
    aside = HOME / f"aside_{task}"
    aside.write_text(word)
    aside.rename(HOME / f"state_{task}")


def tasks_of(job: str) -> list[str]:
    """The tasks of a job, or the one task that is named."""
    if (HOME / f"state_{job}").exists():
        return [job]
    return [path.name.removeprefix("state_") for path in sorted(HOME.glob(f"state_{job}_*"))]


def sbatch(file: str) -> None:
    text = Path(file).read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    options = {name: "".join(shlex.split(value)) for name, value in options.items()}
    if options.get("partition") == "nosuch":
        sys.exit("sbatch: error: invalid partition specified: nosuch")
    with locked():
        job = 4711 + len(list(HOME.glob("script_*")))
        (HOME / f"script_{job}.sh").write_text(text)
    span = re.fullmatch(r"(\d+)-(\d+)", options["array"])
    indices = range(int(span[1]), int(span[2]) + 1) if span else options["array"].split(",")
    tasks = [f"{job}_{index}" for index in indices]
    for task in tasks:
        set_state(task, "PENDING")
        log = options["output"].replace("%A", str(job)).replace("%a", task.partition("_")[2]).replace("%j", str(job))
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        subprocess.Popen([sys.executable, __file__, "node", task, log], start_new_session=True, **quiet)
    print(f"Submitted batch job {job}")


def begin(task: str) -> bool:
    """Whether there is room for a task."""
    with locked():
        room = HOME / "room"
        running = sum(path.read_text() == "RUNNING" for path in HOME.glob("state_*"))
        if state(task) != "PENDING" or (room.exists() and running >= int(room.read_text())):
            return False
        set_state(task, "RUNNING")
        return True


def node(task: str, log: str) -> None:
    """What carries a task out, until it has ended for good."""
    job, _, index = task.partition("_")
    array = {"SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": index} if index else {}
    own = dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"), "0")
    own |= {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": f"node{index or 0}"}
    own |= {"SLURM_JOB_ID": f"{job}{index}", "STANDIN_TASK": task}
    while True:
        while not begin(task):
            if state(task) != "PENDING" or not HOME.exists():
                return
            time.sleep(BEAT)
        with open(log, "ab") as output:
            words = ["bash", HOME / f"script_{job}.sh"]
            with subprocess.Popen(words, env=os.environ | own | array, stdout=output, stderr=output) as batch:
                status = wait(task, batch)
        with suppress(FileNotFoundError):
            (HOME / f"pid_{task}").unlink()
        if state(task) == "REQUEUED":
            set_state(task, "PENDING")
            continue
        if state(task) == "RUNNING":
            set_state(task, "COMPLETED" if status == 0 else "FAILED")
        return


def wait(task: str, batch: subprocess.Popen) -> int:
    """Let a task run; once it is no longer to, end it."""
    ending = None
    while batch.poll() is None:
        time.sleep(BEAT)
        if not HOME.exists():
            batch.kill()
            send(task, signal.SIGKILL)
        if state(task) != "RUNNING" and ending is None:
            ending = time.monotonic() + KILL_WAIT
            send(task, signal.SIGTERM)
        if ending is not None and (time.monotonic() > ending or (HOME / "at_once").exists()):
            send(task, signal.SIGKILL)
            batch.kill()
    return batch.returncode


def send(task: str, number: int) -> None:
    """A signal to all processes of a task."""
    import psutil

    with suppress(FileNotFoundError, psutil.NoSuchProcess):
        root = psutil.Process(int((HOME / f"pid_{task}").read_text()))
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def srun(*words: str) -> None:
    (HOME / f"pid_{os.environ['STANDIN_TASK']}").write_text(str(os.getpid()))
    os.execvp(words[0], words)


def scancel(*words: str) -> None:
    only = [word.partition("=")[2] for word in words if word.startswith("--state=")]
    signals = [word.partition("=")[2] for word in words if word.startswith("--signal=")]
    for task in [task for word in words if not word.startswith("-") for task in tasks_of(word)]:
        with locked():
            now = state(task)
            if now not in ("PENDING", "RUNNING") or (only and now not in only):
                continue
            if not signals:
                set_state(task, "CANCELLED by 0")
        for name in signals:
            send(task, signal.Signals[f"SIG{name}"])


def scontrol(verb: str, task: str) -> None:
    assert verb == "requeue"
    with locked():
        if state(task) == "RUNNING":
            set_state(task, "REQUEUED")


def sacct(*words: str) -> None:
    assert words[:3] == ("-o", "JobID,State,NodeList", "--parsable2")
    print("JobID|State|NodeList")
    for job in words[4::2]:
        for task in tasks_of(job):
            print(f"{task}|{state(task)}|node{task.partition('_')[2]}")
            print(f"{task}.batch|{state(task)}|node{task.partition('_')[2]}")


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    if name != "node":
        with open(HOME / "calls", "a") as calls:
            calls.write(json.dumps([name, *rest]) + "\n")
    globals()[name](*rest)
