"""Two layers of an 8B model's shapes sample and train on an accelerator that does not exist.

Fake tensors have shapes, types and devices but no numbers: an operation that meets a tensor left on the CPU raises. The
device cannot be unregistered, so the test runs this file as a script.
"""

import subprocess
import sys
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from retrain.engines import dense
from retrain.engines.dense import DenseDecoder, KVCache
from retrain.engines.step import Rows, Sampled, decode_steps
from retrain.policy.backbone import Backbone, _offer_checkpointing, checkpointed
from retrain.policy.base import BaseModel
from retrain.policy.budget import Budget
from retrain.policy.head import Head
from retrain.policy.logprobs import collate, token_logprobs
from retrain.policy.lora import Lanes
from retrain.policy.objective import EntropyTerm, KLTerm, Objective, PolicyTerm, TokenScores
from retrain.policy.optimizer import new_optimizer
from retrain.policy.packing import NAME, register_attention
from retrain.policy.protocol import Denominators, TrainBatch
from retrain.policy.update import Passes, Work
from retrain.types import Sample

VOCABULARY = 151_936
BF16 = torch.bfloat16


def test_sampling_and_update_stay_on_a_device_that_is_not_there():
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


class Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [BF16]


def eight_b(device: torch.device) -> BaseModel:
    """Return Qwen3-8B's shapes with two layers, with the backbone that the update's probes would find."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        hidden_size=4096, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=12288, vocab_size=VOCABULARY, tie_word_embeddings=False, max_position_embeddings=4096,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=BF16, attn_implementation="sdpa").eval()
    for module in model.modules():  # fake tensors cannot be swapped for those of meta
        for name, tensor in module._parameters.items():
            if tensor is not None:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                module._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)
        for name, tensor in module._buffers.items():
            module._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    base = BaseModel("8b", model, None, device, BF16, (1,), 0, "")
    register_attention()
    model.set_attn_implementation(NAME)
    base.backbone = Backbone(model.model, Head(model.lm_head.weight), True, 1 << 30, ())
    _offer_checkpointing(base, model.model)
    return base


def decode(device: torch.device) -> None:
    """Prefill, two decode steps of two lanes, compaction."""
    base = eight_b(device)
    lanes = Lanes(base)
    with mock.patch.object(dense, "_fused", lambda base, weights: torch.cat(list(weights))):  # fakes have no views
        decoder = DenseDecoder(base)
    blocks = decoder.blocks([lanes.new_adapter(8, 16.0).frozen() for _ in range(2)])
    rows, width, capacity = 4, 7, 128
    last = torch.full((rows,), width - 1, device=device)
    cache, places = KVCache(decoder, rows, capacity), torch.arange(rows, device=device)
    prompts = torch.zeros(rows, width, dtype=torch.long, device=device)
    logits = decoder.prefill(prompts, last, blocks, cache, places, places)
    assert (logits.shape, logits.device) == ((rows, VOCABULARY), device)
    numbers = [torch.zeros(rows, dtype=torch.long, device=device) for _ in range(5)]
    batch = Rows(numbers[0], last + 1, numbers[1], numbers[2].bool(), numbers[3], numbers[4], None, None, None)
    sampled = Sampled(
        ends=torch.ones(1, dtype=torch.long, device=device),
        uniforms_NT=torch.zeros(rows + 1, 9, dtype=torch.float64, device=device),
        tokens_NT=torch.zeros(rows + 1, 9, dtype=torch.long, device=device),
        logprobs_NT=torch.zeros(rows + 1, 9, device=device),
        entropy_NT=torch.zeros(rows + 1, 9, device=device),
        kept=None,
    )
    frame = decoder.turned(capacity)
    for in_any_order in (False, True):
        decode_steps(frame, blocks, batch, sampled, cache.keys, cache.values, 128, True, 1, in_any_order)
    cache.select(torch.zeros(2, dtype=torch.long, device=device))
    assert {tensor.device for tensor in (*cache.keys, *cache.values, *batch[:6], *sampled[:5])} == {device}


def update(device: torch.device, dropout: float, twice: bool) -> None:
    """Forward pass, KL to the base, entropy bonus, backward pass and AdamW, without the checks that read numbers."""
    base = eight_b(device)
    lanes = Lanes(base)
    adapter = lanes.new_adapter(8, 16.0)
    optimizer = new_optimizer([adapter.flat], 1e-4, (0.9, 0.95), 1e-8, 0.0)
    objective = Objective((PolicyTerm(), KLTerm(0.1), EntropyTerm(0.01)), temperature=0.9)
    passes = Passes(lanes, Budget(1024), dropout=dropout)
    work = Work(passes, TrainBatch([], Denominators(20, 4), 0, (1,)), adapter, objective)
    samples = [Sample.single_turn(list(range(6)), [2, 3, 5, 7, n], -np.ones(5), np.ones(5)) for n in range(4)]
    batch = collate(samples, base, share=dropout == 0).to(device)
    with (
        # transformers reads from the device whether positions count up, once per forward pass
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
    optimizer.step()
    assert adapter.flat.grad is not None
    moments = [moment for moment in optimizer.state[adapter.flat].values() if moment.dim()]
    assert {tensor.device for tensor in (adapter.flat.grad, *moments)} == {device}


def main() -> None:
    _setup_privateuseone_for_python_backend("fakegpu", Module())
    device = torch.device("fakegpu:0")
    with FakeTensorMode():
        try:
            torch.ones(2, device=device) + torch.ones(2)
        except RuntimeError:
            pass
        else:
            raise AssertionError("an operation on tensors of two devices did not raise")
        with torch.no_grad():
            decode(device)
        for dropout in (0.0, 0.1):
            for twice in (False, True):
                update(device, dropout, twice)


if __name__ == "__main__":
    main()
