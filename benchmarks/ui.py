"""How fast `retrain ui` answers over a large campaign, and what memory its server takes.

    python benchmarks/ui.py [--directory DIR] [--runs 40] [--steps 10000]

Without --directory the campaign is made first (``made_runs.py``: 3.5 GB for the usual size, in a temporary directory).
The server is a process of its own with an empty cache, asked over HTTP on this machine; columns lie beside the rows,
as runs write them, and the first request is timed from the start of the process. Medians of the later requests, each
for another metric, so that no answer is kept from the one before. A new row is seen when the event arrives. Beside the
time until an answer was parsed stands the server's processor time, which does not depend on what else the machine
does: bars of a tenth of a second are of that.
"""

from __future__ import annotations

import contextlib
import json
import os
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
from commandline import bar, opened, parser_of, publish, table, with_verdicts
from made_runs import add_arguments, campaign_of

KEYS = ("correct_rate", "entropy", "step_time_s", "mean_reward", "optim/grad_norm", "val/ratio", "reward_std", "loss")
BARS = {"first": 5.0, "places": 1.0, "event": 2.0}
PROCESSOR_BARS = {"columns": 0.1, "curves": 0.1}
"""Seconds."""
MOST_MB = 300.0


@contextlib.contextmanager
def serving(directory: Path, cache: Path) -> Iterator[tuple[int, str, float]]:
    """(process id, address, when it was started) of a server over this directory."""
    begin = time.perf_counter()
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "retrain", "ui", str(directory), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        yield server.pid, line.split()[-1].rstrip("/"), begin
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)


def memory_mb(pid: int, name: str = "VmHWM") -> float:
    """The most memory that the process has had resident."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith(name))


def processor_s(pid: int) -> float:
    """Seconds of the processor that the process has had, over its threads."""
    lines = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(line.split()[0]) for line in lines) / 1e9


def measure(directory: Path, cache: Path) -> dict[str, dict[str, float]]:
    """Seconds by what was asked (``wall``, and ``processor`` of the server), and the server's memory in MB."""
    place = directory.name
    with serving(directory, cache) as (pid, url, begin), httpx.Client(base_url=url, timeout=300) as client:

        def timed(path: str, queries: Sequence[dict[str, Any]]) -> dict[str, float]:
            rows = []
            for query in queries:
                before, start = processor_s(pid), time.perf_counter()
                answer = client.get(path, params=query)
                answer.raise_for_status()
                answer.json()
                rows.append((time.perf_counter() - start, processor_s(pid) - before))
            return {
                "wall": statistics.median(row[0] for row in rows),
                "processor": statistics.median(r[1] for r in rows),
            }

        client.get("/api/places").raise_for_status()
        found = {"first": {"wall": time.perf_counter() - begin, "processor": processor_s(pid)}}
        while (reading := client.get("/api/places").json()["reading"])["done"] < reading["of"]:
            time.sleep(0.05)
        found["read"] = {"wall": time.perf_counter() - begin, "processor": processor_s(pid)}
        each = [{"at": place, "key": key} for key in KEYS]
        found["places"] = timed("/api/places", [{}] * 7)
        found["columns"] = timed("/api/columns", each)
        found["columns again"] = timed("/api/columns", each[:1] * 5)
        found["curves"] = timed("/api/curves", each)
        found["campaign"] = timed("/api/campaign", [{"at": place, "wait_ms": 60_000}] * 3)
        found["metrics"] = timed("/api/metrics", [{"at": place}] * 3)
        found["event"] = {"wall": until_seen(client, directory)}
        found["memory"] = {"mb": memory_mb(pid)}
    return found


def until_seen(client: httpx.Client, directory: Path) -> float:
    """Seconds from the writing of a row to its event; the row is taken away again."""
    metrics = next((directory / "runs").iterdir()) / "metrics.jsonl"
    size = metrics.stat().st_size
    row = json.dumps({"step": 10**6, "mean_reward": 0.5}).encode() + b"\n"
    written: list[float] = []

    def write() -> None:
        with open(metrics, "ab") as file:
            written.append(time.perf_counter())
            file.write(row)

    try:
        with client.stream("GET", "/api/events", params={"at": directory.name}) as answer:
            threading.Timer(1.5, write).start()
            for line in answer.iter_lines():
                if line.startswith("data:") and "metrics" in json.loads(line[5:]).get("what", ()):
                    return time.perf_counter() - written[0]
        raise SystemExit("the events ended")
    finally:
        os.truncate(metrics, size)


def main() -> None:
    parser = parser_of(__doc__)
    add_arguments(parser)
    options = parser.parse_args()
    with opened(options), tempfile.TemporaryDirectory() as temporary:
        found = measure(campaign_of(options, Path(temporary)), Path(temporary) / "cache")
    words = {
        "first": "first answer, the server's start included", "read": "everything read and compared, from the start",
        "places": "/api/places", "columns": "/api/columns, one key of all runs, first time",
        "columns again": "/api/columns, the same key again", "curves": "/api/curves, first time",
        "campaign": "/api/campaign", "metrics": "/api/metrics", "event": "a new row seen",
    }  # fmt: skip
    rows = [
        (text, *(f"{1e3 * found[key][kind]:,.0f}" if kind in found[key] else "" for kind in ("wall", "processor")))
        for key, text in words.items()
    ]
    lines = [bar(f"{words[key]} within {most:g} s", found[key]["wall"] <= most) for key, most in BARS.items()]
    lines += [
        bar(f"{words[key]}: {1e3 * most:,.0f} ms of the processor", found[key]["processor"] <= most)
        for key, most in PROCESSOR_BARS.items()
    ]
    memory = found["memory"]["mb"]
    lines.append(bar(f"the server's memory, {memory:.0f} MB at most (bar {MOST_MB:.0f} MB)", memory < MOST_MB))
    head = ("", "ms until answered", "ms of the server's processor")
    publish(options, "ui", with_verdicts(table(head, rows), lines), found)


if __name__ == "__main__":
    main()
