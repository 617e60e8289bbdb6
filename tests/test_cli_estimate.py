"""The costs that ``retrain explain`` tells, against the models themselves."""

from __future__ import annotations

import json

import pytest

from retrain.campaign.planning.costs import (
    Architecture,
    architecture_of,
    estimate_run,
    find_device,
    work_of,
)
from retrain.commands.output import count, duration, size
from retrain.config import parse_dict
from retrain.models import find_file

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False}),
        ("mistral", {"head_dim": 16, "tie_word_embeddings": False}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}),
    ],
)
def test_parameter_counts_are_those_of_the_model(kind, extra):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **SMALL, **extra)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    architecture = Architecture.from_config(config.to_dict())
    assert architecture is not None
    assert architecture.parameters() == sum(parameter.numel() for parameter in model.parameters())


def test_adapter_counts_are_peft_s(tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("llama", **SMALL)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    architecture = architecture_of(str(tmp_path))
    assert architecture is not None
    for target in ("all-linear", ["q_proj", "down_proj"], ["model.layers.1.mlp.up_proj", "0.self_attn.o_proj"]):
        lora = LoraConfig(r=5, target_modules=target, task_type="CAUSAL_LM")
        model = get_peft_model(AutoModelForCausalLM.from_config(config), lora)
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        assert architecture.adapter_parameters(5, target) == trained


def test_the_bundled_model_s_config_is_found_and_a_foreign_one_is_not_looked_for_on_the_hub():
    path = find_file("tiny-reasoner", "config.json")
    assert path is not None
    assert path.name == "config.json"
    assert find_file("nobody/no-such-model", "config.json") is None
    assert Architecture.from_config({"model_type": "bert"}) is None


def test_the_shipped_gpu_campaign_is_explained_without_a_hub():
    """Qwen3-8B has 8,190,735,360 parameters, Qwen3-0.6B 596,049,920 (their model cards: 8.2 B and 0.6 B)."""
    for name, parameters in (("Qwen/Qwen3-8B", 8_190_735_360), ("Qwen/Qwen3-0.6B-Base", 596_049_920)):
        architecture = architecture_of(name)
        assert architecture is not None
        assert architecture.parameters() == parameters
    assert architecture_of("Qwen/Qwen9-1B") is None


def test_estimate_counts_and_grows_with_the_work():
    device = find_device("cpu")
    architecture = architecture_of("tiny-reasoner")

    def estimate(**training):
        base = {"max_steps": 10, "batch_size": 4, "group_size": 8, "max_tokens": 50}
        config = parse_dict({"training": base | training, "evaluation": {"problems": 16}})
        return work_of(config), estimate_run(config, architecture, device)

    work, one = estimate()
    assert (work.completions, work.tokens) == (320, 50)
    assert work.evaluation_completions == 2 * 16
    longer, wider = estimate(max_steps=20)[1], estimate(batch_size=64)[1]
    assert longer.seconds > 1.8 * one.seconds
    assert wider.memory.sampling == 16 * one.memory.sampling


@pytest.mark.parametrize(
    ("max_steps", "every", "at_start", "expected"),
    [(10, 0, True, 2), (10, 5, True, 3), (10, 3, False, 4), (1, 1, True, 2)],
)
def test_number_of_evaluations(max_steps, every, at_start, expected):
    training, evaluation = {"max_steps": max_steps, "eval_every": every}, {"at_start": at_start}
    work = work_of(parse_dict({"training": training, "evaluation": evaluation}))
    assert work.at_start + work.evaluations == expected


def test_peaks_from_the_configuration_win():
    device = find_device("cpu", peak_gflops=5, peak_bandwidth_gb_s=7)
    assert (device.flops, device.bandwidth) == (5e9, 7e9)


def test_numbers_for_people():
    assert [count(n) for n in (999_999, 1_234_567, 8.19e9)] == ["999,999", "1.23 M", "8.19 B"]
    assert [size(n) for n in (2**10, 1.5 * 2**30)] == ["1 KiB", "1.5 GiB"]
    assert [duration(s) for s in (40, 600, 7200, 30 * 86400)] == ["40 s", "10 min", "2.0 h", "30 days"]
