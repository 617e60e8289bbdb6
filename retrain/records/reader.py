"""Read the files of runs and campaigns, also while other processes write them."""

from __future__ import annotations

import fcntl
import os
import re
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from retrain.config.legacy import REMOVED, without_removed
from retrain.errors import UsageError
from retrain.files import Stamp, iter_jsonl, read_json, read_json_if_present, read_jsonl, stamp_of
from retrain.ownership import not_readable
from retrain.records.schema import layout
from retrain.records.schema.base import Row, Values
from retrain.records.schema.campaign import STATES, RunEntry
from retrain.util.jsonl import last_row

LOG_BLOCK, LOG_BYTES = 1 << 18, 16 << 20  # Bytes of a log that are read at first, and if too few lines in them match
MAX_OBJECT_BYTES = 64 << 20  # Largest JSON file that `read_object` reads
KEPT_OBJECTS = 128
SUMMARY_FILE = re.compile(r"(train|eval_(.+))_iteration_(\d{6,})" + re.escape(layout.SUMMARIES))


def read_config(directory: Path) -> Row:
    """Return ``config.json`` of a run; {} if it is missing. Raises ValueError if it is not JSON."""
    path = directory / layout.CONFIG
    return read_json(path) if path.is_file() else {}


def intact_config(directory: Path) -> Row:
    """Return ``config.json`` of a run; {} if it is missing or damaged. Raises NotReadable if the operating system
    refuses to read it."""
    facts = read_json_if_present(directory / layout.CONFIG)
    return facts if isinstance(facts, dict) else {}


def metrics_rows(directory: Path) -> list[Row]:
    return read_jsonl(directory / layout.METRICS)


def evaluation_rows(directory: Path, held_out: str | None = None) -> list[Row]:
    """Return the rows of ``evals.jsonl``; only those of the held-out set ``held_out`` if it is given."""
    return [row for row in iter_jsonl(directory / layout.EVALS) if held_out is None or row.get("name") == held_out]


def held_out_completions(directory: Path, held_out: str | None) -> list[Row]:
    return [row for row in iter_jsonl(directory / layout.EVALUATIONS) if row.get("name") == held_out]


def recorded_checkpoints(directory: Path) -> list[Row]:
    """Return the lines of ``checkpoints.jsonl`` that are JSON objects; another tool may have written the file."""
    return read_jsonl(directory / layout.CHECKPOINTS)


def checkpoint_paths(directory: Path) -> list[Path]:
    """Return the paths ``checkpoints/step_*``, sorted by name. They may be incomplete, or not retrain's at all."""
    return sorted((directory / layout.SAVED).glob("step_*"))


def summary_files(directory: Path) -> list[tuple[str, int, str]]:
    """Return (split, iteration, file name) of each file of rollout summaries, sorted by iteration, then by split."""
    try:
        matches = map(SUMMARY_FILE.fullmatch, os.listdir(directory))
    except OSError:
        return []
    files = [
        (layout.TRAIN if match[2] is None else f"eval/{match[2]}", int(match[3]), match[0])
        for match in matches
        if match is not None
    ]
    return sorted(files, key=lambda file: (file[1], file[0]))


def read_manifest(directory: Path) -> Row:
    """Return the content of ``manifest.json`` (``CampaignManifest``).

    Raises UsageError if it is damaged or names files outside the directory, NotOurs if retrain did not write it.
    """
    path = directory / layout.MANIFEST
    try:
        content = read_json(path)
        for run in content["runs"]:
            run_id, where = run["run_id"], run["path"]
            if where not in (".", f"runs/{run_id}") or not is_run_id(run_id):
                raise UsageError(f"{path} names {where!r}, which is not a run of this directory")
            if run["state"] not in STATES or not isinstance(run["step"], int):
                raise ValueError(f"run {run_id} is in no known state")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise not_readable(path, error, "restore it from a copy, or begin anew with another --out") from error
    return content


def read_plan_file(directory: Path) -> Row:
    """Return the content of ``plan.json`` without configuration keys that this version no longer has. Raises UsageError
    if it is damaged, NotOurs if retrain did not write it."""
    path = directory / layout.PLAN
    try:
        content = read_json(path)
        for run in content["runs"]:
            if not is_run_id(run["run_id"]):
                raise UsageError(f"{path} names {run['run_id']!r}, which is not a run of this directory")
            if not isinstance(run["config"], dict) or not isinstance(run["overrides"], dict):
                raise ValueError(f"{run['run_id']} has no configuration")
            run["config"] = without_removed(run["config"])
            run["overrides"] = {key: value for key, value in run["overrides"].items() if key not in REMOVED}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise not_readable(path, error, "type retrain train with the file and --out") from error
    return content


def planned_configs(directory: Path) -> dict[str, Row]:
    if not (directory / layout.PLAN).is_file():
        return {}
    return {run["run_id"]: run["config"] for run in read_plan_file(directory)["runs"]}


