"""What ``retrain explain --devices`` says of GPUs that are not here: memory, cohorts, order and time, by hand."""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from snippets import FENCE, ROOT
from toymodels import qwen3_directory
from typer.testing import CliRunner

from retrain.campaign.planning.architecture import Architecture, architecture_of
from retrain.campaign.planning.costs import BEST, LIKELY, WORST
from retrain.campaign.planning.devices import Device, Fleet, parse_fleet
from retrain.campaign.planning.plan import plan
from retrain.campaign.running.forecast import MOST_LANES, Range, forecast, workers_on
from retrain.campaign.running.protocol import CohortJob, JobEnded
from retrain.campaign.running.virtual import VirtualExecutor
from retrain.cli import app
from retrain.commands.forecast import forecast_lines, idle_words, range_words
from retrain.config import load, parse_dict
from retrain.errors import UsageError
from retrain.gpus import KNOWN_GPUS, peaks_of
from retrain.models.sizes import fitting_lanes

# -- which devices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count", "name", "tflops", "gb_s", "gb"),
    [
        ("64xH100-80G", 64, "H100-80G", 989, 3350, 80),
        ("H100", 1, "H100-80G", 989, 3350, 80),
        ("2xh100-94gb", 2, "H100-94G", 835, 3900, 94),
        ("8xA100-40G", 8, "A100-40G", 312, 1555, 40),
        ("2 x L4", 2, "L4-24G", 121, 300, 24),
        ("3×L40S", 3, "L40S-48G", 362, 864, 48),
        ("8x80G@990TF,3.35TB/s", 8, "80G@990TF,3.35TB/s", 990, 3350, 80),
        ("16.5GB@65tf,320gb/s", 1, "16.5GB@65tf,320gb/s", 65, 320, 16.5),
    ],
)
def test_devices_are_read(text, count, name, tflops, gb_s, gb):
    fleet = parse_fleet(text)
    assert (fleet.count, fleet.device.name, fleet.device.kind) == (count, name, "gpu")
    assert fleet.device.flops == pytest.approx(tflops * 1e12)
    assert fleet.device.bandwidth == pytest.approx(gb_s * 1e9)
    assert fleet.device.memory == int(gb * 10**9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xV100", ["V100 is none of the GPUs", "H100, ", "8x80G@990TF,3.35TB/s"]),
        ("2xA100-60G", ["an A100 has 80 or 40 GB", "--devices 2xA100-80G"]),
        ("A100-60G", ["type --devices A100-80G"]),
        ("0xH100", ["not a number of GPUs", "64xH100-80G"]),
        ("", ["not a number of GPUs"]),
        ("8xH100 4xA100", ["not a number of GPUs"]),
        ("8x80G", ["80G is none of the GPUs"]),
        ("8x80G@990TF", ["is none of the GPUs"]),
        ("8x80G@0TF,3TB/s", ["none of the figures may be 0"]),
    ],
)
def test_other_devices_are_refused_in_one_line(text, said):
    result = CliRunner().invoke(app, ["explain", "nowhere.toml", "--devices", text])
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.strip().splitlines()) == 1
    assert all(words in result.stderr for words in said)


def test_a_gpu_s_own_name_is_found_in_the_table():
    names = {
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA A100-SXM4-40GB": "A100",
        "NVIDIA L4": "L4",
        "NVIDIA L40S": "L40S",
        "NVIDIA GeForce RTX 4090": "RTX4090",
        "NVIDIA A10": "A10",
        "NVIDIA RTX A6000": "A6000",
    }
    for told, name in names.items():
        assert peaks_of(told) == KNOWN_GPUS[name][0], told
    assert peaks_of("NVIDIA Tesla V100") is None


# -- what it takes, by hand -------------------------------------------------------------------------------------------

