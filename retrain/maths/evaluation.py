"""Scores of one evaluation, a number for each problem: n samples of it, c of them correct.

The problem is the unit: a score here is that of one problem, and ``statistics.accuracy_interval`` of them all has the
interval. No formula here is new; what is chosen is that k samples out of n are neither the first k (which wastes the
rest) nor all subsets (too many): pass@k has a closed form, majorities are averaged over the disjoint blocks of k.
"""

import math
from collections.abc import Hashable, Sequence


def sensible_ks(samples: int) -> list[int]:
    """The k of pass@k that n samples can tell: 1, 2, 4, 8, … and n itself."""
    if samples < 1:
        raise ValueError(f"an evaluation has at least one sample per problem: got {samples}")
    powers = [1 << i for i in range(samples.bit_length()) if 1 << i <= samples]
    return powers if powers[-1] == samples else [*powers, samples]


def majority_ks(samples: int) -> list[int]:
    """The k of maj@k: those of ``sensible_ks`` from 3 on, because one or two samples have no majority."""
    return [k for k in sensible_ks(samples) if k >= 3]


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 − C(n−c, k)/C(n, k): probability that one of k out of n samples, c of them correct, is correct (Chen 2021)."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n: got n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def maj_at_k(answers_N: Sequence[Hashable | None], correct_N: Sequence[bool], k: int) -> float:
    """Whether the most frequent answer among the first k samples is correct: 1, 0, or the share of tied leaders.

    None is "no answer" and has no vote; without any vote the result is 0. Tied leaders share, as if one of them were
    drawn. Where samples with one answer were graded differently, the answer counts with their share of correct ones.
    """
    if len(answers_N) != len(correct_N) or not 1 <= k <= len(answers_N):
        raise ValueError(f"maj@k needs as many answers as marks and 1 <= k <= {len(answers_N)}: got k={k}")
    marks: dict[Hashable, list[bool]] = {}
    for answer, correct in zip(answers_N[:k], correct_N[:k], strict=True):
        if answer is not None:
            marks.setdefault(answer, []).append(bool(correct))
    if not marks:
        return 0.0
    most = max(map(len, marks.values()))
    leaders = [sum(given) / most for given in marks.values() if len(given) == most]
    return sum(leaders) / len(leaders)


def majority(answers_N: Sequence[Hashable | None], correct_N: Sequence[bool], k: int) -> float:
    """maj@k of one problem: the mean of ``maj_at_k`` over the ⌊n/k⌋ disjoint blocks of k samples."""
    blocks = [slice(start, start + k) for start in range(0, len(answers_N) - k + 1, k)]
    if not blocks:
        raise ValueError(f"maj@k needs 1 <= k <= {len(answers_N)}: got k={k}")
    return sum(maj_at_k(answers_N[block], correct_N[block], k) for block in blocks) / len(blocks)
