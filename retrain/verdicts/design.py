"""Report before training which differences a campaign can detect, and where its design misleads.

The sources are the plan, the table of the rule's power and, if there is one, an earlier campaign. The spread is the
standard deviation of paired differences between conditions. What the two runs of a pair have in common (seed, problems,
random numbers) does not add to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.config.campaign import condition_name
from retrain.config.modes import advantage_of
from retrain.config.root import unused
from retrain.config.runs import RunSpec, without_sepa
from retrain.errors import UsageError, plural
from retrain.records.schema.layout import MANIFEST
from retrain.verdicts.planning import EFFECTS, PLANNED_SEEDS, WANTED_POWER, pair_spread, power, seeds_needed
from retrain.verdicts.pooling import read_source
from retrain.verdicts.results import Measure, require_measure, values_of
from retrain.verdicts.rule import FEWEST_INTERIM_SEEDS, FEWEST_PAIRS, interim_seeds


@dataclass(frozen=True)
class Spread:
    value: float
    source: str


def pilot_spread(directory: Path, measure: Measure) -> Spread:
    """Return the standard deviation of paired differences in a campaign's finished runs, pooled over its conditions.

    Raises UsageError if no condition has two pairs of finished runs.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory; type: retrain status, to see what there is")
    source = read_source(directory)
    require_measure(measure, source.runs)
    base, *others = (values_of(label, source.runs, measure) for label in source.labels)
    differences = [[value - base[pair] for pair, value in values.items() if pair in base] for values in others]
    spread, pairs = pair_spread(differences), sum(map(len, differences))
    if spread is None:
        raise UsageError(f"{directory} does not show a spread: it needs finished runs of two conditions and two seeds")
    return Spread(spread, f"{plural(pairs, 'pair')} of {directory}")


def verdict_lines(
    specs: Sequence[RunSpec], pilot: Path | None, effect: float | None, directory: Path | None = None
) -> list[str]:
    """Return lines that say which differences the planned seeds can detect; empty for one condition.

    ``effect`` is the difference to find, in percentage points for shares and in the metric's unit otherwise. The spread
    comes from ``pilot``, else from an earlier campaign in the plan's ``directory``.
    """
    comparisons = len({spec.label for spec in specs}) - 1
    campaign = specs[0].config.campaign
    measure = Measure.parse(campaign.primary_metric, *specs[0].config.evaluation.names[:1])
    if comparisons < 1 or (measure.is_held_out and specs[0].config.evaluation.problems == 0 and pilot is None):
        return []
    seeds = len({spec.seed for spec in specs})
    unit, scale = (" points", 100.0) if measure.is_share else ("", 1.0)
    spread = pilot_spread(pilot, measure) if pilot is not None else _earlier_spread(directory, measure)
    head = f"{measure.name}, {plural(seeds, 'pair')} of seeds, {plural(comparisons, 'comparison')}"
    interim = interim_seeds(seeds) if campaign.sequential == "on" else None
    lines = [f"{head}, {f'interim analysis after {interim} seeds' if interim else 'no interim analysis'}"]
    lines.append(
        f"a verdict needs {FEWEST_PAIRS} seeds or more, {FEWEST_INTERIM_SEEDS} at an interim analysis"
        + (f": {seeds} cannot decide" if seeds < FEWEST_PAIRS else "")
    )
    if spread is None:
        lines.append("pair spread unknown: --pilot DIR takes it from runs that are done")
    else:
        lines.append(f"pair spread (standard deviation of a paired difference) {scale * spread.value:.2g}{unit}: "
                     f"{spread.source}")  # fmt: skip
    target = effect / scale if effect is not None else campaign.equivalence_margin
    lines += _power_lines(seeds, comparisons, spread, target, scale, unit)
    if seeds != PLANNED_SEEDS:
        first, second, third = _percentages(PLANNED_SEEDS, comparisons)[:3]
        lines.append(
            f"proposed: {PLANNED_SEEDS} seeds with the interim analysis, which find 1, 1.5 and 2 pair spreads with "
            f"{first}, {second} and {third} % probability"
        )
    return lines


