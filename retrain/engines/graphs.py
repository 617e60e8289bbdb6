"""CUDA graphs of a decode step: a GPU that waits for launches replays the whole step as one.

A step works in place on buffers that stay where they are, so its launches are the same from token to token. It runs
eagerly a few times (these are real steps), is then captured once, and replayed from there on. When the buffers move,
``forget`` drops what was captured. A step that cannot be captured goes on eagerly, and says so once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

EAGER_STEPS = 3
"""Steps of one shape that run eagerly first: fewer replays than this would not pay for a capture, and libraries set
up what must not be set up while capturing."""


def capture(step: Callable[[], None]) -> Callable[[], None]:
    """Record the launches of one step, without running it; what is returned replays them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class StepGraphs:
    """Runs steps by key (what is fixed in their launches), eagerly or from a captured graph."""

    def __init__(
        self,
        enabled: bool,
        tell: Callable[[str], None],
        capture: Callable[[Callable[[], None]], Callable[[], Any]] = capture,
    ):
        self.enabled, self.tell, self.capture = enabled, tell, capture
        self._graphs: dict[Hashable, Callable[[], Any]] = {}
        self._seen: dict[Hashable, int] = {}

    def forget(self) -> None:
        """The buffers have moved."""
        self._graphs.clear()
        self._seen.clear()

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """One step of this key."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph()
            return
        self._seen[key] = self._seen.get(key, 0) + 1
        if self.enabled and self._seen[key] > EAGER_STEPS:
            try:
                self._graphs[key] = self.capture(step)
            except RuntimeError as error:
                self.enabled = False
                self.tell(f"decode steps run without CUDA graphs: {str(error).splitlines()[0]}")
            else:
                self._graphs[key]()
                return
        step()
