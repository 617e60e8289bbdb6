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
from retrain.config.describe import no_effect, toml
from retrain.config.tasks import FILE_ENDINGS, Data, Level, OptionalSource, Template, has_configurations
from retrain.config.training import Sampling, TopK

if TYPE_CHECKING:
    from retrain.config.root import Config

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


def resolved(config: Config, each: EvaluationSet) -> HeldOut:
    """The set with what it leaves unset taken from [evaluation], then from [training] and [data]."""
    evaluation, training = config.evaluation, config.training

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
        data=config.data.model_copy(update=own) if own else config.data,
    )


def evaluation_rules(config: Config) -> Iterator[Finding]:
    """Sets are sampled so that it tells something, and no key is without effect."""
    evaluation = config.evaluation
    if evaluation.sets and config.data.eval_source is not None and all(each.source for each in evaluation.sets):
        yield Finding(
            ("data.eval_source", "evaluation.sets"),
            "has no effect: every one of [[evaluation.sets]] has its own source",
            "remove the line",
        )
    for index, each in enumerate(evaluation.sets):
        yield from _data_findings(config, each, f"evaluation.sets.{index}")
    yield from _cut_findings(config)
    for index, held_out in enumerate(config.held_out):
        if held_out.samples > 1 and held_out.sampling.temperature == 0:
            own = evaluation.sets[index] if evaluation.sets else None
            path = "evaluation" if own is None or own.samples is None else f"evaluation.sets.{index}"
            greedy = "evaluation" if own is None or own.temperature is None else f"evaluation.sets.{index}"
            yield Finding(
                (f"{path}.samples", f"{greedy}.temperature"),
                f"is {held_out.samples} at temperature 0: all samples of a problem are the same",
                "samples = 1",
            )


def _cut_findings(config: Config) -> Iterator[Finding]:
    evaluation, sets = config.evaluation, config.held_out
    tables: list[tuple[str, Section]] = []
    if sets and all(each.sampling.temperature == 0 for each in sets):
        tables.append(("evaluation", evaluation))
    tables += [
        (f"evaluation.sets.{index}", own)
        for index, (own, held_out) in enumerate(zip(evaluation.sets, sets, strict=False))  # no sets, or one unnamed
        if held_out.sampling.temperature == 0
    ]
    for path, table in tables:
        for key in CUTS:
            if getattr(table, key) is not None:
                message = "has no effect at temperature 0, which is greedy"
                yield Finding((f"{path}.{key}", f"{path}.temperature"), message, "remove the line")


def _data_findings(config: Config, each: EvaluationSet, path: str) -> Iterator[Finding]:
    source = each.source or config.data.eval_source or config.data.source
    if each.split is not None and (source == "arithmetic" or source.endswith(FILE_ENDINGS)):
        yield no_effect(f"{path}.split", f"{path}.source", source)
    if each.levels is not None and source != "arithmetic":
        fix = 'remove the line, or source = "arithmetic"'
        yield no_effect(f"{path}.levels", f"{path}.source", source, fix)
    if each.subset is not None and each.source is not None and not has_configurations(source):
        yield no_effect(f"{path}.subset", f"{path}.source", source)
    for key in ("subset", "prompt_column", "answer_column", "tags_column"):
        if getattr(each, key) is not None and each.source is None:
            yield Finding(
                (f"{path}.{key}", path),
                "has no effect without a source of the set's own: the problems are those of [data]",
                f"remove the line, or set {key} in [data]",
            )
