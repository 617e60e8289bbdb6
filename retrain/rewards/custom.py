"""``custom``: reward functions of the user's own, run in worker processes with the same limits as ``math``.

``functions`` says which parameters they may have. For charts, a function or its module may declare the ranges of its
numbers (``reward_min``, ``reward_max``, ``metrics_ranges = {"steps": {"min": 0, "max": 20, "invert": True}}``); nothing
else depends on it.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from retrain.errors import PluginError, PluginMissing
from retrain.files import existing_file, search_folders
from retrain.rewards.base import Item, Reward, failed
from retrain.rewards.functions import is_path
from retrain.rewards.workers import WorkerPool
from retrain.types import Problem, RewardResult

MEMORY_BYTES = 8 << 30


class CustomReward(Reward):
    """Calls ``function`` of ``module``: a path to a ``.py`` file, or a module's name as ``import`` takes it. A list of
    functions is added up.

    Modules are looked up in ``base_dir`` (the TOML's folder), then in the current directory, and imported in the
    workers only. Raises PluginMissing when the file, module or function is missing, importing it fails, or a required
    parameter has an unknown name. Its ``name`` is the function's.
    """

    def __init__(
        self,
        module: str,
        function: str | Sequence[str],
        workers: int = 2,
        timeout_s: float = 10.0,
        base_dir: Path | None = None,
        table: str = "reward",
    ):
        self.name = function if isinstance(function, str) else "custom"
        module = located(module, base_dir, table)
        self.pool = WorkerPool(
            "retrain.rewards.functions:scorer",
            {"module": module, "functions": function, "folders": [str(folder) for folder in search_folders(base_dir)]},
            workers=workers,
            timeout_s=timeout_s,
            memory_bytes=MEMORY_BYTES,
            memory_kind="RLIMIT_DATA",  # a module that imports torch maps far more address space than it uses
        )
        try:
            self.pool.start()
        except PluginError as error:
            self.close()
            what = f"[{table}] custom_module = {module!r}, custom_function = {function!r}"
            raise PluginMissing(f"{what}: {error}") from None
        facts = self.pool.facts
        self.ranges = facts["ranges"]
        self.columns = tuple(facts["columns"])
        self._functions, self._by_batch = tuple(facts["names"]), bool(facts["by_batch"])

    @property
    def names(self) -> tuple[str, ...]:
        """Return the components: the function itself, or each of several."""
        return self._functions if len(self._functions) > 1 else (self.name,)

    def grade_all(self, items: Sequence[Item]) -> list[RewardResult]:
        """Return results in order; ``error`` is what a function raised, or what is wrong with its return value.

        A function that gets lists is called once for all completions of a problem, and has their time together.
        """
        plain = {id(problem): _plain(problem) for problem, _ in items}
        whole = [(plain[id(problem)], str(text), list(getattr(text, "token_ids", ()))) for problem, text in items]
        jobs = [list(same) for _, same in groupby(whole, key=lambda each: each[0].id)] if self._by_batch else [
            [each] for each in whole
        ]  # fmt: skip
        longest = self.pool.timeout_s * max(map(len, jobs), default=1)
        results = []
        for job, reply in zip(jobs, self.pool.map(jobs, longest), strict=True):
            if reply.error is not None:
                results += [failed(reply.error) for _ in job]
            else:
                results += [self._result(value) for value in reply.value]
        return results

    def close(self) -> None:
        self.pool.close()

    def _result(self, value: dict[str, Any]) -> RewardResult:
        result = RewardResult(**{**value, "tags": tuple(value["tags"])})
        if len(self._functions) == 1 and result.total_reward is not None:
            result.components = {self.name: result.total_reward, **result.components}
        return result


def located(module: str, base_dir: Path | None, table: str = "reward") -> str:
    """Return ``custom_module``, a file by its absolute path. Raises PluginMissing when there is no such file."""
    if not is_path(module):
        return module
    return str(existing_file(module, base_dir, f"[{table}] custom_module =", PluginMissing).resolve())


def _plain(problem: Problem) -> Problem:
    """Return a problem that every worker can unpickle: metadata of other types than JSON's become text."""
    prompt = problem.prompt if isinstance(problem.prompt, str) else tuple(dict(message) for message in problem.prompt)
    return Problem(problem.id, prompt, problem.answer, problem.tags, _json(problem.metadata))


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
