"""Trains an adapter on given completions by maximum likelihood, with the update of the policy.

The loss of a step is the mean negative log-likelihood over all completion tokens of its batch, whatever the
micro-batches: every micro-batch divides its sum by the tokens of the whole batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from retrain.config import Config
from retrain.maths.ratios import Sums
from retrain.policy.adapter_io import read_adapter
from retrain.policy.local import OPTIMIZER, LocalSnapshot, optimizer_tensors
from retrain.policy.lora import Adapter, OptimizerStep, load_moments, new_optimizer
from retrain.policy.objective import Objective, SupervisedTerm
from retrain.policy.update import PendingUpdate, UpdateContext
from retrain.types import Denominators, Sample, StepBatch


def supervised_sample(token_ids: Sequence[int], loss_mask: Sequence[bool]) -> Sample:
    """Return tokens to train on where ``loss_mask`` is true. The first token is never trained, because no token
    predicts it; tokens after the last trained one are left out. Raises ValueError if nothing remains to train."""
    mask = np.array(loss_mask, dtype=bool)
    mask[:1] = False
    if not mask.any():
        raise ValueError("no token of the example is trained")
    length = int(np.flatnonzero(mask)[-1]) + 1
    mask, nothing = mask[:length], np.zeros(length)
    return Sample(
        token_ids=np.array(token_ids[:length], dtype=np.int64),
        action_mask=mask,
        logprobs=nothing,
        versions=np.full(length, -1),
        advantages=nothing,
        loss_mask=mask,
    )


class SupervisedTrainer:
    """Trains ``adapter``. ``stream`` names the random stream of its dropout masks."""

    def __init__(self, context: UpdateContext, adapter: Adapter, config: Config, stream: tuple[int | str, ...]):
        self.context, self.adapter, self.stream = context, adapter, stream
        self.optimizer, self.clip_norm = new_optimizer([adapter.flat], 0.0, config), config.optimizer.grad_clip_norm

    def update(self, samples: Sequence[Sample], step: int, lr: float) -> dict[str, float]:
        """Take one optimizer step and return its ``sft/…`` metrics. Raises NonFinite, with the weights unchanged, if
        the loss or the gradient is not finite."""
        update = self._pending(self.context, samples, SupervisedTerm(), step, lr)
        result = update.accumulate(self.adapter, update.objective, samples)
        update.steps.append(OptimizerStep(self.optimizer, [self.adapter.flat], lr, result.loss))
        metrics = update.apply(self.clip_norm).metrics
        return _likelihood(result.sums) | {"sft/lr": lr, "sft/grad_norm": metrics["optim/grad_norm"]}

    def measure(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return loss and token accuracy on ``samples``, without dropout and without training on them. Gradients are
        set to zero."""
        context = replace(self.context, dropout=0.0)
        update = self._pending(context, samples, SupervisedTerm(trains=False), 0, 0.0)
        return _likelihood(update.accumulate(self.adapter, update.objective, samples).sums)

    def _pending(
        self, context: UpdateContext, samples: Sequence[Sample], term: SupervisedTerm, step: int, lr: float
    ) -> PendingUpdate:
        tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
        batch = StepBatch(samples, Denominators(tokens, len(samples)), step, self.stream)
        return PendingUpdate(context, self.adapter, self.optimizer, batch, Objective((term,)), lr)

    def snapshot(self, peft_config: Mapping[str, object]) -> LocalSnapshot:
        return LocalSnapshot(self.adapter.frozen("cpu"), lambda: peft_config, optimizer_tensors(self.optimizer))

    def load(self, directory: Path) -> None:
        """Continue from a directory that a ``snapshot`` was written to."""
        from safetensors.torch import load_file

        self.adapter.load(read_adapter(directory).tensors)
        load_moments(self.optimizer, {f"0.{name}": tensor for name, tensor in load_file(directory / OPTIMIZER).items()})


def _likelihood(sums: Sums) -> dict[str, float]:
    tokens = float(sums["tokens"])
    return {
        "sft/loss": float(sums["loss"]) / tokens,
        "sft/token_accuracy": float(sums["likeliest"]) / tokens,
        "sft/completion_tokens": int(tokens),
    }