TOY = Architecture(layers=2, hidden=64, vocab=1000, heads=4, kv_heads=2, head_dim=16, intermediate=96, tied=True)
HEAD = "[model]\nlora_rank = 4\n[evaluation]\nproblems = 0\n[squeeze]\nenabled = false\n"
CONDITIONS = "".join(
    f'[[campaign.conditions]]\nadvantage_mode = "{mode}"\ntransform_mode = "none"\n'
    for mode in ("grpo", "rloo", "dr_grpo", "maxrl", "reinforce_pp")
)
TRAINING = "[training]\nmax_steps = 10\nbatch_size = 2\ngroup_size = 4\nmax_tokens = 100\n"


def planned(campaign: str = "seeds = [1, 2, 3, 4, 5, 6, 7, 8]", conditions: int = 5, head: str = HEAD, more: str = ""):
    chosen = CONDITIONS.split("[[")[1 : conditions + 1]
    text = f"[campaign]\n{campaign}\n" + "".join("[[" + each for each in chosen) + TRAINING + head + more
    return plan(parse_dict(tomllib.loads(text)))


def fleet(count: int, memory: float = 80, tflops: float = 100, gb_s: float = 1000) -> Fleet:
    return Fleet(count, Device("gpu", "made up", tflops * 1e12, gb_s * 1e9, int(memory * 1e9)))


def seconds_of(runs: int, tflops: float = 100, gb_s: float = 1000, reached=LIKELY) -> float:
    """Ten steps of so many runs: 8 sequences each, of 12 + 100 tokens, written out."""
    attention, mlp = 64 * 64 + 2 * 64 * 32 + 64 * 64, 3 * 64 * 96
    parameters = 2 * (attention + mlp + 2 * 64) + 1000 * 64 + 64
    cache = 2 * 2 * 2 * 16 * 2  # keys and values, layers, heads, numbers, bytes
    read = (2 * parameters + 8 * runs * 56 * cache) / (gb_s * 1e9 * reached.bandwidth)
    multiplied = 2 * parameters * 8 * runs / (tflops * 1e12 * reached.compute)
    decoding = 100 * (max(read, multiplied) + 2 * reached.layer_seconds)
    training = runs * 4 * parameters * 8 * 112 / (tflops * 1e12 * reached.compute)
    return 10 * (decoding + training)


@pytest.mark.parametrize(("tflops", "gb_s"), [(100, 1000), (100, 0.05), (0.001, 1000)])  # launching, reading, products
def test_time_of_a_cohort_by_hand(tflops, gb_s):
    found = forecast(planned(), TOY, fleet(8, tflops=tflops, gb_s=gb_s))
    for case, reached in (("best", BEST), ("likely", LIKELY), ("worst", WORST)):
        expected = seconds_of(5, tflops, gb_s, reached)
        assert getattr(found.cohort_seconds, case) == pytest.approx(expected)
        assert getattr(found.step_seconds, case) == pytest.approx(expected / 10)
        assert getattr(found.seconds, case) == pytest.approx(expected)
        assert getattr(found.gpu_hours, case) == pytest.approx(8 * expected / 3600)
    training = 5 * 4 * TOY.active_parameters * 8 * 112 / (tflops * 1e12 * LIKELY.compute)
    assert 1 - found.sampling_share == pytest.approx(training / found.step_seconds.likely)
    assert found.idle_gpu_hours == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("devices", "cohorts", "rounds", "unused"),
    [
        (1, [5] * 8, 8, 0),
        (3, [5] * 8, 3, 0),
        (8, [5] * 8, 1, 0),
        (16, [3, 2] * 8, 1, 0),  # half a seed each
        (64, [1] * 40, 1, 24),
    ],
)
def test_cohorts_are_cut_as_for_so_many_workers(devices, cohorts, rounds, unused):
    found = forecast(planned(), TOY, fleet(devices))
    assert (found.cohorts, found.rounds, found.unused) == (cohorts, rounds, unused)
    busy = sum(seconds_of(runs) for runs in cohorts)
    assert found.idle_gpu_hours == pytest.approx((devices * found.seconds.likely - busy) / 3600, abs=1e-9)


