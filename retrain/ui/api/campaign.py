"""``/api/campaign``: one campaign with its comparison, how many more seeds would tell, and what it cost."""

from collections.abc import Mapping
from typing import Any

from starlette.routing import Route

from retrain.config.evaluation import HELDOUT
from retrain.ui.answers import Query, json_route
from retrain.ui.banner import banner_of
from retrain.ui.findings import Findings
from retrain.ui.library import Library
from retrain.ui.settings import table_in
from retrain.ui.sources import Home, sets_of
from retrain.ui.summary import Summaries

WAIT_MS = 400  # Milliseconds to wait for a new comparison before the previous one is shown
SAME = ("data_hash", "heldout_hash")


def routes(library: Library, findings: Findings, summaries: Summaries) -> list[Route]:
    def campaign(query: Query) -> dict[str, Any]:
        home = library.home(query.text("at"))
        found = findings.comparison(home, query.number("wait_ms", WAIT_MS, 0, 60_000) / 1000.0)
        comparison = found.comparison
        rows = (row for run in home.runs for row in library.numbers(run, refresh=False).evaluations())
        return {
            "banner": banner_of(library, home, comparison, found.why),
            "summary": summaries.of(home),
            "runs": [run.to_json() for run in home.runs],
            "comparison": comparison,
            "why": found.why,
            "fresh": found.fresh,
            "sets": sets_of(str(row.get("name", HELDOUT)) for row in rows),
            "metric": comparison["metric"] if comparison else None,
            "power": found.power,
            "cost": costs_of(comparison) if comparison else [],
            "checksums": checksums_of(library, home),
        }

    def runs(query: Query) -> dict[str, Any]:
        home = library.campaign(query.text("at"))
        return {"home": home.place, "runs": [run.to_json() for run in home.runs]}

    return [json_route("/api/campaign", campaign), json_route("/api/runs", runs)]


def costs_of(comparison: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the mean cost of a finished run by condition, beside its difference to the baseline."""
    keys = ("label", "seconds_per_run", "tokens_per_run", "typical_difference", "difference_interval")
    return [{key: condition.get(key) for key in keys} for condition in comparison["conditions"]]


def checksums_of(library: Library, home: Home) -> dict[str, Any]:
    """Return checksums and versions by name: one value where all runs have the same, else the runs' values."""
    found: dict[str, dict[str, str]] = {}
    for run in home.runs:
        facts = library.settings(run)
        for name, value in _facts(facts).items():
            if value:
                found.setdefault(name, {})[run.run_id] = value
    return {name: next(iter(values.values())) if len(set(values.values())) == 1 else values
            for name, values in found.items()}  # fmt: skip


def _facts(facts: Mapping[str, Any]) -> dict[str, str | None]:
    base, code, git = (table_in(facts, name) for name in ("base", "code", "git"))
    named = {"base": base.get("fingerprint"), "code": code.get("sha256"), "revision": git.get("revision")}
    return {key: facts.get(key) if isinstance(facts.get(key), str) else None for key in SAME} | named
