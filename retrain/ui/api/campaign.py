"""``/api/places``: all campaigns and runs; ``/api/campaign``: one campaign with its comparison, the number of seeds
still needed, and its cost; ``/api/runs``: the runs of a campaign."""

import time

from retrain.config.evaluation import HELDOUT
from retrain.records.schema.base import Row
from retrain.records.schema.layout import EVALS
from retrain.ui.answers import JsonObject, Query
from retrain.ui.banner import banner_of
from retrain.ui.context import ApiContext
from retrain.ui.library import Library
from retrain.ui.settings import table_in
from retrain.ui.sources import Home, sets_of

READ_S = 0.4  # Seconds that one answer may read files of runs; the next answer continues
WAIT_MS = 400  # Milliseconds to wait for a new comparison before the previous one is shown
COST_KEYS = ("label", "seconds_per_run", "tokens_per_run", "typical_difference", "difference_interval")


def places(context: ApiContext, query: Query) -> JsonObject:
    findings, summaries, homes = context.findings, context.summaries, context.library.homes()
    findings.ask_where_needed(home for home in homes if not summaries.is_known(home))
    end = time.monotonic() + READ_S
    entries = [summaries.of(home, read=time.monotonic() < end) for home in homes]
    unread = sum(not summaries.is_known(home) for home in homes)
    of = findings.of + unread
    return {"places": entries, "reading": {"done": min(findings.done, of), "of": of}}


def campaign(context: ApiContext, query: Query) -> JsonObject:
    library = context.library
    home = library.home(query.text("at"))
    finding = context.findings.comparison(home, query.number("wait_ms", WAIT_MS, 0, 60_000) / 1000.0)
    comparison = finding.comparison
    conditions = comparison["conditions"] if comparison else []
    rows = (row for run in home.runs for row in library.rows(run, EVALS))
    return {
        "banner": banner_of(library, home, comparison, finding.why),
        "summary": context.summaries.of(home),
        "runs": [run.to_json() for run in home.runs],
        "comparison": comparison,
        "why": finding.why,
        "fresh": finding.fresh,
        "sets": sets_of(str(row.get("name", HELDOUT)) for row in rows),
        "metric": comparison["metric"] if comparison else None,
        "power": finding.power,
        "cost": [{key: condition.get(key) for key in COST_KEYS} for condition in conditions],
        "checksums": checksums_of(library, home),
    }


def runs(context: ApiContext, query: Query) -> JsonObject:
    home = context.library.campaign(query.text("at"))
    return {"home": home.location, "runs": [run.to_json() for run in home.runs]}


def checksums_of(library: Library, home: Home) -> JsonObject:
    """Return checksums and versions by name: one value if all runs have the same, else the values by run id."""
    by_name: dict[str, dict[str, str]] = {}
    for run in home.runs:
        for name, value in _checksums(library.settings(run)).items():
            if value:
                by_name.setdefault(name, {})[run.run_id] = value
    return {name: next(iter(values.values())) if len(set(values.values())) == 1 else values
            for name, values in by_name.items()}  # fmt: skip


def _checksums(facts: Row) -> dict[str, str | None]:
    base, code, git = (table_in(facts, name) for name in ("base", "code", "git"))
    hashes = {key: value if isinstance(value := facts.get(key), str) else None for key in ("data_hash", "heldout_hash")}
    return hashes | {"base": base.get("fingerprint"), "code": code.get("sha256"), "revision": git.get("revision")}
