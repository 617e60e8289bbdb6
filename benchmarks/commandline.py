"""What the command lines of the speed benchmarks share: their options, and where what was measured goes."""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"


def parser_of(doc: str | None, on_gpu: str = "") -> argparse.ArgumentParser:
    """The options of every benchmark; ``on_gpu`` says what --gpu does, where a benchmark runs on one."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--models", type=Path, help="keep the random-weight models here")
    made.add_argument("--quick", action="store_true", help="a toy shape, few repeats: does everything work?")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every measured step here")
    made.add_argument("--record", action="store_true", help="write the output into docs/records/performance.md")
    if on_gpu:
        made.add_argument("--gpu", action="store_true", help=on_gpu)
    return made


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """The options with their ``device``, and a directory of models that goes in the end unless one was named."""
    if options.quick and options.record:
        raise SystemExit("--quick shows that everything works; its figures are not worth recording")
    options.device = "cuda" if getattr(options, "gpu", False) else "cpu"
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("--gpu: torch sees no GPU here")
    with tempfile.TemporaryDirectory() as temporary:
        options.models = options.models or Path(temporary)
        yield options


def publish(options: argparse.Namespace, mark: str, text: str, content: Any, more: str = "") -> None:
    """Print the text; with --record write it into docs/records/performance.md at its ``mark``, ``more`` below it; with
    --json write the measured content."""
    print(text)
    if options.record:
        record(f"{mark} on a GPU" if options.device == "cuda" else mark, f"{text}\n\n{more}".strip())
    if options.json:
        options.json.write_text(json.dumps({"threads": options.threads, **content}, indent=1) + "\n")


def record(mark: str, text: str) -> None:
    """Put a text into docs/records/performance.md, between the marks of this name, with the machine."""
    page = DOCS / "records" / "performance.md"
    before, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n")
    _, end, after = rest.partition(f"<!-- end of {mark} -->\n")
    if not (begin and end):
        raise SystemExit(f"{page.name} has no marks for {mark}")
    page.write_text(f"{before}{begin}{text}\n\n{machine()}\n{end}{after}", encoding="utf-8")


def machine() -> str:
    """One line: processor (or GPU), cores, torch."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = f"{cores} cores of {models[0] if models else platform.processor() or platform.machine()}"
    if torch.cuda.is_available():
        name = f"{torch.cuda.get_device_name()}, {name}"
    return f"*{name}; torch {torch.__version__.partition('+')[0]}, {time.strftime('%Y-%m-%d')}.*"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Markdown; the first ``left`` columns stand on the left, the others on the right."""
    rule = "|".join("---" if i < left else "--:" for i in range(len(head)))
    above, *below = (f"| {' | '.join(line)} |" for line in (head, *rows))
    return "\n".join([above, f"|{rule}|", *below])


def with_verdicts(above: str, lines: Sequence[str]) -> str:
    """A table with a list of verdicts below it."""
    return "\n".join([above, "", *(f"- {line}" for line in lines)])


def bar(label: str, met: bool) -> str:
    """A line that says whether a bar was met."""
    return f"{label}: {'met' if met else 'missed'}"
