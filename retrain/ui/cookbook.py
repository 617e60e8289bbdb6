"""Runs of the Tinker cookbook: ``metrics.jsonl`` with a row for every step, ``config.json`` beside it."""

from pathlib import Path
from typing import Any

from retrain.ownership import MARK
from retrain.records.reader import Tail, read_object
from retrain.records.schema.layout import CONFIG, MANIFEST, METRICS
from retrain.ui.foreign import Foreign
from retrain.ui.numbers import Numbers, Pool
from retrain.ui.places import Places
from retrain.ui.sources import QUIET_S, Run, age, whole


class Cookbook(Foreign):
    """A directory that has such rows, and is none of retrain's."""

    name = "cookbook"
    missing = (
        "conditions that were declared, so there is no verdict: runs whose names differ in their seed alone are taken"
        " for seeds of one condition",
        "the number of steps planned",
        "token files, notes and spans of time",
    )
    seed_keys = ("seed", "rng_seed")

    def is_run(self, path: Path, places: Places) -> bool:
        """Whether ``metrics.jsonl`` has rows, and nothing says that retrain wrote them."""
        ours = any(places.file(path, name) is not None for name in (MANIFEST, MARK))
        return not ours and places.file(path, METRICS) is not None

    def progress(self, path: Path, places: Places) -> tuple[int, int, str]:
        """Steps done, those planned where the row's share says so, and the state as far as files tell it."""
        metrics = places.file(path, METRICS)
        rows = Tail(metrics, last_only=True).rows()[1] if metrics is not None else []
        step = max((whole(row.get("progress/batch", row.get("step")), -1) + 1 for row in rows), default=0)
        shares = [row["progress/done_frac"] for row in rows if isinstance(row.get("progress/done_frac"), int | float)]
        planned = round(step / shares[-1]) if shares and 0 < shares[-1] <= 1 else 0
        ended = planned and step >= planned
        seconds = age(metrics)
        state = "done" if ended else "running" if seconds is not None and seconds < QUIET_S else "interrupted"
        return step, planned, state

    def newest(self, path: Path, places: Places) -> Path | None:
        return places.file(path, METRICS)

    def numbers(self, run: Run, places: Places, pool: Pool) -> Numbers:
        return pool.of(run.path)

    def settings(self, run: Run, places: Places) -> dict[str, Any]:
        return read_object(places.file(run.path, CONFIG))
