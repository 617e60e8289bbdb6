"""Models that ship with the package; importing this loads nothing heavy."""

from __future__ import annotations

from pathlib import Path

BUNDLED = {"tiny-reasoner": "tiny_reasoner"}
"""Model name in a configuration file → directory beside this file."""


def bundled_model_path(name: str) -> Path | None:
    """The directory of the bundled model called ``name``, or None when no bundled model has that name.

    The directory is in ordinary ``transformers`` format and holds weights, tokenizer and chat template.
    """
    directory = BUNDLED.get(name)
    return None if directory is None else Path(__file__).parent / directory
