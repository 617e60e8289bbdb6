"""Evaluations of SkyRL 0.4: ``<export_path>/dumped_evals/global_step_N_evals``, and ``eval_only`` outside of training.

``aggregated_results.jsonl`` is one line with the numbers of all data sources (``eval/<source>/<metric>``).
``<source>.jsonl`` has a line for each answer, whose metric is ``score``; ``avg_score`` is its mean. The source ``all``
has no answers of its own. With ``step_wise_trajectories`` the lines are steps of answers, so that the mean of their
scores differs from ``avg_score``. The training seed, ``trainer.seed``, is in neither file.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path

from retrain.records.foreign.json_files import first_row, json_rows, number, problem_key
from retrain.records.foreign.table import Format, MetricFacts, ReadRequest, ResultRow
from retrain.records.schema.base import Values

DIRECTORY = re.compile(r"global_step_(\d{1,12})_evals")
AGGREGATED = "aggregated_results.jsonl"
NUMBER = re.compile(r"eval/([^/]+)/(.+)")  # Data source, metric
# Columns of the data set that name a problem. Numbers are not used: many data sets number their rows, and the same
# number is then another problem as soon as the data set is filtered or shuffled.
ID_KEYS = ("id", "problem_id", "task_id", "instance_id", "question_id")
FACTS = {
    "pass_at_*": MetricFacts(higher_is_better=True, unit="share"),
    **dict.fromkeys(("avg_score", "score", "mean_positive_reward"), MetricFacts(higher_is_better=True)),
}


def _recognises(path: Path) -> bool:
    row = first_row(path)
    if path.name == AGGREGATED:
        return any(map(NUMBER.fullmatch, row))
    return path.suffix == ".jsonl" and row.keys() >= {"input_prompt", "output_response", "score"}


def _rows(path: Path, request: ReadRequest) -> Iterator[ResultRow]:
    match = DIRECTORY.fullmatch(path.parent.name)
    step = int(match[1]) if match else None
    for line, row in json_rows(path):
        if path.name != AGGREGATED:
            value = _score(row.get("score"), f"{path}:{line}: score")
            yield ResultRow("score", value, step, path.stem, _problem(row), sample=None, line=line)
            continue
        for key, content in row.items():
            if found := NUMBER.fullmatch(key):
                source, metric = found.groups()
                value = number(content, f"{path}:{line}: {key}")
                yield ResultRow(metric, value, step, source, line=line)
                if metric == "avg_score" and source != "all":
                    yield ResultRow("score", value, step, source, line=line)


def _score(value: object, where: str) -> float | None:
    """Return the score of an answer; rewards of single tokens are summed, as ``avg_score`` does."""
    if not isinstance(value, list):
        return number(value, where)
    rewards = [number(reward, where) for reward in value]
    graded = [reward for reward in rewards if reward is not None]
    return math.fsum(graded) if graded and len(graded) == len(rewards) else None


def _problem(row: Values) -> str:
    extras = row.get("env_extras")
    names = [extras.get(key) for key in ID_KEYS] if isinstance(extras, dict) else []
    name = next((name for name in names if isinstance(name, str) and name and not name.isdigit()), None)
    return name or problem_key(row.get("input_prompt"))


FORMAT = Format(
    tool="SkyRL",
    patterns=("**/global_step_*_evals/*.jsonl", "**/eval_only/*.jsonl"),
    recognises=_recognises,
    rows=_rows,
    facts=lambda path: FACTS,
)
