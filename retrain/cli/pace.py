"""Measure from records how long earlier runs took on this machine, for the estimate of ``explain``."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from retrain.config import Config
from retrain.config.root import defines_run
from retrain.config.runs import differences
from retrain.device import nvidia_gpus, processor, usable_cpus
from retrain.errors import RetrainError
from retrain.files import read_json
from retrain.records.reader import evaluation_rows, homes_of_runs, metrics_rows, read_config, read_manifest, run_entries
from retrain.records.schema.base import Values
from retrain.records.schema.layout import ENVIRONMENT, MANIFEST

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
    """Return the pace of the campaign or run below ``places`` that is most similar to ``config``, the newest on a tie.

    Returns None if this machine's ``device`` ("cpu" or "gpu") has no finished run with the settings in ``SAME``.
    """
    homes = {home.resolve(): home for place in places if place.is_dir() for home in homes_of_runs(place)}
    settings, paces = config.to_dict(), list[Pace]()
    for home in homes.values():
        with suppress(RetrainError, OSError, ValueError, KeyError, TypeError):  # damaged records
            if (home / MANIFEST).is_file() and (pace := _pace_of(home, settings, device)):
                paces.append(pace)
    return min(paces, key=lambda pace: (len(pace.differing), -pace.directory.stat().st_mtime), default=None)


def _pace_of(home: Path, config: Values, device: str) -> Pace | None:
    """Return the pace of one directory, None if no run of it matches. Raises an error if its records are damaged."""
    if not _is_this_machine(read_json(home / ENVIRONMENT)):
        return None
    manifest = read_manifest(home)
    done = [entry for entry in run_entries(home, manifest) if entry.state == "done"]
    paces = ((entry.run_id, _run_pace(home / entry.path, config, device)) for entry in done)
    runs = {run_id: pace for run_id, pace in paces if pace is not None}
    # Runs of a cohort step together, so each of them has recorded the time of the whole cohort.
    cohorts = manifest.get("cohorts") or [[run_id] for run_id in runs]
    seconds = sum(max((runs[run_id][0] for run_id in cohort if run_id in runs), default=0.0) for cohort in cohorts)
    completions = sum(sampled for _, sampled, _ in runs.values())
    differing = min((keys for *_, keys in runs.values()), key=len, default=())
    return Pace(home, len(runs), seconds, completions, differing) if seconds else None


def _run_pace(run: Path, config: Values, device: str) -> tuple[float, int, tuple[str, ...]] | None:
    """Return a run's seconds of training, the completions that it sampled, and the keys in which it differs from
    ``config``; None if it used another kind of device or differs in a setting of ``SAME``."""
    facts, rows = read_config(run), metrics_rows(run)
    if (facts["built"]["device"] == "cpu") != (device == "cpu"):
        return None
    if any(facts[section][key] != config[section][key] for section, key in SAME):
        return None
    completions = len(rows) * facts["training"]["batch_size"] * facts["training"]["group_size"]
    completions += sum(row[f"eval/{row['name']}/problems"] * row["samples"] for row in evaluation_rows(run))

    def may_change_pace(key: str) -> bool:
        return defines_run(key) and not key.endswith("seed") and not key.startswith(("evaluation.", "campaign."))

    recorded = {section: facts[section] for section in config if section in facts}
    return sum(row["step_time_s"] for row in rows), completions, tuple(differences(recorded, config, may_change_pace))


def _is_this_machine(facts: Values) -> bool:
    here = (processor(), usable_cpus(), [gpu.name for gpu in nvidia_gpus()])
    return here == (facts["processor"], facts["cpus_usable"], [gpu["name"] for gpu in facts["gpus"]])
