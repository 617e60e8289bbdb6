r"""``math``: equality of mathematical expressions by math-verify, in worker processes.

The answer that the completion marks (``base.marked_answer``) and the reference are both parsed (LaTeX grammar → sympy
tree; no text is ever evaluated as code) and compared symbolically and numerically. A short expression such as
``9^{9^{9}}`` can make sympy compute or allocate without end; hence the workers with limits. Answers whose texts alone
decide (the same spelling, two different integers) never reach a worker.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from retrain.extras import is_installed, missing
from retrain.rewards.base import Item, Reward, failed, marked_answer
from retrain.rewards.workers import WorkerLimits, WorkerPool
from retrain.types import RewardResult
from retrain.util.answers import has_answer, verdict_by_text

MEMORY_BYTES = 2 << 30


class MathReward(Reward):
    r"""Grades 1 if the answer is mathematically equal to the reference, else 0.

    ``strict``: only a marked answer counts (``answer_text``). No answer, or a box that is never closed, scores 0; an
    expression that exceeds ``timeout_s`` seconds or 2 GiB has the reward null. Raises MissingExtra if math-verify is
    not installed.
    """

    name = "math"

    def __init__(self, workers: int = 2, timeout_s: float = 10.0, strict: bool = True, table: str = "reward"):
        if not is_installed("math_verify"):
            raise missing(f'[{table}] type = "math"', "math_verify")
        self.strict = strict
        entry = "retrain.rewards.symbolic:verifier"
        self.pool = WorkerPool(entry, {}, workers=workers, limits=WorkerLimits(timeout_s, MEMORY_BYTES))

    def grade_all(self, items: Sequence[Item]) -> list[RewardResult]:
        """Return results in order. Pairs of answer and reference that text alone cannot decide go to the workers, equal
        pairs once."""
        pairs = [(problem.answer, marked_answer(problem, text, self.strict) or "") for problem, text in items]
        verdicts: dict[tuple[str, str], bool | str | None] = {pair: verdict_by_text(*pair) for pair in pairs}
        open_pairs = [pair for pair, verdict in verdicts.items() if verdict is None]
        for pair, reply in zip(open_pairs, self.pool.map(open_pairs), strict=True):
            verdicts[pair] = reply.error or reply.value is True
        return [_result(verdicts[pair], has_answer(pair[1])) for pair in pairs]

    def close(self) -> None:
        self.pool.close()


def _result(verdict: bool | str | None, format_ok: bool) -> RewardResult:
    if isinstance(verdict, str):
        return replace(failed(verdict), format_ok=format_ok)
    return RewardResult(float(verdict is True), correct=verdict is True, format_ok=format_ok)


def verifier() -> Callable[[Sequence[str]], bool]:
    """Return the function that a worker calls with (reference, answer); it returns whether they are equal."""
    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.WARNING)  # math-verify warns that its own, cooperative time limits are off
    # LaTeX only: the other grammar of math-verify hands text to sympy's parse_expr, which calls eval.
    grammar = [LatexExtractionConfig()]

    def parsed(text: str) -> list[Any]:
        return parse(f"\\boxed{{{text}}}", grammar, fallback_mode="no_fallback", parsing_timeout=None)  # type: ignore[arg-type]

    reference_parsed = lru_cache(maxsize=1024)(parsed)  # each reference is compared with a whole group's answers

    def equal(pair: Sequence[str]) -> bool:
        gold, answer = reference_parsed(pair[0]), parsed(pair[1])
        if not gold or not answer:
            return False
        try:
            return bool(verify(gold, answer, timeout_seconds=None, raise_on_error=True))
        except MemoryError:  # no verdict: the completion gets null
            raise
        except Exception:  # sympy cannot compare the two: a wrong answer, as for math-verify itself
            return False

    return equal
