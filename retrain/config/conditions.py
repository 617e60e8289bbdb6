"""A campaign's conditions: their overrides brought into one form, and applied to the base configuration."""

from collections.abc import Mapping
from typing import Any

from retrain.config.base import Role
from retrain.config.campaign import Condition
from retrain.config.legacy import FLAT_PREFIXES, REPLACED
from retrain.config.problems import SYNONYMS, Mistake, Path, nearest
from retrain.config.root import homes, keys, role_of, sections

MODES = ("advantage_mode", "transform_mode")
_ONE_BASE = "all runs of a campaign share one frozen base and one engine"
_SAME_MEASURE = "conditions are compared on the same problems, graded in the same way"
_ONE_RECORD = "it belongs to the campaign as a whole"
FIXED: dict[str, str] = {
    "campaign": _ONE_RECORD,
    "model": _ONE_BASE,
    "backend": _ONE_BASE,
    "slurm": _ONE_RECORD,
    "inference": _ONE_BASE,
    "distillation": _ONE_RECORD,
    "data": _SAME_MEASURE,
    "environment": _SAME_MEASURE,
    "audit": _SAME_MEASURE,
    "evaluation": _SAME_MEASURE,
    "backpressure": _ONE_RECORD,
    "squeeze": _ONE_RECORD,
    "resume": _ONE_RECORD,
    "logging": _ONE_RECORD,
    "training.seed": "the seed is the replicate: [campaign] seeds",
}
"""What a condition may not override, by section or key, and why; but in these sections, too, it may what is learned."""


def why_fixed(dotted: str) -> str:
    return "" if role_of(dotted) == Role.LEARNS else FIXED.get(dotted) or FIXED.get(dotted.partition(".")[0], "")


def fold(condition: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Path], list[Mistake]]:
    """Bring a condition as written at ``path`` into the form of ``Condition``.

    Returns the condition with its overrides as tables, where in the file each override (by dotted key) stands,
    and the mistakes, whose overrides are left out.
    """
    folded: dict[str, Any] = {}
    places: dict[str, Path] = {}
    wrong: list[Mistake] = []

    def override(name: str, place: Path, value: Any) -> None:
        dotted = _dotted(name)
        if isinstance(dotted, Mistake):
            wrong.append(dotted._replace(path=place))
            return
        reason = why_fixed(dotted)
        section, _, key = dotted.partition(".")
        if reason:
            wrong.append(Mistake(place, f"cannot differ between conditions: {reason}", "a campaign file for each"))
        elif dotted in places:
            wrong.append(Mistake(place, f"overrides {dotted} a second time in this condition", "keep one of the two"))
        elif section == "algorithm" and key in MODES:
            wrong.append(Mistake(place, "is the condition's own mode under another name", f'{key} = "{value}"'))
        else:
            places[dotted] = place
            folded.setdefault(section, {})[key] = value

    for name, value in condition.items():
        place = (*path, name)
        if name in MODES:
            folded[name] = value
        elif name in sections() and isinstance(value, Mapping):
            if not value:
                wrong.append(Mistake(place, "has no effect: the table is empty", "remove it"))
            for key, item in value.items():
                override(f"{name}.{key}", (*place, key), item)
        elif isinstance(value, Mapping) and _replaced(name) is None:
            wrong.append(_no_section(name)._replace(path=place))
        else:
            override(name, place, value)
    return folded, places, wrong


def _no_section(name: str) -> Mistake:
    hint = nearest(name, sections()).replace("its keys are", "the sections are")
    return Mistake((), f"names no section [{name}]", hint)


def _replaced(name: str) -> tuple[str, str] | None:
    """Return why a removed key is gone that a condition writes without its section or flat, as in ``sepa_steps``."""
    return next(
        (why for dotted, why in REPLACED.items() if name in (dotted.partition(".")[2], dotted.replace(".", "_"))), None
    )


def _dotted(name: str) -> str | Mistake:
    """The dotted key that a condition means by ``name``: dotted, bare, or flat as in ``sepa_steps``."""
    if name in keys():
        return name
    section, dot, key = name.partition(".")
    if dot:
        if section not in sections():
            return _no_section(section)
        if name in REPLACED:
            return Mistake((), f"is not a key: {REPLACED[name][0]}", REPLACED[name][1])
        return Mistake((), f"is not a key of [{section}]", nearest(key, sections()[section].roles()))
    if f"{name}.{name}" in keys():  # a bare ``model`` is the base model, not the embedding model of [planning]
        return f"{name}.{name}"
    named = homes(name)
    free = [dotted for dotted in named if not why_fixed(dotted)]
    if len(free) > 1:
        fix = " or ".join(f'"{dotted}"' for dotted in free)
        return Mistake((), f"is a key of {len(free)} sections", fix)
    if named:
        return next((dotted for dotted in free or named if not dotted.startswith("campaign.")), named[0])
    prefix, _, rest = name.partition("_")
    flat = f"{FLAT_PREFIXES.get(prefix, prefix)}.{rest}"
    if flat in keys():
        return flat
    if replaced := _replaced(name):
        return Mistake((), f"is not a key: {replaced[0]}", replaced[1])
    if name in SYNONYMS:
        return Mistake((), "is not a key", f'"{SYNONYMS[name]}"')
    bare = [dotted.partition(".")[2] for dotted in keys() if not why_fixed(dotted)]
    hint = nearest(name, bare)
    return Mistake((), "is not a key", hint if hint.startswith("did") else 'section and key in quotes: "sepa.steps"')


def assemble(base: Mapping[str, Any], condition: Condition | None, seed: int | None) -> dict[str, Any]:
    """The configuration data of one run: ``base`` with the condition's modes and overrides, and the run's seed.

    In a campaign it is again a campaign, of this one run, so that planning it gives the same run.
    """
    data = {section: dict(table) for section, table in base.items()}
    training = data.setdefault("training", {})
    if seed is not None:
        training["seed"] = seed
    if condition is None:
        return data
    campaign = data.setdefault("campaign", {})
    if campaign.get("max_steps") is not None:
        training["max_steps"] = campaign["max_steps"]
    evaluation = data.setdefault("evaluation", {})
    for key in ("temperature", "max_tokens"):
        # Evaluation is that of the base, also for a condition that trains with another temperature or length.
        if evaluation.get(key) is None and key in training:
            evaluation[key] = training[key]
    data.setdefault("algorithm", {}).update(
        advantage_mode=condition.advantage_mode, transform_mode=condition.transform_mode
    )
    for dotted, value in condition.overrides.items():
        section, _, key = dotted.partition(".")
        data.setdefault(section, {})[key] = value
    campaign["conditions"] = [condition.model_dump()]
    if seed is not None:
        campaign["seeds"] = [seed]
    return data
