"""Micro-batches of an update, and forward passes of scores, dealt out to the ranks of one run.

A step's micro-batches are those of one process, each is computed by one rank, and rank 0 adds up what they gave in
their order: with the same rollouts, an update has the same bits on any number of ranks. Only where the gradients of all
micro-batches would be too much to send, every rank sends the fp64 sum of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from retrain.maths.losses import Loss
from retrain.policy.budget import Budget
from retrain.policy.critic import ValueHead
from retrain.policy.lora import Adapter, Lanes, LoraWeights
from retrain.policy.objective import Objective, PolicyTerm
from retrain.policy.protocol import TrainBatch, Want
from retrain.policy.ranks import Ranks
from retrain.policy.rounded import products_in_bfloat16
from retrain.policy.scoring import Scored, scored
from retrain.policy.threads import Workers
from retrain.policy.update import Numbered, Part, Passes, Work
from retrain.types import Sample

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
    def of(cls, weights: Adapter | LoraWeights) -> Packed:
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
    """Micro-batches that a rank is asked to compute: the fields of ``Work`` and its ``Passes`` as plain data. ``batch``
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
    twice: bool
    summed: bool
    batches: list[Numbered]

    def done(
        self, lanes: Lanes, workers: Workers, losses: Mapping[str, Loss]
    ) -> tuple[list[Part], list[np.ndarray | None]]:
        """The parts, in host memory, and the log-probabilities that the passes left on the samples, one after another.
        ``losses`` are the user's own by name."""
        passes = Passes(lanes, Budget(0, self.twice), workers, self.dropout, self.bfloat16)
        objective = _with_loss(self.objective, losses[self.own_loss]) if self.own_loss else self.objective
        head = None if self.head is None else _head_of(self.head, lanes)
        work = Work(passes, self.batch, self.adapter.adapter(lanes), objective, head, self.frozen)
        parts = _done(work, self.batches, self.twice, self.summed)
        left = [sample.trainer_logprobs for _, samples, _ in self.batches for sample in samples]
        return [_on(part, torch.device("cpu")) for part in parts], left


@dataclass(frozen=True)
class ScoresAsked:
    """Micro-batches that a rank is asked to score; see ``scoring.scored``."""

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

    def parts(self, work: Work, batches: Sequence[Numbered], twice: bool) -> list[Part]:
        """See ``Shares.parts``. Raises what a rank has raised, once all have answered."""
        sizes = [sum(map(len, samples)) * (BACKWARD_COST if wanted else 1) for _, samples, wanted in batches]
        own, *others = ([batches[i] for i in share] for share in dealt(sizes, self.count))
        summed = len(batches) * sum(4 * buffer.numel() for buffer in work.buffers) > APART_BYTES
        message = self._asked(work, twice, summed)
        asked = [(replace(message, batches=share),) if share else None for share in others]
        answers = self.ranks.ask("passes", asked, lambda: _done(work, own, twice, summed))
        mine, theirs = answers.whole()
        parts = dict(zip([number for number, _, _ in own], mine, strict=True))
        for share, answer in zip(others, theirs, strict=True):
            if answer is None:
                continue
            for (number, _, _), part in zip(share, answer[0], strict=True):
                parts[number] = _on(part, work.base.device)
            left = iter(answer[1])
            for _, samples, _ in share:
                for sample in samples:
                    sample.trainer_logprobs = next(left)
        in_order = [parts[number] for number, _, _ in batches]
        return _summed(in_order) if summed else in_order

    def scores(
        self,
        lanes: Lanes,
        parts: Sequence[list[Sample]],
        want: frozenset[Want],
        adapter: Adapter | LoraWeights,
        temperature: float,
        critic: tuple[Adapter | LoraWeights, ValueHead] | None,
        bfloat16: bool,
    ) -> Scored:
        """``scoring.scored`` of all of these, each rank having done a share; ``bfloat16`` as in ``Passes``. Raises what
        a rank has raised, once all have answered."""
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

    def _asked(self, work: Work, twice: bool, summed: bool) -> PassesAsked:
        passes, custom = work.passes, any(_is_custom(term) for term in work.objective.terms)
        return PassesAsked(
            Packed.of(work.adapter),
            None if work.head is None else work.head.flat.detach().cpu(),
            work.frozen,
            _with_loss(work.objective, self.own_loss) if custom else work.objective,
            self.own_loss if custom else "",
            replace(work.batch, samples=(), probe=()),
            passes.dropout,
            passes.bfloat16,
            twice,
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


def _done(work: Work, batches: Sequence[Numbered], twice: bool, summed: bool) -> list[Part]:
    return work.summed_parts(batches, twice) if summed else work.parts(batches, twice, apart=True)


def _summed(parts: list[Part]) -> list[Part]:
    """The parts with all gradients, fp64 sums of shares, as one in the first."""
    sums = [part.gradients for part in parts if part.gradients]
    totals = [torch.stack(same).sum(0) for same in zip(*sums, strict=True)]
    return [replace(parts[0], gradients=totals), *(replace(part, gradients=[]) for part in parts[1:])]


def _is_custom(term: object) -> bool:
    return isinstance(term, PolicyTerm) and not isinstance(term.loss, str)


def _with_loss(objective: Objective, loss: Loss) -> Objective:
    terms = (replace(term, loss=loss) if isinstance(term, PolicyTerm) else term for term in objective.terms)
    return replace(objective, terms=tuple(terms))


def _head_of(flat: torch.Tensor, lanes: Lanes) -> ValueHead:
    head = ValueHead(flat.numel() - 1, lanes.base.device)
    with torch.no_grad():
        head.flat.copy_(flat)
    return head


def _on(part: Part, device: torch.device) -> Part:
    sums = {name: value.to(device) for name, value in part.sums.items()}
    gradients = [gradient.to(device) for gradient in part.gradients]
    return replace(part, loss=part.loss.to(device), sums=sums, gradients=gradients)
