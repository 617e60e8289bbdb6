"""``report.html``: what a campaign found, in one file that needs nothing else. The verdict stands first.

Everything is read from the campaign's directory, so a report can be made again at any time, also of a campaign that
was stopped. What a model wrote goes through ``util.text.escape`` and nowhere else.
"""

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrain.errors import NotOurs, StorageError, UsageError, plural
from retrain.files import write_text
from retrain.ownership import owner_of
from retrain.records import charts
from retrain.records.charts import Row
from retrain.records.pages import document, generator
from retrain.records.schema.layout import REPORT
from retrain.util.text import duration, escape, p_words, short
from retrain.verdicts.declaration import EXPLORATORY, INTERIM
from retrain.verdicts.evidence import MIN_BAND_SEEDS, Campaign, read_campaign
from retrain.verdicts.report_sections import (
    audit_section,
    curves_section,
    distributions_section,
    figure,
    interval_words,
    level_words,
    results_section,
    runs_section,
    same_prompt_section,
    settings_section,
    squeeze_section,
    title_of,
)
from retrain.verdicts.words import amount, new_problems


def write_report(directory: Path, out: Path | None = None) -> Path:
    """Make ``report.html`` of a campaign's directory (or the file ``out``, or in the directory ``out``) and return
    where it is; directories above it are made.

    Raises UsageError when the directory holds no campaign, or the file cannot be written, NotOurs when something else
    than a report of this directory has the name.
    """
    target = out or directory / REPORT
    target = target / REPORT if target.is_dir() else target
    if os.path.lexists(target) and not _is_report_of(directory, target):
        raise NotOurs(f"{target} is not a report of {directory} and is left as it is: give another file with --out")
    text = report_html(read_campaign(directory))
    try:
        write_text(target, text)
    except StorageError as error:
        raise UsageError(f"{error}; give another path") from error
    return target


def _signature(directory: Path) -> str:
    owner = owner_of(directory)
    return f"retrain {owner.id} {owner.place}" if owner else "retrain"


def _is_report_of(directory: Path, target: Path) -> bool:
    if target.is_symlink() or not target.is_file():
        return False
    with open(target, encoding="utf-8", errors="replace") as file:
        return generator(_signature(directory)) in file.read(1 << 12)


