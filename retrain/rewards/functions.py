"""The inside of a worker that runs reward functions of the user's own: what they are called with, and what they return.

A function's parameters say which of two forms it has, and what it gets, by name:

    def score(completion, answer):                          # one completion
    def score(problem, completion, tags, metadata):         # any of ``ARGUMENTS``
    def score(prompts, completions, solution, **kwargs):    # all completions of a prompt at once, as in TRL

The first form returns a number or a ``RewardResult``; two parameters with other names get (completion, answer). The
second gets lists: ``prompts``, ``completions``, ``completion_ids`` and the columns of the data, and returns a list of
numbers, results, and None where the reward does not apply. Prompts and completions are lists of messages where the
data's prompts are. Either may be a coroutine function, or a class with ``__call__`` that is made without arguments.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from retrain.errors import PluginError, RetrainError
from retrain.plugins import declared_ranges, described, load_file, load_module
from retrain.rewards.base import checked, failed
from retrain.rewards.weighted import weighted_sum
from retrain.types import Problem, RewardResult

Graded = tuple[Problem, str, Sequence[int]]  # A problem, the text of a completion and its token ids
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
BATCH_ARGUMENTS = ("prompts", "completions", "completion_ids")
LOGGERS = ("log_extra", "log_metric")
UNAVAILABLE = ("trainer_state", "environments")  # Arguments of TRL's trainer that do not exist here
NO_COLUMNS = ("prompt", "completion", "completion_ids")  # Columns that TRL does not pass on
KNOWN = (
    f"a reward takes any of: {', '.join(ARGUMENTS)}; or, as in TRL, {', '.join(BATCH_ARGUMENTS)} and columns of the "
    "data by name"
)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class RewardFunction:
    """A function of the user's own with the names that it is called with.

    ``by_batch``: it gets lists. ``takes_any``: it has ``**kwargs``. ``columns`` are the columns of the data that it
    cannot do without; ``positional``: it gets (completion, answer), whatever its parameters are called.
    """

    name: str
    call: Callable[..., Any]
    arguments: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    by_batch: bool = False
    takes_any: bool = False
    positional: bool = False


@dataclass
class Logged:
    """What a function in TRL's form has logged beside its rewards."""

    metrics: dict[str, float | None] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[str(name)] = float(value)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        self.extra.setdefault(str(column), []).extend(values)

    def of(self, index: int) -> dict[str, float | None]:
        """Return the numbers of one completion; texts are not recorded."""
        values = {name: column[index] for name, column in self.extra.items() if index < len(column)}
        return {**self.metrics, **{name: float(v) for name, v in values.items() if isinstance(v, bool | int | float)}}


def scorer(
    module: str, functions: str | Sequence[str], folders: Sequence[str] = ()
) -> Callable[[Sequence[Graded]], list[dict[str, Any]]]:
    """Load the user's functions and return the worker's function of a job, which is one or more completions of a
    problem. Raises PluginError for what is missing or has parameters that cannot be filled."""
    try:
        if is_path(module):
            loaded = load_file(Path(module), "custom_reward")
        else:
            loaded = load_module(module, [Path(folder) for folder in folders])
    except (Exception, SystemExit) as error:  # whatever a user's module does when it is imported
        raise PluginError(f"importing it failed: {described(error)}") from error
    wanted = [functions] if isinstance(functions, str) else functions
    found = [each for name in wanted for each in _named(loaded, name)]
    made = []
    for name, function in found:
        try:
            made.append(read_signature(name, _instance(function, name)))
        except PluginError as error:
            raise PluginError(f"{name}: {error}" if len(found) > 1 else str(error)) from error
    names = [function.name for function in made]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise PluginError(f"two of its functions are named {twice!r}: their metrics would be one")

    def grade(job: Sequence[Graded]) -> list[dict[str, Any]]:
        return [_plain(result) for result in graded(made, job)]

    ranges: dict[str, Any] = {}
    for function in made:
        own = declared_ranges(function.call, loaded)
        if len(made) > 1 and "reward" in own:  # of the total nothing is declared
            own[function.name] = own.pop("reward")
        ranges |= own
    grade.facts = {  # type: ignore[attr-defined]
        "ranges": ranges,
        "names": names,
        "by_batch": any(function.by_batch for function in made),
        "columns": list(dict.fromkeys(column for function in made for column in function.columns)),
    }
    return grade


