r"""``math``: equality of mathematical expressions by math-verify, in worker processes.

The answer that the completion marks (``rules.answer_text``) and the reference are both parsed (LaTeX grammar → sympy
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
from retrain.rewards.base import Item, Reward, answer_text, failed, has_answer, normalise, plain_number, same_text
from retrain.rewards.workers import WorkerPool
from retrain.types import RewardResult

MAX_ANSWER = 1000  # characters; a longer one is compared as text: no reference needs it, and the parser is slow
MEMORY_BYTES = 2 << 30


class MathReward(Reward):
    r"""1 when the answer is mathematically equal to the reference, else 0; ``strict`` as in ``rules.answer_text``.

    Raises MissingExtra when math-verify is not installed. No marked answer, or a box never closed, scores 0; an
    expression that exceeds ``timeout_s`` seconds or 2 GiB gets null.
    """

    name = "math"

    def __init__(self, workers: int = 2, timeout_s: float = 10.0, strict: bool = True, table: str = "reward"):
        if not is_installed("math_verify"):
            raise missing(f'[{table}] type = "math"', "math_verify")
        self.strict = strict
        entry = "retrain.rewards.symbolic:verifier"
        self.pool = WorkerPool(entry, {}, workers=workers, timeout_s=timeout_s, memory_bytes=MEMORY_BYTES)

    def grade_all(self, items: Sequence[Item]) -> list[RewardResult]:
        """Return results in order; only answers that text alone cannot decide go to the workers, each pair once."""
        pairs = [(problem.answer, answer_text(completion, problem, self.strict) or "") for problem, completion in items]
        verdicts: dict[tuple[str, str], bool | str | None] = {pair: decided(*pair) for pair in pairs}
        open_pairs = [pair for pair, verdict in verdicts.items() if verdict is None]
        for pair, reply in zip(open_pairs, self.pool.map(open_pairs), strict=True):
            verdicts[pair] = reply.value is True if reply.error is None else reply.error
        results = []
        for pair in pairs:
            verdict, format_ok = verdicts[pair], has_answer(pair[1])
            if isinstance(verdict, str):
                results.append(replace(failed(verdict), format_ok=format_ok))
            else:
                results.append(RewardResult(float(verdict is True), correct=verdict is True, format_ok=format_ok))
        return results

    def close(self) -> None:
        self.pool.close()


def decided(reference: str, answer: str) -> bool | None:
    """Return the verdict where text alone decides it, else None."""
    if not answer.strip() or not reference.strip():
        return False
    if same_text(answer, reference):
        return True
    if len(answer) > MAX_ANSWER or len(reference) > MAX_ANSWER:
        return False
    numbers = plain_number(normalise(answer)), plain_number(normalise(reference))
    if None not in numbers and not any("." in str(number) for number in numbers):
        return False
    return None


def verifier() -> Callable[[Sequence[str]], bool]:
    """Return the worker's function of (reference, answer): whether they are equal."""
    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.WARNING)  # math-verify warns that its own, cooperative time limits are off
    # LaTeX only: the other grammar of math-verify hands text to sympy's parse_expr, which calls eval.
    grammar = [LatexExtractionConfig()]

    def parsed(text: str) -> list[Any]:
        return parse(f"\\boxed{{{text}}}", grammar, fallback_mode="no_fallback", parsing_timeout=None)  # type: ignore[arg-type]

    reference_parsed = lru_cache(maxsize=1024)(parsed)  # each reference is compared with a whole group's answers

    def equal(pair: Sequence[str]) -> bool:
        gold, given = reference_parsed(pair[0]), parsed(pair[1])
        if not gold or not given:
            return False
        try:
            return bool(verify(gold, given, timeout_seconds=None, raise_on_error=True))
        except MemoryError:  # no verdict: the completion gets null
            raise
        except Exception:  # sympy cannot compare the two: a wrong answer, as for math-verify itself
            return False

    return equal