def report_html(campaign: Campaign) -> str:
    sections = [
        ("Verdict", _verdicts(campaign)),
        ("Curves", curves_section(campaign)),
        ("Reward and audit", audit_section(campaign)),
        ("Results", results_section(campaign)),
        ("Same prompt", same_prompt_section(campaign)),
        ("Distributions", distributions_section(campaign)),
        ("LoRA rank", squeeze_section(campaign)),
        ("Settings", settings_section(campaign)),
        ("Runs", runs_section(campaign)),
    ]
    made = [(title, body) for title, body in sections if body]
    links = " ".join(f'<a href="#{_anchor(title)}">{escape(title)}</a>' for title, _ in made[1:])
    blocks = [f'<section id="{_anchor(title)}"><h2>{escape(title)}</h2>{body}</section>' for title, body in made[1:]]
    head = f"{_header(campaign)}<nav class='inside no-print'>{links}</nav>{made[0][1]}"
    return document(
        REPORT, styles=["charts.css", "pages/report.css"], script="pages/report.js",
        made_by=_signature(campaign.directory), title=f"{campaign.manifest['name']}: report",
        body=head + "".join(blocks),
    )  # fmt: skip


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _header(campaign: Campaign) -> str:
    runs, comparison = campaign.runs, campaign.comparison
    states = {state: sum(run.state == state for run in runs) for state in dict.fromkeys(run.state for run in runs)}
    seeds = sorted({run.seed for run in runs})
    config = next(iter(campaign.configs.values()), {})
    made = datetime.datetime.fromtimestamp(campaign.manifest["updated"], datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    facts = [
        plural(len(campaign.labels), "condition") + " × " + plural(len(seeds), "seed"),
        ", ".join(f"{count} {state}" for state, count in states.items()),
    ]
    if config:
        training = config["training"]
        facts += [
            f"{config['model']['model']}, rank {config['model']['lora_rank']}",
            f"{training['max_steps']} steps × {training['batch_size']} prompts × {training['group_size']} completions",
            f"data {config['data']['source']}",
        ]
    cost = comparison["conditions"]
    facts.append(
        f"{short(sum(c['tokens'] for c in cost))} tokens, {duration(sum(c['seconds'] for c in cost))} of device time"
    )
    spans = " ".join(f"<span>{escape(fact)}</span>" for fact in [*facts, made])
    return f"<h1>{escape(campaign.manifest['name'])}</h1><p class='facts'>{spans}</p>"


def _verdicts(campaign: Campaign) -> str:
    """Sentences first, then the picture of the differences, then what weakens them."""
    comparison, measure = campaign.comparison, campaign.measure
    others = comparison["conditions"][1:]
    items = [_verdict_item(condition, comparison["baseline"]) for condition in others]
    if not others:
        only = comparison["conditions"][0]
        level = "no finished run" if only["after_mean"] is None else level_words(only, measure)
        items = [f'<li class="unclear"><b>One condition: nothing is compared</b>{escape(only["label"])}: {level}</li>']
    body = f"<ul class='verdicts'>{''.join(items)}</ul>"
    if comparison["note"]:
        body += f"<p class='warn'>{escape(comparison['note'])}</p>"
    if comparison["follow_up"]:
        power, _, command = comparison["follow_up"].partition("\n")
        body += f"<p class='muted'>{escape(power)} <code>{escape(command)}</code></p>"
    unit = "points" if comparison["share"] else ""
    rows = [
        Row(
            condition["label"],
            place,
            [(d, f"seed {s}: {amount(d, measure, sign=True)}")
             for s, d in zip(condition["paired_seeds"], condition["differences"], strict=True)],
            condition["typical_difference"],
            condition["difference_interval"] if condition["pairs"] >= MIN_BAND_SEEDS else None,
            "" if condition["p_value"] is None else p_words(condition["p_value"]),
            new_problems(condition, measure) if condition["pairs"] >= MIN_BAND_SEEDS else None,
        )
        for place, condition in enumerate(others, start=1)
        if condition["pairs"]
    ]  # fmt: skip
    plots = []
    if rows:
        chart = charts.dot_chart(
            rows, label=f"difference to {comparison['baseline']} for each seed", zero=True, unit=unit,
            x_title=f"difference to {comparison['baseline']}" + (", points" if unit else ""),
            margin=comparison["margin"],
        )  # fmt: skip
        words = _difference_words(comparison, rows)
        plots.append(figure(f"{title_of(measure)}: difference to the baseline", words, chart))
    plots += _seed_plot(campaign)
    return body + f"<div class='plots'>{''.join(plots)}</div>"


def _verdict_item(condition: dict[str, Any], baseline: str) -> str:
    verdict = condition["verdict"]
    unclear = dict.fromkeys(("cannot", INTERIM, EXPLORATORY), "unclear")
    word = verdict.removeprefix("typical runs ").split()[0].rstrip(":")
    css = ({"better": "up", "worse": "down"} | unclear).get(word, "")
    head = f"{condition['label']} against {baseline}: {verdict[0].upper()}{verdict[1:]}"
    return f'<li class="{css}"><b>{escape(head)}</b>{escape(condition["sentence"])}</li>'


def _difference_words(comparison: dict[str, Any], rows: Sequence[Row]) -> str:
    bars = interval_words("bar", any(row.interval for row in rows))
    words = f"each dot one pair of seeds; line: typical difference; {bars}"
    words += "; thin line: the same on new problems" if any(row.wider for row in rows) else ""
    return words + ("; grey: differences that do not matter" if comparison["margin"] else "")


def _seed_plot(campaign: Campaign) -> list[str]:
    comparison, measure = campaign.comparison, campaign.measure
    unit, limits = ("%", (0.0, 1.0)) if comparison["share"] else ("", None)
    conditions = comparison["conditions"]
    by_seed = [dict(zip(c["finished"], c["after_values"], strict=True)) for c in conditions]
    seeds = sorted({seed for values in by_seed for seed in values})
    if not seeds:
        return []
    lines = [(f"seed {seed}", [values.get(seed) for values in by_seed]) for seed in seeds]
    chart = charts.pair_chart(
        [c["label"] for c in conditions], lines, label=f"{title_of(measure)} of every seed", unit=unit, limits=limits
    )
    return [figure(f"{title_of(measure)}, every seed", "a grey line joins the runs of one seed", chart)]
