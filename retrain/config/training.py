"""[training], [optimizer], [model], [lora], [critic]: loop, optimizer, base model, adapter and value head."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from retrain.config.algorithm import CLIPPED
from retrain.config.base import (
    ActiveIf,
    ConfigIssue,
    Count,
    Decay,
    MinusOneIsZero,
    Natural,
    NotNegative,
    OptionalCount,
    OptionalPositive,
    OptionalText,
    Positive,
    PositiveShare,
    Role,
    Section,
    Seed,
    Share,
    Text,
    ZeroIsNone,
)
from retrain.config.describe import no_effect
from retrain.config.modes import used_by

MOST_KEPT = 1024
"""Most tokens that truncated sampling keeps at a position; the kept ones are recorded for the update."""
TopK = Annotated[Annotated[int, Field(ge=0, le=MOST_KEPT)], MinusOneIsZero]


@dataclass(frozen=True)
class Sampling:
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def requested(self) -> Sampling:
        """Parameters that engines get. Greedy sampling is not truncated. If top_p or min_p is set and top_k is not,
        top_k is MOST_KEPT."""
        if self.temperature == 0:
            return Sampling(self.max_tokens, self.temperature)
        cut = self.top_p < 1 or self.min_p > 0
        return replace(self, top_k=self.top_k or (MOST_KEPT if cut else 0))


class Training(Section, role=Role.LEARNS):
    """Training loop: size and number of the optimizer steps."""

    seed: Annotated[Seed, MinusOneIsZero, Role.LEARNS | Role.NAMES] = 0
    """Seed of a single run; `[campaign] seeds` replaces it in a campaign. -1 ("no seed") is read as 0."""
    max_steps: Natural = 100
    """Optimizer steps of a run; 0, with a [warmup] only, evaluates what the warm-up has trained."""
    batch_size: Count = 8
    """Prompts per step."""
    group_size: Count = 8
    """Completions sampled for each prompt."""
    max_tokens: Count = 256
    """Longest completion, in tokens."""
    temperature: Positive = 1.0
    """Sampling temperature while training; log-probabilities and ratios refer to the distribution sampled from."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling while training: keep the most probable tokens that hold this share, after `min_p` and `top_k`.
    The kept tokens are recorded; ratios, KL and entropies of the update are over the same tokens. 1 is off."""
    top_k: TopK = 0
    """Sample from this many most probable tokens; 0 and -1 are off, and mean 1024 with `top_p` or `min_p`."""
    min_p: Decay = 0.0
    """Sample from tokens that have at least this share of the largest probability; 0 is off."""
    replay_truncation: bool = True
    """Compute log-probabilities in updates over the tokens that `top_p`, `top_k` and `min_p` kept, as sampling did.
    `false` computes them over the full vocabulary, like trainers that do not know which tokens were kept."""
    num_iterations: Count = 1
    """Epochs: passes over each batch. From the second update of a batch on, the importance ratio differs from 1 and is
    clipped; it is then relative to the trainer's log-probabilities before the first update."""
    minibatches: Count = 1
    """Updates (optimizer steps) per pass. Each pass splits the batch in another way, and each update divides its loss
    by the count of its own part."""
    minibatch_by: Literal["group", "sequence"] = "group"
    """Unit that is not split: `group` keeps the rollouts of a prompt in one minibatch, `sequence` does not."""
    target_kl: OptionalPositive = None
    """Stop further passes over a batch once `policy/approxkl_avg`, averaged over the updates of a pass, exceeds this;
    unset or 0 makes all passes."""
    dynamic_sampling: Natural = 0
    """Dynamic sampling (DAPO): most rounds in which a step samples more prompts, to replace groups whose rewards are
    all equal (DAPO's code samples 10 times in total: 9 here). Groups that are still missing are filled with such
    groups. 0 trains on the first groups."""
    max_off_policy_steps: Natural = 0
    """Largest staleness: rollouts of step t are sampled with the weights before step max(0, t − this). 0 trains on
    rollouts of the current weights. With a server on other processors, sampling for later steps continues during
    updates."""
    lr: Annotated[float, Field(gt=0, le=1)] = 1e-4
    """Learning rate. A LoRA adapter needs about ten times that of full fine-tuning."""
    weight_decay: NotNegative = 0.0
    """AdamW weight decay of the adapter."""
    max_examples: Annotated[OptionalCount, Role.LEARNS | Role.SAMPLES] = None
    """Use at most this many training problems; unset or 0 is all of them."""
    save_every: Annotated[Natural, Role.RECORDS] = 20
    """Steps between checkpoints; 0 saves only the final state."""
    keep_last: Annotated[Natural, Role.RECORDS] = 2
    """Number of checkpoints kept on disk; 0 keeps all. The final one is always kept."""
    keep_every: Annotated[Natural, Role.RECORDS] = 0
    """Also keep checkpoints at multiples of this many steps; 0 keeps none for that reason."""
    eval_every: Annotated[Natural, Role.EVALUATES | Role.RECORDS] = 0
    """Steps between held-out evaluations; 0 evaluates only before the first and after the last update."""
    clip_eps: Annotated[Decay, *CLIPPED] = 0.2
    """The importance ratio is clipped at 1 − clip_eps below, and above unless `clip_eps_high` is set. 0 switches
    clipping off."""
    clip_eps_high: Annotated[Annotated[float, Field(gt=0, le=100)] | None, ZeroIsNone, *CLIPPED] = None
    """Upper clip at 1 + clip_eps_high; unset or 0 follows `clip_eps`."""
    micro_batch_tokens: Annotated[Literal["auto"] | Count, Role.SPEED] = "auto"
    """Tokens in one forward and backward pass; `auto` chooses by model and device, and halves when memory runs out.
    Affects memory and speed; the update changes by rounding only."""
    update_dtype: Literal["model", "bfloat16"] = "model"
    """Number format of the update's matrix products: `model` is that of the base; `bfloat16` over a base in float32 is
    faster on a CPU with AMX. Sampling, adapter, sums, norms, attention and the loss stay in float32. The trainer's
    log-probabilities, and the importance ratio, then differ by some thousandths from the sampler's. Without AMX it is
    slower. Only for bases in float32."""
    nonfinite_limit: Annotated[Count, Role.SPEED] = 3
    """Consecutive steps with a NaN or infinite loss or gradient after which the run fails, saved in its state before
    these steps. Their updates are skipped and recorded. 1 fails at the first such step."""
    deterministic: Annotated[bool, Role.LEARNS | Role.SAMPLES] = False
    """Use deterministic kernels of torch only: bitwise repeatable on a GPU, and slower."""

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
        """(low, high) distances from ratio 1 at which to clip; (1, inf) when clipping is off."""
        if self.clip_eps == 0:
            return 1.0, math.inf
        return self.clip_eps, self.clip_eps if self.clip_eps_high is None else self.clip_eps_high

    def issues(self) -> Iterator[ConfigIssue]:
        yield from self._update_issues()
        if self.top_k == 1:
            message = "is 1: all completions of a prompt would be the same, and a group of equals teaches nothing"
            yield ConfigIssue(("training.top_k",), message, "top_k = 20, or top_k = 0 for all tokens")
        if self.temperature > 2:
            message = f"is {self.temperature:g}: above 2 completions are close to noise"
            yield ConfigIssue(("training.temperature",), message, "temperature = 1.0", warning=True)
        if not self.replay_truncation and (self.top_p, self.top_k, self.min_p) == (1.0, 0, 0.0):
            fix = "remove the line, or top_p = 0.9"
            yield no_effect("training.replay_truncation", "training.top_p", self.top_p, fix)
        if self.clip_eps == 0 and self.clip_eps_high is not None:
            message = f"is {self.clip_eps_high:g} while clip_eps = 0 switches clipping off"
            yield ConfigIssue(("training.clip_eps_high", "training.clip_eps"), message, "clip_eps = 0.2")
        every, save = self.keep_every, self.save_every
        if every and not self.keep_last:
            message = "has no effect with keep_last = 0, which keeps all"
            yield ConfigIssue(("training.keep_every", "training.keep_last"), message)
        elif every and (not save or every % save):
            message = f"is {every}: with save_every = {save} "
            message += "not all are saved" if save else "no such step is saved"
            fix = "remove the line, or save_every = 20"
            fix = f"keep_every = {max(1, round(every / save)) * save}" if save else fix
            yield ConfigIssue(("training.keep_every", "training.save_every"), message, fix)

    def _update_issues(self) -> Iterator[ConfigIssue]:
        by_group = self.minibatch_by == "group"
        units = self.batch_size if by_group else self.batch_size * self.group_size
        if self.minibatches > units:
            described = f"batch_size = {self.batch_size}" if by_group else f"{units} completions of a step"
            message = f"is {self.minibatches}, more than the {described} that would be split"
            yield ConfigIssue(("training.minibatches", "training.batch_size"), message, f"minibatches = {units}")
        if not by_group and self.minibatches == 1:
            message = "has no effect with one minibatch"
            yield ConfigIssue(("training.minibatch_by", "training.minibatches"), message, "minibatches = 4")
        elif not by_group and self.group_size == 1:
            yield ConfigIssue(("training.minibatch_by", "training.group_size"), "has no effect with groups of one")
        if self.target_kl is not None and self.num_iterations == 1:
            message = "has no effect with one pass over a batch"
            yield ConfigIssue(("training.target_kl", "training.num_iterations"), message, "num_iterations = 4")


