"""Define one planned run: resolved configuration, directories, and differences between configurations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from retrain.config.base import Role
from retrain.config.campaign import CampaignSection, condition_name
from retrain.config.learning_rules import lambda_stays_zero
from retrain.config.loading import parse_dict
from retrain.config.root import Config, defines_run, flat, role_of

MAY_DIFFER = Role.RECORDS | Role.SPEED | Role.NAMES
"""Roles in which replicates of one condition may differ, besides their seeds."""
EXTENSION = "training.max_steps"


@dataclass(frozen=True)
class RunSpec:
    """One planned run, with its fields in the order of ``plan.json``.

    ``run_id`` is ``<label>_s<seed>``, unique in the campaign and safe as a directory name. ``config`` is resolved:
    overrides are applied, keys without effect have their defaults, and derived values are filled in. ``overrides`` are
    the condition's, by dotted key. Planning ``config`` again gives this run.
    """

    run_id: str
    label: str
    seed: int
    condition_index: int
    overrides: dict[str, object]
    is_campaign: bool
    config: Config

    @classmethod
    def from_json(cls, data: Mapping[str, Any], config: Config | None = None) -> RunSpec:
        """Return the run that ``to_json`` wrote; ``config``, if given, replaces the recorded configuration."""
        values = {each.name: data[each.name] for each in fields(cls)}
        return cls(**{**values, "config": config or parse_dict(data["config"])})

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"config": self.config.to_dict()}

    @property
    def export(self) -> Path | None:
        """The user's directory that also receives the final adapter ([backend] adapter_path); None if unset."""
        path = self.config.backend.adapter_path
        if path is None:
            return None
        return Path(path) / self.run_id if self.is_campaign else Path(path)


def run_directory(directory: Path, spec: RunSpec) -> Path:
    """Return the run's directory: ``runs/<run_id>`` in a campaign, the directory itself for a single run."""
    return directory / "runs" / spec.run_id if spec.is_campaign else directory


def run_place(spec: RunSpec) -> str:
    return run_directory(Path(), spec).as_posix()


@cache
def _defaults() -> dict[str, object]:
    # A plan never has "auto", and "local" was the default of the releases whose records have no engine.
    return dict(flat(Config(campaign=CampaignSection()).to_dict())) | {"inference.engine": "local"}


def differences(
    old: Mapping[str, object], new: Mapping[str, object], matters: Callable[[str], bool] = defines_run
) -> dict[str, tuple[Any, Any]]:
    """Return (old, new) by dotted key for every key that matters and differs. Unset and empty are equal, and a key that
    an older record lacks has its default."""
    before, now = dict(flat(old)), dict(flat(new))
    pairs = {
        key: (before.get(key, _defaults().get(key)), now.get(key, _defaults().get(key)))
        for key in {**before, **now}
        if matters(key)
    }
    empty = (None, [], {})
    return {key: (a, b) for key, (a, b) in pairs.items() if a != b and not (a in empty and b in empty)}


def distinguishes_runs(key: str) -> bool:
    """Return whether runs that differ in this dotted key belong to different conditions, so that they are no
    replicates."""
    role = role_of(key)
    return role is None or not role & MAY_DIFFER


def condition_hash(config: Mapping[str, object]) -> str:
    """Return a hash (16 hex digits) of the settings that distinguish runs, without steps and default values."""
    settings = {
        key: value
        for key, value in flat(config)
        if (distinguishes_runs(key) and key != EXTENSION) or key == "campaign.seed"
        if value != _defaults().get(key) and value not in ({}, [])
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def without_sepa(specs: Sequence[RunSpec]) -> list[str]:
    """Return a note for each gtpo_sepa condition whose runs are too short for SEPA to begin."""
    notes = []
    for spec in {spec.label: spec for spec in specs}.values():
        if lambda_stays_zero(spec.config):
            steps = spec.config.training.max_steps
            notes.append(
                f"{condition_name(spec.label)} trains with λ = 0 in all of its {steps} steps: it is gtpo under another "
                "name, and says nothing about SEPA"
            )
    return notes
