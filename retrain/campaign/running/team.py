"""The ranks of ``[backend] shard``: processes that torchrun has started, or that this one starts when it needs them.

Rank 0 is the process that reads the file, trains and writes; it alone hears signals. The others end with it, however it
ends: they find their connection closed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from retrain.campaign.running.launching import end_words
from retrain.config import Config
from retrain.device import MEMORY_SHARE, OWN_GPU, memory_share, torchrun_rank
from retrain.errors import RankLost, UsageError, plural
from retrain.policy.ranks import join

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from retrain.policy.ranks import Ranks

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[4]);"
    "from retrain.campaign.running.team import follow_started; follow_started(*map(int, sys.argv[1:4]))"
)
"""What a rank that is started here runs: its arguments are rank, ranks, rank 0's port, and where it imports from."""
HOST = "127.0.0.1"
JOIN_SECONDS = 600.0  # Seconds that started ranks may take to connect; they import torch first
PATIENCE_SECONDS = 10.0  # Seconds that ranks may take to end before they are killed
DEATH_SECONDS = 2.0  # Seconds between a lost connection and the end of its process


def gpus_of(config: Config) -> list[tuple[str, str]]:
    """Return the GPUs that the configuration means, each with what ``CUDA_VISIBLE_DEVICES`` calls it; none for a CPU.

    In a process that has been given its GPUs, all that it sees.
    """
    backend, own = config.backend, bool(os.environ.get(OWN_GPU))
    if backend.devices == "cpu":
        return []
    from retrain.device import resolve_device

    there = visible_gpus()
    count = len(there)
    if not count and (own or not backend.named_gpus):
        if backend.devices == "all":
            raise UsageError('devices = "all": this machine shows no GPU; type devices = "auto" or "cpu"')
        resolve_device("auto")  # says why, where there is one that cannot be used
        return []
    names = (not own and backend.named_gpus) or [f"gpu:{index}" for index in range(count)]
    if missing := [name for name in names if int(name.removeprefix("gpu:")) >= count]:
        raise UsageError(f"devices has {missing[0]}: this machine shows {plural(count, 'GPU')}")
    return [there[int(name.removeprefix("gpu:"))] for name in names]


