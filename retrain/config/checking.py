"""Collect all mistakes of a configuration: in keys, between keys, and in the conditions of a campaign.

Keys that are invalid by themselves are reported and removed (they count as unset), so that rules can still check the
rest. A rule that involves a removed key reports nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import ValidationError

from retrain.config.base import ConfigIssue, Role
from retrain.config.campaign import Condition, campaign_rules
from retrain.config.legacy import FLAT_PREFIXES, REPLACED
from retrain.config.problems import SYNONYMS, Mistake, Path, mistakes, nearest, path_of
from retrain.config.root import Config, differing, effective, homes, keys, role_of, sections, unused
from retrain.config.rules import idle_slurm, rule_issues
from retrain.errors import ConfigError, ConfigProblem

LAST = 10**9
"""Sort key that puts ``--set`` problems after all lines of the file."""

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
"""Sections and keys that a condition may not override, with the reason; keys of these sections that change what is
learned are exempt."""

CONDITIONS: Path = ("campaign", "conditions")


@dataclass
class KeyLocations:
    """Location at which each key was written: a line of the file, or ``--set``."""

    name: str
    lines: dict[Path, int] = field(default_factory=dict)
    sets: set[Path] = field(default_factory=set)

    def written(self) -> list[str]:
        """Return every written key of the configuration, dotted, in the order of the reference."""
        pairs = {f"{path[0]}.{path[1]}" for path in (*self.lines, *self.sets) if len(path) == 2}
        return [dotted for dotted in keys() if dotted in pairs]

    def is_written(self, path: Path) -> bool:
        return path in self.lines or path in self.sets

    def replace(self, path: Path) -> None:
        """Record that ``--set`` replaced this key and everything below it."""
        self.lines = {given: line for given, line in self.lines.items() if given[: len(path)] != path}
        self.sets.add(path)

    def find(self, path: Path) -> tuple[int, str]:
        """Return (sort key, text) of the location of the key, or of the nearest enclosing table that was written."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.sets:
                return LAST, "--set"
            if path[:length] in self.lines:
                line = self.lines[path[:length]]
                return line, f"{self.name}:{line}"
        if any(given[: len(path)] == path for given in self.sets):
            return LAST, "--set"  # a section that only --set names
        return (1, f"{self.name}:1") if self.lines or self.sets else (0, self.name)


class Row(NamedTuple):
    """Location of a condition in the file: its number, the path of its table, and the paths of its overrides by dotted
    key. ``is_partial``: invalid overrides were removed from the condition."""

    index: int
    table: Path
    overrides: Mapping[str, Path]
    is_partial: bool = False


@dataclass
class Review:
    data: dict[str, Any]
    locations: KeyLocations
    wrong: list[Mistake]
    warnings: list[Mistake] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    """Dotted keys that are invalid by themselves."""
    rows: list[Row] = field(default_factory=list)
    """Locations of the conditions in ``data``; empty if there are only the standard ones."""

    def is_broken(self, dotted: str) -> bool:
        """Return whether this key, or a table around it, is invalid by itself."""
        return any(f"{dotted}.".startswith(f"{key}.") for key in self.broken)

    def report(self, path: Path, message: str, fix: str = "", warning: bool = False, about: str = "") -> None:
        (self.warnings if warning else self.wrong).append(Mistake(path, message, fix, about))


def examine(data: dict[str, Any], locations: KeyLocations, wrong: Iterable[Mistake] = ()) -> tuple[Config, list[str]]:
    """Return the configuration and its warnings. Raises ConfigError with every mistake, ``wrong`` included."""
    review = Review(data, locations, list(wrong))
    _fold_conditions(review)
    config = _validate(review)
    if config.is_campaign:
        _examine_campaign(review, config)
    else:
        _examine_single(review, config)
    if review.wrong:
        raise ConfigError(located(review.wrong, locations))
    return config, [str(problem) for problem in located(review.warnings, locations)]


