"""Find models on this machine and check their files.

Faults are found from names, sizes and headers: no weights are read, and neither torch nor transformers is imported.
Bundled models are in directories next to this file, in ``transformers`` format.
"""

import difflib
import hashlib
import importlib.util
import json
import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

from retrain.errors import ModelError, first_line

BUNDLED = {"tiny-reasoner": "tiny_reasoner", "tiny-tool-user": "tiny_tool_user"}
"""Directory of each bundled model, next to this file, by model name."""
CONFIG = "config.json"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json",
    "sentencepiece.bpe.model",
)  # fmt: skip
"""Files with a vocabulary; one of them is enough."""
SNAPSHOT: list[str] = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
"""Patterns of the files of a hub model that a server loads, beside the weights."""
WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer")
HUB_NAME = re.compile(r"(?:[A-Za-z0-9_][\w.-]{0,95}/)?[A-Za-z0-9_][\w.-]{0,95}")
Task = Literal["CAUSAL_LM", "SEQUENCE_CLASSIFICATION"]
"""Task of a model, as in ``MODEL_FOR_<task>_MAPPING_NAMES`` of transformers."""
TASK_WORDS: dict[Task, str] = {"CAUSAL_LM": "language model", "SEQUENCE_CLASSIFICATION": "sequence classifier"}
CLASSIFIER = "ForSequenceClassification"
DIGESTED = (".json", ".jinja", ".txt", ".model", ".safetensors", ".bin")
"""Suffixes of the files that affect a model's outputs; ``files_digest`` hashes them."""
BLOCK, BLOCKS = 1 << 16, 256  # Size (bytes) and number of the blocks that are hashed of a large file


def bundled_model_path(name: str) -> Path | None:
    return Path(__file__).parent / BUNDLED[name] if name in BUNDLED else None


def bundled_name(model: str) -> str | None:
    """Return the name of a bundled model, given by name or by the path of its directory in any installation. Return
    None for other models."""
    if model in BUNDLED:
        return model
    parts = Path(model).parts[-3:]
    return next((name for name, folder in BUNDLED.items() if parts == ("retrain", "models", folder)), None)


def find_file(model: str, name: str, revision: str | None = None) -> Path | None:
    """Return a model's file on this machine (bundled, in a local directory, or in the hub's cache), or None."""
    if (directory := local_directory(model)) is not None:
        return directory / name if (directory / name).is_file() else None
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, name, revision=revision)
    except HFValidationError:  # a path such as ./model, which is no name of the hub
        return None
    return Path(cached) if isinstance(cached, str) else None


def local_directory(name: str, *folders: Path) -> Path | None:
    """Return the directory of a bundled model or a path, looked up in ``folders`` first; None if there is none."""
    path = Path(os.path.expanduser(name))
    places = [bundled_model_path(name)] if name in BUNDLED else [*(folder / path for folder in folders), path]
    return next((place for place in places if place is not None and place.is_dir()), None)


def model_directory(name: str, revision: str | None) -> Path:
    """Return the directory of a model: bundled, local, or the hub's snapshot of ``revision``, downloaded if it is not
    in the cache. Raises ModelError if it can be found nowhere."""
    if directory := local_directory(name):
        return directory
    from huggingface_hub import snapshot_download

    def snapshot(only_cached: bool, weights: str = "*.safetensors") -> Path:
        patterns = [*SNAPSHOT, weights]
        path = snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=only_cached)
        is_complete = weights == "*.bin" or any(Path(path).glob(weights))
        return Path(path) if is_complete else snapshot(only_cached, "*.bin")  # pickles only if there is nothing else

    try:
        return snapshot(only_cached=False)
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError):
            return snapshot(only_cached=True)
        where = f"{name} at revision {revision}" if revision else name
        raise ModelError(f"cannot find model {where}: {first_line(error)}") from error


def model_fault(name: str, *, trust_remote_code: bool = False) -> str:
    """Return why ``name`` (a directory, bundled model or hub name) cannot be loaded, or "". A hub name is only checked
    for its form and for similarity to a bundled name, because the model may have to be downloaded."""
    directory = local_directory(name)
    if directory is not None:
        return directory_fault(directory, trust_remote_code=trust_remote_code)
    if os.path.exists(os.path.expanduser(name)):
        return "it is a file: a model is a directory in transformers format, or a hub name"
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith("/"):
        return "there is no such directory"
    if not HUB_NAME.fullmatch(name) or "--" in name or ".." in name:
        return 'it is neither a directory nor a hub name, which is like "Qwen/Qwen3-0.6B"'
    close = difflib.get_close_matches(name, BUNDLED, n=1, cutoff=0.8)
    return f'it is neither a directory nor a bundled model: did you mean "{close[0]}"' if close else ""


def reward_model_fault(name: str, *folders: Path) -> str:
    """Return why ``name`` is no reward model, or "". It is a directory, looked up in ``folders`` first, or a hub name.
    For a hub name, the configuration is checked only if it is in the local cache."""
    directory = local_directory(name, *folders)
    fault = model_fault(name) if directory is None else directory_fault(directory, task="SEQUENCE_CLASSIFICATION")
    cached = find_file(name, CONFIG) if directory is None else directory / CONFIG
    if fault or cached is None:
        return fault
    try:
        config = _json(cached)
    except ModelError as error:
        return str(error)
    names = [name for name in config.get("architectures") or () if isinstance(name, str)]
    if names and not any(name.endswith(CLASSIFIER) for name in names):
        return f"it is a {names[0]}, and a reward model is a …{CLASSIFIER} with one label"
    named = config.get("id2label")
    labels = len(named) if isinstance(named, dict) else config.get("num_labels") or 2  # transformers' own default
    return "" if labels == 1 else f"it has {labels} labels, and a reward model has one, its score"


