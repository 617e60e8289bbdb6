"""Logs of inspect-ai 0.3: ``.eval`` (a ZIP archive in Zstandard) and ``.json``.

A scorer's answers have the name of the metric that inspect makes of them: ``match/accuracy``, or ``length/mean`` for
one value of a scorer with several. ``match`` and ``accuracy`` are aliases where they mean one metric. Epochs are
answers to the same problem. Condition and seed are those in the metadata or the tags (``seed=1``) of the evaluation;
without a condition there, it is the model.
"""

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from retrain.errors import NotReadable, UsageError
from retrain.extras import missing
from retrain.records.foreign.answers import content_key
from retrain.records.foreign.json_files import first_bytes, json_object, names_in_rows
from retrain.records.foreign.table import Format, MetricFacts, Request, ResultRow, RunState
from retrain.records.schema.base import Row, Values

JSON_START = re.compile(rb'\s*\{\s*"version":\s*\d+,\s*"status":\s*"\w+",\s*"eval":')
NAME = re.compile(r"\d{4}-\d\d-\d\dT[\d-]+_(?P<task_and_id>.+)")
STATES: Mapping[str, RunState] = {"success": "done", "error": "failed"}
GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
SETTINGS = ("model", "model_args", "model_generate_config", "task_args", "config")
ERRORS = ("stderr", "bootstrap_stderr")
LONGEST_TEXT = 5120  # Characters of a text in the samples' summaries of ``.eval`` files


class Log(NamedTuple):
    # All but the samples
    header: Row
    # In ``.eval`` files their summaries, without messages and with shortened texts
    samples: Sequence[Row]


def recognises(path: Path) -> bool:
    start = first_bytes(path)
    return start.startswith(b"PK") if path.suffix == ".eval" else JSON_START.match(start) is not None


def choose(files: Sequence[Path]) -> Sequence[Path]:
    """Return the latest log of each task: a retried evaluation has the same id and a later time in its name."""
    names = {path: NAME.fullmatch(path.stem) for path in sorted(files)}
    return list({(path.parent, name["task_and_id"]) if name else path: path for path, name in names.items()}.values())


def rows(path: Path, request: Request) -> Iterator[ResultRow]:
    log = read_log(path)
    evaluation, settings = log.header["eval"], _settings(log.header, path)
    condition = str(settings.get("condition", evaluation["model"]))
    time = datetime.fromisoformat(evaluation["created"]).timestamp()
    common = ResultRow(
        "", None, set=evaluation["task"], condition=condition, seed=settings.get("seed"), state=settings["state"],
        time=time,
    )  # fmt: skip
    numbers, answers = dict(_numbers(log.header)), list(_answers(log))
    graded = {name for _, grades in answers for name in grades}
    names = names_in_rows(sorted({*numbers, *graded}), request.metric, _aliases, path)
    for metric, name in names.items():
        if metric in numbers:
            yield common._replace(metric=name, value=numbers[metric])
        if metric in graded:
            for line, (sample, grades) in enumerate(answers, start=1):
                answer = common._replace(problem=_problem(sample), sample=int(sample["epoch"]) - 1, line=line)
                yield answer._replace(metric=name, value=grades.get(metric))


def read_log(path: Path) -> Log:
    try:
        log = _archive(path) if path.suffix == ".eval" else _document(path)
        evaluation = log.header["eval"]
        datetime.fromisoformat(evaluation["created"])
        if {"task", "model"} <= evaluation.keys() and all({"id", "epoch"} <= sample.keys() for sample in log.samples):
            return log
    except OSError as error:
        raise NotReadable(path, error) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UsageError(f"{path} is not a log of inspect, or it is damaged: check it with inspect log dump {path}")


def _document(path: Path) -> Log:
    content = json_object(path)
    return Log(content, content.pop("samples", None) or [])


def _archive(path: Path) -> Log:
    """Read the header and the summaries of an archive. One that was not completed has only those in its journal."""
    try:
        if sys.version_info >= (3, 14):
            import zipfile

            from compression.zstd import ZstdError
        else:
            from backports.zstd import ZstdError, zipfile
    except ImportError:
        raise missing("a log of inspect (.eval)", "backports.zstd") from None
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            parts = [name for name in names if name.startswith("_journal/summaries/")]
            parts = ["summaries.json"] if "summaries.json" in names else parts
            header = json.loads(archive.read("header.json" if "header.json" in names else "_journal/start.json"))
            return Log(header, [sample for part in parts for sample in json.loads(archive.read(part))])
    except (zipfile.BadZipFile, ZstdError, EOFError, NotImplementedError) as error:
        raise ValueError(str(error)) from error


