"""[critic]: what PPO compares with, a value for every token of a completion."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from retrain.config.base import (
    Finding,
    Natural,
    NotNegative,
    OptionalCount,
    OptionalPositive,
    Positive,
    PositiveShare,
    Role,
    Section,
    Share,
    UsedWhen,
)
from retrain.config.modes import used_by

_CRITIC = UsedWhen("algorithm.advantage_mode", used_by("advantage_mode", "critic"))


class Critic(Section):
    """The critic of `advantage_mode = "gae"`: a value head on the frozen base, with an adapter of its own."""

    role: ClassVar[Role] = Role.LEARNS

    share_adapter: Annotated[bool, _CRITIC] = False
    """Read the values off the policy's adapter, which then learns both, in one pass: faster, and the value loss changes
    the policy."""
    lora_rank: Annotated[OptionalCount, _CRITIC] = None
    """Rank of the critic's own adapter, with the policy's alpha; unset is the policy's rank."""
    lr: Annotated[Annotated[float, Field(gt=0, le=1)] | None, _CRITIC] = None
    """Learning rate of the critic, with the schedule of [optimizer]; unset is `[training] lr`."""
    gamma: Annotated[PositiveShare, _CRITIC] = 1.0
    """Discount per token, of rewards that come later."""
    lam: Annotated[Share, _CRITIC] = 0.95
    """λ of generalised advantage estimation: 1 takes what was returned, 0 what the critic expects of the next token."""
    lam_policy: Annotated[Share | None, _CRITIC] = None
    """λ of the advantages that the policy trains with; unset is `lam`."""
    lam_length: Annotated[OptionalPositive, _CRITIC] = None
    """In place of `lam_policy`: λ = 1 − 1/(lam_length · tokens of the rollout), at least 0 (VAPO, which takes 0.05 and
    `lam_value = 1.0`)."""
    lam_value: Annotated[Share | None, _CRITIC] = None
    """λ of what the critic trains towards; unset is `lam`. 1 is the return itself."""
    whiten: Annotated[bool, _CRITIC] = True
    """Subtract the mean of a batch's advantages and divide by their standard deviation."""
    vf_coef: Annotated[Positive, _CRITIC] = 0.1
    """Weight of the value loss. With an adapter of its own, Adam undoes it but for clipped gradients."""
    cliprange_value: Annotated[NotNegative, _CRITIC] = 0.2
    """A value's loss is at least that of the value moved by this much at most; acts from the second update of a batch
    on. 0 switches it off."""
    warmup_steps: Annotated[Natural, _CRITIC] = 0
    """First steps in which the critic trains alone."""

    @property
    def policy_lambda(self) -> float:
        return self.lam if self.lam_policy is None else self.lam_policy

    @property
    def value_lambda(self) -> float:
        return self.lam if self.lam_value is None else self.lam_value

    def findings(self) -> Iterator[Finding]:
        """A shared adapter has the policy's rank; λ is said once."""
        if self.lam_length is not None and self.lam_policy is not None:
            keys = ("critic.lam_length", "critic.lam_policy")
            yield Finding(
                keys, f"is {self.lam_length:g} beside lam_policy = {self.lam_policy:g}", "keep one of the two"
            )
        if self.share_adapter and self.lora_rank is not None:
            keys = ("critic.lora_rank", "critic.share_adapter")
            yield Finding(keys, "has no effect with share_adapter = true", "remove the line")
