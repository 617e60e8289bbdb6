"""``/api/compare``: differences of two runs (or campaigns' first runs) in settings, code, machine and data."""

import difflib
from collections.abc import Sequence

from retrain.config.root import flat
from retrain.records.reader import read_object, read_text
from retrain.records.schema.base import Row
from retrain.records.schema.layout import CODE_DIFF, ENVIRONMENT
from retrain.ui.answers import JsonObject, Query
from retrain.ui.context import ApiContext
from retrain.ui.library import Library
from retrain.ui.settings import differing, settings_in, table_in
from retrain.ui.sources import RunSource

MOST_READ = 4 << 20  # Characters of a patch
MOST_DIFF = 400_000  # Longest patch, in characters, whose lines are compared
MOST_LINES = 4_000
HASHES = ("data_hash", "heldout_hash", "initial_adapter")


def compare(context: ApiContext, query: Query) -> JsonObject:
    library = context.library
    runs = [_first(library, query.text(side)) for side in ("a", "b")]
    facts = [library.settings(run) for run in runs]
    machines = [read_object(library.file(run, ENVIRONMENT)) for run in runs]
    return {
        "a": runs[0].to_json(),
        "b": runs[1].to_json(),
        "config": differing(*map(settings_in, facts)),
        "code": code_of(library, runs, facts),
        "environment": differing(*(dict(flat(_without(machine, ("packages", "git")))) for machine in machines)),
        "packages": differing(*(table_in(machine, "packages") for machine in machines)),
        "hashes": hashes_of(*facts),
    }


def _first(library: Library, location: str) -> RunSource:
    runs = library.home(location).runs
    return runs[0] if runs else library.run(location)


def code_of(library: Library, runs: Sequence[RunSource], facts: Sequence[Row]) -> JsonObject:
    a, b = (read_text(library.file(run, CODE_DIFF), MOST_READ) for run in runs)
    lines: list[str] = []
    if a != b and max(len(a), len(b)) <= MOST_DIFF:
        names = ("a/code.diff", "b/code.diff")
        lines = list(difflib.unified_diff(a.splitlines(), b.splitlines(), *names, lineterm="", n=1))
    return {
        "facts": differing(*(table_in(each, "code") | dict(flat({"git": table_in(each, "git")})) for each in facts)),
        "same_diff": a == b,
        "diff": lines[:MOST_LINES],
        "cut": len(lines) > MOST_LINES or (a != b and not lines),
    }


def hashes_of(a: Row, b: Row) -> list[JsonObject]:
    pairs = [(name, a.get(name), b.get(name)) for name in HASHES]
    for table in ("base", "heldout_hashes", "seeds"):
        mine, its = (dict(flat(table_in(facts, table))) for facts in (a, b))
        pairs += [(f"{table}.{key}", mine.get(key), its.get(key)) for key in mine | its]
    return [{"name": name, "a": mine, "b": its, "same": None if mine is None and its is None else mine == its}
            for name, mine, its in pairs]  # fmt: skip


def _without(facts: Row, names: Sequence[str]) -> Row:
    return {key: value for key, value in facts.items() if key not in names}
