"""Texts and table cells that terminal output and reports share."""

import math

from retrain.config.evaluation import HELDOUT
from retrain.records.schema.base import Values
from retrain.util.text import NOTHING, percent, points, visible

SQUEEZE_COLUMNS = ("rank", "mean energy", "worst layer", "weight error", "held-out", "vs full", "")


def accuracy_name(metric: str) -> str:
    parts = metric.split("/")
    if len(parts) != 3 or (parts[0], parts[2]) != ("eval", "correct_rate"):
        return ""
    return "Held-out accuracy" if parts[1] == HELDOUT else f"Held-out accuracy on {visible(parts[1])}"


def short_metric(metric: str) -> str:
    return metric.removeprefix("eval/").removeprefix(f"{HELDOUT}/")


def squeeze_columns(report: Values) -> list[str]:
    return [h for h in SQUEEZE_COLUMNS if report.get("verified") or h not in ("held-out", "vs full")]


def squeeze_cells(row: Values, report: Values) -> dict[str, str]:
    verified = report.get("verified")
    measured = {entry["rank"]: entry for entry in [verified["full"], *verified["ranks"]]} if verified else {}
    evaluation = measured.get(row["rank"], {})
    gain = evaluation.get("difference")
    return {
        "rank": str(row["rank"]),
        "mean energy": rate(row["mean_variance"]),
        "worst layer": rate(row["min_variance"]),
        "weight error": rate(row["relative_error"]),
        "held-out": rate(evaluation.get("accuracy")),
        "vs full": f"{points(gain['mean'])} [{points(gain['low'])}, {points(gain['high'])}]" if gain else NOTHING,
        "": "<- recommended" if row["rank"] == report.get("recommended_rank") else "",
    }


def squeeze_words(report: Values) -> list[str]:
    lines = [visible(report["message"])] if report.get("message") else []
    if report.get("recommended_rank") is not None:
        retention = report["min_variance_retention"]
        rank = f"{report['recommended_rank']} of {report['source_rank']}"
        share = f"at least {percent(retention)} of the energy (squared singular values)"
        lines.append(f"recommended rank: {rank}, which keeps {share}, judged by the weights alone")
        error = percent(math.sqrt(1.0 - retention))  # The energy is the squared norm of the weights' change
        unmeasured = f"Accuracy was not measured: the weights differ by up to {error} from those of the full rank."
        lines.append(report["verified"]["sentence"] if report.get("verified") else unmeasured)
    return lines


def rate(value: float | None) -> str:
    return percent(value, 1)
