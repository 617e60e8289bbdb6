"""Shapes and kinds of the tensors that ``maths`` takes and gives, as types; the letters are those of ``retrain.types``.

They cost nothing at run time: nobody looks at an annotation unless asked to, as the tests do (jaxtyping, beartype).
What a user's function returns is checked by ``of_shape``.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor

from retrain.errors import PluginError

Floats_BT = Float[Tensor, "B T"]
Mask_BT = Bool[Tensor, "B T"]
Mask_B1 = Bool[Tensor, "B 1"]
Floats_M = Float[Tensor, "M"]
Logs_MV = Float[Tensor, "M V"]
Ids_Mk = Int64[Tensor, "M k"]
Logs_MW = Float[Tensor, "M _"]
Floats_B1 = Float[Tensor, "B 1"]
Floats_B = Float[Tensor, "B"]
Doubles_B = Float64[Tensor, "B"]
Values_B = Shaped[Tensor, "B"]  # Numbers of any type, or bool
Rewards_PN = Shaped[Tensor, "*P N"]  # Groups of rewards, with any number of axes (or none) for the prompts
Doubles_PN = Float64[Tensor, "*P N"]
Sum = Float64[Tensor, ""]

FactorA = Float[Tensor, "r in"]
FactorB = Float[Tensor, "out r"]
CutA = Float[Tensor, "k in"]
CutB = Float[Tensor, "out k"]
Spectrum = Float[Tensor, "k"]
Doubles_K = Float64[Tensor, "k"]
AnySpectrum = Float[Tensor, "_"]  # Spectrum of any length
Values = Shaped[Tensor, "..."]  # Values of any shape and type


def of_shape(plugin: str, result: Any, like: Values, what: str, wanted: str) -> Values:
    """``result`` as a tensor of the shape of ``like``; PluginError when it is none."""
    tensor = torch.as_tensor(result)
    if tensor.shape != like.shape:
        shapes = f"{tuple(tensor.shape)} for {what} of shape {tuple(like.shape)}"
        raise PluginError(f"{plugin} returned shape {shapes}: return {wanted}")
    return tensor
