"""The protocol of an engine: requests in, actions out, with log-probabilities under the sampled distribution."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict

import numpy as np

from retrain.errors import ModelError
from retrain.policy.protocol import PolicySnapshot
from retrain.rng import uniforms
from retrain.types import Action


@dataclass(frozen=True)
class PolicyRef:
    """Weights by name: which run's, and after how many changes of them."""

    run_id: str
    version: int


@dataclass(frozen=True)
class SampleRequest:
    """Draw ``samples`` actions after one prompt with the weights that ``policy`` names.

    ``stream`` names the random stream of the group (see ``retrain.rng``); sample k of the group uses
    ``(*stream, k)``, so what is sampled depends on nothing that happens to be in the same batch. ``top_p``, ``top_k``
    and ``min_p`` cut the distribution (see ``engines.step``).
    """

    policy: PolicyRef
    prompt_ids: tuple[int, ...]
    samples: int
    max_tokens: int
    temperature: float
    stream: tuple[int | str, ...]
    top_p: float = 1.0
    top_k: int = 0  # 0 for no limit
    min_p: float = 0.0
    sequences: tuple[tuple[int | str, ...], ...] = ()
    """A name for each sample whose sequence may go on in a later request of the same name: an engine may keep what it
    has computed of it, until ``forget_sequences``."""
    streams: tuple[tuple[int | str, ...], ...] = ()
    """The whole name of each sample's random stream, where it is not ``(*stream, k)``."""
    drawn: int = 0
    """Numbers of those streams that the completion has used before: its first tokens stand in ``prompt_ids``."""

    def uniforms_T(self, sample: int) -> np.ndarray:
        """Return the uniform numbers that this sample's tokens are drawn with, float64 [max_tokens]."""
        stream = self.streams[sample] if self.streams else (*self.stream, sample)
        return uniforms(self.drawn + self.max_tokens, *stream)[self.drawn :]

    @property
    def truncates(self) -> bool:
        """Return whether completions are sampled from less than the whole vocabulary."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True)
class LaneRequest(SampleRequest):
    """A request whose weights are lane ``lane`` of the decode batch."""

    lane: int = 0


@dataclass(frozen=True)
class SampleIndex:
    """One sequence to sample: sample ``sample`` of request ``request``."""

    request: int
    sample: int


def check_lengths(requests: Sequence[SampleRequest], context: int, owner: str) -> int:
    """Return the tokens of the longest prompt with its completion. Raises ModelError when they exceed ``context``, the
    tokens that ``owner`` holds."""
    longest, prompt, completion = max(
        ((len(each.prompt_ids) + each.max_tokens, len(each.prompt_ids), each.max_tokens) for each in requests),
        default=(0, 0, 0),
    )
    if longest > context:
        raise ModelError(
            f"the prompt has {prompt} tokens, and with max_tokens = {completion} that is more than the {context} that "
            f"{owner} holds: lower max_tokens"
        )
    return longest


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
