"""The checks in their order, and what they come to together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from retrain import __version__
from retrain.record.environment import code_version, environment_facts, package_versions
from retrain.selfcheck.gradients import against_higher_precision
from retrain.selfcheck.machine import device_and_build, rates
from retrain.selfcheck.memory import out_of_memory_drills, predicted_against_measured
from retrain.selfcheck.paths import paths
from retrain.selfcheck.results import Finding, Result, Status, raised
from retrain.selfcheck.resuming import resumed_equals_undisturbed
from retrain.selfcheck.sampling import graph_equals_eager, lane_alone, sampler_against_trainer
from retrain.selfcheck.speed import speed
from retrain.selfcheck.subject import Subject

KIND = "retrain doctor"
"""What a file of ours says that it is."""
MACHINE_FACTS = ("platform", "machine", "processor", "cpu_count", "cpus_usable", "memory_gib", "gpus", "python")
"""Of the machine, what a report may tell to strangers: no paths, no command line."""


@dataclass(frozen=True)
class Check:
    """One question to a subject, and its name on the line."""

    name: str
    ask: Callable[[Subject], Result]


CHECKS = (
    Check("device and build", device_and_build),
    Check("rates", rates),
    Check("paths", paths),
    Check("graph = eager", graph_equals_eager),
    Check("sampler = trainer", sampler_against_trainer),
    Check("lane of 5 = alone", lane_alone),
    Check("gradient", against_higher_precision),
    Check("resume", resumed_equals_undisturbed),
    Check("memory", predicted_against_measured),
    Check("out of memory", out_of_memory_drills),
    Check("speed", speed),
)


def examine(
    subject: Subject, checks: Sequence[Check] = CHECKS, begins: Callable[[str], None] = lambda name: None
) -> Iterator[Finding]:
    """Each check in turn; one that raises has failed, and the others go on. ``begins`` hears the name of each."""
    for check in checks:
        begins(check.name)
        clock, processor = time.perf_counter(), _processor_seconds()
        try:
            result = check.ask(subject)
        except Exception as error:  # whatever it is, it is what the user wants to know
            result = raised(error)
            if subject.on_gpu:
                torch.cuda.empty_cache()
        yield Finding(check.name, result, time.perf_counter() - clock, _processor_seconds() - processor)


def _processor_seconds() -> float:
    """Of this process and of those that it has started and seen end."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def report(subject: Subject, findings: Sequence[Finding]) -> dict[str, Any]:
    """Everything as plain data, to be attached to a report."""
    machine = environment_facts()
    config = subject.base.model.config.get_text_config()
    return {
        "kind": KIND,
        "retrain": __version__,
        "code": code_version()["sha256"],
        "device": str(subject.base.device),
        "model": {
            "name": subject.base.name,
            "random_weights": subject.source.shapes is not None,
            "type": config.model_type,
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "vocabulary": subject.base.vocab_size,
            "parameters": subject.parameters,
            "dtype": subject.dtype,
            "lora_rank": subject.config.model.lora_rank,
            "target_modules": subject.config.lora.target_modules,
        },
        "machine": {key: machine[key] for key in MACHINE_FACTS},
        "packages": package_versions(),
        "torch": {"threads": torch.get_num_threads(), "workers": subject.workers.count, "cuda": torch.version.cuda},
        "messages": list(subject.messages),
        "failed": [finding.name for finding in findings if finding.result.status is Status.FAIL],
        "seconds": sum(finding.seconds for finding in findings),
        "processor_seconds": sum(finding.processor_seconds for finding in findings),
        "checks": [finding.to_json() for finding in findings],
    }
