"""What would bite on a GPU, shown without one: graphs by an emulator, devices by fakes, errors by injection."""

from __future__ import annotations

import gc
import os
import stat
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from graph_emulator import MESSAGE, GraphEmulator
from lane_cases import requests, sample, trained
from toycampaign import campaign
from toymodels import qwen3_directory, toy_base

from retrain.campaign.planning.changes import machine_changes
from retrain.campaign.planning.manifest import read_manifest
from retrain.campaign.running import models
from retrain.campaign.running.controller import launch, resume
from retrain.config import load
from retrain.engines import dense, graphs, slots
from retrain.engines.graphs import EmptyCapture, StepGraphs
from retrain.engines.local import LocalEngine
from retrain.engines.step import decode_steps
from retrain.errors import ConfigError, RetrainError, RunFailed, UsageError
from retrain.files import read_jsonl
from retrain.gpus import build_fault, cpu_build, lost, nvidia_gpus, usable_gpu
from retrain.policy import arithmetic
from retrain.policy import device as devices
from retrain.policy.base import load_weights
from retrain.policy.budget import is_out_of_memory
from retrain.policy.local import LocalPolicy
from retrain.policy.lora import Lanes
from retrain.policy.memory import available_memory
from retrain.policy.update import train_step
from retrain.record.observer import NullObserver

STICKY = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def either(request, tmp_path_factory):
    """A toy base with its lanes, in each number format that a GPU trains in."""
    base = toy_base(tmp_path_factory.mktemp(request.param), request.param)
    yield base, Lanes(base)
    base.release()


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The engine's steps as a GPU takes them: not compiled, looked at every few tokens, many columns at once."""
    monkeypatch.setattr(dense, "compiled_decode_steps", lambda: decode_steps)
    monkeypatch.setattr(slots, "CHECK", {"cpu": 8})
    monkeypatch.setattr(slots, "COLUMNS", {"cpu": 16})


def bits(groups):
    """Everything that was sampled, exactly."""
    return [[(c.token_ids, c.logprobs_T.tolist(), c.entropy_T.tolist(), c.stop_reason) for c in g] for g in groups]


def with_capture(base, lanes, new_capture, tell=lambda line: None):
    engine = LocalEngine(base, lanes, tell=tell)
    engine.graphs = StepGraphs(new_capture, tell)
    return engine


# -- graphs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}], ids=["whole", "top_p"])
def test_replayed_steps_give_the_bits_of_eager_ones(either, as_on_a_gpu, cut):
    """Three lanes of unequal work, more sequences than rows: captures at several widths, dropped when rows move."""
    from dataclasses import replace

    base, lanes = either
    adapters = [trained(lanes, i, rank=2 + i) for i in range(3)]
    asked = [
        replace(request, **cut)
        for lane in range(3)
        for request in requests(lane, prompts=3, samples=4, max_tokens=14 + 20 * lane, temperature=0.9)
    ]
    eager = sample(LocalEngine(base, lanes), asked, adapters, max_rows=18)
    emulator, told, places = GraphEmulator(), [], []

    def new_capture():
        places.append(emulator.captures)
        return emulator.capture

    engine = with_capture(base, lanes, new_capture, told.append)
    assert bits(sample(engine, asked, adapters, max_rows=18)) == bits(eager)
    assert told == []
    assert emulator.captures >= 3
    assert len(places) >= 2  # dropped and captured anew, because the rows had moved
    assert emulator.replays > 20


def test_the_emulator_refuses_what_a_capturing_stream_refuses_and_replays_operations():
    """A number that the host has changed since, and a buffer that is made anew, are those of the capture."""
    x, y, emulator, state = torch.ones(2), torch.zeros(2), GraphEmulator(), {"by": 1.0}
    reads = (
        lambda: x.sum().item(), lambda: x.tolist(), lambda: x.cpu(), lambda: torch.tensor([1.0, 2.0]),
        lambda: x[x > 0], lambda: bool((x > 0).all()),
    )  # fmt: skip
    for read in reads:
        with pytest.raises(RuntimeError, match="stream is capturing"):
            emulator.capture(lambda read=read: (x.add_(1), read()))
    assert x.tolist() == [1, 1]  # what was captured has not run

    def step():
        x.add_(torch.zeros(2).add_(state["by"]))
        y.copy_(x * 2)

    replay = emulator.capture(step)
    state["by"] = 100.0
    replay()
    replay()
    assert (x.tolist(), y.tolist()) == ([3, 3], [6, 6])


