"""The charts of a report as data: ``ui/static/pages/report.js`` draws them by the page's components."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retrain.config.evaluation import PART_EVERY
from retrain.config.tasks import AUDIT
from retrain.records.histograms import counted, edges_of
from retrain.records.tables import accuracy_name, short_metric
from retrain.verdicts.audited import AuditComparison
from retrain.verdicts.evidence import MIN_BAND_SEEDS, Campaign, Completion, completions, curve, window_of
from retrain.verdicts.results import Measure

Chart = dict[str, Any]
DIGITS = 4  # Significant digits of the numbers that are drawn
SHARE, POSITIVE = {"min": 0, "max": 1}, {"min": 0, "max": None}  # Ranges that values may have
CURVES = (
    ("correct_rate", "Correct while training", "%", SHARE, True),
    ("mean_reward", "Reward while training", "", POSITIVE, True),
    ("completions/mean_length", "Tokens per completion", "", POSITIVE, True),
    ("entropy", "Entropy of the policy, nats per token", "", POSITIVE, True),
    ("sepa_lambda", "SEPA: pooling λ", "", SHARE, False),
    ("sepa_gate_open", "SEPA: gate open (share of runs)", "", SHARE, False),
    ("bp_throughput", "Back pressure: tokens per second", "", POSITIVE, False),
    ("bp_p_star", "Back pressure: best number of prompts at once", "", POSITIVE, False),
)
"""Metric, title, unit, range, whether it is noisy enough to be smoothed."""


def charts_of(
    campaign: Campaign, audits: Sequence[AuditComparison], squeezes: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the charts of each place of the report; places without any are left out."""
    groups, curves = [{"name": label, "index": index} for index, label in enumerate(campaign.labels)], _curves(campaign)
    places = {
        "results": _results(campaign),
        "legend": [{"kind": "legend", "groups": groups}] if curves and len(groups) > 1 else [],
        "curves": curves,
        "audit": [_audited(campaign, audit) for audit in audits],
        "distributions": _distributions(campaign),
        **{f"squeeze {number}": _squeezed(report) for number, report in enumerate(squeezes)},
    }
    return {place: _rounded(charts) for place, charts in places.items() if charts}


def name_of(measure: Measure) -> str:
    if measure.key == "correct_rate":
        return "correct rate while training"
    accuracy = accuracy_name(measure.key)
    return f"{accuracy[:1].lower()}{accuracy[1:]}" or short_metric(measure.key)


def _results(campaign: Campaign) -> list[Chart]:
    comparison = campaign.comparison
    if not any(condition["after_values"] for condition in comparison["conditions"]):
        return []
    drawn = ("share", "summary", "baseline", "margin", "conditions")
    body = {"metric": name_of(campaign.measure), **{key: comparison[key] for key in drawn}}
    return [{"kind": "forests", "body": {"comparison": body, "summary": {}}}]


def _curves(campaign: Campaign) -> list[Chart]:
    """Return accuracy on every held-out set, and every metric of ``CURVES`` that the runs have."""
    charts = []
    keys = [f"eval/{name}/correct_rate" for name in campaign.set_names]
    for key, title, unit, limits, smooth in (*((key, accuracy_name(key), "%", SHARE, False) for key in keys), *CURVES):
        if key == "mean_reward" and _same_as_correct(campaign):
            continue  # Rewards are 0 and 1: the curve would repeat the one above.
        # Back pressure steers what all runs of a cohort do together: one line says it for all.
        labels = campaign.labels[:1] if key.startswith("bp_") else campaign.labels
        curves = [curve(label, index, campaign.of(label), key, smooth=smooth) for index, label in enumerate(labels)]
        if key.startswith("sepa_"):  # Conditions without SEPA have 0 at every step.
            curves = [each for each in curves if any(y > 0 for run in each["runs"] for _, y in run["points"])]
        curves = [each for each in curves if each["runs"] or each["part"]]
        if not curves:
            continue
        banded = any(each["band"] for each in curves)
        band = "band: 95 % interval" if banded else f"no band below {MIN_BAND_SEEDS} seeds"
        words = f"mean of the seeds, {band}, thin: every run"
        if any(each["part"] for each in curves):
            words += f"; faint marks without a line: one of {PART_EVERY} problems, which decides nothing"
        window = window_of(max((len(run["points"]) for each in curves for run in each["runs"]), default=0))
        words += f"; moving average over {window} steps" if smooth and window > 1 else ""
        charts.append(_lines(title, words, key, curves, "step", unit, limits))
    return charts


