import asyncio
import gc
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.campaigns import campaign, continue_training, train
from helpers.lanes import AS_ON_A_GPU, requests, sample, tokens, trained
from helpers.models import qwen3_directory, toy_base
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from retrain import device as devices
from retrain.cli.explain import device_of
from retrain.config import parse_dict
from retrain.device import available_memory, build_fault, cpu_build, is_out_of_memory, lost, nvidia_gpus
from retrain.engines.graphs import EmptyCapture, StepGraphs, cuda_capture
from retrain.engines.local import LocalEngine
from retrain.engines.server.sleep import SharedGpu
from retrain.errors import ConfigError, RetrainError, RunFailed, UsageError
from retrain.files import read_jsonl
from retrain.policy import arithmetic
from retrain.policy.local import LocalPolicy
from retrain.policy.lora import Lanes, apply_gradient
from retrain.policy.packing import Budget
from retrain.ranks import RankGroup
from retrain.records.observer import NullObserver
from retrain.records.reader import read_manifest
from retrain.training.inputs import machine_changes

STICKY = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
CAPTURING = "CUDA error: operation not permitted when stream is capturing"

aten = torch.ops.aten
REFUSED = {
    aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select, aten._unique2,
    aten.lift_fresh,  # a tensor from Python's numbers: a copy from host memory that is not pinned
}  # fmt: skip
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


def refuse(*args, **options):
    raise RuntimeError(CAPTURING)


def tensors_of(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Recorder(TorchDispatchMode):
    """Records every operation; refuses those for which host and device wait for each other."""

    def __init__(self):
        super().__init__()
        self.launches, self.before, self.made_here = [], {}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = func.overloadpacket
        # Indexing with a mask reads from the device how many elements there are.
        by_mask = packet in INDEXING and any(index.dtype == torch.bool for index in tensors_of(args[1]))
        if packet in REFUSED or by_mask:
            refuse()
        inputs = {memory_of(tensor) for tensor in tensors_of((args, kwargs))}
        written = [value for name, value in kwargs.items() if name.startswith("out")]
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.append(value)
        for tensor in tensors_of(written):
            if memory_of(tensor) not in self.made_here | self.before.keys():
                storage = tensor.untyped_storage()
                self.before[memory_of(tensor)] = (storage, storage.clone())
        out = func(*args, **kwargs)
        made = tensors_of(out)
        new = {memory_of(tensor) for tensor in made} - inputs
        self.made_here |= new
        is_view = made and not new and not func._schema.is_mutable
        if not is_view:
            self.launches.append((func, args, kwargs, made))
        return out

    def undo(self) -> None:
        """Restore what was written: a captured step has not run. What it left in its own tensors is undefined."""
        for storage, old in self.before.values():
            storage.copy_(old)
        for _, _, _, made in self.launches:
            for tensor in made:
                if memory_of(tensor) in self.made_here and tensor.is_floating_point():
                    tensor.fill_(float("nan"))


class GraphEmulator:
    """``capture`` is a ``retrain.engines.graphs.Capture``. A replay repeats the recorded operations on the same tensors
    with the same numbers, so a step that makes new buffers or needs a number that the host has changed gives other
    results than eagerly."""

    def __init__(self):
        self.captures = self.replays = 0

    def capture(self, step):
        recorder = Recorder()
        with ExitStack() as stack:
            stack.callback(recorder.undo)
            for name in ("numpy", "tolist", "cpu", "__array__"):
                stack.enter_context(mock.patch.object(torch.Tensor, name, refuse))
            stack.enter_context(mock.patch.object(torch, "from_numpy", refuse))
            stack.enter_context(recorder)
            step()
        if not recorder.launches:
            raise EmptyCapture("the graph is empty")
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            for func, args, kwargs, made in recorder.launches:
                for old, new in zip(made, tensors_of(func(*args, **kwargs)), strict=True):
                    if memory_of(old) != memory_of(new):
                        old.copy_(new)

        return replay


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def either(request, tmp_path_factory):
    """A toy base with its lanes, in each number format that a GPU trains in."""
    base = toy_base(tmp_path_factory.mktemp(request.param), request.param)
    yield base, Lanes(base)
    base.release()


def bits(groups):
    return [[(c.token_ids, c.logprobs_T.tolist(), c.entropy_T.tolist(), c.stop_reason) for c in g] for g in groups]


def engine_of(base, lanes, new_capture=None, notify=lambda line: None):
    engine = LocalEngine(base, lanes, notify=notify, settings=AS_ON_A_GPU)
    if new_capture is not None:
        engine.graphs = StepGraphs(new_capture, notify)
    return engine


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}], ids=["whole", "top_p"])
def test_replayed_steps_give_the_bits_of_eager_ones(either, cut):
    """Three lanes of unequal lengths, more sequences than rows: captures at several widths, dropped when rows move."""
    base, lanes = either
    adapters = [trained(lanes, i, rank=2 + i) for i in range(3)]
    asked = [
        replace(request, **cut)
        for lane in range(3)
        for request in requests(lane, prompts=3, samples=4, max_tokens=14 + 20 * lane, temperature=0.9)
    ]
    eager = sample(engine_of(base, lanes), asked, adapters, max_rows=18)
    emulator, messages, places = GraphEmulator(), [], []

    def new_capture():
        places.append(emulator.captures)
        return emulator.capture

    engine = engine_of(base, lanes, new_capture, messages.append)
    assert bits(sample(engine, asked, adapters, max_rows=18)) == bits(eager)
    assert messages == []
    assert emulator.captures >= 3
    assert len(places) >= 2  # captured again because the rows had moved
    assert emulator.replays > 20