def test_the_last_to_end_decides():
    """Two conditions × three seeds on two devices: four runs beside two."""
    found = forecast(planned("seeds = [1, 2, 3]", 2), TOY, fleet(2))
    assert found.cohorts == [4, 2]
    assert found.seconds.likely == pytest.approx(seconds_of(4))
    assert found.trained_after == found.seconds.likely
    idle = (seconds_of(4) - seconds_of(2)) / 3600
    assert found.idle_gpu_hours == pytest.approx(idle)
    assert idle_words(found) == f"{idle / (2 * seconds_of(4) / 3600):.0%} of them idle"


def test_workers_are_those_that_would_train():
    specs = planned()
    assert workers_on(specs, 64) == 64
    assert workers_on(specs, 64, one_process=True) == 1
    assert workers_on(planned('seeds = [1]\nexecutor = "processes"\nworkers = 4'), 64) == 4
    assert workers_on(planned('seeds = [1]\nexecutor = "processes"\nworkers = 9'), 2) == 2
    assert workers_on(planned('seeds = [1]\nexecutor = "processes"\ngpus_per_cohort = 0.25'), 2) == 8
    named = planned('seeds = [1]\nexecutor = "processes"', more='[backend]\ndevices = "gpu:0-2"\n')
    assert workers_on(named, 64) == 3
    four = planned('seeds = [1]\nexecutor = "ray"\ngpus_per_cohort = 4', more='[backend]\nshard = "dp"\n')
    assert [workers_on(four, devices) for devices in (64, 7, 3)] == [16, 1, 1]
    alone = plan(parse_dict(tomllib.loads(TRAINING + HEAD)))
    assert workers_on(alone, 64) == 1
    assert forecast(alone, TOY, fleet(64)).unused == 63