def _lines(title: str, words: str, key: str, curves: Sequence[dict[str, Any]], x: str = "step", unit: str = "",
           limits: Mapping[str, int | None] | None = None) -> Chart:  # fmt: skip
    return {"kind": "curves", "title": title, "words": words, "x": x, "unit": unit, "range": limits,
            "body": {"key": key, "conditions": curves}}  # fmt: skip


def _same_as_correct(campaign: Campaign) -> bool:
    return all(row.get("mean_reward") == row.get("correct_rate") for run in campaign.runs for row in run.rows)


def _audited(campaign: Campaign, audit: AuditComparison) -> Chart:
    """Return the chart of the reward and the audit of a condition on a held-out set."""
    keys = {"reward": f"eval/{audit.name}/reward_mean", "audit": f"eval/{audit.name}/{AUDIT}"}
    runs = campaign.of(audit.label)
    curves = [curve(title, index, runs, key, smooth=False) | {"runs": [], "part": []}
              for index, (title, key) in enumerate(keys.items())]  # fmt: skip
    words = "held-out problems, mean of the seeds, band: 95 % interval; the audit trains nothing"
    return _lines(audit.label, words, keys["audit"], curves)


def _distributions(campaign: Campaign) -> list[Chart]:
    """Return lengths and rewards of the last evaluation; seeds are pooled to be looked at, never to be tested."""
    found: dict[str, list[Completion]] = {}
    words = ""
    for label in campaign.labels:
        for run in campaign.of(label):
            if run.done:
                _, last, words = completions(run, campaign.shown_set)
                found.setdefault(label, []).extend(last)
    charts = []
    for title, key, name in (("Tokens per completion", "num_tokens", "tokens"), ("Reward", "reward", "reward")):
        values = {label: np.array([row[key] for row in rows if row[key] is not None], np.float64)
                  for label, rows in found.items()}  # fmt: skip
        values = {label: each for label, each in values.items() if len(each)}
        if not values:
            continue
        edges = edges_of(np.concatenate(list(values.values())))
        rows = [{"name": label, "index": campaign.labels.index(label), "counts": counted(each, edges),
                 "note": f"mean {each.mean():.3g}"} for label, each in values.items()]  # fmt: skip
        charts.append({"kind": "distribution", "title": title, "name": name, "edges": edges.tolist(), "rows": rows,
                       "words": f"{words} after training, completions of all finished runs"})  # fmt: skip
    return charts


def _squeezed(report: dict[str, Any]) -> list[Chart]:
    """Return energy and weight error by rank, and the held-out accuracy by rank where it was measured."""
    charts = []
    if rows := report.get("rows"):
        keys = (("energy kept, mean", 0, "mean_variance"), ("energy, worst layer", 2, "min_variance"),
                ("weight error", 1, "relative_error"))  # fmt: skip
        words = "by rank kept, from the singular values of the trained adapter"
        lines = [_by_rank(name, index, rows, key) for name, index, key in keys]
        charts.append(_lines("What a smaller rank would keep", words, "energy", lines, "rank", "%", SHARE))
    if rows and (verified := report.get("verified")):
        rows = sorted([verified["full"], *verified["ranks"]], key=lambda row: row["rank"])
        line = _by_rank("held-out accuracy", 0, rows, "accuracy")
        line["band"] = [(row["rank"], row["low"], row["high"]) for row in rows]
        words = "by rank that the adapter is compressed to, without further training; band: 95 % interval over problems"
        charts.append(_lines("Held-out accuracy by rank", words, "accuracy", [line], "rank", "%", SHARE))
    return charts


def _by_rank(name: str, index: int, rows: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    points = [(row["rank"], row[key]) for row in rows]
    return {"label": name, "index": index, "mean": points, "band": [], "runs": [], "part": []}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
