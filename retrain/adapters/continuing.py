"""Compress an adapter, then train it on at the smaller rank (the ``continue`` mode of LoRA-Squeeze, 2602.10993)."""

from collections.abc import Iterable
from pathlib import Path

from retrain.adapters.squeeze import compress_adapter, find_adapter
from retrain.config import LoadedConfig, parse_dict
from retrain.config.checking import KeyLocations
from retrain.config.describe import document
from retrain.config.runs import RunSpec, run_directory
from retrain.errors import UsageError
from retrain.files import read_json
from retrain.records.reader import read_plan_file
from retrain.records.schema.layout import ADAPTER_CONFIG, CONFIG, PLAN


def continuation(directory: Path, rank: int, steps: int, out: Path | None) -> tuple[LoadedConfig, Path]:
    """Compress the adapter of a run or campaign directory to ``rank``, and return configuration and directory of a new
    run that trains it for ``steps`` steps.

    The new run copies all settings but rank, alpha and length; its directory is ``out`` or ``squeeze/continue_<rank>``
    beside the adapter. A repeated call returns the same run, to continue it. Raises UsageError if the directory has no
    adapter or no plan, or the rank exceeds the adapter's.
    """
    adapter = find_adapter(directory)
    owner = _holding((adapter.parent, adapter.parent.parent), CONFIG)
    home = _holding((directory, *directory.absolute().parents), PLAN)
    if owner is None or home is None:
        raise UsageError(
            f"{directory} is not a run directory of retrain: its settings are not known, so it cannot go on"
        )
    plan = read_plan_file(home)
    specs = [RunSpec.from_json(run) for run in plan["runs"]]
    spec = next((spec for spec in specs if run_directory(home, spec).resolve() == owner.resolve()), None)
    if spec is None:
        raise UsageError(f"{home / PLAN} has no run in {owner}")
    target = out or owner / "squeeze" / f"continue_{rank}"
    compressed = target.with_name(f"{target.name}_from")
    if not ((target / PLAN).is_file() and (compressed / ADAPTER_CONFIG).is_file()):
        compress_adapter(adapter, rank, compressed)  # a repeated call uses the adapter that the run began with
    settings = spec.config.to_dict()
    settings["model"]["lora_rank"] = rank
    settings["lora"] |= {"alpha": read_json(compressed / ADAPTER_CONFIG)["lora_alpha"], "anneal": []}
    settings["training"]["max_steps"] = steps
    settings["resume"]["from"] = str(compressed.absolute())
    settings["squeeze"] |= {"compress_to": None, "target_ranks": None}
    settings["backend"]["adapter_path"] = None  # the directory that contains the original adapter
    settings["logging"]["wandb_run_name"] = None
    if settings["logging"]["wandb_group"] == spec.label:
        settings["logging"]["wandb_group"] = None
    settings.pop("campaign", None)
    warnings = []
    if settings.pop("warmup")["source"]:  # the compressed adapter already contains it
        warnings.append("the reference policy of the continued run is the base without its [warmup]: KL is larger")
    config = parse_dict(settings)
    # No file: its folder is where relative paths are looked up, and its stem the name.
    path = Path(plan["folder"]) / f"{owner.name}_continue_{rank}.toml"
    return LoadedConfig(config, path, document(settings), KeyLocations(path.name), warnings), target


def _holding(folders: Iterable[Path], name: str) -> Path | None:
    return next((folder for folder in folders if (folder / name).is_file()), None)