def _numbers(header: Row) -> Iterator[tuple[str, float | None]]:
    for score in (header.get("results") or {}).get("scores", ()):
        reducer = f"/{score['reducer']}" if score.get("reducer") not in (None, "mean") else ""
        for metric, entry in score["metrics"].items():
            if metric not in ERRORS:
                yield f"{score['name']}{reducer}/{metric}", _grade(entry["value"])


def _answers(log: Log) -> Iterator[tuple[Row, dict[str, float | None]]]:
    """Yield each sample with its grades by metric; a sample with an error has none."""
    means = _means(log.header)
    for sample in log.samples:
        grades = {}
        for scorer, score in (sample.get("scores") or {}).items():
            parts = score["value"] if isinstance(score["value"], dict) else {scorer: score["value"]}
            grades |= {f"{name}/{means.get(name, 'accuracy')}": _grade(value) for name, value in parts.items()}
        yield sample, grades


def _means(header: Row) -> dict[str, str]:
    """Return the metric that is the mean of the answers, by the name of the score; {} in a log without results."""
    scores = (header.get("results") or {}).get("scores", ())
    return {score["name"]: "accuracy" if "accuracy" in score["metrics"] else "mean" for score in scores}


def _grade(value: object) -> float | None:
    """Return a score as a number, as inspect's ``value_to_float`` does; None for values that have none."""
    if isinstance(value, str):
        value = GRADES.get(value, GRADES.get(value.lower(), value))
    try:
        grade = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        return None
    return grade if math.isfinite(grade) else None


def _problem(sample: Row) -> str:
    return f"{sample['id']}:{content_key([_text(sample.get('input')), _text(sample.get('target'))])}"


def _text(part: object) -> object:
    """Return texts as they are in summaries: shortened, and without images and documents."""
    if isinstance(part, str):
        return part[:LONGEST_TEXT]
    if isinstance(part, list):
        return [_text(each) for each in part]
    if isinstance(part, dict) and "content" in part:
        return [part.get("role"), _text(part["content"])]
    if isinstance(part, dict):
        return _text(part["text"]) if "text" in part else f"({str(part.get('type')).capitalize()})"
    return part


def _aliases(name: str) -> tuple[str, ...]:
    """Return the metric's name, for the mean of the answers also the scorer's."""
    scorer, _, metric = name.rpartition("/")
    return (scorer, metric) if metric in ("accuracy", "mean") else (metric,)


def _settings(header: Row, path: Path) -> Row:
    evaluation = header["eval"]
    tags = (tag.partition("=") for tag in header.get("tags") or evaluation.get("tags") or ())
    given = {name: value for name, equals, value in tags if equals}
    given |= {**(evaluation.get("metadata") or {}), **(header.get("metadata") or {})}
    settings = {name: evaluation[name] for name in SETTINGS if name in evaluation}
    settings |= {name: given[name] for name in ("condition", "seed") if name in given}
    if "seed" in given:
        if not str(given["seed"]).isdecimal():
            raise UsageError(f"{path} has seed {given['seed']!r} in its metadata or tags, which is not an integer")
        settings["seed"] = int(given["seed"])
    return settings | {"state": STATES.get(header.get("status", ""), "unfinished")}


def config(path: Path) -> Values:
    return _settings(read_log(path).header, path)


def facts(path: Path) -> Mapping[str, MetricFacts]:
    """Return that accuracies are shares, of which the larger is better. Nothing is known about other metrics."""
    names = [name for name, mean in _means(read_log(path).header).items() if mean == "accuracy"]
    return dict.fromkeys(["accuracy", *names, *(f"{name}/accuracy" for name in names)], MetricFacts(True, "share"))


FORMAT = Format(
    "inspect",
    ("*.eval", "*.json", "**/*.eval", "**/*.json"),
    recognises,
    rows,
    choose=choose,
    facts=facts,
    config=config,
    names_models=True,
)