def files_digest(directory: Path) -> str:
    """Return the SHA-256 (hex) of the files with the suffixes ``DIGESTED``. Of a file over 16 MiB, only the size and
    256 evenly spread blocks are hashed."""
    files = sorted(path for path in directory.iterdir() if path.suffix in DIGESTED and path.is_file())
    return _digest(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in files))


@cache
def _digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, size, _ in files:
        digest.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as file:
            if size <= BLOCK * BLOCKS:
                digest.update(file.read())
                continue
            for index in range(BLOCKS):
                file.seek(index * (size - BLOCK) // (BLOCKS - 1))
                digest.update(file.read(BLOCK))
    return digest.hexdigest()


def directory_fault(directory: Path, *, trust_remote_code: bool = False, task: Task = "CAUSAL_LM") -> str:
    try:
        if not any(directory.iterdir()):
            return "it is an empty directory"
        _check_config(directory, trust_remote_code, task)
        _check_weights(directory)
        _check_tokenizer(directory, trust_remote_code)
    except ModelError as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read: {error.filename or directory}: {(error.strerror or str(error)).lower()}"
    return ""


def _check_config(directory: Path, trust_remote_code: bool, task: Task) -> None:
    if not (directory / CONFIG).is_file():
        raise ModelError(f"it has no {CONFIG}: a model directory is what save_pretrained writes")
    config = _json(directory / CONFIG)
    kind, own_code = config.get("model_type"), bool(config.get("auto_map"))
    supported = model_types(task)
    if isinstance(kind, str) and (supported is None or kind in supported):
        return
    if own_code and task != "CAUSAL_LM":
        raise ModelError("it comes with its own code, which is run for [model] alone")
    if own_code and trust_remote_code:
        return
    if own_code:
        raise ModelError("it comes with its own code: read it, then set trust_remote_code = true")
    if not isinstance(kind, str):
        raise ModelError(f"its {CONFIG} has no model_type")
    close = difflib.get_close_matches(kind, supported or (), n=1, cutoff=0.7)
    hint = f'; the nearest that it has is "{close[0]}"' if close else ""
    reason = f"of which this transformers has no {TASK_WORDS[task]}{hint}"
    raise ModelError(f'its {CONFIG} has model_type "{kind}", {reason}')


@cache
def model_types(task: Task) -> frozenset[str] | None:
    """Return the model types that the installed transformers supports for ``task``, parsed from its source; None if the
    table is not found."""
    spec = importlib.util.find_spec("transformers")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place) / "models" / "auto" / "modeling_auto.py"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        table = re.search(rf"^MODEL_FOR_{task}_MAPPING_NAMES = .*?^\)", text, re.MULTILINE | re.DOTALL)
        if table and (types := re.findall(r'^\s+\("([\w.-]+)",', table.group(), re.MULTILINE)):
            return frozenset(types)
    return None


def _check_weights(directory: Path) -> None:
    for index, whole in ((INDEX, WHOLE), (PICKLED_INDEX, PICKLED)):
        if (directory / whole).is_file():  # as in transformers: one file before shards, and both before pickles
            return _check_file(directory / whole)
        if (directory / index).is_file():
            return _check_shards(directory, index)
    raise ModelError(f"it has no weights: neither {WHOLE} nor {INDEX}")


def _check_shards(directory: Path, index: str) -> None:
    shards = _json(directory / index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise ModelError(f"its {index} has no weight_map")
    names = sorted(set(shards.values()))
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise ModelError(f"it lacks {len(missing)} of the {len(names)} files that {index} names, such as {missing[0]}")
    for name in names:
        _check_file(directory / name)


def _check_file(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    size = path.stat().st_size
    if size == 0:
        raise ModelError(f"its {path.name} is empty")
    with open(path, "rb") as file:
        if file.read(8) == b"version ":
            raise ModelError(f"it has only a Git LFS pointer in place of {path.name}; type: git lfs pull")
    if path.suffix == ".safetensors":
        try:
            safe_open(path, framework="numpy")
        except SafetensorError as error:
            reason = str(error).removeprefix("Error while deserializing header: ")
            raise ModelError(f"its {path.name} of {size:,} bytes is cut off or damaged: {reason}") from None


def _check_tokenizer(directory: Path, trust_remote_code: bool) -> None:
    vocabularies = [name for name in VOCABULARIES if (directory / name).is_file()]
    if "tokenizer.json" in vocabularies:
        _json(directory / "tokenizer.json")
    file = directory / "tokenizer_config.json"
    settings = _json(file) if not vocabularies and file.is_file() else {}
    own_code = settings.get("auto_map") and trust_remote_code
    if not (vocabularies or own_code or settings.get("tokenizer_class") in WITHOUT_VOCABULARY):
        raise ModelError(f"it has no tokenizer: none of {', '.join(VOCABULARIES[:3])} …")


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ModelError(f"its {path.name} is {'not JSON' if path.stat().st_size else 'empty'}") from None
    if not isinstance(content, dict):
        raise ModelError(f"its {path.name} is not a JSON object")
    return content
