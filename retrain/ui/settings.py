"""Settings of runs as dotted keys, and the keys in which runs or groups of them differ."""

from collections.abc import Mapping, Sequence
from typing import Any

from retrain.config.root import flat

FACTS = ("types", "packages", "code", "git", "ranges", "built", "base", "data_sizes", "modules", "seeds",
         "heldout_hashes")  # fmt: skip
"""Entries of a run's ``config.json`` that are no settings."""
NAMES = ("run_id", "logging", "data_hash", "heldout_hash", "initial_adapter")
MOST_VALUES = 4  # Values of one key that a group is shown with


def settings_in(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a run's facts by dotted key."""
    return dict(flat({key: value for key, value in facts.items() if key not in FACTS and key not in NAMES}))


def table_in(facts: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the table of this name; {} where there is none."""
    found = facts.get(name)
    return dict(found) if isinstance(found, dict) else {}


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every key whose values differ; null where one side has none."""
    return [
        {"key": key, "a": a.get(key), "b": b.get(key)} for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)
    ]


def varying(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that do not have the same value in all runs."""
    keys = dict.fromkeys(key for each in settings for key in each)
    return [key for key in keys if any(each.get(key) != settings[0].get(key) for each in settings)]


def group_differences(groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the keys in which groups of runs differ, without seeds, each with at most ``MOST_VALUES`` of the
    ``values`` that every group has."""
    found = []
    for key in varying([each for group in groups for each in group]):
        values = [list({str(each.get(key)): each.get(key) for each in group}.values()) for group in groups]
        differs = len({tuple(sorted(map(str, each))) for each in values}) > 1
        if differs and not key.endswith(("seed", "seeds")):
            found.append({"key": key, "values": [each[:MOST_VALUES] for each in values]})
    return found
