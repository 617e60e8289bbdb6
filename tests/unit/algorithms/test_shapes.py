"""What the annotations of ``retrain.maths`` say is held to in every test."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from retrain.maths.credit import TokenCredit, gtpo_weights
from retrain.maths.losses import LossBounds, ppo
from retrain.maths.planning import overlapping_tokens
from retrain.maths.statistics import paired_comparison

ZEROS, ONES = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    "call",
    [
        lambda: gtpo_weights(ZEROS, ONES[:1], 0.1),  # the rows of one are not those of the other
        lambda: gtpo_weights(ZEROS[0], ONES[0], 0.1),  # an axis is missing
        lambda: gtpo_weights(ZEROS, ZEROS, 0.1),  # a mask is bool
        lambda: ppo(ZEROS, ZEROS, ZEROS.T, ONES, LossBounds()),
        lambda: TokenCredit(ZEROS, ONES, ONES[:, :2]),
        lambda: paired_comparison(np.zeros(4), np.zeros(5)),
        lambda: overlapping_tokens([(0, 1)], 4, np.zeros((2, 3), dtype=np.int64)),
    ],
)
def test_a_wrong_shape_or_kind_is_caught(call):
    with pytest.raises(TypeCheckError):
        call()
