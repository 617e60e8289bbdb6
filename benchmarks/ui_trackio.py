"""The page of `retrain ui` beside trackio's dashboard on the same campaign, in a browser: times and clicks.

    python -m venv build/environments/trackio && build/environments/trackio/bin/pip install trackio==0.43.0
    retrain train campaigns/quickstart.toml --set campaign.max_steps=60 --out logs/quick60
    build/browser/bin/python benchmarks/ui_trackio.py logs/quick60

trackio gets every number of the rows and evaluations, the condition as a setting, and the answers of every tenth step
as traces whose status says whether they are right. The time to the first chart is from the address typed until a chart
is drawn, the median of several, both servers warm. Clicks start at the address that each server prints; choosing from a
list counts as two, typing as one. trackio has no verdict: there it is held-out accuracy with colours by condition.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPEATS = 5
TRACKIO = Path("build/environments/trackio/bin/python")
CHART = "() => [...document.querySelectorAll('canvas')].some((canvas) => canvas.width > 100)"
CLICKS = {"click": 1, "choose": 2, "slide": 1, "type": 1, "see": 0}
WAYS = {
    "which condition is better": {
        "retrain": [("click", "a.open"), ("see", "text=/cannot tell|better|no difference/ >> nth=0")],
        "trackio": [
            ("click", "input[placeholder='Select...']"), ("click", "[role=option]:has-text('condition')"),
            ("type", "input[placeholder^='e.g., loss']", "heldout/correct_rate"),
            ("see", "text=correct_rate >> visible=true >> nth=0"),
        ],
    },
    "a failed answer at step 50": {
        "retrain": [
            ("click", "a.open"), ("click", "nav >> text=Rollouts"), ("slide", "input[type=range]", "50"),
            ("click", "tbody tr:has-text('✗') >> nth=0"), ("see", "text=/boxed/ >> visible=true >> nth=0"),
        ],
        "trackio": [
            ("click", "text=Traces"), ("choose", "select >> nth=0", "50"), ("click", "tr:has-text('Error') >> nth=0"),
            ("see", "text=/boxed/ >> visible=true >> nth=0"),
        ],
    },
}  # fmt: skip
"""What is done to which element, with which value."""


def serve_trackio(campaign: Path) -> None:
    """Log the campaign as a program would that uses trackio, and show it until the process is ended."""
    import trackio  # pyright: ignore[reportMissingImports]

    for run in json.loads((campaign / "manifest.json").read_text())["runs"]:
        settings = {"condition": run["label"], "seed": run["seed"]}
        logged = trackio.init(project="compared", name=run["run_id"], config=settings, embed=False)
        files = [campaign / run["path"] / name for name in ("metrics.jsonl", "evals.jsonl")]
        for row in (json.loads(line) for file in files for line in file.open()):
            mine = "samples" in row  # an evaluation; rows of training repeat its figures
            keys = [key for key in row if key != "step" and key.startswith("eval/") == mine]
            logged.log({key: row[key] for key in keys if isinstance(row[key], (int, float))}, step=row["step"])
        for row in map(json.loads, (campaign / run["path"] / "emergence" / "generations.jsonl").open()):
            if row["step"] % 10 == 0:
                said = [("user", row["prompt"]), ("assistant", row["completion"])]
                messages = [{"role": role, "content": str(text)} for role, text in said]
                status = {"status": "ok" if row["correct"] else "error", "reward": row["reward"]}
                logged.log({"answer": trackio.Trace(messages, metadata=status)}, step=row["step"])
        trackio.finish()
    trackio.show("compared", open_browser=False, block_thread=True)


@contextlib.contextmanager
def trackio_of(campaign: Path, folder: Path) -> Iterator[str]:
    """The address of trackio's dashboard over this campaign."""
    command = [str(TRACKIO), __file__, str(campaign), "--serve-trackio"]
    environment = os.environ | {"TRACKIO_DIR": str(folder), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            line = next(line for line in server.stdout if "launched at: http" in line)
            yield line.partition("launched at: ")[2].strip().removesuffix("\x1b[0m")
        finally:
            server.terminate()


def follow(page: Any, way: list[tuple[str, ...]]) -> int:
    """Go this way, and return its clicks."""
    for how, element, *value in way:
        place = page.locator(element)
        if how == "click":
            place.click()
        elif how == "choose":
            place.select_option(value[0])
        elif how in ("slide", "type"):
            place.fill(value[0])
        place.wait_for() if how == "see" else page.wait_for_timeout(1500)
    return sum(CLICKS[how] for how, *_ in way)


def measure(browser: Any, url: str, tool: str, pictures: Path | None) -> dict[str, float]:
    def opened() -> Any:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(30_000)
        page.goto(url)
        return page

    found: dict[str, float] = {}
    times = []
    for _ in range(REPEATS + 1):
        page = opened()
        if tool == "retrain":
            page.locator("a.open").wait_for()
            page.goto(page.locator("a.open").evaluate("(link) => link.href"))
        page.wait_for_function(CHART, polling=10)
        times.append(page.evaluate("() => performance.now()") / 1e3)
        page.close()
    found["seconds to the first chart"] = statistics.median(times[1:])
    for question, ways in WAYS.items():
        page = opened()
        found[f"clicks to {question}"] = follow(page, ways[tool])
        if pictures:
            page.screenshot(path=pictures / f"{tool} {question}.png")
        page.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", type=Path, help="a finished campaign of more than 50 steps")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="the last screen of each way")
    parser.add_argument("--serve-trackio", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_trackio:
        serve_trackio(options.campaign)
        return

    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]
    from shared import table
    from ui import serving

    chromium = os.environ.get("RETRAIN_CHROMIUM") or shutil.which("chromium")

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright, contextlib.ExitStack() as servers:
        ours = servers.enter_context(serving(Path(folder) / "cache", options.campaign))[1]
        theirs = servers.enter_context(trackio_of(options.campaign.resolve(), Path(folder) / "trackio"))
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        found = [
            measure(browser, url, tool, options.pictures) for tool, url in (("retrain", ours), ("trackio", theirs))
        ]
    rows = [(name, *(f"{each[name]:.3g}" for each in found)) for name in found[0]]
    print(table(("", "retrain ui", "trackio 0.43"), rows))


if __name__ == "__main__":
    main()
