"""The error whose text a model reads."""

from __future__ import annotations


class ToolError(Exception):
    """A call that cannot be answered; its text says to the model what was wrong and what to write instead."""
