"""``/api/compare``: in what two runs or campaigns differ: settings, code, machine, data, what they began from."""

import difflib
from collections.abc import Mapping
from typing import Any

from starlette.routing import Route

from retrain.config.root import flat
from retrain.records.reader import read_object, read_text
from retrain.records.schema.layout import CODE_DIFF, ENVIRONMENT
from retrain.ui.answers import Query, json_route
from retrain.ui.library import Library
from retrain.ui.settings import differing, settings_in, table_in
from retrain.ui.sources import Run

MOST_READ = 4 << 20  # Characters of a patch
MOST_DIFF = 400_000  # Bytes of a patch that are compared; longer ones are only told apart
MOST_LINES = 4_000
HASHES = ("data_hash", "heldout_hash", "initial_adapter")


def routes(library: Library) -> list[Route]:
    def compare(query: Query) -> dict[str, Any]:
        a, b = (_first(library, query.text(side)) for side in ("a", "b"))
        facts = [library.settings(run) for run in (a, b)]
        machines = [read_object(library.file(run, ENVIRONMENT)) for run in (a, b)]
        return {
            "a": a.to_json(),
            "b": b.to_json(),
            "config": differing(*map(settings_in, facts)),
            "code": code_of(library, a, b, facts),
            "environment": differing(*(dict(flat(_without(each, ("packages", "git")))) for each in machines)),
            "packages": differing(*(table_in(each, "packages") for each in machines)),
            "hashes": [_hash(name, one, other) for name, one, other in _hashes(facts[0], facts[1])],
        }

    return [json_route("/api/compare", compare)]


def _first(library: Library, place: str) -> Run:
    """Return a run, or the first one of a campaign."""
    runs = library.home(place).runs
    return runs[0] if runs else library.run(place)


def code_of(library: Library, a: Run, b: Run, facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return in what version, revision and the patches of what was not committed differ."""
    texts = [read_text(library.file(run, CODE_DIFF), MOST_READ) for run in (a, b)]
    same = texts[0] == texts[1]
    lines: list[str] = []
    if not same and max(map(len, texts)) <= MOST_DIFF:
        one, other = (text.splitlines() for text in texts)
        lines = list(difflib.unified_diff(one, other, "a/code.diff", "b/code.diff", lineterm="", n=1))
    code = [table_in(each, "code") | dict(flat({"git": table_in(each, "git")})) for each in facts]
    return {
        "facts": differing(*code),
        "same_diff": same,
        "diff": lines[:MOST_LINES],
        "cut": len(lines) > MOST_LINES or (not same and not lines),
    }


def _hashes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    rows = [(name, a.get(name), b.get(name)) for name in HASHES]
    for name in ("base", "heldout_hashes", "seeds"):
        one, other = (dict(flat(table_in(each, name))) for each in (a, b))
        rows += [(f"{name}.{key}", one.get(key), other.get(key)) for key in dict.fromkeys([*one, *other])]
    return rows


def _hash(name: str, a: Any, b: Any) -> dict[str, Any]:
    return {"name": name, "a": a, "b": b, "same": None if a is None and b is None else a == b}


def _without(facts: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if key not in names}
