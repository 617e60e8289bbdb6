"""Plan the runs of a file (conditions × seeds, each with its resolved configuration) and their directories.

The order of calls is ``load``, ``Plan.of``, ``check``, ``execute``. Runs are ordered by seed, with all conditions of a
seed together, so that pairs are complete early, also in a campaign that is stopped half-way.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from retrain.config import Condition, Config, LoadedConfig, parse_dict
from retrain.config.base import Role
from retrain.config.checking import assemble
from retrain.config.modes import condition_label
from retrain.config.root import keys, role_of, value_at, without_unused
from retrain.config.runs import RunSpec
from retrain.engines.server.automatic import adapter_slots, is_composed
from retrain.environments.build import CompletionLengths, longest_completions
from retrain.errors import UsageError
from retrain.records.schema.campaign import RunEntry
from retrain.training.inputs import CohortJob
from retrain.verdicts.rule import interim_seeds

# Largest number of runs in a cohort with ``lanes = "auto"``: larger batches gain little (docs/records/performance.md)
CPU_LANES, GPU_LANES = 10, 8


@dataclass(frozen=True)
class Plan:
    """The resolved runs of a file, or of the ``plan.json`` in a directory, and where they are recorded.

    ``directory`` receives the records; ``folder`` contains the TOML file and is the first base of relative paths.
    ``source`` is the loaded file, None for a plan from ``plan.json``; ``sets`` are the applied ``section.key=value``
    settings; ``registry`` is ON or OFF (``records.registry``), or "" if not decided. ``notes`` are for the user.
    """

    specs: list[RunSpec]
    directory: Path
    folder: Path
    name: str
    source: LoadedConfig | None = None
    sets: tuple[str, ...] = ()
    registry: str = ""
    notes: tuple[str, ...] = ()

    @cached_property
    def longest(self) -> CompletionLengths:
        return longest_completions(spec.config for spec in self.specs)

    @classmethod
    def of(cls, loaded: LoadedConfig, out: Path | None = None, registry: str = "") -> Plan:
        """Return the plan of a file. Raises ConfigError when a run's configuration is invalid."""
        directory = Path(out or loaded.config.logging.log_dir or f"logs/{loaded.path.stem}")
        name = loaded.config.campaign.name or loaded.path.stem
        return cls(plan(loaded), directory, loaded.path.parent, name, loaded, registry=registry)

    def job(self, specs: Sequence[RunSpec], **how: Any) -> CohortJob:
        return CohortJob(self.directory, self.folder, specs, self.longest, **how)


def plan(source: LoadedConfig | Config) -> list[RunSpec]:
    """Return the runs of a campaign in the order in which they start, or the one run of a file without [campaign].
    Raises ConfigError if a run's configuration is invalid."""
    config = source.config if isinstance(source, LoadedConfig) else source
    if not config.is_campaign:
        algorithm = config.algorithm
        name = condition_label(algorithm.advantage_mode, algorithm.transform_mode, {})
        seed = config.training.seed
        return [RunSpec(f"{name}_s{seed}", name, seed, 0, {}, False, _resolve(config, None, seed, name))]
    return [
        RunSpec(
            run_id=f"{condition.label}_s{seed}",
            label=condition.label,
            seed=seed,
            condition_index=index,
            overrides=condition.overrides,
            is_campaign=True,
            config=_resolve(config, condition, seed, condition.label),
        )
        for seed in config.campaign.seeds
        for index, condition in enumerate(config.campaign.conditions)
    ]


def _resolve(config: Config, condition: Condition | None, seed: int, label: str) -> Config:
    run = Config.model_validate(assemble(config.model_dump(), condition, seed))
    data = without_unused(run)
    training, logging = data["training"], data["logging"]
    if run.lora.alpha == 0:
        data["lora"]["alpha"] = 2.0 * run.model.lora_rank
    for key in ("temperature", "max_tokens"):
        if data["evaluation"][key] is None:
            data["evaluation"][key] = training[key]
    if condition is None:
        logging["wandb_run_name"] = logging["wandb_run_name"] or label
        return parse_dict(data)
    run_id = f"{label}_s{seed}"
    name = logging["wandb_run_name"] or run_id
    logging["wandb_run_name"] = name if name.endswith(run_id) else f"{name}_{run_id}"  # a recorded name already ends so
    logging["wandb_group"] = logging["wandb_group"] or label
    own_tags = [label, f"seed{seed}"]
    logging["wandb_tags"] = own_tags + [tag for tag in logging["wandb_tags"] if tag not in own_tags]
    return parse_dict(data)


