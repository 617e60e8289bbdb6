"""The report's section on reward and audit: both curves of a condition in one chart, and what they say."""

from __future__ import annotations

from retrain.campaign.judging.audited import audited
from retrain.campaign.judging.evidence import Campaign, curve
from retrain.campaign.judging.report_sections import figure
from retrain.record import charts
from retrain.record.charts import Series
from retrain.record.html import escape
from retrain.rewards.audit import AUDIT


def audit_section(campaign: Campaign) -> str:
    """A chart for each condition and audited set, both lines over steps, with what they say; "" without an audit."""
    plots = []
    for each in audited(campaign.runs, campaign.labels):
        series = [
            curve(title, index, campaign.of(each.label), f"eval/{each.name}/{key}", share=False, smooth=False)
            for index, (title, key) in enumerate((("reward", "reward_mean"), ("audit", AUDIT)))
        ]
        plain = [Series(line.name, line.index, line.points, line.band, dots=True) for line in series]
        chart = charts.line_chart(
            plain, label=f"Reward and audit of {each.label} over steps", x_title="step", unit="", limits=(None, None)
        )
        words = "held-out problems, mean of the seeds, band: 95 % interval; the audit trains nothing"
        plots.append(figure(each.label, words, chart) + f"<p>{escape(each.sentence)}</p>")
    return f"<div class='plots'>{''.join(f'<div>{plot}</div>' for plot in plots)}</div>" if plots else ""
