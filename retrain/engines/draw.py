"""One token per row from its logits: inverse CDF at one uniform number, with log-probability and entropy.

Written so that TorchScript compiles it (see ``engines.step``).
"""

import torch

BLOCK = 256
"""Tokens whose masses are summed to one number: with a real vocabulary, a token is searched for among these sums and
then inside one block, and no row is accumulated token by token."""
CHUNK = 1 << 18
"""Logits that a CPU goes through at a time: they and what is made of them stay in its second-level cache."""


def draw(
    logits_RV: torch.Tensor,
    uniforms_R: torch.Tensor,
    temperature_R1: torch.Tensor | None = None,
    greedy_R1: torch.Tensor | None = None,
    in_any_order: bool = False,
    cut_R3: torch.Tensor | None = None,
    rank_K: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Token [R], its log-probability [R] and the entropy [R] (nats) of softmax(logits / temperature), and the token
    ids [R, K] that were kept where it was truncated (``cut_R3`` and ``rank_K``, see ``truncated``).

    The token is the first whose cumulative probability exceeds ``uniforms_R`` (in [0, 1)): no sort, and what is sampled
    depends on a row's own numbers alone. ``temperature_R1`` None is 1; rows with ``greedy_R1`` take the largest logit.
    ``in_any_order``: see ``cumulated``.
    Computed in fp32 (fp64 for fp64 logits). Logits that are not numbers give some token with log-probability NaN.
    """
    count = logits_RV.shape[0]
    rows = count if logits_RV.is_cuda else max(1, chunk // logits_RV.shape[1])
    if rows >= count:
        return _draw(logits_RV, uniforms_R, temperature_R1, greedy_R1, in_any_order, cut_R3, rank_K)
    tokens: list[torch.Tensor] = []
    logprobs: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    for begin in range(0, count, rows):
        end = min(count, begin + rows)
        token_R, logprob_R, entropy_R, kept_RK = _draw(
            logits_RV[begin:end],
            uniforms_R[begin:end],
            None if temperature_R1 is None else temperature_R1[begin:end],
            None if greedy_R1 is None else greedy_R1[begin:end],
            in_any_order,
            None if cut_R3 is None else cut_R3[begin:end],
            rank_K,
        )
        tokens.append(token_R)
        logprobs.append(logprob_R)
        entropies.append(entropy_R)
        if kept_RK is not None:
            kept.append(kept_RK)
    return torch.cat(tokens), torch.cat(logprobs), torch.cat(entropies), torch.cat(kept) if len(kept) > 0 else None


def _draw(
    logits_RV: torch.Tensor,
    uniforms_R: torch.Tensor,
    temperature_R1: torch.Tensor | None,
    greedy_R1: torch.Tensor | None,
    in_any_order: bool,
    cut_R3: torch.Tensor | None,
    rank_K: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``draw`` of rows that are taken at once."""
    real = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
    x_RV = logits_RV.to(real)
    if temperature_R1 is not None:
        x_RV = x_RV / temperature_R1
    # −1e4 stands for −inf: its exponential is 0 and 0 · −1e4 is 0, where 0 · −inf is not a number.
    x_RV = (x_RV - x_RV.amax(-1, keepdim=True)).clamp_(min=-1e4)
    mass_RV = x_RV.exp()
    kept_RK: torch.Tensor | None = None
    if cut_R3 is not None and rank_K is not None:
        mass_RV, kept_RK = truncated(mass_RV, cut_R3, rank_K, in_any_order)
    token_R1, total_R1 = inverse(mass_RV, uniforms_R.unsqueeze(1), in_any_order)
    if greedy_R1 is not None:
        token_R1 = torch.where(greedy_R1, logits_RV.argmax(-1, keepdim=True), token_R1)
    log_total_R = total_R1.squeeze(1).log()
    logprob_R = x_RV.gather(1, token_R1).squeeze(1) - log_total_R
    entropy_R = log_total_R - torch.linalg.vecdot(mass_RV, x_RV) / total_R1.squeeze(1)
    return token_R1.squeeze(1), logprob_R, entropy_R, kept_RK


def adds_in_any_order(device: torch.device) -> bool:
    """Whether ``cumulated`` must not depend on the order of a sum: on a GPU that was asked to be deterministic."""
    return device.type == "cuda" and torch.are_deterministic_algorithms_enabled()


def inverse(
    mass_RV: torch.Tensor, uniforms_R1: torch.Tensor, in_any_order: bool, block: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token [R, 1] at which the share ``uniforms_R1`` (in [0, 1)) of a row's mass is exceeded, and the row's whole
    mass [R, 1]. A token without mass is never the one."""
    size = mass_RV.shape[1]
    if size <= block:
        below_RV = cumulated(mass_RV, in_any_order)
        total_R1 = below_RV[:, -1:].contiguous()
        return torch.searchsorted(below_RV, _aim(uniforms_R1, total_R1), right=True).clamp_(max=size - 1), total_R1
    whole = size // block * block
    sums_RB = mass_RV[:, :whole].unflatten(1, [size // block, block]).sum(-1)
    if whole < size:
        sums_RB = torch.cat([sums_RB, mass_RV[:, whole:].sum(-1, keepdim=True)], 1)
    below_RB = cumulated(sums_RB, in_any_order)
    total_R1 = below_RB[:, -1:].contiguous()
    aim_R1 = _aim(uniforms_R1, total_R1)
    block_R1 = torch.searchsorted(below_RB, aim_R1, right=True).clamp_(max=below_RB.shape[1] - 1)
    before_R1 = below_RB.gather(1, (block_R1 - 1).clamp_(min=0)).masked_fill(block_R1 == 0, 0.0)
    ids_RK = block_R1 * block + torch.arange(block, device=mass_RV.device)
    inside_RK = mass_RV.gather(1, ids_RK.clamp(max=size - 1)).masked_fill(ids_RK >= size, 0.0)
    reached_RK = cumulated(inside_RK, in_any_order)
    # Added one by one the block's masses may come to a little less than their sum: its last token with mass, then.
    last_R1 = torch.searchsorted(reached_RK, reached_RK[:, -1:].contiguous())
    place_R1 = torch.searchsorted(reached_RK, aim_R1 - before_R1, right=True)
    return (block_R1 * block + torch.minimum(place_R1, last_R1)).clamp_(max=size - 1), total_R1


def _aim(uniforms_R1: torch.Tensor, total_R1: torch.Tensor) -> torch.Tensor:
    """The share of the total, below the total whatever it is rounded to."""
    aim_R1 = (uniforms_R1 * total_R1).to(total_R1.dtype)
    return torch.minimum(aim_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))


def truncated(
    mass_RV: torch.Tensor, cut_R3: torch.Tensor, rank_K: torch.Tensor, in_any_order: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The masses (the largest of a row is 1) with 0 outside the kept set [R, V], and the kept ids [R, K], the most
    probable first, −1 after the last.

    ``cut_R3``: of each row top-k (0: the row is left whole, and no ids), top-p and min-p, which are taken as
    ``engines.truncation`` says; ``rank_K``: 0 to K − 1, K the largest top-k. Only the first K are sorted.
    """
    most_R1, top_p_R1, min_p_R1 = cut_R3[:, 0:1], cut_R3[:, 1:2], cut_R3[:, 2:3]
    top_RK, ids_RK = mass_RV.topk(rank_K.shape[0], -1)
    kept_RK = (rank_K < most_R1) & (top_RK >= min_p_R1)
    sums_RK = cumulated(top_RK * kept_RK, in_any_order)
    before_RK = torch.cat([torch.zeros_like(top_p_R1), sums_RK[:, :-1]], 1)
    kept_RK &= (before_RK < top_p_R1 * sums_RK[:, -1:]) | (top_p_R1 >= 1)
    kept_RK |= (rank_K == 0) & (most_R1 > 0)  # also where the logits are not numbers
    cut_RV = torch.zeros_like(mass_RV).scatter_(1, ids_RK, top_RK * kept_RK)
    return torch.where(most_R1 > 0, cut_RV, mass_RV), ids_RK.masked_fill(~kept_RK, -1)


def cumulated(mass_RV: torch.Tensor, in_any_order: bool = False) -> torch.Tensor:
    """Sums of the masses (0 to 1) up to each token.

    A GPU adds floats in no fixed order, and refuses to under ``torch.use_deterministic_algorithms``; ``in_any_order``
    adds whole multiples of 2⁻⁴⁰, whose sum does not depend on it and fits in int64 for the largest vocabularies.
    """
    if not in_any_order:
        return mass_RV.cumsum(-1)
    grain = 2.0**-40
    return (mass_RV.double() / grain).long().cumsum(-1).double().mul_(grain).to(mass_RV.dtype)
