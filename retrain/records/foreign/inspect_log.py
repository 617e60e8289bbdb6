"""Logs of inspect-ai 0.3: ``.eval`` (a ZIP archive in Zstandard) and ``.json``.

A grade has the name of the metric that inspect computes from it, ``<scorer>/<metric>``, such as ``match/accuracy``;
if a scorer gives several values, ``<value>/<metric>``, such as ``length/mean``. Epochs are answers to the same problem.
Condition and seed are those in the metadata or the tags (``seed=1``) of the evaluation; without a condition there,
those in the model's name (``org/grpo-s1``).
"""

import json
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from retrain.errors import NotReadable, UsageError
from retrain.extras import missing
from retrain.records.foreign import condition_and_seed
from retrain.records.foreign.json_files import LARGEST, first_bytes, json_object, number, problem_key
from retrain.records.foreign.table import Format, ReadRequest, ResultRow, RunState
from retrain.records.schema.base import Row, Values

JSON_START = re.compile(rb'\s*\{\s*"version":\s*\d+,\s*"status":\s*"\w+",\s*"eval":')
NAME = re.compile(r"\d{4}-\d\d-\d\dT[\d-]+_(?P<task_and_id>.+)")
STATES: Mapping[str, RunState] = {"success": "done", "error": "failed"}
GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
ERRORS = ("stderr", "bootstrap_stderr")


def _recognises(path: Path) -> bool:
    start = first_bytes(path)
    return start.startswith(b"PK") if path.suffix == ".eval" else JSON_START.match(start) is not None


def _choose(files: Sequence[Path]) -> Sequence[Path]:
    """Return the latest log of each task: a retried evaluation has the same id and a later time in its name."""
    names = {path: NAME.fullmatch(path.stem) for path in sorted(files)}
    return list({(path.parent, name["task_and_id"]) if name else path: path for path, name in names.items()}.values())


def _rows(path: Path, request: ReadRequest) -> Iterator[ResultRow]:
    try:
        header, samples = _read(path)
        evaluation = header["eval"]
        names = _names(evaluation, path)
        if "condition" not in names:
            condition, seed = condition_and_seed(evaluation["model"])
            names = {"condition": condition, "seed": seed} | names
        run = ResultRow(
            "", None, set=str(evaluation["task"]), condition=str(names["condition"]),
            seed=names.get("seed"), state=STATES.get(header["status"], "unfinished"),
            time=datetime.fromisoformat(evaluation["created"]).timestamp(),
        )  # fmt: skip
        rows = [*_numbers(header, run), *_answers(header, samples, run)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path) from error
    yield from (row for row in rows if request.needs(row.metric))


def _read(path: Path) -> tuple[Row, Sequence[Row]]:
    """Return a log without its samples, and the samples; of ``.eval`` files their summaries, without messages and with
    shortened texts."""
    if path.suffix != ".eval":
        content = json_object(path)
        return content, content.pop("samples", None) or []
    parts = _archived(path)
    header = json.loads(parts.pop(0))
    return {"status": "started", **header}, [row for part in parts for row in json.loads(part)]


def _archived(path: Path) -> list[bytes]:
    """Return the header in an archive and the summaries. An archive that was not completed has only the journal."""
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
            header = "header.json" if "header.json" in names else "_journal/start.json"
            members = [archive.getinfo(name) for name in (header, *parts)]
            if sum(member.file_size for member in members) > LARGEST:
                raise UsageError(
                    f"{path} has more than {LARGEST >> 20:,} MiB of summaries: give a path that excludes it"
                )
            return [archive.open(member).read(member.file_size) for member in members]
    except OSError as error:
        raise NotReadable(path, error) from None
    # RuntimeError: an encrypted archive, or one in another compression
    except (zipfile.BadZipFile, RuntimeError, KeyError, EOFError, zlib.error, ZstdError) as error:
        raise _damaged(path) from error


def _damaged(path: Path) -> UsageError:
    return UsageError(f"{path} is not a log of inspect, or it is damaged: check it with inspect log dump {path}")


def _numbers(header: Row, run: ResultRow) -> Iterator[ResultRow]:
    for score in _scores(header):
        reducer = f"/{score['reducer']}" if score.get("reducer") not in (None, "mean") else ""
        for metric, entry in score["metrics"].items():
            if metric not in ERRORS:
                yield run._replace(metric=f"{score['name']}{reducer}/{metric}", value=_grade(entry["value"]))


def _answers(header: Row, samples: Sequence[Row], run: ResultRow) -> Iterator[ResultRow]:
    """Yield the grades of each sample; a sample with an error has none."""
    means = {score["name"]: "accuracy" if "accuracy" in score["metrics"] else "mean" for score in _scores(header)}
    graded, metrics = list[tuple[ResultRow, dict[str, float | None]]](), set[str]()
    for line, sample in enumerate(samples, start=1):
        grades: dict[str, float | None] = {}
        for scorer, score in (sample.get("scores") or {}).items():
            parts = score["value"] if isinstance(score["value"], dict) else {scorer: score["value"]}
            grades |= {f"{name}/{means.get(name, 'accuracy')}": _grade(value) for name, value in parts.items()}
        problem = f"{sample['id']}:{problem_key([_without_ids(sample.get('input')), sample.get('target')])}"
        graded.append((run._replace(problem=problem, sample=sample["epoch"] - 1, line=line), grades))
        metrics |= grades.keys()
    for metric in sorted(metrics):
        yield from (answer._replace(metric=metric, value=grades.get(metric)) for answer, grades in graded)


def _scores(header: Row) -> Sequence[Row]:
    return (header.get("results") or {}).get("scores", ())


def _grade(value: object) -> float | None:
    """Return a score as a number, as inspect's ``value_to_float`` does; None for values that have none."""
    if isinstance(value, str):
        value = GRADES.get(value, GRADES.get(value.lower(), value))
    try:
        return number(float(value), "")  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError):
        return None


def _without_ids(content: object) -> object:
    """Return a sample's input without the random ids of its messages."""
    if not isinstance(content, list):
        return content
    return [(message.get("role"), message.get("content")) for message in content]


def _names(evaluation: Values, path: Path) -> Row:
    """Return condition and seed, as far as metadata or tags name them."""
    tags = (tag.partition("=") for tag in evaluation.get("tags") or ())
    names = {name: value for name, equals, value in tags if equals} | (evaluation.get("metadata") or {})
    if "seed" in names:
        if not str(names["seed"]).isdecimal():
            raise UsageError(f"{path} has seed {names['seed']!r} in its metadata or tags, which is not an integer")
        names["seed"] = int(names["seed"])
    return names


FORMAT = Format(
    tool="inspect",
    patterns=("*.eval", "*.json", "**/*.eval", "**/*.json"),
    recognises=_recognises,
    rows=_rows,
    choose=_choose,
)
