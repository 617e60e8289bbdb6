"""Finds a run's teacher and checks it before anything is loaded; planning and training call it. Does not import
torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from retrain.config import Config
from retrain.config.algorithm import POLICY
from retrain.errors import ModelError
from retrain.files import search_folders
from retrain.models.directory import find_file, local_directory, model_fault
from retrain.records.reader import checkpoint_paths, final_adapters, read_object
from retrain.records.schema.layout import ADAPTER_WEIGHTS, CONFIG, FINAL
from retrain.tokenizer import light_tokenizer

BASE = "base"  # Teacher name that stands for the frozen base model


@dataclass(frozen=True)
class TeacherSource:
    kind: Literal["base", "policy", "adapter", "model", "server"]
    name: str  # Directory of an adapter or model, hub name, or the server's name of the model


def teacher_source(config: Config, folder: Path) -> TeacherSource:
    """Return the run's teacher. Directories are looked up in ``folder``, which holds the TOML file, and then in the
    current directory.

    Raises ModelError if the teacher is missing or cannot be loaded; its message continues after the teacher's name.
    """
    section = config.distillation
    named = section.teacher or ""
    if section.url is not None:
        return TeacherSource("server", named)
    if named in (BASE, POLICY):
        return TeacherSource("base" if named == BASE else "policy", named)
    candidates = (base / Path(named).expanduser() for base in search_folders(folder))
    directory = next((path for path in candidates if path.is_dir()), None) or local_directory(named)
    if directory is None:
        _check_model(named, config, "")
        return TeacherSource("model", named)
    places = (directory, directory / FINAL, *reversed(checkpoint_paths(directory)))
    if adapter := next((path for path in places if (path / ADAPTER_WEIGHTS).is_file()), None):
        return TeacherSource("adapter", str(adapter))
    if finals := final_adapters(directory):
        raise ModelError(f"it is a campaign: give one of its runs, such as {finals[0].parent}")
    _check_model(str(directory), config, ", nor an adapter")
    return TeacherSource("model", str(directory))


def _check_model(name: str, config: Config, addition: str) -> None:
    if fault := model_fault(name, trust_remote_code=config.model.trust_remote_code):
        raise ModelError(f"{fault}{addition}")


def teacher_fault(config: Config, folder: Path) -> str:
    """Return why this run's teacher cannot be used, as far as files show; "" if no fault is found."""
    try:
        source = teacher_source(config, folder)
    except ModelError as error:
        return str(error)
    if source.kind != "model":
        return ""
    if config.backend.shard != "none":
        return (
            f'it is a second model, which with shard = "{config.backend.shard}" rank 0 alone would compute while the '
            "others wait: give an adapter of the same base, or serve it and give its url"
        )
    model = config.model
    pairs = ((model.model, model.revision), (source.name, None))
    if any(find_file(name, "tokenizer.json", revision) is None for name, revision in pairs):
        return ""  # checked once both are loaded
    try:
        student, teacher = (light_tokenizer(name, revision).tokenizer.get_vocab() for name, revision in pairs)
    except ModelError as error:
        return str(error)
    return vocabulary_fault(student, teacher, model.model)


def vocabulary_fault(student: Mapping[str, int], teacher: Mapping[str, int], name: str) -> str:
    """Return how the teacher's vocabulary (token → id) differs from that of the student ``name``; "" if it has all of
    the student's tokens with equal ids."""
    # The teacher may have more tokens than the student, which never samples them.
    wrong = [token for token, number in student.items() if teacher.get(token) != number]
    if not wrong:
        return ""
    first = min(wrong, key=lambda token: student[token])
    number_there = teacher.get(first)
    difference = "it does not have" if number_there is None else f"is its token {number_there}"
    return (
        f"its tokens are not those of {name}: {len(wrong)} of {len(student)} differ, such as {first!r}, token "
        f"{student[first]}, which {difference}; a "
        "teacher scores the very tokens that a student samples: both need one tokenizer"
    )


def recorded_base(adapter: Path) -> tuple[str | None, str | None]:
    """Return fingerprint and dtype of the base on which an adapter was trained; None for a fact that its run did not
    record."""
    for directory in (adapter, *list(adapter.parents)[:2]):
        content = read_object(directory / CONFIG)
        if isinstance(content.get("base"), dict):
            return content["base"].get("fingerprint"), (content.get("built") or {}).get("dtype")
    return None, None
