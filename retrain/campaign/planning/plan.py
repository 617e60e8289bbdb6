"""A file's plan: which runs there are (conditions × seeds, each with its resolved configuration), and where they go.

A file goes one way: ``load``, then ``Plan.of``, ``check``, ``execute``; each is done once and hands its result on.

Runs come seed by seed, all conditions of a seed together: what is paired by seed is there early, and a campaign that
is stopped half-way has complete pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.config import Condition, Config, Loaded, parse_dict
from retrain.config.base import Role
from retrain.config.checking import assemble
from retrain.config.modes import condition_label
from retrain.config.root import keys, role_of, value_at, without_unused
from retrain.config.runs import RunSpec
from retrain.errors import UsageError
from retrain.training.inputs import CohortJob
from retrain.verdicts.rule import interim_seeds

if TYPE_CHECKING:
    from retrain.environments.build import Longest


CPU_LANES, GPU_LANES = 10, 8
"""Most runs of a cohort with ``lanes = "auto"``: shared decoding gains little beyond (docs/records/performance.md)."""


@dataclass(frozen=True)
class Plan:
    """What is to be trained, and where: all that is worked out of a file, or of a directory's ``plan.json``.

    ``directory`` is written to; ``folder`` is that of the TOML file, where relative paths to data and modules are
    looked up first. ``source`` is the file as it was read, None for a directory that is continued from its own plan;
    ``sets`` are the ``section.key=value`` settings that this plan was changed with; ``registry`` says whether a
    declaration goes into the registry (``records.registry``: ON, OFF), "" where nobody has asked.
    """

    specs: list[RunSpec]
    directory: Path
    folder: Path
    name: str
    source: Loaded | None = None
    sets: tuple[str, ...] = ()
    registry: str = ""

    @cached_property
    def longest(self) -> Longest:
        from retrain.environments.build import longest_completions

        return longest_completions(spec.config for spec in self.specs)

    @classmethod
    def of(cls, loaded: Loaded, out: Path | None = None, registry: str = "") -> Plan:
        """The plan of a file. Raises ConfigError when a run's configuration does not hold."""
        directory = Path(out or loaded.config.logging.log_dir or f"logs/{loaded.path.stem}")
        name = loaded.config.campaign.name or loaded.path.stem
        return cls(plan(loaded), directory, loaded.path.parent, name, loaded, registry=registry)

    def job(self, specs: Sequence[RunSpec], **how: Any) -> CohortJob:
        """Return the job that trains these runs; ``how`` sets those fields of ``CohortJob`` that have defaults."""
        return CohortJob(self.directory, self.folder, specs, self.longest, **how)


def plan(source: Loaded | Config) -> list[RunSpec]:
    """The runs of a campaign in the order in which they start, or the one run of a file without [campaign].

    Raises ConfigError when a run's configuration does not hold.
    """
    config = source.config if isinstance(source, Loaded) else source
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
    """The run's configuration with nothing left to be worked out."""
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
    logging["wandb_run_name"] = name if name.endswith(run_id) else f"{name}_{run_id}"  # planned again it is the same
    logging["wandb_group"] = logging["wandb_group"] or label
    own_tags = [label, f"seed{seed}"]
    logging["wandb_tags"] = own_tags + [tag for tag in logging["wandb_tags"] if tag not in own_tags]
    return parse_dict(data)


def cohorts(specs: Sequence[RunSpec], lanes: int, across_seeds: bool = True) -> list[list[RunSpec]]:
    """Consecutive runs that share a base, at most ``lanes`` together; runs of several seeds only ``across_seeds``."""
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
    """Runs with the same text here can share one base model, its wrapped layers and the held-out problems."""
    sampled = [value_at(spec.config, key) for key in keys() if Role.SAMPLES in (role_of(key) or Role(0))]
    return repr((sampled, spec.config.held_out))


def seeds_before_interim(specs: Sequence[RunSpec]) -> list[int]:
    """Return the seeds of a plan that train before its interim analysis, empty without one; with a number of lanes,
    cohorts are cut without regard to it."""
    campaign, seeds = specs[0].config.campaign, list(dict.fromkeys(spec.seed for spec in specs))
    count = interim_seeds(len(seeds)) if len({spec.label for spec in specs}) > 1 else None
    return seeds[:count] if count and campaign.sequential == "on" and campaign.lanes == "auto" else []


def lane_count(specs: Sequence[RunSpec], on_gpu: bool, slots: int = 1) -> int:
    """How many runs step together; ``auto`` keeps whole seeds together, so that pairs share their batches, and makes as
    many cohorts as there are ``slots`` to train them side by side: of fewer seeds each, and where there are not even as
    many seeds, of equal parts of a seed."""
    asked, conditions = specs[0].config.campaign.lanes, len({spec.label for spec in specs})
    if asked != "auto":
        return int(asked)
    most = GPU_LANES if on_gpu else CPU_LANES
    seeds = len(seeds_before_interim(specs)) or len({spec.seed for spec in specs})
    if seeds < slots:
        return min(most, -(-conditions // (slots // seeds)))
    share = -(-seeds // slots) if slots > 1 else most  # whole seeds of a slot
    return min(share, most // conditions) * conditions if conditions <= most else most


def smaller_cohorts(group: Sequence[RunSpec], fitting: int, reason: str) -> list[list[RunSpec]]:
    """The runs of a cohort in cohorts of which each fits into memory, whole seeds together where possible, so that
    pairs share batches. ``fitting`` runs fit together, and ``reason`` says why no more.

    Raises UsageError when the file fixes the number of lanes, or not even one run fits.
    """
    asked = group[0].config.campaign.lanes
    if fitting < 1:
        raise UsageError(f"{reason}; lower [model] lora_rank or [training] max_tokens, or take a smaller model")
    if asked != "auto":
        raise UsageError(f'{reason}; type lanes = {fitting} or lanes = "auto" in [campaign]')
    conditions = len({spec.label for spec in group})
    count = fitting // conditions * conditions or fitting
    return [list(group[i : i + count]) for i in range(0, len(group), count)]


def cut(
    specs: Sequence[RunSpec], on_gpu: bool, slots: int = 1, lanes: int | None = None, first: Collection[int] = ()
) -> list[list[RunSpec]]:
    """These runs in cohorts, for so many ``slots``; ``lanes`` where it is known how many fit together. No cohort has
    both seeds before the interim analysis, ``first``, and later ones."""
    if not specs:
        return []
    lanes = lanes or lane_count(specs, on_gpu, slots)
    whole = slots == 1 or specs[0].config.campaign.lanes != "auto" or lanes >= len({spec.label for spec in specs})
    parts = [[spec for spec in specs if (spec.seed in first) == before] for before in (True, False)]
    return [group for part in parts for group in cohorts(part, lanes, across_seeds=whole)]