def _earlier_spread(directory: Path | None, measure: Measure) -> Spread | None:
    if directory is None or not (directory / MANIFEST).is_file():
        return None
    try:
        return pilot_spread(directory, measure)
    except UsageError:
        return None  # too few finished runs, or another metric


def _power_lines(
    seeds: int, comparisons: int, spread: Spread | None, target: float | None, scale: float, unit: str
) -> list[str]:
    """Return lines with the power at the difference ``target``. If ``target`` or ``spread`` is None, the power is given
    at multiples of the pair spread."""
    if spread is not None and not spread.value:
        return ["these differences are all the same: they cannot tell how much seeds vary"]
    if spread is None or target is None:
        sizes = ", ".join(f"{effect:g}" if spread is None else f"{scale * effect * spread.value:.2g}{unit}"
                          for effect in EFFECTS)  # fmt: skip
        unit_of_sizes = " pair spreads" if spread is None else ""
        shares = ", ".join(_percentages(seeds, comparisons))
        return [f"one condition that differs by {sizes}{unit_of_sizes} is found with {shares} % probability"]
    effect = target / spread.value
    share = 100 * power(seeds, comparisons, effect)
    needed = seeds_needed(comparisons, effect)
    enough = "more than 10,000" if needed is None else str(needed)
    return [
        f"a difference of {scale * target:.2g}{unit} is found with {share:.0f} % probability; for "
        f"{100 * WANTED_POWER:.0f} % it takes {enough} seeds"
    ]


def _percentages(seeds: int, comparisons: int) -> list[str]:
    return [f"{100 * power(seeds, comparisons, effect):.0f}" for effect in EFFECTS]


def warnings_of(specs: Sequence[RunSpec]) -> list[str]:
    conditions = list({spec.label: spec for spec in specs}.values())
    return [*without_sepa(specs), *_confounded(conditions), *_scales(conditions)]


def factors(spec: RunSpec, other: RunSpec) -> list[str]:
    """Return the keys in which two conditions differ, except keys that have no effect in one of them."""
    mine, theirs = spec.config.algorithm, other.config.algorithm
    differing = [key for key in ("advantage_mode", "transform_mode") if getattr(mine, key) != getattr(theirs, key)]
    for key in dict.fromkeys([*spec.overrides, *other.overrides]):
        is_used = all(unused(run.config, key, override=True) is None for run in (spec, other))
        if is_used and spec.overrides.get(key) != other.overrides.get(key):
            differing.append(key)
    return differing


def _confounded(conditions: Sequence[RunSpec]) -> list[str]:
    notes, first = [], conditions[0]
    for spec in conditions[1:]:
        differing = factors(spec, first)
        if len(differing) < 2:
            continue
        nearer = [
            condition_name(other.label)
            for other in conditions[1:]
            if other is not spec and len(factors(spec, other)) == 1
        ]
        hint = f"; against {nearer[0]} it is one: retrain compare DIR --baseline {nearer[0]}" if nearer else ""
        notes.append(
            f"{condition_name(spec.label)} differs in {len(differing)} factors from {condition_name(first.label)} "
            f"({', '.join(differing)}): a difference cannot be ascribed to one of them{hint}"
        )
    return notes


def _scales(conditions: Sequence[RunSpec]) -> list[str]:
    scales = [(spec, advantage_of(spec.config.algorithm.advantage_mode).scale) for spec in conditions]
    scaled = [(spec, scale) for spec, scale in scales if scale is not None]
    rates = {spec.config.training.lr for spec, _ in scaled}
    sizes = {spec.config.algorithm.advantage_mode: [scale(p) for p in (0.1, 0.5, 0.9)] for spec, scale in scaled}
    modes = list(sizes)
    if len(modes) < 2 or len(rates) > 1 or len({tuple(size) for size in sizes.values()}) < 2:
        return []
    listed = "; ".join(f"{mode} {', '.join(f'{size:.2g}' for size in sizes[mode])}" for mode in modes)
    return [
        f"the advantages of {', '.join(modes)} differ in size (root mean square at 10, 50 and 90 % success: {listed}) "
        f"and share lr = {next(iter(rates)):g}: AdamW divides a constant factor out, grad_clip_norm and the weight of "
        "a prompt do not; a rate tuned for one may decide the comparison"
    ]
