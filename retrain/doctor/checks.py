"""List all checks in the order in which they run, and build their report."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from retrain import __version__
from retrain.doctor import machine, memory, sampling, training
from retrain.doctor.results import FAIL, Result
from retrain.doctor.subject import DoctorModel
from retrain.records.environment import code_version, environment_facts, package_versions

KIND = "retrain doctor"  # Identifies a report file of retrain
MACHINE_FACTS = ("platform", "machine", "processor", "cpu_count", "cpus_usable", "memory_gib", "gpus", "python")
"""Facts in a report that may be published: no paths, no command line."""

CHECKS: dict[str, Callable[[DoctorModel], Result]] = {
    "device and build": machine.device_and_build,
    "rates": machine.rates,
    "paths": machine.paths,
    "graph = eager": sampling.graph_equals_eager,
    "sampler = trainer": sampling.sampler_against_trainer,
    "lane of 5 = alone": sampling.lane_alone,
    "gradient": training.gradient,
    "resume": training.resumed_equals_uninterrupted,
    "memory": memory.predicted_against_measured,
    "out of memory": memory.out_of_memory_drills,
    "speed": machine.speed,
}


def run_checks(
    subject: DoctorModel, begins: Callable[[str], None], checks: Mapping[str, Callable[[DoctorModel], Result]] = CHECKS
) -> Iterator[Result]:
    """Yield each check's result, FAIL if the check raises an error. ``begins`` gets its name before it runs."""
    for name, check in checks.items():
        begins(name)
        clock, processor = time.perf_counter(), os.times()
        try:
            result = check(subject)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].removesuffix(": ")
            result = Result(FAIL, reason, todo="report it with --json")
            if subject.on_gpu:
                torch.cuda.empty_cache()
        seconds = time.perf_counter() - clock
        used = sum(after - before for before, after in zip(processor[:4], os.times()[:4], strict=True))
        yield replace(result, name=name, seconds=seconds, processor_seconds=used)


def report(subject: DoctorModel, results: Sequence[Result]) -> dict[str, object]:
    facts = environment_facts()
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
        "machine": {key: facts[key] for key in MACHINE_FACTS},
        "packages": package_versions(),
        "torch": {"threads": torch.get_num_threads(), "workers": subject.workers.count, "cuda": torch.version.cuda},
        "messages": list(subject.messages),
        "failed": [result.name for result in results if result.status == FAIL],
        "seconds": sum(result.seconds for result in results),
        "processor_seconds": sum(result.processor_seconds for result in results),
        "checks": [result.to_json() for result in results],
    }
