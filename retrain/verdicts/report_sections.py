"""The sections of a report below its verdict: curves, tables, the same prompt twice, distributions, settings, runs.

Each takes the campaign and returns HTML, "" where there is nothing to show. Text from files and models is escaped.
"""

from pathlib import Path
from typing import Any
from urllib.parse import quote

from retrain.config.evaluation import PART_EVERY
from retrain.config.tasks import AUDIT
from retrain.records import charts
from retrain.records.charts import Series
from retrain.records.schema.layout import LOG, METRICS
from retrain.records.tables import accuracy_name, short_metric, squeeze_cells, squeeze_columns, squeeze_words
from retrain.util.text import escape, points, probability, short
from retrain.verdicts.audited import audited
from retrain.verdicts.evidence import (
    MIN_BAND_SEEDS,
    Campaign,
    Completion,
    Twin,
    completions,
    curve,
    settings,
    twins,
    window_of,
)
from retrain.verdicts.results import Measure
from retrain.verdicts.words import brackets, difference_words, new_problems, number

TWINS = 8  # Prompts shown for each comparison
OPEN_TWINS = 2  # Of these, the prompts that are unfolded initially and in print

CURVES = (
    ("correct_rate", "Correct while training", "%", True, True),
    ("mean_reward", "Reward while training", "", False, True),
    ("completions/mean_length", "Tokens per completion", "", False, True),
    ("entropy", "Entropy of the policy, nats per token", "", False, True),
    ("sepa_lambda", "SEPA: pooling λ", "", True, False),
    ("sepa_gate_open", "SEPA: gate open (share of runs)", "", True, False),
    ("bp_throughput", "Back pressure: tokens per second", "", False, False),
    ("bp_p_star", "Back pressure: best number of prompts at once", "", False, False),
)
"""Metric, title, unit, whether it is a share, whether it is noisy enough to be smoothed."""


def figure(title: str, words: str, chart: str) -> str:
    """Return a chart on a card, with its title and how to read it."""
    return (
        f"<figure class='card'><figcaption>{escape(title)}<small>{escape(words)}</small></figcaption>{chart}</figure>"
    )


def title_of(measure: Measure) -> str:
    name = "correct rate while training" if measure.key == "correct_rate" else short_metric(measure.key)
    accuracy = accuracy_name(measure.key)
    name = f"{accuracy[:1].lower()}{accuracy[1:]}" or name
    if measure.summary == "last3":
        return f"{name[:1].upper()}{name[1:]}, mean of the last three evaluations"
    return f"Area under {name}" if measure.summary == "auc" else f"Final {name}"


def level_words(condition: dict[str, Any], measure: Measure) -> str:
    """Mean after training with its interval, as text."""
    unit = "%" if measure.is_share else ""
    return f"{number(condition['after_mean'], measure)}{unit}" + brackets(condition["interval"], measure, sign=False)


def table_of(head: tuple[str, ...], rows: list[list[str]], css: str = "") -> str:
    """Return a table that scrolls inside itself; cells are HTML, all columns but the first are numbers unless long."""
    css = f" class='{css}'" if css else ""
    heads = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='scroll'><table{css}><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"


def cell(text: str) -> str:
    """Return a number with its interval as a cell of a table, in which the interval may take a line of its own."""
    number, bracket, interval = text.partition(" [")
    parts = (number, "[" + interval) if bracket else (number,)
    return " ".join(f"<span class='whole'>{escape(part)}</span>" for part in parts)


# -- curves and distributions -----------------------------------------------------------------------------------


def curves_section(campaign: Campaign) -> str:
    """Accuracy on every held-out set, and every metric of ``CURVES`` that the runs have, over steps."""
    plots = []
    keys = [f"eval/{name}/correct_rate" for name in campaign.set_names]
    held_out = [(key, accuracy_name(key), "%", True, False) for key in keys]
    for key, title, unit, share, smooth in (*held_out, *CURVES):
        # Back pressure steers what all runs of a cohort do together: one line says it for all.
        labels = campaign.labels[:1] if key.startswith("bp_") else campaign.labels
        curves = [
            curve(label, index, campaign.of(label), key, share=share, smooth=smooth)
            for index, label in enumerate(labels)
        ]
        if key == "mean_reward" and _same_as_correct(campaign):
            continue  # a reward of 0 and 1: the curve above once more
        if key.startswith("sepa_"):  # 0 throughout in the conditions without it
            curves = [each for each in curves if any(y > 0 for line in each.thin for _, y in line)]
        series = [each for each in curves if each.thin or each.loose]
        if not series:
            continue
        limits = (0.0, 1.0) if share else (0.0, None)
        words = f"mean of the seeds, {interval_words('band', any(each.band for each in series))}, thin: every run"
        if any(each.loose for each in series):
            words += f"; small and open: one of {PART_EVERY} problems, which decides nothing"
        window = window_of(max(len(line) for each in series for line in each.thin)) if smooth else 1
        words += f"; moving average over {window} steps" if window > 1 else ""
        chart = charts.line_chart(
            series, label=f"{title} over steps, by condition", x_title="step", unit=unit, limits=limits
        )
        plots.append(figure(title, words, chart))
    return f"<div class='plots'>{''.join(plots)}</div>" if plots else ""


