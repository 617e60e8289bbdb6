"""``/api/curves``: a metric by condition: the mean over runs with its interval, and differences to the baseline."""

from typing import Any

from starlette.routing import Route

from retrain.ui.answers import Query, json_route
from retrain.ui.decimation import Smoothing
from retrain.ui.library import Library
from retrain.ui.lines import BANDS, Line, Window, counts, lines_of, mean_and_band, most_points, paired, shown
from retrain.ui.lines import window_of_query as window_of
from retrain.ui.metrics import about
from retrain.ui.numbers import AXES, UNPLACED
from retrain.ui.sources import Home
from retrain.verdicts.results import Measure


def routes(library: Library) -> list[Route]:
    def curves(query: Query) -> dict[str, Any]:
        home = library.home(query.text("at"))
        key, x = query.text("key"), query.choice("x", AXES)
        smoothing = Smoothing.parse(query.text("smooth", "auto"))
        return curves_of(library, home, key, x, smoothing, window_of(query), query.choice("band", BANDS))

    return [json_route("/api/curves", curves)]


def curves_of(
    library: Library, home: Home, key: str, x: str, smoothing: Smoothing, part: Window | None, band: str
) -> dict[str, Any]:
    lines = lines_of(library, home.runs, key, x, smoothing)
    if Measure(key=key).is_held_out:
        smoothing = Smoothing()
    smoothing = smoothing.for_points(max((len(line.steps) for line in lines), default=0))
    share = Measure(key=key).is_share
    baseline = [line for line in lines if line.run.index == 0]
    conditions, differences = [], []
    labels = {run.index: run.label for run in home.runs}
    for index, label in sorted(labels.items()):
        own = [line for line in lines if line.run.index == index]
        conditions.append({
            "label": label, "index": index, **mean_and_band(own, share, part, band), "count": counts(own, part),
            "runs": [shown(line, most_points(len(lines)), part) for line in own],
        })  # fmt: skip
        if index and 0 in labels:
            pairs = paired(own, baseline)
            difference = mean_and_band(pairs, False, part, band)
            differences.append({"label": label, "index": index, "pairs": len(pairs)} | difference)
    return {
        "key": key, "x": x, "smooth": smoothing.window, "smoothing": str(smoothing), "about": about(key),
        "share": share, "reading": sum(library.numbers(run, refresh=False).reading for run in home.runs),
        "note": left_out_note(lines), "conditions": conditions, "differences": differences,
    }  # fmt: skip


def left_out_note(lines: list[Line]) -> str | None:
    short = sum(line.left_out > 0 for line in lines)
    return f"{short} of {len(lines)} runs have {UNPLACED}" if short else None
