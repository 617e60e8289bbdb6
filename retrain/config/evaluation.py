"""[evaluation] and [[evaluation.sets]]: what is held out, and how the model is sampled on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from retrain.config.base import (
    Count,
    Decay,
    Finding,
    Natural,
    NotNegative,
    OptionalText,
    PositiveShare,
    Role,
    Section,
    Text,
    fault,
)
from retrain.config.describe import toml
from retrain.config.tasks import Data, Level, OptionalSource, Template
from retrain.config.training import Sampling, TopK, Training

if TYPE_CHECKING:
    pass

HELDOUT = "heldout"
"""The name of what is held out when no set is named."""
NAME_MAX = 64
PART = "~part"
"""Ends the name under which the part of a set that is for the curve alone stands in files and metrics; no set has such
a name of its own."""
PART_EVERY = 8
"""Of every so many problems that part has one."""


def _set_name(value: str) -> str:
    """A name that is one piece of a file name and of a metric's key."""
    if value == "train":
        raise fault('is "train", which is what a run calls its training problems', 'name = "train_part"')
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value) and len(value) <= NAME_MAX:
        return value
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", value).strip("._-")[:NAME_MAX] or "test"
    raise fault(
        f"is {toml(value)}, but must be at most {NAME_MAX} letters, digits, . _ and -: it stands in file names",
        f'name = "{safe}"',
    )


class EvaluationSet(Section):
    """A held-out set under a name of its own. What it leaves unset is as in [evaluation] and [data]. A problem that is
    in a set is never trained on."""

    name: Annotated[Text, AfterValidator(_set_name)]
    """Its name in files and metrics: `eval/<name>/correct_rate`, `eval_<name>_iteration_000020.html`."""
    source: OptionalSource = None
    """As in [data]; all problems of a file are in the set. Unset is what `[data]` holds out."""
    subset: OptionalText = None
    """Configuration of a data set that has several."""
    split: OptionalText = None
    """Split of a data set or of a function; unset is `[data] eval_split`."""
    levels: Annotated[list[Level], Field(min_length=1)] | None = None
    """Difficulties of generated problems."""
    prompt_column: OptionalText = None
    """Column of the problem."""
    answer_column: OptionalText = None
    """Column of the reference answer."""
    tags_column: OptionalText = None
    """Column of tags."""
    system_prompt: OptionalText = None
    """The system message."""
    prompt_template: Template | None = None
    """Text of the user message; `{prompt}` is the problem."""
    problems: Count | None = None
    """At most so many problems."""
    samples: Count | None = None
    """Completions for each problem."""
    temperature: NotNegative | None = None
    """Sampling temperature; 0 is greedy."""
    top_p: PositiveShare | None = None
    """Nucleus sampling; 1 is off."""
    top_k: TopK | None = None
    """Sample from so many most probable tokens; 0 is off."""
    min_p: Decay | None = None
    """Least share of the largest probability; 0 is off."""
    max_tokens: Count | None = None
    """Longest completion."""


class Evaluation(Section):
    """Held-out evaluation: before training, every `[training] eval_every` steps, and after the last update. All keys
    but `at_start` and `schedule` are also those of `[[evaluation.sets]]` that do not have their own."""

    role: ClassVar[Role] = Role.EVALUATES

    problems: Natural = 128
    """Held-out problems; 0 switches evaluation off."""
    samples: Count = 1
    """Completions for each held-out problem."""
    temperature: NotNegative | None = None
    """Sampling temperature; unset is that of training, 0 is greedy."""
    top_p: PositiveShare | None = None
    """Nucleus sampling; unset is that of training, 1 is off."""
    top_k: TopK | None = None
    """Sample from so many most probable tokens; unset is that of training, 0 is off."""
    min_p: Decay | None = None
    """Least share of the largest probability; unset is that of training, 0 is off."""
    max_tokens: Count | None = None
    """Longest completion; unset is that of training."""
    at_start: Annotated[bool, Role.EVALUATES | Role.RECORDS] = True
    """Evaluate the untrained model, so that there is something to compare with."""
    schedule: Annotated[Literal["every", "verdict"], Role.EVALUATES | Role.RECORDS] = "every"
    """Where the answers are spent: `every` evaluation has all problems and samples, or, with `verdict`, only the first
    one and those after about 80, 90 and 100 % of the steps, which `last3` is the mean of. The others that `eval_every`
    asks for then have every eighth problem and one answer, for the curve alone, under a name of their own:
    `eval/heldout~part/correct_rate`."""
    sets: list[EvaluationSet] = Field(default_factory=list)
    """Held-out sets by name, `[[evaluation.sets]]`; without any there is one, `heldout`. The first one is what `final`,
    `pass@4` and other short names of metrics mean, and what is shown where there is room for one."""

    @property
    def names(self) -> tuple[str, ...]:
        if not self.problems:
            return ()
        return tuple(each.name for each in self.sets) or (HELDOUT,)

    def findings(self) -> Iterator[Finding]:
        """Sets have names of their own, and there are none where evaluation is switched off."""
        if self.sets and not self.problems:
            yield Finding(
                ("evaluation.problems", "evaluation.sets"),
                f"is 0, which switches evaluation off, beside {len(self.sets)} [[evaluation.sets]]",
                "problems = 128, or remove the sets",
            )
        seen = dict[str, int]()
        for index, each in enumerate(self.sets):
            first = seen.setdefault(each.name.casefold(), index)
            if first != index:
                path = f"evaluation.sets.{index}"
                what = f'is "{each.name}", like set {first + 1}: their files and metrics would be one'
                yield Finding((f"{path}.name", path), what, f'name = "{each.name}_{index + 1}"')


