"""Make every picture in docs/images anew (`make pictures`).

    build/browser/bin/python benchmarks/pictures.py [OUT] [--logs build/pictures/logs] [--only NAME ...]

Trains the campaigns quickstart and gtpo in ``--logs``, which takes a quarter of an hour on two cores; what is trained
already stays. demo.svg is the live view of quickstart two thirds through; the others are pages in chromium (or
RETRAIN_CHROMIUM): those of `retrain ui`, the report of gtpo, and one step's rollouts. Of every campaign that was
trained in LOGS/disputes there is a picture of its results and differences, cut from its report.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]
from rich.console import Console, Group
from ui import serving

from retrain.campaign.controller import launch
from retrain.cli.console import Board, board_view, message_text
from retrain.config import load
from retrain.files import write_text
from retrain.records.observer import SpecLike

ROOT = Path(__file__).parents[1]
RUN = "quickstart/runs/grpo+none_s1"
PAGES = {
    "ui_campaigns": "/", "ui_campaign": "/campaign/logs/gtpo", "ui_metrics": "/metrics/logs/gtpo",
    "ui_problems": "/problems/logs/quickstart", "ui_prompt": "/prompt/logs/quickstart",
    "ui_rollouts": "/rollouts/logs/quickstart", "ui_tokens": f"/tokens/logs/{RUN}",
    "ui_timeline": f"/timeline/logs/{RUN}", "ui_lora": "/lora/logs/quickstart",
    "ui_compare": "/compare/logs/quickstart", "ui_notes": "/notes/logs/gtpo",
}  # fmt: skip
FILES = {"report": "gtpo/report.html", "rollouts": f"{RUN}/train_iteration_000010.html#color=s"}
SIZES = {"report": (1024, 1290), "rollouts": (1100, 700)}
COLOURS, SETTLED_MS, WIDTH = 96, 2_500, 110
FONT_FACE = re.compile(r"@font-face \{.*?\}\n?", re.DOTALL)
"""Rich's pictures ask the network for a font; without it they have the reader's monospaced one."""


class Photographer(Board):
    """Writes a picture of the live view when every run has done two thirds of its steps."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.is_done = path, False
        self.messages: list[tuple[str, str]] = []

    def step(self, spec: SpecLike, row: Mapping[str, Any]) -> None:
        super().step(spec, row)
        if not self.is_done and all(3 * view.steps_done >= 2 * view.max_steps for view in self.runs.values()):
            self.is_done = True
            with open(os.devnull, "w", encoding="utf-8") as nowhere:
                console = Console(record=True, file=nowhere, width=WIDTH, height=50, force_terminal=True)
                lines = (message_text(*message) for message in self.messages[-50:])
                console.print(Group(*lines, board_view(self, WIDTH, 50, self.clock())))
            picture = console.export_svg(title="retrain train campaigns/quickstart.toml")
            write_text(self.path, FONT_FACE.sub("", picture))

    def message(self, text: str, level: str = "info") -> None:
        self.messages.append((text, level))


def photograph(out: Path, logs: Path, names: Sequence[str]) -> None:
    """Write the pages that have one of the names, by default all. Of a dispute, the first two charts are enough."""
    chromium = os.environ.get("RETRAIN_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright, serving(logs.parent / "cache", logs) as (_, url, _begin):
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        reports = sorted((logs / "disputes").glob("*/report.html"))
        files = FILES | {f"dispute_{report.parent.name}": str(report.relative_to(logs)) for report in reports}
        addresses = {name: url + page for name, page in PAGES.items()}
        addresses |= {name: f"file://{logs.resolve()}/{file}" for name, file in files.items()}
        for name in names or addresses:
            width, height = SIZES.get(name, (1280, 860))
            page = browser.new_page(viewport={"width": width, "height": height})
            page.goto(addresses[name])
            page.wait_for_timeout(SETTLED_MS)
            path = out / f"{name}.png"
            pictured = page.locator("div.two").first if name.startswith("dispute_") else page
            pictured.screenshot(path=path)
            Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)
            print(f"{path}: {path.stat().st_size // 1000} kB", flush=True)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "pictures" / "logs")
    pages = ", ".join((*PAGES, *FILES, "dispute_…"))
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of the pages: {pages}")
    options = parser.parse_args()
    if not (options.logs / "quickstart").is_dir():
        launch(
            load(ROOT / "campaigns" / "quickstart.toml"),
            options.logs / "quickstart",
            Photographer(options.out / "demo.svg"),
        )
    command = [
        sys.executable,
        "-m",
        "retrain",
        "train",
        "campaigns/gtpo.toml",
        "--out",
        options.logs.resolve() / "gtpo",
    ]
    subprocess.run([*command, "--plain"], cwd=ROOT, check=True)
    photograph(options.out, options.logs, options.only or ())


if __name__ == "__main__":
    main()