def located(wrong: Iterable[Mistake], locations: KeyLocations) -> list[ConfigProblem]:
    """Return the mistakes with their locations, in the order of the file."""
    ordered = sorted(dict.fromkeys(wrong), key=lambda mistake: locations.find(mistake.path)[0])
    return [ConfigProblem(locations.find(item.path)[1], item.key, item.message, item.fix) for item in ordered]


def _fold_conditions(review: Review) -> None:
    """Convert every condition to the form of ``Condition``, in place."""
    campaign = review.data.get("campaign")
    rows = campaign.get("conditions") if isinstance(campaign, dict) else None
    if not isinstance(rows, list):
        return
    for index, row in enumerate(rows):
        overrides: dict[str, Path] = {}
        wrong: list[Mistake] = []
        if isinstance(row, Mapping):
            rows[index], overrides, wrong = fold(row, (*CONDITIONS, index))
        review.wrong.extend(wrong)
        review.rows.append(Row(index, (*CONDITIONS, index), overrides, bool(wrong)))


def _validate(review: Review) -> Config:
    """Return the configuration. Keys that are invalid by themselves are reported and left at their defaults."""
    try:
        return Config.model_validate(review.data)
    except ValidationError as error:
        wrong = mistakes(error, review.data)
    review.wrong.extend(wrong)
    _put_aside(review, wrong)
    return Config.model_validate(review.data)


def _put_aside(review: Review, wrong: Iterable[Mistake]) -> None:
    """Remove invalid sections, keys, and tables of a list; also a list that has no valid table."""
    invalid: dict[Path, set[int]] = {}
    for mistake in wrong:
        section, *below = mistake.path
        review.broken.add(".".join(str(part) for part in mistake.path[:2]))
        table = review.data.get(str(section))
        if not below:
            review.data.pop(str(section), None)
        elif len(below) == 1 and isinstance(table, dict):
            table.pop(below[0], None)
        elif len(below) > 1 and isinstance(below[1], int):
            invalid.setdefault((section, below[0]), set()).add(below[1])
    for path, indices in invalid.items():
        table, key = review.data[str(path[0])], path[1]
        valid = [index for index in range(len(table.get(key, ()))) if index not in indices]
        if path == CONDITIONS:
            review.rows = [review.rows[index] for index in valid]
        table[key] = [table[key][index] for index in valid]
        if not valid:
            del table[key]


def _report_issues(review: Review, issues: Iterable[ConfigIssue], row: Row | None = None) -> None:
    """Report the issues whose keys are all valid by themselves. The location of an issue is the first of these that
    exists: an override of the condition ``row``, a key that is written, the condition itself."""
    for issue in issues:
        if any(review.is_broken(key) for key in issue.keys):
            continue
        main, overrides = path_of(issue.keys[0]), row.overrides if row else {}
        places = [overrides[key] for key in issue.keys if key in overrides]
        places += [path for key in issue.keys if review.locations.is_written(path := path_of(key))]
        about = "" if issue.keys[0] in overrides else Mistake(main, "").key
        review.report((*places, row.table if row else main)[0], issue.message, issue.fix, issue.warning, about)


def _examine_single(review: Review, config: Config) -> None:
    _report_issues(review, (*rule_issues(config), *idle_slurm(config)))
    _examine_unused(review, config, [config])
    if review.data.get("training", {}).get("seed") == -1:
        review.report(("training", "seed"), "is -1: every run is seeded, this one with 0", warning=True)


def _examine_campaign(review: Review, config: Config) -> None:
    conditions = config.campaign.conditions
    rows = review.rows or [Row(index, ("campaign",), {}) for index in range(len(conditions))]
    pairs = zip(rows, conditions, strict=True)
    runs = [(row, run) for row, condition in pairs if (run := _examine_condition(review, condition, row))]
    _examine_likeness(review, runs)
    if len(runs) == len(conditions):
        _examine_unused(review, config, [run for _, run in runs])
    _examine_shadowed(review, config)


