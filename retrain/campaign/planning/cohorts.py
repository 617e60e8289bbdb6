"""Which runs of a campaign step together: cohorts that share one base model."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.campaign.planning.manifest import Manifest
from retrain.campaign.planning.plan import RunSpec
from retrain.config.base import Role
from retrain.config.campaign import Campaign
from retrain.config.root import keys, role_of, value_at
from retrain.errors import UsageError

CPU_LANES, GPU_LANES = 10, 8
"""Most runs of a cohort with ``lanes = "auto"``: shared decoding gains little beyond (``benchmarks/decode.py``)."""

LOOK_SEEDS = 2
"""Seeds that train together when a rule may stop conditions: larger cohorts finish before anything can be stopped.
A race, which stops most of them, goes seed by seed."""


def cohorts(specs: Sequence[RunSpec], lanes: int) -> list[list[RunSpec]]:
    """Consecutive runs that share a base, at most ``lanes`` together."""
    groups: list[list[RunSpec]] = []
    for spec in specs:
        if groups and len(groups[-1]) < lanes and base_key(groups[-1][0]) == base_key(spec):
            groups[-1].append(spec)
        else:
            groups.append([spec])
    return groups


def base_key(spec: RunSpec) -> str:
    """Runs with the same text here can share one base model, its wrapped layers and the held-out problems."""
    sampled = [value_at(spec.config, key) for key in keys() if Role.SAMPLES in (role_of(key) or Role(0))]
    return repr((sampled, spec.config.held_out))


def lane_count(specs: Sequence[RunSpec], on_gpu: bool) -> int:
    """How many runs step together; ``auto`` keeps whole seeds together, so that pairs share their batches."""
    asked, conditions = specs[0].config.campaign.lanes, len({spec.label for spec in specs})
    if asked != "auto":
        return int(asked)
    if specs[0].config.campaign.sequential != "off":
        return seeds_together(specs[0].config.campaign) * conditions
    most = GPU_LANES if on_gpu else CPU_LANES
    return max(1, most // conditions * conditions if conditions <= most else most)


def seeds_together(campaign: Campaign) -> int:
    """Whole seeds that train together under a rule that may stop conditions, unless ``lanes`` says otherwise."""
    return 1 if campaign.race else LOOK_SEEDS


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


def planned_cohorts(manifest: Manifest, specs: Sequence[RunSpec], on_gpu: bool) -> list[list[RunSpec]]:
    """The runs that step together. What has begun stays as it is recorded, because which rows share a decode batch
    shows in the last bits of what is sampled; with ``lanes = "auto"`` the count, too, is taken from the record."""
    known = {spec.run_id: spec for spec in specs}
    begun = [
        group
        for group in manifest.content.get("cohorts", [])
        if any(name in known and manifest.run(name)["state"] != "pending" for name in group)
    ]
    lanes = manifest.content.get("lanes") if specs[0].config.campaign.lanes == "auto" else None
    lanes = lanes or lane_count(specs, on_gpu)
    rest = [spec for spec in specs if not any(spec.run_id in group for group in begun)]
    planned = [[known[name] for name in group if name in known] for group in begun] + cohorts(rest, lanes)
    manifest.note(lanes=lanes, cohorts=[[spec.run_id for spec in group] for group in planned])
    return planned
