"""Servers are tried before a cohort begins or goes on, with an adapter of every kind that its runs train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from retrain.campaign.planning.plan import RunSpec
from retrain.campaign.running.models import Bases
from retrain.engines.server.canary import canaries
from retrain.engines.server.engine import ServerEngine


def tried_servers(engine: ServerEngine, bases: Bases, specs: Sequence[RunSpec]) -> Iterator[str]:
    """What was found, a line for each server and kind of adapter. Raises ModelError for a server that does not
    compute what is trained here."""
    base, lanes = bases.trained(specs[0].config)
    kinds = []
    for spec in specs:
        tolerance = spec.config.inference.tolerance_in(str(base.dtype).removeprefix("torch."))
        kinds.append((spec.config.model.lora_rank, spec.config.lora.alpha, spec.config.training.temperature, tolerance))
    with base.presence.alone():
        for found in canaries(engine, base, lanes, list(dict.fromkeys(kinds))):
            yield found.words
