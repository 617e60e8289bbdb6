"""Draw the README's pictures from a real run of the quickstart campaign.

    python scripts/demo_picture.py [docs/images]

Writes demo.svg, the live view two thirds through, and result.svg, the tables at the end.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.campaign.running.controller import launch
from retrain.config import load
from retrain.record.console import RecordingConsole
from retrain.record.observer import SpecLike
from retrain.record.tables import comparison_table, squeeze_table

ROOT = Path(__file__).parents[1]
COMMAND = "retrain train campaigns/quickstart.toml"


class Photographer(RecordingConsole):
    """Takes a picture of the live view when the last run has done two thirds of its steps."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.taken = path, False

    def step(self, spec: SpecLike, row: Mapping[str, Any]) -> None:
        """As on a terminal; the picture is taken once."""
        super().step(spec, row)
        if not self.taken and all(3 * view.steps_done >= 2 * view.max_steps for view in self.runs.values()):
            self.taken = True
            self.export_svg(self.path, COMMAND, width=110)


def main(folder: Path) -> None:
    """Train the quickstart campaign in a temporary directory and write both pictures."""
    console = Photographer(folder / "demo.svg")
    with tempfile.TemporaryDirectory() as out:
        outcome = launch(load(ROOT / "campaigns" / "quickstart.toml"), Path(out) / "quickstart", console)
        summary = outcome.summary
        summary["squeeze"]["run"] = "logs/quickstart/runs/" + Path(summary["squeeze"]["run"]).parent.name
    console.messages.clear()
    tables = [comparison_table(summary["comparison"]), "", squeeze_table(summary["squeeze"])]
    console.export_svg(folder / "result.svg", COMMAND, width=120, after=tables)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images")
