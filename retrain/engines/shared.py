"""The in-process engine on every rank of one run: a batch is cut into pieces as for as many workers as all ranks have,
and each rank decodes some of them. What is sampled therefore is what one process with so many workers samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from retrain.engines.local import LocalEngine
from retrain.engines.protocol import Finished
from retrain.engines.slots import LaneRequest, SampleIndex
from retrain.policy.base import BaseModel
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Lanes, LoraWeights
from retrain.policy.protocol import PolicySnapshot
from retrain.policy.ranks import Ranks
from retrain.policy.shares import Packed
from retrain.types import Action, PolicyRef


@dataclass(frozen=True)
class DecodeTask:
    """The pieces that a rank decodes; ``refs`` name the weights of every lane. See ``LocalEngine.decode_pieces``."""

    requests: list[LaneRequest]
    pieces: list[list[SampleIndex]]
    refs: list[PolicyRef]
    lanes: list[int]
    rows: int

    def done(self, engine: LocalEngine) -> dict[int, list[Action]]:
        """Decode the pieces; return the actions of every request in them."""
        found: dict[int, list[Action]] = {}
        weights = [engine.weights_of(ref) for ref in self.refs]
        engine.decode_pieces(self.requests, self.pieces, weights, self.lanes, self.rows, found.__setitem__)
        return found


class SharedEngine(LocalEngine):
    """Rank 0's engine: a ``LocalEngine`` that has other ranks decode pieces too."""

    def __init__(self, base: BaseModel, lanes: Lanes, ranks: Ranks, tell: Callable[[str], None] = lambda line: None):
        super().__init__(base, lanes, tell=tell)
        self.ranks = ranks
        self._each = 0

    @property
    def side_by_side(self) -> int:
        return self.ranks.count * self.workers.count

    def publish(self, ref: PolicyRef, weights: PolicySnapshot) -> None:
        super().publish(ref, weights)
        assert isinstance(weights, LocalSnapshot)
        self.ranks.tell("publish", ref, Packed.of(weights.weights))

    def retire(self, ref: PolicyRef) -> None:
        super().retire(ref)
        self.ranks.tell("retire", ref)

    def forget_sequences(self) -> None:
        super().forget_sequences()
        self.ranks.tell("forget_sequences")

    def forget(self) -> None:
        super().forget()
        self.ranks.tell("forget")

    def affordable_rows(self, length: int, truncated: bool = False, continues: bool = False) -> int:
        """Rows that all ranks hold together; see ``LocalEngine.affordable_rows``."""
        self._each = super().affordable_rows(length, truncated, continues)
        return self.ranks.count * self._each

    def decode_pieces(
        self,
        requests: Sequence[LaneRequest],
        pieces: Sequence[list[SampleIndex]],
        weights: Sequence[LoraWeights],
        lanes: list[int],
        rows: int,
        keep: Finished,
    ) -> None:
        """See ``LocalEngine.decode_pieces``; piece i goes to rank i modulo their number. What a rank has decoded is
        kept also when another one has raised something."""
        rows = min(rows, self._each)  # few pieces leave ranks out
        count, refs = self.ranks.count, [request.policy for request in requests]
        of_lane = [refs[[request.lane for request in requests].index(lane)] for lane in range(len(weights))]
        asked = [
            (DecodeTask(list(requests), own, of_lane, lanes, rows),) if own else None
            for own in (list(pieces[rank::count]) for rank in range(1, count))
        ]
        own = pieces[::count]
        decode = super().decode_pieces
        answers = self.ranks.ask("decode", asked, lambda: decode(requests, own, weights, lanes, rows, keep))
        for found in answers.others:
            for request, actions in (found or {}).items():
                keep(request, actions)
        answers.whole()