def interval_words(shape: str, drawn: bool) -> str:
    """Return how the intervals over seeds are drawn, or why they are not."""
    return f"{shape}: 95 % interval" if drawn else f"no {shape} below {MIN_BAND_SEEDS} seeds"


def _same_as_correct(campaign: Campaign) -> bool:
    return all(row.get("mean_reward") == row.get("correct_rate") for run in campaign.runs for row in run.rows)


def distributions_section(campaign: Campaign) -> str:
    """Lengths and rewards of the last evaluation; seeds are pooled to be looked at, never to be tested."""
    lengths, rewards, words = [], [], ""
    for index, label in enumerate(campaign.labels):
        rows: list[Completion] = []
        for run in campaign.of(label):
            if run.done:
                _, last, words = completions(run, campaign.shown_set)
                rows += last
        if rows:
            lengths.append((label, index, [float(row["num_tokens"]) for row in rows]))
            rewards.append((label, index, [float(row["reward"]) for row in rows if row["reward"] is not None]))
    if not lengths:
        return ""
    words = f"{words} after training, completions of all finished runs"
    plots = [
        figure("Tokens per completion", words,
                charts.histogram(lengths, label="distribution of lengths", x_title="tokens")),
        figure("Reward", words, charts.histogram(rewards, label="distribution of rewards", x_title="reward")),
    ]  # fmt: skip
    return f"<div class='plots'>{''.join(plots)}</div>"


# -- the same prompt on two sides -------------------------------------------------------------------------------


def same_prompt_section(campaign: Campaign) -> str:
    """Return answers of each condition beside the baseline's after training, then before beside after training."""
    sampled = {run.run_id: completions(run, campaign.shown_set) for run in campaign.runs if run.done}
    baseline = campaign.labels[0]
    blocks = []
    for label in campaign.labels[1:]:
        base = {run.pair: run for run in campaign.of(baseline) if run.done}
        sides = [
            (run.seed, sampled[base[run.pair].run_id][1], sampled[run.run_id][1])
            for run in campaign.of(label)
            if run.done and run.pair in base
        ]
        blocks.append(_twins_block(f"{baseline} → {label}, after training", baseline, label, sides))
    for label in campaign.labels:
        sides = [(run.seed, *sampled[run.run_id][:2]) for run in campaign.of(label) if run.done]
        blocks.append(_twins_block(f"{label}: first → last", "first", "last", sides))
    body = "".join(blocks)
    if not body:
        return ""
    words = next(iter(sampled.values()))[2]
    intro = (
        f"{words.capitalize()}: the prompts whose share of right answers differs most between two sides, over all "
        "seeds that both have; the untrained model is sampled once for all seeds and counts once. The extremes "
        "among many prompts are partly luck: read them as examples, not as findings."
    )
    return f"<p class='muted'>{escape(intro)}</p>{body}"


def _twins_block(title: str, left: str, right: str, sides: list[tuple[int, list[Completion], list[Completion]]]) -> str:
    shown, count = twins(sides, TWINS)
    if not shown:
        return ""
    items = "".join(_twin_item(twin, left, right, place < OPEN_TWINS) for place, twin in enumerate(shown))
    return f"<h3>{escape(title)} <span class='chip'>{len(shown)} of {count} prompts</span></h3>{items}"


def _twin_item(twin: Twin, left: str, right: str, opened: bool) -> str:
    css = "good" if twin.change > 0 else "bad"
    counts = f"{twin.left[0]}/{twin.left[1]} → {twin.right[0]}/{twin.right[1]}"
    sides = "".join(
        f"<div><div class='side'>{escape(name)}, seed {twin.seed}: "
        f"{_outcome(row)}</div><pre>{escape(row['completion'])}</pre></div>"
        for name, row in zip((left, right), twin.examples, strict=True)
    )
    tags = "".join(f"<span class='chip'>{escape(tag)}</span>" for tag in twin.tags)
    change = f"{points(twin.change, 0)} points"
    return (
        f"<details class='twin'{' open' * opened}><summary><span class='prompt'>{escape(twin.prompt)}</span>{tags}"
        f"<span class='number'>{counts}</span><b class='{css}'>{change}</b></summary>"
        f"<div class='pair'>{sides}</div></details>"
    )


