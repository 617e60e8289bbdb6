"""Which numbers of a row depend on the clock or the machine, so that a repeated run may differ in them."""

from typing import Any

from retrain.record.catalogue import METRICS

UNITS = {"s", "tokens/s", "completions/s", "GiB", "share of peak"}
FITTED = {"bp_action", "bp_regime", "bp_p_star", "bp_sigma", "bp_kappa"}
TIMED = [metric for metric in METRICS if metric.unit in UNITS or metric.key in FITTED]
TIMING_KEYS = {metric.key for metric in TIMED}
TIMING_KEYS |= {alias for metric in TIMED for names in metric.aliases.values() for alias in names}


def is_timing_key(key: str) -> bool:
    """Whether the value under ``key`` may differ between two otherwise identical runs."""
    return key in TIMING_KEYS or key.startswith(("time/", "timing_", "perf/")) or "tools/tool_time" in key


def without_clock(value: Any) -> Any:
    """Nested data without the seconds that tools took."""
    if isinstance(value, dict):
        return {key: without_clock(inner) for key, inner in value.items() if "tools/tool_time" not in key}
    return [without_clock(inner) for inner in value] if isinstance(value, list) else value
