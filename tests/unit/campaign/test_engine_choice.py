"""`engine = "auto"` and `launch = "auto"`: which engine is chosen on which machine, and the command of vLLM."""

import itertools
import shlex
import sys
from functools import partial

import pytest
from helpers.campaigns import Heard
from helpers.models import TINY_RUN, qwen3_directory

from retrain.campaign.controller import launch
from retrain.campaign.planning.engine import with_engine
from retrain.campaign.planning.manifest import read_plan, write_plan
from retrain.campaign.planning.plan import Plan, lane_count
from retrain.config import load, parse_dict
from retrain.device import Gpu
from retrain.engines.server.automatic import (
    GIB,
    Machine,
    MemoryNeeds,
    NoVllm,
    adapter_slots,
    cards_needed,
    command,
    divide,
    machine_of,
    version_note,
    visible_memory,
    vllm_version,
)
from retrain.errors import ConfigError, UsageError
from retrain.models.layers import Architecture, adapter_bytes, model_config

MODEL = '[model]\nmodel = "Qwen/Qwen3-4B"\nlora_rank = 32\n[training]\nmax_tokens = 256\nmax_steps = 2\n'


def plan_of(folder, text=MODEL, **sets) -> Plan:
    file = folder / "c.toml"
    file.write_text(text)
    return Plan.of(load(file, [f"{key}={value}" for key, value in sets.items()]), folder / "out")


def machine(*cards: float, vllm: str = "0.32.0", host: float = 256) -> Machine:
    return Machine({str(index): int(card * GIB) for index, card in enumerate(cards)}, int(host * GIB), vllm)


def sizes_of(name: str, lanes: int) -> MemoryNeeds:
    """A cohort at rank 32, with sequences of 1,280 tokens."""
    architecture = Architecture.from_config(model_config(f"Qwen/Qwen3-{name}"))
    adapter = architecture.adapter_parameters(32, "all-linear")
    return MemoryNeeds(
        2 * architecture.parameters(),
        lanes * adapter_bytes(adapter, 2, 1),
        lanes * 2 * adapter,
        architecture.cache_bytes(2),
        architecture.kept_bytes(2),
        1280,
        512,
    )


@pytest.mark.parametrize(
    ("name", "card", "lanes", "sleep", "rows"),
    [
        ("1.7B", 24, 1, "kv", 82), ("1.7B", 24, 5, "kv", 60), ("4B", 24, 1, "weights", 11), ("4B", 24, 5, None, 0),
        ("8B", 24, 1, None, 0), ("8B", 40, 1, None, 6), ("8B", 48, 1, "weights", 49), ("8B", 48, 5, None, 5),
        ("8B", 80, 1, "kv", 221), ("8B", 80, 5, "kv", 176), ("14B", 80, 1, "weights", 68), ("32B", 141, 1, None, 0),
    ],
)  # fmt: skip
def test_a_card_is_divided_as_in_the_table(name, card, lanes, sleep, rows):
    """Expected rows are of the specification, which counts a card by its vendor's decimal gigabytes and rounds."""
    total, sizes = int(0.985 * card * GIB), sizes_of(name, lanes)
    if sleep is None:
        with pytest.raises(NoVllm):
            divide(total, 256 * GIB, sizes)
        return
    division = divide(total, 256 * GIB, sizes)
    assert division.sleep == sleep
    assert division.rows == pytest.approx(rows, abs=3 + 0.08 * rows)
    assert division.kv_bytes == division.rows * sizes.cache * sizes.tokens
    assert sizes.base + sizes.lanes + division.share * total <= 0.951 * total


def test_weights_sleep_only_where_the_machine_has_room():
    sizes = sizes_of("8B", 1)
    assert divide(48 * GIB, 64 * GIB, sizes).sleep == "weights"
    with pytest.raises(NoVllm, match=r"an update of 2 sequences of 1,280 tokens takes"):
        divide(48 * GIB, 16 * GIB, sizes)
    assert divide(80 * GIB, 64 * GIB, sizes, "weights").sleep == "weights"
    with pytest.raises(NoVllm):
        divide(48 * GIB, 64 * GIB, sizes, "kv")