def _outcome(row: Completion) -> str:
    words = "<b class='good'>right</b>" if row["correct"] else "<b class='bad'>wrong</b>"
    return f"{words}, {row['num_tokens']} tokens" + (", cut off" if row.get("stop_reason") == "length" else "")


# -- tables -----------------------------------------------------------------------------------------------------


def results_section(campaign: Campaign) -> str:
    """Primary metric with costs, then the secondary ones (tags among them)."""
    comparison, measure = campaign.comparison, campaign.measure
    head = ("condition", "finished", "before", "after", "IQM", "typical difference", "p", "mean difference",
            "P(better)", "tokens / run", "s / run")  # fmt: skip
    rows = [_result_row(condition, index, measure) for index, condition in enumerate(comparison["conditions"])]
    body = f"<h3>{escape(title_of(measure))}</h3>" + table_of(head, rows, "tight")
    words = (
        "Intervals are 95 %: of a condition over seeds; of typical differences over other seeds on these problems, "
        "for all conditions and analyses together, and in grey over other seeds and other problems like these. p: sign "
        "flips of whole seeds, corrected for all conditions and analyses."
    )
    body += f"<p class='muted'>{words}</p>"
    if comparison.get("secondary"):
        labels = campaign.labels
        head = ("metric", *(f"{label}" for label in labels), *(f"{label} − baseline" for label in labels[1:]))
        rows = [_secondary_row(each) for each in comparison["secondary"]]
        body += "<h3>Secondary metrics and tags</h3>" + table_of(head, rows, "tight")
        body += "<p class='muted'>No verdicts here: many numbers, none declared before, none corrected.</p>"
    return body


def _result_row(condition: dict[str, Any], index: int, measure: Measure) -> list[str]:
    unit = "%" if measure.is_share else ""

    def shown(value: float | None, form: str = "") -> str:
        return "–" if value is None else (form.format(value) if form else f"{number(value, measure)}{unit}")

    iqm, better = condition.get("iqm") or {}, condition.get("probability_of_improvement") or {}
    difference = "baseline" if index == 0 else "–"
    if condition["difference"] is not None:
        difference = difference_words(condition, measure)
    p, wider = condition["p_value"], new_problems(condition, measure)
    return [
        f"<span class='key whole' style='--series:{charts.colour(index)}'>{_breaking(condition['label'])}</span>",
        f"{len(condition['finished'])} of {len(condition['seeds'])}",
        shown(condition["before"]),
        "–" if condition["after_mean"] is None else cell(level_words(condition, measure)),
        shown(iqm.get("estimate")),
        cell(difference)
        + (f" <span class='whole muted'>{escape(brackets(wider, measure)[1:])}</span>" if wider else ""),
        "–" if p is None else probability(p),
        "–" if condition["difference"] is None else number(condition["difference"], measure, sign=True),
        shown(better.get("estimate"), "{:.2f}"),
        "–" if condition["tokens_per_run"] is None else short(condition["tokens_per_run"]),
        shown(condition["seconds_per_run"], "{:.0f}"),
    ]


def _secondary_row(secondary: dict[str, Any]) -> list[str]:
    measure = Measure(secondary["summary"], secondary["metric"])
    of_curve = "" if measure.summary == "final" else f"{measure.summary}:"
    cells = [escape(f"{of_curve}{short_metric(measure.key)}")]
    for condition in secondary["conditions"]:
        cells.append("–" if condition["after_mean"] is None else cell(level_words(condition, measure)))
    for condition in secondary["conditions"][1:]:
        cells.append("–" if condition["difference"] is None else cell(difference_words(condition, measure)))
    return cells


def _breaking(label: str) -> str:
    """Return a label that is broken between its overrides only, where there is no room."""
    first, *overrides = label.split("~")
    return "<wbr>".join(f"<span class='whole'>{escape(part)}</span>" for part in (first, *(f"~{o}" for o in overrides)))


def squeeze_section(campaign: Campaign) -> str:
    """Energy by rank, and what evaluating the compressed adapter said: of the first finished run, and of those of the
    other conditions where they were looked at."""
    first, others = campaign.manifest.get("squeeze"), campaign.manifest.get("squeezes") or {}
    if not others:
        return _squeezed(first) if first else ""
    reports = [report for report in (first, *others.values()) if report]
    return "".join(f"<h3>{escape(report.get('run_id') or report['run'])}</h3>{_squeezed(report)}" for report in reports)


