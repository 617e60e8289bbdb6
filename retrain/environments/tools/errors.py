"""What a tool tells the policy of a call that it cannot carry out."""

from __future__ import annotations


class ToolError(Exception):
    """The policy called a tool wrongly; the text is what it reads as the tool's answer."""
