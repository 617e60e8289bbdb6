"""Captures decode steps as CUDA graphs and replays them, so that the GPU does not wait for kernel launches.

A step works in place on fixed buffers, so its launches are the same for every token. It runs eagerly a few times (these
are real steps), is then captured once, and replayed afterwards. When the buffers move, ``forget`` drops the graphs. A
step that cannot be captured keeps running eagerly, with one message. An out-of-memory error is raised to the engine,
which reduces the batch.

A captured step must neither wait for the device nor read host memory (rules of ``torch.cuda.graph``): it makes no
tensor from Python numbers, and selects by comparisons and masks on the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import torch

from retrain.device import is_out_of_memory, lost
from retrain.errors import RunFailed

# Eager steps of a key before its capture. A capture costs as much as a few steps, and during the first steps libraries
# do their set-up, which is forbidden in a capture
EAGER_STEPS = 3

# Records the launches of a step without running it, and returns a function that replays them. Raises EmptyCapture when
# nothing was recorded, RuntimeError when the step cannot be captured
Capture = Callable[[Callable[[], object]], Callable[[], object]]


class EmptyCapture(RunFailed):
    """The capture recorded nothing, because the step ran on another stream. Replaying the graph would do nothing, and
    running the step again would be one step too many."""


def cuda_capture(device: torch.device, cuda: Any = torch.cuda) -> Capture:
    """Return the capture function of a device of ``cuda``. All graphs share one stream and one memory pool: they never
    run at the same time and leave no result in the pool, so their temporaries can reuse the same memory."""
    with cuda.device(device):  # pools and streams belong to the current device
        pool, stream = cuda.graph_pool_handle(), cuda.Stream(device)

    def capture(step: Callable[[], object]) -> Callable[[], object]:
        graph = cuda.CUDAGraph()
        with cuda.device(device):
            before, failed = cuda.current_stream(), None
            try:
                # Grading threads may use the device meanwhile; thread_local keeps that from ending the capture.
                with (
                    warnings.catch_warnings(record=True) as caught,
                    cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
                ):
                    warnings.simplefilter("always")
                    step()
            except RuntimeError as error:
                failed = _cause(error)
            if failed is not None:
                cuda.set_stream(before)  # a failed capture leaves its stream current
                with suppress(RuntimeError):  # the allocator may still use the graph's pool
                    cuda.memory._cuda_endAllocateToPool(device.index or 0, pool)
                raise failed
        if any("graph is empty" in str(warning.message).lower() for warning in caught):
            raise EmptyCapture("the CUDA graph of a decode step is empty")
        return graph.replay

    return capture


def _cause(error: BaseException) -> BaseException:
    # The failure to end a capture follows from the first error inside it, and hides it.
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error


class StepGraphs:
    """Runs steps eagerly or from captured graphs. There is one graph per key; a key consists of the sizes that are
    fixed in the graph's launches.

    ``new_capture`` makes the capture function, and makes it again after ``forget``. After a failed capture it is None
    and every step runs eagerly. ``captures`` counts the captured steps.
    """

    def __init__(self, new_capture: Callable[[], Capture], notify: Callable[[str], None]):
        self.new_capture: Callable[[], Capture] | None = new_capture
        self.notify = notify
        self.captures = 0
        self._capture: Capture | None = None
        self._graphs: dict[Hashable, Callable[[], object]] = {}
        self._seen: dict[Hashable, int] = {}

    @property
    def in_use(self) -> bool:
        return bool(self._graphs)

    def forget(self) -> None:
        """Drop all graphs, because their buffers move or are freed. No step may be in flight."""
        self._graphs.clear()
        self._seen.clear()
        self._capture = None

    def run(self, key: Hashable, step: Callable[[], object]) -> None:
        """Run one step, by its graph if it has one. Raises EmptyCapture; RuntimeError if memory runs out or the device
        is lost."""
        if self.new_capture is not None and key not in self._graphs:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] > EAGER_STEPS:
                self._try(key, step, self.new_capture)
        self._graphs.get(key, step)()

    def _try(self, key: Hashable, step: Callable[[], object], new_capture: Callable[[], Capture]) -> None:
        try:
            self._capture = self._capture or new_capture()
            self._graphs[key] = self._capture(step)
            self.captures += 1
        except RuntimeError as error:
            self.forget()
            if is_out_of_memory(error) or lost(error):
                raise
            self.new_capture = None
            self.notify(f"decode steps run without CUDA graphs: {str(error).splitlines()[0]}")
