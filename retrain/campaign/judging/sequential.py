"""Early stopping that stays valid: which conditions are decided, looked at whenever whole pairs of seeds are there.

The test is that of ``maths.sequential``; each comparison gets an equal part of α (Bonferroni over the conditions).
A condition that is decided trains no further seeds; the baseline goes on while any comparison is open. What was seen
at each look is written into the manifest before anything is stopped, and is what later processes decide from: a
resumed campaign takes exactly the decisions that an uninterrupted one takes. Runs that are not started because of a
decision are listed as ``stopped`` with the reason.

    manifest["sequential"] = {rule, alpha, metric, planned, seeds, conditions: {label: {differences: [[seed, d], …],
                              looks: [{pairs, mean, allowed, tail, p, spent, stop}, …], stopped_after: pairs | null}}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from retrain.campaign.judging.results import Measure, read_run
from retrain.campaign.judging.words import SIGNIFICANT, direction, probability
from retrain.campaign.planning.manifest import Manifest
from retrain.campaign.planning.plan import RunSpec
from retrain.errors import UsageError
from retrain.maths.sequential import sequential_looks
from retrain.record.observer import Observer

SETTLED = ("done", "failed", "stopped")


def look(manifest: Manifest, specs: Sequence[RunSpec], observer: Observer) -> None:
    """Look at every pair of seeds that has become complete, note it, and stop what is decided.

    ``specs`` are all runs of the campaign in their order. Nothing happens without ``[campaign] sequential``. Raises
    UsageError when the directory was begun with another rule, metric or number of seeds: those are fixed beforehand.
    """
    declared = specs[0].config.campaign
    if declared.sequential == "off":
        if manifest.content.get("sequential"):
            raise UsageError(_changed(manifest, "sequential", manifest.content["sequential"]["rule"]))
        return
    names = specs[0].config.evaluation.names
    measure = Measure.parse(declared.primary_metric, *names[:1])
    if declared.primary_metric == "final" and specs[0].config.evaluation.problems == 0:
        measure = Measure("final", "correct_rate")
    labels = list(dict.fromkeys(spec.label for spec in specs))
    seeds = list(dict.fromkeys(spec.seed for spec in specs))
    if len(labels) < 2:
        return
    record = manifest.content.get("sequential") or {
        "rule": declared.sequential,
        "alpha": SIGNIFICANT,
        "metric": measure.name,
        "planned": len(seeds),
        "seeds": seeds,
        "conditions": {label: {"differences": [], "looks": [], "stopped_after": None} for label in labels[1:]},
    }
    for key, now in (("rule", declared.sequential), ("metric", measure.name), ("seeds", seeds)):
        if record[key] != now:
            name = {"rule": "sequential", "metric": "primary_metric"}.get(key, key)
            raise UsageError(_changed(manifest, name, record[key]))
    for label, condition in record["conditions"].items():
        if condition["stopped_after"] is None:
            _look_at(condition, _new_pairs(manifest, specs, (label, labels[0]), condition, measure), record)
    manifest.note(sequential=record)
    _stop(manifest, specs, record, observer)


def _changed(manifest: Manifest, key: str, before: Any) -> str:
    return (
        f"{manifest.directory} has looked at its results with [campaign] {key} = {before!r}: a rule of stopping is "
        "fixed before the first look; give another directory with --out to use another"
    )


def _new_pairs(
    manifest: Manifest, specs: Sequence[RunSpec], labels: Sequence[str], condition: Mapping[str, Any], measure: Measure
) -> list[tuple[int, float | None]]:
    """Pairs that are complete and have not been looked at, in the order of the seeds; None for one without a value.

    A seed that is not complete holds back the later ones, so that the order of looks does not depend on which run was
    quicker. A failed run that was tried again and finished comes in when it is there.
    """
    by_seed: dict[int, dict[str, RunSpec]] = {}
    for spec in specs:
        by_seed.setdefault(spec.seed, {})[spec.label] = spec
    had = dict(condition["differences"])
    pairs: list[tuple[int, float | None]] = []
    for seed, pair in by_seed.items():
        if had.get(seed) is not None:
            continue
        entries = [manifest.run(pair[label].run_id) for label in labels]
        if any(entry["state"] not in SETTLED for entry in entries):
            if seed in had:  # failed before, being tried again
                continue
            break
        value, base = (read_run(manifest.directory, entry).result(measure) for entry in entries)
        if value is not None and base is not None:
            pairs.append((seed, value - base))
        elif seed not in had:
            pairs.append((seed, None))
    return pairs


def _look_at(condition: dict[str, Any], new: Sequence[tuple[int, float | None]], record: Mapping[str, Any]) -> None:
    """Add the pairs and the looks at them, up to the one that decides."""
    alpha = record["alpha"] / len(record["conditions"])
    for seed, difference in new:
        if difference is not None:
            condition["differences"] = [pair for pair in condition["differences"] if pair[0] != seed]
        condition["differences"].append([seed, difference])
        values = [value for _, value in condition["differences"] if value is not None]
        looks = sequential_looks(values, record["planned"], alpha=alpha, spending=record["rule"])
        condition["looks"] = [asdict(each) for each in looks]
        if looks and looks[-1].stop:
            condition["stopped_after"] = looks[-1].pairs
            return


def _stop(manifest: Manifest, specs: Sequence[RunSpec], record: Mapping[str, Any], observer: Observer) -> None:
    """Mark the runs that are not needed any more."""
    conditions = record["conditions"]
    decided = {label for label, condition in conditions.items() if condition["stopped_after"] is not None}
    all_decided = decided == set(conditions)
    for spec in specs:
        entry = manifest.run(spec.run_id)
        if entry["state"] in SETTLED or not (spec.label in decided or all_decided):
            continue
        reason = "sequential rule: every comparison is decided"
        if spec.label in decided:
            last = conditions[spec.label]["looks"][-1]
            reason = (
                f"sequential rule: decided after {last['pairs']} of {record['planned']} pairs, "
                f"p = {probability(last['p'])} at level {record['alpha'] / len(conditions):.3g}"
            )
        manifest.update(spec.run_id, state="stopped", reason=reason)
        observer.run_finished(spec, "stopped", reason)


def overlay(conditions: Sequence[dict[str, Any]], record: Mapping[str, Any], measure: Measure) -> None:
    """Put the rule's p-values and verdicts into a comparison's conditions (all but the first), before words are made.

    The p-value of one look at the end is not valid after several looks; the stage-wise one is. ``p_holm`` is it times
    the number of comparisons.
    """
    for condition in conditions:
        own = record["conditions"].get(condition["label"])
        if own is None:
            continue
        looks, decided = own["looks"], own["stopped_after"] is not None
        ended = decided or len(own["differences"]) == record["planned"]
        last = looks[-1] if looks and ended else None
        condition["p_value"] = last["p"] if last else None
        condition["p_holm"] = min(1.0, last["p"] * len(record["conditions"])) if last else None
        condition["sequential"] = {
            "rule": record["rule"],
            "planned": record["planned"],
            "looks": len(looks),
            "stopped_after": own["stopped_after"],
            "spent": looks[-1]["spent"] if looks else 0.0,
            "level": record["alpha"] / len(record["conditions"]),
        }
        if decided and looks:
            condition["verdict"] = direction(looks[-1]["mean"], measure)
        elif not ended:
            condition["verdict"] = "cannot tell: the sequential rule has not decided yet"
        else:
            condition["verdict"] = "no difference shown"


def words(condition: Mapping[str, Any]) -> str:
    """What the rule did, as a sentence; "" without one."""
    facts = condition.get("sequential")
    if not facts:
        return ""
    spent = f"{facts['spent']:.2g} of {facts['level']:.3g} spent"
    if facts["stopped_after"] is not None:
        return f" Stopped after {facts['stopped_after']} of {facts['planned']} pairs by the sequential rule, {spent}."
    return f" Sequential rule: not stopped in {facts['looks']} looks, {spent}."
