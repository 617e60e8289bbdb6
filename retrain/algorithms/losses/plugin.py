"""Losses of the user, named as ``module:function``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from retrain.errors import PluginError
from retrain.maths.arrays import plugin_name
from retrain.maths.shapes import of_shape
from retrain.policy.objective import LossInputs, PolicyLoss, TokenLoss


@dataclass(frozen=True)
class PluginLoss(PolicyLoss):
    """A user's ``function(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT)``, which returns the loss of every
    token.

    Arguments are 0 in the padding, and only the first carries a gradient. Raises PluginError naming the plug-in when
    the result has another shape, is not finite for a trained token, or does not depend on the policy.
    """

    function: Callable[..., object]
    is_plugin: ClassVar[bool] = True

    def per_token(self, inputs: LossInputs) -> TokenLoss:
        plugin, mask_BT, logprobs_BT = f"loss plug-in {plugin_name(self.function)}", inputs.mask_BT, inputs.logprobs_BT
        old_BT = torch.where(mask_BT, inputs.old_logprobs_BT, 0.0).to(logprobs_BT.dtype)
        result = self.function(logprobs_BT, old_BT, inputs.advantages_BT, mask_BT)
        loss_BT = of_shape(plugin, result, mask_BT, "tokens", "the loss of every token, not their sum")
        if not bool((torch.isfinite(loss_BT.detach()) | ~mask_BT).all()):
            raise PluginError(f"{plugin} returned NaN or infinity for a trained token")
        if logprobs_BT.requires_grad and not loss_BT.requires_grad:
            raise PluginError(f"{plugin} has no gradient: compute it from logprobs_BT without detaching it")
        return TokenLoss(loss_BT.to(logprobs_BT))
