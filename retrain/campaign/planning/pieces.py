"""The text of a manifest in pieces, one for each fact and run: what has not changed is not made into text again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from retrain.files import dumps

RUNS = "runs"


class Pieces:
    """Indented JSON of a mapping whose key ``runs`` lists mappings, as ``files.dumps`` writes it, byte by byte."""

    def __init__(self) -> None:
        self._facts: dict[str, str] = {}
        self._runs: dict[str, str] = {}

    def change(self, facts: Mapping[str, Any], runs: Mapping[str, Mapping[str, Any]]) -> None:
        """Make these facts, by key, and entries of runs, by run id, into text."""
        for key, value in facts.items():
            self._facts[key] = f"{dumps(key)}: {_indented(value, 2)}"
        for run_id, entry in runs.items():
            self._runs[run_id] = _indented(entry, 4)

    def text(self, keys: Iterable[str], run_ids: Iterable[str]) -> str:
        """The whole, with the facts and runs in this order; facts never given to ``change`` are left out."""
        runs = ",\n    ".join([self._runs[run_id] for run_id in run_ids])
        whole = f'"{RUNS}": [\n    {runs}\n  ]' if runs else f'"{RUNS}": []'
        facts = [whole if key == RUNS else self._facts[key] for key in keys if key == RUNS or key in self._facts]
        return "{\n  " + ",\n  ".join(facts) + "\n}\n"


def _indented(value: Any, by: int) -> str:
    return dumps(value, indent=2).replace("\n", "\n" + " " * by)
