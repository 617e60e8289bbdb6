"""How fast `retrain ui` answers over a large campaign, and what memory its server takes.

    python benchmarks/ui.py [--directory DIR] [--runs 40] [--steps 10000] [--cold]

Without --directory the campaign is made first (``made_runs.py`` prints its size), in a temporary directory; one that is
named is only read. The server is a process of its own with an empty cache, asked over HTTP on this machine; columns lie
beside the rows, as runs write them (with --cold they are left out), and the first request is timed from the start of
the process. Medians of the later requests, each for a metric that nothing has asked for, no page's first view either. A
new row is written to a copy of one run, and is seen when the event arrives. A rollout is taken out of the middle of
``SAMPLES`` answers of ``TOKENS`` tokens, and one without its tokens from behind byte ``FAR`` of a file of completions.
Beside the time until an answer was parsed stands the server's processor time, which does not depend on what else the
machine does: bars of a tenth of a second are of that.
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
from commandline import bar, opened, parser_of, publish, table, with_verdicts
from made_runs import add_arguments, campaign_of, long_answers

from retrain.ui.metrics import watched
from retrain.ui.server import STATIC

ASKED, REPEATS = 8, 7
SAMPLES, TOKENS, FAR = 512, 4_000, 40 << 30
BARS = {"first": 5.0, "places": 1.0, "event": 2.0}
PROCESSOR_BARS = {"columns": 0.1, "curves": 0.1, "rollout": 0.05, "far": 0.05}
"""Seconds."""
MOST_MB, MOST_PAGE_KB = 300.0, 250.0


@contextlib.contextmanager
def serving(cache: Path, *directories: Path) -> Iterator[tuple[int, str, float]]:
    """(process id, address, when it was started) of a server over these directories."""
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


def memory_mb(pid: int, name: str = "VmHWM") -> float:
    """The most memory that the process has had resident."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith(name))


def processor_s(pid: int) -> float:
    """Seconds of the processor that the process has had, over its threads."""
    lines = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(line.split()[0]) for line in lines) / 1e9


def not_watched(directory: Path) -> list[str]:
    """Metrics that no page asks for by itself."""
    with open(next((directory / "runs").iterdir()) / "metrics.jsonl") as file:
        row = json.loads(file.readline())
    numbers = [key for key, value in row.items() if isinstance(value, float)]
    return [key for key in numbers if key not in watched(row)][: 2 * ASKED]


