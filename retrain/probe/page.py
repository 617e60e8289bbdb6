"""The page of a probe: words, matrices, lengths, noise, alignment, and the tokens that move most.

Everything comes from the report, so a page can be made again from its JSON. All texts are escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrain.campaign.judging.probed import whole_line
from retrain.config.campaign import with_condition_names
from retrain.probe.picture import point_matrix
from retrain.probe.words import recorded_words
from retrain.record.charts import Row, Series, dot_chart, line_chart
from retrain.record.html import asset, escape, page, table
from retrain.record.numbers import interval, minus, percent

Report = Mapping[str, Any]
SHADES = (0.1, 0.5, 1.5)
"""A token's change, in root mean squares of the credit, from which each of three shades begins."""


def probe_page(report: Report) -> str:
    """The whole document."""
    report = with_condition_names(report, report["conditions"])
    points = report["points"]
    facts = (
        f"{report['model']} · batches of {report['prompts']} × {report['samples']} answers · "
        f"baseline {report['baseline']} · {report['seconds']:.0f} s"
    )
    body = f"<header><h1>{escape(report['name'])}: probe</h1><p class='muted'>{escape(facts)}</p></header>"
    items = "".join(
        f'<li class="{escape(line["kind"])}">{escape(whole_line(line, report["could_show"]))}</li>'
        for line in report["lines"]
    )
    body += f"<ul class='words'>{items}</ul>"
    if len(points) > 1:
        body += f"<section><h2>Over training</h2>{_curves(points)}</section>"
    body += "".join(_point(report, point) for point in points)
    return page(f"{report['name']}: probe", body, styles=asset("charts.css") + asset("probe.css"))


