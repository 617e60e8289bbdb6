"""One run over several processes: rank 0 trains, the others compute what it asks of them.

Every rank holds the same frozen base. Rank 0 alone has the loop, the optimizers, the graders and the files; the others
(``campaign.running.following``) keep nothing that outlives a request but the weights to sample with. So they can never
disagree about where training is, and a checkpoint is that of one process.

What goes between them are pickled messages over gloo, which tells at once when the other end has died.
"""

import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from retrain.errors import RankLost
from retrain.policy.company import Company, NotReady

T = TypeVar("T")
JOIN_SECONDS = 600.0  # How long the ranks may take to find each other: they import torch first
IDLE_SECONDS = 7 * 86400.0
"""How long a rank waits for what it is asked next: graders, servers and a person in between may take their time."""
ANSWER_SECONDS = 1800.0  # How long rank 0, done with its own share, waits for that of another


def join(rank: int, count: int, store: dist.Store | None = None) -> None:
    """Meet the other ranks, through ``store`` or as the environment says that torchrun sets. Raises RankLost when they
    do not come."""
    met: dict[str, Any] = {"init_method": "env://"} if store is None else {"store": store}
    try:
        dist.init_process_group("gloo", rank=rank, world_size=count, timeout=timedelta(seconds=JOIN_SECONDS), **met)
    except (RuntimeError, ValueError) as error:
        raise RankLost(f"rank {rank} has not met the {count - 1} others: {_first(error)}") from error


def leave() -> None:
    """Part from the other ranks, whether they are still there or not."""
    with suppress(RuntimeError, AssertionError, ValueError):
        dist.destroy_process_group()


def send(item: object, to: int) -> None:
    """Send an object to a rank. Raises RankLost when it is gone."""
    data = torch.frombuffer(bytearray(pickle.dumps(item, protocol=5)), dtype=torch.uint8)
    try:
        dist.send(torch.tensor([data.numel()]), to)
        dist.send(data, to)
    except RuntimeError as error:
        raise RankLost(f"rank {to} is gone ({_first(error)})") from error


def receive(of: int, seconds: float = IDLE_SECONDS) -> Any:
    """The next object that a rank sends. Raises RankLost when it is gone, or silent for so long."""
    try:
        size = torch.zeros(1, dtype=torch.int64)
        _wait(size, of, seconds)
        data = torch.empty(int(size), dtype=torch.uint8)
        _wait(data, of, seconds)
    except RuntimeError as error:
        raise RankLost(f"rank {of} is gone, or has said nothing for {seconds:.0f} s ({_first(error)})") from error
    return pickle.loads(data.numpy().data)


def _wait(into: torch.Tensor, of: int, seconds: float) -> None:
    work = dist.irecv(into, of)
    assert work is not None
    work.wait(timedelta(seconds=seconds))


@dataclass(frozen=True)
class Answers(Generic[T]):
    """What rank 0 has computed itself (None where that raised) and what every other rank has answered (None where it
    was not asked, or raised); ``fault`` is what was raised, by rank 0 or else by the lowest rank."""

    own: T | None
    others: list[Any]
    fault: Exception | None = None

    def whole(self) -> tuple[T, list[Any]]:
        """Own result and answers. Raises the fault."""
        if self.fault is not None:
            raise self.fault
        return self.own, self.others  # pyright: ignore[reportReturnType]


FOLLOWED = f"exit status {RankLost.exit_status}"  # Exit status of a rank that lost a peer


class Follower(Protocol):
    """What a rank other than 0 has a method of for everything that it may be asked."""

    def work(self) -> AbstractContextManager[None]: ...