class Optimizer(Section, role=Role.LEARNS):
    """AdamW and its learning-rate schedule."""

    beta1: Decay = 0.9
    """Decay of the running mean of gradients."""
    beta2: Decay = 0.999
    """Decay of the running mean of squared gradients."""
    eps: Positive = 1e-8
    """Term added to the denominator."""
    grad_clip_norm: NotNegative = 1.0
    """Largest global gradient norm of an update; 0 switches clipping off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or falling to 0 at the last step."""
    warmup_steps: Natural = 0
    """Steps over which the learning rate rises to `lr`."""


MAX_ALPHA = 1e18
"""Upper bound of alpha: above it the squared gradients of B overflow in Adam's float32 state."""


class Model(Section, role=Role.SAMPLES):
    """The frozen base model, which all runs of a campaign share, and the rank of the adapter that is trained."""

    model: Text = "tiny-reasoner"
    """Hub name, local directory in `transformers` format, or `tiny-reasoner`, the model that ships with retrain."""
    revision: OptionalText = None
    """Branch, tag or commit of a hub model; unset is the default branch."""
    local_files_only: Annotated[bool, Role.NAMES] = False
    """Use only the local cache of hub models."""
    lora_rank: Annotated[Count, Role.LEARNS] = 32
    """Rank of the LoRA adapter."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """Quantise the linear layers of the frozen base to 8 or 4 bits, for less memory; sampling and update use the same
    weights. `nf4` needs the extra `quantize`. The error is measured when the base is loaded. See
    docs/performance.md."""
    trust_remote_code: bool = False
    """Run Python code that comes with a hub model. Leave it off unless you have read that code."""

    @property
    def quantized(self) -> bool:
        return self.quantize != "none"


class Lora(Section, role=Role.LEARNS):
    """Settings of the adapter besides its rank. The defaults follow "LoRA without regret"."""

    alpha: Annotated[float, Field(ge=0, le=MAX_ALPHA)] = 32.0
    """Scaling: the update is multiplied by alpha/rank. 0 means twice the rank."""
    dropout: Decay = 0.0
    """Dropout on the adapter's input while training; sampling has none."""
    target_modules: Annotated[
        Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)], Role.LEARNS | Role.SAMPLES
    ] = "all-linear"
    """Layers with an adapter: `all-linear` (every linear layer but the output layer), or a list of module names such as
    `["q_proj", "v_proj"]`."""
    anneal: list[Annotated[list[Count], Field(min_length=2, max_length=2)]] = Field(default_factory=list)
    """Stages `[step, rank]` at which the adapter is compressed during training, as in `[[40, 8], [80, 2]]`: rank 8 from
    update 40 on, rank 2 from 80 on. The saved adapter has the last rank."""

    def issues(self) -> Iterator[ConfigIssue]:
        if self.dropout > 0:
            message = f"is {self.dropout:g}: dropout makes the trainer's logprobs differ from the sampler's, so the "
            message += "importance ratio is noisy even on-policy"
            yield ConfigIssue(("lora.dropout",), message, "dropout = 0.0", warning=True)


