"""``custom``: a reward function of the user's own, run in worker processes with the same limits as ``math``.

The function's parameters say what it gets, by name:

    def score(completion, answer):                        # the text, the reference: enough for most
    def score(prompt, completion, answer, tags, metadata):
    def score(problem, completion):                       # problem: retrain.types.Problem

It returns a number or a ``RewardResult(total_reward, sample_metrics, tags)``; a coroutine is awaited. Two
parameters with other names get (completion, answer).

For charts, the function or its module may declare the ranges of its numbers (``reward_min``, ``reward_max``,
``metrics_ranges = {"steps": {"min": 0, "max": 20, "invert": True}}``); nothing else depends on it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.errors import PluginError, PluginMissing
from retrain.plugins import declared_ranges, existing_file, load_file, load_module, search_folders
from retrain.rewards.base import Item, Reward, checked, failed, guarded
from retrain.rewards.workers import WorkerPool
from retrain.types import Problem, RewardResult

MEMORY_BYTES = 8 << 30
ARGUMENTS: Mapping[str, Callable[[Problem, str], Any]] = {
    "problem": lambda problem, completion: problem,
    "prompt": lambda problem, completion: prompt_text(problem),
    "completion": lambda problem, completion: completion,
    "response": lambda problem, completion: completion,
    "answer": lambda problem, completion: problem.answer,
    "reference": lambda problem, completion: problem.answer,
    "tags": lambda problem, completion: problem.tags,
    "metadata": lambda problem, completion: problem.metadata,
}


class CustomReward(Reward):
    """Calls ``function`` of ``module``: a path to a ``.py`` file, or a module's name as ``import`` takes it.

    Both are looked up in ``base_dir`` (the TOML's folder), then in the current directory. The module is imported in
    the workers only. Raises PluginMissing when the file, module or function is missing, importing it fails, or a
    parameter is none of ``ARGUMENTS``. Its ``name`` is the function's.
    """

    def __init__(
        self,
        module: str,
        function: str,
        workers: int = 2,
        timeout_s: float = 10.0,
        base_dir: Path | None = None,
        table: str = "reward",
    ):
        self.name = function
        module = located(module, base_dir, table)
        self.pool = WorkerPool(
            "retrain.rewards.custom:scorer",
            {"module": module, "function": function, "folders": [str(folder) for folder in search_folders(base_dir)]},
            workers=workers,
            timeout_s=timeout_s,
            memory_bytes=MEMORY_BYTES,
            memory_kind="RLIMIT_DATA",  # a module that imports torch maps far more address space than it uses
        )
        try:
            self.pool.start()
            self.ranges = self.pool.facts.get("ranges", {})
        except PluginError as error:
            self.close()
            what = f"[{table}] custom_module = {module!r}, custom_function = {function!r}"
            raise PluginMissing(f"{what}: {error}") from None

    def grade_all(self, items: Sequence[Item]) -> list[RewardResult]:
        """Results in order; ``error`` holds what the function raises, or what is wrong with its return value."""
        jobs = [(_plain(problem), completion) for problem, completion in items]
        return [
            failed(reply.error) if reply.error is not None else guarded(_result, reply.value)
            for reply in self.pool.map(jobs)
        ]

    def close(self) -> None:
        """Kill the workers."""
        self.pool.close()


def is_path(module: str) -> bool:
    """Whether ``custom_module`` names a file rather than a module."""
    return module.endswith(".py") or "/" in module


def located(module: str, base_dir: Path | None, table: str = "reward") -> str:
    """``custom_module``, a file by its absolute path. Raises PluginMissing when there is no such file."""
    if not is_path(module):
        return module
    return str(existing_file(module, base_dir, f"[{table}] custom_module =", PluginMissing).resolve())


def prompt_text(problem: Problem) -> str:
    """The problem as text: the prompt itself, or the contents of its messages joined by blank lines."""
    if isinstance(problem.prompt, str):
        return problem.prompt
    return "\n\n".join(message["content"] for message in problem.prompt)


def scorer(module: str, function: str, folders: Sequence[str] = ()) -> Callable[[tuple[Problem, str]], dict[str, Any]]:
    """The worker's entry: the user's function, loaded, as a function of a job. Raises PluginError."""
    if is_path(module):
        loaded = load_file(Path(module), "custom_reward")
    else:
        loaded = load_module(module, [Path(folder) for folder in folders])
    score = getattr(loaded, function, None)
    if not callable(score):
        defined = sorted(
            n for n, v in vars(loaded).items() if inspect.isfunction(v) and v.__module__ == loaded.__name__
        )
        raise PluginError(f"it has no function {function!r}; it defines {', '.join(defined) or 'none'}")
    call = caller(score)

    def grade(job: tuple[Problem, str]) -> dict[str, Any]:
        returned = call(*job)
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
        result = checked(returned)
        return {
            "total_reward": result.total_reward,
            "sample_metrics": result.sample_metrics,
            "tags": list(result.tags),
            "components": {},
            "correct": None if result.correct is None else bool(result.correct),
            "format_ok": None if result.format_ok is None else bool(result.format_ok),
            "error": result.error,
        }

    grade.facts = {"ranges": declared_ranges(score, loaded)}  # type: ignore[attr-defined]
    return grade


def caller(function: Callable[..., Any]) -> Callable[[Problem, str], Any]:
    """``function`` as one of (problem, completion), its parameters filled by name or, failing that, by position.

    Raises PluginError for required parameters that are none of ``ARGUMENTS``.
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (*positional, inspect.Parameter.KEYWORD_ONLY)]
    required = [p for p in named if p.default is p.empty]
    unknown = [p.name for p in required if p.name not in ARGUMENTS or p.kind is p.POSITIONAL_ONLY]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    wanted = list(ARGUMENTS) if takes_any else [p.name for p in named if p.name in ARGUMENTS]
    if wanted and not unknown:
        return lambda problem, completion: function(**{name: ARGUMENTS[name](problem, completion) for name in wanted})
    if len(required) == 2 and all(p.kind in positional for p in required):
        return lambda problem, completion: function(completion, problem.answer)
    fault = f"parameter {unknown[0]!r} is unknown" if unknown else "it takes no parameters"
    raise PluginError(f"{fault}; a reward takes any of: {', '.join(ARGUMENTS)}")


def _result(value: dict[str, Any]) -> RewardResult:
    return RewardResult(**{**value, "tags": tuple(value["tags"])})


def _plain(problem: Problem) -> Problem:
    """``problem`` as something every worker can unpickle: metadata of other types than JSON's become text."""
    prompt = problem.prompt if isinstance(problem.prompt, str) else tuple(dict(message) for message in problem.prompt)
    return Problem(problem.id, prompt, problem.answer, problem.tags, _json(problem.metadata))


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
