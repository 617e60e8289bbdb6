"""A critic over the frozen base: a value head, and an adapter unless the critic shares the policy's.

The value before an action token is a linear function of the hidden state that predicts it, in fp32, and initially 0.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from retrain.config import Config
from retrain.errors import CheckpointError
from retrain.policy.base import BaseModel
from retrain.policy.head import ValueHead
from retrain.policy.lora import Adapter, Lanes, OptimizerStep, load_moments, new_optimizer
from retrain.policy.objective import ValueTerm
from retrain.policy.update import PROBE_SIZE, UNTRAINED, AccumulationResult, PendingUpdate, without_advantages
from retrain.types import UpdateResult

WEIGHTS, MOMENTS = "critic.safetensors", "critic_optimizer.safetensors"


class Critic:
    """The critic of one run: a value head, an adapter (None if it shares the policy's), and an optimizer over both.
    ``scale`` is its learning rate as a multiple of the policy's."""

    def __init__(self, base: BaseModel, lanes: Lanes, config: Config, stream: tuple[int | str, ...]):
        critic, training = config.critic, config.training
        width = base.model.config.get_text_config().hidden_size
        self.head = ValueHead(width, base.device)
        self.adapter: Adapter | None = None
        if not critic.share_adapter:
            rank = critic.lora_rank or config.model.lora_rank
            self.adapter = lanes.new_adapter(rank, config.lora.alpha).initialise(*stream, "critic")
        self.lr = critic.lr or training.lr
        # A ratio, so that the schedule of the policy's learning rate applies to both.
        self.scale = self.lr / training.lr
        self.warmup_steps = critic.warmup_steps
        self.optimizer = new_optimizer(self.weights, self.lr, config)

    @property
    def weights(self) -> list[nn.Parameter]:
        return [self.head.flat, *([] if self.adapter is None else [self.adapter.flat])]

    @property
    def _named(self) -> dict[str, nn.Parameter]:
        return dict(zip(("head", "adapter"), self.weights, strict=False))

    def tensors(self) -> dict[str, Tensor]:
        return {name: flat.detach().to("cpu", copy=True) for name, flat in self._named.items()}

    def load(self, directory: Path) -> None:
        """Restore a checkpoint. Raises CheckpointError if the directory holds no critic of this shape."""
        from safetensors.torch import load_file

        if not (directory / WEIGHTS).is_file():
            run = directory.parent.parent if directory.parent.name == "checkpoints" else directory
            raise CheckpointError(
                f'{directory} holds no critic: it is of a run without advantage_mode = "gae"; to begin with its '
                f'weights and a new critic, type: [resume] from = "{run / "final"}"'
            )
        stored = load_file(directory / WEIGHTS)
        shapes = {name: flat.shape for name, flat in self._named.items()}
        if {name: tensor.shape for name, tensor in stored.items()} != shapes:
            raise CheckpointError(f"{directory / WEIGHTS} does not fit this run: [critic] is another one")
        for name, flat in self._named.items():
            with torch.no_grad():
                flat.copy_(stored[name])
        load_moments(self.optimizer, load_file(directory / MOMENTS))


def critic_step(update: PendingUpdate, critic: Critic, grad_clip_norm: float = 1.0) -> UpdateResult:
    """Take one optimizer step of the critic and, after the critic's warm-up, one of the policy, on the same samples.
    Raises NonFinite if a loss or gradient is not finite, and RunFailed if one sample does not fit in memory; all
    weights are then unchanged."""
    samples = update.batch.samples
    if update.batch.step < critic.warmup_steps:
        update.compare_with_sampler([without_advantages(sample) for sample in samples[:PROBE_SIZE]])
        _accumulate_critic(update, critic)
    elif critic.adapter is None and samples:
        result = update.accumulate(update.adapter, update.objective, samples, critic.head)  # both in one pass
        if not any(sample.loss_mask.any() for sample in samples):
            update.metrics |= UNTRAINED
        update.add_policy(result)
        _add_critic(update, critic, result)
    else:
        update.accumulate_policy()
        _accumulate_critic(update, critic)
    update.metrics.pop("objective/kl", None)  # the credit step measures it over all completions
    return update.apply(grad_clip_norm)


def _accumulate_critic(update: PendingUpdate, critic: Critic) -> None:
    samples, objective = update.batch.samples, update.objective.only(ValueTerm)
    if samples:
        adapter, frozen = critic.adapter or update.adapter, critic.adapter is None
        _add_critic(update, critic, update.accumulate(adapter, objective, samples, critic.head, frozen))


def _add_critic(update: PendingUpdate, critic: Critic, result: AccumulationResult) -> None:
    tokens = float(result.sums["value_tokens"])
    update.metrics |= {
        "loss/value_avg": float(result.sums["value_loss"]) / tokens,
        "val/clipfrac_avg": float(result.sums["value_clipped"]) / tokens,
    }
    update.steps.append(
        OptimizerStep(critic.optimizer, critic.weights, update.lr * critic.scale, result.loss, "critic_")
    )