@pytest.mark.parametrize("steps", [0, 2])
def test_a_replay_that_makes_no_progress_ends_the_run(base, lanes, steps):
    def capture(step):
        return lambda: [step() for _ in range(steps)]

    with pytest.raises(RunFailed, match="not at all, or too far"):
        sample(engine_of(base, lanes, lambda: capture), requests(max_tokens=30), [trained(lanes, 0)])


def test_memory_that_runs_out_in_a_capture_halves_the_rows_and_graphs_stay(base, lanes):
    emulator, messages = GraphEmulator(), []
    failures = [RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")]

    def capture(step):
        if failures:
            raise failures.pop()
        return emulator.capture(step)

    asked, adapters = requests(max_tokens=30), [trained(lanes, 0)]
    groups = sample(engine_of(base, lanes, lambda: capture, messages.append), asked, adapters)
    eager = sample(engine_of(base, lanes), asked, adapters)
    assert tokens(groups) == tokens(eager)
    assert messages == ["out of memory while decoding: continuing with 6 sequences at once"]
    assert emulator.replays > 10


def test_a_step_that_cannot_be_captured_goes_on_eagerly_and_says_so_once(base, lanes):
    attempts, messages, adapter, asked = [], [], trained(lanes, 0), requests(max_tokens=12)

    def capture(step):
        attempts.append(step)
        raise RuntimeError(f"{CAPTURING}\nmore")

    eager = sample(engine_of(base, lanes), asked, [adapter])
    engine = engine_of(base, lanes, lambda: capture, messages.append)
    for _ in range(2):
        assert bits(sample(engine, asked, [adapter])) == bits(eager)
    assert messages == [f"decode steps run without CUDA graphs: {CAPTURING}"]
    assert len(attempts) == 1


@pytest.mark.parametrize(("message", "is_lost"), [
    (STICKY, True),
    ("CUDA error: an illegal memory access was encountered", True),
    ("CUDA error: uncorrectable ECC error encountered", True),
    ("CUDA error: out of memory", False),
    (CAPTURING, False),
    ("CUDA error: no kernel image is available for execution on the device", False),
])  # fmt: skip
def test_only_errors_after_which_the_context_is_dead_count_as_lost(message, is_lost):
    error, outer = RuntimeError(message), ValueError("while reporting it")
    outer.__cause__ = error
    assert (lost(error) is not None) == (lost(outer) is not None) == is_lost
    assert is_out_of_memory(error) == ("out of memory" in message)


def numbers(directory: Path) -> list[list]:
    keys = ("step", "loss", "reward/total", "optim/grad_norm", "kl_sample_train_v2")
    rows = [row for file in sorted(directory.glob("runs/*/metrics.jsonl")) for row in read_jsonl(file)]
    return [[row.get(key) for key in keys] for row in rows]


def test_a_lost_device_interrupts_every_run_saves_nothing_more_and_resumes(tmp_path, model):
    keys = ["campaign.seeds=[1]", "squeeze.enabled=false", "evaluation.at_start=false", "training.save_every=1"]
    path = campaign(tmp_path, model, steps=2)
    train(path, tmp_path / "whole", *keys)
    steps = []

    def lose_the_device(*step):
        steps.append(step)
        if len(steps) == 3:  # two runs: in the second step
            raise RuntimeError(STICKY)

    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(lose_the_device).remove)
        with pytest.raises(RetrainError, match=r"(?s)device-side assert.*nvidia-smi.*retrain resume"):
            train(path, tmp_path / "cut", *keys)
    runs = read_manifest(tmp_path / "cut")["runs"]
    assert {run["state"] for run in runs} == {"interrupted"}
    assert all("device-side assert" in run["reason"] for run in runs)
    assert {path.name for path in (tmp_path / "cut").glob("runs/*/checkpoints/step_*")} == {"step_000001"}
    continue_training(tmp_path / "cut")
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")


