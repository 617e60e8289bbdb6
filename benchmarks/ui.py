"""How fast `retrain ui` answers over a large campaign, and what memory its server takes.

    python benchmarks/ui.py --directory DIR [--cold]
    build/browser/bin/python benchmarks/ui.py --directory DIR --browser

DIR is made by ``made_runs.py``, for --cold with its --no-columns, so that the server reads every line itself. The
server is a process of its own with an empty cache, asked over HTTP on this machine; the first request is timed from the
start of the process. Medians of the later requests, each for a metric that nothing has asked for, no page's first view
either. A new row is written to a copy of one run, and is seen when the event arrives. The server's processor time does
not depend on what else the machine does: bars of a tenth of a second are of that.

--browser measures the first paint of the list of campaigns in chromium (or RETRAIN_CHROMIUM) by the browser's own
clock, the server warm; `make test-ui` makes that environment.
"""

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from made_runs import make
from shared import bar, opened, parser_of, publish, table, with_verdicts

from retrain.ui.metrics import watched

ASKED, REPEATS = 8, 7
BARS = {"first": 5.0, "places": 1.0, "event": 2.0}
PROCESSOR_BARS = {"columns": 0.1, "curves": 0.1}
"""Seconds."""
MOST_MB, MOST_PAINT_S = 300.0, 1.0
LABELS = {
    "first": "first answer, the server's start included", "read": "everything read and compared, from the start",
    "places": "/api/places", "columns": "/api/columns, one key of all runs, first time",
    "columns again": "/api/columns, the same key again", "curves": "/api/curves, first time",
    "campaign": "/api/campaign", "metrics": "/api/metrics", "event": "a new row seen",
}  # fmt: skip


@contextlib.contextmanager
def serving(cache: Path, *directories: Path) -> Iterator[tuple[int, str, float]]:
    """Yield (process id, address, when it was started) of a server over these directories."""
    begin = time.perf_counter()
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "retrain", "ui", *map(str, directories), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        yield server.pid, line.split()[-1].rstrip("/"), begin
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)


def memory_mb(pid: int) -> float:
    """Return the most memory that the process has had resident."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM"))


def processor_s(pid: int) -> float:
    """Return the processor seconds of the process over its threads."""
    lines = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(line.split()[0]) for line in lines) / 1e9


def unwatched_metrics(directory: Path) -> list[str]:
    """Return metrics that no page asks for by itself."""
    with open(next((directory / "runs").iterdir()) / "metrics.jsonl") as file:
        row = json.loads(file.readline())
    numbers = [key for key, value in row.items() if isinstance(value, float)]
    return [key for key in numbers if key not in watched(row)][: 2 * ASKED]


def measure(directory: Path, temporary: Path) -> dict[str, dict[str, float]]:
    """Return seconds by request (``wall``, and ``processor`` of the server), and the server's memory in MB."""
    followed = temporary / "followed"
    shutil.copytree(next((directory / "runs").iterdir()), followed)
    with (
        serving(temporary / "cache", directory, followed) as (pid, url, begin),
        httpx.Client(base_url=url, timeout=300) as client,
    ):

        def timed(path: str, queries: Sequence[dict[str, Any]]) -> dict[str, float]:
            rows = []
            for query in queries:
                before, start = processor_s(pid), time.perf_counter()
                client.get(path, params=query).raise_for_status().json()
                rows.append((time.perf_counter() - start, processor_s(pid) - before))
            wall, processor = (statistics.median(column) for column in zip(*rows, strict=True))
            return {"wall": wall, "processor": processor}

        client.get("/api/places").raise_for_status()
        seconds = {"first": {"wall": time.perf_counter() - begin, "processor": processor_s(pid)}}
        while (reading := client.get("/api/places").json()["reading"])["done"] < reading["of"]:
            time.sleep(0.05)
        seconds["read"] = {"wall": time.perf_counter() - begin, "processor": processor_s(pid)}
        queries = [{"at": directory.name, "key": key} for key in unwatched_metrics(directory)]
        seconds["places"] = timed("/api/places", [{}] * REPEATS)
        seconds["columns"] = timed("/api/columns", queries[:ASKED])
        seconds["columns again"] = timed("/api/columns", queries[:1] * REPEATS)
        seconds["curves"] = timed("/api/curves", queries[ASKED:])
        seconds["campaign"] = timed("/api/campaign", [{"at": directory.name, "wait_ms": 60_000}] * 3)
        seconds["metrics"] = timed("/api/metrics", [{"at": directory.name}] * 3)
        seconds["event"] = {"wall": until_seen(client, followed)}
        return seconds | {"memory": {"mb": memory_mb(pid)}}


