"""[campaign] and [[campaign.conditions]]: what is compared, over which seeds. [backpressure], [squeeze], [resume],
[logging]: what goes on around the learning."""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from os.path import abspath
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, ConfigDict, Field

from retrain.config.algorithm import AdvantageMode, TransformMode
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
    Seed,
    Tags,
    Trackers,
    UsedWhen,
    fault,
)
from retrain.config.describe import no_effect

LABEL_MAX = 120
"""A run directory is named label_s<seed>; file systems allow 255 bytes."""

RULE_KEYS = ("test", "sequential", "futility", "race", "prior_spread", "prior_freedom")
"""Keys that say by what rule conditions are compared, beside metric, margin, seeds and conditions."""

SHORT = ("training", "algorithm", "model")
"""Sections whose keys stand in a label without their section."""


def _distinct(seeds: list[int]) -> list[int]:
    twice = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    if twice:
        rest = ", ".join(str(seed) for seed in dict.fromkeys(seeds))
        raise fault(f"has {twice[0]} twice: the seed is the replicate, so each may stand once", f"seeds = [{rest}]")
    return seeds


def _measure(text: str) -> str:
    if re.fullmatch(r"((final|last3|auc)(:[^\s:]+)?|eval/[^\s:]+)", text) is None:
        raise fault(
            f'is "{text}": not final, last3 or auc, alone or with a metric after a colon, nor a key eval/…',
            'primary_metric = "final"',
        )
    return text


def _gpu_share(value: float) -> float:
    if value > 1 and value % 1:
        raise fault(f"is {value:g}: a cohort has a part of one GPU, or whole GPUs", f"gpus_per_cohort = {round(value)}")
    return value


class Condition(Section):
    """One condition: its two modes, and any further key as an override of the base configuration.

    Overrides are kept as tables, section by section; a file may also write them with dots (`"sepa.steps" = 50`)
    or, when only one section has such a key, bare (`lr = 1e-4`).
    """

    model_config = ConfigDict(extra="allow")

    advantage_mode: AdvantageMode
    """As in [algorithm]."""
    transform_mode: TransformMode
    """As in [algorithm]."""

    @property
    def overrides(self) -> dict[str, Any]:
        tables = self.model_extra or {}
        flat = {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}
        return dict(sorted(flat.items()))

    @property
    def label(self) -> str:
        """`advantage_mode+transform_mode`, then `~key=value` for each override; safe as a file name."""
        return label(self.advantage_mode, self.transform_mode, self.overrides)


def _safe(value: Any) -> str:
    """The value as a piece of a file name."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, list | tuple):
        text = "-".join(_safe(item) for item in value)
    else:
        text = str(value)
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text) or "-"


def label(advantage_mode: str, transform_mode: str, overrides: dict[str, Any]) -> str:
    """The condition's name in files, tables and trackers."""
    parts = []
    for dotted, value in overrides.items():
        section, _, key = dotted.partition(".")
        parts.append(f"{key if section in SHORT else dotted}={_safe(value)}")
    text = "~".join([f"{_safe(advantage_mode)}+{_safe(transform_mode)}", *sorted(parts)])
    if len(text) > LABEL_MAX:
        digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        text = f"{text[: LABEL_MAX - len(digest) - 1]}-{digest}"
    return text


def condition_name(label: str) -> str:
    """Return the label without ``+none``, for tables and sentences. Directories, files and run ids keep the label."""
    return re.sub(r"^([^+~@]+)\+none(?=[~@]|$)", r"\1", label)


