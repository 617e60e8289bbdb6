"""Rollouts of NeMo Gym 0.7: ``<output>.jsonl`` with a line for each graded answer, and the files beside it.

Rollouts that fail are not in ``<output>.jsonl`` but, once for each attempt, in ``<output>_failures.jsonl``; both are
read, because a condition that crashes more would look better otherwise. ``<output>_materialized_inputs.jsonl`` has the
prompts of all planned rollouts. ``<output>_aggregate_metrics.json`` has NeMo Gym's own numbers, without the failures.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from retrain.errors import NotReadable, UsageError
from retrain.files import read_json
from retrain.records.foreign import integer
from retrain.records.foreign.answers import begins_with, content_key, first_row, json_rows, number
from retrain.records.foreign.table import HELDOUT_SET, Format, MetricFacts, Request, ResultRow, RunState
from retrain.records.schema.base import Values

FAILURES, PLANNED, AGGREGATED = "_failures.jsonl", "_materialized_inputs.jsonl", "_aggregate_metrics.json"
TASK, ROLLOUT = "_ng_task_index", "_ng_rollout_index"
# Keys of ``responses_create_params`` that make the problem. The others are settings of sampling: the model's name, for
# one, and with ``num_repeats_add_seed`` a seed in ``metadata.extra_body``, differ between answers to one problem.
PROMPT_KEYS = ("input", "instructions", "tools", "prompt", "metadata")

# Columns of a planned rollout that do not belong to the data set, besides those that begin with ``_ng_``
ROUTING = {"responses_create_params", "agent_ref", "task_source", "skills_ref"}

# Task and rollout, which are the same in all files of one output. Where a line names none: a negative number of the
# file, and the line
_Key = tuple[int, int]


class _Rollout(NamedTuple):
    set: str
    problem: str | None
    value: float | None
    state: RunState
    line: int


def recognises(path: Path) -> bool:
    if path.name.endswith(AGGREGATED):
        return begins_with(path, '"agent_ref"')
    row = first_row(path) if path.suffix == ".jsonl" and not path.name.endswith((FAILURES, PLANNED)) else {}
    return "responses_create_params" in row and ("reward" in row or "response" in row)


def choose(files: Sequence[Path]) -> Sequence[Path]:
    """Leave out the files that are read with their ``<output>.jsonl``."""
    outputs = [path for path in files if not path.name.endswith((FAILURES, PLANNED, AGGREGATED))]
    read = {_beside(path, AGGREGATED) for path in outputs}
    return outputs + [path for path in files if path.name.endswith(AGGREGATED) and path not in read]


def rows(path: Path, request: Request) -> Iterator[ResultRow]:
    if path.name.endswith(AGGREGATED):
        yield from _numbers(path)
        return
    if path.name.endswith((FAILURES, PLANNED)):
        raise UsageError(f"{path} is no run: it is read with the rollouts' file beside it, so name that file")
    if request.metric in (None, "reward"):
        yield from _answers(path)
        if (aggregated := _beside(path, AGGREGATED)).is_file():
            means = (row for row in _numbers(aggregated) if row.metric == "mean/reward")
            yield from (row._replace(metric="reward") for row in means)


def facts(path: Path) -> Mapping[str, MetricFacts]:
    return dict.fromkeys(("reward", "mean/reward"), MetricFacts(higher_is_better=True))


def _answers(path: Path) -> Iterator[ResultRow]:
    """Yield an answer for each planned rollout. A failed or masked one is not graded; one that is in neither file makes
    the run unfinished."""
    planned = _read(_beside(path, PLANNED), -3, "unfinished")
    failed = _read(_beside(path, FAILURES), -2)
    graded = _read(path, -1, is_graded=True)
    # Planned prompts count first, because some agents write the conversation into the prompt of a graded rollout
    problems = _problems(failed) | _problems(graded) | _distinct(_problems(planned), _beside(path, PLANNED))
    samples: dict[tuple[str, str], int] = {}
    for (task, _), rollout in sorted((planned | failed | graded).items()):
        problem = problems.get(task) or rollout.problem
        if problem is None:
            raise UsageError(
                f"{path}: no file has the prompt of task {task}, so its problem is unknown; restore "
                f"{_beside(path, PLANNED).name}, or compare the numbers in {_beside(path, AGGREGATED).name}"
            )
        sample = samples[rollout.set, problem] = samples.get((rollout.set, problem), -1) + 1
        state, line = rollout.state, rollout.line
        yield ResultRow("reward", rollout.value, None, rollout.set, problem, sample, state=state, line=line)


def _problems(rollouts: Mapping[_Key, _Rollout]) -> dict[int, str]:
    """Return the problem of every task."""
    return {task: rollout.problem for (task, _), rollout in rollouts.items() if task >= 0 and rollout.problem}


def _distinct(problems: dict[int, str], planned: Path) -> dict[int, str]:
    """Return the problems of planned tasks; if several tasks have the same prompt, with a key of all columns of the
    data set. Games, for one, have the same prompt with another seed."""
    if len(set(problems.values())) == len(problems):
        return problems
    keys: dict[int, str] = {}
    for _, row in json_rows(planned):
        columns = {key: value for key, value in row.items() if not key.startswith("_ng_") and key not in ROUTING}
        keys[integer(row.get(TASK), -1)] = content_key([_problem(row), columns])
    return {task: keys[task] for task in problems}


def _read(path: Path, file: int, state: RunState = "unknown", is_graded: bool = False) -> dict[_Key, _Rollout]:
    """Return the rollouts in a file, the last of several failed attempts; {} if the file is missing. Raises UsageError
    if a rollout was graded twice, as in files of several outputs that were joined."""
    rollouts: dict[_Key, _Rollout] = {}
    for line, row in json_rows(path) if path.is_file() else ():
        task, index = integer(row.get(TASK), -1), integer(row.get(ROLLOUT), -1)
        key = (task, index) if task >= 0 and index >= 0 else (file, line)
        reward = row.get("reward") if is_graded and not row.get("mask_sample") else None
        agent = row.get("agent_ref")
        name = agent.get("name") if isinstance(agent, dict) else row.get("_ng_environment_server")
        value = number(reward, f"{path}:{line} reward")
        rollout = _Rollout(str(name or HELDOUT_SET), _problem(row), value, state, line)
        first = rollouts.setdefault(key, rollout)
        if is_graded and first[:3] != rollout[:3]:
            raise UsageError(
                f"{path}:{line} has task {task}, rollout {index} with another prompt or reward than line {first.line}: "
                "give each output of NeMo Gym as a separate file"
            )
        rollouts[key] = rollout
    return rollouts


def _problem(row: Values) -> str | None:
    """Return the key of a rollout's prompt; None if the line has none."""
    parameters = row.get("responses_create_params")
    if isinstance(parameters, dict):
        prompt = {key: parameters[key] for key in PROMPT_KEYS if key in parameters}
        if isinstance(metadata := prompt.get("metadata"), dict):
            prompt["metadata"] = {key: value for key, value in metadata.items() if key != "extra_body"}
    else:
        prompt = row.get("task_input")
    content = _without_defaults(prompt)
    return content_key(content) if content else None


def _without_defaults(value: object) -> object:
    """Return JSON content without the values that NeMo Gym adds to the prompts of a data set, so that both have one
    key: empty ones, and the type of messages."""
    if isinstance(value, list):
        return [_without_defaults(item) for item in value]
    if not isinstance(value, dict):
        return value
    parts = {key: _without_defaults(part) for key, part in value.items() if (key, part) != ("type", "message")}
    return {key: part for key, part in parts.items() if part not in (None, "", [], {})}


def _numbers(path: Path) -> Iterator[ResultRow]:
    try:
        entries = read_json(path)
        for position, entry in enumerate(entries, start=1):
            for metric, value in entry["agent_metrics"].items():
                if isinstance(value, int | float):
                    name = entry["agent_ref"]["name"]
                    yield ResultRow(metric, number(value, f"{path} {metric}"), set=name, line=position)
    except OSError as error:
        raise NotReadable(path, error) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path} is not in the format of NeMo Gym: {error!r}") from error


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.stem + ending)


FORMAT = Format(
    tool="NeMo Gym",
    patterns=("**/*.jsonl", f"**/*{AGGREGATED}"),
    recognises=recognises,
    rows=rows,
    choose=choose,
    facts=facts,
)
