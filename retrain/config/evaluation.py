"""[evaluation], [squeeze], [logging], [resume], [backpressure]: what is measured and recorded around the training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from os.path import abspath
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field

from retrain.config.base import (
    ActiveIf,
    ConfigIssue,
    Count,
    Decay,
    Device,
    Natural,
    NotNegative,
    OptionalCount,
    OptionalPhrases,
    OptionalRanks,
    OptionalText,
    PositiveShare,
    Role,
    Section,
    Tags,
    Text,
    Trackers,
    fault,
)
from retrain.config.describe import no_effect, toml
from retrain.config.tasks import Data, Level, OptionalSource, Template
from retrain.config.training import Sampling, TopK

HELDOUT = "heldout"
"""Name of the held-out set when no set is named."""
NAME_MAX = 64
PART = "~part"
"""Suffix, in files and metrics, of the part of a set that is evaluated for the curve only; set names may not end in
it."""
PART_EVERY = 8
"""One of this many problems of a set belongs to its part."""


def _set_name(value: str) -> str:
    if value == "train":
        raise fault('is "train", which is what a run calls its training problems', 'name = "train_part"')
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value) and len(value) <= NAME_MAX:
        return value
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", value).strip("._-")[:NAME_MAX] or "test"
    message = f"is {toml(value)}, but must be at most {NAME_MAX} letters, digits, . _ and -: it stands in file names"
    raise fault(message, f'name = "{safe}"')


class EvaluationSet(Section):
    """A named held-out set. Unset keys follow [evaluation] and [data]. Problems of a set are never trained on."""

    name: Annotated[Text, AfterValidator(_set_name)]
    """Name of the set in files and metrics: `eval/<name>/correct_rate`, `eval_<name>_iteration_000020.html`."""
    source: OptionalSource = None
    """Source of problems, as in [data]; all problems of a file are used. Unset is what `[data]` holds out."""
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
    """Column of a tag or a list of tags."""
    system_prompt: OptionalText = None
    """The system message."""
    prompt_template: Template | None = None
    """Text of the user message; `{prompt}` is the problem."""
    problems: Count | None = None
    """At most this many problems."""
    samples: Count | None = None
    """Completions for each problem."""
    temperature: NotNegative | None = None
    """Sampling temperature; 0 is greedy."""
    top_p: PositiveShare | None = None
    """Nucleus sampling; 1 is off."""
    top_k: TopK | None = None
    """Sample from this many most probable tokens; 0 is off."""
    min_p: Decay | None = None
    """Least share of the largest probability; 0 is off."""
    max_tokens: Count | None = None
    """Longest completion."""


class EvaluationSection(Section, role=Role.EVALUATES):
    """Held-out evaluation: before training, every `[training] eval_every` steps, and after the last update.
    `[[evaluation.sets]]` may override all keys but `at_start` and `schedule`."""

    problems: Natural = 128
    """Held-out problems; 0 switches evaluation off."""
    samples: Count = 1
    """Completions for each held-out problem."""
    temperature: NotNegative | None = None
    """Sampling temperature; 0 is greedy. Unset follows training."""
    top_p: PositiveShare | None = None
    """Nucleus sampling; 1 is off. Unset follows training."""
    top_k: TopK | None = None
    """Sample from this many most probable tokens; 0 is off. Unset follows training."""
    min_p: Decay | None = None
    """Least share of the largest probability; 0 is off. Unset follows training."""
    max_tokens: Count | None = None
    """Longest completion; unset follows training."""
    at_start: Annotated[bool, Role.EVALUATES | Role.RECORDS] = True
    """Evaluate the untrained model too, as the baseline of the curve."""
    schedule: Annotated[Literal["every", "verdict"], Role.EVALUATES | Role.RECORDS] = "every"
    """`every`: each evaluation uses all problems and samples. `verdict`: only the first evaluation does, and the three
    after about 80, 90 and 100 % of the steps, whose mean is `last3`. The other evaluations of `eval_every` then use
    every eighth problem with one answer, for the curve only, under the name `eval/heldout~part/correct_rate`."""
    sets: list[EvaluationSet] = Field(default_factory=list)
    """Held-out sets by name, `[[evaluation.sets]]`; without any there is one, `heldout`. Short metric names such as
    `final` and `pass@4` refer to the first set, and displays with space for one set show it."""

    @property
    def names(self) -> tuple[str, ...]:
        if not self.problems:
            return ()
        return tuple(each.name for each in self.sets) or (HELDOUT,)

    def issues(self) -> Iterator[ConfigIssue]:
        if self.sets and not self.problems:
            message = f"is 0, which switches evaluation off, beside {len(self.sets)} [[evaluation.sets]]"
            yield ConfigIssue(("evaluation.problems", "evaluation.sets"), message, "problems = 128, or remove the sets")
        seen = dict[str, int]()
        for index, held_out in enumerate(self.sets):
            first = seen.setdefault(held_out.name.casefold(), index)
            if first != index:
                path = f"evaluation.sets.{index}"
                message = f'is "{held_out.name}", like set {first + 1}: both would write the same files and metrics'
                yield ConfigIssue((f"{path}.name", path), message, f'name = "{held_out.name}_{index + 1}"')


@dataclass(frozen=True)
class HeldOut:
    """A held-out set with every value resolved. ``data`` is [data] with the set's own keys; its ``eval_source`` and
    ``eval_split`` select the problems."""

    name: str
    problems: int
    samples: int
    sampling: Sampling
    data: Data
    every: int = 1
    """One of this many problems of the set is evaluated."""

    @property
    def part(self) -> HeldOut:
        """The part of the set that is evaluated for the curve only."""
        return replace(self, problems=-(-self.problems // PART_EVERY), samples=1, every=PART_EVERY)

    @property
    def recorded_name(self) -> str:
        return self.name if self.every == 1 else self.name + PART


CUTS = ("top_p", "top_k", "min_p")
"""Keys that truncate the distribution sampled from."""
OWN_DATA = ("subset", "levels", "prompt_column", "answer_column", "tags_column", "system_prompt", "prompt_template")
"""Keys of a set that replace the same keys of [data]."""


Extent = Literal["whole", "part"]
"""Size of an evaluation: all problems and samples of every held-out set, or the part for the curve."""
SUMMARIES = ("final", "last3", "auc")
"""Ways to summarise a curve as one number, in the order of the evaluations that they need."""
DECIDING = 3
"""Number of evaluations in the mean `last3`."""
LATE = 0.75
"""Share of the steps after which an evaluation counts as the end of training, for `last3`."""


def deciding_marks(max_steps: int) -> tuple[int, ...]:
    """Return the numbers of updates done at the evaluations of `schedule = "verdict"`: about 80, 90 and 100 % of the
    steps, or every step where there are fewer than three."""
    ninety = min(max_steps - 1, round(0.9 * max_steps))
    return tuple(step for step in (min(ninety - 1, round(0.8 * max_steps)), ninety, max_steps) if step > 0)


def whole_evaluations(schedule: str, max_steps: int, eval_every: int) -> tuple[range, tuple[int, ...]]:
    """Return the numbers of updates done at every full evaluation after the start, in order: those of ``eval_every``,
    which may be billions, and those at the end."""
    if schedule == "verdict":
        return range(0), deciding_marks(max_steps)
    return _regular_evaluations(max_steps, eval_every), (max_steps,) if max_steps else ()


def _regular_evaluations(max_steps: int, eval_every: int) -> range:
    return range(eval_every, max_steps, eval_every) if eval_every else range(0)


def last_evaluations(schedule: str, max_steps: int, eval_every: int) -> tuple[int, ...]:
    """Return the numbers of updates done at the full evaluations of `last3`, fewer if there are fewer."""
    regular, last = whole_evaluations(schedule, max_steps, eval_every)
    return (*regular[-DECIDING:], *last)[-DECIDING:]


def part_evaluations(schedule: str, max_steps: int, eval_every: int) -> int:
    """Return the number of evaluations of a part of the problems."""
    regular = _regular_evaluations(max_steps, eval_every) if schedule == "verdict" else range(0)
    return len(regular) - sum(step in regular for step in deciding_marks(max_steps))


def too_early(first: int, max_steps: int) -> bool:
    """Return whether `last3` would average an evaluation from before the end of training. ``first``: updates done at
    the earliest of its evaluations; too early before the share ``LATE`` of the steps and before ``deciding_marks``."""
    return first < min(LATE * max_steps, deciding_marks(max_steps)[0])


Tool = Literal["tinker", "trl", "telescope", "retrain"]
KNOWN_TRACKERS = ("wandb", "tensorboard", "trackio")


def trackers(report_to: Sequence[str], wandb_project: str | None) -> list[str]:
    """Return the trackers of runs: ``all`` stands for the supported ones that are installed; a project adds wandb."""
    if "none" in report_to:
        return []
    asked = [name for name in KNOWN_TRACKERS if find_spec(name)] if "all" in report_to else list(report_to)
    return list(dict.fromkeys([*asked, *(["wandb"] if wandb_project else [])]))


def _url(value: str | None) -> str | None:
    if value is None or re.match(r"[a-z][a-z0-9+.-]*://[^/]*/?.", value):
        return value
    raise fault(f'is "{value}", and that is no URL', f'mirror = "file://{abspath(value)}"')


class Backpressure(Section, role=Role.SPEED):
    """Adaptation of the load to the hardware (Universal Scalability Law)."""

    enabled: bool = False
    """Measure throughput and adapt."""
    target: Literal["concurrency", "batch_size"] = "concurrency"
    """Load that is adapted. `concurrency`: number of prompts that decode at once, which changes speed and memory."""
    warmup_steps: Natural = 10
    """Steps of measuring before the first decision."""
    throttle_margin: PositiveShare = 0.85
    """Reduce the load when it exceeds this share of the optimum."""
    increase_margin: PositiveShare = 0.5
    """Raise the load while it is below this share of the optimum."""
    min_batch_size: Count = 1
    """Smallest load, in prompts."""
    max_batch_size: Count = 64
    """Largest load, in prompts."""
    peak_gflops: NotNegative = 0.0
    """Peak arithmetic of the device in GFLOP/s, which distinguishes memory-bound from compute-bound; 0 is unknown."""
    peak_bw_gb_s: NotNegative = 0.0
    """Peak memory bandwidth of the device in GB/s; 0 is unknown."""

    def issues(self) -> Iterator[ConfigIssue]:
        if self.min_batch_size > self.max_batch_size:
            keys = ("backpressure.min_batch_size", "backpressure.max_batch_size")
            message = f"is {self.min_batch_size}, above max_batch_size = {self.max_batch_size}"
            yield ConfigIssue(keys, message, f"min_batch_size = {self.max_batch_size}")


class Squeeze(Section, role=Role.RECORDS):
    """Analysis of the trained adapter's rank after the first run, and compression."""

    enabled: bool = True
    """Analyse the adapter of the first run."""
    runs: Literal["first", "one per condition"] = "first"
    """Adapters to analyse, compress and verify: that of the first run, or of the first run of every condition. Each
    adapter costs its evaluations."""
    min_variance_retention: PositiveShare = 0.95
    """Share of the energy (squared singular values) that a rank must keep on average over layers to be recommended."""
    min_layer_retention: PositiveShare = 0.9
    """Share of the energy that a recommended rank must keep in the worst layer."""
    target_ranks: OptionalRanks = None
    """Ranks to tabulate; unset or empty is the powers of two up to the adapter's rank."""
    compress_to: OptionalCount = None
    """Rank of the compressed adapter; unset or 0 is the recommended rank."""
    verify: Literal["all", "recommended", "off"] = "all"
    """Evaluate the adapter on the held-out problems at full rank and at every rank of the table (`all`), or only at the
    rank it is compressed to (`recommended`); each rank costs one evaluation of one run."""
    output_path: OptionalText = None
    """Directory for the compressed adapter; unset is `squeeze/` in the output directory."""
    device: Device = "cpu"
    """Device of the decomposition."""
    wandb: bool | None = None
    """Send the analysis to wandb as the run `squeeze-analysis`, where runs report to wandb; unset does so if the file
    has a [squeeze] section."""

    def issues(self) -> Iterator[ConfigIssue]:
        if self.runs != "first" and self.output_path is not None:
            message = f'has room for one adapter, and runs = "{self.runs}" compresses one of every condition, below '
            yield ConfigIssue(("squeeze.output_path", "squeeze.runs"), f"{message}squeeze/", 'runs = "first"')


