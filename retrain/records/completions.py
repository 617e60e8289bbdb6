"""The lines of ``emergence/generations.jsonl`` and ``emergence/evaluations.jsonl``: completions, texts shortened."""

from retrain.records.evaluation import answer_of
from retrain.records.rollouts import conversation_of
from retrain.records.schema.base import Row
from retrain.records.schema.rows import Generation, HeldOutCompletion
from retrain.records.text import without_keys
from retrain.types import EvalRecord, Rollout, StepRecord

PROMPT_CHARACTERS = 200
COMPLETION_CHARACTERS = 500
SHOWN = 1000  # Characters of a held-out completion; of a longer one the beginning and the end
SHOWN_END = 300


def generations(record: StepRecord) -> list[Row]:
    return [
        Generation(
            **_common(record.step, rollout),
            completion=rollout.text[:COMPLETION_CHARACTERS],
            group=index,
            sample=sample,
            advantage=rollout.advantage,
        ).to_row()
        for index, group in enumerate(record.groups)
        for sample, rollout in enumerate(group.rollouts)
    ]


def held_out_completions(record: EvalRecord, strict: bool = True) -> list[Row]:
    """``strict`` decides what counts as an answer (``answer_of``)."""
    return [
        HeldOutCompletion(
            **_common(record.step, rollout),
            completion=shortened(rollout.text),
            name=record.name,
            sample=sample,
            tags=list(rollout.prompt.problem.tags),
            answer=answer_of(rollout, strict),
        ).to_row()
        for group in record.groups
        for sample, rollout in enumerate(group.rollouts)
    ]


def shortened(text: str) -> str:
    """Return the text without its middle where it is long: an answer stands at the end."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN - SHOWN_END]} […] {text[-SHOWN_END:]}"


def _common(step: int, rollout: Rollout) -> Row:
    reward, messages = rollout.reward, conversation_of(rollout.prompt)
    return {
        "step": step,
        "prompt": (messages[-1]["content"] if messages else rollout.prompt.text)[:PROMPT_CHARACTERS],
        "reward": reward.total_reward,
        "num_tokens": len(rollout),
        "stop_reason": rollout.stop_reason,
        "correct": reward.is_correct,
        "problem_id": rollout.prompt.problem.id,
        "error": without_keys(reward.error) if reward.error else "",
        "reference": rollout.prompt.problem.answer[:PROMPT_CHARACTERS],
    }