def test_a_fused_optimizer_publishes_every_update(tmp_path, model, fuse_on_cpu):
    keys = ["campaign.seeds=[1]", "squeeze.enabled=false", "evaluation.at_start=false", "training.lr=0.05"]
    path = campaign(tmp_path, model, steps=2)
    train(path, tmp_path / "plain", *keys)
    fuse_on_cpu()
    train(path, tmp_path / "fused", *keys)
    plain, fused = numbers(tmp_path / "plain"), numbers(tmp_path / "fused")
    assert any(row[3] for row in plain)  # some update had a gradient
    for row, other in zip(plain, fused, strict=True):
        assert other == pytest.approx(row, rel=1e-4, abs=1e-6)


class LivePolicies(NullObserver):
    def __init__(self):
        self.counts = []
        self.before = self.count()

    def count(self) -> int:
        gc.collect()
        return sum(type(thing) is LocalPolicy for thing in gc.get_objects())

    def step(self, spec, row):
        self.counts.append(self.count() - self.before)


def test_the_next_cohort_finds_nothing_of_the_first_in_memory(tmp_path, model):
    policies = LivePolicies()
    path = campaign(tmp_path, model, steps=1, lanes=2)
    train(path, tmp_path / "out", "squeeze.enabled=false", "evaluation.at_start=false", observer=policies)
    assert len(read_manifest(tmp_path / "out")["cohorts"]) == 2
    assert policies.counts == [2, 2, 2, 2]


