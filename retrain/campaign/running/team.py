"""Start and stop the ranks of ``[backend] shard``: processes of torchrun, or of rank 0 itself.

Rank 0 runs the campaign: it reads the file, prints, writes and handles signals. It sends each job to the other ranks,
which run it in the same way (``InProcess``) with records that write nothing. They end with rank 0, even if it is
killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from retrain.campaign.running.protocol import Job
from retrain.config import Config
from retrain.device import MEMORY_SHARE, OWN_GPU, gpus_of, memory_share, torchrun_rank
from retrain.errors import RankLost, UsageError
from retrain.util.processes import end_words

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from retrain.ranks import RankGroup

# Program of a rank started here; arguments: rank, number of ranks, rank 0's port, import path
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[4]);"
    "from retrain.campaign.running.rank_worker import follow_started; follow_started(*map(int, sys.argv[1:4]))"
)
HOST = "127.0.0.1"
JOIN_SECONDS = 600.0  # Seconds that started ranks may take to connect; they import torch first
PATIENCE_SECONDS = 10.0  # Seconds that ranks may take to end before they are killed
DEATH_SECONDS = 2.0  # Seconds within which a process ends after its connection was lost
WATCH_SECONDS = 0.5
STUCK_SECONDS = 20.0  # Seconds after a rank's death within which this process must notice it by itself


class Team:
    """Ranks of a configuration, started on first use and running until ``close``."""

    def __init__(self, config: Config):
        self.config, self.under_torchrun = config, torchrun_rank() is not None
        self._ranks: RankGroup | None = None
        self._store: TCPStore | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._before: tuple[int, float] | None = None  # Threads and memory share of this process without other ranks
        self._closed = threading.Event()
        self._places: list[str] = []

    def ranks(self) -> RankGroup | None:
        """Return the connection to the other ranks; None if this process is the only one. Raises UsageError if there
        are too few GPUs, RankLost if a rank does not connect."""
        if self._ranks is None:
            self._places = self._devices()
            if len(self._places) > 1:
                self._ranks = self._meet(self._places)
        return self._ranks

    def begin(self, job: Job) -> None:
        if (ranks := self.ranks()) is not None:
            ranks.from_first("next job", lambda: (job, self._places))

    def close(self) -> None:
        """Stop the ranks, and restore this process's number of threads and share of memory."""
        self._closed.set()
        ranks, count = self._ranks, int(os.environ["WORLD_SIZE"]) if self.under_torchrun else 1
        if ranks is None and count > 1:
            ranks = joined(0, count, "cpu")  # the other ranks wait for the message that no job is left
        if ranks is not None:
            ranks.end()
            ranks.leave()
        deadline = time.monotonic() + PATIENCE_SECONDS
        for process in self._processes.values():
            try:
                process.wait(0.0 if ranks is None or ranks.is_broken else max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        self._ranks = self._store = None
        self._restore()

    def _devices(self) -> list[str]:
        backend, ranks = self.config.backend, self.config.backend.ranks
        gpus = [name for name, _ in gpus_of(backend.devices, backend.named_gpus)]
        count = int(os.environ["WORLD_SIZE"]) if self.under_torchrun else max(1, len(gpus))
        if ranks != "auto" and self.under_torchrun and ranks != count:
            raise UsageError(
                f"[backend] ranks = {ranks}, and torchrun has started {count}: type --set backend.ranks={count}"
            )
        count = count if ranks == "auto" else ranks
        if not gpus:
            return ["cpu"] * count
        here = int(os.environ["LOCAL_WORLD_SIZE"]) if self.under_torchrun else count
        if here > len(gpus):
            raise UsageError(
                f"{here} ranks, and [backend] devices = {json.dumps(backend.devices)} means {len(gpus)} GPU(s): each "
                f"rank has one for itself; type --set backend.ranks={len(gpus)}"
            )
        return [gpus[rank % here] for rank in range(count)]

    def _meet(self, places: list[str]) -> RankGroup:
        import torch

        count, on_cpu = len(places), places[0] == "cpu"
        here = int(os.environ["LOCAL_WORLD_SIZE"]) if self.under_torchrun else count
        if on_cpu:
            threads = torch.get_num_threads()
            self._before = threads, memory_share()
            os.environ[MEMORY_SHARE] = f"{memory_share() / here:g}"
            if not self.under_torchrun:
                torch.set_num_threads(max(1, threads // count))
        store = None if self.under_torchrun else self._start(count)
        ranks = joined(0, count, "cpu" if on_cpu else "cuda", store, self._blame)
        if self._processes:
            threading.Thread(target=self._watch, args=(ranks,), name="ranks", daemon=True).start()
        return ranks

    def _start(self, count: int) -> TCPStore:
        import torch
        from torch.distributed import TCPStore

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the machine's name may not resolve to it
        store = self._store = TCPStore(HOST, 0, None, True, wait_for_workers=False)
        environment = dict(os.environ) | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        environment.pop(OWN_GPU, None)  # ranks receive the store's port
        for rank in range(1, count):
            words = [str(rank), str(count), str(store.port), json.dumps(sys.path)]
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-c", BOOT, *words],
                stdin=subprocess.DEVNULL,
                stdout=2,  # a program may read rank 0's output
                env=environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + JOIN_SECONDS
        while not store.check([f"rank {rank}" for rank in self._processes]):
            for process in self._processes.values():
                if process.poll() is not None:
                    raise RankLost(self._blame())
            if time.monotonic() > deadline:
                raise RankLost(f"the {count - 1} other ranks have not begun within {JOIN_SECONDS:.0f} s")
            time.sleep(0.05)
        return store

    def _blame(self) -> str:
        """Return a text about the rank whose end made the other ranks end; "" if none has ended."""
        deadline = time.monotonic() + DEATH_SECONDS
        while True:
            ends = {rank: status for rank, process in self._processes.items() if (status := process.poll()) is not None}
            causes = [rank for rank, status in ends.items() if status != RankLost.exit_status]
            if causes or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        rank = next(iter(causes or ends), None)
        return "" if rank is None else f"rank {rank} (process {self._processes[rank].pid}) {end_words(ends[rank])}"

    def _watch(self, ranks: RankGroup) -> None:
        # While this process waits for its GPU, it does not notice by itself that another rank is dead
        while not self._closed.wait(WATCH_SECONDS):
            if any(process.poll() is not None for process in self._processes.values()):
                if not self._closed.wait(STUCK_SECONDS) and not ranks.is_lost:
                    print(f"{self._blame()}: {RankLost.advice}, then type: retrain resume", file=sys.stderr, flush=True)
                    os._exit(RankLost.exit_status)
                return

    def _restore(self) -> None:
        if self._before is None:
            return
        import torch

        (threads, share), self._before = self._before, None
        torch.set_num_threads(threads)
        os.environ[MEMORY_SHARE] = f"{share:g}"


def joined(
    rank: int, count: int, device: str, store: TCPStore | None = None, blame: Callable[[], str] = str
) -> RankGroup:
    """Connect this rank, once all ranks are there. ``device``: type of rank 0's devices; other ranks receive it."""
    from retrain.ranks import RankGroup

    ranks = RankGroup(rank, count, store, blame)
    if ranks.from_first("device", lambda: device) == "cuda":
        ranks.use_gpus()
    return ranks