def test_a_base_is_spread_over_the_cards_it_needs():
    assert [cards_needed(80 * GIB, base * GIB, 7) for base in (16, 40, 60, 130)] == [1, 1, 2, 4]
    with pytest.raises(NoVllm, match=r"takes 200\.0 GiB, and vLLM would have 3 × 80 GiB"):
        cards_needed(80 * GIB, 200 * GIB, 3)


OWN = "Sampling with retrain's own engine: "


@pytest.mark.parametrize(
    ("cards", "sets", "engine", "note"),
    [
        ((), {}, "local", None),
        ((80,), {}, "vllm", "Sampling with vLLM 0.32.0 on gpu:0 beside the trainer: KV cache 3.4 GiB (64 sequences of "
         "384 tokens); its KV cache is released during updates"),
        ((80, 24), {}, "vllm", "Sampling with vLLM 0.32.0 on GPU 1 of its own"),
        ((80, 24, 24), {}, "vllm", "Sampling with vLLM 0.32.0 on GPU 1 of its own; GPU 2 idle ([inference] replicas "
         "and launch_gpus use them)"),
        ((80, 24), {"backend.devices": "gpu:1"}, "vllm", "Sampling with vLLM 0.32.0 on GPU 0 of its own"),
        ((80,), {"training.top_p": 0.9}, "local", OWN + "[training] top_p is 0.9, but a server does not say which "
         "tokens were left to sample from, and without that importance ratios would be wrong"),
        ((80,), {"model.quantize": "nf4"}, "local", OWN + '[model] quantize is "nf4", and a server samples with a base '
         "of its own: other weights than those that are trained"),
        ((80,), {"inference.dtype": "float64"}, "local", OWN + '[inference] dtype is "float64", which vLLM does not '
         "compute in"),
        ((80,), {"vllm": ""}, "local", OWN + "vLLM is not installed (pip install '.[vllm]')"),
        ((80,), {"vllm": "", "inference.python": "/nowhere/python"}, "local", OWN + "vLLM is not installed for "
         "[inference] python = '/nowhere/python' (/nowhere/python -m pip install vllm)"),
        ((8,), {}, "local", OWN + "0 sequences of 384 tokens would fit beside two copies of the model on a GPU of 8 "
         "GiB (each 7.5 GiB; trained adapters 1.6 GiB), fewer than 8"),
        ((80,), {"model.model": "tiny-reasoner"}, "local", OWN + "tiny-reasoner has 641,344 parameters, and below 2 "
         "B this engine is faster than vLLM"),
        ((80,), {"inference.engine": "local"}, "local", None),
        ((80,), {"vllm": "0.35.1"}, "vllm", "Sampling with vLLM 0.35.1 on gpu:0 beside the trainer: KV cache 3.4 GiB "
         "(64 sequences of 384 tokens); its KV cache is released during updates. Careful: vLLM 0.35.1 was not tried "
         "with this retrain: versions from 0.31 to before 0.34 were"),
        ((80,), {"model.model": "someone/unknown"}, "local", OWN + "the config.json of someone/unknown could not be "
         "read, so that its size is not known"),
    ],
)  # fmt: skip
def test_each_rule_chooses_and_says_why(cards, sets, engine, note, tmp_path):
    vllm = sets.pop("vllm", "0.32.0") if "vllm" in (sets := dict(sets)) else "0.32.0"
    plan = with_engine(plan_of(tmp_path, **sets), machine(*cards, vllm=vllm))
    assert plan.specs[0].config.inference.engine == engine
    assert plan.notes == (() if note is None else (note,))
    recorded = plan.source.config.inference
    assert (recorded.engine, recorded.launch) == (engine, plan.specs[0].config.inference.launch)


def test_a_condition_that_no_server_can_sample_decides_for_all(tmp_path):
    text = (
        MODEL + '[campaign]\nseeds = [1]\n[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "none"\n'
    )
    text += '[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "gtpo"\nuncertainty_kind = "shannon_'
    text += 'entropy"\n'
    plan = with_engine(plan_of(tmp_path, text), machine(80))
    assert {spec.config.inference.engine for spec in plan.specs} == {"local"}
    assert "uncertainty_kind" in plan.notes[0]


def test_a_typed_engine_is_an_error_where_it_cannot_start(tmp_path):
    for cards, reason in (((), "this machine shows no GPU"), ((8,), "0 sequences of 384 tokens would fit")):
        with pytest.raises(UsageError, match=f'engine = "vllm" cannot start vLLM here: {reason}'):
            with_engine(plan_of(tmp_path, **{"inference.engine": "vllm"}), machine(*cards))


