"""[training], [optimizer]: how long, how much, how fast."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from retrain.config.algorithm import CLIPPED
from retrain.config.base import (
    Count,
    Decay,
    Finding,
    Natural,
    NotNegative,
    OptionalCount,
    OptionalPositive,
    Positive,
    PositiveShare,
    Role,
    Section,
    Seed,
    minus_one,
    zero_is_none,
)

MOST_KEPT = 1024
"""Candidates of a truncated draw at most: the kept ones of every token are recorded for the update."""
TopK = Annotated[Annotated[int, Field(ge=0, le=MOST_KEPT)], minus_one(0)]


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled, as the keys of these names say."""

    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def requested(self) -> Sampling:
        """As engines are asked: nothing is cut at temperature 0, and the bound on the kept set is explicit."""
        if self.temperature == 0:
            return Sampling(self.max_tokens, self.temperature)
        cut = self.top_p < 1 or self.min_p > 0
        return replace(self, top_k=self.top_k or (MOST_KEPT if cut else 0))


class Training(Section):
    """The loop: what one optimizer step is made of, and how many there are."""

    role: ClassVar[Role] = Role.LEARNS

    seed: Annotated[Seed, minus_one(0), Role.LEARNS | Role.NAMES] = 0
    """Seed of a single run; in a campaign `[campaign] seeds` takes its place. -1 ("no seed") is read as 0."""
    max_steps: Count = 100
    """Optimizer steps of a run."""
    batch_size: Count = 8
    """Prompts per step."""
    group_size: Count = 8
    """Completions sampled for each prompt."""
    max_tokens: Count = 256
    """Longest completion, in tokens."""
    temperature: Positive = 1.0
    """Sampling temperature while training; logprobs and ratios are those of the distribution sampled from."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling while training: from the most probable tokens that hold this share, after `min_p` and `top_k`.
    The tokens kept are recorded, and the update's ratios, KL and entropies are over the same ones. 1 is off."""
    top_k: TopK = 0
    """Sample from so many most probable tokens; 0 and -1 are off, and stand for 1024 beside `top_p` or `min_p`."""
    min_p: Decay = 0.0
    """Sample from the tokens at least this share as probable as the most probable one; 0 is off."""
    num_iterations: Count = 1
    """Passes over each batch (PPO's epochs). From the second update of a batch on the importance ratio differs from 1,
    and clipping acts; it is then taken against the trainer's own log-probabilities before the first of them."""
    minibatches: Count = 1
    """Updates (optimizer steps) in a pass: the batch is split into so many parts, in each pass another way, and each
    update divides its loss by what its own part counts."""
    minibatch_by: Literal["group", "sequence"] = "group"
    """Whether the rollouts of a prompt stay in one minibatch."""
    target_kl: OptionalPositive = None
    """No further pass over a batch once `policy/approxkl_avg`, over the updates of a pass, exceeds this; unset or 0
    makes all of them."""
    dynamic_sampling: Natural = 0
    """How often, at most, a step draws further prompts in place of those whose answers all have the same reward (DAPO,
    whose code draws 10 times altogether: 9 here). What is still missing then is filled up with such groups. 0 trains on
    whatever was drawn first."""
    max_off_policy_steps: Natural = 0
    """How many steps rollouts may be behind the policy that trains on them: those of step t are drawn by the weights as
    they are before step max(0, t − so many). 0 trains on rollouts of the very weights that it changes. With a server
    that samples on processors of its own, sampling for later steps then goes on during updates."""
    lr: Annotated[float, Field(gt=0, le=1)] = 1e-4
    """Learning rate. A LoRA adapter wants about ten times that of full fine-tuning."""
    weight_decay: NotNegative = 0.0
    """AdamW weight decay, on the adapter."""
    max_examples: Annotated[OptionalCount, Role.LEARNS | Role.SAMPLES] = None
    """Use at most this many training problems; unset or 0 is all of them."""
    save_every: Annotated[Natural, Role.RECORDS] = 20
    """Steps between checkpoints; 0 saves only the final state."""
    keep_last: Annotated[Natural, Role.RECORDS] = 2
    """How many checkpoints stay on disk; 0 keeps all. The final one always stays."""
    keep_every: Annotated[Natural, Role.RECORDS] = 0
    """Checkpoints at multiples of so many steps stay as well; 0 keeps none for that."""
    eval_every: Annotated[Natural, Role.EVALUATES | Role.RECORDS] = 0
    """Steps between held-out evaluations; 0 evaluates only before the first and after the last update."""
    clip_eps: Annotated[Decay, *CLIPPED] = 0.2
    """The importance ratio is clipped at 1 − clip_eps below, and above unless `clip_eps_high` is set. 0 switches
    clipping off."""
    clip_eps_high: Annotated[
        Annotated[float, Field(gt=0, le=100)] | None,
        BeforeValidator(zero_is_none, json_schema_input_type=NotNegative | None),
        *CLIPPED,
    ] = None
    """Upper clip at 1 + clip_eps_high; unset or 0 follows `clip_eps`."""
    micro_batch_tokens: Annotated[Literal["auto"] | Count, Role.SPEED] = "auto"
    """Tokens in one forward and backward pass, `auto` by the model and the device; halved when memory runs out.
    Changes memory and speed, and of the update nothing but its rounding."""
    update_dtype: Literal["model", "bfloat16"] = "model"
    """What the update's matrix products are made of: `model`, the number format of the base, or `bfloat16` over a base
    in float32, faster on a CPU with units for it (AMX), while sampling, adapter, sums, norms, attention and the loss
    stay in float32. The trainer's log-probabilities then differ by some thousandths from those sampled with, and the
    importance ratio with them; on a processor without such units it is slower. Not for other bases."""
    nonfinite_limit: Annotated[Count, Role.SPEED] = 3
    """An update whose loss or gradient is NaN or infinite is left out and recorded; after so many steps in a row with
    one the run fails, saved as it was before. 1 fails at the first."""
    deterministic: Annotated[bool, Role.LEARNS | Role.SAMPLES] = False
    """Ask torch for deterministic kernels only: bitwise repeatable on a GPU, and slower."""

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.max_tokens, self.temperature, self.top_p, self.top_k, self.min_p)

    @property
    def updates(self) -> int:
        return self.num_iterations * self.minibatches

    @property
    def several_updates(self) -> bool:
        return self.updates > 1

    @property
    def clip_range(self) -> tuple[float, float]:
        """(low, high) distances from ratio 1 at which to clip. (1, inf), where no ratio is, when clipping is off."""
        if self.clip_eps == 0:
            return 1.0, math.inf
        return self.clip_eps, self.clip_eps if self.clip_eps_high is None else self.clip_eps_high

    def findings(self) -> Iterator[Finding]:
        """Sampling that can teach, minibatches that have something, an upper clip that needs the lower one, and
        checkpoints that can be kept."""
        yield from self._update_findings()
        if self.top_k == 1:
            yield Finding(
                ("training.top_k",),
                "is 1: all completions of a prompt would be the same, and a group of equals teaches nothing",
                "top_k = 20, or top_k = 0 for all tokens",
            )
        if self.temperature > 2:
            yield Finding(
                ("training.temperature",),
                f"is {self.temperature:g}: above 2 completions are close to noise",
                "temperature = 1.0",
                warning=True,
            )
        if self.clip_eps == 0 and self.clip_eps_high is not None:
            yield Finding(
                ("training.clip_eps_high", "training.clip_eps"),
                f"is {self.clip_eps_high:g} while clip_eps = 0 switches clipping off",
                "clip_eps = 0.2",
            )
        every, save = self.keep_every, self.save_every
        if every and not self.keep_last:
            what = "has no effect with keep_last = 0, which keeps all"
            yield Finding(("training.keep_every", "training.keep_last"), what, "remove the line")
        elif every and (not save or every % save):
            kept = "no such step is saved" if not save else "not all are saved"
            fix = (
                f"keep_every = {max(1, round(every / save)) * save}" if save else "remove the line, or save_every = 20"
            )
            what = f"is {every}: with save_every = {save} {kept}"
            yield Finding(("training.keep_every", "training.save_every"), what, fix)

    def _update_findings(self) -> Iterator[Finding]:
        whole = self.minibatch_by == "group"
        units = self.batch_size if whole else self.batch_size * self.group_size
        if self.minibatches > units:
            what = f"batch_size = {self.batch_size}" if whole else f"{units} completions of a step"
            yield Finding(
                ("training.minibatches", "training.batch_size"),
                f"is {self.minibatches}, more than the {what} that would be split",
                f"minibatches = {units}",
            )
        if not whole and self.minibatches == 1:
            keys = ("training.minibatch_by", "training.minibatches")
            yield Finding(keys, "has no effect with one minibatch", "minibatches = 4")
        elif not whole and self.group_size == 1:
            keys = ("training.minibatch_by", "training.group_size")
            yield Finding(keys, "has no effect with groups of one", "remove the line")
        if self.target_kl is not None and self.num_iterations == 1:
            keys = ("training.target_kl", "training.num_iterations")
            yield Finding(keys, "has no effect with one pass over a batch", "num_iterations = 4")


class Optimizer(Section):
    """AdamW and its learning-rate schedule."""

    role: ClassVar[Role] = Role.LEARNS

    beta1: Decay = 0.9
    """Decay of the running mean of gradients."""
    beta2: Decay = 0.999
    """Decay of the running mean of squared gradients."""
    eps: Positive = 1e-8
    """Added to the denominator."""
    grad_clip_norm: NotNegative = 1.0
    """Largest global gradient norm of an update; 0 switches clipping off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or falling to 0 at the last step."""
    warmup_steps: Natural = 0
    """Steps over which the learning rate rises to `lr`."""
