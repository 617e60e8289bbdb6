"""Types of the tensors of ``maths``, with axes named by the letters of ``DIMENSIONS``.

Annotations are checked only in tests (jaxtyping, beartype). ``of_shape`` checks the results of users' functions.
"""

import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor

from retrain.errors import PluginError

# The axis that each letter names, everywhere. A 1 is an axis of one entry.
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

Floats_BT = Float[Tensor, "B T"]
Mask_BT = Bool[Tensor, "B T"]
Mask_B1 = Bool[Tensor, "B 1"]
Floats_M = Float[Tensor, "M"]
Logs_MV = Float[Tensor, "M V"]
Ids_Mk = Int64[Tensor, "M k"]
Logs_MW = Float[Tensor, "M _"]
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


def of_shape(plugin: str, result: object, like: Values, subject: str, expected: str) -> Values:
    """Return ``result`` as a tensor. Raises PluginError unless it has the shape of ``like``."""
    tensor = torch.as_tensor(result)
    if tensor.shape != like.shape:
        shapes = f"{tuple(tensor.shape)} for {subject} of shape {tuple(like.shape)}"
        raise PluginError(f"{plugin} returned shape {shapes}: return {expected}")
    return tensor
