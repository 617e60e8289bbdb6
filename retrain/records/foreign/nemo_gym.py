"""Rollouts of NeMo Gym 0.7: ``<output>.jsonl`` with a line for each graded answer, and the files beside it.

Rollouts that fail are not in ``<output>.jsonl`` but, once for each attempt and without a prompt, in
``<output>_failures.jsonl``; both are read, because a condition that crashes more would look better otherwise.
``<output>_materialized_inputs.jsonl`` has the prompts of all planned rollouts. ``<output>_aggregate_metrics.json`` has
NeMo Gym's own numbers, without the failures.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from retrain.errors import UsageError
from retrain.records.foreign.json_files import first_row, json_document, json_rows, number, numbers, problem_key
from retrain.records.foreign.table import Format, MetricFacts, ReadRequest, ResultRow
from retrain.records.schema.base import Row

FAILURES, PLANNED, AGGREGATED = "_failures.jsonl", "_materialized_inputs.jsonl", "_aggregate_metrics.json"
# Keys of ``responses_create_params`` that make the problem; the others are settings of sampling
PROMPT_KEYS = ("input", "instructions", "tools", "prompt")

Key = tuple[int, int]  # Task and rollout, which are the same in all files of one output


def _recognises(path: Path) -> bool:
    if path.name.endswith((FAILURES, PLANNED, AGGREGATED)):
        return True
    row = first_row(path) if path.suffix == ".jsonl" else {}
    return "responses_create_params" in row and ("reward" in row or "response" in row)


def _choose(files: Sequence[Path]) -> Sequence[Path]:
    """Return the outputs, and aggregated metrics without an output; ``_rows`` finds the files beside an output."""
    outputs = [path for path in files if not path.name.endswith((FAILURES, PLANNED, AGGREGATED))]
    read = {_beside(path, AGGREGATED) for path in outputs}
    return outputs + [path for path in files if path.name.endswith(AGGREGATED) and path not in read]


def _rows(path: Path, request: ReadRequest) -> Iterator[ResultRow]:
    aggregated = path if path.name.endswith(AGGREGATED) else _beside(path, AGGREGATED)
    if path != aggregated and request.needs("reward"):
        yield from _answers(path)
    if aggregated.is_file():
        yield from _numbers(aggregated, request)


def _numbers(path: Path, request: ReadRequest) -> Iterator[ResultRow]:
    """Yield the numbers of every agent; ``mean/reward`` is the mean of the answers' ``reward``."""
    try:
        agents = [(str(entry["agent_ref"]["name"]), dict(entry["agent_metrics"])) for entry in json_document(path)]
    except (TypeError, KeyError, ValueError) as error:
        raise UsageError(f"{path} is not in the format of NeMo Gym: {error!r}") from error
    for line, (agent, metrics) in enumerate(agents, start=1):
        means = {"reward": metrics["mean/reward"]} if "mean/reward" in metrics else {}
        for metric, value in numbers({**metrics, **means}.items(), request, str(path)):
            yield ResultRow(metric, value, set=agent, line=line)


def _answers(path: Path) -> Iterator[ResultRow]:
    """Yield an answer for each planned rollout. A failed or masked one is not graded; one that is in neither file makes
    the run unfinished."""
    planned = {key: row._replace(state="unfinished") for key, row in _rollouts(_beside(path, PLANNED))}
    failed = dict(_rollouts(_beside(path, FAILURES)))
    graded: dict[Key, ResultRow] = {}
    for key, row in _rollouts(path):
        if graded.setdefault(key, row)._replace(line=row.line) != row:
            raise UsageError(
                f"{path}:{row.line} has the task and the rollout of line {graded[key].line} with another prompt or "
                "reward: give each output of NeMo Gym as a separate file"
            )
    problems: dict[int, str] = {}
    # Planned prompts count first, because some agents write the conversation into the prompt of a graded rollout
    for (task, _), row in (*planned.items(), *graded.items()):
        if row.problem is not None:
            problems.setdefault(task, row.problem)
    for (task, _), row in (planned | failed | graded).items():
        if task not in problems:
            raise UsageError(
                f"{path}: no file has the prompt of task {task}, so its problem is unknown; restore "
                f"{_beside(path, PLANNED).name}, or compare the numbers in {_beside(path, AGGREGATED).name}"
            )
        yield row._replace(problem=problems[task])


def _rollouts(path: Path) -> Iterator[tuple[Key, ResultRow]]:
    for line, row in json_rows(path) if path.is_file() else ():
        try:
            key, agent = (int(row["_ng_task_index"]), int(row["_ng_rollout_index"])), str(row["agent_ref"]["name"])
            problem = _problem(row)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path}:{line} is no rollout of NeMo Gym 0.7: {error!r}") from error
        value = number(None if row.get("mask_sample") else row.get("reward"), f"{path}:{line}: reward")
        yield key, ResultRow("reward", value, None, agent, problem, sample=None, line=line)


def _problem(row: Row) -> str | None:
    """Return the key of a rollout's prompt. NeMo Gym adds the type of messages and empty values to the prompts of a
    data set, which do not belong to the key."""
    parameters = row.get("responses_create_params")
    if not isinstance(parameters, dict):
        return None
    prompt = {key: parameters[key] for key in PROMPT_KEYS if parameters.get(key)}
    if isinstance(messages := prompt.get("input"), list):
        prompt["input"] = [{**message, "type": "message"} for message in messages]
    return problem_key(prompt)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.stem + ending)


FORMAT = Format(
    tool="NeMo Gym",
    patterns=("**/*.jsonl", f"**/*{AGGREGATED}"),
    recognises=_recognises,
    rows=_rows,
    choose=_choose,
    facts=lambda path: dict.fromkeys(("reward", "mean/reward"), MetricFacts(higher_is_better=True)),
)
