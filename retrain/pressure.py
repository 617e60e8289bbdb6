"""Back pressure on decoding: how many prompts decode at once, by the Universal Scalability Law.

Only speed and memory depend on it, never what is sampled beyond rounding. Decisions follow from recorded loads and
throughputs, which are part of every checkpoint: a resumed cohort decides from the record, not from a new clock.
"""

from __future__ import annotations

from typing import Any

from retrain.maths.backpressure import Decision, Limits, decide


class Pressure:
    """The controller of one cohort's decode batch; loads are prompts decoding at once, over all of its runs."""

    def __init__(self, settings: Any, prompts_per_step: int, samples: int):
        self.samples = max(1, samples)
        most = max(1, min(settings.max_batch_size, prompts_per_step))
        self.limits = Limits(
            min_load=min(settings.min_batch_size, most),
            max_load=most,
            warmup_steps=settings.warmup_steps,
            throttle_margin=settings.throttle_margin,
            increase_margin=settings.increase_margin,
            peak_gflops=settings.peak_gflops,
            peak_bw_gb_s=settings.peak_bw_gb_s,
        )
        self.load = most
        self.loads: list[int] = []
        self.throughputs: list[float] = []
        self.decision: Decision | None = None

    @property
    def max_rows(self) -> int:
        """Sequences that may decode at once."""
        return self.load * self.samples

    def observe(self, tokens: int, seconds: float) -> None:
        """One step's decoding: completion tokens and wall-clock seconds; sets the load of the next step."""
        self.loads.append(self.load)
        self.throughputs.append(tokens / max(seconds, 1e-9))
        self.decision = decide(self.loads, self.throughputs, self.load, self.limits)
        self.load = self.decision.load

    def metrics(self) -> dict[str, Any]:
        """The catalogue's bp_* keys after the latest observation."""
        decision = self.decision
        if decision is None:
            return {}
        return {
            "bp_action": decision.action,
            "bp_regime": decision.regime,
            "bp_p_star": decision.n_star,
            "bp_sigma": decision.sigma,
            "bp_kappa": decision.kappa,
            "bp_utilization": decision.utilization,
            "bp_throughput": self.throughputs[-1],
            "bp_warmup": decision.basis == "warmup",
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, strict JSON."""
        return {"load": self.load, "loads": list(self.loads), "throughputs": list(self.throughputs)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's observations."""
        self.load = min(max(state["load"], self.limits.min_load), self.limits.max_load)
        self.loads, self.throughputs = list(state["loads"]), list(state["throughputs"])
