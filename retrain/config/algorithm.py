"""[algorithm], [gtpo], [hicra], [sepa], [planning], [distillation]: advantages, token credit, the loss, a teacher.

``retrain.algorithms.load_modes`` loads the user's own code, which is named here as `module:function`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, create_model

from retrain.config.base import (
    ActiveIf,
    ConfigIssue,
    Count,
    Decay,
    Natural,
    NotNegative,
    OptionalAboveOne,
    OptionalPositive,
    OptionalText,
    Plugin,
    Positive,
    PositiveShare,
    Role,
    Seconds,
    Section,
    Share,
    UnsupportedValues,
    fault,
)
from retrain.config.legacy import NO_SEMANTIC
from retrain.config.modes import MODES, Loss, Need, loss_of, mode_of, used_by

if TYPE_CHECKING:
    _Advantage = _Transform = _Uncertainty = _Loss = str
else:
    _Advantage, _Transform, _Uncertainty, _Loss = (Literal[tuple(table)] for table in MODES.values())
AdvantageMode = _Advantage | Plugin
_NO_VARIANT = ("this variant is not available", 'transform_mode = "gtpo_sepa"')
_VARIANTS = UnsupportedValues(dict.fromkeys(("gtpo_sepa_amp", "gtpo_sepa_amp_c"), _NO_VARIANT))
TransformMode = Annotated[_Transform | Plugin, _VARIANTS]


def _with_credit(dotted: str, plugins: bool = False, training_only: bool = False) -> ActiveIf:
    modes = used_by("transform_mode", dotted)
    return ActiveIf("algorithm.transform_mode", modes, plugins=plugins, training_only=training_only)


_SEPA = _with_credit("sepa")
_AUTO = ActiveIf("sepa.schedule", ("auto",))


def _unset_or_several(dotted: str, *besides: str) -> ActiveIf:
    """Return the marker of a key that a correction disables, unless a batch has several updates."""
    several = "several updates of a batch"
    return ActiveIf(dotted, (None, *besides), unless="training.several_updates", unless_text=several)


_UNCORRECTED = (
    _unset_or_several("algorithm.tis_cap"),
    _unset_or_several("algorithm.icepop_band"),
    _unset_or_several("algorithm.correction", "none"),
)
CLIPPED = (ActiveIf("algorithm.loss", used_by("loss", "training.clip_eps")), *_UNCORRECTED)
"""Markers of the keys of clipping. A correction for the sampler keeps the importance ratio at 1 in the first update of
a batch, so that clipping has no effect there."""
TIS_CAP = 2.0
ICEPOP_BAND = (0.5, 5.0)
REJECTION_BAND = (0.99, 1.01)
REJECTION_LIMITS = {"k3": 0.01, "veto": 1e-4}
REJECTING = ("mis", "icepop", "seq_mis")
"""Corrections whose weight is 0 outside their bounds."""


def _band(value: list[float] | None) -> list[float] | None:
    if value is not None and not (len(value) == 2 and 0.0 <= value[0] <= 1.0 <= value[1] and value[0] < value[1]):
        raise fault(f"is {value}, but must be [alpha, beta] with 0 ≤ alpha ≤ 1 ≤ beta", "[0.5, 5.0] or the like")
    return value


class _Modes(Section, role=Role.LEARNS):
    """Keys of [algorithm] that name modes."""

    advantage_mode: AdvantageMode = "grpo"
    """Advantage of a completion, computed from the rewards of its group: a mode, or `module:function` of your own."""
    transform_mode: TransformMode = "none"
    """Token credit: distributes the advantage over the completion's tokens; `none` gives every token the same. A mode,
    or `module:function` of your own."""
    turn_credit: Literal["episode", "turn", "state"] = "episode"
    """Credit in episodes of several turns: `episode` computes one advantage for the whole episode; `turn` and `state`
    compute one for every turn, by the same `advantage_mode` from the return that follows it. `turn` compares turns of
    the same number within a group; `state` compares all turns of the group that begin in the same state (the policy had
    just read the same), and adds the episode's advantage (GiGPO)."""
    state_weight: Annotated[Positive, ActiveIf("algorithm.turn_credit", ("state",))] = 1.0
    """Weight of the advantage among turns with equal states, relative to the episode's advantage."""
    turn_discount: Annotated[float, Field(gt=0, le=1), ActiveIf("algorithm.turn_credit", ("turn", "state"))] = 1.0
    """Discount per turn of later rewards."""
    uncertainty_kind: Annotated[
        _Uncertainty | Plugin, _with_credit("algorithm.uncertainty_kind", plugins=True, training_only=True)
    ] = "surprisal"
    """Uncertainty of a token: −logprob, p(1−p), full-vocabulary entropy, or a `module:function` of your own."""
    loss: _Loss | Plugin = "ppo"
    """Policy loss: a name, or a `module:function` of your own. On-policy with one update per batch, all have the same
    gradient."""
    loss_normalizer: Literal["tokens", "sequences", "constant"] = "tokens"
    """Divisor of the summed loss: trained tokens, sequences (GRPO), or a constant (Dr. GRPO)."""