def visible_gpus() -> list[tuple[str, str]]:
    """Return all GPUs that this process sees, each with what ``CUDA_VISIBLE_DEVICES`` calls it."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    given = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return [(f"gpu:{index}", given[index] if given else str(index)) for index in range(count)]


class Team:
    """The ranks that a configuration asks for, from the first time that they are asked for until ``close``."""

    def __init__(self, config: Config):
        self.config, self.under_torchrun = config, torchrun_rank() is not None
        self._ranks: Ranks | None = None
        self._store: TCPStore | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._before: tuple[int, str | None] | None = None

    def ranks(self) -> Ranks | None:
        """The other ranks; None where this process is the only one. Raises UsageError when there are not as many GPUs,
        RankLost when they do not come."""
        places = self._places()
        if self._ranks is None and len(places) > 1:
            self._meet(places)
        return self._ranks

    def close(self) -> None:
        """End the ranks, and have this process use the whole machine again."""
        from retrain.policy.ranks import join, leave, send

        others, owing = range(1, 1 if self._ranks is None else self._ranks.count), set[int]()
        if self._ranks is not None:
            owing = self._ranks.owing
        elif self.under_torchrun and (count := int(os.environ["WORLD_SIZE"])) > 1:
            join(0, count)  # they wait to be told that there is nothing to do
            others = range(1, count)
        for rank in others:
            if rank not in owing:
                with suppress(RankLost):
                    send(("end", (), False), rank)
        if others:
            leave()
        deadline = time.monotonic() + PATIENCE_SECONDS
        for rank, process in self._processes.items():
            try:
                process.wait(0.0 if rank in owing else max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        self._ranks = self._store = None
        self._restore()

    def _places(self) -> list[str]:
        backend, asked = self.config.backend, self.config.backend.ranks
        gpus = [name for name, _ in gpus_of(self.config)]
        count = int(os.environ["WORLD_SIZE"]) if self.under_torchrun else max(1, len(gpus))
        if asked != "auto" and self.under_torchrun and asked != count:
            raise UsageError(
                f"[backend] ranks = {asked}, and torchrun has started {count}: type --set backend.ranks={count}"
            )
        count = count if asked == "auto" else asked
        if not gpus:
            return ["cpu"] * count
        here = int(os.environ["LOCAL_WORLD_SIZE"]) if self.under_torchrun else count
        if here > len(gpus):
            raise UsageError(
                f"{here} ranks, and [backend] devices = {json.dumps(backend.devices)} means {len(gpus)} GPU(s): each "
                f"rank has one for itself; type --set backend.ranks={len(gpus)}"
            )
        return [gpus[rank % here] for rank in range(count)]

    def _meet(self, places: list[str]) -> None:
        import torch

        from retrain.policy.ranks import Ranks, join

        count, on_cpu = len(places), places[0] == "cpu"
        here = int(os.environ["LOCAL_WORLD_SIZE"]) if self.under_torchrun else count
        if on_cpu:
            threads = torch.get_num_threads()
            self._before = threads, os.environ.get(MEMORY_SHARE)
            os.environ[MEMORY_SHARE] = f"{memory_share() / here:g}"
            if not self.under_torchrun:
                torch.set_num_threads(max(1, threads // count))
        if self.under_torchrun:
            join(0, count)
        else:
            store = self._start(count)
            join(0, count, store)
        ranks = self._ranks = Ranks(places[1:], self._how_ended)
        if self.config.backend.shard == "fsdp2":
            ranks.share_weights()

    def _start(self, count: int) -> TCPStore:
        """Start the other ranks and wait until they are there."""
        import torch
        from torch.distributed import TCPStore

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the machine's name need not lead to it
        store = self._store = TCPStore(HOST, 0, None, True, wait_for_workers=False)
        environment = dict(os.environ) | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        environment.pop(OWN_GPU, None)  # theirs is the one that they are told
        for rank in range(1, count):
            words = [str(rank), str(count), str(store.port), json.dumps(sys.path)]
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-c", BOOT, *words],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what rank 0 prints may be read by a program
                env=environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + JOIN_SECONDS
        while not store.check([f"rank {rank}" for rank in self._processes]):
            for rank, process in self._processes.items():
                if process.poll() is not None:
                    raise RankLost(f"rank {rank} {self._how_ended(rank)}")
            if time.monotonic() > deadline:
                raise RankLost(f"the {count - 1} other ranks have not begun within {JOIN_SECONDS:.0f} s")
            time.sleep(0.05)
        return store

    def _how_ended(self, rank: int) -> str:
        process = self._processes.get(rank)
        if process is None:
            return ""
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(DEATH_SECONDS)
            return f"(process {process.pid}) {end_words(status)}"
        return ""

    def _restore(self) -> None:
        if self._before is None:
            return
        import torch

        threads, share = self._before
        self._before = None
        torch.set_num_threads(threads)
        os.environ.pop(MEMORY_SHARE)
        if share is not None:
            os.environ[MEMORY_SHARE] = share


def follow_torchrun() -> int:
    """Be a rank other than 0 that torchrun has started, to the end; the exit status."""
    from retrain.policy.ranks import join

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        join(rank, count)
    except RankLost as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return _follow(rank, int(os.environ["LOCAL_WORLD_SIZE"]))


def follow_started(rank: int, count: int, port: int) -> None:
    """Be a rank that rank 0 has started, and end this process."""
    from torch.distributed import TCPStore

    store = TCPStore(HOST, port, None, False)
    store.set(f"rank {rank}", "here")
    join(rank, count, store)
    sys.exit(_follow(rank, 1))


def _follow(rank: int, sharing: int) -> int:
    """Do what rank 0 asks; ``sharing`` ranks divide up the memory of a CPU that this process plans with."""
    from retrain.campaign.running.following import Desk
    from retrain.policy.ranks import follow, leave
    from retrain.training.bases import Bases

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # rank 0 says when it ends
    os.environ[MEMORY_SHARE] = f"{memory_share() / sharing:g}"
    try:
        with Bases() as bases:
            follow(Desk(bases))
    except RankLost as error:
        print(f"rank {rank} ends: {error}", file=sys.stderr)
        return error.exit_status
    finally:
        leave()
    return 0
