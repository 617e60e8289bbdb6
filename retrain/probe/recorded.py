"""Rollouts that a run recorded (``tokens_<n>.safetensors``), as the batches of a probe: which steps there are, by which
weights each is looked at, and for which conditions they can stand.

A record holds what was read, sampled and given as a reward, token by token. It does not hold what a group's reward was
made of, nor what truncated sampling chose from: conditions and runs that need either are told in a sentence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.campaign.planning.plan import RunSpec
from retrain.checkpoints import checkpoint_directories, checkpoint_step
from retrain.config import Config
from retrain.config.base import Role
from retrain.config.modes import MODES, Need
from retrain.config.training import Sampling
from retrain.errors import CheckpointError, UsageError
from retrain.files import dumps, read_json
from retrain.probe.points import Point, checkpoint_point, points_of
from retrain.record.tokens import SCHEMA, TokenFile, tokens_name
from retrain.run import Run
from retrain.tokenizer import Tokenizer
from retrain.wording import plural

LEAST_BATCHES = 3
"""Batches without which there is no interval."""
MORE = "set [logging] rollouts_every = 1 to record every step"
DRAWN_WITH = {
    "training": ("batch_size", "group_size", "max_tokens", "temperature", "top_p", "top_k", "min_p"),
    "data": ("system_prompt", "prompt_template", "chat_template_kwargs"),
}
"""Keys that decide what is sampled, of sections whose other keys do not. Of [reward] and [environment] all do."""


@dataclass(frozen=True)
class Recorded:
    """Some recorded steps of one run, oldest first. ``facts`` is its ``config.json``; ``entropies``: whether every one
    of these steps has the entropies that its tokens were sampled with."""

    name: str
    directory: Path
    facts: Mapping[str, Any]
    steps: tuple[int, ...]
    entropies: bool

    @property
    def typed(self) -> str:
        """What the user typed, for messages."""
        return f"--rollouts {self.name}"

    def path(self, step: int) -> Path:
        """The file of a step."""
        return self.directory / tokens_name("train", step)

    def about(self) -> dict[str, Any]:
        """For the report."""
        return {"run": self.name, "run_id": self.facts["run_id"], "steps": list(self.steps)}

    def require_base(self, run: Run) -> None:
        """Raise UsageError unless these tokens are those of the run's base and tokenizer."""
        base = self.facts["base"]
        if base["fingerprint"] != run.base_id:
            raise UsageError(f"{self.typed} was sampled from other base weights than those of this file")
        if base["tokenizer"] != Tokenizer(run.renderer.tokenizer).digest:
            raise UsageError(
                f"{self.typed} was sampled with another tokenizer or chat template than those of this file"
            )


def recorded_of(named: str, newest: int | None = None) -> Recorded:
    """The recorded steps of a run directory, or the ``newest`` of them. Raises UsageError for what is none, or cannot
    be trained on; CheckpointError for a damaged file."""
    directory, typed = Path(named), f"--rollouts {named}"
    facts = _facts(directory, typed)
    found = sorted(int(m[1]) for path in directory.iterdir() if (m := re.fullmatch(_TOKENS, path.name)))
    if not found:
        raise UsageError(f"{typed} has no recorded rollouts: {MORE} before it is trained")
    steps = tuple(found if newest is None else found[-newest:])
    if len(steps) < LEAST_BATCHES:
        raise UsageError(f"{typed}: an interval takes {LEAST_BATCHES} recorded steps, here are {len(steps)}: {MORE}")
    training = facts["training"]
    asked = Sampling(*(training[key] for key in DRAWN_WITH["training"][2:])).requested
    if asked.top_k:
        raise UsageError(
            f"{typed} was sampled with top_p, top_k or min_p, and a record does not keep the tokens that each was "
            "chosen from, which its gradient takes: probe without --rollouts"
        )
    recorded = Recorded(named, directory, facts, steps, True)
    return replace(recorded, entropies=all([_looked_at(recorded, step) for step in steps]))


_TOKENS = r"tokens_(\d+)\.safetensors"


def _facts(directory: Path, typed: str) -> Mapping[str, Any]:
    if not directory.is_dir():
        raise UsageError(f"{typed} is not a directory: name a run directory")
    if (directory / "runs").is_dir():
        runs = sorted(path for path in (directory / "runs").iterdir() if path.is_dir())
        raise UsageError(f"{typed} is a campaign: name one of its runs, such as {runs[0]}" if runs
                         else f"{typed} is a campaign without runs")  # fmt: skip
    try:
        facts = read_json(directory / "config.json")
        needed = facts["run_id"], facts["base"]["fingerprint"], facts["base"]["tokenizer"]
        if all(needed) and all(key in facts[name] for name, keys in DRAWN_WITH.items() for key in keys):
            return facts
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UsageError(f"{typed} is no run directory: it has no config.json of a run")