def is_path(module: str) -> bool:
    return module.endswith(".py") or "/" in module


def prompt_text(problem: Problem) -> str:
    """Return the problem as text: the prompt itself, or the contents of its messages joined by blank lines."""
    if isinstance(problem.prompt, str):
        return problem.prompt
    return "\n\n".join(message["content"] for message in problem.prompt)


def columns_of(problem: Problem) -> dict[str, Any]:
    """Return the columns of a problem's row that a function in TRL's form gets by name."""
    columns = {"answer": problem.answer, "tags": list(problem.tags), **problem.metadata}
    return {name: value for name, value in columns.items() if name not in NO_COLUMNS}


def _named(loaded: ModuleType, name: str) -> Iterator[tuple[str, Any]]:
    """Return what an attribute of the module holds by its name: itself, or each of a list. Raises PluginError."""
    found = getattr(loaded, name, None)
    if isinstance(found, list | tuple) and found:
        yield from ((getattr(each, "__name__", None) or type(each).__name__, each) for each in found)
    elif callable(found):
        yield name, found
    else:
        functions = (n for n, v in vars(loaded).items() if inspect.isfunction(v) and v.__module__ == loaded.__name__)
        raise PluginError(f"it has no function {name!r}; it defines {', '.join(sorted(functions)) or 'none'}")


def _instance(found: Any, name: str) -> Callable[..., Any]:
    """Return a function as it is and an object of a class. Raises PluginError for what cannot be called."""
    if inspect.isclass(found):
        try:
            found = found()
        except Exception as error:  # whatever its __init__ raises
            raise PluginError(f"the class {name!r} cannot be made without arguments: {described(error)}") from error
    if not callable(found):
        raise PluginError(f"{name!r} has no __call__")
    return found


