"""[campaign] and [[campaign.conditions]]: what is compared, over which seeds."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field

from retrain.config.algorithm import AdvantageMode, TransformMode
from retrain.config.base import Count, Finding, Natural, OptionalText, Role, Section, Seed, fault
from retrain.config.modes import condition_label

RULE_KEYS = ("test", "sequential", "futility", "race", "prior_spread", "prior_freedom")
"""Keys that say by what rule conditions are compared, beside metric, margin, seeds and conditions."""
DECIDING_KEYS = ("primary_metric", "equivalence_margin", *RULE_KEYS)


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
        yield from sequential_rules(campaign)
        yield from test_rules(campaign)
        yield from _worker_findings(campaign)
    others, seeds = len(campaign.conditions) - 1, len(campaign.seeds)
    needed = seeds_for_verdict(others, campaign.test) if others else 0
    if seeds < needed:
        suggested = seeds_suggested(others, campaign.test)
        room = f", or {suggested} if one pair may disagree" if suggested > needed else ""
        yield Finding(
            ("campaign.seeds",),
            f"has {seeds}: too few for a verdict between {'two' if others == 1 else others + 1} conditions, "
            f"which takes at least {needed}{room}; type",
            f"seeds = {list(range(1, suggested + 1))}",
            warning=True,
        )
    elif campaign.test == "normal" and others > 0 and seeds < (exact := seeds_for_verdict(others)):
        yield Finding(
            ("campaign.seeds", "campaign.test"),
            f"has {seeds}: should a run collapse, the exact test decides, which takes {exact} for "
            f"{'one comparison' if others == 1 else f'{others} comparisons'}; to be able to tell then too, type",
            f"seeds = {list(range(1, exact + 1))}",
            warning=True,
        )


PERMUTED_MOST = 6
"""Comparisons of which a closed permutation test goes through all sets."""


def test_rules(campaign: Campaign) -> Iterator[Finding]:
    others = len(campaign.conditions) - 1
    if campaign.test == "permutation" and others > PERMUTED_MOST:
        yield Finding(
            ("campaign.test", "campaign.conditions"),
            f'is "permutation" with {others + 1} conditions: it goes through all sets of up to {PERMUTED_MOST} beside '
            "the baseline",
            'test = "exact"',
        )
    if campaign.prior_spread and (campaign.test != "normal" or others != 1 or campaign.sequential != "off"):
        yield Finding(
            ("campaign.prior_spread", "campaign.test"),
            'is set: an earlier spread counts for test = "normal" with two conditions and sequential = "off" only',
            "prior_spread = 0.0",
        )
    looks = campaign.sequential not in ("off", "always_valid")
    for key in ("futility", "race"):
        if getattr(campaign, key) and not looks:
            yield Finding(
                (f"campaign.{key}", "campaign.sequential"),
                f'is on with sequential = "{campaign.sequential}": it stops conditions at looks at a planned number '
                "of seeds",
                'sequential = "obrien_fleming"',
            )
    if campaign.race and others < 2:
        yield Finding(
            ("campaign.race", "campaign.conditions"),
            f"is on with {others + 1} condition{'s' if others else ''}: a race is among several beside the baseline; "
            "futility ends a comparison of two",
            "race = false",
        )


SEQUENTIAL_MOST = 20
"""Seeds that the exact sequential test goes through all sign patterns of."""


def sequential_rules(campaign: Campaign) -> Iterator[Finding]:
    """A stopping rule needs something to decide and enough seeds to decide it with."""
    others, seeds = len(campaign.conditions) - 1, len(campaign.seeds)
    if campaign.sequential == "off":
        return
    if others < 1:
        yield Finding(
            ("campaign.sequential", "campaign.conditions"),
            "is on, and there is one condition: nothing is compared that could be decided",
            'sequential = "off"',
        )
        return
    if campaign.test == "permutation" or (campaign.test == "normal" and campaign.sequential == "always_valid"):
        what = "signs" if campaign.sequential == "always_valid" else "the exact or the normal test"
        yield Finding(
            ("campaign.sequential", "campaign.test"),
            f'is "{campaign.sequential}" with test = "{campaign.test}": it looks by {what} only',
            'test = "exact"',
        )
        return
    if campaign.sequential == "always_valid":
        return
    # With n of n + 1 seeds the even rule may have spent n/(n + 1) of the error; the other rules need as many.
    first = next(n for n in count(1) if others * 2.0 ** -(n - 1) <= 0.05 * n / (n + 1))
    if campaign.test == "normal":
        first = NORMAL_FEWEST
    if not first < seeds <= SEQUENTIAL_MOST:
        yield Finding(
            ("campaign.sequential", "campaign.seeds"),
            f"is on with {seeds} seeds: it can decide after {first} at the earliest, so that it takes {first + 1} to "
            f"{SEQUENTIAL_MOST} to stop early",
            f"seeds = {list(range(1, first + 3))}",
        )
    if campaign.lanes != "auto" and campaign.lanes >= (others + 1) * seeds:
        yield Finding(
            ("campaign.sequential", "campaign.lanes"),
            f"is on and lanes = {campaign.lanes} trains all {(others + 1) * seeds} runs at once: nothing could be "
            "stopped",
            'lanes = "auto"',
        )
