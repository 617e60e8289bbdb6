"""The data that the endpoints of the API read: one object for each server, and for each copy of the page."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from retrain.ui.answers import Query
from retrain.ui.findings import Findings
from retrain.ui.library import Library
from retrain.ui.summary import Summaries
from retrain.util.jsonl import LineIndex


@dataclass(frozen=True)
class ApiContext:
    library: Library
    findings: Findings
    summaries: Summaries
    spans: dict[Path, LineIndex] = field(default_factory=dict)

    @classmethod
    def over(cls, library: Library) -> "ApiContext":
        findings = Findings(library)
        return cls(library, findings, Summaries(library, findings))


Endpoint = Callable[[ApiContext, Query], object]
