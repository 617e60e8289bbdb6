"""[distillation]: a teacher that says of every sampled token how probable it finds it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator

from retrain.config.base import (
    Count,
    Finding,
    Natural,
    NotNegative,
    OptionalPositive,
    OptionalText,
    Positive,
    Role,
    Section,
    Share,
    UsedWhen,
    fault,
    is_plugin,
)
from retrain.config.evaluation import CUTS
from retrain.config.modes import Need

if TYPE_CHECKING:
    from retrain.config.root import Config

OF_SERVERS = ("server", "api_key_env", "timeout_s", "patience_s", "max_in_flight")
"""Keys that only a teacher behind a ``url`` has."""


_SAMPLED, _WHOLE = (UsedWhen("distillation.estimate", (value,)) for value in ("sampled", "vocabulary"))
POLICY = "policy"
"""The teacher that is the student itself, with more in its context."""
SHOWN = {"answer": "The correct answer is {context}.", "sibling": "A correct solution is:\n\n{context}"}
"""What a teacher reads at the end of the prompt where ``context_text`` does not say otherwise."""


def _placed(value: str | None) -> str | None:
    if value is not None and "{context}" not in value:
        raise fault("does not say where the answer stands", 'context_text = "The correct answer is {context}."')
    return value


class Distillation(Section):
    """On-policy distillation: a teacher scores the tokens that the policy has sampled, and every token has the
    advantage weight · (ln π_teacher − ln π), the reverse KL divergence's, alone or beside that of the reward."""

    role: ClassVar[Role] = Role.LEARNS

    teacher: OptionalText = None
    """Who teaches: `base`, the frozen model without an adapter; `policy`, the student itself as it is before the
    update, which is shown a `context`; a run's directory, its `final/` or another adapter of the same base; a model, by
    directory, bundled name or hub name, with the same tokenizer. With `url` the name under which that server has it.
    Unset: nobody."""
    weight: NotNegative = 1.0
    """Weight of the teacher's advantage. 0 switches it off: the reward's is then all there is, as in a baseline."""
    reward_weight: NotNegative = 0.0
    """Weight of the reward's advantage beside it, by `advantage_mode` and `transform_mode`; 0 distils alone, and the
    reward is only recorded."""
    estimate: Literal["sampled", "vocabulary"] = "sampled"
    """What is asked of the teacher: its probability of the `sampled` token, which becomes that token's advantage, or
    its whole distribution at every token, whose divergence from the student's is a term of the loss (`vocabulary`)."""
    alpha: Annotated[Share, _WHOLE] = 0.5
    """Which divergence: 0 forward KL(teacher ‖ student), 1 reverse KL(student ‖ teacher), between them the generalised
    Jensen-Shannon divergence."""
    top_tokens: Annotated[Natural, _WHOLE] = 0
    """Compare so many tokens, the student's likeliest, and all others as one (SDPO: 100); 0 compares all."""
    clamp: Annotated[OptionalPositive, _SAMPLED] = None
    """Bound on |ln π_teacher − ln π| of a token, before the weight (verl: 10); unset is none."""
    student: Annotated[Literal["sampler", "trainer"], _SAMPLED] = "sampler"
    """Whose ln π is compared with the teacher's: those that the tokens were sampled with, which cost nothing, or the
    trainer's own before the update, one more forward pass over all completions. They are the same up to rounding unless
    a server samples, or rollouts are behind the policy."""
    context: Literal["none", "answer", "sibling"] = "none"
    """What the teacher is shown at the end of the prompt and the student is not: the problem's reference `answer`
    (OPSD), or the first right completion of the same prompt besides its own, a `sibling` (SDPO). Completions for which
    there is none have no teacher: distilled alone, they have no advantage."""
    context_text: Annotated[OptionalText, AfterValidator(_placed)] = None
    """The words, with `{context}` where the answer or the completion stands; unset is
    `The correct answer is {context}.`, or the like for a sibling."""
    url: Annotated[OptionalText, Role.NAMES] = None
    """Address of a server that has the teacher, such as `http://gpu1:8000`; it is asked for the log-probabilities of
    whole prompts."""
    server: Annotated[Literal["vllm", "sglang", "openai"], Role.NAMES] = "vllm"
    """What kind of server that is, as in `[inference] engine`. `retrain serve` is a `vllm`."""
    api_key_env: Annotated[OptionalText, Role.NAMES] = None
    """Environment variable that holds its API key."""
    timeout_s: Annotated[Positive, Role.SPEED] = 600.0
    """Seconds after which a request without an answer is given up and made again."""
    patience_s: Annotated[NotNegative, Role.SPEED] = 600.0
    """Seconds that it may be away before the runs stop and are saved."""
    max_in_flight: Annotated[Count, Role.SPEED] = 64
    """Most requests that a run has it answer at a time."""

    @property
    def active(self) -> bool:
        return self.teacher is not None and self.weight > 0

    @property
    def sampled(self) -> bool:
        """Whether the teacher gives sampled tokens an advantage."""
        return self.active and self.estimate == "sampled"

    @property
    def whole(self) -> bool:
        """Whether whole distributions are compared in the loss."""
        return self.active and self.estimate == "vocabulary"

    @property
    def alone(self) -> bool:
        """Whether nothing but the teacher gives advantages."""
        return self.active and self.reward_weight == 0

    @property
    def shown_words(self) -> str:
        """What the teacher reads besides, ``{context}`` included; "" for nothing."""
        return self.context_text or SHOWN.get(self.context, "")

    @property
    def needs(self) -> frozenset[Need]:
        """What it cannot do without, beside what the algorithm needs."""
        if not self.sampled:
            return frozenset()
        return frozenset({Need.TEACHER, *([Need.LOGPROBS] if self.student == "trainer" else [])})

    def findings(self) -> Iterator[Finding]:
        """Keys need somebody who teaches, and some of them a server."""
        fields = type(self).model_fields
        written = [key for key, field in fields.items() if getattr(self, key) != field.default and key != "teacher"]
        for key in written:
            if self.teacher is None:
                fix = 'teacher = "base", or the directory of a run or model'
                yield Finding((f"distillation.{key}", "distillation.teacher"), "has no effect without a teacher", fix)
            elif self.url is None and key in OF_SERVERS:
                fix = "remove the line"
                yield Finding((f"distillation.{key}", "distillation.url"), "has no effect without url", fix)
        if self.teacher == POLICY and self.url is None and self.context == "none":
            keys = ("distillation.teacher", "distillation.context")
            yield Finding(keys, 'is "policy", the student itself, which without a context teaches nothing',
                          'context = "answer"')  # fmt: skip
        if self.context_text is not None and self.context == "none" and self.teacher is not None:
            keys = ("distillation.context_text", "distillation.context")
            yield Finding(keys, "has no effect without a context", 'context = "answer"')
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            message = f'is "{self.url}", which is no address'
            yield Finding(("distillation.url",), message, f'url = "http://{self.url.lstrip("/")}"')