def _looked_at(recorded: Recorded, step: int) -> bool:
    """Whether a step has entropies. Raises UsageError where it lacks what every condition needs."""
    with TokenFile(recorded.path(step)) as file:
        if file.about.get("schema") != SCHEMA:
            raise UsageError(f"{file.path} is of another layout than the one this version of retrain reads")
        training, groups = recorded.facts["training"], len(file.prompts())
        whole = groups == training["batch_size"] and len(file) == groups * training["group_size"]
        if not whole:
            raise UsageError(
                f"{recorded.typed}: step {step} recorded {len(file)} rollouts of {plural(groups, 'prompt')}, not all "
                f"{training['batch_size']} × {training['group_size']} that it was to train on"
            )
        return "entropy" in file.names


# -- which conditions ---------------------------------------------------------------------------------------------


def usable(specs: Sequence[RunSpec], recorded: Recorded) -> tuple[list[RunSpec], list[str]]:
    """The conditions that would have drawn these rollouts, and notes about those left out. Raises UsageError where the
    baseline is one of these, or no other condition is left."""
    why = {spec.label: next(_obstacles(spec.config, recorded), None) for spec in specs}
    first = specs[0]
    if why[first.label] is not None:
        raise UsageError(f"{recorded.typed} cannot stand for those of the baseline, {first.label}: {why[first.label]}")
    kept = [spec for spec in specs if why[spec.label] is None]
    if len(kept) < 2:
        label = specs[1].label
        raise UsageError(f"{recorded.typed} can stand for the baseline's alone: {label} is left out: {why[label]}")
    return kept, [f"{label} is left out: {reason}" for label, reason in why.items() if reason is not None]


def _obstacles(config: Config, recorded: Recorded) -> Iterator[str]:
    """Why the recorded rollouts are not what this configuration would credit."""
    own = json.loads(dumps(config.to_dict()))
    sections = {"reward": config.reward, "environment": config.environment}
    aside = Role.RECORDS | Role.SPEED
    keys = {name: tuple(key for key, role in section.roles().items() if not (role or Role(0)) & aside)
            for name, section in sections.items()}  # fmt: skip
    for name, asked in (DRAWN_WITH | keys).items():
        for key in asked:
            before, now = recorded.facts.get(name, {}).get(key), own[name].get(key)
            if before != now:
                yield f"[{name}] {key} is {_said(now)} in it, {_said(before)} in the recorded rollouts"
    before, now = recorded.facts["training"].get("dynamic_sampling", 0), config.training.dynamic_sampling
    if before != now:
        yield f"[training] dynamic_sampling is {_said(now)} in it, {_said(before)} in the recorded rollouts"
    algorithm = config.algorithm
    if algorithm.advantage_mode not in MODES["advantage_mode"]:
        yield f"{algorithm.advantage_mode} is given the parts and tags of every reward, which a record does not keep"
    if Need.ENTROPY in algorithm.needs and not recorded.entropies:
        yield "it weighs tokens by entropies, which were not recorded"


def _said(value: Any) -> str:
    return "not set" if value is None else dumps(value)


# -- which weights ------------------------------------------------------------------------------------------------


def points_at(recorded: Recorded, at: Sequence[str], begin: str | None) -> tuple[list[Point], list[str]]:
    """Where the recorded steps are looked at, each with its own: all of them at every point that is named, else each at
    the run's newest whole checkpoint that is not later, or where the run began; and notes about what is left out.
    ``begin`` is where the file's own runs begin."""
    if at:
        return [replace(point, steps=recorded.steps) for point in points_of(at)], []
    notes = list[str]()
    (start,) = points_of([], recorded.facts.get("resume", {}).get("from"))
    places = [replace(start, beginning=start.name == begin)]
    for directory in checkpoint_directories(recorded.directory):
        if checkpoint_step(directory) <= recorded.steps[-1]:
            try:
                places.append(checkpoint_point(directory, str(directory)))
            except CheckpointError as error:
                notes.append(f"skipped a damaged checkpoint: {error}")
    ends = [*(place.step or 0 for place in places[1:]), recorded.steps[-1] + 1]
    points = list[Point]()
    for place, end in zip(places, ends, strict=True):
        steps = tuple(step for step in recorded.steps if (place.step or 0) <= step < end)
        if len(steps) >= LEAST_BATCHES:
            points.append(replace(place, steps=steps))
        elif steps:
            notes.append(f"{place.name} is left out: {plural(len(steps), 'recorded step')} there, an interval takes "
                         f"{LEAST_BATCHES}")  # fmt: skip
    if not points:
        raise UsageError(
            f"{recorded.typed}: no weights that it kept have {LEAST_BATCHES} recorded steps before the next: name "
            f"weights for all of them with --at, or {MORE}"
        )
    return points, notes