def test_an_address_or_a_command_means_vllm(tmp_path):
    for sets in ({"inference.url": "http://h:1"}, {"inference.launch": "vllm serve {model}"}):
        config = with_engine(plan_of(tmp_path, **sets), machine()).specs[0].config.inference
        assert (config.engine, config.sleep, config.released) == ("vllm", False, "")
    config = plan_of(tmp_path, **{"inference.url": "http://h:1", "inference.sleep": "true"}).specs[0].config.inference
    assert config.released == "weights"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('engine = "openai"\nlaunch = "auto"', 'is "auto", which starts vLLM, and engine is "openai"'),
        ('launch = "vllm serve {model}"\npython = "p"', 'has no effect without launch = "auto"'),
        ('launch = "vllm serve {model}"\nlaunch_options = "-v"', 'has no effect without launch = "auto"'),
        ('engine = "sglang"', "neither url nor launch gives its server"),
    ],
)
def test_settings_that_contradict_each_other(text, message, tmp_path):
    with pytest.raises(ConfigError) as error:
        plan_of(tmp_path, f"{MODEL}[inference]\n{text}\n")
    assert message in str(error.value)


def test_the_command_names_everything_that_numbers_depend_on(tmp_path):
    plan = with_engine(
        plan_of(
            tmp_path,
            **{"inference.launch_options": "--max-loras 2", "inference.python": "/v/python", "training.seed": 3},
        ),
        machine(80),
    )
    config = plan.specs[0].config.inference
    words = shlex.split(config.launch)
    options = dict(itertools.pairwise(words))
    assert words[:4] == ["env", "HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1"]
    assert words[4:9] == ["/v/python", "-m", "vllm.entrypoints.cli.main", "serve", "{model}"]
    assert options.items() >= {
        "--dtype": "bfloat16", "--max-num-seqs": "256", "--max-lora-rank": "32",
        "--logprobs-mode": "processed_logprobs", "--generation-config": "vllm", "--max-loras": "2",
        "--hf-overrides": '{"head_dtype": "float32"}', "--max-model-len": "auto",
    }.items()  # fmt: skip
    assert options["--max-cpu-loras"] == "4"  # one lane's newest version and the one before, and two more
    assert (config.sleep, config.released) == ("kv", "kv")
    assert int(options["--kv-cache-memory-bytes"]) == 64 * 384 * 2 * 36 * 8 * 128 * 2
    assert (config.launch_options, config.python) == (None, None)  # they are in the command now
    plan.directory.mkdir()
    write_plan(plan)
    assert read_plan(plan.directory).specs[0].config == plan.specs[0].config


def test_other_commands(tmp_path):
    config = plan_of(tmp_path, **{"training.deterministic": "true", "inference.dtype": "float32"}).specs[0].config
    line = command(config, 16, 40, 2, None, 2)
    assert "VLLM_BATCH_INVARIANT=1" in line
    assert "--dtype float32" in line
    assert "head_dtype" not in line
    assert "--max-loras 16 --max-lora-rank 16 --max-cpu-loras 82 " in line
    assert line.endswith("--tensor-parallel-size 2")
    assert sys.executable in line


def test_the_versions_that_were_tried():
    assert [bool(version_note(version)) for version in ("0.30.1", "0.31.0", "0.33.2", "0.34.0", "1.0", "?")] == [
        True, False, False, True, True, True,
    ]  # fmt: skip


