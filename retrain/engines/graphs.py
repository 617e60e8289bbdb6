"""CUDA graphs of a decode step: a GPU that waits for launches replays the whole step as one.

A step works in place on buffers that stay where they are, so its launches are the same from token to token. It runs
eagerly a few times (these are real steps), is then captured once, and replayed from there on. When the buffers move,
``forget`` drops what was captured. A step that cannot be captured goes on eagerly, and says so once; one for which
memory does not suffice is the engine's to make smaller.

What is captured must neither wait for the device nor read host memory (``torch.cuda.graph``'s rules): the step makes no
tensor from Python numbers on the host, and where it chooses it compares and fills on the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from contextlib import suppress

import torch

from retrain.device import is_out_of_memory, lost
from retrain.errors import RunFailed

EAGER_STEPS = 3
"""Steps of one shape that run eagerly first: fewer replays than this would not pay for a capture, and libraries set
up what must not be set up while capturing."""

Capture = Callable[[Callable[[], object]], Callable[[], object]]
"""Records the launches of a step, without running it, and returns what replays them. Raises EmptyCapture when nothing
was recorded, RuntimeError when the step cannot be captured."""


class EmptyCapture(RunFailed):
    """A capture that recorded nothing: the step was launched elsewhere, and has run. Replaying it would do nothing for
    ever, and running it again would be one step too many."""


def cuda_capture(device: torch.device) -> Capture:
    """Return what captures on a device. Captures share a stream and a pool of memory: they never run side by side and
    leave nothing in it, so that the temporaries of one shape are those of the next one too."""
    with torch.cuda.device(device):  # pools and streams are those of the current device, whatever the tensors' is
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def capture(step: Callable[[], object]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            before, failed = torch.cuda.current_stream(), None
            try:
                # What threads that grade beside decoding do on the device is theirs and does not end the capture.
                with (
                    warnings.catch_warnings(record=True) as caught,
                    torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
                ):
                    warnings.simplefilter("always")
                    step()
            except RuntimeError as error:
                failed = _cause(error)
            if failed is not None:
                torch.cuda.set_stream(before)  # a capture that fails leaves its own stream current
                with suppress(RuntimeError):  # and, where its end fails too, the allocator in the pool
                    torch.cuda.memory._cuda_endAllocateToPool(device.index or 0, pool)
                raise failed
        if any("graph is empty" in str(warning.message).lower() for warning in caught):
            raise EmptyCapture("the CUDA graph of a decode step is empty")
        return graph.replay

    return capture


def _cause(error: BaseException) -> BaseException:
    """Return the error inside a capture: that it could then not be ended is a consequence, and hides it."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error


class StepGraphs:
    """Runs steps by key (what is fixed in their launches), eagerly or from a captured graph.

    ``new_capture`` makes what captures, anew whenever the buffers have moved; None once a capture has failed: every
    step then runs eagerly.
    ``captures`` counts the steps that were captured.
    """

    def __init__(self, new_capture: Callable[[], Capture], tell: Callable[[str], None]):
        self.new_capture: Callable[[], Capture] | None = new_capture
        self.tell = tell
        self.captures = 0
        self._capture: Capture | None = None
        self._graphs: dict[Hashable, Callable[[], object]] = {}
        self._seen: dict[Hashable, int] = {}

    @property
    def in_use(self) -> bool:
        return bool(self._graphs)

    def forget(self) -> None:
        """Drop all graphs: the buffers have moved, or are no longer needed. Nothing may be in flight."""
        self._graphs.clear()
        self._seen.clear()
        self._capture = None

    def run(self, key: Hashable, step: Callable[[], object]) -> None:
        """Run one step of this key. Raises EmptyCapture; RuntimeError when memory runs out or the device is lost."""
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
            self.tell(f"decode steps run without CUDA graphs: {str(error).splitlines()[0]}")
