"""Runs of the Tinker cookbook: ``metrics.jsonl`` with a row for every step, ``config.json`` beside it."""

from pathlib import Path

from retrain.ownership import MARK
from retrain.records.foreign import NO_VERDICT, DirectoryReader, FindFile, ForeignRun, integer
from retrain.records.reader import read_object
from retrain.records.schema.base import Row
from retrain.records.schema.layout import CONFIG, MANIFEST, METRICS
from retrain.util.jsonl import Tail


class CookbookReader(DirectoryReader):
    tool = "cookbook"
    missing = (NO_VERDICT, "the number of steps planned", "token files, notes and spans of time")

    def newest(self, directory: Path, find: FindFile) -> Path | None:
        """Return ``metrics.jsonl``; None in a directory that retrain wrote, which has a file of this name too."""
        ours = any(find(directory, name) is not None for name in (MANIFEST, MARK))
        return None if ours else find(directory, METRICS)

    def progress(self, directory: Path, find: FindFile) -> tuple[int, int, int | None]:
        path, config = find(directory, METRICS), read_object(find(directory, CONFIG))
        rows = Tail(path, last_only=True).rows()[1] if path is not None else []
        step = max((integer(row.get("progress/batch", row.get("step")), -1) + 1 for row in rows), default=0)
        shares = [row["progress/done_frac"] for row in rows if isinstance(row.get("progress/done_frac"), int | float)]
        planned = round(step / shares[-1]) if shares and 0 < shares[-1] <= 1 else 0
        return step, planned, next((config[k] for k in ("seed", "rng_seed") if isinstance(config.get(k), int)), None)

    def rows(self, run: ForeignRun, find: FindFile) -> list[Row] | None:
        path = self.metrics_file(run, find)
        return Tail(path).rows()[1] if path is not None else None

    def metrics_file(self, run: ForeignRun, find: FindFile) -> Path | None:
        return find(run.directory, METRICS)

    def config(self, run: ForeignRun, find: FindFile) -> Row:
        return read_object(find(run.directory, CONFIG))
