"""Draw the README's pictures from a real run of the quickstart campaign.

    python scripts/demo_picture.py [docs/images]

Writes demo.svg, the live view two thirds through, and result.svg, the comparison and the recommended rank at the end.
"""

import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from retrain.campaign.controller import launch
from retrain.commands.console import Board, board_view, message_text
from retrain.commands.tables import comparison_table, squeeze_line
from retrain.config import load
from retrain.files import write_text
from retrain.records.observer import SpecLike

ROOT = Path(__file__).parents[1]
COMMAND = "retrain train campaigns/quickstart.toml"
FONT_FACE = re.compile(r"@font-face \{.*?\}\n?", re.DOTALL)
"""Rich's pictures ask the network for a font; ours make do with the reader's monospaced one."""


class Photographer(Board):
    """Takes a picture of the live view when the last run has done two thirds of its steps."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.taken = path, False
        self.messages: list[tuple[str, str]] = []

    def step(self, spec: SpecLike, row: Mapping[str, Any]) -> None:
        """As on a terminal; the picture is taken once."""
        super().step(spec, row)
        if not self.taken and all(3 * view.steps_done >= 2 * view.max_steps for view in self.runs.values()):
            self.taken = True
            self.export_svg(self.path, width=110)

    def message(self, text: str, level: str = "info") -> None:
        """Keep the line."""
        self.messages.append((text, level))

    def export_svg(self, path: Path, width: int, after: Sequence[RenderableType] = ()) -> None:
        """Write what a terminal would show: messages, the live view as it stands, then ``after`` (tables)."""
        shown = Group(
            *(message_text(*message) for message in self.messages[-50:]),
            board_view(self, width, 50, self.clock()),
            *after,
        )
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            console = Console(
                record=True, file=nowhere, width=width, height=50, force_terminal=True, legacy_windows=False
            )
            console.print(shown)
            write_text(path, FONT_FACE.sub("", console.export_svg(title=COMMAND)))


def main(folder: Path) -> None:
    """Train the quickstart campaign in a temporary directory and write both pictures."""
    console = Photographer(folder / "demo.svg")
    with tempfile.TemporaryDirectory() as out:
        outcome = launch(load(ROOT / "campaigns" / "quickstart.toml"), Path(out) / "quickstart", console)
        summary = outcome.summary
        summary["squeeze"]["run"] = "logs/quickstart/runs/" + Path(summary["squeeze"]["run"]).parent.name
    console.messages.clear()
    width = 120
    tables = [comparison_table(summary["comparison"], width).rich(), "", Text(squeeze_line(summary["squeeze"]))]
    console.export_svg(folder / "result.svg", width, tables)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images")
