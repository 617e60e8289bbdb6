"""What a teacher is shown that its student is not: the reference answer, or another answer that was right.

A teacher that sees the solution needs no other weights than the student's (OPSD, arXiv 2601.18734; SDPO, 2601.20802):
in its context, the tokens that lead there are more probable. The words stand at the end of the prompt's last message,
in the same chat template; the answer that follows is the student's, token for token.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from retrain.config.distillation import Distillation
from retrain.data.prompts import Renderer
from retrain.types import Group, Rollout, Sample


class Context:
    """The prompts of a teacher, which have no more than ``longest`` tokens together with the answer that follows."""

    def __init__(self, renderer: Renderer, own: Distillation, longest: int):
        self.renderer, self.kind, self.words, self.longest = renderer, own.context, own.shown_words, longest

    def prompts(self, group: Group) -> list[tuple[int, ...] | None]:
        """For each rollout the tokens of the prompt that its teacher reads; None where there is nothing to show, or no
        room for it."""
        return [self._prompt(group, rollout) for rollout in group.rollouts]

    def _prompt(self, group: Group, rollout: Rollout) -> tuple[int, ...] | None:
        shown = self._shown(group, rollout)
        if not shown or not len(rollout) or rollout.sequences != 1:
            return None
        *before, last = group.prompt.messages
        words = self.words.replace("{context}", shown)
        told = {**last, "content": f"{last['content']}\n\n{words}"}
        ids = self.renderer.prompt(group.prompt.problem, [*before, told]).token_ids
        return ids if len(ids) + len(rollout) <= self.longest else None

    def _shown(self, group: Group, rollout: Rollout) -> str:
        """The reference answer, or the first right answer of the group that is not the rollout's own."""
        if self.kind == "answer":
            return group.prompt.problem.answer
        return next((one.text for one in group.rollouts if one is not rollout and one.reward.is_correct), "")


def read_after(sample: Sample, prompt_ids: Sequence[int]) -> Sample:
    """The sample with another prompt: the same sampled tokens, and what stands between them, after ``prompt_ids``."""
    read = sample.prefix

    def moved(values: np.ndarray, fill: float) -> np.ndarray:
        return np.concatenate([np.full(len(prompt_ids), fill, values.dtype), values[read:]])

    return replace(
        sample,
        token_ids=np.concatenate([np.asarray(prompt_ids, dtype=np.int64), sample.token_ids[read:]]),
        action_mask=moved(sample.action_mask, False),
        logprobs=moved(sample.logprobs, 0.0),
        versions=moved(sample.versions, -1),
        advantages=moved(sample.advantages, 0.0),
        loss_mask=moved(sample.loss_mask, False),
        old_logprobs=None,
        values=None,
        value_targets=None,
        policy_weights=None,
        teacher_prompt=None,
    )


def view_of(sample: Sample) -> Sample:
    """The sample as its teacher reads it; as it is where nobody teaches it, or its prompt is the same."""
    return read_after(sample, sample.teacher_prompt) if sample.teacher_prompt else sample
