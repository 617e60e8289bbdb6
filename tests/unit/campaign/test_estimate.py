import json

import pytest
import torch
from helpers.models import qwen3_directory
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from retrain.config import parse_dict
from retrain.engines.local import dense_decoder
from retrain.engines.step import CPU_DECODING
from retrain.models.layers import Architecture, architecture_of
from retrain.policy.base import load_base
from retrain.policy.critic import Critic
from retrain.policy.lora import Lanes
from retrain.training.estimate import Device, run_memory, trained_parameters

CPU = Device("cpu", 64 << 30)


def of(model: str) -> Architecture:
    architecture = architecture_of(model)
    assert architecture is not None
    return architecture


SMALL = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@pytest.mark.parametrize(("kind", "extra"), [
    ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    ("llama", {"tie_word_embeddings": False}),
    ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}),
])  # fmt: skip
def test_parameter_counts_are_those_of_the_model(kind, extra):
    config = AutoConfig.for_model(kind, **SMALL, **extra)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    architecture = Architecture.from_config(config.to_dict())
    assert architecture.parameters() == sum(parameter.numel() for parameter in model.parameters())


def test_adapter_counts_are_peft_s(tmp_path):
    config = AutoConfig.for_model("llama", **SMALL)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    architecture = of(str(tmp_path))
    for target in ("all-linear", ["q_proj", "down_proj"], ["model.layers.1.mlp.up_proj", "0.self_attn.o_proj"]):
        lora = LoraConfig(r=5, target_modules=target, task_type="CAUSAL_LM")
        model = get_peft_model(AutoModelForCausalLM.from_config(config), lora)
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        assert architecture.adapter_parameters(5, target) == trained


def test_a_critic_of_this_size_is_what_a_run_holds(tmp_path):
    """Its head and adapter as torch has them: fp32 weights, their gradients and AdamW's two moments."""
    model = str(qwen3_directory(tmp_path / "toy", ["12+34=46"]))
    plain = {"model": {"model": model, "lora_rank": 4}}
    config = parse_dict(plain | {"algorithm": {"advantage_mode": "gae"}, "critic": {"lora_rank": 3}})
    base, architecture = load_base(model, devices="cpu"), of(model)
    critic = Critic(base, Lanes(base), config, ("critic",))
    assert trained_parameters(config, architecture)[1] == sum(weights.numel() for weights in critic.weights)
    critic.optimizer.step()
    held = [*critic.weights, *(weights.grad for weights in critic.weights)]
    held += [value for state in critic.optimizer.state.values() for value in state.values() if value.dim()]
    adapters = [run_memory(each, architecture, CPU).adapter for each in (config, parse_dict(plain))]
    assert adapters[0] - adapters[1] == sum(each.numel() * each.element_size() for each in held)


def test_the_copies_are_those_that_decoding_makes():
    """The bundled model, merged with one adapter: the bytes of the weights that its blocks then read."""
    base = load_base("tiny-reasoner", devices="cpu")
    lanes = Lanes(base)
    blocks = dense_decoder(base, CPU_DECODING).blocks([lanes.new_adapter(4, 8.0).initialise("one").frozen()])
    own = {weight.untyped_storage().data_ptr() for weight in base.model.parameters()}
    read = [product.weight for block in blocks for product in (block.qkv, block.out, block.gate_up, block.down)]
    copied = sum(weight.numel() * 4 for weight in read if weight.untyped_storage().data_ptr() not in own)
    found = run_memory(parse_dict({}), of("tiny-reasoner"), CPU)
    assert (found.block_copy, found.head_copy) == (copied, 0)
