"""The costs that ``retrain explain`` tells, against the models themselves."""

from __future__ import annotations

import json

import pytest
from toymodels import TINY_RUN, qwen3_directory, train_quietly
from typer.testing import CliRunner

from retrain.campaign.planning.architecture import Architecture, architecture_of
from retrain.campaign.planning.costs import (
    PROCESS_BYTES,
    all_training_operations,
    assumptions,
    estimate_run,
    scorings,
    shared_memory,
    training_operations,
    work_of,
)
from retrain.campaign.planning.devices import Device, find_device, reference_gpu
from retrain.cli import app
from retrain.commands.costs import run_memory_words
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


# -- passes over a batch, and critics ---------------------------------------------------------------------------------

GAE = {"advantage_mode": "gae"}
KL_IN_REWARD = GAE | {"kl_coef": 0.05, "kl_in_reward": "k1"}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, 4),
        ({"training": {"num_iterations": 3}}, 2 + 3 * 4),  # scored once, before the first of three passes
        ({"training": {"minibatches": 4}}, 2 + 4),  # a pass is a pass, in however many parts
        ({"training": {"num_iterations": 3}, "logging": {"log_kl": True}}, 2 + 3 * (4 + 2)),
        ({"algorithm": GAE}, 2 + 4 + 4),  # values; the policy's lane, the critic's
        ({"algorithm": GAE, "critic": {"share_adapter": True}}, 2 + 4),
        ({"algorithm": KL_IN_REWARD}, 3 * 2 + 4 + 4),  # values, own and the base's log-probabilities
        ({"algorithm": GAE | {"kl_coef": 0.05}}, 3 * 2 + (4 + 2) + 4),  # the base's in the update as well
        ({"algorithm": KL_IN_REWARD, "training": {"num_iterations": 2}}, 3 * 2 + 2 * (4 + 4)),
        ({"algorithm": GAE, "training": {"num_iterations": 2}}, 2 * 2 + 2 * (4 + 4)),
    ],
)
def test_operations_of_a_step_are_those_of_the_passes_that_a_run_makes(sections, expected, tmp_path, monkeypatch):
    """By hand, and by counting the model's forward passes in a step, with gradients (4 operations) and without (2)."""
    from retrain.policy.backbone import Backbone
    from retrain.run import Run

    assert training_operations(parse_dict(sections)) == expected
    passes, hidden, credit, update = [], Backbone.hidden, Run.credit, Run.update

    def counted(self, layout):
        import torch

        passes[-1].append(4 if torch.is_grad_enabled() else 2)
        return hidden(self, layout)

    def begin(function):
        def begun(*given):
            passes.append([])
            return function(*given)

        return begun

    monkeypatch.setattr(Backbone, "hidden", counted)
    monkeypatch.setattr(Run, "credit", begin(credit))
    monkeypatch.setattr(Run, "update", begin(update))
    passes.append([])  # what is tried before the first step
    model = qwen3_directory(tmp_path / "toy", ["12+34=46", "7+5=12", "90-1=89"])
    asked = {"batch_size": 4, "max_tokens": 6} | sections.get("training", {})
    algorithm = {"entropy_coef": 1e-6} | sections.get("algorithm", {})  # every completion trains
    toml = TINY_RUN.replace("batch_size = 2\n", "").format(model=model)
    toml += "".join(f"{key} = {json.dumps(value)}\n" for key, value in asked.items())
    rest = {"algorithm": algorithm} | {key: sections[key] for key in ("critic", "logging") if key in sections}
    for section, keys in rest.items():
        toml += f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
    assert len(train_quietly(tmp_path, toml)) == 2
    scored, updated = passes[-2:]
    assert sum(scored) + sum(updated) / asked.get("minibatches", 1) == expected


def test_in_a_warm_up_the_critic_trains_alone():
    """10 steps, 3 of them of the critic alone: its own adapter costs both directions, a head on the policy's one."""
    training, warming = {"max_steps": 10, "num_iterations": 2}, {"warmup_steps": 3}
    own = parse_dict({"training": training, "algorithm": GAE, "critic": warming})
    assert training_operations(own, warming=True) == 2 * 2 + 2 * 4
    assert all_training_operations(own) == 3 * 12 + 7 * 20
    shared = parse_dict({"training": training, "algorithm": GAE, "critic": warming | {"share_adapter": True}})
    assert training_operations(shared, warming=True) == 2 * 2 + 2 * 2
    assert all_training_operations(shared) == 3 * 8 + 7 * 12
    assert "(in the first 3 steps 12)" in assumptions(own)[1]
    device, architecture = find_device("cpu", 1, 1e9), architecture_of("tiny-reasoner")
    assert architecture is not None
    plain = estimate_run(parse_dict({"training": {"max_steps": 10}}), architecture, device).seconds
    more = estimate_run(own, architecture, device).seconds - plain
    tokens = 8 * 8 * (12 + 256)
    assert more == pytest.approx((176 - 40) * tokens * architecture.active_parameters / (1e9 * 0.35))


