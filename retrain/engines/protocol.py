"""The protocol of an engine: requests in, actions out, with log-probabilities under the sampled distribution."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypedDict

from retrain.policy.protocol import PolicySnapshot
from retrain.types import Action, PolicyRef, SampleRequest

Finished = Callable[[int, list[Action]], None]


class EngineState(TypedDict, total=False):
    """Numbers of this machine that decide how an engine samples: bytes of a decode batch, and rows that were found to
    fit in them."""

    decode_bytes: int
    fitting: int | None


class Engine(Protocol):
    """A sampler. ``gives_entropy``: actions carry full-vocabulary entropies. ``exact``: the same weights, requests and
    seeds give the same bits again. ``beside``: it samples on processors of its own, so that sampling for later steps
    can go on while a policy is updated; ``sample`` may then be called from several threads."""

    gives_entropy: bool
    exact: bool
    beside: bool

    @property
    def sync_seconds(self) -> float | None:
        """Return the seconds in which the last ``sample`` loaded published weights; None if they are not known."""
        ...

    def publish(self, ref: PolicyRef, weights: PolicySnapshot) -> None:
        """Make these weights available to requests under ``ref``, until they are retired."""
        ...

    def retire(self, ref: PolicyRef) -> None:
        """Drop these weights, which no later request names; does nothing where they are not known."""
        ...

    def state(self) -> EngineState:
        """Return what every checkpoint holds of the engine."""
        ...

    def restore(self, state: EngineState) -> None:
        """Continue from a ``state()``."""
        ...

    def forget_sequences(self) -> None:
        """Drop what is cached of sequences: none of those so far continues."""
        ...

    def give_up(self) -> None:
        """Cancel calls of ``sample`` in other threads: they raise, or end soon."""
        ...

    def sample(
        self, requests: Sequence[SampleRequest], *, max_rows: int | None = None, finished: Finished | None = None
    ) -> list[list[Action]]:
        """Return one list of actions per request, in order.

        ``max_rows``: most sequences to decode at once, of as many as fit; it changes speed and memory only.
        ``finished(index, actions)`` is called once per request, from any thread, as soon as its actions are all
        there, while others are still being sampled.
        """
        ...