def _figure(caption: str, chart: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{chart}</figure>"


def _point(report: Report, point: Report) -> str:
    step = "" if point["step"] is None else f", step {point['step']}"
    told = f"{point['batches']} batches, {point['rollouts']} answers, {percent(point['success'])} right"
    heldout = point["heldout"]
    if heldout:
        told += f"; {heldout['problems']} held-out problems × {heldout['samples']}, {percent(heldout['success'])} right"
    if point["recorded"] is not None:
        told += f". {recorded_words(report, point)}"
    caption = (
        "cosine of two conditions' gradients on the same batch; framed: of one condition's on two batches, the noise "
        "that one batch has"
    )
    if not all(each["same_rollouts"] for each in point["conditions"]):
        caption += "; *: their rollouts differ, so that there is no same batch"
    plots = [_figure(caption, point_matrix(dict(point))), *_gains(point)]
    return (
        f"<section><h2>{escape(point['at'])}{step}</h2><p class='muted'>{escape(told)}</p>"
        f"<div class='plots'>{''.join(plots)}</div>{_numbers(point)}{_differences(point)}</section>"
    )


def _numbers(point: Report) -> str:
    heads = ("condition", "cosine of expectations", "gradient", "clipped", "AdamW", "AdamW, state here",
             "lr for equal length", "signal/noise", "prompts for 1", "cosine with success")  # fmt: skip
    rows = []
    for number, each in enumerate(point["conditions"]):
        length, alignment = each["length"], each["alignment"] or {}
        needed, own = each["prompts_for_one"], "" if each["same_rollouts"] else " *"
        rows.append(
            [
                escape(each["label"]) + own,
                interval(each["expected_cosine"], 3) if number else "baseline",
                *(interval(length[kind], 2) for kind in ("gradient", "clipped", "adamw", "adamw_here")),
                "-" if each["equal_lr"] is None else f"{each['equal_lr']:.2g}",
                interval(each["signal_to_noise"], 3),
                "-" if needed is None else f"{needed:,.0f}",
                interval(alignment.get("cosine"), 2),
            ]
        )
    note = (
        "<p class='muted'>Lengths are relative to the baseline. AdamW: the length of its steps in the long run, with "
        "the condition's own second moments and its learning rate; state here: with those of the checkpoint.</p>"
    )
    if not all(each["same_rollouts"] for each in point["conditions"]):
        note += "<p class='muted'>* Rollouts of its own: its noise is not the baseline's, and nothing is paired.</p>"
    return f"<h3>Length and noise</h3>{table(heads, rows, texts={0})}{note}"


def _gains(point: Report) -> list[str]:
    rows, versus = [], []
    for number, each in enumerate(point["conditions"]):
        alignment = each["alignment"]
        if alignment is None:
            continue
        for found, key in ((rows, "gain"), (versus, "versus_baseline")):
            interval = alignment[key]
            if interval is not None:
                ends = None if interval["low"] is None else (interval["low"], interval["high"])
                found.append(Row(each["label"], number, (), interval["estimate"], ends))
    titles = (
        ("first-order gain in held-out success of one step of AdamW, with its 95 % interval", rows),
        ("beyond the baseline's, at the baseline's length of step", versus),
    )
    return [
        _figure(title, dot_chart(each, label=title, x_title="points a step", unit="points", zero=True))
        for title, each in titles
        if each
    ]


def _curves(points: Sequence[Report]) -> str:
    known = [point for point in points if point["step"] is not None]
    labels = [each["label"] for each in points[0]["conditions"]]
    drawn = [
        ("cosine with the baseline on the same batch", "", lambda p, c: p["cosines"][0][c] if c else None),
        ("length of the gradient, relative to the baseline", "", lambda p, c: p["conditions"][c]["length"]["gradient"]),
        ("signal to noise of one batch", "", lambda p, c: p["conditions"][c]["signal_to_noise"]),
        ("gain of a step at the baseline's length, beyond it", "points",
         lambda p, c: (p["conditions"][c]["alignment"] or {}).get("versus_baseline")),
    ]  # fmt: skip
    plots = []
    for title, unit, value in drawn:
        series = []
        for number, label in enumerate(labels):
            values = [(point["step"], value(point, number)) for point in known]
            spots = [(step, each["estimate"]) for step, each in values if each is not None]
            band = [
                (s, each["low"], each["high"]) for s, each in values if each is not None and each["low"] is not None
            ]
            if spots:
                series.append(Series(label, number, sorted(spots), sorted(band), dots=True))
        if series:
            plots.append(_figure(title, line_chart(series, label=title, x_title="step", unit=unit)))
    return f"<div class='plots'>{''.join(plots)}</div>"


def _differences(point: Report) -> str:
    parts = []
    for each in point["conditions"]:
        tokens = each["tokens"]
        if tokens is None:
            continue
        rows = [
            [escape(kind), str(row["tokens"]), percent(row["changed"]), percent(row["of_change"])]
            for kind, row in tokens["kinds"].items()
        ]
        layers = [
            [escape(row["layer"]), f"{row['cosine']:.3f}", percent(row["share"], 1), percent(row["baseline_share"], 1)]
            for row in each["layers"]
        ]
        shown = "".join(_shown(one) for one in tokens["shown"])
        parts.append(
            f"<details><summary>{escape(each['label'])}: the credit of {percent(tokens['changed'])} of tokens changes"
            f"</summary>{table(('tokens', 'count', 'changed', 'share of the change'), rows, texts={0})}"
            f"{table(('layer that differs most', 'cosine', 'share', 'of baseline'), layers, texts={0})}"
            f"{shown}</details>"
        )
    if not parts:
        return ""
    return (
        "<h3>Where they differ from the baseline</h3><p class='muted'>In units of each condition's own credit: green "
        f"tokens gain, red ones lose.</p>{''.join(parts)}"
    )


def _shown(one: Mapping[str, Any]) -> str:
    reward = "none" if one["reward"] is None else f"{one['reward']:g}"
    head = f"{one['problem']}: reward {reward}, {'correct' if one['correct'] else 'wrong'}"
    texts = "".join(_token(text, change) for text, change in one["tokens"])
    more = f" … {one['left_out']} more tokens" if one["left_out"] else ""
    return (
        f"<div class='card'><p class='muted'>{escape(head)}</p><p class='tokens mono'>"
        f"<span class='muted'>{escape(one['prompt'])}</span>{texts}{escape(more)}</p></div>"
    )


def _token(text: str, change: float) -> str:
    shade = sum(abs(change) >= least for least in SHADES)
    if not shade:
        return escape(text)
    hint = minus(f"{change:+.2f}")
    return f'<i class="{"up" if change > 0 else "down"}{shade}" title="{hint}">{escape(text)}</i>'
