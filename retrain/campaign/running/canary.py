"""Servers are tried before a cohort begins or goes on, with an adapter of every kind that its runs train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from retrain.campaign.planning.plan import RunSpec
from retrain.campaign.running.models import Bases
from retrain.engines.server.canary import canary
from retrain.engines.server.engine import ServerEngine


def tried_servers(engine: ServerEngine, bases: Bases, specs: Sequence[RunSpec]) -> Iterator[str]:
    """What was found, a line for each kind of adapter. Raises ModelError for a server that does not compute what is
    trained here."""
    base, lanes = bases.trained(specs[0].config)
    kinds = {
        (spec.config.model.lora_rank, spec.config.lora.alpha, spec.config.training.temperature): spec for spec in specs
    }
    for (rank, alpha, temperature), spec in kinds.items():
        tolerance = spec.config.inference.tolerance_in(str(base.dtype).removeprefix("torch."))
        yield canary(engine, base, lanes, rank, alpha, temperature, tolerance).words
