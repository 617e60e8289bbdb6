"""CUDA graphs of a decode step: a GPU that waits for launches replays the whole step as one.

A step works in place on buffers that stay where they are, so its launches are the same from token to token. It runs
eagerly a few times (these are real steps), is then captured once, and replayed from there on. When the buffers move,
``forget`` drops what was captured. A step that cannot be captured goes on eagerly, and says so once.

What is captured must neither wait for the device nor read host memory (``torch.cuda.graph``'s rules): the step makes no
tensor from Python numbers on the host, and where it chooses it compares and fills on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

EAGER_STEPS = 3
"""Steps of one shape that run eagerly first: fewer replays than this would not pay for a capture, and libraries set
up what must not be set up while capturing."""

Capture = Callable[[Callable[[], object]], Callable[[], object]]
"""Records the launches of a step, without running it, and returns what replays them."""


def cuda_capture() -> Capture:
    """Captures that share one pool of memory: they never run side by side and leave nothing in it, so that the
    temporaries of one shape are those of the next one too."""
    pool = torch.cuda.graph_pool_handle()

    def capture(step: Callable[[], object]) -> Callable[[], object]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # What threads that grade beside decoding do on the device is theirs and does not end the capture.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                step()
        except RuntimeError:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own stream current
            raise
        return graph.replay

    return capture


class StepGraphs:
    """Runs steps by key (what is fixed in their launches), eagerly or from a captured graph.

    ``new_capture`` makes what captures, anew whenever the buffers have moved.
    """

    def __init__(self, enabled: bool, tell: Callable[[str], None], new_capture: Callable[[], Capture] = cuda_capture):
        self.enabled, self.tell, self.new_capture = enabled, tell, new_capture
        self._capture: Capture | None = None
        self._graphs: dict[Hashable, Callable[[], object]] = {}
        self._seen: dict[Hashable, int] = {}

    def forget(self) -> None:
        """The buffers have moved, or are no longer needed. Nothing may be in flight."""
        self._graphs.clear()
        self._seen.clear()
        self._capture = None

    def run(self, key: Hashable, step: Callable[[], object]) -> None:
        """One step of this key."""
        if self.enabled and key not in self._graphs:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] > EAGER_STEPS:
                self._try(key, step)
        self._graphs.get(key, step)()

    def _try(self, key: Hashable, step: Callable[[], object]) -> None:
        try:
            self._capture = self._capture or self.new_capture()
            self._graphs[key] = self._capture(step)
        except RuntimeError as error:
            self.enabled = False
            self.forget()
            self.tell(f"decode steps run without CUDA graphs: {str(error).splitlines()[0]}")
