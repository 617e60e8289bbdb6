"""Token credit by a user's function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from retrain.algorithms.algorithm import (
    StepContext,
    TokenCreditStep,
    discard_by_tokens,
    pad_field,
    pad_if_all,
    token_mask,
    with_rows,
)
from retrain.algorithms.credit.uncertainty import per_token
from retrain.types import CreditedBatch, CreditedRollout


@dataclass(frozen=True)
class TransformPlugin(TokenCreditStep):
    """Calls ``function`` with the keywords advantages_BT, h_BT, planning_BT and mask_BT; it returns advantages_BT.

    Groups whose tokens all get 0 are discarded, unless ``keeps_uniform_groups``. Raises PluginError for a bad result.
    """

    function: Callable[..., object]
    keeps_uniform_groups: bool = False

    def apply_to(self, batch: CreditedBatch, rated: Sequence[CreditedRollout], context: StepContext) -> CreditedBatch:
        mask_BT, h_BT = token_mask(rated), pad_field(rated, "uncertainty_T")
        result = self.function(
            advantages_BT=pad_field(rated, "token_advantages_T"),
            h_BT=h_BT,
            planning_BT=pad_if_all([rollout.planning_T for rollout in rated], np.bool_),
            mask_BT=mask_BT,
        )
        advantages_BT = per_token("transform", self.function, result, mask_BT, "advantage").to(h_BT)
        batch = with_rows(batch, rated, token_advantages_T=advantages_BT)
        return batch if self.keeps_uniform_groups else discard_by_tokens(batch)
