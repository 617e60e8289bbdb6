"""Sampling with a backend of the user's own (see ``policy.plugin``)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from retrain.engines.protocol import EngineState, Finished
from retrain.errors import PluginError
from retrain.policy.plugin import Backend, PluginSnapshot
from retrain.policy.protocol import PolicySnapshot
from retrain.types import Action, PolicyRef, SampleRequest


class PluginEngine:
    """Samples every run's prompts with that run's own backend; checks what comes back."""

    exact = False
    beside = False
    sync_seconds: float | None = None

    def __init__(self, plugin: str, gives_entropy: bool):
        self.plugin, self.gives_entropy = plugin, gives_entropy
        self._backends: dict[str, Backend] = {}

    def state(self) -> EngineState:
        return {}

    def restore(self, state: EngineState) -> None:
        """Do nothing: there is no state."""

    def publish(self, ref: PolicyRef, weights: PolicySnapshot) -> None:
        """Backends sample with the weights that they hold: this says whose they are."""
        if not isinstance(weights, PluginSnapshot):
            raise TypeError(f"this engine samples with backends, not with {type(weights).__name__}")
        self._backends[ref.run_id] = weights.backend

    def retire(self, ref: PolicyRef) -> None:
        """Do nothing: only the backend is held, which samples with later weights too."""

    def forget_sequences(self) -> None:
        """Do nothing: no sequences are cached."""

    def give_up(self) -> None:
        """See ``Engine.give_up``: backends sample in one thread."""

    def sample(
        self, requests: Sequence[SampleRequest], *, max_rows: int | None = None, finished: Finished | None = None
    ) -> list[list[Action]]:
        """See ``Engine.sample``; runs take their turns.

        Raises PluginError naming the backend when the number of completions, a length or a value is wrong.
        """
        sampled: list[list[Action]] = [[] for _ in requests]
        for ref in dict.fromkeys(request.policy for request in requests):
            places = [i for i, request in enumerate(requests) if request.policy == ref]
            groups = [list(group) for group in self._backends[ref.run_id].sample([requests[i] for i in places])]
            if len(groups) != len(places):
                raise PluginError(f"backend {self.plugin} sampled {len(groups)} groups for {len(places)} prompts")
            for place, group in zip(places, groups, strict=True):
                self._check(requests[place], group)
                sampled[place] = [replace(action, policy_version=ref.version) for action in group]
                if finished is not None:
                    finished(place, sampled[place])
        return sampled

    def _check(self, request: SampleRequest, group: Sequence[Action]) -> None:
        words = f"backend {self.plugin} sampled"
        if len(group) != request.samples:
            raise PluginError(f"{words} {len(group)} completions of a prompt where {request.samples} were asked for")
        for completion in group:
            logprobs_T = np.asarray(completion.logprobs_T)
            if logprobs_T.shape != (len(completion),):
                raise PluginError(f"{words} {len(completion)} tokens with {logprobs_T.shape} log-probabilities")
            if not (np.isfinite(logprobs_T).all() and (logprobs_T <= 1e-6).all()):
                raise PluginError(f"{words} a token whose log-probability is not finite, or above 0")
            if not len(completion) or len(completion) > request.max_tokens:
                raise PluginError(f"{words} {len(completion)} tokens where 1 to {request.max_tokens} were asked for")
