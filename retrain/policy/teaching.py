"""Where a teacher is, and what can be known to be wrong with it before anything is loaded. Nothing of torch is imported
here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from retrain.config import Config
from retrain.config.algorithm import POLICY
from retrain.errors import ModelError
from retrain.files import search_folders
from retrain.models.directory import find_file, light_tokenizer, local_directory, model_fault
from retrain.records.reader import RunReader, final_adapters, read_object
from retrain.records.schema.layout import ADAPTER_WEIGHTS, CONFIG, FINAL

BASE = "base"  # Teacher name that stands for the frozen base model


@dataclass(frozen=True)
class Place:
    """What ``[distillation] teacher`` names: ``name`` is the directory of an adapter or model, a hub name, or what a
    server calls it."""

    kind: Literal["base", "policy", "adapter", "model", "server"]
    name: str


def place_of(config: Config, folder: Path) -> Place:
    """Where the run's teacher is, looked for in the TOML's ``folder`` and the current directory.

    Raises ModelError, whose text follows the teacher's name, when it is nowhere or cannot be loaded.
    """
    own = config.distillation
    named = own.teacher or ""
    if own.url is not None:
        return Place("server", named)
    if named in (BASE, POLICY):
        return Place("base" if named == BASE else "policy", named)
    found = (each / Path(named).expanduser() for each in search_folders(folder))
    directory = next((path for path in found if path.is_dir()), None)
    if directory is None:
        directory = local_directory(named)
    if directory is not None and (adapter := _adapter_in(directory)):
        return Place("adapter", str(adapter))
    if directory is not None and (finals := final_adapters(directory)):
        raise ModelError(f"it is a campaign: give one of its runs, such as {finals[0].parent}")
    name = named if directory is None else str(directory)
    if fault := model_fault(name, trust_remote_code=config.model.trust_remote_code):
        either = "" if directory is None else ", nor an adapter"
        raise ModelError(f"{fault}{either}")
    return Place("model", name)


def _adapter_in(directory: Path) -> Path | None:
    """The adapter of a run's directory, its ``final/`` or else its newest checkpoint, or of an adapter directory."""
    checkpoints = reversed(RunReader(directory).checkpoint_directories())
    places = (directory, directory / FINAL, *checkpoints)
    return next((path for path in places if (path / ADAPTER_WEIGHTS).is_file()), None)


def teacher_fault(config: Config, folder: Path) -> str:
    """Why this run's teacher cannot be used, as far as files tell; "" where nothing is known to be wrong."""
    try:
        place = place_of(config, folder)
    except ModelError as error:
        return str(error)
    if place.kind != "model":
        return ""
    if config.backend.shard != "none":
        return (
            f'it is a second model, which with shard = "{config.backend.shard}" rank 0 alone would compute while the '
            "others wait: give an adapter of the same base, or serve it and give its url"
        )
    model = config.model
    pairs = ((model.model, model.revision), (place.name, None))
    if any(find_file(name, "tokenizer.json", revision) is None for name, revision in pairs):
        return ""  # told once both are loaded
    try:
        own, other = (light_tokenizer(name, revision).tokenizer.get_vocab() for name, revision in pairs)
    except ModelError as error:
        return str(error)
    return vocabulary_fault(own, other, model.model)


def vocabulary_fault(own: Mapping[str, int], other: Mapping[str, int], name: str) -> str:
    """What keeps a teacher with the vocabulary ``other`` (token → id) from reading the tokens of ``name``, which has
    ``own``; "" where it reads each as the same text."""
    wrong = [token for token, number in own.items() if other.get(token) != number]
    if not wrong:
        return ""
    first = min(wrong, key=lambda token: own[token])
    theirs = other.get(first)
    what = "it does not have" if theirs is None else f"is its token {theirs}"
    return (
        f"its tokens are not those of {name}: {len(wrong)} of {len(own)} differ, such as {first!r}, token "
        f"{own[first]}, which {what}; a teacher scores the very tokens that a student samples: both need one tokenizer"
    )


def recorded_base(adapter: Path) -> tuple[str | None, str | None]:
    """Fingerprint and number format of the base that an adapter was trained on, as its run recorded them; None where
    nothing is recorded."""
    for directory in (adapter, *list(adapter.parents)[:2]):
        content = read_object(directory / CONFIG)
        if isinstance(content.get("base"), dict):
            return content["base"].get("fingerprint"), (content.get("built") or {}).get("dtype")
    return None, None
