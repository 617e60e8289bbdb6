"""Before anything is trained: what a campaign can find out, and where its design misleads.

Everything comes from the plan and, where there is one, from a pilot's runs. The spread that matters is that of the
paired differences between conditions: common seeds, problems and random numbers are already taken out of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from retrain.config.campaign import condition_name
from retrain.config.learning_rules import lambda_stays_zero
from retrain.config.modes import advantage_of
from retrain.config.root import unused
from retrain.config.runs import RunSpec, seeds_together
from retrain.errors import UsageError
from retrain.maths.normal import additive_fit
from retrain.maths.power import detectable, outlook, seeds_needed, spread_interval, spread_limit
from retrain.maths.rules import Rule
from retrain.verdicts.declared_rule import rule_of, table_of
from retrain.verdicts.pooling import read_source
from retrain.verdicts.results import Measure, RunResult, require_measure, values_of

ASSUMED_SPREAD = 0.04
"""Standard deviation of a paired difference of held-out accuracy where no pilot measured it: 4 points."""
POWER = 0.8


@dataclass(frozen=True)
class Spread:
    """Standard deviation of paired differences, and where it is from."""

    value: float
    freedom: int
    source: str


def pilot_spread(directory: Path, measure: Measure) -> Spread:
    """The spread that a pilot's finished runs show: pooled over its conditions; between runs when it has only one.

    Raises UsageError when the pilot has fewer than two seeds.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory; type: retrain status, to see what there is")
    return spread_of(read_source(directory).runs, measure, str(directory))


def spread_of(runs: Sequence[RunResult], measure: Measure, directory: str) -> Spread:
    """The same of runs that were read already, from ``directory``."""
    require_measure(measure, runs)
    results = {label: values_of(label, runs, measure) for label in dict.fromkeys(run.label for run in runs)}
    table, _ = table_of(list(results), results)
    # A difference of two runs has twice the variance of what the seed leaves of one.
    fit = additive_fit(table[None])
    if freedom := int(fit.freedom[0]):
        count = int((~np.isnan(table)).sum())
        source = f"residual of {count} runs of {directory} beside seed and condition"
        return Spread(math.sqrt(2.0) * float(fit.spread[0]), freedom, source)
    groups = [list(values.values()) for values in results.values() if len(values) > 1]
    if not groups:
        raise UsageError(f"{directory} does not show a spread: it needs finished runs of two seeds or more")
    freedom = sum(len(values) - 1 for values in groups)
    squares = sum(float(((np.asarray(values) - np.mean(values)) ** 2).sum()) for values in groups)
    count = sum(len(values) for values in groups)
    what = f"{count} unpaired runs (pairs may do better) of {directory}"
    return Spread(math.sqrt(2.0 * squares / freedom), freedom, what)


def verdict_lines(specs: Sequence[RunSpec], pilot: Path | None, wanted: float | None) -> list[str]:
    """What the planned seeds can detect, and how many a wanted difference needs; empty without a comparison.

    ``wanted`` is in points for shares and in the metric's unit otherwise.
    """
    family = len({spec.label for spec in specs}) - 1
    campaign = specs[0].config.campaign
    measure = Measure.parse(campaign.primary_metric, *specs[0].config.evaluation.names[:1])
    if family < 1 or (measure.is_held_out and specs[0].config.evaluation.problems == 0 and pilot is None):
        return []
    seeds = len({spec.seed for spec in specs})
    unit, scale = (" points", 100.0) if measure.is_share else ("", 1.0)
    if pilot is not None:
        spread = pilot_spread(pilot, measure)
    elif measure.is_share:
        spread = Spread(ASSUMED_SPREAD, 0, "assumed; --pilot DIR takes it from runs that are done")
    else:
        return [f"{measure.name}, {seeds} pairs of seeds; --pilot DIR tells what they can detect"]
    rule = rule_of(campaign.model_dump(), family, seeds, measure)
    lines = [
        f"{measure.name}, {seeds} pairs of seeds{_rule_words(rule)}; a difference's standard deviation is "
        f"{scale * spread.value:.2g}{unit} ({spread.source})"
    ]
    if spread.value == 0.0:
        return [*lines, "the pilot's differences are all the same: it cannot tell how much seeds vary"]
    plan_with = spread.value
    if spread.freedom:
        low, high = (scale * end for end in spread_interval(spread.value, spread.freedom))
        plan_with = spread_limit(spread.value, spread.freedom)
        lines[0] += f", 90 % sure to be {low:.2g} to {high:.2g}"
        lines.append(f"planned with {scale * plan_with:.2g}{unit}, which it is below with 80 % probability")
    if rule.looks == "always_valid":
        fixed = replace(rule, looks="off")
        return [
            *lines,
            *_seeds_lines(fixed, plan_with, wanted, scale, unit),
            "adding seeds at will takes 30 to 90 % more",
        ]
    effect = detectable(rule, POWER)
    if seeds < rule.fewest:
        lines.append(f"no verdict is possible: with {family + 1} conditions it needs {rule.fewest} seeds or more")
    elif effect is None:
        lines.append(f"no difference is detected with {100 * POWER:.0f} % probability, however large")
    else:
        lines.append(f"detected with {100 * POWER:.0f} % probability: {scale * effect * plan_with:.2g}{unit} or more")
    target = wanted / scale / plan_with if wanted is not None else effect
    if target is not None and seeds >= rule.fewest:
        lines.append(_cost(rule, target, scale * target * plan_with, unit, _together(specs, family + 1)))
    return [*lines, *_seeds_lines(rule, plan_with, wanted, scale, unit)]


