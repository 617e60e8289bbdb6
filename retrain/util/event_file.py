"""Files of JSON lines that one process appends to while others read them, perhaps on another machine through NFS.

Such a file is opened anew for every look, because another machine sees what was there when its writer last closed it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.files import append_bytes


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line of JSON. Raises OSError when it cannot be written; no part of it stays then."""
    append_bytes(path, json.dumps(line).encode() + b"\n")


class EventFile:
    """Reads the lines that have been appended to a file since the last time."""

    def __init__(self, path: Path, from_end: bool = False):
        self.path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def lines(self) -> list[dict[str, Any]]:
        """Return the whole lines since the last time. Half a line is waited for, and so is one of which the length has
        arrived and not yet the bytes, which NFS shows as zeros."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read().partition(b"\0")[0]
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
