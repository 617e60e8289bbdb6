"""Which runs of a campaign step together: cohorts that share one base model."""

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


def cohorts(specs: Sequence[RunSpec], lanes: int, across_seeds: bool = True) -> list[list[RunSpec]]:
    """Consecutive runs that share a base, at most ``lanes`` together; runs of several seeds only ``across_seeds``."""
    groups: list[list[RunSpec]] = []
    base = ""
    for spec in specs:
        own = base_key(spec)
        fits = groups and len(groups[-1]) < lanes and (across_seeds or groups[-1][0].seed == spec.seed)
        if fits and own == base:
            groups[-1].append(spec)
        else:
            groups.append([spec])
            base = own
    return groups


def base_key(spec: RunSpec) -> str:
    """Runs with the same text here can share one base model, its wrapped layers and the held-out problems."""
    sampled = [value_at(spec.config, key) for key in keys() if Role.SAMPLES in (role_of(key) or Role(0))]
    return repr((sampled, spec.config.held_out))


def lane_count(specs: Sequence[RunSpec], on_gpu: bool, slots: int = 1) -> int:
    """How many runs step together; ``auto`` keeps whole seeds together, so that pairs share their batches, and makes as
    many cohorts as there are ``slots`` to train them side by side: of fewer seeds each, and where there are not even as
    many seeds, of equal parts of a seed."""
    asked, conditions = specs[0].config.campaign.lanes, len({spec.label for spec in specs})
    if asked != "auto":
        return int(asked)
    most, seeds = GPU_LANES if on_gpu else CPU_LANES, len({spec.seed for spec in specs})
    if seeds < slots:
        return min(most, -(-conditions // (slots // seeds)))
    share = -(-seeds // slots) if slots > 1 else most  # whole seeds of a slot
    if specs[0].config.campaign.sequential != "off":
        return min(share, seeds_together(specs[0].config.campaign)) * conditions
    return min(share, most // conditions) * conditions if conditions <= most else most


def seeds_together(campaign: Campaign) -> int:
    """Whole seeds that train in one cohort under a rule that may stop conditions, unless ``lanes`` says otherwise."""
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


def cut(specs: Sequence[RunSpec], on_gpu: bool, slots: int = 1, lanes: int | None = None) -> list[list[RunSpec]]:
    """These runs in cohorts, for so many ``slots``; ``lanes`` where it is known how many fit together."""
    if not specs:
        return []
    lanes = lanes or lane_count(specs, on_gpu, slots)
    whole = slots == 1 or specs[0].config.campaign.lanes != "auto" or lanes >= len({spec.label for spec in specs})
    return cohorts(specs, lanes, across_seeds=whole)


def planned_cohorts(manifest: Manifest, specs: Sequence[RunSpec], on_gpu: bool, slots: int = 1) -> list[list[RunSpec]]:
    """The runs that step together. What has begun stays as it is recorded, because which rows share a decode batch
    shows in the last bits of what is sampled; with ``lanes = "auto"`` the count, too, is taken from the record, if that
    was made for as many ``slots``."""
    known = {spec.run_id: spec for spec in specs}
    begun = [
        group
        for group in manifest.content.get("cohorts", [])
        if any(name in known and manifest.run(name)["state"] != "pending" for name in group)
    ]
    taken = {name for group in begun for name in group}
    rest = [spec for spec in specs if spec.run_id not in taken]
    lanes = manifest.content.get("lanes") if specs[0].config.campaign.lanes == "auto" else None
    if lanes is None or manifest.content.get("slots", 1) != slots:
        lanes = lane_count(specs if slots == 1 else rest or specs, on_gpu, slots)
    planned = [[known[name] for name in group if name in known] for group in begun]
    planned += cut(rest, on_gpu, slots, lanes)
    manifest.content.pop("slots", None)
    facts = {"slots": slots} if slots > 1 else {}
    manifest.note(lanes=lanes, cohorts=[[spec.run_id for spec in group] for group in planned], **facts)
    return planned
