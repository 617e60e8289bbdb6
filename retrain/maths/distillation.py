"""Divergences of a student's full-vocabulary distributions from a teacher's."""

import math

import torch

from retrain.maths.shapes import Floats_M, Ids_Mk, Logs_MV, Logs_MW

LEAST_TAIL = 1e-7  # The kept tokens' log Σp is at most −1e-7, so that the rest, 1 − Σp, has a logarithm


def divergence(student_MV: Logs_MV, teacher_MV: Logs_MV, alpha: float) -> Floats_M:
    """Return D_α of full distributions, given as log-probabilities, at each of M positions; the gradient reaches both.

    α = 0 is the forward divergence KL(T ‖ S) of student S from teacher T, α = 1 the reverse one KL(S ‖ T). Between them
    it is the generalised Jensen-Shannon divergence α·KL(T ‖ X) + (1 − α)·KL(S ‖ X) with X = αT + (1 − α)S, whose limit
    is 0 at both ends: D is discontinuous there (OPSD, arXiv 2601.18734; SDPO, 2601.20802; GKD, 2306.13649). Raises
    ValueError for α outside [0, 1].
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must be in [0, 1]: got {alpha}")
    if alpha == 0.0:
        return (teacher_MV.exp() * (teacher_MV - student_MV)).sum(-1)
    if alpha == 1.0:
        return (student_MV.exp() * (student_MV - teacher_MV)).sum(-1)
    # log M from the logarithms: exponentiating first would lose tokens whose probability underflows.
    mixed_MV = torch.logaddexp(teacher_MV + math.log(alpha), student_MV + math.log1p(-alpha))
    of_teacher_M = (teacher_MV.exp() * (teacher_MV - mixed_MV)).sum(-1)
    of_student_M = (student_MV.exp() * (student_MV - mixed_MV)).sum(-1)
    return alpha * of_teacher_M + (1.0 - alpha) * of_student_M


def with_tail(logprobs_MV: Logs_MV, ids_Mk: Ids_Mk) -> Logs_MW:
    """Return the log-probabilities of the tokens ``ids_Mk`` and, last, of all others as one token, [M, k + 1]. A
    divergence of these is at most that of the full distributions, and equal if at most one token is left over."""
    kept_Mk = logprobs_MV.gather(-1, ids_Mk)
    # log(1 − Σp) as log(−expm1(log Σp)), which keeps its digits where Σp is close to 1. Rounding can make Σp reach 1,
    # whose remainder has no logarithm: hence the clamp.
    rest_M = torch.log(-torch.expm1(torch.logsumexp(kept_Mk, -1).clamp(max=-LEAST_TAIL)))
    return torch.cat([kept_Mk, rest_M.unsqueeze(-1)], -1)