_CRITIC = ActiveIf("algorithm.advantage_mode", used_by("advantage_mode", "critic"))


class CriticSection(Section, role=Role.LEARNS):
    """Critic of `advantage_mode = "gae"`: a value head on the frozen base, with a separate adapter."""

    share_adapter: Annotated[bool, _CRITIC] = False
    """Compute values with the policy's adapter, which then learns both in one pass: faster, and the value loss changes
    the policy."""
    lora_rank: Annotated[OptionalCount, _CRITIC] = None
    """Rank of the critic's separate adapter, with the policy's alpha; unset is the policy's rank."""
    lr: Annotated[Annotated[float, Field(gt=0, le=1)] | None, _CRITIC] = None
    """Learning rate of the critic, with the schedule of [optimizer]; unset is `[training] lr`."""
    gamma: Annotated[PositiveShare, _CRITIC] = 1.0
    """Discount per token of later rewards."""
    lam: Annotated[Share, _CRITIC] = 0.95
    """λ of generalised advantage estimation: 1 uses the observed return, 0 the critic's value of the next token."""
    lam_policy: Annotated[Share | None, _CRITIC] = None
    """λ of the policy's advantages; unset is `lam`."""
    lam_length: Annotated[OptionalPositive, _CRITIC] = None
    """Replaces `lam_policy`: λ = 1 − 1/(lam_length · tokens of the rollout), at least 0 (VAPO uses 0.05 and `lam_value
    = 1.0`)."""
    lam_value: Annotated[Share | None, _CRITIC] = None
    """λ of the critic's targets; unset is `lam`. 1 is the return itself."""
    whiten: Annotated[bool, _CRITIC] = True
    """Subtract the mean of a batch's advantages and divide by their standard deviation."""
    vf_coef: Annotated[Positive, _CRITIC] = 0.1
    """Weight of the value loss. With a separate adapter, Adam cancels it except when gradients are clipped."""
    cliprange_value: Annotated[NotNegative, _CRITIC] = 0.2
    """Clip range of values: the value is also clipped to this distance from the value before the first update, and the
    larger of the two losses counts. Acts from the second update of a batch on. 0 switches it off."""
    warmup_steps: Annotated[Natural, _CRITIC] = 0
    """First steps in which only the critic trains."""

    @property
    def policy_lambda(self) -> float:
        return self.lam if self.lam_policy is None else self.lam_policy

    @property
    def value_lambda(self) -> float:
        return self.lam if self.lam_value is None else self.lam_value

    def issues(self) -> Iterator[ConfigIssue]:
        if self.lam_length is not None and self.lam_policy is not None:
            message = f"is {self.lam_length:g} beside lam_policy = {self.lam_policy:g}"
            yield ConfigIssue(("critic.lam_length", "critic.lam_policy"), message, "keep one of the two")
        if self.share_adapter and self.lora_rank is not None:
            yield no_effect("critic.lora_rank", "critic.share_adapter", True)
