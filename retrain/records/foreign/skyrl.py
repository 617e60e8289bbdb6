"""Evaluations of SkyRL 0.4: ``<export_path>/dumped_evals/global_step_N_evals``, and ``eval_only`` outside of training.

``aggregated_results.jsonl`` is one line with the numbers of all data sources (``eval/<source>/<metric>``).
``<source>.jsonl`` has a line for each answer. The training seed, ``trainer.seed``, is in neither file.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from retrain.errors import UsageError
from retrain.records.foreign.answers import content_key, first_row, indexed_by_value, json_rows, number
from retrain.records.foreign.table import Format, MetricFacts, Request, ResultRow
from retrain.records.schema.base import Values

DIRECTORY = re.compile(r"global_step_(\d{1,12})_evals")
AGGREGATED = "aggregated_results.jsonl"
ANSWER_KEYS = {"input_prompt", "output_response", "score"}
# Columns of the data set that name a problem. Numbers are not used: many data sets number their rows, and the same
# number is then another problem as soon as the data set is filtered or shuffled.
ID_KEYS = ("id", "problem_id", "task_id", "instance_id", "question_id")
FACTS = {
    "pass_at_*": MetricFacts(higher_is_better=True, unit="share"),
    **dict.fromkeys(("avg_score", "score", "mean_positive_reward"), MetricFacts(higher_is_better=True)),
}


def recognises(path: Path) -> bool:
    row = first_row(path)
    if path.name == AGGREGATED:
        return any(key.startswith("eval/") for key in row)
    return path.suffix == ".jsonl" and row.keys() >= ANSWER_KEYS


def rows(path: Path, request: Request) -> Iterator[ResultRow]:
    match = DIRECTORY.fullmatch(path.parent.name)
    step = int(match[1]) if match else None
    if path.name == AGGREGATED:
        yield from _numbers(path, step)
    elif request.metric in (None, "score"):
        answers = list(_answers(path, step))
        _check_mean(path, answers)
        yield from indexed_by_value(answers)


def facts(path: Path) -> Mapping[str, MetricFacts]:
    return FACTS


def _answers(path: Path, step: int | None) -> Iterator[ResultRow]:
    for line, row in json_rows(path):
        value = _score(row.get("score"), f"{path}:{line} score")
        yield ResultRow("score", value, step, path.stem, _problem(row), line=line)


def _numbers(path: Path, step: int | None) -> Iterator[ResultRow]:
    for line, row in json_rows(path):
        for key, value in row.items():
            prefix, _, name = key.partition("/")
            source, _, metric = name.partition("/")
            if prefix == "eval" and metric:
                yield ResultRow(metric, number(value, f"{path}:{line} {key}"), step, source, line=line)


def _score(value: object, where: str) -> float | None:
    """Return the score of an answer; rewards of single tokens are summed, as ``avg_score`` does."""
    if not isinstance(value, list):
        return number(value, where)
    rewards = [number(reward, where) for reward in value]
    return None if None in rewards or not rewards else math.fsum(reward or 0.0 for reward in rewards)


def _problem(row: Values) -> str:
    columns = row.get("env_extras")
    extras: Values = columns if isinstance(columns, dict) else {}
    for key in ID_KEYS:
        if isinstance(name := extras.get(key), str) and name and not name.isdigit():
            return name
    return content_key(row.get("input_prompt"))


def _check_mean(path: Path, answers: list[ResultRow]) -> None:
    """Raise UsageError if the mean of the scores is not the one that SkyRL recorded. With ``step_wise_trajectories``
    the file has a line for every step of a trajectory, and only the last step has the trajectory's score."""
    key = f"eval/{path.stem}/avg_score"
    aggregated = path.with_name(AGGREGATED)
    recorded = first_row(aggregated).get(key)
    scores = [answer.value for answer in answers if answer.value is not None]
    if not isinstance(recorded, int | float) or not scores or len(scores) < len(answers):
        return
    mean = math.fsum(scores) / len(scores)
    if not math.isclose(mean, recorded, rel_tol=1e-6, abs_tol=1e-6):
        raise UsageError(
            f"{path}: the mean of its {len(scores)} scores is {mean:.6g}, but {key} in {aggregated.name} is "
            f"{recorded:.6g}. With step_wise_trajectories the lines are steps, not answers; type --metric avg_score"
        )


FORMAT = Format(
    tool="SkyRL",
    patterns=("**/global_step_*_evals/*.jsonl", "**/eval_only/*.jsonl"),
    recognises=recognises,
    rows=rows,
    facts=facts,
)
