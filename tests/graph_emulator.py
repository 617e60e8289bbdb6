"""CUDA graphs without a GPU: what a capture records and allows, and what a replay does.

A capture notes every operation that torch dispatches, with its tensors and its numbers as they were; it refuses what
a capturing stream refuses (the host reads the device, or the device reads the host), and takes back what was written:
a captured step has not run. A replay does the noted operations again, on the same tensors with the same numbers,
which shows at once if a step makes new buffers, or needs a number that the host has changed since.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from retrain.engines.graphs import EmptyCapture

aten = torch.ops.aten
REFUSED = {
    aten._local_scalar_dense,
    aten.is_nonzero,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.lift_fresh,  # a tensor from Python's numbers: a copy from host memory that is not pinned
}
MESSAGE = "CUDA error: operation not permitted when stream is capturing"


def _refuse(*args: Any, **options: Any) -> Any:
    raise RuntimeError(MESSAGE)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in REFUSED or _reads_the_host(func, args):
            _refuse()
        given = _tensors((args, kwargs))
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(value)
        for name, value in kwargs.items():
            if name == "out" or name.startswith("out"):
                self._keep(value)
        out = func(*args, **kwargs)
        places = {_memory(tensor) for tensor in given}
        made = _tensors(out)
        new = [tensor for tensor in made if _memory(tensor) not in places]
        self.own.update(map(_memory, new))
        is_view = made and not new and not func._schema.is_mutable
        if not is_view:
            self.launches.append((func, args, kwargs, made))
        return out

    def _keep(self, value: Any) -> None:
        for tensor in _tensors(value):
            place = _memory(tensor)
            if place not in self.own and place not in self.before:
                storage = tensor.untyped_storage()
                self.before[place] = (storage, storage.clone())

    def undo(self) -> None:
        for storage, old in self.before.values():
            storage.copy_(old)


def _reads_the_host(func: Any, args: tuple[Any, ...]) -> bool:
    """Indexing by truth values asks the device how many there are."""
    return func.overloadpacket in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_) and any(
        tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1])
    )


class GraphEmulator:
    """``capture`` is a ``retrain.engines.graphs.Capture``; how many captures and replays there were."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        """See the module."""
        recorder = _Recorder()
        try:
            with ExitStack() as stack:
                for name in ("numpy", "tolist", "cpu", "__array__"):
                    stack.enter_context(mock.patch.object(torch.Tensor, name, _refuse))
                stack.enter_context(mock.patch.object(torch, "from_numpy", _refuse))
                stack.enter_context(recorder)
                step()
        finally:
            recorder.undo()
        if not recorder.launches:
            raise EmptyCapture("the graph is empty")
        self.captures += 1
        poison(recorder)

        def replay() -> None:
            self.replays += 1
            for func, args, kwargs, made in recorder.launches:
                for old, new in zip(made, _tensors(func(*args, **kwargs)), strict=True):
                    if _memory(old) != _memory(new):
                        old.copy_(new)

        return replay


def poison(recorder: _Recorder) -> None:
    """What a capture leaves in its own tensors is nobody's: nothing may read it before a replay has written it."""
    for _, args, kwargs, made in recorder.launches:
        del args, kwargs
        for tensor in made:
            if _memory(tensor) in recorder.own and tensor.is_floating_point():
                tensor.fill_(float("nan"))
