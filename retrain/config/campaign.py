"""[campaign] and [[campaign.conditions]]: what is compared, over which seeds."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from retrain.config.algorithm import AdvantageMode, TransformMode
from retrain.config.base import Count, Finding, Natural, OptionalText, Role, Section, Seed, fault
from retrain.config.modes import condition_label

DECIDING_KEYS = ("primary_metric", "equivalence_margin", "sequential")
"""Keys that say what is compared by which rule, beside seeds and conditions."""
FEWEST_SEEDS, FEWEST_INTERIM_SEEDS, SUGGESTED_SEEDS = 6, 8, 10
"""Seeds that a verdict needs, seeds from which there is an interim analysis, and what to plan."""
MOST_COMPARISONS = 8
"""Comparisons with the baseline up to which the error of the rule was simulated."""


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


def _interim(value: object) -> object:
    if value in ("linear", "pocock", "obrien_fleming", "square", "always_valid"):
        raise fault(f'is "{value}": there is one interim analysis, and no rule to choose', 'sequential = "on"')
    return value


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
        return condition_label(self.advantage_mode, self.transform_mode, self.overrides)


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
    the comparison can conclude that typical runs are alike within it; unset, it never does."""
    sequential: Annotated[Literal["on", "off"], BeforeValidator(_interim)] = "on"
    """Analyse once before the end: after half of the seeds, seven at least, a condition that is better or worse trains
    no further. Needs 8 seeds; with fewer it changes nothing. No seed after the interim analysis begins before it,
    unless `lanes` is a number."""
    allow_confounded: bool = False
    """Permit settings that let conditions differ in more than what is compared."""
    conditions: Annotated[list[Condition], Field(min_length=1)] = Field(default_factory=_standard)
    """What is compared; without any, the five standard conditions."""

    @property
    def workers_per_gpu(self) -> int:
        """How many workers share a GPU, where there are several processes; 1 where each has one or more to itself."""
        return max(1, int(1 / self.gpus_per_cohort + 1e-9))


def _worker_findings(campaign: Campaign) -> Iterator[Finding]:
    """Keys of workers need an executor that has some."""
    executor, fix = campaign.executor, 'remove the line, or executor = "processes"'
    if executor == "inprocess" and campaign.workers != "auto":
        yield Finding(("campaign.workers", "campaign.executor"), f'has no effect with executor = "{executor}"', fix)
    keys = ("campaign.gpus_per_cohort", "campaign.executor")
    if executor == "inprocess" and campaign.gpus_per_cohort != 1:
        yield Finding(keys, f'has no effect with executor = "{executor}"', fix)
    if executor == "slurm" and campaign.gpus_per_cohort < 1:
        words = f"is {campaign.gpus_per_cohort:g}, and a job of Slurm's has whole GPUs"
        yield Finding(keys, words, "gpus_per_cohort = 1")


def campaign_rules(campaign: Campaign, is_run: bool) -> Iterator[Finding]:
    """What a comparison needs. ``is_run``: this is one resolved run of a campaign, which compares nothing itself."""
    if not is_run:
        yield from _worker_findings(campaign)
    comparisons, seeds = len(campaign.conditions) - 1, len(campaign.seeds)
    if comparisons and seeds < FEWEST_SEEDS:
        yield Finding(
            ("campaign.seeds",),
            f"has {seeds}: too few for a verdict, which takes {FEWEST_SEEDS} at least; type",
            f"seeds = {list(range(1, SUGGESTED_SEEDS + 1))}",
            warning=True,
        )
    if comparisons > MOST_COMPARISONS:
        yield Finding(
            ("campaign.conditions",),
            f"are {comparisons + 1}: {comparisons} comparisons share one error of 5 %, which was simulated up to "
            f"{MOST_COMPARISONS}, and little power is left for each; split the question into",
            "campaigns with a baseline and up to 8 conditions each",
            warning=True,
        )
