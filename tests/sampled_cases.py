"""A run's directory with recorded rollouts, as a recorder writes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from record_cases import context, evaluation, group, step

from retrain.record.recorder import RunRecorder
from retrain.types import RewardResult


def record(
    folder: Path, solved: Sequence[float] = (0.0, 1.0), steps: int = 3, texts: Sequence[str] = ("so 4", "so five")
) -> Path:
    """Steps whose groups are one mixed and one uniform, and an evaluation before and after them on two problems, of
    which the second is solved as ``solved`` says."""
    with RunRecorder(folder, context(max_steps=20), {}, token_text=lambda ids: written(ids, texts)) as recorder:
        for number in range(steps):
            if number in (0, steps - 1):
                rate = solved[number > 0]
                answers = [group([1.0], [3], problem_id="p0"), group([rate], [4], problem_id="p1", tags=("hard",))]
                recorder.record_eval(evaluation(answers, number + (number > 0)))
            failed = RewardResult(None, error="timed out")
            calls = RewardResult(0.0, sample_metrics={"tools/tool_errors": 2.0})
            own = [group([1.0, calls, failed], [3, 5, 2]), group([0.0, 0.0], [2, 7], discarded="zero_advantage")]
            own[0].rollouts[1].token_advantages_T = own[0].rollouts[1].logprobs_T * 0 + own[0].rollouts[1].advantage + 1
            recorder.record_step(step(own, number))
    return folder


def written(ids: Sequence[int], texts: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """Three tokens are the first text, others the second, a word a token."""
    pieces = texts[len(ids) != 3].split(" ")
    pieces = [f"{piece} " for piece in pieces] + [""] * (len(ids) - len(pieces))
    spans, at = [], 0
    for piece in pieces[: len(ids)]:
        spans.append((at, at + len(piece)))
        at += len(piece)
    return "".join(pieces), spans
