"""Run the same jobs as rank 0, at the same time, on another rank, until rank 0 ends."""

import os
import signal
import sys
import threading
import time
from dataclasses import replace

from torch.distributed import TCPStore

from retrain.campaign.running.jobs import InProcess
from retrain.campaign.running.protocol import Job
from retrain.campaign.running.team import HOST, STUCK_SECONDS, WATCH_SECONDS, joined
from retrain.config import parse_dict
from retrain.config.runs import RunSpec
from retrain.device import MEMORY_SHARE, failure_text, memory_share
from retrain.errors import DeviceLost, RankLost
from retrain.ranks import RankGroup, RanksEnded
from retrain.records.observer import NullObserver
from retrain.training.bases import Bases


def follow_torchrun() -> int:
    return _follow(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"]))


def follow_started(rank: int, count: int, port: int) -> None:
    """Run this process as a rank that rank 0 has started; does not return."""
    parent = os.getppid()
    store = TCPStore(HOST, port, None, False)
    store.set(f"rank {rank}", "here")
    threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()
    sys.exit(_follow(rank, count, 1, store))


def _end_with(parent: int) -> None:
    # While this rank waits for its GPU, it does not notice by itself that rank 0 has ended
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    time.sleep(STUCK_SECONDS)
    os._exit(RankLost.exit_status)


def _follow(rank: int, count: int, sharing: int, store: TCPStore | None = None) -> int:
    """Run rank 0's jobs until it ends; return the exit status. ``sharing``: number of ranks that share CPU memory."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides when to stop
    os.environ[MEMORY_SHARE] = f"{memory_share() / sharing:g}"
    ranks: RankGroup | None = None
    try:
        ranks = joined(rank, count, "", store)
        process = InProcess(bases=Bases(ranks=ranks))
        while True:
            job, devices = ranks.from_first("next job", _no_job)
            ranks.note = ""
            try:
                process.do(_on_device(job, devices[rank]), NullObserver(), lambda: False)
            except DeviceLost:
                raise
            except Exception as error:  # rank 0 gets it too and decides what follows; if not, the next exchange fails
                ranks.note = f" after {failure_text(error)}"
    except RanksEnded:
        return 0
    except DeviceLost as error:
        print(f"rank {rank} ends: {error}", file=sys.stderr)
        return error.exit_status
    finally:
        if ranks is not None:
            ranks.leave()


def _no_job() -> tuple[Job, list[str]]:
    raise RuntimeError("only rank 0 knows the next job")


def _on_device(job: Job, device: str) -> Job:

    def moved(spec: RunSpec) -> RunSpec:
        config = spec.config.to_dict()
        config["backend"]["devices"] = device
        return replace(spec, config=parse_dict(config))

    return replace(job, runs=[moved(spec) for spec in job.runs])
