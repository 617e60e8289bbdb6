"""Micro-batches of an update, and forward passes of scores, dealt out to the ranks of one run.

A step's micro-batches are those of one process, each is computed by one rank, and rank 0 adds up what they gave in
their order: with the same rollouts, an update has the same bits on any number of ranks. Only where the gradients of all
micro-batches would be too much to send, every rank sends the fp64 sum of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from retrain.policy.arithmetic import products_in_bfloat16
from retrain.policy.backbone import Scored, scored
from retrain.policy.head import ValueHead
from retrain.policy.lora import Adapter, Lanes, LoraWeights
from retrain.policy.objective import NoLoss, Objective, PolicyLoss, PolicyTerm
from retrain.policy.packing import Budget
from retrain.policy.ranks import Ranks
from retrain.policy.update import GradientAccumulator, MicroBatchResult, MicroBatchSpec, UpdateContext
from retrain.threads import Workers
from retrain.types import Sample, TrainBatch, Want

APART_BYTES = 2**28  # Total bytes up to which a step's gradients are sent one by one
BACKWARD_COST = 3  # A forward and a backward pass, in forward passes


@dataclass(frozen=True)
class Packed:
    """The weights of an adapter on their way to another rank."""

    rank: int
    scale: float
    live_rank: int
    flat: torch.Tensor

    @classmethod
    def of(cls, weights: LoraWeights) -> Packed:
        """A copy of the weights as they are now, in host memory."""
        return cls(weights.rank, weights.scale, weights.live_rank, weights.flat.detach().to("cpu", copy=True))

    def frozen(self, lanes: Lanes) -> LoraWeights:
        return LoraWeights(lanes.shapes, self.rank, self.scale, self.live_rank, self.flat.to(lanes.base.device))

    def adapter(self, lanes: Lanes) -> Adapter:
        adapter = lanes.new_adapter(self.rank, self.scale * self.rank)
        adapter.scale, adapter.live_rank = self.scale, self.live_rank
        with torch.no_grad():
            adapter.flat.copy_(self.flat)
        return adapter


@dataclass(frozen=True)
class PassesAsked:
    """Micro-batches that a rank is asked to compute: a ``GradientAccumulator`` and its context as plain data. ``batch``
    has no samples; ``own_loss`` names the policy loss where it is code of the user's, which every rank has loaded.
    ``summed``: one sum of the gradients is wanted, not each."""

    adapter: Packed
    head: torch.Tensor | None
    frozen: bool
    objective: Objective
    own_loss: str
    batch: TrainBatch
    dropout: float
    bfloat16: bool
    recompute: bool
    summed: bool
    specs: list[MicroBatchSpec]

    def done(self, lanes: Lanes, workers: Workers, losses: Mapping[str, PolicyLoss]) -> list[MicroBatchResult]:
        """The results, in host memory. ``losses`` are the user's own by name."""
        context = UpdateContext(lanes, Budget(0, self.recompute), workers, self.dropout, self.bfloat16)
        objective = _with_loss(self.objective, losses[self.own_loss]) if self.own_loss else self.objective
        head = None if self.head is None else _head_of(self.head, lanes)
        adapter = self.adapter.adapter(lanes)
        accumulator = GradientAccumulator(context, self.batch, adapter, objective, head, self.frozen)
        results = _computed(accumulator, self.specs, self.recompute, self.summed)
        return [_on(result, torch.device("cpu")) for result in results]


@dataclass(frozen=True)
class ScoresAsked:
    """Micro-batches that a rank is asked to score; see ``backbone.scored``."""

    parts: list[list[Sample]]
    want: frozenset[Want]
    adapter: Packed
    temperature: float
    critic: tuple[Packed, torch.Tensor] | None
    bfloat16: bool

    def done(self, lanes: Lanes) -> Scored:
        critic = None if self.critic is None else (self.critic[0].frozen(lanes), _head_of(self.critic[1], lanes))
        with products_in_bfloat16(self.bfloat16):
            return scored(lanes, self.parts, self.want, self.adapter.frozen(lanes), self.temperature, critic)