def with_condition_names(report: Any, labels: Iterable[str]) -> Any:
    """Return a copy of plain data with these labels replaced by their ``condition_name``, as keys and as values."""
    names = {label: condition_name(label) for label in labels}

    def renamed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {names.get(key, key): renamed(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [renamed(each) for each in value]
        return names.get(value, value) if isinstance(value, str) else value

    return renamed(report)


def find_label(name: str, labels: Iterable[str]) -> str | None:
    """Return the label that equals ``name`` or whose ``condition_name`` does, or None."""
    return next((label for label in labels if name in (label, condition_name(label))), None)


def transform_of(label: str) -> str:
    """The transform mode of the condition with this label."""
    return label.partition("~")[0].partition("+")[2]


def _standard() -> list[Condition]:
    pairs: tuple[tuple[AdvantageMode, TransformMode], ...] = (
        ("grpo", "none"),
        ("maxrl", "none"),
        ("maxrl", "gtpo"),
        ("maxrl", "gtpo_hicra"),
        ("maxrl", "gtpo_sepa"),
    )
    return [Condition(advantage_mode=advantage, transform_mode=transform) for advantage, transform in pairs]


class Campaign(Section):
    """Conditions × seeds. A file with this section is a campaign, all other sections are its base configuration."""

    role: ClassVar[Role] = Role.NAMES

    name: OptionalText = None
    """Name in reports; unset is the name of the file."""
    seeds: Annotated[list[Seed], Field(min_length=1), AfterValidator(_distinct)] = Field(
        default_factory=lambda: list(range(1, 9))
    )
    """Seeds of the runs of every condition: the replicates of the comparison, paired across conditions."""
    max_steps: Count | None = None
    """Optimizer steps of every run; replaces `[training] max_steps`."""
    lanes: Literal["auto"] | Count = "auto"
    """Runs that train together over one copy of the frozen base; `auto` fits them to memory, and to the workers."""
    executor: Literal["inprocess", "processes", "ray", "slurm"] = "inprocess"
    """Where cohorts train: one after the other in the process that was started (`inprocess`), or side by side in
    `workers` of their own, as processes of this machine (`processes`), on the nodes of a Ray cluster (`ray`, see
    `[ray]`) or as jobs of a Slurm cluster (`slurm`, see `[slurm]`). What is computed is the same; a campaign may be
    resumed with another."""
    workers: Literal["auto"] | Count = "auto"
    """Processes that train cohorts side by side; `auto` is one for each of `[backend] devices`. A GPU has one, or as
    many as `gpus_per_cohort` says; a CPU counts as one device, and its cores and memory are shared evenly by as many
    as are asked for. On a Ray cluster, `auto` is one for each GPU that it has, or for every `[ray] cpus` of its CPUs
    where it has none; a number waits for room. With `slurm`, how many are asked of it, which has to be said."""
    gpus_per_cohort: Annotated[float, Field(ge=0.01), AfterValidator(_gpu_share)] = 1.0
    """GPUs for each worker. With 0.5 two workers train on each GPU, each with half of its memory (not with `slurm`).
    With 4 and `[backend] shard` a worker has four, and starts a rank on each."""
    max_restarts: Natural = 3
    """With `workers`: how often a cohort whose process died goes on in a new one, from its last checkpoints, before
    its runs have failed."""
    seed: Annotated[Seed, Role.LEARNS | Role.NAMES] = 0
    """Seed of the campaign, part of every random stream. Another value repeats everything with fresh randomness."""
    vary: Annotated[Literal["all", "init", "data", "sampling"], Role.LEARNS | Role.SAMPLES] = "all"
    """What the seeds of a condition differ in: everything; the initial adapter (and critic) alone, with the same
    problems in the same order and the same random numbers for every answer; the order of the problems alone; or the
    sampling alone (answers, their evaluation, and whatever else is drawn on the way). The spread over seeds is then the
    noise that comes from there, and a verdict speaks of no other."""
    primary_metric: Annotated[str, AfterValidator(_measure)] = "final"
    """What decides the comparison, declared before anything is seen: `final` (held-out accuracy after the last
    update), `last3` (its mean over the last three evaluations, which `[evaluation] schedule = "verdict"` makes after
    about 80, 90 and 100 % of the steps), `auc` (mean height of its curve over steps, which needs `eval_every`), or one
    of them with another metric, as in `final:pass@4`, `last3:pass@4`, `auc:reward_mean`,
    `final:completions/mean_length`. With `[[evaluation.sets]]` these speak of the first set, and
    `eval/<name>/correct_rate`, `auc:eval/<name>/pass@4` of another. Without held-out problems, `final` is the correct
    rate of training."""
    equivalence_margin: Annotated[float, Field(gt=0)] | None = None
    """Differences smaller than this do not matter, in the unit of the metric (0.02 is 2 points of accuracy). With it,
    the comparison can conclude that there is no difference that matters; unset, it never does."""
    test: Literal["exact", "normal", "permutation"] = "exact"
    """What decides: `exact` sign flips of the paired differences with Holm's correction, `normal` t by the residual
    that all conditions share with step-down Dunnett (fewer seeds; a collapsed run hands over to the exact test), or
    closed `permutation` within seeds (a family steps down without any distribution; no looks)."""
    sequential: Literal["off", "linear", "pocock", "obrien_fleming", "square", "always_valid"] = "off"
    """Stop a condition early when it is decided: a look after every whole seed by the declared test, which spends its
    error of 5 % over the looks, evenly (`linear`), earlier (`pocock`), mostly at the end (`obrien_fleming`) or as the
    square of the share of seeds (`square`). Up to 20 seeds; two seeds train at a time unless `lanes` says otherwise.
    `always_valid` plans no number: seeds may be added whenever you like, for 30 to 90 % more of them."""
    futility: bool | Annotated[float, Field(gt=0, lt=1)] = False
    """Stop a condition, from half of the seeds on, whose chance of showing a difference at the end is below this;
    `true` is 0.2. Needs looks. "Stopped for futility" says nothing about equivalence."""
    race: bool = False
    """With looks: a condition leaves from the second seed on when its chance of beating the baseline at the end is
    below `futility` (0.2 when that is off); one seed trains at a time unless `lanes` says otherwise. Error stays
    below 5 %; what is lost is the power to call a condition worse."""
    prior_spread: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of a paired difference in earlier campaigns, in the unit of the metric (0.04 is 4 points of
    accuracy), for `test = "normal"` with two conditions and no looks; 0 is none. The spread that decides is never
    below the observed one."""
    prior_freedom: Annotated[int, Field(ge=1, le=8)] = 4
    """How many degrees of freedom `prior_spread` counts for: pairs it was measured with less one."""
    allow_confounded: bool = False
    """Permit settings that let conditions differ in more than what is compared."""
    conditions: Annotated[list[Condition], Field(min_length=1)] = Field(default_factory=_standard)
    """What is compared; without any, the five standard conditions."""

    @property
    def workers_per_gpu(self) -> int:
        """How many workers share a GPU, where there are several processes; 1 where each has one or more to itself."""
        return max(1, int(1 / self.gpus_per_cohort + 1e-9))


def seeds_for_verdict(others: int, test: str = "exact") -> int:
    """Fewest seeds with which this test can reach p = 0.05 when so many conditions are compared with the baseline.

    For exact sign flips others · 2^−(n−1) ≤ 0.05, Holm's correction for the first of them; a closed permutation test
    tests each condition alone as well, without a correction; the normal test begins at three.
    """
    if test == "normal":
        return NORMAL_FEWEST
    return 1 + math.ceil(math.log2((1 if test == "permutation" else others) / 0.05))


def seeds_suggested(others: int, test: str = "exact") -> int:
    """What to plan: one more than the fewest, with which a difference is found only if every pair shows it; five for
    the normal test."""
    return 5 if test == "normal" else seeds_for_verdict(others, test) + 1


NORMAL_FEWEST = 3
"""Seeds with which the normal test begins."""


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
