"""Resolve the argument of ``retrain serve``: a model, a run or adapter, a campaign, or a TOML file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.adapters.provenance import provenance
from retrain.adapters.squeeze import find_adapter
from retrain.config import Config, load, parse_dict
from retrain.errors import UsageError
from retrain.models.directory import bundled_name
from retrain.records.reader import read_manifest, read_object
from retrain.records.schema.layout import ADAPTER_CONFIG, MANIFEST


@dataclass(frozen=True)
class Sources:
    """A base (``config`` and ``name``) and the adapters over it, by name. ``notes`` are messages for the user."""

    config: Config
    name: str
    adapters: dict[str, Path]
    notes: tuple[str, ...] = ()


def sources(target: str, more: Sequence[str] = (), base: str | None = None) -> Sources:
    """Return the base and adapters to serve. ``more`` are further adapters, each NAME=DIR; ``base`` replaces the base
    that adapters name. Raises UsageError for a target that cannot be served and for repeated names."""
    config, named = _target(target, base)
    if base is not None and not named:
        raise UsageError(f"--base is for adapters, and {target} is none")
    named += [_named_adapter(text) for text in more]
    adapters: dict[str, Path] = {}
    notes = []
    for name, directory in named:
        if name in adapters:
            raise UsageError(f"two adapters are called {name}: give each a name with --adapter NAME=DIR")
        source = provenance(directory, base)
        trained_over, served = (bundled_name(model) or model for model in (source.base, config.model.model))
        if trained_over != served:
            notes.append(f"{directory} was trained on {source.base}, and is served over {config.model.model}")
        adapters[name] = source.adapter
    name = _model_name(config.model.model)
    if name in adapters:
        raise UsageError(f"{name} is the base's name: give the adapter another one with --adapter NAME=DIR")
    return Sources(config, name, adapters, tuple(notes))


def _target(target: str, base: str | None) -> tuple[Config, list[tuple[str, Path]]]:
    path = Path(target).expanduser()
    if path.suffix == ".toml" and path.is_file():
        return load(path).config, []
    if path.is_dir() and "model_type" not in read_object(path / "config.json"):  # not a model's directory
        named = _runs(path) if (path / MANIFEST).is_file() else [(_name_of(path), path)]
        return provenance(named[0][1], base).config, named
    if path.is_file():
        raise UsageError(f"{target} is not a TOML file: give a model, a run's directory or a run's file")
    return parse_dict({"model": {"model": str(path.resolve()) if path.is_dir() else target}}), []


def _named_adapter(text: str) -> tuple[str, Path]:
    name, equals, directory = text.partition("=")
    if not (equals and name and directory):
        raise UsageError(f"--adapter takes NAME=DIR, not {text!r}")
    return name, Path(directory).expanduser()


def _runs(campaign: Path) -> list[tuple[str, Path]]:
    runs = read_manifest(campaign)["runs"]
    paths = [campaign / run["path"] for run in runs if run["state"] == "done"]
    return [(_name_of(path), path) for path in paths or [campaign]]


def _name_of(directory: Path) -> str:
    folder = directory.resolve()
    if not (folder / ADAPTER_CONFIG).is_file():
        find_adapter(directory)
        return folder.name
    return folder.parent.name if folder.name == "final" else folder.name


def _model_name(model: str) -> str:
    return bundled_name(model) or (Path(model).name if Path(model).is_dir() else model)
