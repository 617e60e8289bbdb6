"""Back pressure on decoding: chooses how many prompts decode at once, by the Universal Scalability Law.

The number changes speed and memory, and sampled tokens only by rounding. Every checkpoint holds the loads and
throughputs measured so far, so that a resumed cohort decides without new measurements.
"""

from typing import TypedDict

from retrain.config.evaluation import Backpressure
from retrain.errors import ModelError
from retrain.maths.backpressure import Decision, DecodeWork, PressureLimits, decide
from retrain.policy.base import BaseModel, architecture_of


def decode_work(base: BaseModel) -> DecodeWork | None:
    """Return the costs of a decoding step of this model; None for mixtures of experts, where each token uses only some
    weights, and for models whose configuration lacks the sizes."""
    model = base.model
    if model is None:
        return None
    try:
        sizes = architecture_of(base)
    except ModelError:
        return None
    if sizes.experts > 1:
        return None
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    parameters = sum(weight.numel() for weight in model.parameters())
    return DecodeWork(
        parameters=parameters - (0 if inputs is outputs else inputs.numel()),
        parameter_bytes=base.dtype.itemsize,
        operations_per_position=4 * sizes.layers * sizes.heads * sizes.head_dim,  # query with key, weight with value
        cache_bytes=sizes.cache_bytes(base.dtype.itemsize),
    )


class PressureState(TypedDict):
    load: int
    loads: list[int]
    throughputs: list[float]


class Pressure:
    """The controller of a cohort's decode batch; a load is the number of prompts decoded at once, over all runs."""

    def __init__(self, settings: Backpressure, prompts_per_step: int, samples: int, costs: DecodeWork | None = None):
        self.samples, self.costs = max(1, samples), costs
        most = max(1, min(settings.max_batch_size, prompts_per_step))
        self.limits = PressureLimits(
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
        return self.load * self.samples

    def observe(self, tokens: int, seconds: float, context: float | None = None) -> None:
        """Record one step, which sampled ``tokens`` in ``seconds``, and set the load of the next step. ``context``:
        mean number of tokens before a sampled token, from which operations per byte are estimated."""
        intensity = None if self.costs is None or context is None else self.costs.intensity(self.max_rows, context)
        self.loads.append(self.load)
        self.throughputs.append(tokens / max(seconds, 1e-9))
        self.decision = decide(self.loads, self.throughputs, self.load, self.limits, intensity)
        self.load = self.decision.load

    def metrics(self) -> dict[str, float | str | None]:
        decision = self.decision
        if decision is None:
            return {}
        return {
            "bp_action": decision.action,
            "bp_regime": decision.regime,
            "bp_p_star": decision.best_load,
            "bp_sigma": decision.sigma,
            "bp_kappa": decision.kappa,
            "bp_utilization": decision.utilization,
            "bp_throughput": self.throughputs[-1],
            "bp_warmup": decision.basis == "warmup",
        }

    def state(self) -> PressureState:
        return {"load": self.load, "loads": list(self.loads), "throughputs": list(self.throughputs)}

    def restore(self, state: PressureState) -> None:
        self.load = min(max(state["load"], self.limits.min_load), self.limits.max_load)
        self.loads, self.throughputs = list(state["loads"]), list(state["throughputs"])