def until_seen(client: httpx.Client, run: Path) -> float:
    """Return the seconds from the writing of a row to its event."""
    row = json.dumps({"step": 10**6, "mean_reward": 0.5}).encode() + b"\n"
    written: list[float] = []

    def write() -> None:
        with open(run / "metrics.jsonl", "ab") as file:
            written.append(time.perf_counter())
            file.write(row)

    with client.stream("GET", "/api/events", params={"at": run.name}) as answer:
        threading.Timer(1.5, write).start()
        for line in answer.iter_lines():
            if line.startswith("data:") and "metrics" in json.loads(line[5:]).get("what", ()):
                return time.perf_counter() - written[0]
    raise SystemExit("the events ended")


def report(found: dict[str, dict[str, float]]) -> str:
    """Return the table of requests and the bars."""
    rows = [
        (text, *(f"{1e3 * found[key][kind]:,.0f}" if kind in found[key] else "" for kind in ("wall", "processor")))
        for key, text in LABELS.items()
    ]
    lines = [bar(f"{LABELS[key]} within {most:g} s", found[key]["wall"] <= most) for key, most in BARS.items()]
    lines += [
        bar(f"{LABELS[key]}: {1e3 * most:,.0f} ms of the processor", found[key]["processor"] <= most)
        for key, most in PROCESSOR_BARS.items()
    ]
    memory = found["memory"]["mb"]
    lines.append(bar(f"the server's memory, {memory:.0f} MB at most (bar {MOST_MB:.0f} MB)", memory < MOST_MB))
    return with_verdicts(table(("", "ms until answered", "ms of the server's processor"), rows), lines)


def first_paint(directory: Path, cache: Path) -> float:
    """Return the median seconds until the first paint of the list of campaigns."""
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    chromium = os.environ.get("RETRAIN_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    seconds = []
    with sync_playwright() as playwright, serving(cache, directory) as (_, url, _begin):
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(120_000)
        for _ in range(REPEATS):
            page.goto(url, wait_until="load")
            page.wait_for_selector("a.open")
            paint = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"
            seconds.append(page.evaluate(paint) / 1e3)
        browser.close()
    return statistics.median(seconds[1:])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--directory", type=Path, help="a campaign that made_runs.py made; a small one with --quick")
    parser.add_argument("--cold", action="store_true", help="it has no columns: record the table as such")
    parser.add_argument("--browser", action="store_true", help="measure the first paint instead")
    options = parser.parse_args()
    if not (options.directory or options.quick):
        parser.error("--directory DIR is missing; python benchmarks/made_runs.py DIR makes it")
    with opened(options), tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary) / "small"
        if not directory.is_dir():
            make(directory, 4, 300, columns=not options.cold)
        if options.browser:
            seconds = first_paint(directory, Path(temporary) / "cache")
            line = bar(f"first paint after {1e3 * seconds:.0f} ms (bar {MOST_PAINT_S:g} s)", seconds < MOST_PAINT_S)
            publish(options, "ui in a browser", f"- {line}", {"paint_s": seconds})
        else:
            found = measure(directory, Path(temporary))
            publish(options, "ui cold" if options.cold else "ui", report(found), found)


if __name__ == "__main__":
    main()
