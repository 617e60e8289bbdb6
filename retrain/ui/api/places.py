"""``/api/places``: every campaign and run that is there."""

from typing import Any

from starlette.routing import Route

from retrain.ui.answers import Query, json_route
from retrain.ui.findings import Findings
from retrain.ui.library import Library
from retrain.ui.summary import summary_of


def routes(library: Library, findings: Findings) -> list[Route]:
    def places(query: Query) -> dict[str, Any]:
        homes = library.homes()
        findings.ask(homes)
        found = [summary_of(library, findings, home) for home in homes]
        return {"places": found, "reading": {"done": findings.done, "of": findings.of}}

    return [json_route("/api/places", places)]