def distillation_rules(config: Config) -> Iterator[Finding]:
    """What goes together with a teacher, and what has no effect where it alone gives advantages."""
    own, algorithm, training = config.distillation, config.algorithm, config.training
    if not own.active:
        return
    teacher = "distillation.teacher"
    if is_plugin(config.backend.backend):
        what = f'is "{own.teacher}", and backend = "{config.backend.backend}" says nothing of tokens that were sampled'
        yield Finding((teacher, "backend.backend"), what, "remove the line")
    if training.dynamic_sampling:
        keys = ("training.dynamic_sampling", teacher)
        yield Finding(keys, "drops groups from which a teacher's student learns as from all others", "remove the line")
    if not algorithm.discard_group_zero_advantage:
        keys = ("algorithm.discard_group_zero_advantage", teacher)
        yield Finding(keys, "has no effect with a teacher: every completion with a reward trains", "remove the line")
    if own.student == "sampler" and (training.max_off_policy_steps or config.inference.served):
        behind = "rollouts are behind the policy" if training.max_off_policy_steps else "servers sample"
        what = f'is "sampler", and {behind}: the teacher is compared with another policy than the one that trains'
        keys = ("distillation.student", "training.max_off_policy_steps", "inference.engine")
        yield Finding(keys, what, 'student = "trainer"', warning=True)
    if own.url is not None:
        whole = type(training).model_fields
        for key in ("temperature", *CUTS):
            value = getattr(training, key)
            if value != whole[key].default:
                what = (
                    f"is {value:g}, and a server says of a teacher's tokens what the whole model does at temperature 1"
                )
                fix = f'remove the line, or give the teacher\'s directory in place of url = "{own.url}"'
                yield Finding((f"training.{key}", "distillation.url"), what, fix)
    if own.whole:
        yield from _vocabulary_findings(config)
    if own.context != "none" and (config.environment.hosted or config.environment.turns != 1):
        what = f'is "{own.context}", which is shown in prompts of single answers, and episodes may have several turns'
        yield Finding(("distillation.context", "environment.max_turns"), what, 'context = "none"')
    if own.context == "sibling" and training.group_size == 1:
        keys = ("distillation.context", "training.group_size")
        yield Finding(keys, 'is "sibling", and with group_size = 1 no completion has one', "group_size = 8")
    if own.alone:
        yield from _unrewarded(config)


def _vocabulary_findings(config: Config) -> Iterator[Finding]:
    """Whole distributions are there in this process alone, and over the whole vocabulary."""
    estimate, what = "distillation.estimate", 'is "vocabulary"'
    if config.distillation.url is not None:
        words = f"{what}, and a server says nothing of tokens that were not sampled"
        yield Finding((estimate, "distillation.url"), words, 'estimate = "sampled"')
    if config.backend.shard != "none":
        words = f'{what}, and with shard = "{config.backend.shard}" ranks have no teacher'
        yield Finding((estimate, "backend.shard"), words, 'estimate = "sampled"')
    for key in CUTS:
        if getattr(config.training, key) != type(config.training).model_fields[key].default:
            words = f"{what}, and {key} leaves tokens out of what is sampled from"
            yield Finding((estimate, f"training.{key}"), words, 'estimate = "sampled"')


def _unrewarded(config: Config) -> Iterator[Finding]:
    """What only says how the reward is credited, while it counts nothing."""
    algorithm, mode, weight = config.algorithm, config.algorithm.transform_mode, "distillation.reward_weight"
    if algorithm.critic:
        keys = ("algorithm.advantage_mode", weight)
        yield Finding(
            keys, 'is "gae", and with reward_weight = 0 its critic trains for nothing', 'advantage_mode = "grpo"'
        )
    if mode not in ("none", "entropy_mask"):
        keys = ("algorithm.transform_mode", weight)
        yield Finding(keys, f'is "{mode}", which has no effect with reward_weight = 0', 'transform_mode = "none"')
    if algorithm.turn_credit != "episode":
        keys = ("algorithm.turn_credit", weight)
        what = f'is "{algorithm.turn_credit}", which has no effect with reward_weight = 0'
        yield Finding(keys, what, 'turn_credit = "episode"')
