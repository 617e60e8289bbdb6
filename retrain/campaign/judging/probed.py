"""The probe that lies beside a file (``retrain probe``): where it is, whether it still holds, its telling lines."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.campaign.judging.results import Measure
from retrain.campaign.judging.rule import rule_of
from retrain.campaign.planning.manifest import PLAN, read_plan
from retrain.campaign.planning.plan import RunSpec
from retrain.config.campaign import RULE_KEYS
from retrain.errors import RetrainError
from retrain.files import dumps, read_json
from retrain.maths.power import detectable
from retrain.wording import plural

QUOTED = 2
"""Lines of a probe that other commands quote."""
BATCHES, PROBLEMS, SAMPLES = 16, 64, 16
"""What a probe samples unless told otherwise: batches of training, held-out problems, answers to each of these."""


def probe_path(file: Path, ending: str = "json") -> Path:
    """Where the probe of a file is kept: ``lr.toml`` has ``lr.probe.json`` beside it, its page is ``lr.probe.html``."""
    return file.with_name(f"{file.stem}.probe.{ending}")


def probe_digest(specs: Sequence[RunSpec]) -> str:
    """What a probe depends on: the resolved settings of all conditions, of the first seed. Neither the number of seeds
    nor the rule by which the campaign is judged: what they decide, ``could_show``, is said anew each time."""
    first = [spec for spec in specs if spec.seed == specs[0].seed]
    settings = []
    for spec in first:
        config = spec.config.to_dict()
        for section in ("campaign", "logging", "backend", "squeeze"):
            config.pop(section, None)
        settings.append([spec.label, spec.config.campaign.seed, config])
    return hashlib.sha256(dumps(settings).encode()).hexdigest()


def probe_lines(file: Path, specs: Sequence[RunSpec]) -> list[str]:
    """The most telling lines of the probe beside a file, none where there is none, or it is of other settings."""
    path = probe_path(file)
    if not path.is_file():
        return []
    try:
        report = read_json(path)
    except (OSError, ValueError):
        return []
    if not isinstance(report, dict) or report.get("digest") != probe_digest(specs):
        return []
    lines = [line for line in report.get("lines", []) if isinstance(line, dict) and isinstance(line.get("text"), str)]
    shown = could_show(specs) if any(line.get("equal") for line in lines[:QUOTED]) else ""
    return [whole_line(line, shown) for line in lines[:QUOTED]]


def whole_line(line: Mapping[str, Any], shown: str) -> str:
    """A line of a probe as it is printed: one that expects no difference says what the campaign ``could_show``."""
    return f"{line['text']}; {shown}" if line.get("equal") else line["text"]


def could_show(specs: Sequence[RunSpec]) -> str:
    """The smallest difference that a campaign of these runs finds with 80 % power, in words."""
    from retrain.campaign.judging.design import ASSUMED_SPREAD, POWER

    family = max(1, len({spec.label for spec in specs}) - 1)
    campaign, seeds = specs[0].config.campaign, len({spec.seed for spec in specs})
    least = detectable(rule_of({key: getattr(campaign, key) for key in RULE_KEYS}, family, seeds, Measure()), POWER)
    if least is None:
        return f"{plural(seeds, 'seed')} would be too few for a verdict anyway"
    size, words = 100 * least * ASSUMED_SPREAD, f"a campaign of {plural(seeds, 'seed')}"
    return f"{words} could show only {size:.1f} points or more (if pairs spread by {100 * ASSUMED_SPREAD:g})"


def campaign_probe_lines(directory: Path) -> list[str]:
    """The same for the file that a campaign's directory was trained from, if it is still where it was."""
    try:
        plan, written = read_plan(directory), read_json(directory / PLAN)
        return probe_lines(plan.folder / written["file"], plan.specs)
    except (RetrainError, OSError, ValueError, KeyError, TypeError):
        return []


def probe_share(specs: Sequence[RunSpec]) -> float:
    """Completions that a probe at one point samples, as a share of those that these runs train on."""
    first = specs[0].config.training
    sampled = BATCHES * first.batch_size * first.group_size + PROBLEMS * SAMPLES
    training = [spec.config.training for spec in specs]
    return sampled / sum(each.max_steps * each.batch_size * each.group_size for each in training)
