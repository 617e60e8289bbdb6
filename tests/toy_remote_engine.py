"""A toy engine behind a wire: weights reach it as PEFT files, tokens and log-probabilities come back as JSON."""

import json
from pathlib import Path

import numpy as np
import torch

from retrain.engines.protocol import PolicyRef, SampleRequest
from retrain.policy.protocol import PolicySnapshot
from retrain.rng import uniforms
from retrain.tokenizer import Tokenizer
from retrain.types import Action


class RemoteEngine:
    """Samples with a model of its own, one request after the other, token by token through peft."""

    gives_entropy, exact, beside, sync_seconds = False, True, False, None
    state, restore = dict, staticmethod(lambda state: None)

    def __init__(self, model: str, tokenizer: Tokenizer, end: int, folder: Path):
        from transformers import AutoModelForCausalLM

        self.server, self.tokenizer, self.end, self.folder = model, tokenizer, end, folder
        self.base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.published: dict[PolicyRef, Path] = {}

    def publish(self, ref: PolicyRef, weights: PolicySnapshot) -> None:
        place = self.published[ref] = self.folder / f"{ref.run_id}@{ref.version}"
        weights.export(place, place)

    def retire(self, ref: PolicyRef) -> None:
        del self.published[ref]

    def give_up(self) -> None:
        """One thread samples."""

    def forget_sequences(self) -> None:
        """Nothing is kept."""

    def sample(self, requests: list[SampleRequest], *, max_rows=None, finished=None) -> list[list[Action]]:
        groups = []
        for place, request in enumerate(requests):
            answers = [json.loads(self._answer(request, k)) for k in range(request.samples)]
            groups.append([self._action(**one, version=request.policy.version) for one in answers])
            if finished is not None:
                finished(place, groups[-1])
        return groups

    def _action(self, ids: list[int], logprobs: list[float], stop: str, version: int) -> Action:
        return Action(ids, self.tokenizer.decode(ids), np.array(logprobs), None, stop, policy_version=version)

    @torch.no_grad()
    def _answer(self, request: SampleRequest, k: int) -> str:
        from peft import PeftModel

        model = PeftModel.from_pretrained(self.base, str(self.published[request.policy]))
        prompt, ids, logprobs = len(request.prompt_ids), list(request.prompt_ids), []
        for u in uniforms(request.max_tokens, *request.stream, k):
            logp = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].double() / request.temperature, -1)
            ids.append(int(torch.searchsorted(logp.exp().cumsum(0), float(u)).clamp(max=len(logp) - 1)))
            logprobs.append(float(logp[ids[-1]]))
            if ids[-1] == self.end:
                break
        model.unload()
        stop = "stop" if ids[-1] == self.end else "length"
        return json.dumps({"ids": ids[prompt:], "logprobs": logprobs, "stop": stop})
