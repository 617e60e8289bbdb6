"""Models on this machine: those that ship with the package, and files of others.

Importing this loads nothing heavy.
"""

import re
from pathlib import Path

BUNDLED = {"tiny-reasoner": "tiny_reasoner", "tiny-tool-user": "tiny_tool_user"}
"""Model name in a configuration file → directory beside this file."""


def bundled_model_path(name: str) -> Path | None:
    """The directory of the bundled model called ``name``, or None when no bundled model has that name.

    The directory is in ordinary ``transformers`` format and holds weights, tokenizer and chat template.
    """
    directory = BUNDLED.get(name)
    return None if directory is None else Path(__file__).parent / directory


def bundled_name(model: str) -> str | None:
    """Return the name of the bundled model that ``model`` names or whose directory it is, in any installation of
    retrain on any machine, or None."""
    if model in BUNDLED:
        return model
    parts = Path(model).parts[-3:]
    return next((name for name, folder in BUNDLED.items() if parts == ("retrain", "models", folder)), None)


def find_file(model: str, name: str, revision: str | None = None) -> Path | None:
    """A model's file on this machine (bundled, in a local directory, or in the hub's cache), or None."""
    path = (bundled_model_path(model) or Path(model).expanduser()) / name
    if path.is_file():
        return path
    if bundled_model_path(model) or not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, name, revision=revision)
    except HFValidationError:  # a path such as ./model, which is no name of the hub
        return None
    return Path(cached) if isinstance(cached, str) else None