def test_ranks_train_one_cohort_and_may_hold_a_part_of_the_base_each():
    def made(shard, more="", devices=4):
        specs = planned("seeds = [1, 2]", more=f'[backend]\nshard = "{shard}"\n{more}')
        found = forecast(specs, TOY, fleet(devices))
        return found, dict(forecast_lines(specs, found, fleet(devices), False))

    whole, layers = 2 * TOY.parameters(), 2 * TOY.linear_parameters(TOY.experts)
    ends = whole - layers
    passing = max(2 * ends, ends + 3 * (layers // TOY.layers))
    assert made("dp")[0].memory.base == made("fsdp2", devices=1)[0].memory.base == whole
    for more, parts in (("", 4), ("ranks = 3\n", 3), ('devices = "gpu:0-7"\n', 8), ("ranks = 1\n", 1)):
        assert made("fsdp2", more)[0].memory.base == (whole // parts + passing if parts > 1 else whole)
    for shard in ("dp", "fsdp2"):
        found, lines = made(shard)
        assert (found.workers, found.unused, found.rounds) == (1, 0, 2)
        assert found.idle_gpu_hours == pytest.approx(0, abs=1e-12)
        assert "memory is that of each" in lines["ranks"]
        assert "careful" not in lines
    assert "ranks" not in made("none")[1]
    assert "ranks" not in made("fsdp2", devices=1)[1]


def test_the_ranks_of_a_worker_are_its_devices():
    """Two cohorts side by side, each over two of four devices."""

    def made(rest, seeds="[1, 2]"):
        specs = planned(f'seeds = {seeds}\nexecutor = "processes"\n{rest}', more='[backend]\nshard = "fsdp2"\n')
        found = forecast(specs, TOY, fleet(4))
        return found, dict(forecast_lines(specs, found, fleet(4), False))

    halves, lines = made("gpus_per_cohort = 2")
    assert (halves.workers, halves.unused, halves.cohorts) == (2, 0, [5, 5])
    assert halves.idle_gpu_hours == pytest.approx(0, abs=1e-12)
    assert lines["ranks"].startswith("each run has 2 of them together")
    thirds, _ = made("gpus_per_cohort = 3")
    assert (thirds.workers, thirds.unused) == (1, 1)
    assert thirds.idle_gpu_hours == pytest.approx(thirds.seconds.likely / 3600)
    assert thirds.memory.base < halves.memory.base


def test_servers_decode_elsewhere():
    served = forecast(planned("seeds = [1, 2]", more='[inference]\nengine = "vllm"\nurl = "http://a"\n'), TOY, fleet(2))
    assert (served.workers, served.cohorts, served.unused) == (1, [5, 5], 1)
    assert (served.memory.rows, served.memory.decoding) == (0, 0)
    here = forecast(planned("seeds = [1, 2]"), TOY, fleet(2, memory=0.005)).memory
    there = forecast(
        planned("seeds = [1, 2]", more='[inference]\nengine = "vllm"\nurl = "http://a"\n'), TOY, fleet(2, memory=0.005)
    ).memory
    assert here.fitting < there.fitting  # no caches beside the lanes


def test_workers_that_share_a_device_have_a_part_of_it_each():
    shared = forecast(
        planned('seeds = [1, 2, 3, 4]\nexecutor = "processes"\ngpus_per_cohort = 0.5'), TOY, fleet(2, gb_s=0.05)
    )
    assert (shared.workers, shared.cohorts, shared.unused) == (4, [5] * 4, 0)
    assert shared.memory.total == 40e9
    assert shared.seconds.likely == pytest.approx(seconds_of(5, 50, 0.025))
    assert shared.gpu_hours.likely == pytest.approx(2 * shared.seconds.likely / 3600)
    assert shared.idle_gpu_hours == pytest.approx(0, abs=1e-12)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_memory_by_hand():
    """Qwen3-8B of rank 16 on an H100: 22 bytes for each of 43,646,976 adapter weights; a token keeps 35.5 bytes per
    layer and hidden unit; a row of 12 + 100 tokens occupies 128 columns of 147,456 bytes and one layer of 36 again."""
    eight = architecture_of("Qwen/Qwen3-8B")
    assert eight is not None
    specs = planned(head='[model]\nmodel = "Qwen/Qwen3-8B"\nlora_rank = 16\n[evaluation]\nproblems = 0\n')
    memory = forecast(specs, eight, parse_fleet("8xH100")).memory
    base, lane, kept = 2 * 8_190_735_360, 43_646_976 * 22, eight.kept_bytes(2)
    assert (memory.total, memory.base, memory.copy) == (80 * 10**9, base, 0)
    assert (memory.lanes, memory.lanes_take) == (5, 5 * lane)
    room = 80 * 10**9 - base - 5 * lane
    assert memory.update_tokens == min(8 * 112, int(0.4 * room) // kept) == 896
    row = 128 * 147_456 + 128 * 147_456 // 72 + 5 * 4 * 151_936
    assert memory.rows == min(40, int(0.8 * room) // row) == 40
    assert memory.decoding == 40 * row
    usable = int(0.85 * (80 * 10**9 - base))
    expected = next(n - 1 for n in range(1, 99) if n * lane + max(n * 8 * 112 * 147_456, 112 * kept) > usable)
    assert memory.fitting == expected
    long = "[training]\nmax_steps = 10\nbatch_size = 64\ngroup_size = 16\nmax_tokens = 2036\n"
    text = f'[model]\nmodel = "Qwen/Qwen3-8B"\nlora_rank = 16\n{long}'
    many = forecast(plan(parse_dict(tomllib.loads(text))), eight, parse_fleet("H100")).memory
    room = 80 * 10**9 - base - lane
    row = 2048 * 147_456 + 2048 * 147_456 // 72 + 5 * 4 * 151_936
    assert many.update_tokens == int(0.4 * room) // kept
    assert many.rows == int(0.8 * room) // row < 64 * 16


def test_sequences_that_do_not_decode_at_once_do_so_in_batches():
    eight = architecture_of("Qwen/Qwen3-8B")
    assert eight is not None
    text = '[model]\nmodel = "Qwen/Qwen3-8B"\n[training]\nmax_steps = 1\n'
    text += "batch_size = 64\ngroup_size = 16\nmax_tokens = 2036\n"
    specs = plan(parse_dict(tomllib.loads(text)))
    found = forecast(specs, eight, parse_fleet("H100"))
    batches = math.ceil(1024 / found.memory.rows)
    assert batches > 3
    together = 1024 / batches
    reading = (2 * eight.parameters() + together * 1024 * 147_456) / (3350e9 * 0.5)
    computing = 2 * eight.active_parameters * together / (989e12 * 0.35)
    sampling = batches * 2036 * (max(reading, computing) + 36 * 3e-4)
    assert found.step_seconds.likely * found.sampling_share == pytest.approx(sampling)


@pytest.mark.parametrize(("lanes", "fit"), [(2, True), (3, True), (4, True)])
def test_what_does_not_fit_is_cut_into_smaller_cohorts(lanes, fit):
    """Memory for so many lanes of the toy and no more."""
    adapter = TOY.adapter_parameters(4, "all-linear") * 22
    base, cache = 2 * TOY.parameters(), 8 * 112 * TOY.cache_bytes(2)
    update = 112 * TOY.kept_bytes(2)

    def gigabytes(n: int) -> float:
        return (base + (n * adapter + max(n * cache, update)) / 0.85 + 64) / 1e9

    found = forecast(planned(), TOY, fleet(8, memory=gigabytes(lanes)))
    assert found.memory.fitting == lanes
    assert found.cohorts == ([lanes, 5 - lanes] if lanes > 2 else [2, 2, 1]) * 8
    assert f"{lanes} fit" in found.note
    fixed = forecast(planned("seeds = [1, 2]\nlanes = 5"), TOY, fleet(2, memory=gigabytes(lanes)))
    assert f"type lanes = {lanes}" in fixed.refusal
    assert (fixed.cohorts, fixed.seconds) == ([], Range(0, 0, 0))
    enough = forecast(planned(), TOY, fleet(8, memory=gigabytes(5)))
    assert (enough.cohorts, enough.note, enough.refusal) == ([5] * 8, "", "")


def test_not_even_one_run_fits():
    adapter = TOY.adapter_parameters(4, "all-linear") * 22
    base = 2 * TOY.parameters()
    without = forecast(planned(), TOY, fleet(8, memory=(base + adapter) / 1e9))
    assert (without.memory.fitting, without.cohorts) == (0, [])
    assert without.refusal.startswith("5 runs need")
    assert "0 fit; lower [model] lora_rank" in without.refusal
    smaller = forecast(planned(), TOY, fleet(8, memory=base / 2e9))
    assert smaller.refusal.startswith("the model alone takes")
    name, text = forecast_lines(planned(), smaller, fleet(8), False)[-1]
    assert (name, text[:27]) == ("careful", "training would end at once:")


def test_the_rule_is_that_of_training(tmp_path, monkeypatch):
    """The same number of lanes as ``check_memory`` allows over a model that is there, for every memory."""
    from retrain.campaign.running import fitting
    from retrain.policy.base import load_base
    from retrain.policy.lora import Lanes

    model = str(qwen3_directory(tmp_path / "toy", ["12+34=46"]))
    base, architecture = load_base(model, devices="cpu"), architecture_of(model)
    assert architecture is not None
    head = f'[model]\nmodel = "{model}"\nlora_rank = 4\n[evaluation]\nproblems = 0\n[inference]\ndtype = "float32"\n'
    specs = planned("seeds = [1]\nlanes = 5", head=head)
    seen = set()
    for kib in range(100, 8000, 100):
        free = kib << 10
        monkeypatch.setattr(fitting, "available_memory", lambda device, free=free: free)
        try:
            fitting.check_memory(base, Lanes(base), specs, 12)
            allowed = 5
        except fitting.DoesNotFit as error:
            allowed = error.lanes
        found = forecast(specs, architecture, fleet(1, memory=(base.weight_bytes + free) / 1e9))
        assert (min(5, found.memory.fitting), bool(found.refusal)) == (allowed, allowed < 5)
        seen.add(allowed)
    assert seen == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("usable", "cache", "lanes"),
    [(100, 5, 3), (90, 5, 3), (89, 5, 2), (69, 5, 0), (100, 30, 2), (130, 30, 3), (89, 30, 1)],
)
def test_lanes_fit_beside_their_caches_or_one_update(usable, cache, lanes):
    """A copy of 10, an update of 50, lanes of 10: 20, 30 and 40 stay, beside the caches or 50."""
    assert fitting_lanes(usable, 10, 50, [(10, cache)] * 3) == lanes


def test_as_many_lanes_as_one_likes_are_not_counted():
    assert forecast(planned(), TOY, fleet(8)).memory.fitting == MOST_LANES


# -- what waits for what ----------------------------------------------------------------------------------------------

EVALUATED = "[model]\nlora_rank = 4\n[evaluation]\nproblems = 16\n"


def test_the_analysis_takes_the_worker_that_the_first_cohort_leaves():
    """Rank 4 has 3 ranks in its table and a recommended one: 4 × 16 answers, in a batch of 16 each."""
    specs = planned("seeds = [1, 2, 3]", head=EVALUATED)
    found = forecast(specs, TOY, fleet(1))
    ((begin, end),) = found.squeezes
    evaluation = 100 * (2 * TOY.parameters() + 16 * 56 * TOY.cache_bytes(2)) / 500e9 + 100 * 2 * 3e-4
    assert end - begin == pytest.approx(4 * evaluation)
    five = 100 * (2 * TOY.parameters() + 80 * 56 * TOY.cache_bytes(2)) / 500e9 + 100 * 2 * 3e-4
    assert begin == pytest.approx(seconds_of(5) + evaluation + five)  # before training, of the base; after it, of five
    assert found.trained_after == pytest.approx(3 * (seconds_of(5) + five) + evaluation + 4 * evaluation)
    assert found.seconds.likely == found.trained_after
    beside = forecast(specs, TOY, fleet(3))
    assert beside.seconds.likely == pytest.approx(beside.trained_after + 4 * evaluation)
    each = forecast(
        planned("seeds = [1, 2, 3]", head=EVALUATED + '[squeeze]\nruns = "one per condition"\n'), TOY, fleet(3)
    )
    assert len(each.squeezes) == 5
    assert forecast(planned("seeds = [1]"), TOY, fleet(1)).squeezes == []


def test_a_rule_can_stop_only_what_has_not_begun():
    looks = 'seeds = [1, 2, 3, 4, 5, 6, 7, 8]\nsequential = "obrien_fleming"\nrace = true\ntest = "normal"'
    specs = planned(looks)
    for devices, begun in ((1, 5), (2, 10), (8, 40)):
        look = forecast(specs, TOY, fleet(devices)).first_look
        assert look is not None
        assert look.begun == begun
        assert look.seconds == pytest.approx(seconds_of(5))
    first = [dict(forecast_lines(specs, forecast(specs, TOY, fleet(n)), fleet(n), False))["waits"] for n in (2, 8)]
    assert first[0] == "6 cohorts for a free worker, in the order of the plan"
    assert first[1].endswith(": all 40 runs have begun by then")
    lines = [text for _, text in forecast_lines(specs, forecast(specs, TOY, fleet(2)), fleet(2), False)]
    assert any(text.endswith(": 10 of 40 runs have begun by then, the others may never") for text in lines)
    spread = forecast(planned(looks), TOY, fleet(16)).first_look
    assert spread is not None
    assert (spread.begun, spread.seconds) == (40, pytest.approx(seconds_of(3)))
    assert forecast(planned(), TOY, fleet(2)).first_look is None


def test_lines_for_people():
    specs = planned(head=EVALUATED)
    found = forecast(specs, TOY, fleet(8))
    lines = forecast_lines(specs, found, fleet(8), False)
    text = "\n".join(f"{name}: {words}" for name, words in lines)
    assert "devices: 8 × made up: 80 GB, 100 TFLOP/s in bf16 and 1 TB/s each" in text
    assert "careful: one process trains on one of them: train with --executor processes" in text
    assert "cohorts: 8 of 5 runs, for 8 workers: 1 round" in text
    assert "waits: the squeeze analysis for its run" in text
    assert "the last to end" in text
    fewer = dict(forecast_lines(specs, forecast(specs, TOY, fleet(3)), fleet(3), False))
    assert fewer["waits"] == "5 cohorts for a free worker, in the order of the plan"
    assert text.endswith("comparison and report for all of it; they take no GPU")
    one = forecast(specs, TOY, fleet(4), one_process=True)
    alone = forecast_lines(specs, one, fleet(4), True)
    assert (
        "3 of 4 devices never have anything to do, because one process trains on one device" in dict(alone)["cohorts"]
    )
    assert "careful" not in dict(alone)
    few = planned('seeds = [1, 2, 3, 4]\nexecutor = "processes"\nworkers = 2')
    words = dict(forecast_lines(few, forecast(few, TOY, fleet(3)), fleet(3), False))
    assert "1 of 3 devices never have anything to do, because there are not more workers" in words["cohorts"]
    spare = dict(forecast_lines(few, forecast(planned(), TOY, fleet(64)), fleet(64), False))
    assert "24 of 64 devices never have anything to do, because there are not more cohorts" in spare["cohorts"]
    on_cpu = planned(more='[backend]\ndevices = "cpu"\n')
    assert "backend.devices=auto" in dict(forecast_lines(on_cpu, one, fleet(4), True))["careful"]
    shared = planned('seeds = [1, 2]\nexecutor = "processes"\ngpus_per_cohort = 0.5')
    words = dict(forecast_lines(shared, forecast(shared, TOY, fleet(1)), fleet(1), False))
    assert "a worker has 1/2 of a device, 37.3 GiB" in words["memory"]
    assert range_words(Range(1.234, 80, 7200)) == "about 80 s (1.2 s to 2.0 h)"


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some.toml"
    path.write_text(f"[campaign]\nseeds = [1, 2]\n{CONDITIONS}{TRAINING}{EVALUATED}")
    return path


def test_json_has_what_the_lines_say(file):
    words = ["explain", str(file), "--devices", "4xH100-80G", "--executor", "processes", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["devices"], found["device"], found["workers"], found["runs"]) == (4, "H100-80G", 4, 10)
    assert found["cohorts"] == [3, 2, 3, 2]
    assert found["seconds"]["best"] < found["seconds"]["likely"] < found["seconds"]["worst"]
    assert found["gpu_hours"]["likely"] == pytest.approx(4 * found["seconds"]["likely"] / 3600)
    assert found["memory"]["total"] == 80 * 10**9
    assert any("nothing was measured" in each for each in found["assuming"])
    fewer = CliRunner().invoke(app, [*words, "--workers", "2"])
    assert json.loads(fewer.stdout)["cohorts"] == [5, 5]
    one = CliRunner().invoke(app, ["explain", str(file), "--devices", "4xH100", "--executor", "inprocess", "--json"])
    assert json.loads(one.stdout)["workers"] == 1


def test_the_text_replaces_this_machine_s_costs(file):
    result = CliRunner().invoke(app, ["explain", str(file), "--devices", "2xL4", "--executor", "processes"])
    assert result.exit_code == 0, result.output
    lines = [line[:14].strip() for line in result.stdout.splitlines()]
    start = lines.index("each run")
    expected = [
        "each run",
        "altogether",
        "squeeze",
        "model",
        "devices",
        "memory",
        "cohorts",
        "time",
        "",
        "",
        "GPU-hours",
    ]
    assert lines[start : start + 14] == [*expected, "waits", "", "assuming"]
    assert "CPU cores" not in result.stdout


def test_json_belongs_to_devices_and_needs_the_model_s_sizes(file):
    result = CliRunner().invoke(app, ["explain", str(file), "--json"])
    assert result.exit_code == 2
    assert "--devices H100 --json" in result.stderr
    unknown = ["explain", str(file), "--devices", "H100", "--set", "model.model=nobody/no-such-model"]
    result = CliRunner().invoke(app, [*unknown, "--json"])
    assert result.exit_code == 2
    assert "config.json is not on this machine" in result.stderr
    result = CliRunner().invoke(app, unknown)
    assert result.exit_code == 0
    assert "retrain try FILE, which fetches the model" in result.stdout


def test_the_page_says_what_is_said(monkeypatch):
    """The block of docs/scale.md below its command, and its table of GPUs."""
    page = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    command = next(line for line in page.splitlines() if line.startswith("retrain explain"))
    block = next(match[2] for match in FENCE.finditer(page) if match[1] == "text explained")
    monkeypatch.chdir(ROOT)
    _, _, file, *words = command.split()
    sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    gpus, executor = words[words.index("--devices") + 1], words[words.index("--executor") + 1]
    specs, where = plan(load(Path(file), [*sets, f"campaign.executor={executor}"])), parse_fleet(gpus)
    architecture = architecture_of("Qwen/Qwen3-8B")
    assert architecture is not None
    lines = forecast_lines(specs, forecast(specs, architecture, where), where, False)
    assert block.splitlines() == [f"{name:<14}{text}" for name, text in lines]
    rows = re.findall(r"^\| ([A-Z0-9]+)(?:-(\d+)G)? \| (\d+) \| ([\d,]+) \| ([\d,]+) \|$", page, re.MULTILINE)
    told = [(name, *(float(each.replace(",", "")) for each in figures)) for name, _, *figures in rows]
    assert told == [(name, *astuple(peaks)) for name, known in KNOWN_GPUS.items() for peaks in known]
    assert all(parse_fleet(name + (f"-{memory}G" if memory else "")) for name, memory, *_ in rows)


# -- the clock --------------------------------------------------------------------------------------------------------


def job(name: str) -> CohortJob:
    return CohortJob("", "", [{"run_id": name}], {})


def test_jobs_end_in_the_order_of_their_clock():
    executor = VirtualExecutor(2, lambda job, now: {"a": 5.0, "b": 2.0, "c": 2.0}[job.runs[0]["run_id"]])
    first, second = executor.submit(job("a")), executor.submit(job("b"))
    events = executor.events()
    assert next(events) == JobEnded(second.id)
    assert executor.now == 2.0
    third = executor.submit(job("c"))
    assert [event.job for event in events] == [third.id, first.id]
    assert [(span.slot, span.begin, span.end) for span in executor.spans] == [(0, 0, 5), (1, 0, 2), (1, 2, 4)]


def test_there_are_no_more_slots_than_workers():
    executor = VirtualExecutor(1, lambda job, now: 1.0)
    executor.submit(job("a"))
    with pytest.raises(IndexError):
        executor.submit(job("b"))


def test_fleets_are_named():
    assert parse_fleet("64xH100").words == "64 × H100-80G"
    assert parse_fleet("L4").words == "one L4-24G"
    with pytest.raises(UsageError):
        parse_fleet("8xnothing")
    assert replace(parse_fleet("L4"), count=2000).words == "2,000 × L4-24G"
