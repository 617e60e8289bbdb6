"""[backpressure], [squeeze], [resume], [logging]: what goes on around the learning."""

import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from os.path import abspath
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field

from retrain.config.base import (
    Count,
    Device,
    Finding,
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
    Trackers,
    UsedWhen,
    fault,
)
from retrain.config.describe import no_effect

Tool = Literal["tinker", "trl", "telescope", "retrain"]
KNOWN_TRACKERS = ("wandb", "tensorboard", "trackio")


def trackers(report_to: Sequence[str], wandb_project: str | None) -> list[str]:
    """The trackers that runs report to: ``all`` are the known ones that are installed, a project means wandb too."""
    if "none" in report_to:
        return []
    asked = [name for name in KNOWN_TRACKERS if find_spec(name)] if "all" in report_to else list(report_to)
    return list(dict.fromkeys([*asked, *(["wandb"] if wandb_project else [])]))


def _url(value: str | None) -> str | None:
    if value is None or re.match(r"[a-z][a-z0-9+.-]*://[^/]*/?.", value):
        return value
    raise fault(f'is "{value}", and that is no URL', f'mirror = "file://{abspath(value)}"')


class Backpressure(Section):
    """Adapting the load to what the hardware can take (Universal Scalability Law)."""

    role: ClassVar[Role] = Role.SPEED

    enabled: bool = False
    """Measure throughput and adapt."""
    target: Literal["concurrency", "batch_size"] = "concurrency"
    """What is adapted. `concurrency`: how many prompts decode at once, which changes speed and memory only."""
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
    """Peak arithmetic of the device in GFLOP/s, for telling memory-bound from compute-bound; 0 is unknown."""
    peak_bw_gb_s: NotNegative = 0.0
    """Peak memory bandwidth of the device in GB/s; 0 is unknown."""

    def findings(self) -> Iterator[Finding]:
        """The smallest load is not above the largest."""
        if self.min_batch_size > self.max_batch_size:
            yield Finding(
                ("backpressure.min_batch_size", "backpressure.max_batch_size"),
                f"is {self.min_batch_size}, above max_batch_size = {self.max_batch_size}",
                f"min_batch_size = {self.max_batch_size}",
            )


class Squeeze(Section):
    """Analysis of the trained adapter's rank after the first run, and compression."""

    role: ClassVar[Role] = Role.RECORDS

    enabled: bool = True
    """Analyse the first run's adapter."""
    runs: Literal["first", "one per condition"] = "first"
    """Whose adapters are analysed, compressed and verified: that of the first run alone, or of the first one of every
    condition, where more than one adapter is to be known. Each costs its evaluations."""
    min_variance_retention: PositiveShare = 0.95
    """Energy that a rank must keep on average over layers to be recommended."""
    min_layer_retention: PositiveShare = 0.9
    """Energy that it must keep in the worst layer."""
    target_ranks: OptionalRanks = None
    """Ranks to tabulate; unset or empty is the powers of two up to the adapter's rank."""
    compress_to: OptionalCount = None
    """Rank of the compressed adapter; unset or 0 is the recommended rank."""
    verify: Literal["all", "recommended", "off"] = "all"
    """Evaluate the adapter on the held-out problems at every rank of the table (`all`), or at the one it is
    compressed to, beside the full one; each rank costs one evaluation of one run."""
    output_path: OptionalText = None
    """Directory for the compressed adapter; unset is `squeeze/` in the output directory."""
    device: Device = "cpu"
    """Where the decomposition runs."""
    wandb: bool | None = None
    """Whether the analysis becomes a wandb run of its own, `squeeze-analysis`, where runs report to wandb; unset is
    whether the file has a [squeeze] section."""

    def findings(self) -> Iterator[Finding]:
        """One directory holds one compressed adapter."""
        if self.runs != "first" and self.output_path is not None:
            yield Finding(
                ("squeeze.output_path", "squeeze.runs"),
                f'has room for one adapter, and runs = "{self.runs}" compresses one of every condition, below squeeze/',
                'runs = "first"',
            )


class Resume(Section):
    """Starting from what another run left."""

    role: ClassVar[Role] = Role.SAMPLES

    from_: Annotated[OptionalText, Field(alias="from")] = None
    """Run directory or checkpoint directory to continue from. `retrain resume DIR` does the same without a file."""


class Logging(Section):
    """Where records go, and under which names."""

    role: ClassVar[Role] = Role.RECORDS

    log_dir: OptionalText = None
    """Output directory; unset is `logs/` and the name of the TOML file."""
    mirror: Annotated[OptionalText, AfterValidator(_url)] = None
    """URL below which everything in the output directory is copied while it is written, such as
    `s3://bucket/experiments/gtpo`; `retrain resume URL` goes on from the copy. Any protocol of fsspec."""
    report_to: Trackers = Field(default_factory=list)
    """Trackers besides the files, one or a list: known ones, or `module:function` that returns one of your own.
    Setting `wandb_project` is enough for wandb. `all` are the known ones that are installed; `none` is none, also
    with a `wandb_project`."""
    logging_dir: OptionalText = None
    """Directory of tensorboard's files; unset is `tensorboard/` in each run's directory. The runs of a campaign have
    a directory each in it."""
    wandb_project: OptionalText = None
    """wandb project; unset is `retrain`. Also the project of trackio; unset is `[campaign] name`, else the name of the
    output directory."""
    wandb_run_name: OptionalText = None
    """wandb run name; unset is the condition's label. The runs of a campaign are called `<label>_s<seed>`, and
    `<wandb_run_name>_<label>_s<seed>` where this is set."""
    wandb_entity: OptionalText = None
    """wandb team or user."""
    wandb_group: OptionalText = None
    """wandb and trackio group; unset it is the condition's label in a campaign."""
    wandb_tags: Tags = Field(default_factory=list)
    """wandb tags, a list or separated by commas; a campaign adds the label and `seed<seed>`."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    """wandb mode; unset leaves it to wandb."""
    strategic_grams: Annotated[OptionalPhrases, UsedWhen("planning.detector", ("regex",)), Role.LEARNS] = None
    """Phrases that mark planning tokens, in place of the built-in ones: a list, or separated by commas."""
    aliases: list[Tool] = Field(default_factory=lambda: list(get_args(Tool)))
    """Whose names for metrics are written besides ours, so that scripts made for those tools work."""
    rollouts_every: Natural = 10
    """Write the page and the logtree of every n-th step, of the last one, and of every evaluation; 0 writes none.
    The summary lines of all trajectories are written at every step."""
    num_groups_to_log: Natural = 4
    """Groups of a page and logtree that appear with their texts; what is known of the others in numbers always does."""
    log_kl: bool = False
    """Record the KL divergence to the frozen base; costs one more forward pass."""

    @property
    def wandb(self) -> bool:
        return "wandb" in trackers(self.report_to, self.wandb_project)

    def findings(self) -> Iterator[Finding]:
        """What is chosen for pages or for tensorboard needs them."""
        asked = self.report_to
        if self.logging_dir is not None and not {"tensorboard", "all"} & set(asked):
            fix = f"report_to = {[*(name for name in asked if name != 'none'), 'tensorboard']}".replace("'", '"')
            yield Finding(("logging.logging_dir", "logging.report_to"), "has no effect without tensorboard", fix)
        if self.rollouts_every == 0 and self.num_groups_to_log != Logging.model_fields["num_groups_to_log"].default:
            yield no_effect("logging.num_groups_to_log", "logging.rollouts_every", 0, "remove one of the two")