def is_run_id(value: object) -> bool:
    """Return whether a value is a plain name, not a path that could lead out of the directory."""
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_+~=.\-]+", value) is not None and value[0] != "."


def run_entries(directory: Path, manifest: Values | None) -> list[RunEntry]:
    """Return the runs of a directory. ``manifest`` is the directory's, None if it has none.

    Without a manifest, the directory of a campaign's run has its entry from the campaign's manifest; for any other
    directory, entries are made from the records of runs in it and in its folder ``runs``. The state "running" becomes
    "interrupted" if no process holds the lock of the directory or of its campaign.
    """
    campaign = directory.absolute().parent.parent
    if manifest is not None:
        entries = list(map(RunEntry.from_row, manifest["runs"]))
    elif (campaign / layout.MANIFEST).is_file():
        path, runs = f"runs/{directory.absolute().name}", read_manifest(campaign)["runs"]
        entries = [RunEntry.from_row(run | {"path": "."}) for run in runs if run["path"] == path]
    else:
        paths = [directory, *sorted((directory / "runs").glob("*"))]
        entries = [_entry_from_records(directory, path) for path in paths if (path / layout.METRICS).is_file()]
    owners = [directory] if (directory / layout.LOCK).is_file() and manifest is not None else [directory, campaign]
    if any(is_held(owner / layout.LOCK) for owner in owners):
        return entries
    return [replace(entry, state="interrupted") if entry.state == "running" else entry for entry in entries]


def _entry_from_records(directory: Path, path: Path) -> RunEntry:
    row = last_row(path / layout.METRICS)
    share = row.get("progress/done_frac")
    return RunEntry(
        run_id=path.name,
        label=row.get("condition", path.name),
        state="done" if (path / layout.FINAL).is_dir() else "interrupted",
        max_steps=round((row["step"] + 1) / share) if share else 0,
        path=os.path.relpath(path, directory),
    )


def verification_files(directory: Path) -> list[Path]:
    """Return the paths of ``verification.json``: first that of the first run, which may not exist, then those of other
    conditions."""
    home = directory / layout.SQUEEZE
    return [home / layout.VERIFICATION, *sorted(home.glob(f"*/{layout.VERIFICATION}"))]


def final_adapters(directory: Path) -> list[Path]:
    return sorted(path.parent for path in directory.glob(f"runs/*/{layout.FINAL}/{layout.ADAPTER_WEIGHTS}"))


def homes_of_runs(directory: Path) -> list[Path]:
    """Return [``directory``] if it is a run or campaign, else its subdirectories that are runs or campaigns."""

    def is_home(path: Path) -> bool:
        return (path / layout.MANIFEST).is_file() or (path / layout.METRICS).is_file()

    return [directory] if is_home(directory) else [path for path in sorted(directory.iterdir()) if is_home(path)]


def is_held(lock: Path) -> bool:
    try:
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def read_object(path: Path | None) -> Row:
    """Return the object in a JSON file; {} if the file is missing, damaged, larger than ``MAX_OBJECT_BYTES`` or not an
    object. It is cached until the file changes, so callers must not modify it."""
    stamp = stamp_of(path)
    return _object(path, stamp) if path is not None and stamp is not None and stamp.size <= MAX_OBJECT_BYTES else {}


@lru_cache(KEPT_OBJECTS)
def _object(path: Path, stamp: Stamp) -> Row:
    try:
        content = read_json(path)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_text(path: Path | None, characters: int) -> str:
    """Return the first characters of a text file; "" if ``path`` is None. Raises OSError."""
    if path is None:
        return ""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(characters)


class LogLines(NamedTuple):
    """Lines of a log, each with the byte at which it begins. The search for earlier lines continues at byte ``before``;
    it is None if the beginning of the file was reached."""

    lines: list[tuple[int, str]]
    before: int | None


def log_lines(path: Path, before: int, search: str, most: int) -> LogLines:
    """Return the last ``most`` lines, in the file's order, that end before byte ``before`` (-1: the end of the file)
    and contain ``search``, which must be lower case. Reads at most ``LOG_BYTES``."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        end = size if before < 0 else min(before, size)
        for reach in (LOG_BLOCK, LOG_BYTES):
            start = max(0, end - reach)
            lines = os.pread(file.fileno(), end - start, start).splitlines(keepends=True)
            begins = accumulate(map(len, lines[:-1]), initial=start)
            texts = (line.decode("utf-8", "replace").rstrip("\r\n") for line in lines)
            read = list(zip(begins, texts, strict=False))[1 if start else 0 :]  # the first line may be cut
            matches = [(begin, text) for begin, text in read if search in text.lower()]
            if len(matches) >= most or not start:
                break
    matches, first = matches[-most:], read[0][0] if read else start
    return LogLines(matches, (matches[0][0] if len(matches) == most else first) or None)
