"""What the loop asks of an engine: actions, with the log-probabilities of the distribution sampled from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from retrain.errors import ModelError
from retrain.policy.protocol import PolicySnapshot
from retrain.types import Action, PolicyRef, SampleRequest


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


class Engine(Protocol):
    """A sampler. ``gives_entropy``: actions carry full-vocabulary entropies. ``exact``: the same weights, requests and
    seeds give the same bits again. ``beside``: it samples on processors of its own, so that sampling for later steps
    can go on while a policy is updated; ``sample`` may then be called from several threads."""

    gives_entropy: bool
    exact: bool
    beside: bool

    @property
    def sync_seconds(self) -> float | None:
        """What the last ``sample`` took to make the published weights its own; None where the engine cannot tell."""
        ...

    def publish(self, ref: PolicyRef, weights: PolicySnapshot) -> None:
        """Make these weights available to requests under ``ref``, until they are retired."""
        ...

    def retire(self, ref: PolicyRef) -> None:
        """No later request names these weights; nothing happens where they are not known."""
        ...

    def state(self) -> dict[str, Any]:
        """What of the machine decides how it samples, as strict JSON: part of every checkpoint."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state()``."""
        ...

    def forget_sequences(self) -> None:
        """No sequence of the requests so far goes on."""
        ...

    def give_up(self) -> None:
        """What other threads are sampling now is nobody's: their ``sample`` raises, or ends by itself soon."""
        ...

    def sample(
        self, requests: Sequence[SampleRequest], *, max_rows: int | None = None, finished: Finished | None = None
    ) -> list[list[Action]]:
        """One list of actions per request, in order.

        ``max_rows``: most sequences to decode at once, of as many as fit; it changes speed and memory only.
        ``finished(index, actions)`` is called once per request, from any thread, as soon as its actions are all
        there, while others are still being sampled.
        """
        ...