def test_nvidia_smi_is_asked_unless_its_gpus_are_hidden(nvidia_smi, monkeypatch):
    assert [(gpu.name, gpu.driver) for gpu in nvidia_gpus()] == [("NVIDIA H100 80GB HBM3", "580.65.06")]
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert nvidia_gpus() == []


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for GPUs")
def test_a_cpu_build_beside_a_gpu_is_refused_for_large_models(tmp_path, nvidia_smi):
    assert cpu_build() == torch.__version__
    assert device_of(parse_dict({}))[0].kind == "cpu"  # nothing is planned for a GPU that torch cannot use
    assert build_fault("cpu") == ""
    large = qwen3_directory(tmp_path / "large", ["words"], hidden=512, layers=6)
    file = tmp_path / "large.toml"
    file.write_text(f'[model]\nmodel = "{large}"\n[data]\nsource = "arithmetic"\n[reward]\ntype = "match"\n')
    with pytest.raises(ConfigError, match=r"built for CPUs alone: install a CUDA build \(pip install"):
        train(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_kind_of_gpu_is_a_change_of_the_machine_and_another_index_is_not(gpus):
    card = devices.described(torch.device("cuda:1"))
    assert card == "NVIDIA H100 80GB HBM3 (compute capability 9.0)"
    assert devices.gpu_facts(torch.device("cuda:1"))["gpu"]["index"] == 1

    def built(name, index, cuda):
        return {"built": {"device": name, "dtype": "bfloat16", "gpu": {"index": index, "cuda": cuda}}}

    assert machine_changes(built(card, 0, "13.0"), built(card, 1, "13.0")) == []
    other = machine_changes(built(card, 0, "13.0"), built("NVIDIA A100 (compute capability 8.0)", 0, "12.8"))
    assert [line.partition(":")[0] for line in other] == ["device", "CUDA"]


def test_shared_heads_are_repeated_where_no_kernel_takes_them(monkeypatch):
    assert arithmetic.expands_grouped_heads("cuda", torch.float32)
    assert not arithmetic.expands_grouped_heads("cuda", torch.bfloat16)
    assert not arithmetic.expands_grouped_heads("cpu", torch.float32)
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    shared = arithmetic.causal_attention(q, k, v, 0.3)
    monkeypatch.setattr(arithmetic, "expands_grouped_heads", lambda device, dtype: True)
    torch.testing.assert_close(arithmetic.causal_attention(q, k, v, 0.3), shared)


def test_bfloat16_is_used_where_the_gpu_has_it_natively(gpus):
    cuda = torch.device("cuda:0")
    assert devices.resolve_dtype("auto", cuda) is torch.bfloat16
    gpus.name, gpus.has_bfloat16 = "Tesla T4", False
    assert devices.resolve_dtype("auto", cuda) is torch.float32
    with pytest.raises(UsageError, match=r'T4 .* has no bfloat16 arithmetic: type dtype = "float32"'):
        devices.resolve_dtype("bfloat16", cuda)
    assert devices.resolve_dtype("bfloat16", torch.device("cpu")) is torch.bfloat16


def test_processes_that_share_a_device_have_their_part_of_its_memory_each(monkeypatch, gpus, host_memory):
    """Of a GPU and of the machine; what another process allocated is not available either way."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda:1")
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=1 << 30)))

    def sizes():
        devices.set_up(cuda)
        return [function(device) for function in (devices.total_memory, available_memory) for device in (cuda, cpu)]

    assert sizes() == [80, 1 << 40, 62, 1 << 39]
    assert gpus.limits == []
    monkeypatch.setenv("RETRAIN_MEMORY_SHARE", "0.25")
    assert sizes() == [20, 1 << 38, 10, (1 << 38) - (1 << 30)]
    assert gpus.limits == [(0.25, cuda)]
    gpus.free = 3
    assert available_memory(cuda) == 5


def test_a_process_beside_a_server_counts_on_all_of_its_part(gpus):
    """What is free depends on whether the server sleeps at the moment, and the plan must not."""
    cuda = torch.device("cuda:0")
    devices.limit_memory(cuda, 30)
    for gpus.free in (60, 3):
        assert (devices.total_memory(cuda), available_memory(cuda)) == (30, 20)
    devices.limit_memory(cuda, None)
    assert (devices.total_memory(cuda), available_memory(cuda)) == (80, 5)
    assert gpus.limits == [(30 / 80, cuda), (1.0, cuda)]


def out_of_memory_once(calls: list[str], name: str) -> Callable[..., None]:
    def run(*given: object) -> None:
        calls.append(name)
        if calls.count(name) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return run


def test_the_cache_is_emptied_before_a_second_try(gpus):
    gpus.count = 1
    Budget(100).fit(["a", "b"], lambda: [["a", "b"]], out_of_memory_once(gpus.calls, "update"))
    assert gpus.calls == ["update", "empty cache", "update"]
    gpus.calls.clear()
    optimizer = SimpleNamespace(state={}, param_groups=[], step=out_of_memory_once(gpus.calls, "step"))
    apply_gradient(optimizer)
    assert gpus.calls == ["step", "empty cache", "step"]


class FakeServer:
    """The client of a server that answers everything."""

    url = "http://server"

    def __init__(self, calls: list[str]):
        self.calls, self.connection = calls, self

    async def post(self, path: str, body: object) -> None:
        self.calls.append(path)


def test_the_cache_is_emptied_before_a_server_wakes(gpus):
    gpus.count, calls = 1, gpus.calls
    gpu = SharedGpu("kv", lambda held: calls.append(f"hold restarts: {held}"), lambda text, level: None)
    server = FakeServer(calls)

    async def step() -> None:
        await gpu.sleep([server])
        await gpu.wake([server])

    asyncio.run(step())
    assert calls == [
        "hold restarts: True", "/pause?mode=wait", "/release_kv_cache_memory", "empty cache", "hold restarts: False",
        "/wake_up",
    ]  # fmt: skip


class FakeCuda:
    """Records what a capture asks of ``torch.cuda``, in order."""

    def __init__(self):
        self.calls: list[str] = []
        self.memory = SimpleNamespace(_cuda_endAllocateToPool=lambda index, pool: self.calls.append(f"end {pool}"))

    @contextmanager
    def device(self, device):
        yield

    @contextmanager
    def graph(self, graph, **options):
        assert options == {"pool": "pool", "stream": "stream", "capture_error_mode": "thread_local"}
        self.calls.append("begin")
        yield
        self.calls.append("end")

    def graph_pool_handle(self):
        return "pool"

    def Stream(self, device):
        return "stream"

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: self.calls.append("replay"))

    def current_stream(self):
        return "stream before"

    def set_stream(self, stream):
        self.calls.append(stream)


def test_a_failed_capture_leaves_the_stream_and_the_pool_as_they_were():
    cuda = FakeCuda()
    capture = cuda_capture(torch.device("cuda:0"), cuda)
    capture(lambda: cuda.calls.append("step"))()
    assert cuda.calls == ["begin", "step", "end", "replay"]
    cuda.calls.clear()

    def fails() -> None:
        raise RuntimeError(CAPTURING)

    with pytest.raises(RuntimeError, match="not permitted"):
        capture(fails)
    assert cuda.calls == ["begin", "stream before", "end pool"]


def test_sums_go_through_nccl_once_the_ranks_have_gpus():
    ranks, asked = RankGroup(0, 1, dist.HashStore()), []

    def new_group(**options):
        asked.append(options["backend"])
        return dist.new_group(backend="gloo")

    try:
        before = ranks.device_group
        ranks.use_gpus(new_group)
        assert asked == ["nccl"]
        assert ranks.device_group is not before
        total = torch.ones(2)
        ranks.add_up([total])
        assert total.tolist() == [1, 1]
        assert ranks.gather("here", lambda: 1) == [1]
    finally:
        ranks.leave()