def _examine_likeness(review: Review, runs: Iterable[tuple[Row, Config]]) -> None:
    """Report conditions with equal labels, and warn about conditions that differ by label only."""
    labels: dict[str, int] = {}
    contents: list[tuple[int, dict[str, object]]] = []
    for row, run in runs:
        if row.is_partial:
            continue
        label = run.campaign.conditions[0].label
        content = {dotted: value for dotted, value in effective(run).items() if not dotted.startswith("campaign.")}
        same = labels.setdefault(label.casefold(), row.index)
        twin = next((earlier for earlier, other in contents if other == content), None)
        if same != row.index:
            message = f"has the label of condition {same + 1}, {label}"
            review.report(row.table, message, "remove one, or let a key differ")
        elif twin is not None:
            message = f"is the same experiment as condition {twin + 1} under another label"
            review.report(row.table, message, warning=True)
        contents.append((row.index, content))


def _examine_condition(review: Review, condition: Condition, row: Row) -> Config | None:
    """Report the issues of a condition; return it as a run, or None when an override is invalid by itself."""
    data = assemble(review.data, condition, None)
    try:
        run = Config.model_validate(data)
    except ValidationError as error:
        for mistake in mistakes(error, data):
            dotted = ".".join(str(part) for part in mistake.path[:2])
            review.wrong.append(mistake._replace(path=row.overrides.get(dotted, row.table)))
        return None
    _report_issues(review, rule_issues(run), row)
    for dotted in condition.overrides:
        if idle := unused(run, dotted, override=True):
            review.report(row.overrides.get(dotted, row.table), idle.message, idle.fix)
    return run


def _examine_unused(review: Review, config: Config, runs: list[Config]) -> None:
    if review.is_broken("campaign.conditions") or any(row.is_partial for row in review.rows):
        return
    locations = review.locations
    for dotted in locations.written() if locations.lines or locations.sets else differing(config):
        idle = [issue for run in runs if (issue := unused(run, dotted)) is not None]
        if len(idle) < len(runs) or any(review.is_broken(key) for key in idle[0].keys):
            continue
        message = "has no effect in any condition" if config.is_campaign else idle[0].message
        review.report(path_of(dotted), message, idle[0].fix)


def _examine_shadowed(review: Review, config: Config) -> None:
    """Report base values that every condition replaces, and the issues of ``campaign_rules``."""
    is_run = not review.locations.lines and len(config.campaign.conditions) == len(config.campaign.seeds) == 1
    _report_issues(review, (*campaign_rules(config.campaign, is_run), *(() if is_run else idle_slurm(config))))
    for key in MODES:
        if review.locations.is_written(("algorithm", key)):
            message = "has no effect in a campaign: every condition has its own"
            review.report(("algorithm", key), message, "remove the line", warning=True)
    steps = config.campaign.max_steps
    if review.locations.is_written(("training", "max_steps")) and steps not in (None, config.training.max_steps):
        message = f"is {config.training.max_steps}, which [campaign] max_steps = {steps} replaces"
        review.report(("training", "max_steps"), message, "keep one of the two", warning=True)


def why_fixed(dotted: str) -> str:
    return "" if role_of(dotted) == Role.LEARNS else FIXED.get(dotted) or FIXED.get(dotted.partition(".")[0], "")


