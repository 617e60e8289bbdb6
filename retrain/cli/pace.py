"""Measure from records how long earlier runs took on this machine, for the estimate of ``explain``."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from retrain.config import Config
from retrain.config.root import defines_run
from retrain.config.runs import differences
from retrain.device import nvidia_gpus, processor, usable_cpus
from retrain.errors import RetrainError
from retrain.files import iter_jsonl, read_json, read_jsonl
from retrain.records.reader import homes_of_runs, read_config, read_manifest, run_entries
from retrain.records.schema.base import Values
from retrain.records.schema.layout import ENVIRONMENT, EVALS, MANIFEST, METRICS

SAME = (
    ("model", "model"), ("model", "revision"), ("model", "quantize"), ("inference", "engine"), ("inference", "dtype"),
    ("training", "max_tokens"), ("environment", "provider"), ("environment", "tools"), ("environment", "max_turns"),
)  # fmt: skip
"""(section, key) of the settings that must be equal for an earlier run to predict the time of a completion."""


@dataclass(frozen=True)
class Pace:
    """Throughput of the finished runs in ``directory``. ``seconds``: total training time of their cohorts.
    ``completions``: completions sampled in that time, held-out evaluations included. ``differing``: dotted keys in
    which the most similar run differs from the plan."""

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
    settings, paces = config.to_dict(), list[Pace]()
    for home in homes.values():
        with suppress(RetrainError, OSError, ValueError, KeyError, TypeError):  # damaged records
            paces += _pace_of(home, settings, device)
    return min(paces, key=lambda pace: (len(pace.differing), -pace.directory.stat().st_mtime), default=None)


def _pace_of(home: Path, config: Values, device: str) -> Iterator[Pace]:
    """Yield the pace of one directory, or nothing if no run of it matches. Raises an error if its records are
    damaged."""
    if not (home / MANIFEST).is_file() or not _is_this_machine(read_json(home / ENVIRONMENT)):
        return
    manifest = read_manifest(home)
    runs: dict[str, tuple[float, int, tuple[str, ...]]] = {}
    for entry in run_entries(home, manifest):
        run = _run_pace(home / entry.path, config, device) if entry.state == "done" else None
        if run is not None:
            runs[entry.run_id] = run
    # Runs of a cohort step together: each has recorded the time of all of them.
    cohorts = manifest.get("cohorts") or [[run_id] for run_id in runs]
    seconds = sum(max((runs[run_id][0] for run_id in cohort if run_id in runs), default=0.0) for cohort in cohorts)
    if seconds:
        completions = sum(sampled for _, sampled, _ in runs.values())
        yield Pace(home, len(runs), seconds, completions, min((keys for *_, keys in runs.values()), key=len))


def _run_pace(run: Path, config: Values, device: str) -> tuple[float, int, tuple[str, ...]] | None:
    """Return a run's seconds of training, the completions sampled in them and the keys in which it differs; None if it
    used another kind of device or differs in a setting of ``SAME``."""
    facts, rows = read_config(run), read_jsonl(run / METRICS)
    if (facts["built"]["device"] == "cpu") != (device == "cpu"):
        return None
    if any(facts[section][key] != config[section][key] for section, key in SAME):
        return None
    completions = len(rows) * facts["training"]["batch_size"] * facts["training"]["group_size"]
    completions += sum(row[f"eval/{row['name']}/problems"] * row["samples"] for row in iter_jsonl(run / EVALS))
    recorded = {section: facts[section] for section in config if section in facts}
    return (
        sum(row["step_time_s"] for row in rows),
        completions,
        tuple(differences(recorded, config, _may_change_the_pace)),
    )


def _may_change_the_pace(key: str) -> bool:
    return defines_run(key) and not key.endswith("seed") and not key.startswith(("evaluation.", "campaign."))


def _is_this_machine(facts: Values) -> bool:
    here = (processor(), usable_cpus(), [gpu.name for gpu in nvidia_gpus()])
    return here == (facts["processor"], facts["cpus_usable"], [gpu["name"] for gpu in facts["gpus"]])
