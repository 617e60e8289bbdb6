"""``custom``: a user's reward functions, run in worker processes with limits of time and memory (8 GiB).

The names of a function's parameters decide its form and its arguments:

    def score(completion, answer):                          # one completion
    def score(problem, completion, tags, metadata):         # any of ``ARGUMENTS``
    def score(prompts, completions, solution, **kwargs):    # all completions of a prompt at once, as in TRL

A function of one completion returns a number or a ``RewardResult``; two parameters with other names get (completion,
answer). TRL's form gets lists: ``prompts``, ``completions``, ``completion_ids`` and the columns of the data. It returns
a list of numbers, results, and None where the reward does not apply. Prompts and completions are lists of messages if
the data's prompts are. Any form may be a coroutine function, or a class with ``__call__``, made without arguments.

For charts, a function or its module may declare the ranges of its numbers (``reward_min``, ``reward_max``,
``metrics_ranges = {"steps": {"min": 0, "max": 20, "invert": True}}``); nothing else depends on it.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

from retrain.errors import PluginError, PluginMissing, RetrainError
from retrain.files import existing_file, search_folders
from retrain.plugins import declared_ranges, described, load_file, load_module
from retrain.rewards.base import Item, Reward, checked, failed, prompt_text, weighted_sum
from retrain.rewards.workers import WorkerLimits, WorkerPool
from retrain.types import Problem, RewardResult

MEMORY_BYTES = 8 << 30
GradedCompletion = tuple[Problem, str, Sequence[int]]  # A problem, the text of a completion and its token ids
ARGUMENTS: Mapping[str, Callable[[Problem, str], object]] = {
    "problem": lambda problem, completion: problem,
    "prompt": lambda problem, completion: prompt_text(problem),
    "completion": lambda problem, completion: completion,
    "response": lambda problem, completion: completion,
    "answer": lambda problem, completion: problem.answer,
    "reference": lambda problem, completion: problem.answer,
    "tags": lambda problem, completion: problem.tags,
    "metadata": lambda problem, completion: problem.metadata,
}
BATCH_ARGUMENTS = ("prompts", "completions", "completion_ids")
LOGGERS = ("log_extra", "log_metric")
UNAVAILABLE = ("trainer_state", "environments")  # Arguments of TRL's trainer that do not exist here
NO_COLUMNS = ("prompt", "completion", "completion_ids")  # Columns that TRL does not pass to a reward
KNOWN = (
    f"a reward takes any of: {', '.join(ARGUMENTS)}; or, as in TRL, {', '.join(BATCH_ARGUMENTS)} and columns of the "
    "data by name"
)


class CustomReward(Reward):
    """Calls ``function`` of ``module`` (the path of a ``.py`` file or a module name); the rewards of a list of
    functions are added. Modules are looked up in ``base_dir`` (the TOML's folder), then in the current directory, and
    imported in the workers only. Raises PluginMissing if the file, module or function is missing, importing fails, or a
    required parameter has an unknown name. ``name`` is the function's name, or "custom" for a list."""

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
        if _is_path(module):
            module = str(existing_file(module, base_dir, f"[{table}] custom_module =", PluginMissing).resolve())
        self.pool = WorkerPool(
            "retrain.rewards.custom:Scorer",
            {"module": module, "functions": function, "folders": [str(folder) for folder in search_folders(base_dir)]},
            workers=workers,
            limits=WorkerLimits(timeout_s, MEMORY_BYTES),
        )
        try:
            self.pool.start()
        except PluginError as error:
            self.close()
            subject = f"[{table}] custom_module = {module!r}, custom_function = {function!r}"
            raise PluginMissing(f"{subject}: {error}") from None
        facts = self.pool.facts
        self.ranges, self.columns = facts["ranges"], tuple(facts["columns"])
        self.names = tuple(facts["names"]) if len(facts["names"]) > 1 else ()
        self._by_batch = bool(facts["by_batch"])

    def grade_all(self, items: Sequence[Item]) -> list[RewardResult]:
        """Return results in order; ``error`` is the exception of a function or the fault of its return value.

        A function in TRL's form is called once for all completions of a problem. The time limit of each call is the
        pool's, multiplied by the largest number of completions of one problem.
        """
        plain = {id(problem): _plain(problem) for problem, _ in items}
        graded = [(plain[id(problem)], str(text), list(getattr(text, "token_ids", ()))) for problem, text in items]
        if self._by_batch:
            jobs = [list(group) for _, group in groupby(graded, key=lambda item: item[0].id)]
        else:
            jobs = [[item] for item in graded]
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

    def _result(self, value: Mapping[str, Any]) -> RewardResult:
        result = RewardResult(**{**value, "tags": tuple(value["tags"])})
        if not self.names and result.total_reward is not None:
            result.components = {self.name: result.total_reward, **result.components}
        return result


def columns_of(problem: Problem) -> dict[str, object]:
    columns = {"answer": problem.answer, "tags": list(problem.tags), **problem.metadata}
    return {name: value for name, value in columns.items() if name not in NO_COLUMNS}


def _is_path(module: str) -> bool:
    return module.endswith(".py") or "/" in module


def _plain(problem: Problem) -> Problem:
    """Return a problem that every worker can unpickle: metadata that JSON cannot represent become text."""
    prompt = problem.prompt if isinstance(problem.prompt, str) else tuple(dict(message) for message in problem.prompt)
    metadata = json.dumps(
        dict(problem.metadata), skipkeys=True, default=lambda v: dict(v) if isinstance(v, Mapping) else str(v)
    )
    return replace(problem, prompt=prompt, metadata=json.loads(metadata))


# -- in the worker: reading the functions -------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardFunction:
    """A user's function and the names of the arguments that it gets. Without ``arguments`` it gets (completion,
    answer).

    ``by_batch``: it has TRL's form and gets lists. ``takes_any``: it has ``**kwargs``. ``columns``: columns that the
    data must have.
    """

    name: str
    call: Callable[..., object]
    arguments: tuple[str, ...] = ()
    takes_any: bool = False
    columns: tuple[str, ...] = ()
    by_batch: bool = False


class Scorer:
    """Grades jobs with the user's functions, in a worker. A job is one completion, or all completions of a problem.

    Raises PluginError if a function is missing or has parameters that cannot be filled.
    """

    def __init__(self, module: str, functions: str | Sequence[str], folders: Sequence[str] = ()):
        paths = [Path(folder) for folder in folders]
        try:
            loaded = load_file(Path(module), "custom_reward") if _is_path(module) else load_module(module, paths)
        except (Exception, SystemExit) as error:  # importing a user's module can raise anything
            raise PluginError(f"importing it failed: {described(error)}") from error
        self.functions = _read_functions(loaded, [functions] if isinstance(functions, str) else functions)
        self.facts = {
            "ranges": _ranges(self.functions, loaded),
            "names": [function.name for function in self.functions],
            "by_batch": any(function.by_batch for function in self.functions),
            "columns": list(dict.fromkeys(column for function in self.functions for column in function.columns)),
        }

    def __call__(self, job: Sequence[GradedCompletion]) -> list[dict[str, object]]:
        return [vars(result) for result in grade_job(self.functions, job)]


def _read_functions(loaded: ModuleType, names: Sequence[str]) -> list[RewardFunction]:
    named = [found for name in names for found in _named(loaded, name)]
    functions = []
    for name, function in named:
        try:
            functions.append(read_signature(name, _instance(function, name)))
        except PluginError as error:
            raise PluginError(f"{name}: {error}" if len(named) > 1 else str(error)) from error
    made = [function.name for function in functions]
    if twice := next((name for name in made if made.count(name) > 1), None):
        raise PluginError(f"two of its functions are named {twice!r}: their metrics would be one")
    return functions


def _named(loaded: ModuleType, name: str) -> Iterator[tuple[str, object]]:
    value = getattr(loaded, name, None)
    if isinstance(value, list | tuple) and value:
        yield from ((getattr(item, "__name__", None) or type(item).__name__, item) for item in value)
    elif callable(value):
        yield name, value
    else:
        functions = (n for n, v in vars(loaded).items() if inspect.isfunction(v) and v.__module__ == loaded.__name__)
        raise PluginError(f"it has no function {name!r}; it defines {', '.join(sorted(functions)) or 'none'}")


def _instance(value: object, name: str) -> Callable[..., object]:
    if inspect.isclass(value):
        try:
            value = value()
        except Exception as error:  # whatever its __init__ raises
            raise PluginError(f"the class {name!r} cannot be made without arguments: {described(error)}") from error
    if not callable(value):
        raise PluginError(f"{name!r} has no __call__")
    return value


def read_signature(name: str, function: Callable[..., object]) -> RewardFunction:
    """Return the function with the names of its arguments. Raises PluginError, which lists the known names, for an
    unknown required parameter."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise PluginError(f"the parameters of {name!r} cannot be read: wrap it in a function") from None
    by_name = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    read_form = _batch_form if any(argument in BATCH_ARGUMENTS for argument in by_name) else _completion_form
    return read_form(RewardFunction(name, function, by_name, takes_any), required)


def _batch_form(function: RewardFunction, required: Sequence[inspect.Parameter]) -> RewardFunction:
    """Return ``function`` in TRL's form, with the columns it requires. Raises PluginError for an unknown parameter."""
    if absent := next((p.name for p in required if p.name in UNAVAILABLE), None):
        raise PluginError(f"parameter {absent!r} is TRL's trainer's and not available here: give it a default")
    for parameter in required:
        if parameter.name in ("prompt", "completion") or parameter.name not in function.arguments:
            raise PluginError(f"parameter {parameter.name!r} is unknown; {KNOWN}")
    columns = tuple(p.name for p in required if p.name not in (*BATCH_ARGUMENTS, *LOGGERS))
    arguments = tuple(argument for argument in function.arguments if argument not in UNAVAILABLE)
    return replace(function, arguments=arguments, columns=columns, by_batch=True)


def _completion_form(function: RewardFunction, required: Sequence[inspect.Parameter]) -> RewardFunction:
    """Return ``function`` with those of ``ARGUMENTS`` that it takes, or without any if its two parameters have other
    names. Raises PluginError for an unknown parameter."""
    unknown = [p.name for p in required if p.name not in ARGUMENTS or p.name not in function.arguments]
    arguments = [argument for argument in ARGUMENTS if function.takes_any or argument in function.arguments]
    if arguments and not unknown:
        return replace(function, arguments=tuple(arguments))
    if len(required) == len(unknown) == 2 and all(p.kind is not p.KEYWORD_ONLY for p in required):
        return replace(function, arguments=())
    fault = f"parameter {unknown[0]!r} is unknown" if unknown else "it takes no parameters"
    raise PluginError(f"{fault}; {KNOWN}")


def _ranges(functions: Sequence[RewardFunction], loaded: ModuleType) -> dict[str, dict[str, float | bool]]:
    ranges: dict[str, dict[str, float | bool]] = {}
    for function in functions:
        declared = declared_ranges(function.call, loaded)
        if len(functions) > 1 and "reward" in declared:
            declared[function.name] = declared.pop("reward")
        ranges |= declared
    return ranges


# -- in the worker: grading ---------------------------------------------------------------------------------------


@dataclass
class LoggedValues:
    """Numbers and texts that a function in TRL's form logs in addition to its rewards."""

    metrics: dict[str, float | None] = field(default_factory=dict)
    extra: dict[str, list[object]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[str(name)] = float(value)

    def log_extra(self, column: str, values: Sequence[object]) -> None:
        self.extra.setdefault(str(column), []).extend(values)

    def numbers(self, index: int) -> dict[str, float | None]:
        """Return the logged numbers of the completion at ``index``; texts are not recorded."""
        values = {name: column[index] for name, column in self.extra.items() if index < len(column)}
        return {**self.metrics, **{name: float(v) for name, v in values.items() if isinstance(v, bool | int | float)}}


def grade_job(functions: Sequence[RewardFunction], job: Sequence[GradedCompletion]) -> list[RewardResult]:
    """Return one result per completion. The results of several functions are added, with a component for each."""
    logs = [LoggedValues() for _ in functions]
    # No event loop runs here while functions are called, because a function may start one itself.
    returned = [_call(function, job, logged) for function, logged in zip(functions, logs, strict=True)]
    if any(inspect.isawaitable(value) for values in returned for value in values):
        returned = asyncio.run(_settled(returned))
    columns = [
        _results(function, values, logged, len(job))
        for function, values, logged in zip(functions, returned, logs, strict=True)
    ]
    if len(functions) == 1:
        return columns[0]
    return [
        weighted_sum([(function.name, 1.0, 0.0, part) for function, part in zip(functions, parts, strict=True)])
        for parts in zip(*columns, strict=True)
    ]


def _call(function: RewardFunction, job: Sequence[GradedCompletion], logged: LoggedValues) -> list[object]:
    """Return values, awaitables or raised exceptions: one per completion, or a single value if ``by_batch``."""
    if function.by_batch:
        return [_tried(function.call, **_batch_arguments(function, job, logged))]
    values = []
    for problem, completion, _ in job:
        arguments = {name: ARGUMENTS[name](problem, completion) for name in function.arguments}
        positional = () if arguments else (completion, problem.answer)
        values.append(_tried(function.call, *positional, **arguments))
    return values


def _batch_arguments(
    function: RewardFunction, job: Sequence[GradedCompletion], logged: LoggedValues
) -> dict[str, object]:
    rows = [columns_of(problem) for problem, _, _ in job]
    columns = dict.fromkeys((*(name for row in rows for name in row), *function.columns))
    prompts = [p.prompt if isinstance(p.prompt, str) else [dict(message) for message in p.prompt] for p, _, _ in job]
    is_text = isinstance(prompts[0], str)
    arguments = {
        **{name: [row.get(name) for row in rows] for name in columns},
        "prompts": prompts,
        "completions": [text if is_text else [{"role": "assistant", "content": text}] for _, text, _ in job],
        "completion_ids": [list(ids) for _, _, ids in job],
        "log_extra": logged.log_extra,
        "log_metric": logged.log_metric,
    }
    return {name: value for name, value in arguments.items() if function.takes_any or name in function.arguments}


def _tried(call: Callable[..., object], *args: object, **kwargs: object) -> object:
    try:
        return call(*args, **kwargs)
    except MemoryError:  # this process is to be replaced
        raise
    except Exception as error:
        return error


async def _settled(returned: Sequence[Sequence[object]]) -> list[list[object]]:
    waiting = [value for values in returned for value in values if inspect.isawaitable(value)]
    awaited = iter(await asyncio.gather(*waiting, return_exceptions=True))
    return [[next(awaited) if inspect.isawaitable(value) else value for value in values] for values in returned]


def _results(
    function: RewardFunction, values: Sequence[object], logged: LoggedValues, count: int
) -> list[RewardResult]:
    results = _batch_results(values[0], count) if function.by_batch else [_result(value) for value in values]
    for index, result in enumerate(results):
        result.sample_metrics = {**result.sample_metrics, **logged.numbers(index)}
    return results


def _batch_results(returned: Any, count: int) -> list[RewardResult]:
    """Return the results of a function in TRL's form, one per completion. A None in ``returned`` means that the
    function does not apply to that completion."""
    values: Any = returned.tolist() if hasattr(returned, "tolist") else returned
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping):
        values = _tried(list, values)  # a generator may raise
    if isinstance(values, BaseException):
        return [_result(values) for _ in range(count)]
    if not isinstance(values, list) or len(values) != count:
        what = f"{len(values)} rewards" if isinstance(values, list) else type(returned).__name__
        reason = f"the reward returned {what}, not a list of {count}, one for each completion"
        return [failed(reason) for _ in range(count)]
    return [RewardResult(None) if value is None else _result(value) for value in values]


def _result(value: object) -> RewardResult:
    if isinstance(value, MemoryError):
        raise value
    if isinstance(value, BaseException):
        return failed(str(value) if isinstance(value, RetrainError) else described(value))
    return checked(value)
