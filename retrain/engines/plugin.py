"""The engine of a backend plug-in: the user's class samples, and also trains (``policy.plugin``)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from retrain.engines.protocol import Engine, Finished
from retrain.errors import PluginError
from retrain.policy.plugin import Backend, PluginSnapshot
from retrain.policy.protocol import PolicySnapshot
from retrain.types import Action, PolicyRef, SampleRequest


class PluginEngine(Engine):
    """Samples with the backend objects of the runs. A backend also samples with its later weights, so that ``retire``
    drops nothing."""

    def __init__(self, plugin: str, gives_entropy: bool):
        self.plugin, self.gives_entropy = plugin, gives_entropy
        self._backends: dict[str, Backend] = {}

    def publish(self, ref: PolicyRef, weights: PolicySnapshot) -> None:
        if not isinstance(weights, PluginSnapshot):
            raise TypeError(f"this engine samples with backends, not with {type(weights).__name__}")
        self._backends[ref.run_id] = weights.backend

    def sample(
        self, requests: Sequence[SampleRequest], *, max_rows: int | None = None, finished: Finished | None = None
    ) -> list[list[Action]]:
        """Implement ``Engine.sample``, one run after the other.

        Raises PluginError if a backend returns a wrong number of completions, a completion of a wrong length, or an
        invalid log-probability.
        """
        sampled: list[list[Action]] = [[] for _ in requests]
        for ref in dict.fromkeys(request.policy for request in requests):
            indices = [i for i, request in enumerate(requests) if request.policy == ref]
            groups = [list(group) for group in self._backends[ref.run_id].sample([requests[i] for i in indices])]
            if len(groups) != len(indices):
                raise PluginError(f"backend {self.plugin} sampled {len(groups)} groups for {len(indices)} prompts")
            for index, group in zip(indices, groups, strict=True):
                self._check(requests[index], group)
                sampled[index] = [replace(action, policy_version=ref.version) for action in group]
                if finished is not None:
                    finished(index, sampled[index])
        return sampled

    def _check(self, request: SampleRequest, group: Sequence[Action]) -> None:
        prefix = f"backend {self.plugin} sampled"
        if len(group) != request.samples:
            raise PluginError(f"{prefix} {len(group)} completions of a prompt where {request.samples} were asked for")
        for completion in group:
            logprobs_T = np.asarray(completion.logprobs_T)
            if logprobs_T.shape != (len(completion),):
                raise PluginError(f"{prefix} {len(completion)} tokens with {logprobs_T.shape} log-probabilities")
            if not (np.isfinite(logprobs_T).all() and (logprobs_T <= 1e-6).all()):
                raise PluginError(f"{prefix} a token whose log-probability is not finite, or above 0")
            if not len(completion) or len(completion) > request.max_tokens:
                raise PluginError(f"{prefix} {len(completion)} tokens where 1 to {request.max_tokens} were asked for")
