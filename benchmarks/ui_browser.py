"""How fast the pages of `retrain ui` are in a browser, over a large campaign and an answer of 4,000 tokens.

    build/browser/bin/python benchmarks/ui_browser.py [--directory DIR] [--runs 40] [--steps 10000]

`make test-ui` makes that environment; the browser is chromium, or RETRAIN_CHROMIUM. Without --directory the campaign is
made first (``made_runs.py``). Times are of the browser's own clock, medians of several: until the first paint of the
list of campaigns, the server warm; from another choice of smoothing until the charts in sight are drawn (the first of
them, and all); from another colour until the tokens wear it, layout and paint included.
"""

import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from commandline import bar, opened, parser_of, publish, table, with_verdicts
from made_runs import add_arguments, campaign_of, long_answers
from ui import serving

CHROMIUM = os.environ.get("RETRAIN_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
TOKENS, REPEATS = 4_000, 5
BARS = {"paint": 1.0, "chart": 0.1, "tokens": 0.1}
"""Seconds."""
DRAWN = """() => { window.drawn = []; const clear = CanvasRenderingContext2D.prototype.clearRect;
  CanvasRenderingContext2D.prototype.clearRect = function (...box) {
    drawn.push(performance.now()); return clear.apply(this, box); }; }"""
CHANGE = """async (value) => { const start = performance.now();
  const select = document.querySelector("select[aria-label=smoothing]");
  drawn.length = 0; select.value = value; select.dispatchEvent(new Event("change"));
  const wait = (ms) => new Promise((done) => setTimeout(done, ms));
  while (!drawn.length || performance.now() - drawn[drawn.length - 1] < 400) await wait(20);
  return [drawn[0] - start, drawn[drawn.length - 1] - start]; }"""
COLOUR = """async () => { const start = performance.now();
  document.dispatchEvent(new KeyboardEvent("keydown", {key: "c", bubbles: true}));
  document.body.offsetHeight; await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - start; }"""


def measure(directory: Path, long: Path, cache: Path) -> dict[str, Any]:
    """Seconds: lists of what was repeated."""
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    out: dict[str, list[float]] = {"paint": [], "first": [], "chart": [], "tokens": []}
    with sync_playwright() as playwright, serving(cache, directory) as (_, url, _begin):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(120_000)
        for _ in range(REPEATS + 1):
            page.goto(url, wait_until="load")
            page.wait_for_selector("a.open")
            out["paint"].append(
                page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1e3
            )
            out["first"].append(page.evaluate("() => performance.now()") / 1e3)
        page.goto(f"{url}/metrics/{directory.name}", wait_until="load")
        page.wait_for_function("() => document.querySelectorAll('.chartcard canvas').length > 3")
        page.wait_for_timeout(3000)
        page.evaluate(DRAWN)
        charts = [page.evaluate(CHANGE, f"mean:{smooth}") for smooth in (5, 10, 20, 50, 100)]
        out["chart"] = [first / 1e3 for first, _ in charts]
        out["charts"] = [last / 1e3 for _, last in charts]
        browser.close()
        with serving(cache, long) as (_, other, _begin):
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.goto(f"{other}/tokens/{long.name}?index=0", wait_until="load")
            page.wait_for_function(f"() => document.querySelectorAll('.t').length >= {TOKENS}")
            out["tokens"] = [page.evaluate(COLOUR) / 1e3 for _ in range(REPEATS)]
            out["classes"] = [float(page.locator("main[data-painted]").get_attribute("data-painted") or 0) / 1e3]
            browser.close()
    return {key: statistics.median(values[1:] or values) for key, values in out.items()}


def main() -> None:
    parser = parser_of(__doc__)
    add_arguments(parser)
    options = parser.parse_args()
    with opened(options), tempfile.TemporaryDirectory() as temporary:
        directory, long = campaign_of(options, Path(temporary)), Path(temporary) / "long"
        long_answers(long, 2, TOKENS)
        found = measure(directory, long, Path(temporary) / "cache")
    words = {
        "paint": "first paint", "first": "the list of campaigns", "chart": "first chart drawn after a change",
        "charts": "all charts in sight drawn after it", "tokens": f"{TOKENS:,} tokens in another colour",
        "classes": "of that, setting classes",
    }  # fmt: skip
    rows = [(text, f"{1e3 * found[key]:,.0f}") for key, text in words.items()]
    lines = [bar(f"{words[key]} within {most:g} s", found[key] <= most) for key, most in BARS.items()]
    publish(options, "ui in a browser", with_verdicts(table(("", "ms"), rows), lines), found)


if __name__ == "__main__":
    main()