def _rule_words(rule: Rule) -> str:
    """The test and how a family is corrected, with the looks, as words after the number of pairs."""
    tests = {"exact": "exact test", "normal": "normal test", "permutation": "closed permutation"}
    words = f", {tests[rule.test]}"
    if rule.family > 1:
        words += f", p corrected for {rule.family} comparisons"
    if rule.prior_freedom:
        words += ", moderated by an earlier spread"
    if rule.looks != "off":
        words += f", looks ({rule.looks})" + (", a race" if rule.race else ", with futility" if rule.chance else "")
    return words


def _together(specs: Sequence[RunSpec], conditions: int) -> int:
    campaign = specs[0].config.campaign
    return seeds_together(campaign) if campaign.lanes == "auto" else max(1, -(-int(campaign.lanes) // conditions))


def _cost(rule: Rule, effect: float, shown: float, unit: str, together: int) -> str:
    found = outlook(rule, effect, together)
    planned = rule.planned * (rule.family + 1)
    text = f"if one condition differs by {shown:.2g}{unit}: found with {100 * found.power:.0f} % probability"
    if rule.looks == "off":
        return f"{text}, after all {planned} runs"
    return (
        f"{text}, after {found.runs_different:.0f} of {planned} runs on average; after {found.runs_alike:.0f} if all "
        "are alike"
    )


def _seeds_lines(rule: Rule, spread: float, wanted: float | None, scale: float, unit: str) -> list[str]:
    """How many seeds the wanted difference, or two usual ones, would need."""
    if rule.test == "permutation":
        rule = replace(rule, test="exact")  # a bound: the step-down of exact tests needs no fewer
    lines = []
    for target in [wanted / scale] if wanted is not None else [spread / 2.0, spread]:
        needed = seeds_needed(rule, target / spread, POWER)
        most = "more than 10,000" if rule.looks == "off" else "more than 20"
        lines.append(f"a difference of {scale * target:.2g}{unit} needs {most if needed is None else needed} seeds")
    return lines


def warnings_of(specs: Sequence[RunSpec]) -> list[str]:
    """Where the comparison with the baseline would not say what it seems to say."""
    conditions = list({spec.label: spec for spec in specs}.values())
    return [*without_sepa(specs), *_confounded(conditions), *_scales(conditions)]


def factors(spec: RunSpec, other: RunSpec) -> list[str]:
    """What differs between two conditions, as far as both could have it: settings of a mode belong to the mode."""
    mine, theirs = spec.config.algorithm, other.config.algorithm
    differing = [key for key in ("advantage_mode", "transform_mode") if getattr(mine, key) != getattr(theirs, key)]
    for key in dict.fromkeys([*spec.overrides, *other.overrides]):
        works = [unused(each.config, key, override=True) is None for each in (spec, other)]
        if spec.overrides.get(key) != other.overrides.get(key) and all(works):
            differing.append(key)
    return differing


def _confounded(conditions: Sequence[RunSpec]) -> list[str]:
    """Conditions that differ from the baseline in several factors, with a condition that isolates one, if any."""
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
        what = f"{len(differing)} factors from {condition_name(first.label)} ({', '.join(differing)})"
        notes.append(
            f"{condition_name(spec.label)} differs in {what}: a difference cannot be ascribed to one of them{hint}"
        )
    return notes


def _scales(conditions: Sequence[RunSpec]) -> list[str]:
    """Advantage modes whose advantages differ in size while the learning rate is one for all."""
    scales = [(spec, advantage_of(spec.config.algorithm.advantage_mode).scale) for spec in conditions]
    known = [(spec, scale) for spec, scale in scales if scale is not None]
    rates = {spec.config.training.lr for spec, _ in known}
    sizes = {spec.config.algorithm.advantage_mode: [scale(p) for p in (0.1, 0.5, 0.9)] for spec, scale in known}
    modes = list(sizes)
    if len(modes) < 2 or len(rates) > 1 or len({tuple(size) for size in sizes.values()}) < 2:
        return []
    listed = "; ".join(f"{mode} {', '.join(f'{size:.2g}' for size in sizes[mode])}" for mode in modes)
    return [
        f"the advantages of {', '.join(modes)} differ in size (root mean square at 10, 50 and 90 % success: {listed}) "
        f"and share lr = {next(iter(rates)):g}: AdamW divides a constant factor out, grad_clip_norm and the weight of "
        "a prompt do not; a rate tuned for one may decide the comparison"
    ]


def without_sepa(specs: Sequence[RunSpec]) -> list[str]:
    """Conditions named gtpo_sepa whose runs are too short for SEPA to begin, and what they equal."""
    notes = []
    for spec in {spec.label: spec for spec in specs}.values():
        if lambda_stays_zero(spec.config):
            steps = spec.config.training.max_steps
            notes.append(
                f"{condition_name(spec.label)} trains with λ = 0 in all of its {steps} steps: it is gtpo under another "
                "name, and says nothing about SEPA"
            )
    return notes
