"""Define what sections are declared with: bounded types, markers of fields, issues that rules report.

Each key is declared once, in its section: type, default, bounds and markers in the annotation, meaning in the
docstring. Markers: `Role` (what the key decides, if it differs from its section's), `ActiveIf` (condition under which
it has an effect) and `UnsupportedValues` (values of other tools, with what to type instead).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Flag, auto
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

INT_MAX = 2**31 - 1
DEVICE_PATTERN = r"^(auto|cpu|gpu:\d{1,3})$"
DEVICES_PATTERN = r"^(auto|all|cpu|gpu:\d{1,3}(-\d{1,3})?)$"
GPU_PATTERN = r"^gpu:\d{1,3}$"
PLUGIN_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"


class Role(Flag):
    """Marker that says what a key changes. Fingerprints, changes allowed on resume, pooling of runs, sharing of bases
    and evaluations, and the identity of conditions are derived from the roles of keys."""

    LEARNS = auto()
    """Changes what is learned, given the same start."""
    SAMPLES = auto()
    """Changes the start or the sampling: base model, device, problems. Runs that share a base agree in all of these."""
    EVALUATES = auto()
    """Changes how the result is measured."""
    RECORDS = auto()
    """Changes what is recorded or printed, and when, but no computed number."""
    SPEED = auto()
    """Changes speed, memory and timeouts; results change by rounding at most."""
    NAMES = auto()
    """Changes names and paths only."""


class Section(BaseModel):
    """Base class of every table of a file. Types are strict, unknown keys are errors, and instances are frozen. The
    docstring of an attribute is the description of its key."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        serialize_by_alias=True,
        protected_namespaces=(),
    )
    role: ClassVar[Role | None] = None
    """Role of the section's keys that do not declare one; a class argument: `class Data(Section, role=…)`."""

    def __init_subclass__(cls, role: Role | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.role = role or cls.role

    @classmethod
    @cache
    def roles(cls) -> dict[str, Role | None]:
        """Return the role of every key, by its name in the file."""
        return {
            field.alias or name: next((item for item in field.metadata if isinstance(item, Role)), cls.role)
            for name, field in cls.model_fields.items()
        }

    def issues(self) -> Iterator[ConfigIssue]:
        return iter(())

    def __deepcopy__(self, memo: dict[int, object] | None = None) -> Self:
        """Return the section itself, which is frozen. Otherwise pydantic would copy the default of every section that a
        file omits."""
        return self


class ConfigIssue(NamedTuple):
    """One mistake that a rule reports.

    ``keys`` are the dotted keys involved; the message names the first. An issue is dropped if one of its keys is
    invalid by itself. ``warning`` issues do not stop the run.
    """

    keys: tuple[str, ...]
    message: str
    fix: str = "remove the line"
    warning: bool = False


@dataclass(frozen=True)
class ActiveIf:
    """Marker: the marked key has an effect only while the dotted key ``key`` has one of ``values``; (None,) means while
    ``key`` is unset.

    ``training_only``: the marked key also affects records. The marker then applies only if a condition overrides the
    marked key, because an override must change the training.
    """

    key: str
    values: tuple[str | None, ...]
    plugins: bool = False
    """The marked key also has an effect while ``key`` names the user's own code."""
    training_only: bool = False
    unless: str = ""
    """Name of a property of the configuration, dotted in a section; while it is true, the marked key also has an
    effect."""
    unless_text: str = ""


@dataclass(frozen=True)
class UnsupportedValues:
    """Marker: values of other tools that retrain does not have, each with (reason, what to type instead)."""

    values: Mapping[str, tuple[str, str]]


def is_plugin(value: object) -> bool:
    """Return whether the value has the form `package.module:function`."""
    return isinstance(value, str) and re.fullmatch(PLUGIN_PATTERN, value) is not None


def fault(message: str, fix: str = "") -> PydanticCustomError:
    """Return the error of a field validator; ``message`` names value and fault, ``fix`` is what to type."""
    return PydanticCustomError("fault", "{message}", {"message": message, "fix": fix})


def _blank_is_none(value: object) -> object:
    return None if isinstance(value, str) and not value.strip() else value


def _zero_is_none(value: object) -> object:
    return None if type(value) in (int, float) and value == 0 else value


def _empty_is_none(value: object) -> object:
    return None if value == [] else value


def _split_commas(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _exclusive(value: list[str]) -> list[str]:
    for word in ("all", "none"):
        if word in value and value != [word]:
            raise fault(f'has "{word}" beside others', f'"{word}", or a list without it')
    return value


def _split_phrases(value: object) -> object:
    """Return the list of phrases in a JSON list or comma-separated text; None if empty, which means the default."""
    if isinstance(value, str) and value.strip().startswith("["):
        try:
            return json.loads(value) or None
        except json.JSONDecodeError as error:
            raise fault(f"is a string that is no JSON list ({error})", '["let me check", "notice that"]') from error
    return _split_commas(value) or None if isinstance(value, str) else _empty_is_none(value)


Count = Annotated[int, Field(ge=1, le=INT_MAX)]
Natural = Annotated[int, Field(ge=0, le=INT_MAX)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=1_000_000)]  # the operating system's clock overflows far above
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
MinusOneIsZero = BeforeValidator(lambda value: 0 if type(value) is int and value == -1 else value)
"""Validator that reads -1, which other tools use for "none" or "all", as 0."""
Decay = Annotated[float, Field(ge=0, lt=1)]
Plugin = Annotated[str, Field(pattern=PLUGIN_PATTERN)]
Text = Annotated[str, Field(min_length=1)]
OptionalText = Annotated[str | None, BeforeValidator(_blank_is_none, json_schema_input_type=str | None)]
OptionalCount = Annotated[Count | None, BeforeValidator(_zero_is_none, json_schema_input_type=Natural | None)]
ZeroIsNone = BeforeValidator(_zero_is_none, json_schema_input_type=NotNegative | None)
OptionalPositive = Annotated[Positive | None, ZeroIsNone]
OptionalAboveOne = Annotated[Annotated[float, Field(gt=1)] | None, ZeroIsNone]
OptionalRanks = Annotated[list[Count] | None, BeforeValidator(_empty_is_none, json_schema_input_type=list[Count])]
_COMMAS = BeforeValidator(_split_commas, json_schema_input_type=list[str] | str)
Tags = Annotated[list[Text], _COMMAS]
_Tracker = Literal["wandb", "tensorboard", "trackio", "all", "none"] | Plugin
Trackers = Annotated[list[_Tracker], _COMMAS, AfterValidator(_exclusive)]
OptionalPhrases = Annotated[
    list[Text] | None, BeforeValidator(_split_phrases, json_schema_input_type=list[str] | str | None)
]
Device = Annotated[str, Field(pattern=DEVICE_PATTERN)]


def _gpus_named(value: str | list[str]) -> str | list[str]:
    if isinstance(value, list):
        if twice := [name for name in dict.fromkeys(value) if value.count(name) > 1]:
            raise fault(f"has {twice[0]} twice", json.dumps(list(dict.fromkeys(value))))
    elif "-" in value:
        first, last = map(int, value.removeprefix("gpu:").split("-"))
        if first >= last:
            fix = f'"gpu:{last}-{first}"' if last < first else f'"gpu:{first}"'
            raise fault(f'is "{value}": a range names its first and its last GPU, which is a later one', fix)
    return value


Devices = Annotated[
    Annotated[str, Field(pattern=DEVICES_PATTERN)]
    | Annotated[list[Annotated[str, Field(pattern=GPU_PATTERN)]], Field(min_length=1)],
    AfterValidator(_gpus_named),
]
