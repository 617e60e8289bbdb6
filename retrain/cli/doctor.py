"""Run the checks of ``retrain doctor --device`` and ``--url``, and print one line for each."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from retrain.cli.output import note
from retrain.doctor import servers
from retrain.doctor.checks import report, run_checks
from retrain.doctor.results import FAIL, SKIP, Result
from retrain.doctor.subject import DoctorModel, ModelSource
from retrain.errors import plural
from retrain.files import write_json
from retrain.util.text import count, one_line


def check_machine(device: str, file: Path | None, report_file: Path | None) -> int:
    """Run and print every check, write the report, and return the exit status: 1 if a check has failed."""
    with DoctorModel.open(ModelSource.of(file, device)) as subject:
        base, weights = subject.base, "its own weights" if subject.source.shapes is None else "random weights"
        layers = base.model.config.get_text_config().num_hidden_layers
        print(
            f"{one_line(base.name)}, {weights}: {layers} layers, {count(subject.parameters)} parameters, "
            f"{subject.dtype}, {base.device}"
        )
        if subject.is_slow:
            note("a model of this size takes many minutes on a CPU; on a GPU it would be --device gpu:0")
        results = print_results(lambda begins: run_checks(subject, begins))
        if report_file is not None:
            write_json(report_file, report(subject, results))
    statuses = [result.status for result in results]
    failed, skipped = statuses.count(FAIL), statuses.count(SKIP)
    seconds = sum(result.seconds for result in results)
    processor = sum(result.processor_seconds for result in results)
    written = f", everything in {report_file}" if report_file is not None else ""
    print(
        f"{plural(len(results), 'check')} in {seconds:.0f} s ({processor:.0f} s of processor time): "
        f"{failed or 'none'} failed, {skipped or 'none'} skipped{written}"
    )
    return int(failed > 0)


def check_servers(url: Sequence[str], engine: str | None, model: str | None, file: Path | None) -> int:
    """Compare servers with the model here, print each check, and return the exit status: 1 if a check has failed."""
    config = servers.server_config(url, engine, model, file)
    print(f"{config.inference.engine} at {', '.join(url)}, compared with {one_line(config.model.model)} here")
    results = print_results(lambda begins: servers.run_checks(config, begins, servers.RUNNING, file is None))
    return int(any(result.status == FAIL for result in results))


def check_vllm(file: Path) -> int:
    """Start the vLLM of a file, print each check, and return the exit status: 1 if a check has failed."""
    config, note_on_engine = servers.vllm_plan(file)
    print(f"{note_on_engine}; compared with {one_line(config.model.model)} here")
    results = print_results(lambda begins: servers.run_checks(config, begins, servers.VLLM))
    return int(any(result.status == FAIL for result in results))


def print_results(run: Callable[[Callable[[str], None]], Iterator[Result]]) -> list[Result]:
    """Print and return the results that ``run`` yields. ``run`` gets a function that it calls with the name of each
    check before the check begins."""
    live = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")

    def begins(name: str) -> None:
        if live:
            print(f"…     {name}", end="", flush=True)

    results: list[Result] = []
    for result in run(begins):
        results.append(result)
        line = f"{result.status}  {result.name:<18} {one_line(result.line)}  [{result.seconds:.1f} s]"
        print(("\r\x1b[K" if live else "") + line, flush=True)
    return results
