"""A critic over the frozen base: a value head, and an adapter unless it reads the policy's.

The value before an action token is a linear function of the hidden state that predicts it, in fp32, and initially 0.
"""

from pathlib import Path

import torch
from torch import nn

from retrain.config import Config
from retrain.errors import CheckpointError
from retrain.policy.base import BaseModel
from retrain.policy.lora import Adapter, Lanes
from retrain.policy.optimizer import Step, load_moments, new_optimizer

WEIGHTS, MOMENTS = "critic.safetensors", "critic_optimizer.safetensors"


class ValueHead:
    """V = w·h + b, with weights [H + 1] in one buffer."""

    def __init__(self, width: int, device: torch.device):
        self.flat = nn.Parameter(torch.zeros(width + 1, device=device))
        self.flat.grad = torch.zeros_like(self.flat)

    def __call__(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """Return the values [M] of hidden states [M, H], fp32 (fp64 for fp64 states)."""
        real = torch.float64 if hidden_MH.dtype == torch.float64 else torch.float32
        weights = self.flat.to(real)
        return hidden_MH.to(real) @ weights[:-1] + weights[-1]


class Critic:
    """The critic of one run: a head, an adapter (None where it reads the policy's), and an optimizer over both.
    ``scale`` is its learning rate as a multiple of the policy's."""

    def __init__(self, base: BaseModel, lanes: Lanes, config: Config, stream: tuple[int | str, ...]):
        critic, training, optimizer = config.critic, config.training, config.optimizer
        width = base.model.config.get_text_config().hidden_size
        self.head = ValueHead(width, base.device)
        self.adapter: Adapter | None = None
        if not critic.share_adapter:
            rank = critic.lora_rank or config.model.lora_rank
            self.adapter = lanes.new_adapter(rank, config.lora.alpha).initialise(*stream, "critic")
        self.lr = critic.lr or training.lr
        self.scale = self.lr / training.lr
        self.warmup_steps = critic.warmup_steps
        betas = (optimizer.beta1, optimizer.beta2)
        self.optimizer = new_optimizer(self.weights, self.lr, betas, optimizer.eps, training.weight_decay)

    @property
    def weights(self) -> list[nn.Parameter]:
        return [self.head.flat, *([] if self.adapter is None else [self.adapter.flat])]

    def step(self, lr: float, loss: float) -> Step:
        """Return the pending step at the policy's learning rate ``lr``."""
        return Step(self.optimizer, self.weights, lr * self.scale, loss, "critic_")

    @property
    def _named(self) -> dict[str, nn.Parameter]:
        return dict(zip(("head", "adapter"), self.weights, strict=False))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copy the weights to the host."""
        return {name: flat.detach().to("cpu", copy=True) for name, flat in self._named.items()}

    def load(self, directory: Path) -> None:
        """Restore a checkpoint. Raises CheckpointError where it holds no critic of this shape."""
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
