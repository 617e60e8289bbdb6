"""The conditions of a file as runs that a probe can assemble in a temporary directory."""

from dataclasses import replace
from pathlib import Path

from retrain.campaign.planning.plan import Plan
from retrain.config import parse_dict
from retrain.config.runs import RunSpec
from retrain.errors import UsageError


def conditions_of(plan: Plan) -> list[RunSpec]:
    """Return the first seed's run of every condition, baseline first. Raises UsageError for a single condition, and for
    a backend other than the built-in one."""
    specs = [spec for spec in plan.specs if spec.seed == plan.specs[0].seed]
    if len(specs) < 2:
        raise UsageError(f"{plan.name} has one condition: a probe compares two or more")
    for spec in specs:
        if spec.config.backend.backend != "local":
            raise UsageError(f"{spec.config.backend.backend} gives no gradients: a probe needs the built-in backend")
    return specs


def temporary(spec: RunSpec) -> RunSpec:
    """Return the run without trackers, exported adapter and checkpoints, for a directory that is removed again."""
    data = spec.config.to_dict()
    data["logging"] |= {"report_to": [], "wandb_project": None}
    data["backend"]["adapter_path"] = None
    data["training"] |= {"save_every": 0, "keep_every": 0}
    return replace(spec, is_campaign=True, config=parse_dict(data))


def without_warm_up(spec: RunSpec) -> RunSpec:
    data = spec.config.to_dict()
    del data["warmup"]
    return replace(spec, config=parse_dict(data))


def forked(spec: RunSpec, seed: int, checkpoint: Path) -> RunSpec:
    """Return a run that continues ``checkpoint`` with another seed. Raises UsageError for a run with a warm-up, whose
    reference policy is not in the checkpoint."""
    if spec.config.warmup.active:
        raise UsageError(f"{spec.label} has a [warmup], whose result a fork would not have as reference policy")
    data = temporary(spec).config.to_dict()
    data["training"]["seed"] = seed
    data["resume"]["from"] = str(checkpoint.absolute())
    return replace(spec, run_id=f"{spec.label}_s{seed}", seed=seed, is_campaign=True, config=parse_dict(data))
