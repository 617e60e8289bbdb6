"""Run golden scenarios in float64 on the CPU, and on a device that computes on the CPU but is another one to torch.

    python -m tests.programs.accelerator WORLD RESULTS SCENARIO …

The folders of the scenarios are moved to RESULTS/cpu and RESULTS/device. On the device an operation raises RuntimeError
if tensors of the CPU meet those of the device in it, or if it draws with a generator of the CPU; torch itself refuses
to give a tensor of the device to numpy. Prints a JSON line for each scenario: ``host_reads``, how often the program
waited for a number of the device, and ``kernels``, how many operations ran on it.

The device is torch's PrivateUse1 backend in Python, which is private: this works with torch 2.13.
"""

import json
import multiprocessing
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))
from driver import Session, preload
from scenarios import SCENARIOS

aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
READS = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default}


class Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend("numgpu", Backend())
DEVICE = torch.device("numgpu:0")
# Shared with the processes of the commands
host_reads, kernels = multiprocessing.RawValue("q", 0), multiprocessing.RawValue("q", 0)


class DeviceTensor(torch.Tensor):
    """A tensor of the device; ``on_cpu`` holds its numbers."""

    on_cpu: torch.Tensor

    @staticmethod
    def __new__(cls, on_cpu, requires_grad=False):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, on_cpu.size(), strides=on_cpu.stride(), storage_offset=on_cpu.storage_offset(), dtype=on_cpu.dtype,
            layout=on_cpu.layout, device=DEVICE, requires_grad=requires_grad,
        )  # fmt: skip
        tensor.on_cpu = on_cpu
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})

    def __repr__(self):
        return f"DeviceTensor({self.on_cpu})"


def run(function, args: tuple[Any, ...], kwargs: dict[str, Any]):
    """Run one operation on the CPU tensors within, after the checks of a device."""
    leaves = tree_leaves((args, kwargs))
    reads_device = any(isinstance(leaf, DeviceTensor) for leaf in leaves)
    asked = kwargs.get("device")
    fills_device = reads_device if asked is None else torch.device(asked).type == DEVICE.type
    if function is aten.copy_.default:
        fills_device = isinstance(args[0], DeviceTensor)
    if reads_device and function not in COPIES:
        for leaf in leaves:
            # A tensor without dimensions may meet any device, as in torch itself.
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DeviceTensor) and leaf.dim() > 0:
                raise RuntimeError(f"{function}: a tensor of the CPU, {tuple(leaf.shape)}, meets the device")
    if fills_device and any(isinstance(leaf, torch.Generator) for leaf in leaves):
        raise RuntimeError(f"{function}: a generator of the CPU draws on the device")
    kernels.value += fills_device
    host_reads.value += reads_device and (function in READS or (function in COPIES and not fills_device))
    cpu_args, cpu_kwargs = tree_map(on_cpu, args), tree_map(on_cpu, kwargs)
    result = function(*cpu_args, **cpu_kwargs)
    if function is aten.copy_.default:
        return args[0]
    if not fills_device:
        return result
    if function is aten._to_copy.default and result is cpu_args[0]:
        result = result.clone()
    result = tree_map(lambda leaf: DeviceTensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, result)
    return return_and_correct_aliasing(function, args, kwargs, result) if reads_device else result


def on_cpu(leaf: object) -> object:
    if isinstance(leaf, DeviceTensor):
        return leaf.on_cpu
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == DEVICE.type else leaf


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class PythonNumbers(TorchFunctionMode):
    """Makes tensors of Python numbers, and lists of tensors, by way of the CPU: torch makes both below the level of
    ``Operations``."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device) == DEVICE:
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        if func is torch.Tensor.tolist and isinstance(args[0], DeviceTensor):
            return args[0].cpu().tolist()
        return func(*args, **kwargs)


def use_device() -> torch.device:
    """Make it the device that retrain finds, in this thread and in all that start later; return it."""
    import retrain.device

    retrain.device.resolve_device = lambda devices: DEVICE
    run_thread = threading.Thread.run

    def run_with_device(thread: threading.Thread) -> None:
        with Operations(), PythonNumbers():
            run_thread(thread)

    threading.Thread.run = run_with_device
    Operations().__enter__()
    PythonNumbers().__enter__()
    return DEVICE


class ExactSession(Session):
    """A session that trains in float64: in float32 Adam makes different updates of gradients that are nearly 0."""

    def _start(self, arguments: Sequence[str], before: Callable[[], None] = lambda: None):
        exact = ("--set", "inference.dtype=float64") if arguments[0] == "train" else ()
        return super()._start((*arguments, *exact), before)


class DeviceSession(ExactSession):
    """A session whose commands run on the device."""

    def _start(self, arguments: Sequence[str], before: Callable[[], None] = lambda: None):
        def start() -> None:
            before()
            use_device()

        return super()._start(arguments, start)


def main() -> None:
    world, results, *names = sys.argv[1:]
    preload()
    for name in names:
        for kind, session_class in (("cpu", ExactSession), ("device", DeviceSession)):
            # Both run in one place, since paths are part of what commands write.
            folder = Path(results) / "work" / name
            folder.mkdir(parents=True)
            session = session_class(name, folder, Path(world))
            host_reads.value = kernels.value = 0
            SCENARIOS[name](session)
            (folder / "session.json").write_text(json.dumps(session.record, indent=1))
            shutil.move(folder, Path(results) / kind / name)
        print(json.dumps({"scenario": name, "host_reads": host_reads.value, "kernels": kernels.value}), flush=True)


if __name__ == "__main__":
    main()