def _parameter_fields() -> Iterator[tuple[str, Any]]:
    """Yield the keys that the rows of modes declare, as fields for ``create_model``."""
    for key, table in MODES.items():
        for mode, row in table.items():
            uncorrected = _UNCORRECTED if isinstance(row, Loss) and not row.from_sampler else ()
            for name, parameter in row.parameters.items():
                annotation = Annotated[parameter.annotation, ActiveIf(f"algorithm.{key}", (mode,)), *uncorrected]
                yield name, (annotation, Field(default=parameter.default, description=parameter.description))


_Parameters = create_model("_Parameters", __base__=_Modes, **dict(_parameter_fields()))


class AlgorithmSection(_Parameters):
    """Advantage, token credit and loss. Modes are named as in their papers."""

    dual_clip: Annotated[OptionalAboveOne, *CLIPPED] = None
    """Lower bound of the objective for a token with a negative advantage A: dual_clip·A, however large its ratio."""
    correction: Literal["none", "tis", "mis", "icepop", "decoupled", "seq_tis", "seq_mis"] | None = None
    """Correction of the loss for the difference between sampler and trainer: none; importance sampling of each token,
    truncated (`tis`) or masked (`mis`) at `tis_cap`; IcePop (`icepop_band`); the unbounded weight π_trainer/π_sampler
    (`decoupled`, decoupled PPO); or the product of a sequence's weights, truncated or masked at `tis_cap` (`seq_tis`,
    `seq_mis`). Unset follows `tis_cap` or `icepop_band` if one is set, else none."""
    tis_cap: Annotated[
        Annotated[float, Field(ge=1)] | None,
        ActiveIf("algorithm.correction", (None, "tis", "mis", "seq_tis", "seq_mis")),
    ] = None
    """Truncated importance sampling weights each token's loss by min(π_trainer/π_sampler, tis_cap); masking sets
    weights above the cap to 0. Unset is 2 with a correction that needs it."""
    icepop_band: Annotated[
        list[float] | None, AfterValidator(_band), ActiveIf("algorithm.correction", (None, "icepop"))
    ] = None
    """`[alpha, beta]`: the weight is not capped, and tokens whose weight lies outside the band do not train. Unset is
    `[0.5, 5.0]` with `correction = "icepop"`."""
    rejection: Literal["none", "geometric", "k3", "veto"] = "none"
    """Removes completions from the policy loss when trainer and sampler disagree; w is π_trainer/π_sampler of a token
    before the update. `geometric`: the geometric mean of w is outside `rejection_band`; `k3`: the mean of w − 1 − log w
    is above `rejection_limit`; `veto`: some token has w below `rejection_limit`. Costs one more forward pass over all
    completions."""
    rejection_band: Annotated[
        list[float] | None, AfterValidator(_band), ActiveIf("algorithm.rejection", ("geometric",))
    ] = None
    """Bounds `[low, high]` of `geometric`; unset is `[0.99, 1.01]`."""
    rejection_limit: Annotated[OptionalPositive, ActiveIf("algorithm.rejection", ("k3", "veto"))] = None
    """Limit of `k3` and `veto`; unset is 0.01 for `k3` and 0.0001 for `veto`."""
    rejection_denominator: Literal["all", "kept"] = "all"
    """Tokens that the loss is divided by: `all`, or only those `kept` after masking by `rejection`, by `mis`, `icepop`
    or `seq_mis`, or by `m2po`. `kept` costs one more forward pass over all completions."""
    discard_group_zero_advantage: bool = True
    """Skip the forward and backward pass of groups whose advantages are all 0. They count in the divisor of the loss
    either way, so a step with any signal makes the same update. `false` trains on them too: they count in `num_datums`
    and in the statistics of trained tokens, and where no group has signal the optimizer still steps, by its
    momentum."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL divergence to the frozen base (after a [warmup], to its result), in the loss unless
    `kl_in_reward` is set. In the loss, it also trains groups without signal."""
    kl_in_reward: Annotated[
        Literal["none", "k1", "k2", "k3"],
        ActiveIf("algorithm.advantage_mode", used_by("advantage_mode", "algorithm.kl_in_reward")),
    ] = "none"
    """With a critic: subtract `kl_coef` times this estimate of the divergence from every token's reward, as PPO does,
    instead of adding it to the loss."""
    entropy_coef: NotNegative = 0.0
    """Weight of the full-vocabulary entropy, as a bonus. It also trains groups without signal."""
    entropy_mask_rho: Annotated[PositiveShare, _with_credit("algorithm.entropy_mask_rho")] = 0.2
    """Share of the batch's tokens that train: those of highest entropy."""
    entropy_mask_denominator: Annotated[Literal["kept", "all"], _with_credit("algorithm.entropy_mask_denominator")] = (
        "kept"
    )
    """Tokens that the loss is divided by: `kept` or `all`; the two differ by 1/rho."""

    @property
    def weight(self) -> tuple[str, float, float] | None:
        """(kind, smallest weight, largest weight) of the correction; None without one."""
        unset = "tis" if self.tis_cap else "icepop" if self.icepop_band else "none"
        kind = self.correction or unset
        if kind == "none":
            return None
        if kind == "icepop":
            low, high = self.icepop_band or ICEPOP_BAND
            return kind, low, high
        return kind, 0.0, math.inf if kind == "decoupled" else self.tis_cap or TIS_CAP

    @property
    def from_sampler(self) -> bool:
        return loss_of(self.loss).from_sampler

    @property
    def rejection_bounds(self) -> tuple[float, float]:
        """(low, high) bounds of the statistic that `rejection` uses."""
        limit = self.rejection_limit or REJECTION_LIMITS.get(self.rejection, 0.0)
        if self.rejection == "veto":
            return limit, math.inf
        low, high = self.rejection_band or REJECTION_BAND
        return (0.0, limit) if self.rejection == "k3" else (low, high)

    @property
    def masks_before_update(self) -> bool:
        """True if rejection depends on the whole step or sequence, so that it is decided before the update."""
        return self.rejection != "none" or self.loss == "m2po"

    def parameters_of(self, key: str) -> dict[str, Any]:
        """Return the parameters of the mode that ``key`` selects, without the mode's prefix: with `loss = "cispo"`,
        `cispo_cap` is "cap"."""
        mode = getattr(self, key)
        return {name.removeprefix(f"{mode}_"): getattr(self, name) for name in mode_of(key, mode).parameters}

    @property
    def critic(self) -> bool:
        return Need.VALUES in self.needs

    @property
    def loss_kl_coef(self) -> float:
        return self.kl_coef if self.kl_in_reward == "none" else 0.0

    @property
    def reward_kl_coef(self) -> float:
        return self.kl_coef - self.loss_kl_coef

    @property
    def needs(self) -> frozenset[Need]:
        needs = frozenset[Need]().union(*(mode_of(key, getattr(self, key)).needs for key in MODES))
        if self.rejection != "none" or self.rejection_denominator == "kept":
            needs |= {Need.LOGPROBS}
        return needs | {Need.LOGPROBS, Need.REFERENCE} if Need.VALUES in needs else needs

    @property
    def keeps_uniform_groups(self) -> bool:
        """True if groups without signal are trained on, as by a KL, entropy or value term of the loss."""
        is_regularised = self.loss_kl_coef > 0 or self.entropy_coef > 0 or self.critic
        return is_regularised or not self.discard_group_zero_advantage

    def issues(self) -> Iterator[ConfigIssue]:
        if self.kl_in_reward != "none" and self.kl_coef == 0:
            message = f'is "{self.kl_in_reward}", with kl_coef = 0'
            yield ConfigIssue(("algorithm.kl_in_reward", "algorithm.kl_coef"), message, "kl_coef = 0.05")
        if self.tis_cap is not None and self.icepop_band is not None:
            message = f"is {self.icepop_band} beside tis_cap = {self.tis_cap:g}: both weigh by the same ratio"
            yield ConfigIssue(("algorithm.icepop_band", "algorithm.tis_cap"), message, "keep one of the two")
        if self.from_sampler and self.weight is not None:
            message = f'beside loss = "{self.loss}": both weigh by the same ratio'
            yield ConfigIssue(("algorithm.correction", "algorithm.loss"), message, "keep one of the two")
        masks = self.masks_before_update or (self.weight is not None and self.weight[0] in REJECTING)
        if self.rejection_denominator == "kept" and not masks:
            message = 'is "kept", and nothing is ever rejected'
            yield ConfigIssue(("algorithm.rejection_denominator", "algorithm.rejection"), message)


