"""The protocol of an engine: requests in, actions out, with log-probabilities under the sampled distribution."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypedDict

from retrain.policy.protocol import PolicySnapshot
from retrain.types import Action, PolicyRef, SampleRequest

Finished = Callable[[int, list[Action]], None]


class EngineState(TypedDict, total=False):
    """Limits of an engine on this machine."""

    decode_bytes: int  # Of a decode batch
    fitting: int | None  # Rows that fit after running out of memory


class Engine(Protocol):
    """A sampler. ``gives_entropy``: actions carry full-vocabulary entropies. ``exact``: equal weights, requests and
    seeds give equal bits. ``is_concurrent``: it samples on other processors than training, so that later steps can be
    sampled during an update; ``sample`` may then be called from several threads."""

    gives_entropy: bool
    exact: bool
    is_concurrent: bool

    @property
    def sync_seconds(self) -> float | None:
        """Return the seconds in which the last ``sample`` loaded published weights; None if not measured."""
        ...

    def publish(self, ref: PolicyRef, weights: PolicySnapshot) -> None:
        """Make weights available to requests under ``ref`` until ``retire``."""

    def retire(self, ref: PolicyRef) -> None:
        """Drop weights that no later request names; does nothing for unknown ones."""

    def state(self) -> EngineState: ...

    def restore(self, state: EngineState) -> None: ...

    def forget_sequences(self) -> None:
        """Drop cached sequences: no later request continues them."""

    def cancel(self) -> None:
        """Cancel ``sample`` calls in other threads: they raise or end soon."""

    def sample(
        self, requests: Sequence[SampleRequest], *, max_rows: int | None = None, finished: Finished | None = None
    ) -> list[list[Action]]:
        """Return one list of actions per request, in order.

        ``max_rows`` limits the sequences that are decoded at once; it changes only speed and memory.
        ``finished(index, actions)`` is called once per request, from any thread, when all its actions are complete and
        others may still be sampled.
        """
        ...
