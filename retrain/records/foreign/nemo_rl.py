"""Validations of NeMo RL 0.6: answers in the log directory, and numbers in the checkpoints.

``val_data_step<N>.jsonl`` has a line for each answer after N updates. ``evaluation_data.json`` is written by a
standalone evaluation. ``step_N/training_info.json`` has the metric by which checkpoints are chosen, and the seed stands
in ``config.yaml`` beside it. Log directories have no configuration, so their seed must come from the path.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path

import yaml

from retrain.errors import NotReadable, UsageError
from retrain.files import read_json
from retrain.records.foreign.answers import begins_with, content_key, first_row, indexed_by_value, json_rows, number
from retrain.records.foreign.table import HELDOUT_SET, Format, MetricFacts, Request, ResultRow
from retrain.records.reader import read_object
from retrain.records.schema.base import Row, Values

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


def recognises(path: Path) -> bool:
    if VALIDATION.fullmatch(path.name):
        return first_row(path).keys() >= {"content", "rewards", "idx"}
    if path.name == STANDALONE:
        return begins_with(path, '"evaluation_data"')
    return path.name == INFO and bool(CHECKPOINT.fullmatch(path.parent.name)) and begins_with(path, '"total_')


def rows(path: Path, request: Request) -> Iterator[ResultRow]:
    if path.name == INFO:
        yield from _checkpoint(path)
    elif request.metric in (None, "reward"):
        yield from indexed_by_value(_standalone(path) if path.name == STANDALONE else _validation(path))


def facts(path: Path) -> Mapping[str, MetricFacts]:
    return FACTS


def config(path: Path) -> Values:
    """Return ``config.yaml`` beside a checkpoint's ``training_info.json``, with the seed of the training algorithm.
    ``eval.seed`` is the seed of an evaluation and is not used."""
    file = path.with_name("config.yaml")
    if path.name != INFO or not file.is_file():
        return {}
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotReadable(file, error) from error
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{file} is no valid YAML: {error}") from error
    settings: Row = content if isinstance(content, dict) else {}
    sections = (settings.get(name) for name in ALGORITHMS)
    seeds = (section.get("seed") for section in sections if isinstance(section, dict))
    seed = next((seed for seed in seeds if isinstance(seed, int)), None)
    return settings if seed is None else {**settings, "seed": seed}


def _validation(path: Path) -> Iterator[ResultRow]:
    match = VALIDATION.fullmatch(path.name)
    step = int(match[1]) if match else None
    for line, row in json_rows(path):
        logs, rewards, where = row.get("content"), row.get("rewards"), f"{path}:{line}"
        if not isinstance(logs, list) or not isinstance(rewards, list) or len(logs) != len(rewards):
            raise UsageError(f"{where} content and rewards are not lists of the same length")
        for messages, reward in zip(logs, rewards, strict=True):
            value = number(reward, f"{where} rewards")
            yield ResultRow("reward", value, step, problem=_problem(messages, where), line=line)


def _problem(messages: object, where: str) -> str:
    """Return the key of the messages before the first answer of the model."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UsageError(f"{where} content is not a list of messages")
    prompt = [
        (message.get("role"), message.get("content"))
        for message in takewhile(lambda message: message.get("role") != "assistant", messages)
    ]
    if not any(content for _, content in prompt):  # environments of NeMo Gym log token ids, which the file leaves out
        raise UsageError(f"{where} has no text of a prompt, so its problem is unknown; type --metric accuracy")
    return content_key(prompt)


def _standalone(path: Path) -> Iterator[ResultRow]:
    """Yield the answers of a standalone evaluation. ``prompt`` is the text of all messages before the answer;
    ``message_log`` is a Python expression and is not read."""
    try:
        samples = read_json(path)["evaluation_data"]
    except OSError as error:
        raise NotReadable(path, error) from error
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is not in the format of NeMo RL: {error!r}") from error
    source = str(read_object(path.with_name("config.json")).get("dataset_name") or HELDOUT_SET)
    for position, sample in enumerate(samples if isinstance(samples, list) else (), start=1):
        where = f"{path}: sample {position}"
        if not isinstance(sample, dict) or not sample.get("prompt"):
            raise UsageError(f"{where} has no prompt")
        value = number(sample.get("reward"), f"{where} reward")
        problem = content_key(sample["prompt"])
        yield ResultRow("reward", value, set=Path(source).name, problem=problem, line=position)


def _checkpoint(path: Path) -> Iterator[ResultRow]:
    """Yield ``val_reward``, which is the accuracy, and the metric that chooses checkpoints (``val:<metric>``)."""
    match = CHECKPOINT.fullmatch(path.parent.name)
    info = read_object(path)
    if not info:
        raise UsageError(f"{path} is no JSON object: write the checkpoint again, or remove it")
    values = {key.removeprefix("val:"): value for key, value in info.items() if key.startswith("val:")}
    if info.get("val_reward", NO_VALIDATION) != NO_VALIDATION:
        values["accuracy"] = info["val_reward"]
    for metric, value in values.items():
        yield ResultRow(metric, number(value, f"{path} {metric}"), int(match[1]) if match else None, line=1)


FORMAT = Format(
    tool="NeMo RL",
    patterns=("**/val_data_step*.jsonl", f"**/step_*/{INFO}", f"**/{STANDALONE}"),
    recognises=recognises,
    rows=rows,
    facts=facts,
    config=config,
)
