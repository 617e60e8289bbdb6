"""Shapes and kinds of the tensors that ``maths`` takes and gives, as types; the letters are those of ``DIMENSIONS``.

They cost nothing at run time: nobody looks at an annotation unless asked to, as the tests do (jaxtyping, beartype).
What a user's function returns is checked by ``of_shape``.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor

from retrain.errors import PluginError

DIMENSIONS = {
    "P": "prompts; parts of a held-out set",
    "N": "rollouts of one group, or of a step; texts",
    "G": "groups of a step",
    "B": "rows of a padded batch, one rollout each; batches that are compared",
    "C": "conditions",
    "T": "sampled tokens, of one action or of a rollout's actions one after the other",
    "L": "all tokens of a sequence, what was read and what was sampled",
    "M": "sampled tokens of a micro-batch, one after the other",
    "R": "rows of a decode batch",
    "K": "columns of its cache; tokens kept by truncated sampling",
    "V": "vocabulary",
    "H": "hidden size",
    "D": "width of a vector",
    "S": "replicates: seeds, problems, pairs of runs; sequences of a packed row",
    "r": "rank of an adapter",
    "k": "ranks that are kept of it",
    "in": "inputs of a linear layer",
    "out": "outputs of a linear layer",
}
"""What each letter counts, everywhere. A 1 is an axis of one entry."""

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
