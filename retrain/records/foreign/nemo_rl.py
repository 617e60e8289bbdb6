"""Validations of NeMo RL 0.6: answers in the log directory, and numbers in the checkpoints.

``val_data_step<N>.jsonl`` has a line for each answer after N updates. ``evaluation_data.json`` is written by a
standalone evaluation. ``step_N/training_info.json`` has the metric by which checkpoints are chosen, and the seed stands
in ``config.yaml`` beside it. Log directories have no configuration, so their seed must come from the path.
"""

import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import yaml

from retrain.errors import UsageError
from retrain.records.foreign.json_files import (
    first_bytes,
    first_row,
    json_object,
    json_rows,
    number,
    numbers,
    problem_key,
)
from retrain.records.foreign.table import HELDOUT_SET, Format, MetricFacts, ReadRequest, ResultRow
from retrain.records.reader import read_object

VALIDATION = re.compile(r"val_data_step(\d{1,12})\.jsonl")
CHECKPOINT = re.compile(r"step_(\d{1,12})")
STANDALONE, INFO = "evaluation_data.json", "training_info.json"
ALGORITHMS = ("grpo", "distillation", "sft", "dpo", "rm")  # Sections of config.yaml that may have the seed
NO_VALIDATION = -99999999.0  # Initial value of ``val_reward``
FACTS = {
    "accuracy": MetricFacts(higher_is_better=True, unit="share"),
    "reward": MetricFacts(higher_is_better=True),
    "val_loss": MetricFacts(higher_is_better=False, unit="number"),
}


def _recognises(path: Path) -> bool:
    if VALIDATION.fullmatch(path.name):
        return first_row(path).keys() >= {"content", "rewards", "idx"}
    if path.name == STANDALONE:
        return b'"evaluation_data"' in first_bytes(path)
    return path.name == INFO and bool(CHECKPOINT.fullmatch(path.parent.name)) and b'"total_' in first_bytes(path)


def _rows(path: Path, request: ReadRequest) -> Iterator[ResultRow]:
    if path.name == INFO:
        yield from _checkpoint(path, request)
    elif request.needs("reward"):
        yield from _standalone(path) if path.name == STANDALONE else _validation(path)


def _validation(path: Path) -> Iterator[ResultRow]:
    match = VALIDATION.fullmatch(path.name)
    step = int(match[1]) if match else None
    for line, row in json_rows(path):
        logs, rewards, where = row.get("content"), row.get("rewards"), f"{path}:{line}"
        if not isinstance(logs, list) or not isinstance(rewards, list) or len(logs) != len(rewards):
            raise UsageError(f"{where}: content and rewards are not lists of the same length")
        for messages, reward in zip(logs, rewards, strict=True):
            value = number(reward, f"{where}: rewards")
            yield ResultRow("reward", value, step, problem=_problem(messages, where), sample=None, line=line)


def _problem(messages: object, where: str) -> str:
    """Return the key of the messages before the first answer of the model."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UsageError(f"{where}: content is not a list of messages")
    before = takewhile(lambda message: message.get("role") != "assistant", messages)
    prompt = [(message.get("role"), message.get("content")) for message in before]
    if not any(content for _, content in prompt):  # environments of NeMo Gym log token ids, which the file leaves out
        raise UsageError(f"{where} has no text of a prompt, so its problem is unknown; type --metric accuracy")
    return problem_key(prompt)


def _standalone(path: Path) -> Iterator[ResultRow]:
    """Yield the answers of a standalone evaluation. ``prompt`` is the text of all messages before the answer;
    ``message_log`` is a Python expression and is not read."""
    source = str(read_object(path.with_name("config.json")).get("dataset_name") or HELDOUT_SET)
    try:
        samples = [(sample["prompt"], sample["reward"]) for sample in json_object(path)["evaluation_data"]]
    except (TypeError, KeyError) as error:
        raise UsageError(f"{path} is not in the format of NeMo RL: {error!r}") from error
    for line, (prompt, reward) in enumerate(samples, start=1):
        value = number(reward, f"{path}:{line}: reward")
        yield ResultRow("reward", value, None, Path(source).name, problem_key(prompt), sample=None, line=line)


def _checkpoint(path: Path, request: ReadRequest) -> Iterator[ResultRow]:
    """Yield ``val_reward``, which is the accuracy, and the metric that chooses checkpoints (``val:<metric>``)."""
    match, info = CHECKPOINT.fullmatch(path.parent.name), json_object(path)
    values = {key.removeprefix("val:"): value for key, value in info.items() if key.startswith("val:")}
    if info.get("val_reward", NO_VALIDATION) != NO_VALIDATION:
        values["accuracy"] = info["val_reward"]
    seed = _training_seed(path.with_name("config.yaml"))
    for metric, value in numbers(values.items(), request, str(path)):
        yield ResultRow(metric, value, int(match[1]) if match else None, seed=seed, line=1)


def _training_seed(path: Path) -> int | None:
    """Return the seed of the training algorithm; ``eval.seed`` is that of an evaluation."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
        seeds = (settings.get(name, {}).get("seed") for name in ALGORITHMS)
        return next((seed for seed in seeds if isinstance(seed, int)), None)
    except (OSError, yaml.YAMLError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} is no configuration of NeMo RL: {error}") from error


FORMAT = Format(
    tool="NeMo RL",
    patterns=("**/val_data_step*.jsonl", f"**/step_*/{INFO}", f"**/{STANDALONE}"),
    recognises=_recognises,
    rows=_rows,
    facts=lambda path: FACTS,
)