@dataclass(frozen=True)
class HeldOut:
    """A held-out set with nothing left to be worked out: how many problems, sampled how, and from where.

    ``data`` is [data] with the set's own keys in their place: its ``eval_source`` and ``eval_split`` hold the problems.
    """

    name: str
    problems: int
    samples: int
    sampling: Sampling
    data: Data
    every: int = 1
    """Of so many problems one is asked."""

    @property
    def part(self) -> HeldOut:
        """What of it is asked for the curve alone."""
        return replace(self, problems=-(-self.problems // PART_EVERY), samples=1, every=PART_EVERY)

    @property
    def recorded_name(self) -> str:
        return self.name if self.every == 1 else self.name + PART


CUTS = ("top_p", "top_k", "min_p")
"""Keys that cut the distribution sampled from."""
OWN_DATA = ("subset", "levels", "prompt_column", "answer_column", "tags_column", "system_prompt", "prompt_template")
"""Keys of a set that stand in the place of the same keys of [data]."""


def resolved(each: EvaluationSet, evaluation: Evaluation, training: Training, data: Data) -> HeldOut:
    """Return the set with what it leaves unset taken from [evaluation], then from [training] and [data]."""

    def sampled(key: str) -> Any:
        asked = (getattr(section, key) for section in (each, evaluation, training))
        return next(value for value in asked if value is not None)

    own = {key: value for key in OWN_DATA if (value := getattr(each, key)) is not None}
    own |= {"eval_source": each.source} if each.source is not None else {}
    own |= {"eval_split": each.split} if each.split is not None else {}
    return HeldOut(
        name=each.name,
        problems=each.problems or evaluation.problems,
        samples=each.samples or evaluation.samples,
        sampling=Sampling(**{key: sampled(key) for key in ("max_tokens", "temperature", *CUTS)}),
        data=data.model_copy(update=own) if own else data,
    )


Extent = Literal["whole", "part"]
"""All problems and samples of every held-out set, or the part of them that is for the curve alone."""
DECIDING = 3
"""Evaluations whose mean is `last3`."""
LATE = 0.75
"""`last3` is about the end of training where its evaluations lie after this share of the steps."""


def deciding_marks(max_steps: int) -> tuple[int, ...]:
    """Updates done at the evaluations that `schedule = "verdict"` decides by: about 80, 90 and 100 % of the steps; all
    of them, where there are fewer than three."""
    ninety = min(max_steps - 1, round(0.9 * max_steps))
    return tuple(step for step in (min(ninety - 1, round(0.8 * max_steps)), ninety, max_steps) if step > 0)


def whole_evaluations(schedule: str, max_steps: int, eval_every: int) -> tuple[int, ...]:
    """Updates done at every evaluation of all problems and samples after the start, in order."""
    if schedule == "verdict":
        return deciding_marks(max_steps)
    return (*(range(eval_every, max_steps, eval_every) if eval_every else ()), max_steps)


def part_evaluations(schedule: str, max_steps: int, eval_every: int) -> tuple[int, ...]:
    """Updates done at every evaluation of a part of the problems, in order."""
    if schedule != "verdict" or not eval_every:
        return ()
    return tuple(step for step in range(eval_every, max_steps, eval_every) if step not in deciding_marks(max_steps))


def too_early(first: int, max_steps: int) -> bool:
    """Whether an evaluation that `last3` begins with lies outside the end of training."""
    return first < min(LATE * max_steps, deciding_marks(max_steps)[0])