def fold(condition: Mapping[str, object], path: Path) -> tuple[dict[str, object], dict[str, Path], list[Mistake]]:
    """Convert a condition from the form in a file (overrides dotted, bare or flat) to that of ``Condition`` (tables).

    ``path`` has the keys and indices that lead to the condition. Returns the converted condition, the path of each
    override by its dotted key, and the mistakes. Wrong overrides are left out of the first two.
    """
    modes: dict[str, object] = {}
    tables: dict[str, dict[str, object]] = {}
    locations: dict[str, Path] = {}
    wrong: list[Mistake] = []

    def override(name: str, location: Path, value: object) -> None:
        dotted = _dotted(name, location)
        if isinstance(dotted, Mistake):
            wrong.append(dotted)
            return
        section, _, key = dotted.partition(".")
        if reason := why_fixed(dotted):
            wrong.append(Mistake(location, f"cannot differ between conditions: {reason}", "a campaign file for each"))
        elif dotted in locations:
            message = f"overrides {dotted} a second time in this condition"
            wrong.append(Mistake(location, message, "keep one of the two"))
        elif section == "algorithm" and key in MODES:
            wrong.append(Mistake(location, "is the condition's own mode under another name", f'{key} = "{value}"'))
        else:
            locations[dotted] = location
            tables.setdefault(section, {})[key] = value

    for name, value in condition.items():
        location = (*path, name)
        if name in MODES:
            modes[name] = value
        elif name in sections() and isinstance(value, Mapping):
            if not value:
                wrong.append(Mistake(location, "has no effect: the table is empty", "remove it"))
            for key, item in value.items():
                override(f"{name}.{key}", (*location, key), item)
        elif isinstance(value, Mapping) and _replaced(name) is None:
            wrong.append(_no_section(name, location))
        else:
            override(name, location, value)
    return modes | tables, locations, wrong


def _no_section(name: str, location: Path) -> Mistake:
    hint = nearest(name, sections()).replace("its keys are", "the sections are")
    return Mistake(location, f"names no section [{name}]", hint)


def _replaced(name: str) -> tuple[str, str] | None:
    """Return (reason, fix) for a removed key (dotted, bare, or flat as in ``sepa_steps``); None for other names."""
    forms = ((dotted, dotted.partition(".")[2], dotted.replace(".", "_")) for dotted in REPLACED)
    return next((REPLACED[names[0]] for names in forms if name in names), None)


def _dotted(name: str, location: Path) -> str | Mistake:
    """Return the dotted key that ``name`` (dotted, bare, or flat as in ``sepa_steps``) means, else the mistake."""
    if name in keys():
        return name
    if "." in name:
        return _unknown_key(name, location)
    if f"{name}.{name}" in keys():  # a bare ``model`` is the base model, not the embedding model of [planning]
        return f"{name}.{name}"
    named = homes(name)
    free = [dotted for dotted in named if not why_fixed(dotted)]
    if len(free) > 1:
        fix = " or ".join(f'"{dotted}"' for dotted in free)
        return Mistake(location, f"is a key of {len(free)} sections", fix)
    if named:
        return next((dotted for dotted in free or named if not dotted.startswith("campaign.")), named[0])
    prefix, _, rest = name.partition("_")
    flat = f"{FLAT_PREFIXES.get(prefix, prefix)}.{rest}"
    return flat if flat in keys() else _unknown_key(name, location)


def _unknown_key(name: str, location: Path) -> Mistake:
    section, dot, key = name.partition(".")
    if dot and section not in sections():
        return _no_section(section, location)
    if replaced := _replaced(name):
        return Mistake(location, f"is not a key: {replaced[0]}", replaced[1])
    if dot:
        return Mistake(location, f"is not a key of [{section}]", nearest(key, sections()[section].roles()))
    if name in SYNONYMS:
        return Mistake(location, "is not a key", f'"{SYNONYMS[name]}"')
    hint = nearest(name, [dotted.partition(".")[2] for dotted in keys() if not why_fixed(dotted)])
    hint = hint if hint.startswith("did") else 'section and key in quotes: "sepa.steps"'
    return Mistake(location, "is not a key", hint)


def assemble(
    base: Mapping[str, Mapping[str, object]], condition: Condition | None, seed: int | None
) -> dict[str, dict[str, object]]:
    """Return the configuration data of one run: ``base`` with the condition's modes and overrides, and the run's seed.

    With a condition, the result is a campaign of this one run, so that planning it again gives the same run.
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
    data.setdefault("algorithm", {}).update({key: getattr(condition, key) for key in MODES})
    for dotted, value in condition.overrides.items():
        section, _, key = dotted.partition(".")
        data.setdefault(section, {})[key] = value
    campaign["conditions"] = [condition.model_dump()]
    if seed is not None:
        campaign["seeds"] = [seed]
    return data
