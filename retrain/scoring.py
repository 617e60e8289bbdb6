"""Grading beside decoding: a group is scored as soon as its completions are there, while others are still drawn."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np

from retrain.record.environment import without_keys
from retrain.rewards import Grader
from retrain.types import Completion, Group, Prompt, RewardResult


class Scoring:
    """Grades the groups of one ``Engine.sample`` call in a thread of its own; ``jobs[i]`` belongs to request i.

    Pass ``add`` as the engine's ``finished``, then ask for ``groups``. What has gathered while a grading was under
    way is graded together, so that a slow judge still sees many completions at once.
    """

    def __init__(self, jobs: Sequence[tuple[Grader, Prompt]]):
        self.jobs = list(jobs)
        self._queue: queue.SimpleQueue[tuple[int, list[Completion]] | None] = queue.SimpleQueue()
        self._groups: list[Group | None] = [None] * len(self.jobs)
        self._errors: dict[int, Exception] = {}
        self._thread = threading.Thread(target=self._work, name="scoring", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._queue.put(None)
        if kind is None or issubclass(kind, Exception):  # after Ctrl-C nobody waits for a slow grader
            self._thread.join()

    def add(self, request: int, completions: list[Completion]) -> None:
        """Grade these completions of a request; may be called from any thread."""
        self._queue.put((request, completions))

    def groups(self) -> list[Group | Exception]:
        """Every request's group with its rewards (advantages still NaN), or what its grader raised; waits for all.

        Call once, after the last ``add``.
        """
        self._queue.put(None)
        self._thread.join()
        found: list[Group | Exception] = []
        for request, group in enumerate(self._groups):
            found.append(group if group is not None else self._errors[request])
        return found

    def _work(self) -> None:
        while (first := self._queue.get()) is not None:
            batch = [first]
            while not self._queue.empty():
                item = self._queue.get()
                if item is None:
                    self._grade(batch)
                    return
                batch.append(item)
            self._grade(batch)

    def _grade(self, batch: Sequence[tuple[int, list[Completion]]]) -> None:
        """One call per grader for all that came together."""
        by_grader: dict[int, list[tuple[int, list[Completion]]]] = {}
        for request, completions in batch:
            by_grader.setdefault(id(self.jobs[request][0]), []).append((request, completions))
        for part in by_grader.values():
            grader = self.jobs[part[0][0]][0]
            items = [(self.jobs[request][1].problem, c.text) for request, batch in part for c in batch]
            try:
                results = iter(grader.grade(items))
                for request, completions in part:
                    rewards = [_told(next(results)) for _ in completions]
                    prompt = self.jobs[request][1]
                    self._groups[request] = Group(prompt, completions, rewards, np.full(len(completions), np.nan))
            except Exception as error:  # belongs to the runs of this grader; the trainer ends them
                self._errors.update({request: error for request, _ in part})


def _told(reward: RewardResult) -> RewardResult:
    """The reward as it may be recorded: what it says went wrong holds no key or token of the environment."""
    return replace(reward, error=without_keys(reward.error)) if reward.error else reward