class Resume(Section, role=Role.SAMPLES):
    """Continuation from another run's checkpoint."""

    from_: Annotated[OptionalText, Field(alias="from")] = None
    """Run directory or checkpoint directory to continue from. `retrain resume DIR` does the same without a file."""


class Logging(Section, role=Role.RECORDS):
    """Locations and names of records, and the trackers that receive them."""

    log_dir: OptionalText = None
    """Output directory; unset is `logs/` followed by the name of the TOML file."""
    mirror: Annotated[OptionalText, AfterValidator(_url)] = None
    """URL to which everything in the output directory is copied while it is written, such as
    `s3://bucket/experiments/gtpo`; `retrain resume URL` continues from the copy. Any protocol of fsspec."""
    report_to: Trackers = Field(default_factory=list)
    """Trackers besides the files, one or a list: supported names, or a `module:function` of your own that returns one.
    `wandb_project` adds wandb. `all` are the supported ones that are installed; `none` is none, even with a
    `wandb_project`."""
    logging_dir: OptionalText = None
    """Directory of tensorboard's files; unset is `tensorboard/` in each run's directory. Runs get subdirectories."""
    wandb_project: OptionalText = None
    """wandb project, and project of trackio. Unset is `retrain` for wandb; for trackio it is `[campaign] name`, else
    the name of the output directory."""
    wandb_run_name: OptionalText = None
    """wandb run name; unset is the condition's label. Runs of a campaign are named `<label>_s<seed>`, with
    `<wandb_run_name>_` in front if this is set."""
    wandb_entity: OptionalText = None
    """wandb team or user."""
    wandb_group: OptionalText = None
    """wandb and trackio group; unset is the condition's label in a campaign."""
    wandb_tags: Tags = Field(default_factory=list)
    """wandb tags, a list or separated by commas; a campaign adds the label and `seed<seed>`."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    """wandb mode; unset leaves it to wandb."""
    strategic_grams: Annotated[OptionalPhrases, ActiveIf("planning.detector", ("regex",)), Role.LEARNS] = None
    """Phrases that mark planning tokens and replace the built-in ones: a list, or separated by commas."""
    aliases: list[Tool] = Field(default_factory=lambda: list(get_args(Tool)))
    """Tools whose metric names are written as aliases, so that scripts made for them work."""
    rollouts_every: Natural = 10
    """Write the HTML page and the logtree of every n-th step, of the last one, and of every evaluation; 0 writes none.
    Summary lines of all trajectories are written at every step."""
    num_groups_to_log: Natural = 4
    """Groups whose texts appear on a page and in a logtree; numbers appear for all groups."""
    log_kl: bool = False
    """Record the KL divergence to the frozen base; costs one more forward pass."""

    @property
    def wandb(self) -> bool:
        return "wandb" in trackers(self.report_to, self.wandb_project)

    def issues(self) -> Iterator[ConfigIssue]:
        asked = self.report_to
        if self.logging_dir is not None and not {"tensorboard", "all"} & set(asked):
            fix = f"report_to = {[*(name for name in asked if name != 'none'), 'tensorboard']}".replace("'", '"')
            yield ConfigIssue(("logging.logging_dir", "logging.report_to"), "has no effect without tensorboard", fix)
        if self.rollouts_every == 0 and self.num_groups_to_log != type(self).model_fields["num_groups_to_log"].default:
            yield no_effect("logging.num_groups_to_log", "logging.rollouts_every", 0, "remove one of the two")
