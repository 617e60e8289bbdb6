"""Early stopping that stays valid: which conditions have left, looked at whenever whole seeds are there.

What decides is ``maths.deciding`` with the declared rule. A condition that is decided, or whose going on is futile,
trains no further seeds; the baseline goes on while any comparison is open. What was seen at each look is written into
the manifest before anything is stopped, and is what later processes decide from: a resumed campaign takes exactly the
decisions that an uninterrupted one takes, and what has left stays out. A run that failed and was tried again comes in
when it is there, as a look of its own: no earlier look changes. Runs that are not started because of a decision are
listed as ``stopped`` with the reason.

    manifest["sequential"] = {rule, test, futility, race, alpha, metric, resolution, planned, seeds, labels, values,
        conditions: {label: {differences: [[seed, d], …], looks, stopped_after: pairs | null, stop_reason}}}

``labels`` has the baseline first; ``differences`` are in the order in which they were looked at. A look has ``pairs``,
``mean``, ``tested`` (the difference that the test is of: the additive fit's for the normal test, which is not the mean
of the pairs where runs are missing), ``p`` (stage-wise, of this comparison), ``p_adjusted`` (for the family), ``by``
(the test that spoke) and ``stop``; for the exact test also ``allowed``, ``tail`` and ``spent``
(``maths.sequential.Look``), for the normal one ``spent``. ``values`` [[seed, {label: value | null}], …] is what the
normal test looked at, which needs all conditions of a seed at once. Records without ``test`` are of the exact test.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from retrain.campaign.planning.manifest import Manifest, declaration
from retrain.config.campaign import RULE_KEYS
from retrain.config.runs import RunSpec
from retrain.errors import UsageError
from retrain.maths.boundaries import boundaries
from retrain.maths.deciding import Decision, Left, decide_look
from retrain.maths.rules import Rule
from retrain.records.observer import Observer
from retrain.verdicts.declared_rule import rule_of
from retrain.verdicts.results import Measure, read_run
from retrain.verdicts.words import SIGNIFICANT, p_words

SETTLED = ("done", "failed", "stopped")
FIXED = (*RULE_KEYS, "primary_metric", "seeds", "baseline", "conditions")
"""What a declaration fixes once a run has begun, where a rule looks before the end."""


class Looks:
    """The looks at one campaign. ``specs`` are all of its runs in their order; what a look needs of them is worked out
    once, because there is a look after every cohort."""

    def __init__(self, manifest: Manifest, specs: Sequence[RunSpec], observer: Observer):
        self.manifest, self.specs, self.observer = manifest, specs, observer
        self._now, self._by_seed = declaration(specs), _by_seed(specs)

    def look(self, under_way: Container[str] = ()) -> set[str]:
        """Look at every pair of seeds that has become complete, note it, and stop what is decided. Returns the runs
        that nobody needs any more and that are ``under_way`` just now: they are left as they are.

        The rule is the one that the manifest keeps as declared (``declaration.freeze``); nothing happens without
        ``[campaign] sequential``. Raises UsageError when the file now says otherwise in anything that a look depends
        on: that is fixed when the first run begins.
        """
        manifest, specs, now = self.manifest, self.specs, self._now
        declared = now | (manifest.content.get("declared") or {})
        if declared["sequential"] == now["sequential"] == "off":
            return set()
        measures = {text: _measure(specs, text) for text in (declared["primary_metric"], now["primary_metric"])}
        _refuse_changes(manifest, declared, now, measures)
        measure = measures[now["primary_metric"]]
        if len(now["conditions"]) < 2:
            return set()
        record = _record(manifest, declared, now, measure)
        labels = record["labels"]
        rule = rule_of(declared, len(labels) - 1, record["planned"], measure)
        if rule.test == "normal":
            _look_at_seeds(manifest, self._by_seed, labels, record, measure, rule)
        else:
            for place, (label, condition) in enumerate(record["conditions"].items()):
                if condition["stopped_after"] is None:
                    pairs = _new_pairs(manifest, self._by_seed, (label, labels[0]), condition, measure)
                    _look_at(record, condition, pairs, rule, place)
        if record != manifest.content.get("sequential"):
            manifest.note(sequential=record)
        return _stop(manifest, specs, record, self.observer, under_way)


def _measure(specs: Sequence[RunSpec], text: str) -> Measure:
    evaluation = specs[0].config.evaluation
    if text == "final" and evaluation.problems == 0:
        return Measure("final", "correct_rate")
    return Measure.parse(text, *evaluation.names[:1])


def _refuse_changes(
    manifest: Manifest, declared: Mapping[str, Any], now: Mapping[str, Any], measures: Mapping[str, Measure]
) -> None:
    """Raise UsageError at the first thing that the file now says otherwise than was declared."""
    for key in FIXED:
        was, new = declared[key], now[key]
        if key == "primary_metric":
            same = measures[was] == measures[new]
        elif key == "conditions":
            same = sorted(was) == sorted(new)
        else:
            same = was == new or (key == "seeds" and _grown(declared["sequential"], was, new))
        if not same:
            raise UsageError(_changed(manifest, key, was))


def _grown(rule: str, was: Sequence[int], now: Sequence[int]) -> bool:
    """Whether seeds were added behind, under the one rule that plans no number."""
    return rule == "always_valid" and list(now[: len(was)]) == list(was)


def _record(
    manifest: Manifest, declared: Mapping[str, Any], now: Mapping[str, Any], measure: Measure
) -> dict[str, Any]:
    """A copy of the manifest's record of looks, which can be added to, or a new one where nothing has been looked at.
    Raises UsageError when it is of another rule, metric, number of seeds or set of conditions than was declared."""
    labels, seeds = [now["baseline"], *(each for each in now["conditions"] if each != now["baseline"])], now["seeds"]
    settings = {
        "rule": declared["sequential"],
        "test": declared["test"],
        "futility": declared["futility"],
        "race": declared["race"],
        "metric": measure.name,
        "seeds": seeds,
        "labels": labels,
    }
    record = manifest.content.get("sequential")
    if not record or not (record.get("values") or any(own["differences"] for own in record["conditions"].values())):
        return {
            **settings,
            "alpha": SIGNIFICANT,
            "resolution": 0.0,
            "planned": len(seeds),
            "values": [],
            "conditions": {
                label: {"differences": [], "looks": [], "stopped_after": None, "stop_reason": None}
                for label in labels[1:]
            },
        }
    earlier = {"test": "exact", "futility": False, "race": False, "resolution": 0.0, "values": []}
    record = earlier | {"labels": [declared["baseline"], *record["conditions"]]} | record
    if _grown(record["rule"], record["seeds"], seeds):
        record |= {"seeds": seeds, "planned": len(seeds)}
    for key, value in settings.items():
        same = sorted(record[key]) == sorted(value) if key == "labels" else record[key] == value
        if not same or (key == "labels" and record[key][0] != labels[0]):
            names = {"rule": "sequential", "metric": "primary_metric", "labels": "conditions"}
            raise UsageError(_changed(manifest, names.get(key, key), record[key]))
    record["values"] = [[seed, dict(row)] for seed, row in record["values"]]
    record["conditions"] = {
        label: {**own, "differences": [*own["differences"]], "looks": [*own["looks"]]}
        for label, own in record["conditions"].items()
    }
    return record


def _changed(manifest: Manifest, key: str, before: Any) -> str:
    said = f"conditions {', '.join(before)}" if key == "conditions" else f"[campaign] {key} = {before!r}"
    if key == "baseline":
        said = f"{before} as the first of its conditions, the baseline"
    return (
        f"{manifest.directory} was begun with {said}: what a rule of stopping looks at, and by what, is fixed when the "
        "first run begins; put it back, or give another directory with --out"
    )


def _new_pairs(
    manifest: Manifest,
    seeds: Mapping[int, Mapping[str, RunSpec]],
    labels: Sequence[str],
    condition: Mapping[str, Any],
    measure: Measure,
) -> list[tuple[int, float | None, float]]:
    """Pairs that are complete and have not been looked at, in the order of the seeds, with the resolution of their
    values; None for a pair without a value.

    A seed that is not complete holds back the later ones, so that the order of looks does not depend on which run was
    quicker. A failed run that was tried again and finished comes in when it is there.
    """
    had = dict(condition["differences"])
    pairs: list[tuple[int, float | None, float]] = []
    for seed, pair in seeds.items():
        if had.get(seed) is not None:
            continue
        entries = [manifest.run(pair[label].run_id) for label in labels]
        if any(entry["state"] not in SETTLED for entry in entries):
            if seed in had:  # failed before, being tried again
                continue
            break
        if seed in had and any(entry["state"] != "done" for entry in entries):
            continue  # failed still: its files say nothing new
        runs = [read_run(manifest.directory, entry) for entry in entries]
        value, base = (run.result(measure) for run in runs)
        if value is not None and base is not None:
            pairs.append((seed, value - base, max(run.resolution(measure) for run in runs)))
        elif seed not in had:
            pairs.append((seed, None, 0.0))
    return pairs


def _by_seed(specs: Sequence[RunSpec]) -> dict[int, dict[str, RunSpec]]:
    by_seed: dict[int, dict[str, RunSpec]] = {}
    for spec in specs:
        by_seed.setdefault(spec.seed, {})[spec.label] = spec
    return by_seed


def _look_at(
    record: dict[str, Any],
    condition: dict[str, Any],
    new: Sequence[tuple[int, float | None, float]],
    rule: Rule,
    place: int,
) -> None:
    """Add the pairs and the looks at them, up to the one that ends the comparison, the ``place``-th of its family."""
    fresh = np.arange(rule.family) == place
    for seed, difference, resolution in new:
        _add(condition, seed, difference)
        if difference is None:
            continue
        record["resolution"] = max(record["resolution"], resolution)
        path = _path(condition)
        table = np.full((len(path), rule.family + 1), np.nan)
        table[:, 0], table[:, place + 1] = 0.0, path
        paths = [path if each else np.zeros(0) for each in fresh]
        found = decide_look(table, paths, rule, [None] * rule.family, fresh, record["resolution"])[place]
        if found is not None and _note(condition, found, {}):
            return


def _add(condition: dict[str, Any], seed: int, difference: float | None) -> None:
    """Put a pair behind those that were looked at; without a value it waits in its place."""
    if difference is not None:
        condition["differences"] = [pair for pair in condition["differences"] if pair[0] != seed]
    condition["differences"].append([seed, difference])


def _path(condition: Mapping[str, Any]) -> np.ndarray:
    return np.array([value for _, value in condition["differences"] if value is not None], dtype=np.float64)


def _note(condition: dict[str, Any], found: Decision, facts: Mapping[str, Any]) -> bool:
    """Add a look, with further ``facts`` of it; whether the comparison has ended with it."""
    condition["looks"].append(
        {
            **(asdict(found.look) if found.look is not None else {}),
            "pairs": found.pairs,
            "mean": found.difference,
            "tested": found.tested,
            "p": found.p,
            "p_adjusted": found.p_adjusted,
            "by": found.by,
            "stop": found.different,
            **facts,
        }
    )
    if found.reason not in ("decided", "futility"):
        return False
    condition["stopped_after"], condition["stop_reason"] = found.pairs, found.reason
    return True


def _look_at_seeds(
    manifest: Manifest,
    seeds: Mapping[int, Mapping[str, RunSpec]],
    labels: Sequence[str],
    record: dict[str, Any],
    measure: Measure,
    rule: Rule,
) -> None:
    """Look at every seed of which the conditions still in the comparison have ended, in their order, and once more at
    one whose failed run was tried again and finished."""
    conditions, base, rows = record["conditions"], labels[0], dict(record["values"])
    for seed, of_seed in seeds.items():
        here = [label for label in labels if label == base or conditions[label]["stopped_after"] is None]
        if len(here) < 2:
            return
        row = rows.get(seed)
        wanted = here if row is None else [label for label in here if row.get(label, 0.0) is None]
        entries = {label: manifest.run(of_seed[label].run_id) for label in wanted if label in of_seed}
        if row is None and any(entry["state"] not in SETTLED for entry in entries.values()):
            return
        if row is not None:  # of those that failed, what is done now
            entries = {label: entry for label, entry in entries.items() if entry["state"] == "done"}
        runs = {label: read_run(manifest.directory, entry) for label, entry in entries.items()}
        record["resolution"] = max([record["resolution"], *(run.resolution(measure) for run in runs.values())])
        if row is None:
            record["values"].append([seed, row := {}])
        row |= {label: run.result(measure) for label, run in runs.items()}
        _look_at_row(record, seed, row, [label for label in here if label != base], labels, rule)


def _look_at_row(
    record: dict[str, Any],
    seed: int,
    row: Mapping[str, float | None],
    here: Sequence[str],
    labels: Sequence[str],
    rule: Rule,
) -> None:
    """Add what a seed has new for the conditions that are ``here`` still, and look at those that have a new pair."""
    conditions, base, fresh = record["conditions"], row[labels[0]], set()
    for label in here:
        had, mine = dict(conditions[label]["differences"]), row.get(label)
        lead = None if mine is None or base is None else mine - base
        if seed not in had or (lead is not None and had[seed] is None):
            _add(conditions[label], seed, lead)
        if lead is not None and had.get(seed) is None:
            fresh.add(label)
    if not fresh:
        return
    values = [[np.nan if (v := own.get(label)) is None else v for label in labels] for _, own in record["values"]]
    looked = decide_look(
        np.array(values, dtype=np.float64),
        [_path(conditions[label]) for label in labels[1:]],
        rule,
        [_left(conditions[label]) for label in labels[1:]],
        np.array([label in fresh for label in labels[1:]]),
        record["resolution"],
    )
    spent = boundaries(rule.planned, rule.family, rule.looks, rule.alpha).spent
    for label, found in zip(labels[1:], looked, strict=True):
        if found is not None:
            _note(conditions[label], found, {"spent": float(spent[min(found.pairs, rule.planned) - 1, -1])})


def _left(condition: Mapping[str, Any]) -> Left | None:
    if condition["stopped_after"] is None:
        return None
    return Left.after(condition["stop_reason"] == "decided", condition["looks"][-1]["p_adjusted"])


def _stop(
    manifest: Manifest, specs: Sequence[RunSpec], record: Mapping[str, Any], observer: Observer,
    under_way: Container[str],
) -> set[str]:  # fmt: skip
    """Mark the runs that are not needed any more; those that are under way are returned in place of it."""
    unwanted = set[str]()
    conditions = record["conditions"]
    decided = {label for label, condition in conditions.items() if condition["stopped_after"] is not None}
    if not decided:
        return unwanted
    all_decided = decided == set(conditions)
    for spec in specs:
        entry = manifest.run(spec.run_id)
        if entry["state"] in SETTLED or not (spec.label in decided or all_decided):
            continue
        if spec.run_id in under_way:
            unwanted.add(spec.run_id)
            continue
        reason = "sequential rule: every comparison is decided"
        if spec.label in decided:
            own = conditions[spec.label]
            last, after = own["looks"][-1], f"after {own['stopped_after']} of {record['planned']} pairs"
            exact = record.get("test", "exact") == "exact"
            if own.get("stop_reason") == "futility":
                reason = f"sequential rule: stopped for futility {after}"
            else:
                level = record["alpha"] / len(conditions) if exact else record["alpha"]
                p = last["p"] if exact else last["p_adjusted"]
                reason = f"sequential rule: decided {after}, {p_words(p)} at level {level:.3g}"
        manifest.update(spec.run_id, state="stopped", reason=reason)
        observer.run_finished(spec, "stopped", reason)
    return unwanted
