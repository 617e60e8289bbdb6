"""Settings of runs as dotted keys, and the keys in which runs or groups of them differ."""

from collections.abc import Sequence

from retrain.config.root import flat
from retrain.records.schema.base import Row
from retrain.ui.answers import JsonObject

# Entries of a run's config.json that are no settings.
FACTS = ("types", "packages", "code", "git", "ranges", "built", "base", "data_sizes", "modules", "seeds",
         "heldout_hashes")  # fmt: skip
NAMES = ("run_id", "logging", "data_hash", "heldout_hash", "initial_adapter")
MOST_VALUES = 4  # Most values of a key that are shown for a group


def settings_in(facts: Row) -> Row:
    return dict(flat({key: value for key, value in facts.items() if key not in FACTS and key not in NAMES}))


def table_in(facts: Row, name: str) -> Row:
    table = facts.get(name)
    return dict(table) if isinstance(table, dict) else {}


def differing(a: Row, b: Row) -> list[JsonObject]:
    return [{"key": key, "a": a.get(key), "b": b.get(key)} for key in a | b if a.get(key) != b.get(key)]


def varying(settings: Sequence[Row]) -> list[str]:
    keys = dict.fromkeys(key for each in settings for key in each)
    return [key for key in keys if any(each.get(key) != settings[0].get(key) for each in settings)]


def group_differences(groups: Sequence[Sequence[Row]]) -> list[JsonObject]:
    """Return the keys in which groups of runs differ, without seeds, with at most ``MOST_VALUES`` values of each
    group."""
    differences: list[JsonObject] = []
    for key in varying([each for group in groups for each in group]):
        values = [list({str(each.get(key)): each.get(key) for each in group}.values()) for group in groups]
        differs = len({tuple(sorted(map(str, each))) for each in values}) > 1
        if differs and not key.endswith(("seed", "seeds")):
            differences.append({"key": key, "values": [each[:MOST_VALUES] for each in values]})
    return differences