def without_columns(directory: Path, to: Path) -> Path:
    """The campaign again, its files the same by hard links where the file system has them, the columns left out."""

    def linked(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    return Path(shutil.copytree(directory, to, copy_function=linked, ignore=shutil.ignore_patterns("*.f32")))


def far_away(run: Path) -> None:
    """Move the completions of a run behind byte ``FAR`` of their file (a hole, which takes no room), and let the index
    say so; the tokens go."""
    generations, index = run / "emergence" / "generations.jsonl", run / "iterations.jsonl"
    data = generations.read_bytes()
    with open(generations, "r+b") as file:
        file.truncate(FAR)
        file.seek(FAR)
        file.write(data)
    rows = [json.loads(line) for line in index.read_text().splitlines()]
    for row in rows:
        row["tokens"], row["lines"] = None, [FAR + at for at in row["lines"]]
    index.write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(directory: Path, temporary: Path) -> dict[str, dict[str, float]]:
    """Seconds by what was asked (``wall``, and ``processor`` of the server), and the server's memory in MB."""
    place, cache = directory.name, temporary / "cache"
    followed, near, far = (temporary / name for name in ("followed", "near", "far"))
    shutil.copytree(next((directory / "runs").iterdir()), followed)
    long_answers(near, SAMPLES, TOKENS)
    shutil.copytree(near, far)
    far_away(far)
    with (
        serving(cache, directory, followed, near, far) as (pid, url, begin),
        httpx.Client(base_url=url, timeout=300) as client,
    ):

        def timed(path: str, queries: Sequence[dict[str, Any]]) -> dict[str, float]:
            rows = []
            for query in queries:
                before, start = processor_s(pid), time.perf_counter()
                answer = client.get(path, params=query)
                answer.raise_for_status()
                assert "line" not in (found := answer.json()) or any(turn["text"] for turn in found["line"]["turns"])
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
        each = [{"at": place, "key": key} for key in not_watched(directory)]
        indices = [{"index": SAMPLES // 2 + i} for i in range(REPEATS)]
        found["places"] = timed("/api/places", [{}] * REPEATS)
        found["columns"] = timed("/api/columns", each[:ASKED])
        found["columns again"] = timed("/api/columns", each[:1] * REPEATS)
        found["curves"] = timed("/api/curves", each[ASKED:])
        found["campaign"] = timed("/api/campaign", [{"at": place, "wait_ms": 60_000}] * 3)
        found["metrics"] = timed("/api/metrics", [{"at": place}] * 3)
        found["rollout"] = timed("/api/rollout", [{"at": near.name, **index} for index in indices])
        found["far"] = timed("/api/rollout", [{"at": far.name, **index} for index in indices])
        found["event"] = {"wall": until_seen(client, followed)}
        found["memory"] = {"mb": memory_mb(pid)}
        found["page"] = page_kb(client)
    return found


def page_kb(client: httpx.Client) -> dict[str, float]:
    """The page, all views together: bytes as sent and as they are, in thousands."""
    sent = whole = 0
    files = (path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())
    for name in ["", *(f"static/{file}" for file in files)]:
        with client.stream("GET", f"/{name}", headers={"Accept-Encoding": "gzip"}) as answer:
            sent += sum(map(len, answer.iter_raw()))
        whole += len(client.get(f"/{name}").content)
    return {"sent": sent / 1e3, "whole": whole / 1e3}


def until_seen(client: httpx.Client, run: Path) -> float:
    """Seconds from the writing of a row to its event."""
    metrics = run / "metrics.jsonl"
    row = json.dumps({"step": 10**6, "mean_reward": 0.5}).encode() + b"\n"
    written: list[float] = []

    def write() -> None:
        with open(metrics, "ab") as file:
            written.append(time.perf_counter())
            file.write(row)

    with client.stream("GET", "/api/events", params={"at": run.name}) as answer:
        threading.Timer(1.5, write).start()
        for line in answer.iter_lines():
            if line.startswith("data:") and "metrics" in json.loads(line[5:]).get("what", ()):
                return time.perf_counter() - written[0]
    raise SystemExit("the events ended")


def main() -> None:
    parser = parser_of(__doc__)
    add_arguments(parser)
    parser.add_argument("--cold", action="store_true", help="without columns: the server reads every line itself")
    options = parser.parse_args()
    with opened(options), tempfile.TemporaryDirectory(dir=options.directory and options.directory.parent) as temporary:
        directory = campaign_of(options, Path(temporary))
        if options.cold:
            directory = without_columns(directory, Path(temporary) / f"{directory.name}_cold")
        found = measure(directory, Path(temporary))
    words = {
        "first": "first answer, the server's start included", "read": "everything read and compared, from the start",
        "places": "/api/places", "columns": "/api/columns, one key of all runs, first time",
        "columns again": "/api/columns, the same key again", "curves": "/api/curves, first time",
        "campaign": "/api/campaign", "metrics": "/api/metrics",
        "rollout": f"/api/rollout, out of {SAMPLES} answers of {TOKENS:,} tokens",
        "far": "/api/rollout without tokens, out of 40 GB of completions", "event": "a new row seen",
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
    memory, page = found["memory"]["mb"], found["page"]
    page_words = (
        f"the page, all views together: {page['sent']:.0f} kB as sent, {page['whole']:.0f} kB before compression"
    )
    lines.append(bar(f"the server's memory, {memory:.0f} MB at most (bar {MOST_MB:.0f} MB)", memory < MOST_MB))
    lines.append(bar(f"{page_words} (bar {MOST_PAGE_KB:.0f} kB as sent)", page["sent"] < MOST_PAGE_KB))
    head = ("", "ms until answered", "ms of the server's processor")
    publish(options, "ui cold" if options.cold else "ui", with_verdicts(table(head, rows), lines), found)


if __name__ == "__main__":
    main()