def read_signature(name: str, function: Callable[..., Any]) -> RewardFunction:
    """Return the function with the arguments that its parameters name. Raises PluginError for a required parameter
    that nothing fills; the message lists the known names."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise PluginError(f"the parameters of {name!r} cannot be read: wrap it in a function") from None
    named = [p for p in parameters if p.kind in (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)]
    required = [p for p in named if p.default is p.empty]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    by_position = [p.name for p in required if p.kind is p.POSITIONAL_ONLY]
    names = [p.name for p in named if p.kind is not p.POSITIONAL_ONLY]
    if any(each in BATCH_ARGUMENTS for each in names):
        unknown = [p.name for p in required if p.name in ("prompt", "completion") or p.name in by_position]
        if absent := next((p.name for p in required if p.name in UNAVAILABLE), None):
            raise PluginError(f"parameter {absent!r} is TRL's trainer's and not available here: give it a default")
        if unknown:
            raise PluginError(f"parameter {unknown[0]!r} is unknown; {KNOWN}")
        columns = [p.name for p in required if p.name not in (*BATCH_ARGUMENTS, *LOGGERS)]
        arguments = tuple(each for each in names if each not in UNAVAILABLE)
        return RewardFunction(name, function, arguments, tuple(columns), by_batch=True, takes_any=takes_any)
    unknown = [p.name for p in required if p.name not in ARGUMENTS or p.name in by_position]
    wanted = tuple(ARGUMENTS) if takes_any else tuple(each for each in names if each in ARGUMENTS)
    if wanted and not unknown:
        return RewardFunction(name, function, wanted)
    if len(required) == len(unknown) == 2 and all(p.kind in _POSITIONAL for p in required):
        return RewardFunction(name, function, positional=True)
    fault = f"parameter {unknown[0]!r} is unknown" if unknown else "it takes no parameters"
    raise PluginError(f"{fault}; {KNOWN}")


# -- grading ------------------------------------------------------------------------------------------------------


def graded(functions: Sequence[RewardFunction], job: Sequence[Graded]) -> list[RewardResult]:
    """Return one result for each completion. Several functions are added up, each a component of its name."""
    started = [_started(function, job) for function in functions]
    waiting = [value for values, _ in started for value in values if inspect.isawaitable(value)]
    awaited = iter(asyncio.run(_await_all(waiting)) if waiting else ())
    columns = []
    for function, (values, logged) in zip(functions, started, strict=True):
        values = [next(awaited) if inspect.isawaitable(value) else value for value in values]
        results = _of_batch(values[0], len(job)) if function.by_batch else [_result(value) for value in values]
        for index, result in enumerate(results):
            result.sample_metrics = {**result.sample_metrics, **logged.of(index)}
        columns.append(results)
    if len(functions) == 1:
        return columns[0]
    names = [function.name for function in functions]
    return [
        weighted_sum([(name, 1.0, 0.0, part) for name, part in zip(names, parts, strict=True)])
        for parts in zip(*columns, strict=True)
    ]


def _started(function: RewardFunction, job: Sequence[Graded]) -> tuple[list[Any], Logged]:
    """Call the function: values, awaitables or the exceptions that were raised, one for each completion or one for all
    of them. No event loop runs meanwhile, since a function may start one itself."""
    logged = Logged()
    if function.by_batch:
        return [_tried(function.call, **_batch(function, job, logged))], logged
    values = []
    for problem, completion, _ in job:
        if function.positional:
            values.append(_tried(function.call, completion, problem.answer))
        else:
            given = {name: ARGUMENTS[name](problem, completion) for name in function.arguments}
            values.append(_tried(function.call, **given))
    return values, logged


def _batch(function: RewardFunction, job: Sequence[Graded], logged: Logged) -> dict[str, Any]:
    """Return the arguments of a function in TRL's form."""
    rows = [columns_of(problem) for problem, _, _ in job]
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    columns |= {name: [None] * len(job) for name in function.columns if name not in columns}
    texts = isinstance(job[0][0].prompt, str)
    standard = {
        "prompts": [problem.prompt if texts else [dict(m) for m in problem.prompt] for problem, _, _ in job],  # type: ignore[arg-type]
        "completions": [text if texts else [{"role": "assistant", "content": text}] for _, text, _ in job],
        "completion_ids": [list(ids) for _, _, ids in job],
        "log_extra": logged.log_extra,
        "log_metric": logged.log_metric,
    }
    every = {**columns, **standard}
    return every if function.takes_any else {name: every[name] for name in function.arguments if name in every}


def _tried(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except MemoryError:  # this process is to be replaced
        raise
    except Exception as error:
        return error


async def _await_all(waiting: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*waiting, return_exceptions=True)


def _of_batch(returned: Any, count: int) -> list[RewardResult]:
    """Return what a function in TRL's form returned, one result for each completion. None does not apply."""
    if isinstance(returned, BaseException):
        return [_result(returned) for _ in range(count)]
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


def _result(value: Any) -> RewardResult:
    if isinstance(value, MemoryError):
        raise value
    if isinstance(value, BaseException):
        return failed(str(value) if isinstance(value, RetrainError) else described(value))
    return checked(value)


def _plain(result: RewardResult) -> dict[str, Any]:
    return {
        "total_reward": result.total_reward,
        "sample_metrics": result.sample_metrics,
        "tags": list(result.tags),
        "components": result.components,
        "correct": None if result.correct is None else bool(result.correct),
        "format_ok": None if result.format_ok is None else bool(result.format_ok),
        "error": result.error,
    }
