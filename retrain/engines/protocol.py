"""The protocol of an engine: requests in, actions out, with log-probabilities under the sampled distribution."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, TypedDict

from retrain.policy.protocol import PolicySnapshot
from retrain.types import Action, PolicyRef, SampleRequest

Finished = Callable[[int, list[Action]], None]


class EngineState(TypedDict, total=False):
    decode_bytes: int  # Memory of a decode batch on this device
    fitting: int | None  # Most rows that fit, None if memory never ran out


class Engine(Protocol):
    """A sampler. ``gives_entropy``: actions carry full-vocabulary entropies. ``exact``: equal weights, requests and
    seeds give equal bits. ``is_concurrent``: sampling and training use different processors, so that later steps can be
    sampled during an update; ``sample`` may then be called from several threads. Subclasses must define ``publish`` and
    ``sample``; the other methods do nothing by default."""

    gives_entropy: bool = False
    exact: bool = False
    is_concurrent: bool = False

    @property
    def sync_seconds(self) -> float | None:
        """Return the seconds that the last ``sample`` spent on loading published weights; None if not measured."""
        return None

    @abstractmethod
    def publish(self, ref: PolicyRef, weights: PolicySnapshot) -> None:
        """Make the weights available to requests for the policy ``ref``, until it is retired."""

    def retire(self, ref: PolicyRef) -> None:
        """Drop the weights of ``ref``; no later request may name it. Does nothing if they were not published."""

    def state(self) -> EngineState:
        return {}

    def restore(self, state: EngineState) -> None:
        return

    def forget_sequences(self) -> None:
        """Drop cached sequences, because no later request will continue them."""

    def cancel(self) -> None:
        """Cancel ``sample`` calls in other threads: they raise or end soon."""

    @abstractmethod
    def sample(
        self, requests: Sequence[SampleRequest], *, max_rows: int | None = None, finished: Finished | None = None
    ) -> list[list[Action]]:
        """Return one list of actions per request, in order.

        ``max_rows`` limits the sequences that are decoded at once; it changes only speed and memory.
        ``finished(index, actions)`` is called once per request, from any thread, as soon as all its actions are
        complete.
        """
        ...