def test_assumptions_name_every_pass():
    plain = "one forward, and one backward that makes no gradients of the base"
    assert assumptions(parse_dict({}))[1] == f"training a token costs 4 operations per active parameter: {plain}"
    asked = {"algorithm": KL_IN_REWARD, "training": {"num_iterations": 4, "target_kl": 0.1}}
    every, operations, _, kept = assumptions(parse_dict(asked))
    assert every.endswith("every pass made (target_kl ends them earlier)")
    assert operations == (
        "training a token costs 38 operations per active parameter: before the first update one forward each for the "
        "critic's values and the policy's own log-probabilities and the base's, then 4 times over "
        f"{plain}, and as many as these two for the critic"
    )
    assert kept.endswith("and so the critic, which is not published")
    assert scorings(parse_dict({})) == []


def test_a_critic_s_memory_is_its_own_adapter_s_and_its_head_s():
    """Qwen3-8B at rank 16 has 43,646,976 adapter weights: 22 bytes each for the policy, 16 for a critic, whose rank 8
    has half of them, and 4,097 weights of a head."""
    architecture = architecture_of("Qwen/Qwen3-8B")
    assert architecture is not None

    def estimate(**sections):
        model = {"model": "Qwen/Qwen3-8B", "lora_rank": 16}
        return estimate_run(parse_dict({"model": model, **sections}), architecture, reference_gpu())

    plain, same = estimate(), estimate(algorithm=GAE)
    half, shared = (estimate(algorithm=GAE, critic=keys) for keys in ({"lora_rank": 8}, {"share_adapter": True}))
    assert (plain.memory.adapter, plain.critic_parameters) == (43_646_976 * 22, 0)
    assert same.memory.adapter - plain.memory.adapter == 16 * (43_646_976 + 4_097)
    assert half.memory.adapter - plain.memory.adapter == 16 * (43_646_976 // 2 + 4_097)
    assert (shared.critic_parameters, shared.memory.adapter - plain.memory.adapter) == (4_097, 16 * 4_097)
    assert same.adapter_parameters == plain.adapter_parameters
    both = shared_memory([plain.memory, same.memory])
    assert both.least() == plain.memory.least() + same.memory.adapter


def test_a_critic_of_this_size_is_what_a_run_holds(tmp_path):
    """Its head and adapter as torch has them: fp32 weights, their gradients and AdamW's two moments."""
    from retrain.policy.base import load_base
    from retrain.policy.critic import Critic
    from retrain.policy.lora import Lanes

    model = str(qwen3_directory(tmp_path / "toy", ["12+34=46"]))
    config = parse_dict({"model": {"model": model, "lora_rank": 4}, "algorithm": GAE, "critic": {"lora_rank": 3}})
    base = load_base(model, devices="cpu")
    critic = Critic(base, Lanes(base), config, ("critic",))
    architecture = architecture_of(model)
    assert architecture is not None
    found = estimate_run(config, architecture, find_device("cpu"))
    assert found.critic_parameters == sum(weights.numel() for weights in critic.weights)
    critic.optimizer.step()
    held = [*critic.weights, *(weights.grad for weights in critic.weights)]
    held += [value for state in critic.optimizer.state.values() for value in state.values() if value.dim()]
    plain = estimate_run(parse_dict({"model": {"model": model, "lora_rank": 4}}), architecture, find_device("cpu"))
    assert found.memory.adapter - plain.memory.adapter == sum(each.numel() * each.element_size() for each in held)


# -- copies that decoding on a CPU reads ------------------------------------------------------------------------------


def cpu(memory: int) -> Device:
    return Device("cpu", "a machine", 1e11, 2e10, memory)


@pytest.mark.parametrize(
    ("dtype", "memory", "blocks", "head"),
    [
        ("float32", 64 << 30, 4, 4),
        ("bfloat16", 64 << 30, 2, 2),
        ("float64", 64 << 30, 8, 0),  # merged, never packed
        ("float32", 4 * 4 * 596_049_920, 4, 4),  # a quarter of the memory
        ("float32", 4 * 4 * 596_049_920 - 4, 0, 0),
    ],
)
def test_copies_of_a_larger_model(dtype, memory, blocks, head):
    """Qwen3-0.6B: 28 layers of 1024 × 128 × (2·16 + 2·8) and 3 × 1024 × 3072 numbers, an output layer of 1024 ×
    151,936, 596,049,920 in all."""
    architecture = architecture_of("Qwen/Qwen3-0.6B")
    assert architecture is not None
    found = estimate_run(parse_dict({"inference": {"dtype": dtype}}), architecture, cpu(memory)).memory
    linear = 28 * (1024 * 128 * (2 * 16 + 2 * 8) + 3 * 1024 * 3072)
    assert (found.block_copy, found.head_copy) == (blocks * linear, head * 1024 * 151_936)
    assert found.base == {"float32": 4, "bfloat16": 2, "float64": 8}[dtype] * 596_049_920
    assert found.process == PROCESS_BYTES["cpu"]
    fixed = found.process + found.base + found.head_copy + 3 * found.adapter
    assert found.peak(3) == fixed + max(found.training, found.block_copy + 3 * found.sampling)
    on_gpu = estimate_run(parse_dict({}), architecture, reference_gpu()).memory
    assert (on_gpu.block_copy, on_gpu.head_copy, on_gpu.process) == (0, 0, 0)


def test_servers_decode_in_memory_of_their_own():
    architecture = architecture_of("Qwen/Qwen3-0.6B")
    assert architecture is not None
    config = parse_dict({"inference": {"engine": "vllm", "url": "http://a"}})
    served = estimate_run(config, architecture, cpu(64 << 30))
    here = estimate_run(parse_dict({}), architecture, cpu(64 << 30)).memory
    assert (served.memory.sampling, served.memory.block_copy) == (0, 0)
    assert (served.memory.base, served.memory.training) == (here.base, here.training)
    assert served.memory.peak(2) < here.peak(2)
    assert "decode" not in run_memory_words(served)
    assert "servers, which are not asked" in assumptions(config)[-1]


def test_the_copies_are_those_that_decoding_makes(tmp_path):
    """The bundled model, merged with one adapter: the bytes of the weights that its blocks then read."""
    from retrain.engines.dense import dense_decoder
    from retrain.policy.base import load_base
    from retrain.policy.lora import Lanes

    base = load_base("tiny-reasoner", devices="cpu")
    lanes = Lanes(base)
    decoder = dense_decoder(base)
    assert decoder is not None
    blocks = decoder.blocks([lanes.new_adapter(4, 8.0).initialise("one").frozen()])
    own = {weight.untyped_storage().data_ptr() for weight in base.model.parameters()}
    read = [product.weight for block in blocks for product in (block.qkv, block.out, block.gate_up, block.down)]
    copied = sum(weight.numel() * 4 for weight in read if weight.untyped_storage().data_ptr() not in own)
    architecture = architecture_of("tiny-reasoner")
    assert architecture is not None
    found = estimate_run(parse_dict({}), architecture, find_device("cpu")).memory
    assert (found.block_copy, found.head_copy) == (copied, 0)
    in_half = parse_dict({"inference": {"dtype": "bfloat16"}})
    assert estimate_run(in_half, architecture, find_device("cpu")).memory.block_copy == 0


def test_explain_tells_the_kinds_of_a_campaign_apart(tmp_path):
    file = tmp_path / "two.toml"
    file.write_text(
        """
[campaign]
seeds = [1, 2]
[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"
[[campaign.conditions]]
advantage_mode = "gae"
transform_mode = "none"
[training]
max_steps = 4
[model]
lora_rank = 16
[backend]
devices = "cpu"
"""
    )
    result = CliRunner().invoke(app, ["explain", str(file)])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()

    def said(name: str) -> list[str]:
        return [line for line in lines if line.startswith(f"{name:<14}")]

    models, memories, assumed = said("model"), said("memory"), said("assuming")
    assert [line.endswith("(grpo+none)") for line in models] == [True, False]
    assert models[1].endswith("116,736 trained in the adapter (rank 16), 116,865 in the critic  (gae+none)")
    assert ["critic and optimizers" in line for line in memories] == [False, True]
    assert ["costs 4 operations" in assumed[0], "costs 10 operations" in assumed[1]] == [True, True]
    assert len(said("critic")) == 1
    assert said("critic")[0].endswith("(gae+none)")
    architecture = architecture_of("tiny-reasoner")
    assert architecture is not None
    runs = [{"model": {"lora_rank": 16}, "algorithm": {"advantage_mode": mode}} for mode in ("grpo", "gae") * 2]
    four = shared_memory([estimate_run(parse_dict(run), architecture, find_device("cpu")).memory for run in runs])
    assert f"{size(four.least())} to {size(four.peak())} for 4 of them" in said("lanes")[0]
