"""Find the base model of an adapter, and the run that trained it with its template and settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from retrain.adapters.squeeze import find_adapter
from retrain.config import Config, parse_dict
from retrain.config.legacy import without_removed
from retrain.errors import ConfigError, ModelError, UsageError
from retrain.files import read_json
from retrain.models.directory import bundled_model_path, bundled_name
from retrain.policy.base import QUANTIZED_MARK, BaseModel, find_model_files, load_weights
from retrain.records.reader import read_object
from retrain.records.schema.base import Row
from retrain.records.schema.layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG, MANIFEST, PLAN

# Sections that affect the use of an adapter; the others only affect training
SECTIONS = ("model", "lora", "data", "backend", "inference", "training", "evaluation")


@dataclass(frozen=True)
class Provenance:
    """An adapter's directory, and the records of the run that trained it.

    ``record`` is the directory of the run, and ``config`` its settings; without records, ``record`` is None and
    ``config`` has defaults. ``fingerprint`` and ``dtype`` describe the base that the adapter was trained on, if
    recorded.
    """

    adapter: Path
    config: Config
    record: Path | None = None
    fingerprint: str | None = None
    dtype: str | None = None

    @property
    def base(self) -> str:
        return self.config.model.model

    def load(self, devices: str, dtype: str) -> BaseModel:
        return load_weights(find_model_files(self.config), devices, dtype)

    def unquantised(self) -> Provenance:
        model = self.config.model.model_copy(update={"quantize": "none"})
        own = self.fingerprint and self.fingerprint.partition(QUANTIZED_MARK)[0]
        return replace(self, config=self.config.model_copy(update={"model": model}), fingerprint=own)

    def other_weights(self, base: BaseModel) -> str:
        """Return a warning if the adapter was trained on weights other than those of ``base``; "" if it was not, or if
        that is not known."""
        same_format = self.dtype == str(base.dtype).removeprefix("torch.")
        if not self.fingerprint or not same_format or self.fingerprint == base.fingerprint:
            return ""
        return f"{self.base} holds other weights than those that {self.adapter} was trained on"


def provenance(directory: Path, base: str | None = None) -> Provenance:
    """Return the adapter of a run, checkpoint, ``final/`` or adapter directory with the records of its run. ``base``
    replaces the base that the adapter names. Raises UsageError if there is no adapter, or if the directory is a
    campaign with several; ModelError if the base is a directory that is missing."""
    _refuse_several(directory)
    adapter = find_adapter(directory).resolve()
    named = _adapter_config(adapter)
    recorded = _recorded(adapter)
    name, revision = base or named.get("base_model_name_or_path"), None if base else named.get("revision")
    if not name:
        raise ModelError(f"{adapter} does not name its base model: type --base MODEL")
    model = recorded.config.model.model_copy(update={"model": _base_path(name, recorded.record), "revision": revision})
    return replace(recorded, config=recorded.config.model_copy(update={"model": model}))


def _refuse_several(directory: Path) -> None:
    if (directory / MANIFEST).is_file() and not (directory / ADAPTER_WEIGHTS).is_file():
        runs = [
            run
            for run in read_object(directory / MANIFEST).get("runs", [])
            if isinstance(run, dict) and run.get("path") not in (None, ".")
        ]
        if runs:
            example = next((run for run in runs if run.get("state") == "done"), runs[0])["path"]
            raise UsageError(f"{directory} is a campaign: give one of its runs, such as {directory / example}")


def _adapter_config(adapter: Path) -> Row:
    try:
        content = read_json(adapter / ADAPTER_CONFIG)
    except (OSError, ValueError) as error:
        raise ModelError(f"{adapter / 'adapter_config.json'} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{adapter / 'adapter_config.json'} is not a JSON object")
    return content


def _recorded(adapter: Path) -> Provenance:
    """Return the records of the nearest run or campaign directory that contains the adapter, or defaults. The caller
    sets the base."""
    for folder in (adapter, *list(adapter.parents)[:4]):
        content = read_object(folder / CONFIG)
        if not all(isinstance(content.get(key), dict) for key in (*SECTIONS, "types")):
            continue  # not a run or campaign of retrain: a model's config
        keys = (*SECTIONS, "warmup")  # only with a warm-up, max_steps may be 0
        try:
            config = parse_dict(without_removed({key: content[key] for key in keys if key in content}))
        except ConfigError as error:
            raise UsageError(f"{folder / CONFIG} is not of this version of retrain: {error}") from error
        base, built = content.get("base") or {}, content.get("built") or {}
        return Provenance(adapter, config, folder, base.get("fingerprint"), built.get("dtype"))
    return Provenance(adapter, parse_dict({}))


def _base_path(name: str, record: Path | None) -> str:
    """Return the base as an absolute path if it is on this machine, else the hub's name.

    Relative paths are resolved from the current directory, then from the folder of the run's file. A missing directory
    of a bundled model, as from another machine, resolves to the one of this installation.
    """
    bundled = bundled_model_path(name)
    if bundled is not None:
        return str(bundled.resolve())
    plans = [folder / PLAN for folder in (record, *(list(record.parents)[:2] if record else ())) if folder is not None]
    folders = [Path.cwd(), *(Path(read_object(plan)["folder"]) for plan in plans if plan.is_file())]
    for folder in folders:
        path = folder / Path(name).expanduser()
        if path.is_dir():
            return str(path.resolve())
    if bundled := bundled_model_path(bundled_name(name) or ""):
        return str(bundled.resolve())
    if name.startswith(("/", "./", "../", "~")) or name.count("/") != 1:
        raise ModelError(f"the adapter's base {name!r} is not a directory here: give its present path with --base")
    return name
