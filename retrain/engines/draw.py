"""One token per row from its logits: inverse CDF at one uniform number, with log-probability and entropy.

Written so that TorchScript compiles it (see ``engines.step``).
"""

import torch


def draw(
    logits_RV: torch.Tensor,
    uniforms_R: torch.Tensor,
    temperature_R1: torch.Tensor | None = None,
    greedy_R1: torch.Tensor | None = None,
    in_any_order: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token [R], its log-probability [R] and the entropy [R] (nats) of softmax(logits / temperature).

    The token is the first whose cumulative probability exceeds ``uniforms_R`` (in [0, 1)): no sort, and what is drawn
    depends on a row's own numbers alone. ``temperature_R1`` None is 1; rows with ``greedy_R1`` take the largest logit.
    ``in_any_order``: see ``cumulated``.
    Computed in fp32 (fp64 for fp64 logits). Logits that are not numbers give some token with log-probability NaN.
    """
    real = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
    x_RV = logits_RV.to(real)
    if temperature_R1 is not None:
        x_RV = x_RV / temperature_R1
    # −1e4 stands for −inf: its exponential is 0 and 0 · −1e4 is 0, where 0 · −inf is not a number.
    x_RV = (x_RV - x_RV.amax(-1, keepdim=True)).clamp_(min=-1e4)
    mass_RV = x_RV.exp()
    below_RV = cumulated(mass_RV, in_any_order)
    total_R1 = below_RV[:, -1:].contiguous()
    aim_R1 = (uniforms_R.unsqueeze(1) * total_R1).to(real)
    aim_R1 = torch.minimum(aim_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    token_R1 = torch.searchsorted(below_RV, aim_R1, right=True).clamp_(max=x_RV.shape[1] - 1)
    if greedy_R1 is not None:
        token_R1 = torch.where(greedy_R1, logits_RV.argmax(-1, keepdim=True), token_R1)
    log_total_R = total_R1.squeeze(1).log()
    logprob_R = x_RV.gather(1, token_R1).squeeze(1) - log_total_R
    entropy_R = log_total_R - torch.linalg.vecdot(mass_RV, x_RV) / total_R1.squeeze(1)
    return token_R1.squeeze(1), logprob_R, entropy_R


def cumulated(mass_RV: torch.Tensor, in_any_order: bool = False) -> torch.Tensor:
    """Sums of the masses (0 to 1) up to each token.

    A GPU adds floats in no fixed order, and refuses to under ``torch.use_deterministic_algorithms``; ``in_any_order``
    adds whole multiples of 2⁻⁴⁰, whose sum does not depend on it and fits in int64 for the largest vocabularies.
    """
    if not in_any_order:
        return mass_RV.cumsum(-1)
    grain = 2.0**-40
    return (mass_RV.double() / grain).long().cumsum(-1).double().mul_(grain).to(mass_RV.dtype)
