"""Write ``report.html``: the results of a campaign in one self-contained file, with the verdict first.

Everything is read from the campaign's directory, so a report can be written again at any time, also of a campaign that
was stopped. Texts and tables are in the HTML and need no script; a script draws the charts.
"""

import os
from pathlib import Path

from retrain.errors import NotOurs, StorageError, UsageError, printable
from retrain.files import write_text
from retrain.ownership import owner_of
from retrain.records.pages import document, generator
from retrain.records.schema.layout import REPORT
from retrain.verdicts import report_sections as sections
from retrain.verdicts.audited import audited
from retrain.verdicts.evidence import Campaign, read_campaign
from retrain.verdicts.report_charts import charts_of

STYLES = ("vendor/uplot/uPlot.min.css", "charts.css", "pages/report.css")


def write_report(directory: Path, out: Path | None = None) -> Path:
    """Write the report of a campaign's directory to ``out`` (a file or an existing directory; default: the campaign's
    directory) and return its path. Missing parent directories are created. Raises as ``write_campaign``, and UsageError
    if the directory holds no campaign."""
    target = out or directory / REPORT
    return write_campaign(read_campaign(directory), target / REPORT if target.is_dir() else target, "--out")


def write_campaign(campaign: Campaign, target: Path, option: str) -> Path:
    """Write the report of a campaign, or of other tools' results, to ``target`` and return its path.

    Raises UsageError if the file cannot be written, NotOurs if it exists and is another one (``option``: what to type
    for another file).
    """
    if os.path.lexists(target) and not _is_made_by(_signature(campaign), target):
        name = campaign.directory if campaign.foreign is None else campaign.manifest["name"]
        raise NotOurs(f"{target} is not a report of {name} and is left as it is: give another file with {option}")
    text = report_html(campaign)
    try:
        write_text(target, text)
    except StorageError as error:
        raise UsageError(f"{error}; give another path") from error
    return target


def _signature(campaign: Campaign) -> str:
    if campaign.foreign is not None:
        return f"retrain compare {printable(campaign.manifest['name'])}"
    owner = owner_of(campaign.directory)
    return f"retrain {owner.id} {owner.place}" if owner else "retrain"


def _is_made_by(signature: str, target: Path) -> bool:
    if target.is_symlink() or not target.is_file():
        return False
    with open(target, encoding="utf-8", errors="replace") as file:
        return generator(signature) in file.read(1 << 12)


def report_html(campaign: Campaign) -> str:
    manifest, is_foreign = campaign.manifest, campaign.foreign is not None
    # The analysis of the first finished run, and those of the other conditions, if any.
    squeezes = [each for each in (manifest.get("squeeze"), *(manifest.get("squeezes") or {}).values()) if each]
    audits = audited(campaign.runs, campaign.labels)
    charts = charts_of(campaign, audits, squeezes)
    secondary, runs = sections.secondary(campaign), sections.run_rows(campaign)
    sampled, same_prompts = sections.same_prompts(campaign)
    problems, (heads, results) = sections.problem_changes(campaign), sections.results(campaign)
    configured, settings = sections.settings_rows(campaign)
    parts = {
        "Curves": charts.get("curves"), "Reward and audit": audits, "Results": True, "Same prompt": same_prompts,
        "Problems": problems, "Distributions": charts.get("distributions"), "LoRA rank": squeezes,
        "Settings": settings or len(configured) > 1, "Runs": runs,
    }  # fmt: skip
    return document(
        REPORT, styles=STYLES, script="pages/report.js", libraries=["vendor/uplot/uPlot.iife.min.js"],
        made_by=_signature(campaign), title=f"{manifest['name']}: report",
        name=manifest["name"], labels=campaign.labels, comparison=campaign.comparison, charts=charts,
        sections=[title for title, part in parts.items() if part], facts=sections.facts(campaign),
        verdicts=sections.verdicts(campaign), audits=audits, measure=sections.title_of(campaign.measure),
        heads=heads, results=results, problems=problems, is_foreign=is_foreign, secondary=secondary, sampled=sampled,
        same_prompts=same_prompts, squeezes=[sections.squeeze_table(report) for report in squeezes],
        configured=configured, settings=settings, runs=runs,
    )  # fmt: skip
