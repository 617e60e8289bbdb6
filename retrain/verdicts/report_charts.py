"""Build the charts of a report as data, which ``ui/static/pages/report.js`` draws."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from retrain.config.evaluation import HELDOUT, PART_EVERY
from retrain.config.tasks import AUDIT
from retrain.records.histograms import counted, edges_of
from retrain.records.schema.base import Row, Values
from retrain.records.tables import accuracy_name, short_metric
from retrain.verdicts.audited import AuditComparison
from retrain.verdicts.evidence import MIN_BAND_SEEDS, Campaign, Completion, Curve, completions, curve, window_of
from retrain.verdicts.results import Measure

Chart = Mapping[str, object]
DIGITS = 4  # Significant digits of the numbers that are drawn
Range = Mapping[str, int | None]
SHARE, POSITIVE, ANY = {"min": 0, "max": 1}, {"min": 0, "max": None}, {"min": None, "max": None}


class ChartedMetric(NamedTuple):
    key: str
    title: str
    unit: str
    limits: Range
    is_noisy: bool


CURVES = (
    ChartedMetric("correct_rate", "Correct while training", "%", SHARE, True),
    ChartedMetric("mean_reward", "Reward while training", "", POSITIVE, True),
    ChartedMetric("completions/mean_length", "Tokens per completion", "", POSITIVE, True),
    ChartedMetric("entropy", "Entropy of the policy, nats per token", "", POSITIVE, True),
    ChartedMetric("sepa_lambda", "SEPA: pooling λ", "", SHARE, False),
    ChartedMetric("sepa_gate_open", "SEPA: gate open (share of runs)", "", SHARE, False),
    ChartedMetric("bp_throughput", "Back pressure: tokens per second", "", POSITIVE, False),
    ChartedMetric("bp_p_star", "Back pressure: best number of prompts at once", "", POSITIVE, False),
)


def charts_of(campaign: Campaign, audits: Sequence[AuditComparison], squeezes: Sequence[Row]) -> dict[str, object]:
    """Return lists of charts by section of the report; sections without charts are left out."""
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
    if measure.set_name is not None:
        return measure.key if measure.set_name == HELDOUT else f"{measure.key} on {measure.set_name}"
    if measure.key == "correct_rate":
        return "correct rate while training"
    accuracy = accuracy_name(measure.key)
    return f"{accuracy[:1].lower()}{accuracy[1:]}" or short_metric(measure.key)


def _results(campaign: Campaign) -> list[Chart]:
    if not any(condition.after_values for condition in campaign.comparison.conditions):
        return []
    comparison = asdict(campaign.comparison)
    drawn = ("share", "summary", "baseline", "margin", "conditions")
    body = {"metric": name_of(campaign.measure), **{key: comparison[key] for key in drawn}}
    return [{"kind": "forests", "body": {"comparison": body, "summary": {}}}]


def _curves(campaign: Campaign) -> list[Chart]:
    if campaign.foreign is not None:
        measure = campaign.measure
        unit, limits = ("%", SHARE) if measure.is_share else ("", ANY)
        metric = ChartedMetric(measure.key, name_of(measure), unit, limits, False)
        chart = _curve_chart(campaign, metric, measure)
        return [chart] if chart is not None else []
    keys = [f"eval/{name}/correct_rate" for name in campaign.set_names]
    held_out = [ChartedMetric(key, accuracy_name(key), "%", SHARE, False) for key in keys]
    rows = (row for run in campaign.runs for row in run.rows)
    # Rewards of 0 and 1 alone: the curve of the reward would repeat that of the correct rate.
    repeated = {"mean_reward"} if all(row.get("mean_reward") == row.get("correct_rate") for row in rows) else set[str]()
    shown = [metric for metric in CURVES if metric.key not in repeated]
    charts = [_curve_chart(campaign, metric) for metric in (*held_out, *shown)]
    return [chart for chart in charts if chart is not None]


def _curve_chart(campaign: Campaign, metric: ChartedMetric, measure: Measure | None = None) -> Chart | None:
    curves = _condition_curves(campaign, metric, measure or Measure(key=metric.key))
    if not curves:
        return None
    caption = _caption(curves, metric.is_noisy)
    return _lines(metric.title, caption, metric.key, curves, "step", metric.unit, metric.limits)


def _condition_curves(campaign: Campaign, metric: ChartedMetric, measure: Measure) -> list[Curve]:
    """Return the curves of the conditions that have the metric."""
    # Back pressure acts on a whole cohort: the line of the first condition stands for all.
    labels = campaign.labels[:1] if metric.key.startswith("bp_") else campaign.labels
    curves = [
        curve(label, index, campaign.of(label), measure, smooth=metric.is_noisy) for index, label in enumerate(labels)
    ]
    if metric.key.startswith("sepa_"):  # Conditions without SEPA have 0 at every step.
        curves = [line for line in curves if any(y > 0 for run in line["runs"] for _, y in run["points"])]
    return [line for line in curves if line["runs"] or line["part"]]


def _caption(curves: Sequence[Curve], smooth: bool) -> str:
    has_band = any(line["band"] for line in curves)
    band = "band: 95 % interval" if has_band else f"no band below {MIN_BAND_SEEDS} seeds"
    caption = f"mean of the seeds, {band}, thin: every run"
    if any(line["part"] for line in curves):
        caption += f"; faint marks without a line: one of {PART_EVERY} problems, which decides nothing"
    window = window_of(max((len(run["points"]) for line in curves for run in line["runs"]), default=0))
    return f"{caption}; moving average over {window} steps" if smooth and window > 1 else caption


def _lines(
    title: str, caption: str, key: str, curves: Sequence[Curve], x: str = "step", unit: str = "",
    limits: Range | None = None,
) -> Chart:  # fmt: skip
    return {"kind": "curves", "title": title, "words": caption, "x": x, "unit": unit, "range": limits,
            "body": {"key": key, "conditions": curves}}  # fmt: skip


def _audited(campaign: Campaign, audit: AuditComparison) -> Chart:
    keys = {"reward": f"eval/{audit.name}/reward_mean", "audit": f"eval/{audit.name}/{AUDIT}"}
    runs = campaign.of(audit.label)
    curves = [
        curve(title, index, runs, Measure(key=key), smooth=False) for index, (title, key) in enumerate(keys.items())
    ]
    for line in curves:
        line["runs"], line["part"] = [], []
    caption = "held-out problems, mean of the seeds, band: 95 % interval; the audit trains nothing"
    return _lines(audit.label, caption, keys["audit"], curves)


def _distributions(campaign: Campaign) -> list[Chart]:
    if campaign.foreign is not None:
        return []
    after_training: dict[str, list[Completion]] = {}
    kind = ""
    for label in campaign.labels:
        for run in campaign.of(label):
            if run.done:
                _, last, kind = completions(run, campaign.shown_set)
                after_training.setdefault(label, []).extend(last)
    charts = []
    for title, key, name in (("Tokens per completion", "num_tokens", "tokens"), ("Reward", "reward", "reward")):
        values = {label: np.array([row[key] for row in rows if row[key] is not None], np.float64)
                  for label, rows in after_training.items()}  # fmt: skip
        values = {label: numbers for label, numbers in values.items() if len(numbers)}
        if not values:
            continue
        edges = edges_of(np.concatenate(list(values.values())))
        rows = [{"name": label, "index": campaign.labels.index(label), "counts": counted(numbers, edges),
                 "note": f"mean {numbers.mean():.3g}"} for label, numbers in values.items()]  # fmt: skip
        charts.append({"kind": "distribution", "title": title, "name": name, "edges": edges.tolist(), "rows": rows,
                       "words": f"{kind} after training, completions of all finished runs"})  # fmt: skip
    return charts


def _squeezed(report: Values) -> list[Chart]:
    charts = []
    if rows := report.get("rows"):
        keys = (("energy kept, mean", 0, "mean_variance"), ("energy, worst layer", 2, "min_variance"),
                ("weight error", 1, "relative_error"))  # fmt: skip
        caption = "by rank kept, from the singular values of the trained adapter"
        lines = [_by_rank(name, index, rows, key) for name, index, key in keys]
        charts.append(_lines("What a smaller rank would keep", caption, "energy", lines, "rank", "%", SHARE))
    if rows and (verified := report.get("verified")):
        rows = sorted([verified["full"], *verified["ranks"]], key=lambda row: row["rank"])
        line = _by_rank("held-out accuracy", 0, rows, "accuracy")
        line["band"] = [(row["rank"], row["low"], row["high"]) for row in rows]
        caption = (
            "by rank that the adapter is compressed to, without further training; band: 95 % interval over problems"
        )
        charts.append(_lines("Held-out accuracy by rank", caption, "accuracy", [line], "rank", "%", SHARE))
    return charts


def _by_rank(name: str, index: int, rows: Sequence[Values], key: str) -> Curve:
    points = [(row["rank"], row[key]) for row in rows]
    return {"label": name, "index": index, "mean": points, "band": [], "runs": [], "part": []}


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _rounded(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(element) for element in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
