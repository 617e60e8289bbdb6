"""Measure from records how long earlier runs took on this machine, for the estimate of ``explain``."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.config import Config
from retrain.config.root import defines_run
from retrain.config.runs import differences
from retrain.device import nvidia_gpus, processor, usable_cpus
from retrain.errors import RetrainError
from retrain.records.reader import RunReader, homes_of_runs, read_manifest, run_entries
from retrain.records.schema.layout import MANIFEST

SAME = (
    ("model", "model"), ("model", "revision"), ("model", "quantize"), ("inference", "engine"), ("inference", "dtype"),
    ("training", "max_tokens"), ("environment", "provider"), ("environment", "tools"), ("environment", "max_turns"),
)  # fmt: skip
"""(section, key) of the settings that must be equal for an earlier run to predict the time of a completion."""


@dataclass(frozen=True)
class Pace:
    """Throughput of the finished runs in ``directory``. ``seconds`` is the total training time of their cohorts,
    ``completions`` what they sampled in it, held-out evaluations included. ``differing`` has the dotted keys in which
    the most similar run differs from the plan."""

    directory: Path
    runs: int
    seconds: float
    completions: int
    differing: tuple[str, ...]


def recorded_pace(config: Config, device: str, places: Iterable[Path]) -> Pace | None:
    """Return the pace of the directory in ``places`` with the runs most similar to ``config``, the newest on a tie.

    Returns None if this machine's ``device`` ("cpu" or "gpu") has no finished run with the settings in ``SAME``.
    """
    homes = {home.resolve(): home for place in places if place.is_dir() for home in homes_of_runs(place)}
    found = [pace for home in homes.values() if (pace := _pace_of(home, config.to_dict(), device)) is not None]
    return min(found, key=lambda pace: (len(pace.differing), -pace.directory.stat().st_mtime), default=None)


def _pace_of(home: Path, config: Mapping[str, Any], device: str) -> Pace | None:
    """Return the pace of one directory; None if no run of it matches or its records are damaged."""
    try:
        if not (home / MANIFEST).is_file() or not _is_this_machine(RunReader(home).environment()):
            return None
        manifest = read_manifest(home)
        done = [entry for entry in run_entries(home, manifest) if entry.state == "done"]
        seconds, completions, nearest = dict[str, float](), 0, None
        for entry in done:
            reader = RunReader(home / entry.path)
            facts, rows = reader.config(), reader.metrics()
            if not _is_comparable(facts, config, device):
                continue
            seconds[entry.run_id] = sum(row["step_time_s"] for row in rows)
            completions += len(rows) * facts["training"]["batch_size"] * facts["training"]["group_size"]
            completions += sum(row[f"eval/{row['name']}/problems"] * row["samples"] for row in reader.evaluations())
            recorded = {section: facts[section] for section in config if section in facts}
            differing = tuple(differences(recorded, config, _may_change_the_pace))
            nearest = differing if nearest is None or len(differing) < len(nearest) else nearest
    except (RetrainError, OSError, ValueError, KeyError, TypeError):
        return None
    total = _cohort_seconds(manifest.get("cohorts") or [[name] for name in seconds], seconds)
    return Pace(home, len(seconds), total, completions, nearest) if nearest is not None and total else None


def _is_comparable(facts: Mapping[str, Any], config: Mapping[str, Any], device: str) -> bool:
    """Return whether a run trained on such a device with the settings in ``SAME``."""
    same_settings = all(facts[section][key] == config[section][key] for section, key in SAME)
    return same_settings and (facts["built"]["device"] == "cpu") == (device == "cpu")


def _cohort_seconds(cohorts: Iterable[Sequence[str]], seconds: Mapping[str, float]) -> float:
    """Return the total time of the cohorts, whose runs step together: each has recorded the time of all of them."""
    return sum(max((seconds[name] for name in cohort if name in seconds), default=0.0) for cohort in cohorts)


def _may_change_the_pace(key: str) -> bool:
    return defines_run(key) and not key.endswith("seed") and not key.startswith(("evaluation.", "campaign."))


def _is_this_machine(facts: Mapping[str, Any]) -> bool:
    """Return whether ``environment.json`` was written on a machine with this processor and these GPUs."""
    here = (processor(), usable_cpus(), [gpu.name for gpu in nvidia_gpus()])
    return here == (facts["processor"], facts["cpus_usable"], [gpu["name"] for gpu in facts["gpus"]])
