"""What a campaign found: held-out results per condition, paired by seed, with intervals and an honest verdict.

The seed is the replicate: completions are never pooled over seeds, and failed runs are counted, not dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrain.files import read_jsonl, write_json
from retrain.maths.statistics import MIN_PAIRS_FOR_VERDICT, holm, paired_comparison, smallest_p

METRIC = "eval/heldout/correct_rate"
SIGNIFICANT = 0.05


def compare(directory: Path, runs: Sequence[dict[str, Any]], labels: Sequence[str]) -> dict[str, Any]:
    """The comparison of a campaign's runs from their files; written to ``comparison.json`` and returned.

    ``runs`` are manifest entries, the first of ``labels`` is the baseline. The primary number is held-out accuracy
    after the last update; campaigns without evaluation are compared by the correct rate over the last tenth of
    training instead, and the note says so.
    """
    order = list(dict.fromkeys(labels))
    results = [_condition(directory, label, [run for run in runs if run["label"] == label]) for label in order]
    held_out = any(result["before"] is not None or result["held_out"] for result in results)
    baseline = results[0]
    for result in results[1:]:
        _against(result, baseline)
    tested = [result for result in results if result["p_value"] is not None]
    for result, adjusted in zip(tested, holm([result["p_value"] for result in tested]) if tested else [], strict=True):
        result["p_holm"] = float(adjusted)
    for result in results[1:]:
        result["verdict"] = _verdict(result)
    failed = [run["run_id"] for run in runs if run["state"] == "failed"]
    comparison = {
        "metric": METRIC if held_out else "correct_rate (training, last tenth)",
        "baseline": baseline["label"],
        "conditions": results,
        "failed": failed,
        "note": _note(results, failed, held_out),
    }
    write_json(directory / "comparison.json", comparison)
    return comparison


def _condition(directory: Path, label: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The results of one condition's finished runs, by seed."""
    after: dict[int, float] = {}
    before, tokens, seconds, held_out = [], 0, 0.0, False
    for run in runs:
        rows = read_jsonl(directory / run["path"] / "metrics.jsonl")
        if rows:
            tokens += rows[-1].get("num_tokens") or 0
            seconds += sum(_own_seconds(row) for row in rows)
        if run["state"] != "done" or not rows:
            continue
        evaluations = [row for row in read_jsonl(directory / run["path"] / "evals.jsonl") if row["name"] == "heldout"]
        evaluations = [row for row in evaluations if row[METRIC] is not None]  # None: nothing could be graded
        if evaluations:
            held_out = True
            after[run["seed"]] = evaluations[-1][METRIC]
            if evaluations[0]["step"] == 0:
                before.append(evaluations[0][METRIC])
        else:
            last = rows[-max(1, len(rows) // 10) :]
            after[run["seed"]] = sum(row["correct_rate"] for row in last) / len(last)
    values = [after[seed] for seed in sorted(after)]
    own = paired_comparison(values, [0.0] * len(values)) if values else None
    return {
        "label": label,
        "seeds": sorted(run["seed"] for run in runs),
        "finished": sorted(after),
        "before": sum(before) / len(before) if before else None,
        "after_mean": own.mean if own else None,
        "after_values": values,
        "interval": [max(0.0, own.low), min(1.0, own.high)] if own and own.low is not None and own.high else None,
        "difference": None,
        "difference_interval": None,
        "p_value": None,
        "p_holm": None,
        "smallest_p": None,
        "pairs": 0,
        "verdict": "baseline",
        "failed": sum(run["state"] == "failed" for run in runs),
        "tokens": tokens,
        "seconds": seconds,
        "held_out": held_out,
    }


def _own_seconds(row: dict[str, Any]) -> float:
    """What a step cost for this run: the wall clock of the cohort's shared parts is split among its runs."""
    own = sum(row.get(f"time/{part}") or 0.0 for part in ("score", "credit", "update", "record", "checkpoint"))
    shared = sum(row.get(f"time/{part}") or 0.0 for part in ("rollout", "eval"))
    return own + shared / (row.get("cohort_size") or 1)


def _against(result: dict[str, Any], baseline: dict[str, Any]) -> None:
    """Fill in the paired difference to the baseline over the seeds that both finished."""
    mine = dict(zip(result["finished"], result["after_values"], strict=True))
    base = dict(zip(baseline["finished"], baseline["after_values"], strict=True))
    shared = sorted(set(mine) & set(base))
    result["pairs"] = len(shared)
    if not shared:
        return
    paired = paired_comparison([mine[s] for s in shared], [base[s] for s in shared])
    result["difference"] = paired.mean
    if paired.low is not None:
        result["difference_interval"] = [paired.low, paired.high]
    result["smallest_p"] = paired.smallest_p
    if paired.verdict_possible:
        result["p_value"] = paired.p


def _verdict(result: dict[str, Any]) -> str:
    pairs = result["pairs"]
    if pairs == 0:
        return "no pair of finished runs"
    if result["p_holm"] is None:
        return f"cannot tell: {pairs} pair{'s' * (pairs > 1)} of seeds, {MIN_PAIRS_FOR_VERDICT} needed"
    if result["p_holm"] <= SIGNIFICANT:
        return "better" if result["difference"] > 0 else "worse"
    return "no difference shown"


def _note(results: Sequence[dict[str, Any]], failed: Sequence[str], held_out: bool) -> str:
    """What a reader must know beside the table."""
    said = []
    if not held_out:
        said.append("No held-out evaluation was asked for ([evaluation] problems = 0); training rewards are compared.")
    pairs = max((result["pairs"] for result in results[1:]), default=0)
    if 0 < pairs < MIN_PAIRS_FOR_VERDICT:
        said.append(
            f"With {pairs} paired seed{'s' * (pairs > 1)} the smallest p-value any difference can reach is "
            f"{smallest_p(pairs):.3g}: a verdict needs {MIN_PAIRS_FOR_VERDICT} or more."
        )
    if failed:
        said.append(f"{len(failed)} failed run(s) are not in the means: {', '.join(failed)}.")
    return " ".join(said)
