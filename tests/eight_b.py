"""Two layers of an 8B model's shapes on a device without memory, what it is trained on, and one update of it."""

from __future__ import annotations

import dataclasses
from unittest import mock

import numpy as np
import torch

from retrain.policy.backbone import Backbone, _offer_checkpointing, checkpointed
from retrain.policy.base import BaseModel
from retrain.policy.budget import Budget
from retrain.policy.head import Head
from retrain.policy.logprobs import collate, token_logprobs
from retrain.policy.lora import Adapter, Lanes
from retrain.policy.objective import EntropyTerm, KLTerm, Objective, PolicyTerm, TokenScores
from retrain.policy.optimizer import new_optimizer
from retrain.policy.packing import NAME, register_attention
from retrain.policy.protocol import Denominators, TrainBatch
from retrain.policy.update import Passes, Work
from retrain.types import Sample

LAYERS, HIDDEN, VOCABULARY = 2, 4096, 151_936


def eight_b(device: str, dtype: torch.dtype = torch.bfloat16) -> BaseModel:
    """Qwen3-8B's shapes with two layers, as the update has it once it knows what the model allows."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=12288, vocab_size=VOCABULARY, tie_word_embeddings=False, max_position_embeddings=4096,
        attn_implementation="sdpa",
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.eval().requires_grad_(False)
    if device != "meta":
        for module in model.modules():  # fake tensors cannot be swapped for those of meta
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        held[name] = _kind(tensor)(torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    base = BaseModel("8b", model, None, torch.device(device), dtype, (1,), 0, "")
    register_attention()
    model.set_attn_implementation(NAME)
    base.backbone = Backbone(model.model, Head(model.lm_head.weight), True, 1 << 30, ())
    return base


def _kind(tensor):
    is_weight = isinstance(tensor, torch.nn.Parameter)
    return (lambda new: torch.nn.Parameter(new, requires_grad=False)) if is_weight else (lambda new: new)


def samples(count: int = 4, prompt: int = 6, action: int = 5) -> list[Sample]:
    numbers = np.random.default_rng(0)
    return [
        dataclasses.replace(
            Sample.single_turn(
                list(range(prompt)), list(numbers.integers(2, 99, action)), -np.ones(action), np.ones(action)
            ),
            advantages=np.concatenate([np.zeros(prompt), numbers.normal(size=action)]),
        )
        for i in range(count)
    ]


def update(base: BaseModel, lanes: Lanes, dropout: float, twice: bool) -> tuple[Adapter, torch.optim.Optimizer]:
    """Forward, KL to the base, entropy bonus, backward and AdamW, without the questions that only numbers answer."""
    _offer_checkpointing(base, base.model.model)
    adapter = lanes.new_adapter(8, 16.0)
    optimizer = new_optimizer([adapter.flat], 1e-4, (0.9, 0.95), 1e-8, 0.0)
    objective = Objective((PolicyTerm(), KLTerm(0.1), EntropyTerm(0.01)), temperature=0.9)
    passes = Passes(lanes, Budget(1024), dropout=dropout)
    work = Work(passes, TrainBatch([], Denominators(20, 4), 0, (1,)), adapter, objective)
    batch = collate(samples(), base, share=dropout == 0).to(base.device)
    with (
        # transformers asks the device whether positions count up, once per forward pass
        mock.patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None),
        mock.patch("retrain.maths.losses._require_finite"),
    ):
        with torch.no_grad():
            reference, _ = token_logprobs(base, batch, 0.9)
        layers = checkpointed(lambda: work._again(batch.layout)) if twice else torch.enable_grad()
        with lanes.single(adapter, dropout), layers:
            logprobs, entropy = token_logprobs(base, batch, 0.9, entropy=True)
            loss, _ = objective.loss(batch, TokenScores(logprobs, entropy, reference), work.batch.denominators)
            loss.backward()
    assert logprobs.shape == (4, 5)
    optimizer.step()
    return adapter, optimizer
