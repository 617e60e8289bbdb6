"""What happens to servers while runs sample from them: for the reader, and for the records of those runs."""

import threading
from collections.abc import Sequence

from retrain.records.observer import Observer
from retrain.training.run import Run


class ServerEvents:
    """Passes messages about servers to ``observer``, and to the log and the notes of every run of a cohort.

    Messages come from any thread. Those from before the runs exist are kept for ``attach``.
    """

    def __init__(self, observer: Observer):
        self._observer, self._lock = observer, threading.Lock()
        self._early: list[tuple[str, str]] = []
        self._runs: Sequence[Run] | None = None

    def message(self, text: str, level: str = "info") -> None:
        """Show and record a message; ``level`` is info, warning or error."""
        self._observer.message(text, level)
        self.record(text, level)

    def record(self, text: str, level: str = "info") -> None:
        with self._lock:
            if self._runs is None:
                self._early.append((text, level))
            for run in self._runs or ():
                if run.active:
                    run.recorder.record_server(run.step, text, level)

    def attach(self, runs: Sequence[Run]) -> None:
        with self._lock:
            self._runs, early = runs, self._early
        for message in early:
            self.record(*message)

    def detach(self) -> None:
        """Record nothing any more: the runs have ended."""
        with self._lock:
            self._runs = ()
