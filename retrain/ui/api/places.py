"""``/api/places``: every campaign and run that is there."""

import time
from typing import Any

from starlette.routing import Route

from retrain.ui.answers import Query, json_route
from retrain.ui.findings import Findings
from retrain.ui.library import Library
from retrain.ui.summary import Summaries

READ_S = 0.4  # Seconds of one answer in which the files of runs are read; the next answer goes on


def routes(library: Library, findings: Findings, summaries: Summaries) -> list[Route]:
    def places(query: Query) -> dict[str, Any]:
        homes = library.homes()
        findings.ask_where_needed(home for home in homes if not summaries.is_known(home))
        end = time.monotonic() + READ_S
        found = [summaries.of(home, read=time.monotonic() < end) for home in homes]
        unread = sum(not summaries.is_known(home) for home in homes)
        of = findings.of + unread
        return {"places": found, "reading": {"done": min(findings.done, of), "of": of}}

    return [json_route("/api/places", places)]