@dataclass(frozen=True)
class RunShares:
    """See ``Shares``: those of one run, whose policy loss is ``own_loss`` where it is code of the user's."""

    ranks: Ranks
    own_loss: str = ""

    @property
    def count(self) -> int:
        return self.ranks.count

    def compute(
        self, accumulator: GradientAccumulator, specs: Sequence[MicroBatchSpec], recompute: bool
    ) -> list[MicroBatchResult]:
        """See ``Shares.compute``. Raises what a rank has raised, once all have answered."""
        sizes = [sum(map(len, spec.samples)) * (BACKWARD_COST if spec.needs_gradient else 1) for spec in specs]
        own, *others = ([specs[i] for i in share] for share in dealt(sizes, self.count))
        summed = len(specs) * sum(4 * buffer.numel() for buffer in accumulator.buffers) > APART_BYTES
        message = self._asked(accumulator, recompute, summed)
        asked = [(replace(message, specs=share),) if share else None for share in others]
        answers = self.ranks.ask("passes", asked, lambda: _computed(accumulator, own, recompute, summed))
        mine, theirs = answers.whole()
        results = {spec.index: result for spec, result in zip(own, mine, strict=True)}
        for share, answer in zip(others, theirs, strict=True):
            for spec, result in zip(share, answer or (), strict=True):
                results[spec.index] = _on(result, accumulator.base.device)
        in_order = [results[spec.index] for spec in specs]
        return _summed(in_order) if summed else in_order

    def scores(
        self,
        lanes: Lanes,
        parts: Sequence[list[Sample]],
        want: frozenset[Want],
        adapter: LoraWeights,
        temperature: float,
        critic: tuple[LoraWeights, ValueHead] | None,
        bfloat16: bool,
    ) -> Scored:
        """Score micro-batches as ``backbone.scored`` does, distributed over the ranks. ``bfloat16`` is that of
        ``UpdateContext``. Raises the first error of a rank, after all ranks have answered."""
        shares = dealt([sum(map(len, samples)) for samples in parts], self.count)
        packed = None if critic is None else (Packed.of(critic[0]), critic[1].flat.detach().cpu())
        message = ScoresAsked([], want, Packed.of(adapter), temperature, packed, bfloat16)
        asked = [(replace(message, parts=[parts[i] for i in share]),) if share else None for share in shares[1:]]
        own = [parts[i] for i in shares[0]]
        answers = self.ranks.ask("scores", asked, lambda: scored(lanes, own, want, adapter, temperature, critic))
        mine, theirs = answers.whole()
        found: Scored = [{} for _ in parts]
        for share, arrays in zip(shares, [mine, *theirs], strict=True):
            for place, each in zip(share, arrays or (), strict=True):
                found[place] = each
        return found

    def _asked(self, accumulator: GradientAccumulator, recompute: bool, summed: bool) -> PassesAsked:
        context, objective = accumulator.context, accumulator.objective
        custom = any(_is_custom(term) for term in objective.terms)
        return PassesAsked(
            Packed.of(accumulator.adapter),
            None if accumulator.head is None else accumulator.head.flat.detach().cpu(),
            accumulator.frozen,
            _with_loss(objective, NoLoss()) if custom else objective,
            self.own_loss if custom else "",
            replace(accumulator.batch, samples=(), probe=()),
            context.dropout,
            context.bfloat16,
            recompute,
            summed,
            [],
        )


def dealt(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Places of these sizes in ``count`` shares of about the same size: the largest first, each to who has least. Every
    share is in order, and the first one is the largest in number where that is all the same."""
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for place in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = loads.index(min(loads))
        shares[least].append(place)
        loads[least] += sizes[place]
    return [sorted(share) for share in shares]


def _computed(
    accumulator: GradientAccumulator, specs: Sequence[MicroBatchSpec], recompute: bool, summed: bool
) -> list[MicroBatchResult]:
    """The results of these micro-batches; if ``summed`` with the fp64 sum of all gradients in the first of them, no
    more gradients than there are workers being in memory at once."""
    if not summed:
        return accumulator.compute(specs, recompute, separate=True)
    totals = [torch.zeros_like(buffer, dtype=torch.float64) for buffer in accumulator.buffers]
    results, count = list[MicroBatchResult](), accumulator.context.workers.count
    for begin in range(0, len(specs), count):
        for result in accumulator.compute(specs[begin : begin + count], recompute, separate=True):
            for total, gradient in zip(totals, result.gradients, strict=False):
                total += gradient
            results.append(replace(result, gradients=[]))
    return [replace(results[0], gradients=totals), *results[1:]] if results else []


def _summed(results: list[MicroBatchResult]) -> list[MicroBatchResult]:
    """The results with all gradients, fp64 sums of shares, as one in the first."""
    sums = [result.gradients for result in results if result.gradients]
    totals = [torch.stack(same).sum(0) for same in zip(*sums, strict=True)]
    return [replace(results[0], gradients=totals), *(replace(result, gradients=[]) for result in results[1:])]


def _is_custom(term: object) -> bool:
    return isinstance(term, PolicyTerm) and term.loss.is_plugin


def _with_loss(objective: Objective, loss: PolicyLoss) -> Objective:
    terms = (replace(term, loss=loss) if isinstance(term, PolicyTerm) else term for term in objective.terms)
    return replace(objective, terms=tuple(terms))


def _head_of(flat: torch.Tensor, lanes: Lanes) -> ValueHead:
    head = ValueHead(flat.numel() - 1, lanes.base.device)
    with torch.no_grad():
        head.flat.copy_(flat)
    return head


def _on(result: MicroBatchResult, device: torch.device) -> MicroBatchResult:
    sums = {name: value.to(device) for name, value in result.sums.items()}
    gradients = [gradient.to(device) for gradient in result.gradients]
    return replace(result, loss=result.loss.to(device), sums=sums, gradients=gradients)
