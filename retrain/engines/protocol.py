"""What the trainer asks of an engine: completions with the log-probabilities of the distribution sampled from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from retrain.policy.lora import Adapter
from retrain.types import Completion


@dataclass(frozen=True)
class SampleRequest:
    """Draw ``samples`` completions of one prompt with the adapter of one lane.

    ``stream`` names the random stream of the group (see ``retrain.rng``); sample k of the group uses
    ``(*stream, k)``, so what is drawn depends on nothing that happens to be in the same batch. ``top_p``, ``top_k``
    and ``min_p`` cut the distribution (see ``engines.truncation``).
    """

    lane: int
    prompt_ids: tuple[int, ...]
    samples: int
    max_tokens: int
    temperature: float
    stream: tuple[int | str, ...]
    top_p: float = 1.0
    top_k: int = 0
    """0: no bound."""
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        """Whether completions are drawn from less than the whole vocabulary."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


Finished = Callable[[int, list[Completion]], None]


class Engine(Protocol):
    """A sampler. ``gives_entropy``: whether completions carry full-vocabulary entropies. ``max_rows``: most sequences
    to decode at once, None for as many as fit; it changes speed and memory only."""

    gives_entropy: bool
    max_rows: int | None

    @property
    def sync_seconds(self) -> float | None:
        """What the last ``sample`` took to make the adapters' weights its own; None where the engine cannot tell."""
        ...

    def sample(
        self, requests: Sequence[SampleRequest], adapters: Sequence[Adapter], finished: Finished | None = None
    ) -> list[list[Completion]]:
        """One list of completions per request, in order; ``request.lane`` indexes ``adapters``.

        ``finished(index, completions)`` is called once per request, from any thread, as soon as its completions are
        all there, while others are still being drawn.
        """
        ...
