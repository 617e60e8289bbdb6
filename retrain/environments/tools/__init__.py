"""Tools that the policy may call during an episode."""


class ToolError(Exception):
    """The policy called a tool incorrectly; the text becomes the tool's answer."""