class Gtpo(Section, role=Role.LEARNS):
    """Credit in proportion to a token's uncertainty. Two papers use the acronym: `gtpo` and `gtpo_paper`."""

    beta: Annotated[NotNegative, _with_credit("gtpo.beta")] = 0.1
    """Strength of the weighting: 0 switches it off; above 1, weights may be clipped at 0."""
    alpha1: Annotated[Positive, _with_credit("gtpo.alpha1")] = 1.0
    """Weight of the reward in `gtpo_paper`."""
    alpha2: Annotated[NotNegative, _with_credit("gtpo.alpha2")] = 0.1
    """Weight of the entropy term in `gtpo_paper`."""
    centred: Annotated[bool, _with_credit("gtpo.centred")] = True
    """Subtract the group's mean in `gtpo_paper`, as its paper does; `false` divides by the root mean square only, so
    that no token of a wrong answer has a positive advantage."""


class HicraSection(Section, role=Role.LEARNS):
    """More credit for planning tokens."""

    alpha: Annotated[Decay, _with_credit("hicra.alpha")] = 0.2
    """A planning token's advantage grows by alpha times its absolute value."""


class Sepa(Section, role=Role.LEARNS):
    """Selective entropy pooling with annealing: the uncertainty of execution tokens moves to its mean as λ rises."""

    steps: Annotated[Natural, _SEPA] = 100
    """Steps in which λ rises from 0 to 1."""
    schedule: Annotated[Literal["linear", "auto"], _SEPA] = "linear"
    """`linear`, or `auto`: faster than linear when the variance of execution uncertainty falls."""
    delay_steps: Annotated[Natural, _SEPA] = 0
    """Steps with λ = 0 before the rise."""
    correct_rate_gate: Annotated[Share, _SEPA] = 0.1
    """Keep λ at 0 until a batch has at least this share of correct completions; the rise starts there. 0 is no gate."""
    ema_decay: Annotated[Decay, _SEPA, _AUTO] = 0.99
    """Decay per step of the running variance."""
    warmup_steps: Annotated[Count, _SEPA, _AUTO] = 50
    """Steps after which the running variance becomes the reference."""
    threshold: Annotated[Positive, _SEPA, _AUTO] = 0.2
    """Share of the reference variance at which λ is 0 by variance alone; λ rises as the variance falls below it."""


