"""``doctor --device`` and ``doctor --url``: one line for each check of this machine or of servers, once it is made."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.commands.output import count, note, visible
from retrain.errors import UsageError
from retrain.wording import plural

if TYPE_CHECKING:
    from retrain.selfcheck.results import Finding
    from retrain.selfcheck.subject import Subject

WIDTH = 18
"""Columns for the name of a check."""


def selfcheck(device: str, file: Path | None, report: Path | None) -> int:
    """Make every check and print it, write ``report``; the exit status: 1 when a check has failed.

    Raises UsageError for a device, file or report that cannot be used, ModelError for a model that cannot be had.
    """
    if report is not None:
        check_writable(report)
    # Before torch is imported, which reads it then: its memory profiler warns of what was allocated before.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from retrain.files import write_json
    from retrain.selfcheck.examine import examine
    from retrain.selfcheck.examine import report as whole
    from retrain.selfcheck.results import Status
    from retrain.selfcheck.source import Source
    from retrain.selfcheck.subject import Subject

    with Subject.open(Source.of(file, device)) as subject:
        print(headline(subject))
        if subject.is_slow:
            note("a model of this size takes many minutes on a CPU; on a GPU it would be --device gpu:0")
        findings = print_findings(lambda begins: examine(subject, begins=begins))
        if report is not None:
            write_json(report, whole(subject, findings))
    each = [finding.result.status for finding in findings]
    failed, skipped = each.count(Status.FAIL), each.count(Status.SKIP)
    seconds, processor = (
        sum(values) for values in zip(*((f.seconds, f.processor_seconds) for f in findings), strict=True)
    )
    kept = f", everything in {report}" if report is not None else ""
    print(
        f"{plural(len(findings), 'check')} in {seconds:.0f} s ({processor:.0f} s of processor time): "
        f"{failed or 'none'} failed, {skipped or 'none'} skipped{kept}"
    )
    return int(failed > 0)


def servercheck(url: Sequence[str], engine: str | None, model: str | None, file: Path | None) -> int:
    """Compare servers with the model here and print each check; the exit status: 1 when one has failed.

    Raises UsageError for a file that cannot be used, ModelError for a model that cannot be had.
    """
    from retrain.selfcheck.results import Status
    from retrain.selfcheck.servers import asked_config, examine_servers

    config = asked_config(url, engine, model, file)
    print(f"{config.inference.engine} at {', '.join(url)}, compared with {visible(config.model.model)} here")
    findings = print_findings(lambda begins: examine_servers(config, begins, any_rank=file is None))
    return int(any(finding.result.status is Status.FAIL for finding in findings))


def print_findings(make: Callable[[Callable[[str], None]], Iterator[Finding]]) -> list[Finding]:
    """Print each finding of ``make``, which gets a function that shows the name of a check when it begins."""
    live = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")

    def begins(name: str) -> None:
        if live:
            print(f"…     {name}", end="", flush=True)

    findings: list[Finding] = []
    for finding in make(begins):
        findings.append(finding)
        print(("\r\x1b[K" if live else "") + line_of(finding), flush=True)
    return findings


def headline(subject: Subject) -> str:
    """What is checked."""
    config = subject.base.model.config.get_text_config()
    weights = "random weights" if subject.source.shapes is not None else "its own weights"
    return (
        f"{visible(subject.base.name)}, {weights}: {config.num_hidden_layers} layers, {count(subject.parameters)} "
        f"parameters, {subject.dtype}, {subject.base.device}"
    )


def line_of(finding: Finding) -> str:
    """A check on one line."""
    result = finding.result
    return f"{result.status}  {finding.name:<{WIDTH}} {visible(result.text())}  [{finding.seconds:.1f} s]"


def check_writable(report: Path) -> None:
    """Raise UsageError where the report cannot be written, or where a file lies that is no report of ours."""
    if report.is_dir():
        raise UsageError(f"{report} is a directory; give a file, such as {report / 'doctor.json'}")
    if not report.parent.is_dir() or not os.access(report.parent, os.W_OK):
        raise UsageError(f"{report} cannot be written: {report.parent} is no directory that can be written to")
    if not report.exists():
        return
    try:
        ours = json.loads(report.read_bytes()).get("kind") == "retrain doctor"
    except (OSError, ValueError, AttributeError):
        ours = False
    if not ours:
        raise UsageError(f"{report} exists and is no report of retrain doctor; it stays as it is: give another path")
