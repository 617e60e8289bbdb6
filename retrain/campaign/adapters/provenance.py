"""Where an adapter on disk comes from: its base model, and the run that trained it with its template and settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.campaign.adapters.squeeze import find_adapter
from retrain.campaign.planning.manifest import MANIFEST, PLAN
from retrain.config import Config, parse_dict
from retrain.errors import ConfigError, ModelError, UsageError
from retrain.files import read_json
from retrain.models import bundled_model_path

CONFIG = "config.json"
SECTIONS = ("model", "lora", "data", "backend", "inference", "training", "evaluation")
"""What an adapter's use depends on; the rest of a run's configuration is about its training."""


@dataclass(frozen=True)
class Provenance:
    """An adapter's directory, its base (a hub name, or an absolute path), and what the run that trained it recorded.

    ``record`` is the directory of that run, None where an adapter lies elsewhere; ``config`` then has the defaults.
    ``fingerprint`` and ``dtype`` are those of the base that it was trained on, as far as they are recorded.
    """

    adapter: Path
    base: str
    revision: str | None
    config: Config
    record: Path | None = None
    fingerprint: str | None = None
    dtype: str | None = None


def provenance(directory: Path, base: str | None = None) -> Provenance:
    """The adapter of a run, checkpoint, ``final/`` or adapter directory, with all that is known of it.

    ``base`` replaces the base that the adapter names. Raises UsageError when there is no adapter, or a campaign has
    several; ModelError when the base is a directory that is not there.
    """
    _refuse_several(directory)
    adapter = find_adapter(directory).resolve()
    named = _adapter_config(adapter)
    found = _recorded(adapter)
    name, revision = base or named.get("base_model_name_or_path"), None if base else named.get("revision")
    if not name:
        raise ModelError(f"{adapter} does not name its base model: type --base MODEL")
    config = found.config.model_copy(
        update={"model": found.config.model.model_copy(update={"model": name, "revision": revision})}
    )
    path = _base_path(name, found.record)
    return replace(found, base=path, revision=revision, config=config)


def _refuse_several(directory: Path) -> None:
    """Which run of a campaign is meant has to be said."""
    if (directory / MANIFEST).is_file() and not (directory / "adapter_model.safetensors").is_file():
        content = read_json(directory / MANIFEST)
        runs = [run for run in content.get("runs", []) if isinstance(run, dict) and run.get("path") not in (None, ".")]
        if runs:
            example = next((run for run in runs if run.get("state") == "done"), runs[0])["path"]
            raise UsageError(f"{directory} is a campaign: give one of its runs, such as {directory / example}")


def _adapter_config(adapter: Path) -> dict[str, Any]:
    try:
        content = read_json(adapter / "adapter_config.json")
    except (OSError, ValueError) as error:
        raise ModelError(f"{adapter / 'adapter_config.json'} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{adapter / 'adapter_config.json'} is no JSON object")
    return content


def _recorded(adapter: Path) -> Provenance:
    """What the nearest run or campaign above the adapter says of it; its base is filled in by the caller."""
    for folder in (adapter, *list(adapter.parents)[:4]):
        content = _own_record(folder)
        if content is None:
            continue
        try:
            config = parse_dict({key: content[key] for key in SECTIONS if key in content})
        except ConfigError as error:
            raise UsageError(f"{folder / CONFIG} is not of this version of retrain: {error}") from error
        base, built = content.get("base") or {}, content.get("built") or {}
        return Provenance(adapter, "", None, config, folder, base.get("fingerprint"), built.get("dtype"))
    return Provenance(adapter, "", None, parse_dict({}))


def _own_record(folder: Path) -> dict[str, Any] | None:
    """The content of ``config.json`` where it is one of a run or campaign of ours, and not a model's."""
    try:
        content = read_json(folder / CONFIG)
    except (OSError, ValueError):
        return None
    ours = isinstance(content, dict) and all(isinstance(content.get(key), dict) for key in (*SECTIONS, "types"))
    return content if ours else None


def _base_path(name: str, record: Path | None) -> str:
    """The base as any program finds it: an absolute path for what lies on this machine, else the hub's name.

    A relative path is looked for from here, then from the folder of the file that the run was started with.
    """
    bundled = bundled_model_path(name)
    if bundled is not None:
        return str(bundled.resolve())
    plans = [folder / PLAN for folder in (record, *(list(record.parents)[:2] if record else ())) if folder is not None]
    folders = [Path.cwd(), *(Path(read_json(plan)["folder"]) for plan in plans if plan.is_file())]
    for folder in folders:
        path = folder / Path(name).expanduser()
        if path.is_dir():
            return str(path.resolve())
    if name.startswith(("/", "./", "../", "~")) or name.count("/") != 1:
        raise ModelError(f"the adapter's base {name!r} is no directory here: type --base and where it lies now")
    return name