@pytest.mark.parametrize("often", [0, 2])
def test_a_replay_that_makes_no_progress_ends_the_run(base, lanes, as_on_a_gpu, often):
    def capture(step):
        return lambda: [step() for _ in range(often)]

    with pytest.raises(RunFailed, match="not at all, or too far"):
        sample(with_capture(base, lanes, lambda: capture), requests(max_tokens=30), [trained(lanes, 0)])


def test_memory_that_runs_out_in_a_capture_halves_the_rows_and_graphs_stay(base, lanes, as_on_a_gpu):
    emulator, told = GraphEmulator(), []
    failures = [RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")]

    def capture(step):
        if failures:
            raise failures.pop()
        return emulator.capture(step)

    asked, adapters = requests(max_tokens=30), [trained(lanes, 0)]
    engine = with_capture(base, lanes, lambda: capture, told.append)
    again = sample(engine, asked, adapters)
    assert [[c.token_ids for c in g] for g in again] == [
        [c.token_ids for c in g] for g in sample(LocalEngine(base, lanes), asked, adapters)
    ]
    assert told == ["out of memory while decoding: goes on with 6 sequences at once"]
    assert emulator.replays > 10


class FakeCuda:
    """The parts of ``torch.cuda`` that a capture uses. ``launch`` is what a kernel does; ``ending`` what happens at the
    end of a capture."""

    def __init__(self, monkeypatch, ending=None):
        self.current, self.stream, self.ended, self.ending, self.launches = 0, "default", [], ending, 0
        self.pool, self.replayed = (0, 7), 0
        fakes = {
            "device": self._device,
            "graph_pool_handle": lambda: (self.current, 7),
            "Stream": lambda device: f"stream of {device}",
            "CUDAGraph": lambda: SimpleNamespace(replay=self._replay),
            "graph": self._graph,
            "current_stream": lambda: self.stream,
            "set_stream": lambda stream: setattr(self, "stream", stream),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.cuda.memory, "_cuda_endAllocateToPool", lambda *args: self.ended.append(args))

    @contextmanager
    def _device(self, device):
        before, self.current = self.current, device.index
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def _graph(self, graph, *, pool, stream, capture_error_mode):
        assert (pool, stream) == ((1, 7), "stream of cuda:1")
        before, self.stream, launches = self.stream, stream, self.launches
        try:
            yield
        finally:
            if self.ending:
                raise self.ending
            if self.launches == launches:
                warnings.warn("The CUDA Graph is empty. This usually means ...", stacklevel=1)
            self.stream = before

    def _replay(self):
        self.replayed += 1

    def kernel(self):
        """A launch, which is captured where it goes to the capturing stream's device."""
        self.launches += self.current == 1 and self.stream == "stream of cuda:1"


def test_captures_happen_on_the_device_of_the_base_and_on_their_own_stream(monkeypatch):
    """pytorch#87894: with cuda:0 current, a capture for cuda:1 records nothing."""
    cuda = FakeCuda(monkeypatch)
    replay = graphs.cuda_capture(torch.device("cuda:1"))(cuda.kernel)
    replay()
    assert (cuda.replayed, cuda.current, cuda.stream, cuda.ended) == (1, 0, "default", [])
    with pytest.raises(EmptyCapture):
        graphs.cuda_capture(torch.device("cuda:1"))(lambda: None)


def test_a_capture_that_fails_leaves_neither_its_stream_nor_the_allocator_in_it(monkeypatch):
    """The reason is the step's error, not that the capture could then not be ended."""
    cuda = FakeCuda(monkeypatch, RuntimeError("CUDA error: operation failed due to a previous error during capture"))

    def step():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        graphs.cuda_capture(torch.device("cuda:1"))(step)
    assert (cuda.current, cuda.stream, cuda.ended) == (0, "default", [(1, (1, 7))])
    FakeCuda(monkeypatch, RuntimeError("CUDA error: operation failed due to a previous error during capture"))
    with pytest.raises(RuntimeError, match="previous error") as caught:
        graphs.cuda_capture(torch.device("cuda:1"))(cuda.kernel)
    assert not is_out_of_memory(caught.value)


# -- errors of the device -----------------------------------------------------------------------------------------


def test_only_errors_after_which_the_context_is_dead_count_as_lost():
    for message, gone in (
        (STICKY, True),
        ("CUDA error: an illegal memory access was encountered", True),
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA error: out of memory", False),
        (MESSAGE, False),
        ("CUDA error: no kernel image is available for execution on the device", False),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ):
        error, outer = RuntimeError(message), ValueError("while saying so")
        outer.__cause__ = error
        assert (lost(error) is not None) == (lost(outer) is not None) == gone, message
        assert is_out_of_memory(error) == ("out of memory" in message), message


def numbers(directory: Path) -> list[dict]:
    """What every step of every run came to."""
    keys = ("step", "loss", "reward/total", "optim/grad_norm", "kl_sample_train_v2")
    rows = [row for file in sorted(directory.glob("runs/*/metrics.jsonl")) for row in read_jsonl(file)]
    return [{key: row[key] for key in keys if key in row} for row in rows]


def live_policies() -> int:
    gc.collect()
    return sum(type(thing) is LocalPolicy for thing in gc.get_objects())


class LivePolicies(NullObserver):
    """Counts the policies that are in memory at every step, and were not before."""

    def __init__(self):
        self.before, self.counts = live_policies(), []

    def step(self, spec, row):
        self.counts.append(live_policies() - self.before)


def test_a_lost_device_interrupts_every_run_saves_nothing_more_and_resumes(tmp_path, model, monkeypatch):
    loaded = load(campaign(tmp_path, model, steps=3), ["campaign.seeds=[1]", "squeeze.enabled=false"])
    launch(loaded, tmp_path / "whole", NullObserver())
    calls = []

    def lose_the_device(*args, **options):
        calls.append(args)
        if len(calls) == 5:  # two runs: in the third step
            raise RuntimeError(STICKY)
        return train_step(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr("retrain.policy.local.train_step", lose_the_device)
        with pytest.raises(RetrainError, match=r"(?s)device-side assert.*retrain resume") as caught:
            launch(loaded, tmp_path / "cut", NullObserver())
    assert "nvidia-smi" in str(caught.value)
    manifest = read_manifest(tmp_path / "cut")
    assert {run["state"] for run in manifest["runs"]} == {"interrupted"}
    assert all("device-side assert" in run["reason"] for run in manifest["runs"])
    steps = {path.name for path in (tmp_path / "cut").glob("runs/*/checkpoints/step_*")}
    assert steps == {"step_000002"}
    assert resume(tmp_path / "cut", NullObserver()).exit_status == 0
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    assert len(numbers(tmp_path / "cut")) == 6


def test_the_next_cohort_loads_no_base_and_finds_nothing_of_the_first_in_memory(tmp_path, model, monkeypatch):
    loaded, live = [], LivePolicies()
    monkeypatch.setattr(models, "load_weights", lambda *how: loaded.append(how) or load_weights(*how))
    assert launch(load(campaign(tmp_path, model, steps=1, lanes=2)), tmp_path / "out", live).exit_status == 0
    assert len(read_manifest(tmp_path / "out")["cohorts"]) == 2
    assert len(loaded) == 1
    assert live.counts == [2, 2, 2, 2]


# -- the machine --------------------------------------------------------------------------------------------------


@pytest.fixture
def with_gpu(tmp_path, monkeypatch):
    """A driver's tool that lists one GPU."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_driver_s_tool_is_asked_unless_its_gpus_are_hidden(with_gpu, monkeypatch):
    assert [(gpu.name, gpu.driver) for gpu in nvidia_gpus()] == [("NVIDIA H100 80GB HBM3", "580.65.06")]
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert nvidia_gpus() == []


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for GPUs")
def test_a_cpu_build_beside_a_gpu_is_refused_where_it_matters(tmp_path, with_gpu):
    assert cpu_build() == torch.__version__
    assert usable_gpu() == ""  # nothing is planned for a GPU that torch cannot use
    assert build_fault("cpu") == ""
    assert "pip install" in build_fault("auto")
    large = qwen3_directory(tmp_path / "large", ["words"], hidden=512, layers=6)
    file = tmp_path / "large.toml"
    text = f'[model]\nmodel = "{large}"\n[data]\nsource = "arithmetic"\n[reward]\ntype = "match"\n'
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"built for CPUs alone: install a CUDA build \(pip install"):
        launch(load(file), tmp_path / "out", NullObserver())
    assert not (tmp_path / "out").exists()


def test_a_gpu_is_called_by_its_kind_and_what_drives_it_is_kept(monkeypatch):
    facts = SimpleNamespace(name="NVIDIA A100-SXM4-40GB", major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    names = {devices.described(torch.device(f"cuda:{i}")) for i in range(2)}
    assert names == {"NVIDIA A100-SXM4-40GB (compute capability 8.0)"}
    assert devices.described(torch.device("cpu")) == "cpu"
    assert devices.gpu_facts(torch.device("cuda:1"))["gpu"]["index"] == 1

    def built(name, index, cuda):
        return {"built": {"device": name, "dtype": "bfloat16", "gpu": {"index": index, "cuda": cuda}}}

    card = names.pop()
    assert machine_changes(built(card, 0, "13.0"), built(card, 1, "13.0")) == []
    other = machine_changes(built(card, 0, "13.0"), built("NVIDIA H100 (compute capability 9.0)", 0, "12.8"))
    assert [line.partition(":")[0] for line in other] == ["device", "CUDA"]


@pytest.mark.parametrize("message", ["CUDA out of memory", STICKY])
def test_what_a_full_or_lost_device_says_of_a_product_is_not_remembered(monkeypatch, message):
    """Logits would be rounded from then on, and another way than before a resume."""
    arithmetic.multiplies_into_fp32.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", lambda *args, **options: (_ for _ in ()).throw(RuntimeError(message)))
        with pytest.raises(RuntimeError, match=message.splitlines()[0]):
            arithmetic.multiplies_into_fp32("cpu")
    assert not arithmetic.multiplies_into_fp32("cpu")
    assert arithmetic.multiplies_into_fp32.cache_info().currsize == 1


def test_shared_heads_are_repeated_where_no_kernel_takes_them(monkeypatch):
    taken = {(device, dtype) for device in ("cpu", "cuda") for dtype in (torch.float32, torch.float64, torch.bfloat16)
             if arithmetic.wants_every_head(device, dtype)}  # fmt: skip
    assert taken == {("cuda", torch.float32), ("cuda", torch.float64)}
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    shared = arithmetic.causal_attention(q, k, v, 0.3)
    monkeypatch.setattr(arithmetic, "wants_every_head", lambda device, dtype: True)
    torch.testing.assert_close(arithmetic.causal_attention(q, k, v, 0.3), shared)


def test_bfloat16_is_taken_where_the_gpu_computes_in_it(monkeypatch):
    cuda, asked = torch.device("cuda:0"), []

    def supported(including_emulation=True):
        asked.append(including_emulation)
        return native

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(devices, "described", lambda device: "Tesla T4 (compute capability 7.5)")
    native = True
    assert devices.resolve_dtype("auto", cuda) is torch.bfloat16
    native = False
    assert devices.resolve_dtype("auto", cuda) is torch.float32
    with pytest.raises(UsageError, match=r'T4 .* has no bfloat16 arithmetic: type dtype = "float32"'):
        devices.resolve_dtype("bfloat16", cuda)
    assert set(asked) == {False}
    assert devices.resolve_dtype("bfloat16", torch.device("cpu")) is torch.bfloat16


def test_the_device_is_made_current_before_anything_is_allocated(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    devices.set_up(torch.device("cpu"))
    assert taken == []
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    devices.set_up(torch.device("cuda:1"))
    assert taken == [torch.device("cuda:1")]
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    devices.set_up(torch.device("cuda:1"))
    assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"  # the user's own word counts


def test_processes_that_share_a_device_have_their_part_of_its_memory_each(monkeypatch):
    """Of a GPU and of the machine; what another one took of it is gone all the same."""
    cpu, cuda, fractions, free = torch.device("cpu"), torch.device("cuda:1"), [], 60
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 12)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: fractions.append(given))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=1 << 40, available=1 << 39))
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=1 << 30)))

    def seen():
        devices.set_up(cuda)
        return [function(device) for function in (devices.total_memory, available_memory) for device in (cuda, cpu)]

    assert seen() == [80, 1 << 40, 62, 1 << 39]
    assert fractions == []
    monkeypatch.setenv("RETRAIN_MEMORY_SHARE", "0.25")
    assert seen() == [20, 1 << 38, 10, (1 << 38) - (1 << 30)]
    assert fractions == [(0.25, cuda)]
    free = 3
    assert available_memory(cuda) == 5
