"""Requests to sample: a prompt, the weights to sample with, and the random streams."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrain.errors import ModelError
from retrain.rng import uniforms


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
        """Return the uniform numbers that draw this sample's tokens, float64 [max_tokens]."""
        stream = self.streams[sample] if self.streams else (*self.stream, sample)
        return uniforms(self.drawn + self.max_tokens, *stream)[self.drawn :]

    @property
    def truncates(self) -> bool:
        """Return whether completions are sampled from less than the whole vocabulary."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


def check_lengths(requests: Sequence[SampleRequest], context: int, owner: str) -> int:
    """Return the tokens of the longest prompt with its completion. Raises ModelError when they exceed ``context``, the
    tokens that ``owner`` holds."""
    longest, prompt, completion = max(
        ((len(r.prompt_ids) + r.max_tokens, len(r.prompt_ids), r.max_tokens) for r in requests), default=(0, 0, 0)
    )
    if longest > context:
        raise ModelError(
            f"the prompt has {prompt} tokens, and with max_tokens = {completion} that is more than the {context} that "
            f"{owner} holds: lower max_tokens"
        )
    return longest
