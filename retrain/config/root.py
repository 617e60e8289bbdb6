"""Define the whole configuration: all sections, and which keys have an effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic.fields import FieldInfo

from retrain.config.algorithm import AlgorithmSection, Distillation, Gtpo, HicraSection, Planning, Sepa
from retrain.config.base import ActiveIf, ConfigIssue, Role, Section, is_plugin
from retrain.config.campaign import CampaignSection
from retrain.config.describe import no_effect
from retrain.config.evaluation import (
    CUTS,
    HELDOUT,
    OWN_DATA,
    Backpressure,
    EvaluationSection,
    EvaluationSet,
    Extent,
    HeldOut,
    Logging,
    Resume,
    Squeeze,
    part_evaluations,
    whole_evaluations,
)
from retrain.config.machine import BackendSection, Inference, Ray, Slurm
from retrain.config.tasks import TESTED, Audit, Data, EnvironmentSection, RewardComponent, RewardSection
from retrain.config.training import CriticSection, Lora, Model, Optimizer, Sampling, Training
from retrain.config.warmup import Warmup


class Config(Section):
    """Configuration of a run or a campaign. Attribute names are those of the TOML file."""

    campaign: CampaignSection = CampaignSection()
    ray: Ray = Ray()
    model: Model = Model()
    lora: Lora = Lora()
    optimizer: Optimizer = Optimizer()
    warmup: Warmup = Warmup()
    training: Training = Training()
    algorithm: AlgorithmSection = AlgorithmSection()
    gtpo: Gtpo = Gtpo()
    hicra: HicraSection = HicraSection()
    sepa: Sepa = Sepa()
    planning: Planning = Planning()
    critic: CriticSection = CriticSection()
    distillation: Distillation = Distillation()
    slurm: Slurm = Slurm()
    backend: BackendSection = BackendSection()
    inference: Inference = Inference()
    data: Data = Data()
    reward: RewardSection = RewardSection()
    audit: Audit = Audit()
    environment: EnvironmentSection = EnvironmentSection()
    evaluation: EvaluationSection = EvaluationSection()
    backpressure: Backpressure = Backpressure()
    squeeze: Squeeze = Squeeze()
    resume: Resume = Resume()
    logging: Logging = Logging()

    @property
    def is_campaign(self) -> bool:
        return "campaign" in self.model_fields_set

    def stream(self, use: Literal["init", "data", "sampling"]) -> tuple[int | str, ...]:
        """Return the seed prefix of a run's random generators for ``use``: campaign seed and run seed. The prefix never
        depends on the condition. If `[campaign] vary` names another use, all runs have the same prefix."""
        varies = self.campaign.vary in ("all", use)
        return (self.campaign.seed, self.training.seed if varies else "every seed")

    def evaluation_stream(self, step: int) -> tuple[int | str, ...]:
        """Return the seed prefix of held-out answers after ``step`` updates. Untrained runs share it, and therefore
        their answers."""
        return self.stream("sampling") if step else (self.campaign.seed, "base")

    @property
    def held_out(self) -> tuple[HeldOut, ...]:
        """Held-out sets with every value resolved, in order; none when evaluation is switched off."""
        sets = self.evaluation.sets or [EvaluationSet(name=HELDOUT)]
        return tuple(self.resolved(each) for each in sets) if self.evaluation.problems else ()

    def resolved(self, held_out: EvaluationSet) -> HeldOut:
        """Return the set with its unset keys taken from [evaluation], then from [training] and [data]."""
        evaluation, sections = self.evaluation, (held_out, self.evaluation, self.training)

        def sampled(key: str) -> Any:
            values = (getattr(section, key) for section in sections)
            return next(value for value in values if value is not None)

        keys = {key: key for key in OWN_DATA} | {"eval_source": "source", "eval_split": "split"}
        changed = {key: value for key, own in keys.items() if (value := getattr(held_out, own)) is not None}
        return HeldOut(
            name=held_out.name,
            problems=held_out.problems or evaluation.problems,
            samples=held_out.samples or evaluation.samples,
            sampling=Sampling(**{key: sampled(key) for key in ("max_tokens", "temperature", *CUTS)}),
            data=self.data.model_copy(update=changed) if changed else self.data,
        )

    def evaluation_after(self, step: int) -> Extent | None:
        """Return the extent of the evaluation once ``step`` ≥ 1 updates are done; None without one."""
        schedule, steps, every = self.evaluation.schedule, self.training.max_steps, self.training.eval_every
        if not self.evaluation.problems:
            return None
        if any(step in marks for marks in whole_evaluations(schedule, steps, every)):
            return "whole"
        return "part" if every and step % every == 0 else None

    @property
    def masks_per_update(self) -> bool:
        """True if `m2po` chooses its masks again before each of a step's several updates."""
        return self.algorithm.loss == "m2po" and self.training.several_updates

    @property
    def graders(self) -> tuple[tuple[str, RewardSection | RewardComponent | Audit], ...]:
        """All graders with the dotted name of their table: the reward, its components, and the audit."""
        parts = ((f"reward.components.{index}", part) for index, part in enumerate(self.reward.components))
        return ("reward", self.reward), *parts, ("audit", self.audit)

    @property
    def reward_models(self) -> tuple[str, ...]:
        return tuple(name for _, each in self.graders if each.type == "reward_model" and (name := each.reward_model))

    @property
    def tested(self) -> bool:
        """True if a grader runs programs against unit tests."""
        return any(each.type == "unit_tests" for _, each in self.graders)

    @property
    def graded_columns(self) -> tuple[str, ...]:
        """Columns besides the answer that decide grades: criteria of rubrics, and tests."""
        rubrics = sorted({column for _, each in self.graders if (column := each.rubric_column)})
        return (*rubrics, *(TESTED if self.tested else ()))

    @property
    def evaluated(self) -> tuple[HeldOut, ...]:
        """Everything that evaluations record under a name: the held-out sets, and their parts for the curve."""
        training = self.training
        parts = part_evaluations(self.evaluation.schedule, training.max_steps, training.eval_every)
        return (*self.held_out, *(each.part for each in self.held_out if parts))

    @property
    def decisive(self) -> HeldOut | None:
        """Held-out set that the primary metric is measured on, else the first; None without evaluation."""
        key = self.campaign.primary_metric.rpartition(":")[2] if self.is_campaign else ""
        named = key.split("/")[1] if key.startswith("eval/") else None
        return next((each for each in self.held_out if each.name == named), next(iter(self.held_out), None))

    @property
    def lane_ranks(self) -> int:
        """Sum of the ranks of all adapters that a run trains: the policy's, and the critic's if it is separate."""
        own = self.algorithm.critic and not self.critic.share_adapter
        return self.model.lora_rank + (own and (self.critic.lora_rank or self.model.lora_rank))

    @property
    def gpus_per_worker(self) -> int:
        """GPUs of each worker of an executor, at least one; with ranks, one per rank."""
        if self.backend.shard != "none" and self.backend.ranks != "auto":
            return self.backend.ranks
        return max(1, int(self.campaign.gpus_per_cohort))

    @property
    def base_parts(self) -> int:
        """Number of shards of the base that the configuration fixes; 1 where every device holds all of it."""
        if self.backend.shard != "fsdp2":
            return 1
        if self.backend.ranks == "auto" and self.campaign.executor == "inprocess":
            return max(1, len(self.backend.named_gpus))
        return self.gpus_per_worker

    @property
    def published_versions(self) -> int:
        """Versions of an adapter that are kept for sampling; servers keep one more, to detect stale ones."""
        return self.training.max_off_policy_steps + 1 + self.inference.served

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved configuration as plain JSON values; `parse_dict` of it equals this configuration."""
        return self.model_dump(mode="json")

    @model_validator(mode="after")
    def _squeeze_is_reported_where_it_is_written(self) -> Config:
        """If [squeeze] wandb is unset, set it to true if the file has a [squeeze] section, else to false. This must be
        stored, because a dump of the configuration has every section."""
        if self.squeeze.wandb is None:
            asked = self.squeeze.model_copy(update={"wandb": "squeeze" in self.model_fields_set})
            object.__setattr__(self, "squeeze", asked)  # sections are frozen
        return self

    @model_serializer(mode="wrap")
    def _without_absent_campaign(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped = handler(self)
        if not self.is_campaign:
            dumped.pop("campaign", None)
        return dumped


@cache
def sections() -> dict[str, type[Section]]:
    return {name: field.annotation for name, field in Config.model_fields.items()}  # type: ignore[misc]


@cache
def keys() -> dict[str, FieldInfo]:
    """Return every key of every section by dotted TOML name."""
    return {
        f"{section}.{key}": field for section, table in sections().items() for key, field in fields_of(table).items()
    }


def fields_of(table: type[Section]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in table.model_fields.items()}


def listed(field: FieldInfo) -> type[Section] | None:
    """Return the section class of a key that is a list of tables; None for other keys."""
    inner = next(iter(get_args(field.annotation)), None) if get_origin(field.annotation) is list else None
    return inner if isinstance(inner, type) and issubclass(inner, Section) else None


@cache
def lists() -> dict[str, type[Section]]:
    """Return the section class of every key that is a list of tables, nested ones included, by dotted TOML name."""
    tables: dict[str, type[Section]] = {}
    waiting = list(keys().items())
    for dotted, field in waiting:
        if table := listed(field):
            tables[dotted] = table
            waiting += [(f"{dotted}.{name}", inner) for name, inner in fields_of(table).items()]
    return tables


def homes(name: str) -> list[str]:
    """Return the dotted keys that ``name`` without a section can mean. A key of [audit] or [warmup] counts only if no
    other section has it. If two keys remain, a key of [critic] does not count."""
    found = [dotted for dotted in keys() if dotted.partition(".")[2] == name]
    named = [dotted for dotted in found if not dotted.startswith(("audit.", "warmup."))] or found
    return [dotted for dotted in named if len(named) != 2 or not dotted.startswith("critic.")]


def role_of(dotted: str) -> Role | None:
    """Return the role of ``section.key``, or of the key that contains the path; None for an unknown key."""
    section, _, rest = dotted.partition(".")
    return sections()[section].roles().get(rest.partition(".")[0]) if section in sections() else None


def defines_run(dotted: str) -> bool:
    """Return whether another value of ``section.key`` defines another run, rather than other records or names."""
    role = role_of(dotted)
    return role is None or role not in Role.RECORDS | Role.NAMES


def flat(tree: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the (dotted key, value) of every value in nested mappings."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def value_at(config: Config, dotted: str) -> Any:
    """Return the value of ``section.key``, or, for a name without a dot, of a property of ``config``."""
    section, _, key = dotted.partition(".")
    if not key:
        return getattr(config, section)
    return getattr(getattr(config, section), "from_" if key == "from" else key)


def unused(config: Config, dotted: str, override: bool = False) -> ConfigIssue | None:
    """Return the issue that the key ``dotted`` has no effect in this run, or None. ``override``: a condition overrides
    the key, so it must change the training."""
    for marker in keys()[dotted].metadata:
        if isinstance(marker, ActiveIf) and (override or not marker.training_only):
            value = value_at(config, marker.key)
            if marker.unless and value_at(config, marker.unless):
                continue
            if value not in marker.values and not (marker.plugins and is_plugin(value)):
                other, wanted = marker.key.partition(".")[2], marker.values[0]
                fix = "remove one of the two" if wanted is None else f'remove the line, or {other} = "{wanted}"'
                return no_effect(dotted, marker.key, value, fix)
    return None


@cache
def _defaults() -> dict[str, object]:
    default = Config()
    return {dotted: value_at(default, dotted) for dotted in keys()}


def differs(config: Config, dotted: str) -> bool:
    return value_at(config, dotted) != _defaults()[dotted]


def differing(config: Config) -> dict[str, object]:
    return {dotted: value_at(config, dotted) for dotted in keys() if differs(config, dotted)}


def effective(config: Config) -> dict[str, object]:
    """Return the values, by dotted key, that differ from the defaults and have an effect."""
    return {dotted: value for dotted, value in differing(config).items() if unused(config, dotted) is None}


def without_unused(config: Config) -> dict[str, Any]:
    """Return the dump of the configuration with keys that have no effect reset to their defaults."""
    dumped = config.model_dump()
    for dotted in differing(config).keys() - effective(config):
        section, _, key = dotted.partition(".")
        dumped[section][key] = _defaults()[dotted]
    return dumped