def cohorts(specs: Sequence[RunSpec], lanes: int, across_seeds: bool = True) -> list[list[RunSpec]]:
    """Group consecutive runs of equal ``base_key``: at most ``lanes`` runs, and of one seed unless ``across_seeds``."""
    groups: list[list[RunSpec]] = []
    for spec in specs:
        last = groups[-1] if groups else []
        fits = last and len(last) < lanes and (across_seeds or last[0].seed == spec.seed)
        if fits and base_key(last[0]) == base_key(spec):
            last.append(spec)
        else:
            groups.append([spec])
    return groups


def base_key(spec: RunSpec) -> str:
    """Return a key that is equal for runs that can share the base model, its wrapped layers and held-out problems."""
    sampled = [value_at(spec.config, key) for key in keys() if Role.SAMPLES in (role_of(key) or Role(0))]
    return repr((sampled, spec.config.held_out))


def is_unfinished(entry: RunEntry, spec: RunSpec) -> bool:
    return entry.state != "done" or entry.step < spec.config.training.max_steps


def seeds_before_interim(specs: Sequence[RunSpec]) -> list[int]:
    """Return the seeds that train before the interim analysis; empty without the analysis or with fixed lanes."""
    campaign, seeds = specs[0].config.campaign, list(dict.fromkeys(spec.seed for spec in specs))
    count = interim_seeds(len(seeds)) if len({spec.label for spec in specs}) > 1 else None
    return seeds[:count] if count and campaign.sequential == "on" and campaign.lanes == "auto" else []


def lane_count(specs: Sequence[RunSpec], on_gpu: bool, slots: int = 1, most: int | None = None) -> int:
    """Return the number of lanes of a cohort. With ``lanes = "auto"``, a cohort takes all conditions of a seed, so that
    paired runs share batches, and the seeds are spread over the ``slots`` workers; with fewer seeds than slots, a
    cohort may have only some of a seed's conditions. The limit is ``most``, by default GPU_LANES or CPU_LANES, and at
    most the adapters of a vLLM that retrain has planned."""
    configured, conditions = specs[0].config.campaign.lanes, len({spec.label for spec in specs})
    if configured != "auto":
        return int(configured)
    launch = specs[0].config.inference.launch
    most = most or (GPU_LANES if on_gpu else CPU_LANES)
    most = min(most, adapter_slots(launch)) if is_composed(launch) else most
    seeds = len(seeds_before_interim(specs)) or len({spec.seed for spec in specs})
    if seeds < slots:
        return min(most, -(-conditions // (slots // seeds)))
    share = -(-seeds // slots) if slots > 1 else most  # number of whole seeds per slot
    return min(share, most // conditions) * conditions if conditions <= most else most


def smaller_cohorts(group: Sequence[RunSpec], fitting: int, reason: str) -> list[list[RunSpec]]:
    """Split a cohort into parts of at most ``fitting`` runs. If all runs of a seed fit, they stay together, so that
    paired runs share batches. ``reason``: why no more runs fit, for the error. Raises UsageError if the file fixes the
    number of lanes, or if no run fits."""
    configured = group[0].config.campaign.lanes
    if fitting < 1:
        raise UsageError(f"{reason}; lower [model] lora_rank or [training] max_tokens, or take a smaller model")
    if configured != "auto":
        raise UsageError(f'{reason}; type lanes = {fitting} or lanes = "auto" in [campaign]')
    conditions = len({spec.label for spec in group})
    count = fitting // conditions * conditions or fitting
    return [list(group[i : i + count]) for i in range(0, len(group), count)]


def cut(
    specs: Sequence[RunSpec], on_gpu: bool, slots: int = 1, lanes: int | None = None, first: Collection[int] = ()
) -> list[list[RunSpec]]:
    """Group these runs into cohorts for ``slots`` workers. ``lanes``: runs per cohort, by default ``lane_count``. No
    cohort mixes ``first``, the seeds before the interim analysis, with later seeds."""
    if not specs:
        return []
    lanes = lanes or lane_count(specs, on_gpu, slots)
    whole = slots == 1 or specs[0].config.campaign.lanes != "auto" or lanes >= len({spec.label for spec in specs})
    parts = [[spec for spec in specs if (spec.seed in first) == before] for before in (True, False)]
    return [group for part in parts for group in cohorts(part, lanes, across_seeds=whole)]
