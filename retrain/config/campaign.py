"""[campaign] and [[campaign.conditions]]: conditions, seeds, executor and the declared comparison."""

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from retrain.config.algorithm import AdvantageMode, TransformMode
from retrain.config.base import ConfigIssue, Count, Natural, OptionalText, Role, Section, Seed, fault
from retrain.config.describe import no_effect
from retrain.config.modes import condition_label

DECIDING_KEYS = ("primary_metric", "equivalence_margin", "sequential")
"""Keys, besides seeds and conditions, that define the declared comparison."""
FEWEST_SEEDS, FEWEST_INTERIM_SEEDS, SUGGESTED_SEEDS = 6, 8, 10
"""Fewest seeds for a verdict, fewest seeds for an interim analysis, and the number suggested to users."""
MOST_COMPARISONS = 8
"""Most comparisons with the baseline for which the family-wise error was simulated."""


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

    Overrides are stored as tables by section; a file may also write them with dots (`"sepa.steps" = 50`) or, when only
    one section has such a key, bare (`lr = 1e-4`).
    """

    model_config = ConfigDict(extra="allow")

    advantage_mode: AdvantageMode
    """Same values as in [algorithm]."""
    transform_mode: TransformMode
    """Same values as in [algorithm]."""

    @property
    def overrides(self) -> dict[str, object]:
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


def find_label(name: str, labels: Iterable[str]) -> str | None:
    """Return the label that equals ``name`` or whose ``condition_name`` does, or None."""
    return next((label for label in labels if name in (label, condition_name(label))), None)


def _standard() -> list[Condition]:
    credits: tuple[TransformMode, ...] = ("none", "gtpo", "gtpo_hicra", "gtpo_sepa")
    maxrl = [Condition(advantage_mode="maxrl", transform_mode=credit) for credit in credits]
    return [Condition(advantage_mode="grpo", transform_mode="none"), *maxrl]


class CampaignSection(Section, role=Role.NAMES):
    """Conditions × seeds. A file with this section is a campaign; the other sections are its base configuration."""

    name: OptionalText = None
    """Name in reports; unset is the name of the file."""
    seeds: Annotated[list[Seed], Field(min_length=1), AfterValidator(_distinct)] = Field(
        default_factory=lambda: list(range(1, 9))
    )
    """Seeds of the runs of every condition: the replicates of the comparison, paired across conditions."""
    max_steps: Natural | None = None
    """Optimizer steps of every run; replaces `[training] max_steps`."""
    lanes: Literal["auto"] | Count = "auto"
    """Runs that train together over one copy of the frozen base; `auto` fits them to memory and to the workers."""
    executor: Literal["inprocess", "processes", "ray", "slurm"] = "inprocess"
    """Program that trains cohorts: the started process, one after another (`inprocess`), or several `workers` side by
    side, as processes of this machine (`processes`), on the nodes of a Ray cluster (`ray`, see `[ray]`) or as jobs of a
    Slurm cluster (`slurm`, see `[slurm]`). All compute the same; a campaign may be resumed with another executor."""
    workers: Literal["auto"] | Count = "auto"
    """Processes that train cohorts side by side; `auto` is one for each of `[backend] devices`. A GPU has one worker,
    or as many as `gpus_per_cohort` implies; the CPU counts as one device, whose cores and memory the workers share
    evenly. On a Ray cluster, `auto` is one per GPU, or one per `[ray] cpus` CPUs where it has none; a number waits for
    free resources. `slurm` requires a number."""
    gpus_per_cohort: Annotated[float, Field(ge=0.01), AfterValidator(_gpu_share)] = 1.0
    """GPUs of each worker. With 0.5, two workers train on each GPU with half of its memory each (not with `slurm`).
    With 4 and `[backend] shard`, a worker has four GPUs and starts a rank on each."""
    max_restarts: Natural = 3
    """With `workers`: number of times that a cohort whose process died is restarted from its last checkpoints before
    its runs count as failed."""
    seed: Annotated[Seed, Role.LEARNS | Role.NAMES] = 0
    """Seed of the campaign, part of every random stream. Another value repeats everything with fresh randomness."""
    vary: Annotated[Literal["all", "init", "data", "sampling"], Role.LEARNS | Role.SAMPLES] = "all"
    """Randomness that differs between the seeds of a condition: `all`; the initial adapter and critic (`init`), with
    the same problems in the same order and the same random numbers for every answer; the order of the problems
    (`data`); or the random numbers of answers, evaluation and everything else that is drawn (`sampling`). With another
    value than `all`, the spread over seeds, and so the verdict, covers that source of noise only."""
    primary_metric: Annotated[str, AfterValidator(_measure)] = "final"
    """Metric that decides the comparison, declared before training: `final` (held-out accuracy after the last update),
    `last3` (its mean over the last three evaluations, which `[evaluation] schedule = "verdict"` makes after about 80,
    90 and 100 % of the steps), `auc` (mean height of its curve over steps, which needs `eval_every`), or one of them
    with another metric, as in `final:pass@4`, `last3:pass@4`, `auc:reward_mean`, `final:completions/mean_length`. With
    `[[evaluation.sets]]` these refer to the first set; `eval/<name>/correct_rate` and `auc:eval/<name>/pass@4` name
    another. Without held-out problems, `final` is the correct rate of training."""
    equivalence_margin: Annotated[float, Field(gt=0)] | None = None
    """Largest difference that does not matter, in the unit of the metric (0.02 is 2 points of accuracy). If it is set,
    the comparison can conclude that typical runs are equivalent within this margin; unset, it never does."""
    sequential: Annotated[Literal["on", "off"], BeforeValidator(_interim)] = "on"
    """One interim analysis after half of the seeds, seven at least: a condition that is better or worse by then trains
    no further. Needs 8 seeds; with fewer it has no effect. Later seeds start after the interim analysis, unless `lanes`
    is a number."""
    allow_confounded: bool = False
    """Permit settings with which conditions differ in more than what is compared."""
    conditions: Annotated[list[Condition], Field(min_length=1)] = Field(default_factory=_standard)
    """Conditions to compare; without any, the five standard ones."""

    @property
    def workers_per_gpu(self) -> int:
        """Number of worker processes that share one GPU; 1 if each has one GPU or more to itself."""
        return max(1, int(1 / self.gpus_per_cohort + 1e-9))


def campaign_rules(campaign: CampaignSection, is_run: bool) -> Iterator[ConfigIssue]:
    """Report worker keys that the executor does not use, too few seeds and too many conditions. ``is_run``: one planned
    run, whose worker keys are not checked."""
    executor, fix = campaign.executor, 'remove the line, or executor = "processes"'
    for key, default in (("workers", "auto"), ("gpus_per_cohort", 1)):
        if not is_run and executor == "inprocess" and getattr(campaign, key) != default:
            yield no_effect(f"campaign.{key}", "campaign.executor", executor, fix)
    if not is_run and executor == "slurm" and campaign.gpus_per_cohort < 1:
        message = f"is {campaign.gpus_per_cohort:g}, and a job of Slurm's has whole GPUs"
        yield ConfigIssue(("campaign.gpus_per_cohort", "campaign.executor"), message, "gpus_per_cohort = 1")
    comparisons, seeds = len(campaign.conditions) - 1, len(campaign.seeds)
    if comparisons and seeds < FEWEST_SEEDS:
        message = f"has {seeds}: too few for a verdict, which takes {FEWEST_SEEDS} at least; type"
        yield ConfigIssue(("campaign.seeds",), message, f"seeds = {list(range(1, SUGGESTED_SEEDS + 1))}", warning=True)
    if comparisons > MOST_COMPARISONS:
        message = f"are {comparisons + 1}: {comparisons} comparisons share one error of 5 %, which was simulated up to "
        message += f"{MOST_COMPARISONS}, and little power is left for each; split the question into"
        fix = "campaigns with a baseline and up to 8 conditions each"
        yield ConfigIssue(("campaign.conditions",), message, fix, warning=True)
