"""Tools that the policy may call during an episode."""


class ToolError(Exception):
    """The policy called a tool wrongly; the text is what it reads as the tool's answer."""
