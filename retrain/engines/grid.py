"""The decode batch for any decoder that transformers loads, through the model's own forward pass.

For what ``engines.dense`` does not drive: mixtures of experts, sliding windows, other norms. The batch is a grid of
lanes × slots: each lane owns an equal consecutive share of the rows, so that the LoRA product of all lanes is one
batched matrix product. A prompt is prefilled once and its cache repeated for its samples. Rows that have finished
leave as soon as a quarter of the grid is idle.
"""

from collections.abc import Sequence

import numpy as np
import torch

from retrain.engines.cache import DecodeCache
from retrain.engines.draw import adds_in_any_order, draw
from retrain.engines.rows import IDLE_SHARE, LaneRequest, Row, actions_of
from retrain.engines.truncation import Keeper, cuts_of, remember
from retrain.policy.arithmetic import FULL
from retrain.policy.backbone import backbone_of
from retrain.policy.base import BaseModel
from retrain.types import Action


class Grid:
    """The state of one decode batch; rows are ordered lane by lane, each lane with equally many slots."""

    def __init__(self, base: BaseModel, requests: Sequence[LaneRequest], rows: list[Row], lanes_used: list[int]):
        self.base, self.requests = base, requests
        device = base.device
        by_lane = [[row for row in rows if requests[row.request].lane == lane] for lane in lanes_used]
        self.lanes, self.slots = len(lanes_used), max(len(lane) for lane in by_lane)
        # A lane with fewer sequences is filled up with idle copies of its first one.
        self.rows = [lane[i] if i < len(lane) else lane[0] for lane in by_lane for i in range(self.slots)]
        idle = [i >= len(lane) for lane in by_lane for i in range(self.slots)]
        used = [requests[row.request] for row in self.rows]
        self.max_tokens = max(request.max_tokens for request in used)
        self.width = max(len(request.prompt_ids) for request in used)
        self.backbone = None if base.dtype in FULL else backbone_of(base)
        self.cache = DecodeCache(base.model.config.get_text_config(), self.width + self.max_tokens)

        draws = np.zeros((len(self.rows), self.max_tokens))
        for i, row in enumerate(self.rows):
            if not idle[i]:
                request = requests[row.request]
                draws[i, : request.max_tokens] = request.uniforms_T(row.sample)
        real = base.dtype if base.dtype == torch.float64 else torch.float32
        self.uniforms_BT = torch.from_numpy(draws).to(device)
        # Temperature 0 is greedy decoding; its log-probabilities are those at temperature 1.
        self.temperature_B1 = torch.tensor([[r.temperature or 1.0] for r in used], device=device, dtype=real)
        self.greedy_B1 = torch.tensor([[r.temperature == 0] for r in used], device=device)
        self.any_greedy = any(r.temperature == 0 for r in used)
        cuts = cuts_of(used, base.vocab_size)
        self.cut_B3 = None if cuts is None else torch.from_numpy(cuts).to(device, real)
        self.keeper = None if cuts is None else Keeper(len(used), self.max_tokens, int(cuts[:, 0].max()), device)
        self.limit_B = torch.tensor([r.max_tokens for r in used], device=device)
        self.alive_B = ~torch.tensor(idle, device=device)
        self.eos = torch.tensor(base.eos_ids, device=device)
        self.row_B = torch.arange(len(self.rows), device=device)  # current batch row -> row of the outputs
        shape = (len(self.rows), self.max_tokens)
        self.tokens_BT = torch.full(shape, base.pad_id, dtype=torch.long, device=device)
        self.logprobs_BT = torch.zeros(shape, device=device, dtype=real)
        self.entropy_BT = torch.zeros(shape, device=device, dtype=real)
        self.lengths_B = torch.zeros(len(self.rows), dtype=torch.long, device=device)
        self.mask_BK: torch.Tensor
        self.token_B: torch.Tensor
        self.check_every = 1 if device.type == "cpu" else 8  # tokens between looks at the device's answer

    def prefill(self) -> torch.Tensor:
        """Run each distinct (lane, prompt) once and spread its cache over its samples; logits [B, V]."""
        prompts = [self.requests[row.request].prompt_ids for row in self.rows]
        distinct: list[list[int]] = []  # per lane the rows that stand first with their request
        source = []
        for lane in range(self.lanes):
            first: dict[int, int] = {}
            for i in range(lane * self.slots, (lane + 1) * self.slots):
                first.setdefault(self.rows[i].request, i)
            distinct.append(list(first.values()))
        share = max(len(rows) for rows in distinct)
        order = [rows[min(i, len(rows) - 1)] for rows in distinct for i in range(share)]
        for lane, rows in enumerate(distinct):
            place = {self.rows[row].request: lane * share + i for i, row in enumerate(rows)}
            source += [place[self.rows[i].request] for i in range(lane * self.slots, (lane + 1) * self.slots)]
        device, pad = self.base.device, self.base.pad_id
        ids = torch.tensor([[pad] * (self.width - len(prompts[i])) + list(prompts[i]) for i in order], device=device)
        mask = torch.tensor(
            [[0] * (self.width - len(prompts[i])) + [1] * len(prompts[i]) for i in order], device=device
        )
        # Positions count real tokens only: padding on the left does not shift them.
        logits = self._logits(ids, mask, (mask.long().cumsum(-1) - 1).clamp_min(0))
        index = torch.tensor(source, device=device)
        self.cache.select_rows(index)
        self.mask_BK = torch.ones(len(self.rows), self.width + self.max_tokens, dtype=torch.bool, device=device)
        self.mask_BK[:, : self.width] = mask.bool()[index]
        self.start_B = self.mask_BK[:, : self.width].sum(1)
        return logits[index]

    def draw(self, logits_BV: torch.Tensor, step: int) -> None:
        """Sample one token per row; record log-probability and entropy."""
        rows, alive = self.row_B, self.alive_B
        greedy = self.greedy_B1 if self.any_greedy else None
        keeper = self.keeper
        token_B, logprob_B, entropy_B, kept_BK = draw(
            logits_BV,
            self.uniforms_BT[rows, step],
            self.temperature_B1,
            greedy,
            adds_in_any_order(self.base.device),
            cut_R3=self.cut_B3,
            rank_K=keeper and keeper.kept.rank_K,
        )
        if keeper is not None and kept_BK is not None:
            keeper.make_room(len(rows))
            remember(keeper.kept, kept_BK.masked_fill(~alive.unsqueeze(1), -1), rows * self.max_tokens + step)
        token_B = torch.where(alive, token_B, self.base.pad_id)
        self.tokens_BT[rows, step] = token_B
        self.logprobs_BT[rows, step] = torch.where(alive, logprob_B, 0)
        self.entropy_BT[rows, step] = torch.where(alive, entropy_B, 0)
        self.lengths_B[rows] += alive
        self.alive_B = alive & ~torch.isin(token_B, self.eos) & (self.limit_B > step + 1)
        self.token_B = token_B

    def compact_or_finished(self, step: int) -> bool:
        """True when no sequence is left; otherwise drop idle rows once enough of them have gathered."""
        if step % self.check_every and step + 1 < self.max_tokens:
            return False
        alive = self.alive_B.view(self.lanes, self.slots).cpu()
        busiest = int(alive.sum(1).max())
        if busiest == 0:
            return True
        if busiest > (1 - IDLE_SHARE) * self.slots:
            return False
        # Living rows of each lane first, in order; idle ones fill its share up.
        order = torch.argsort((~alive).to(torch.int8), dim=1, stable=True)[:, :busiest]
        keep = (order + torch.arange(self.lanes).unsqueeze(1) * self.slots).flatten().to(self.base.device)
        self.cache.select_rows(keep)
        for name in ("mask_BK", "start_B", "alive_B", "limit_B", "temperature_B1", "greedy_B1", "row_B", "token_B"):
            setattr(self, name, getattr(self, name)[keep])
        self.cut_B3 = None if self.cut_B3 is None else self.cut_B3[keep]
        self.slots = busiest
        return False

    def forward(self, step: int) -> torch.Tensor:
        """One decode step: logits [B, V] after the tokens just sampled."""
        mask = self.mask_BK[:, : self.width + step + 1]
        return self._logits(
            self.token_B.unsqueeze(1),
            mask[:, None, None, :] if self.cache.plain else mask,
            (self.start_B + step).unsqueeze(1),
        )

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [rows, V] of the last column; in half precision from the output layer as the update takes it."""
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        given |= {"past_key_values": self.cache.cache, "use_cache": True}
        if self.backbone is None or self.backbone.head is None:
            return self.base.model(**given, logits_to_keep=1).logits[:, -1]
        return self.backbone.head.logits(self.backbone.decoder(**given).last_hidden_state[:, -1])

    def actions(self) -> list[tuple[Row, Action]]:
        tokens, lengths, logprobs, entropy = (
            state.cpu().numpy() for state in (self.tokens_BT, self.lengths_B, self.logprobs_BT, self.entropy_BT)
        )
        first: dict[Row, int] = {}
        for i, row in enumerate(self.rows):
            first.setdefault(row, i)  # an idle copy stands behind the row that it copies
        index = list(first.values())
        supports = self.keeper and self.keeper.supports(index, lengths[index].tolist())
        actions = actions_of(self.base, tokens[index], logprobs[index], entropy[index], lengths[index], supports)
        return list(zip(first, actions, strict=True))