class Ranks:
    """Rank 0's end of the others. ``places`` are the devices of these, rank 1's first; ``how_ended`` says of a rank
    that is gone what is known of its end, "" where nothing is. Not for several threads at once."""

    def __init__(self, places: Sequence[str], how_ended: Callable[[int], str] = lambda rank: ""):
        self.places, self.count, self.how_ended = list(places), 1 + len(places), how_ended
        self.company: Company | None = None
        """There where the ranks hold parts of the same weights: then all of them have part in whatever is asked."""
        self.owing = set[int]()
        """Who has not answered yet, as when rank 0 gives up in between; nothing can be sent to them."""
        self._asking = False
        self._later: list[tuple[object, ...]] = []

    def tell(self, name: str, *args: object) -> None:
        """Have all others do something, without an answer; what it raises is the answer to the next ``ask``. While they
        are asked for something else, they are told afterwards."""
        self._later.append((name, args, False))
        if not self._asking:
            self._tell_later()

    def ask(self, name: str, args: Sequence[tuple[object, ...] | None], own: Callable[[], T]) -> Answers[T]:
        """Have rank r + 1 do something with ``args[r]`` (None: it need not) while this one does ``own``. All answers
        have come when this returns, whoever raised something."""
        asked = [rank for rank, each in enumerate(args, start=1) if each is not None or self.company is not None]
        for rank in asked:
            each = args[rank - 1]
            self._ask(rank, *(("accompany", ()) if each is None else (name, each)))
        result, fault = None, None
        self._asking = True
        try:
            with nullcontext() if self.company is None else self.company.work():
                result = own()
        except Exception as error:
            fault = error
        finally:
            self._asking = False
        self._see_company(fault)
        answers, others = self._answers(asked)
        if fault is None or isinstance(fault, NotReady):  # which follows from what another one has raised
            fault = others or fault
        self._tell_later()
        return Answers(result, answers, fault)

    def share_weights(self) -> None:
        """From now on the ranks hold parts of the same weights, which they gather whenever one of them needs some."""
        device = "cpu" if self.places[0] == "cpu" else "cuda"
        form = partial(Company.form, device, ANSWER_SECONDS)
        company, _ = self.ask("share_weights", [(device,) for _ in self.places], form).whole()
        company.alone = self.accompanied
        self.company = company

    @contextmanager
    def accompanied(self) -> Iterator[None]:
        """Work of rank 0 alone, in which the others take part as far as gathering weights goes."""
        assert self.company is not None
        others = range(1, self.count)
        for rank in others:
            self._ask(rank, "accompany", ())
        self._asking = True
        try:
            with self.company.work():
                yield
        except Exception as error:
            self._see_company(error)
            self._answers(others)
            raise
        finally:
            self._asking = False
        _, fault = self._answers(others)
        self._tell_later()
        if fault is not None:
            raise fault

    def _ask(self, rank: int, name: str, args: tuple[object, ...]) -> None:
        self._send(rank, (name, args, True))
        self.owing.add(rank)

    def _answers(self, asked: Sequence[int]) -> tuple[list[Any], Exception | None]:
        """The answers of all others (None of those that were not asked, or have raised something), and what the first
        of them has raised."""
        answers, fault = [None for _ in range(1, self.count)], None
        for rank in asked:
            done, answer = self._receive(rank)
            self.owing.remove(rank)
            if done:
                answers[rank - 1] = answer
            elif fault is None or isinstance(fault, NotReady):
                fault = answer
        return answers, fault

    def _see_company(self, fault: Exception | None) -> None:
        """Raise RankLost where the company is lost: others may wait for this process, which has to end."""
        if self.company is None or not self.company.lost:
            return
        ends = {rank: how for rank in range(1, self.count) if (how := self.how_ended(rank))}
        first = next((rank for rank, how in ends.items() if not how.endswith(FOLLOWED)), None)
        if first is None and ends:
            first = min(ends)
        raise RankLost(str(fault) if first is None else f"rank {first} {ends[first]}") from fault

    def _tell_later(self) -> None:
        while self._later:
            message = self._later.pop(0)
            for rank in range(1, self.count):
                self._send(rank, message)

    def _send(self, rank: int, message: tuple[object, ...]) -> None:
        try:
            send(message, rank)
        except RankLost as error:
            raise self._lost(rank, error) from error

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return receive(rank, ANSWER_SECONDS)
        except RankLost as error:
            raise self._lost(rank, error) from error

    def _lost(self, rank: int, error: RankLost) -> RankLost:
        how = self.how_ended(rank)
        return RankLost(f"rank {rank} {how}") if how else error


def follow(desk: Follower) -> None:
    """Do what rank 0 asks, one thing after the other, until it asks for the end; ``desk`` has a method for each. Raises
    RankLost when rank 0 is gone, or another one that had a part in it."""
    fault: Exception | None = None
    while True:
        name, args, answered = receive(0)
        if name == "end":
            return
        answer = None
        try:
            with desk.work() if answered else nullcontext():
                if fault is None:
                    answer = getattr(desk, name)(*args)
        except RankLost:
            raise
        except Exception as error:
            fault = fault or _portable(error)
        if answered:
            send((True, answer) if fault is None else (False, fault), 0)
            fault = None


def _portable(error: Exception) -> Exception:
    """The error, if it can be sent; else one with its words. Its traceback is a note of it."""
    error.add_note("on another rank:\n" + "".join(traceback.format_exception(error)))
    error = error.with_traceback(None)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _first(error: BaseException) -> str:
    """The first line of what an error says."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
