"""The update's gradient against the plainest formulas in higher precision.

The reference shares no code with the update: the model's own forward pass with the textbook's attention, one sequence
at a time, all logits at once, ΔW·x added to each layer's output, autograd through all of it. With more than
``LAYERS`` layers, both sides are the model's first ones.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from retrain.policy.base import BaseModel
from retrain.policy.local import LocalPolicy
from retrain.policy.lora import Lanes, LoraWeights
from retrain.policy.memory import available_memory
from retrain.policy.objective import Objective
from retrain.policy.protocol import Want
from retrain.policy.quantized import QuantizedLinear
from retrain.policy.threads import Workers
from retrain.selfcheck.results import Result, judged, skipped
from retrain.selfcheck.source import LAYERS
from retrain.selfcheck.subject import Subject, Work
from retrain.types import Sample

HIGHER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
ROOM = 0.5
"""Share of the available memory that the copies may take."""


def against_higher_precision(subject: Subject) -> Result:
    """Cosine and length of the gradient of one step of a trained lane."""
    higher = HIGHER.get(subject.base.dtype)
    if higher is None:
        return skipped(f"{subject.dtype} is the highest precision that there is")
    config = subject.base.model.config.get_text_config()
    depth = int(config.num_hidden_layers)
    cut = min(depth, LAYERS)
    reach = _in_layers(subject, cut)
    needed = reach * (higher.itemsize + (subject.base.dtype.itemsize if cut < depth else 0))
    if needed > ROOM * available_memory(subject.base.device):
        return skipped(f"the first {cut} layers in {higher} take {needed / 2**30:.1f} GiB, which are not free")
    policy = subject.trained(0, clipped=False)
    work = Work(min(3, subject.work.prompts), min(3, subject.work.samples), subject.work.tokens)
    requests = subject.requests(subject.publish([policy]), work=work)
    samples = subject.samples(requests, subject.engine.sample(requests))
    with ExitStack() as stack:
        learner = policy if cut == depth else _shallow(subject, policy, cut, stack)
        scored = learner.score(samples, frozenset({Want.LOGPROBS})).logprobs or []
        for sample, logprobs_T in zip(samples, scored, strict=True):
            sample.logprobs[sample.action_mask] = logprobs_T
        weights = learner.adapter.frozen()
        learner.update(subject.batch(samples), Objective(), 0.0)
        assert learner.adapter.flat.grad is not None
        ours = learner.adapter.flat.grad.double().cpu()
        reference = plain_copy(subject.base, subject.lanes, cut, higher)
        theirs = plain_gradient(reference, weights, samples, higher).double().cpu()
    cosine = float(torch.dot(ours, theirs) / (ours.norm() * theirs.norm()))
    values = {"gradient_angle": 1 - cosine, "gradient_norm": abs(float(ours.norm() / theirs.norm()) - 1)}
    named = str(higher).removeprefix("torch.")
    part = "" if cut == depth else f", first {cut} of {depth} layers"
    return judged(subject.kinds, values, f"against {named}{part}", numbers=len(ours), norm=float(theirs.norm()))


def _in_layers(subject: Subject, layers: int) -> int:
    """Parameters of the base without the layers behind the first so many."""
    numbers = 0
    for name, weight in subject.base.model.named_parameters():
        number = re.search(r"\.(?:layers|h)\.(\d+)\.", name)
        numbers += weight.numel() if number is None or int(number[1]) < layers else 0
    return numbers


def _shallow(subject: Subject, policy: LocalPolicy, layers: int, stack: ExitStack) -> LocalPolicy:
    """The lane on the first layers of the base alone."""
    base = subject.base
    model = plain_copy(base, subject.lanes, layers, base.dtype, "sdpa")
    shallow = BaseModel(base.name, model, base.tokenizer, base.device, base.dtype, base.eos_ids, base.pad_id, "")
    stack.callback(shallow.release)
    learner = LocalPolicy(shallow, Lanes(shallow, subject.lanes.target_modules), policy.config, (0,), Workers())
    own = policy.adapter.tensors()
    learner.adapter.load({shape.name: own[shape.name] for shape in learner.adapter.shapes})
    return learner


def plain_copy(base: BaseModel, lanes: Lanes, layers: int, dtype: torch.dtype, attention: str = "eager") -> Any:
    """A model of the base's frozen weights, without lanes or anything else that is put on a base, with so many
    layers."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(base.model.config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    wrapped = {f"{shape.name}.base." for shape in lanes.shapes}
    with torch.random.fork_rng([base.device] if base.device.type == "cuda" else []), torch.device(base.device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.eval().requires_grad_(False)
    quantised = {
        f"{name}.weight": each.weight for name, each in base.model.named_modules() if isinstance(each, QuantizedLinear)
    }
    given = {}
    for name, weight in (*base.model.named_parameters(), *quantised.items()):
        inside = next((prefix for prefix in wrapped if name.startswith(prefix)), None)
        given[name if inside is None else inside.removesuffix("base.") + name[len(inside) :]] = weight
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(given[name])
    return model


def plain_gradient(model: Any, adapter: LoraWeights, samples: Sequence[Sample], dtype: torch.dtype) -> torch.Tensor:
    """Gradient of −Σ A·log π / tokens, that of every policy loss at ρ = 1, in the order of ``Adapter.flat``, by
    autograd alone."""
    device = next(model.parameters()).device
    leaves: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    hooks = []
    for shape in adapter.shapes:
        a, b = (store[shape.name].detach().to(dtype).requires_grad_() for store in (adapter.A, adapter.B))
        leaves[shape.name] = (a, b)
        hooks.append(model.get_submodule(shape.name).register_forward_hook(_added(a, b, adapter.scale)))
    tokens = sum(int(sample.action_mask.sum()) for sample in samples)
    flat = [leaf for pair in leaves.values() for leaf in pair]
    total = [torch.zeros_like(leaf) for leaf in flat]
    try:
        for sample in samples:
            ids = torch.from_numpy(sample.token_ids).to(device)[None]
            own = torch.from_numpy(sample.action_mask[1:]).to(device)
            logits_TV = model(input_ids=ids, use_cache=False).logits[0, :-1][own]
            logprobs_T = torch.log_softmax(logits_TV.to(dtype), -1).gather(1, ids[0, 1:][own][:, None])[:, 0]
            advantages_T = torch.from_numpy(sample.advantages[sample.action_mask]).to(device, dtype)
            loss = -(advantages_T * logprobs_T).sum() / tokens
            for sum_of, gradient in zip(total, torch.autograd.grad(loss, flat), strict=True):
                sum_of += gradient
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([gradient.flatten() for gradient in total])


def _added(a: torch.Tensor, b: torch.Tensor, scale: float) -> Callable[..., torch.Tensor]:
    def hook(module: Any, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        return out + scale * (given[0] @ a.t()) @ b.t()

    return hook