def test_what_this_machine_offers(tmp_path, monkeypatch):
    listed = [Gpu("A", "24564 MiB", "580"), Gpu("B", "81559 MiB", "580"), Gpu("C", "[N/A]", "580")]
    for given, visible in (
        ("", {"0": 24564 << 20, "1": 81559 << 20}),
        ("1", {"1": 81559 << 20}),
        ("GPU-6ba7, GPU-81a2", {"GPU-6ba7": 24564 << 20, "GPU-81a2": 81559 << 20}),
        ("7", {}),
        ("MIG-1234,MIG-5678", {}),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert visible_memory(listed) == visible
    assert machine_of(plan_of(tmp_path, **{"backend.devices": "cpu"}).specs[0].config).gpus == {}
    assert vllm_version(sys.executable) == vllm_version("/nowhere/python") == ""


def test_a_vllm_that_does_not_start_leaves_the_own_engine(tmp_path):
    """The records of the first plan are removed, and the second trains in the same directory."""
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'RuntimeError: no kernel'\necho bye\nexit 1\n")
    broken.chmod(0o755)
    model = qwen3_directory(tmp_path / "model", ["1 + 2 = 3"])
    text = TINY_RUN.format(model=model) + f'max_tokens = 4\n[inference]\npython = "{broken}"\n'
    text += "[evaluation]\nproblems = 0\n[squeeze]\nenabled = false\n"
    (tmp_path / "c.toml").write_text(text)
    heard, choose = Heard(), partial(with_engine, machine=machine(24), smallest=0)
    outcome = launch(load(tmp_path / "c.toml"), tmp_path / "out", heard, choose=choose)
    assert outcome.exit_status == 0
    assert f"{OWN}vLLM did not start (RuntimeError: no kernel)" in heard.messages
    plan = read_plan(tmp_path / "out")
    assert plan.specs[0].config.inference.engine == "local"
    assert (tmp_path / "out/server.log").read_text().count("no kernel") == 1


def test_a_begun_run_keeps_its_engine(tmp_path):
    """Whatever this machine offers at the next start; a directory whose runs have not begun is planned anew."""
    model = qwen3_directory(tmp_path / "model", ["1 + 2 = 3"])
    text = TINY_RUN.format(model=model) + "max_tokens = 4\n[evaluation]\nproblems = 0\n[squeeze]\nenabled = false\n"
    (tmp_path / "c.toml").write_text(text)
    offered = partial(with_engine, machine=machine(80), smallest=0)
    assert offered(Plan.of(load(tmp_path / "c.toml"), tmp_path / "out")).specs[0].config.inference.engine == "vllm"
    assert launch(load(tmp_path / "c.toml"), tmp_path / "out", Heard()).exit_status == 0
    longer = load(tmp_path / "c.toml", ["training.max_steps=3"])
    assert launch(longer, tmp_path / "out", Heard(), choose=offered).exit_status == 0
    assert read_plan(tmp_path / "out").specs[0].config.inference.engine == "local"
    for sets, engine in ((["inference.engine=auto"], "local"), (["inference.engine=vllm"], "vllm")):
        assert offered(read_plan(tmp_path / "out", sets)).specs[0].config.inference.engine == engine
    with pytest.raises(UsageError, match=r"inference\.engine: local → vllm"):
        launch(
            load(tmp_path / "c.toml", ["training.max_steps=4", "inference.engine=vllm"]),
            tmp_path / "out",
            Heard(),
            choose=offered,
        )


@pytest.mark.parametrize(
    ("cards", "sets", "gpus", "tensor_parallel"),
    [
        (4, {"inference.replicas": 3}, "1,2,3", False),
        (4, {"inference.launch_gpus": "2,3", "inference.replicas": 2}, "2,3", False),
        (4, {"inference.launch_gpus": "2,3"}, "2,3", True),
        (2, {"inference.sleep": "kv"}, "1", False),
    ],
)
def test_typed_gpus_and_replicas_stay(cards, sets, gpus, tensor_parallel, tmp_path):
    config = with_engine(plan_of(tmp_path, **sets), machine(*[80] * cards)).specs[0].config.inference
    assert (config.engine, config.launch_gpus, config.released) == ("vllm", gpus, "")
    assert ("--tensor-parallel-size 2" in config.launch) == tensor_parallel


@pytest.mark.parametrize(
    ("cards", "sets", "reason"),
    [
        (1, {"inference.replicas": 2}, "[inference] replicas is 2, and there is one GPU"),
        (2, {"inference.replicas": 2}, "[inference] replicas = 2 takes 2 GPUs, and 1 are left"),
        (2, {"inference.launch_gpus": "0,1"}, "[inference] launch_gpus has 0, which is the trainer's GPU"),
        (1, {"inference.launch_gpus": "0"}, "[inference] launch_gpus has 0, which is the trainer's GPU"),
        (1, {"model.lora_rank": 600}, "servers take adapters of rank 512 at most, and this one has rank 600"),
        (1, {"distillation.weight": 0.5, "distillation.teacher": "Qwen/Qwen3-8B"},
         "[distillation] teacher takes memory that vLLM would need"),
        (2, {"campaign.executor": "ray"}, '[inference] launch is "auto", which starts vLLM on GPUs of this machine, '
         'and executor = "ray" trains on others'),
        (2, {"campaign.executor": "slurm", "campaign.workers": 2}, "[inference] launch starts servers where retrain "
         'was started, and with executor = "slurm" that is no node with a GPU'),
        (2, {"campaign.executor": "processes", "inference.launch_gpus": "1"}, '[inference] launch is "auto", which '
         "starts a vLLM on the GPU of every worker, and launch_gpus names GPUs for all of them"),
        (2, {"campaign.executor": "processes", "campaign.gpus_per_cohort": 0.5}, "[campaign] gpus_per_cohort is 0.5, "
         "and a server that a worker starts beside itself needs one whole GPU"),
    ],
)  # fmt: skip
def test_what_leaves_no_room_for_vllm(cards, sets, reason, tmp_path):
    text = MODEL + ("[campaign]\nseeds = [1]\n" if "campaign.executor" in sets else "")
    plan = with_engine(plan_of(tmp_path, text, **sets), machine(*[80] * cards))
    assert plan.specs[0].config.inference.engine == "local"
    assert plan.notes == (OWN + reason,)


def test_a_gpu_that_is_not_there_is_named(tmp_path):
    for sets in ({}, {"inference.engine": "vllm"}, {"inference.launch": "vllm serve {model}"}):
        with pytest.raises(UsageError, match=r"launch_gpus has 1, and this machine shows 0: it names GPUs as CUDA_VIS"):
            with_engine(plan_of(tmp_path, **sets, **{"inference.launch_gpus": 1}), machine(80))


CAMPAIGN = "[campaign]\nseeds = [1, 2]\n" + "".join(
    f'[[campaign.conditions]]\nadvantage_mode = "{mode}"\ntransform_mode = "none"\n' for mode in ("grpo", "maxrl")
)


def test_every_worker_has_a_vllm_on_its_own_gpu(tmp_path):
    """The division is made for the smallest GPU that trains, and a worker's share of the machine's memory."""
    workers = {"campaign.executor": "processes", "campaign.workers": 2}
    plan = with_engine(plan_of(tmp_path, MODEL + CAMPAIGN, **workers), machine(80, 48, 8))
    config = plan.specs[0].config
    assert plan.notes == (
        "Sampling with vLLM 0.32.0 on each of 2 GPUs beside its worker: KV cache 6.8 GiB (128 sequences of 384 "
        "tokens); its KV cache is released during updates",
    )
    assert (config.inference.launch_gpus, config.inference.released) == (None, "kv")
    assert config.inference.beside_trainer
    assert adapter_slots(config.inference.launch) == 2  # a worker has one seed's two conditions
    assert parse_dict(config.to_dict()) == config
    plan = with_engine(
        plan_of(tmp_path, MODEL + CAMPAIGN, **workers, **{"backend.devices": "gpu:1-2"}), machine(80, 48, 8)
    )
    assert plan.specs[0].config.inference.engine == "local"
    assert "on a GPU of 8 GiB" in plan.notes[0]


@pytest.mark.parametrize(
    ("card", "lanes", "slots", "note"),
    [
        (48, 4, 4, ""),
        (26, 2, 2, "; 2 runs at a time in place of 4, with which 0 sequences of 384 tokens would fit beside two copies "
         "of the model on a GPU of 26 GiB (each 7.5 GiB; trained adapters 6.4 GiB), fewer than 8"),
    ],
)  # fmt: skip
def test_fewer_runs_at_a_time_where_vllm_does_not_fit_else(card, lanes, slots, note, tmp_path):
    plan = with_engine(plan_of(tmp_path, MODEL + CAMPAIGN), machine(card))
    assert plan.notes[0].endswith(f"released during updates{note}")
    assert adapter_slots(plan.specs[0].config.inference.launch) == slots
    assert lane_count(plan.specs, on_gpu=True) == lanes
    typed = with_engine(plan_of(tmp_path, MODEL + CAMPAIGN, **{"campaign.lanes": 4}), machine(card))
    assert typed.specs[0].config.inference.engine == ("local" if note else "vllm")
    assert lane_count(typed.specs, on_gpu=True) == 4