def _squeezed(report: dict[str, Any]) -> str:
    if not report.get("rows"):
        return f"<p>{escape(report['message'])}</p>" if report.get("message") else ""
    rows = report["rows"]
    series = [
        Series("energy kept, mean", 0, [(row["rank"], row["mean_variance"]) for row in rows], dots=True),
        Series("energy, worst layer", 2, [(row["rank"], row["min_variance"]) for row in rows], dots=True),
        Series("weight error", 1, [(row["rank"], row["relative_error"]) for row in rows], dots=True),
    ]
    chart = charts.line_chart(
        series, label="energy and weight error by rank", x_title="rank kept", unit="%", limits=(0.0, 1.0)
    )
    plots = [figure("What a smaller rank would keep", "by singular values of the trained adapter", chart)]
    if report.get("verified"):
        plots.append(_verified_plot(report["verified"]))
    headings = squeeze_columns(report)
    cells = [squeeze_cells(row, report) for row in report["rows"]]
    table = table_of(tuple(headings), [
        [f"<b>{cell(row[heading])}</b>" if row[""] else cell(row[heading]) for heading in headings]
        for row in cells
    ], "tight")  # fmt: skip
    words = "".join(f"<p>{escape(text)}</p>" for text in squeeze_words(report))
    return f"{words}<div class='plots'>{''.join(plots)}</div>{table}"


def _verified_plot(verified: dict[str, Any]) -> str:
    """Held-out accuracy by rank, the full adapter's included, with intervals over problems."""
    rows = sorted([verified["full"], *verified["ranks"]], key=lambda row: row["rank"])
    line = [(row["rank"], row["accuracy"]) for row in rows]
    band = [(row["rank"], row["low"], row["high"]) for row in rows]
    chart = charts.line_chart(
        [Series("held-out accuracy", 0, line, band, dots=True)], label="held-out accuracy by rank",
        x_title="rank kept", unit="%", limits=(0.0, 1.0),
    )  # fmt: skip
    words = "the adapter compressed to each rank, without further training; band: 95 % interval over problems"
    return figure("Held-out accuracy by rank", words, chart)


def settings_section(campaign: Campaign) -> str:
    if not campaign.configs:
        return ""
    configs = {label: campaign.configs[label] for label in campaign.labels if label in campaign.configs}
    rows = [[f"<code>{escape(key)}</code>", *map(escape, values)] for key, values in settings(configs)]
    if not rows:
        return "<p>The conditions differ in no setting.</p>" if len(configs) > 1 else ""
    words = "Everything else is the same for all runs; <code>plan.json</code> beside this file has every key."
    return table_of(("setting", *configs), rows) + f"<p class='muted'>{words}</p>"


def runs_section(campaign: Campaign) -> str:
    """Return a table of every run with its state and links; no run is left out."""
    rows = []
    for run in sorted(campaign.runs, key=lambda run: (campaign.labels.index(run.label), run.pair)):
        value = run.result(campaign.measure)
        unit = "%" if campaign.measure.is_share else ""
        pages = [str(path.relative_to(campaign.directory)) for path in sorted(run.path.glob("*_iteration_*.html"))]
        shown = pages if len(pages) <= 4 else [pages[0], pages[len(pages) // 2], pages[-1]]
        links = [_link(path, _page_name(path)) for path in shown]
        if len(pages) > len(shown):
            links.append(f"({len(pages)} pages)")
        folder = str(run.path.relative_to(campaign.directory))
        links += [_link(f"{folder}/{name}", name) for name in (METRICS, LOG) if (run.path / name).is_file()]
        css = {"failed": "bad", "done": ""}.get(run.state, "warn")
        rows.append([
            escape(run.run_id),
            f"<span class='{css}'>{escape(run.state)}</span>" + (f"<br>{escape(run.reason)}" if run.reason else ""),
            str(len(run.rows)),
            "–" if value is None else f"{number(value, campaign.measure)}{unit}",
            " · ".join(links),
        ])  # fmt: skip
    return table_of(("run", "state", "steps done", "result", "files"), rows)


def _page_name(path: str) -> str:
    stem = Path(path).stem
    kind, _, step = stem.partition("_iteration_")
    return f"{kind.replace('eval_', 'evaluation ').replace('train', 'step')} {int(step) if step.isdigit() else step}"


def _link(path: str, text: str) -> str:
    return f'<a href="{escape(quote(path))}">{escape(text)}</a>'


def audit_section(campaign: Campaign) -> str:
    """Return a chart for each condition and audited set, both lines over steps, and its verdict; "" without any."""
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