class Planning(Section, role=Role.LEARNS):
    """Detection of planning tokens, which HICRA and SEPA use; metrics of every run record them."""

    detector: Annotated[Literal["regex"] | Plugin, UnsupportedValues({"semantic": NO_SEMANTIC})] = "regex"
    """`regex` matches the phrases of `[logging] strategic_grams` in the decoded text; or a `module:function`."""


OF_SERVERS = ("server", "api_key_env", "timeout_s", "patience_s", "max_in_flight")
"""Keys that have an effect only with a ``url``."""
_SAMPLED, _WHOLE = (ActiveIf("distillation.estimate", (value,)) for value in ("sampled", "vocabulary"))
POLICY = "policy"
"""Value of ``teacher`` that makes the student its own teacher, with privileged context."""
SHOWN = {"answer": "The correct answer is {context}.", "sibling": "A correct solution is:\n\n{context}"}
"""Default of ``context_text`` by ``context``."""


def _placed(value: str | None) -> str | None:
    if value is not None and "{context}" not in value:
        raise fault("does not say where the answer stands", 'context_text = "The correct answer is {context}."')
    return value


class Distillation(Section, role=Role.LEARNS):
    """On-policy distillation: a teacher scores the tokens that the policy has sampled. The advantage of a token is
    weight · (ln π_teacher − ln π), which minimises the reverse KL divergence, alone or added to the reward's
    advantage."""

    teacher: OptionalText = None
    """The teacher: `base`, the frozen model without an adapter, or what a [warmup] made of it; `policy`, the student
    itself before the update, with a privileged `context`; a run's directory, its `final/` or another adapter of the
    same base; or a model with the same tokenizer, by directory, bundled name or hub name. With `url`, the model's name
    on that server. Unset switches distillation off."""
    weight: NotNegative = 1.0
    """Weight of the teacher's advantage. 0 leaves only the reward's advantage, as in a baseline."""
    reward_weight: NotNegative = 0.0
    """Weight of the reward's advantage (by `advantage_mode` and `transform_mode`) in the sum; 0 trains on the teacher
    only and records the reward."""
    estimate: Literal["sampled", "vocabulary"] = "sampled"
    """Quantity that the teacher computes: the probability of the `sampled` token, which gives that token's advantage;
    or the distribution over the whole `vocabulary` at every token, whose divergence from the student's is a term of the
    loss."""
    alpha: Annotated[Share, _WHOLE] = 0.5
    """Divergence: 0 is forward KL(teacher ‖ student), 1 reverse KL(student ‖ teacher), values between them the
    generalised Jensen-Shannon divergence."""
    top_tokens: Annotated[Natural, _WHOLE] = 0
    """Compare this many of the student's most probable tokens, and the sum of the others (SDPO: 100); 0 is all."""
    clamp: Annotated[OptionalPositive, _SAMPLED] = None
    """Bound on |ln π_teacher − ln π| of a token, before the weight (verl: 10); unset is none."""
    student: Annotated[Literal["sampler", "trainer"], _SAMPLED] = "sampler"
    """Student log-probabilities that are compared with the teacher's: those of the `sampler`, which cost nothing, or of
    the `trainer` before the update, which cost one more forward pass over all completions. They are equal up to
    rounding unless a server samples or rollouts are stale."""
    context: Literal["none", "answer", "sibling"] = "none"
    """Privileged context at the end of the teacher's prompt: the problem's reference `answer` (OPSD), or a `sibling`
    (SDPO), the first correct completion of the same prompt other than the completion that is scored. Completions for
    which there is no such context have no teacher, and with `reward_weight = 0` no advantage."""
    context_text: Annotated[OptionalText, AfterValidator(_placed)] = None
    """Text of the privileged context, with `{context}` where the answer or completion goes; unset is `The correct
    answer is {context}.`, or a similar sentence for a sibling."""
    url: Annotated[OptionalText, Role.NAMES] = None
    """Address of a server with the teacher, such as `http://gpu1:8000`; it must return prompt log-probabilities."""
    server: Annotated[Literal["vllm", "sglang", "openai"], Role.NAMES] = "vllm"
    """Software of the teacher's server, as in `[inference] engine`; `vllm` also for `retrain serve`."""
    api_key_env: Annotated[OptionalText, Role.NAMES] = None
    """Environment variable that holds the server's API key."""
    timeout_s: Annotated[Seconds, Role.SPEED] = 600.0
    """Seconds after which a request without an answer is cancelled and sent again."""
    patience_s: Annotated[NotNegative, Role.SPEED] = 600.0
    """Seconds that the server may be unavailable before the runs save and stop."""
    max_in_flight: Annotated[Count, Role.SPEED] = 64
    """Most concurrent requests of a run."""

    @property
    def active(self) -> bool:
        return self.teacher is not None and self.weight > 0

    @property
    def sampled(self) -> bool:
        return self.active and self.estimate == "sampled"

    @property
    def full_vocabulary(self) -> bool:
        return self.active and self.estimate == "vocabulary"

    @property
    def teacher_only(self) -> bool:
        return self.active and self.reward_weight == 0

    @property
    def context_template(self) -> str:
        """The privileged context, with ``{context}`` unfilled; "" without one."""
        return self.context_text or SHOWN.get(self.context, "")

    @property
    def needs(self) -> frozenset[Need]:
        """Inputs that distillation requires, besides those of the algorithm."""
        if not self.sampled:
            return frozenset()
        return frozenset({Need.TEACHER, *([Need.LOGPROBS] if self.student == "trainer" else [])})

    def issues(self) -> Iterator[ConfigIssue]:
        for key, field in type(self).model_fields.items():
            if key == "teacher" or getattr(self, key) == field.default:
                continue
            if self.teacher is None:
                message, fix = "has no effect without a teacher", 'teacher = "base", or the directory of a run or model'
                yield ConfigIssue((f"distillation.{key}", "distillation.teacher"), message, fix)
            elif self.url is None and key in OF_SERVERS:
                yield ConfigIssue((f"distillation.{key}", "distillation.url"), "has no effect without url")
        if self.teacher == POLICY and self.url is None and self.context == "none":
            message = 'is "policy", the student itself, which without a context teaches nothing'
            yield ConfigIssue(("distillation.teacher", "distillation.context"), message, 'context = "answer"')
        if self.context_text is not None and self.context == "none" and self.teacher is not None:
            message = "has no effect without a context"
            yield ConfigIssue(("distillation.context_text", "distillation.context"), message, 'context = "answer"')
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            message = f'is "{self.url}", which is no address'
            yield ConfigIssue(("distillation.url",), message, f'url = "http://{self.url.lstrip("/")}"')
