"""Where each key of a TOML text stands.

`tomli` gives values without positions, so this walks over a text that `tomli` has already accepted and notes
the line of every key, table header and array element. It need not reject anything.
"""

import re
from contextlib import suppress
from typing import NamedTuple

import tomli

Path = tuple[str | int, ...]

_BLANK = re.compile(r"[ \t]*")
_FILLER = re.compile(r"(?:[ \t\n]+|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"""(?:"{0,2})'  # a multi-line string may end in up to two quotes of its own
    r"|'''.*?'''(?:'{0,2})"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}\n#]*")


def key_lines(text: str) -> dict[Path, int]:
    """The 1-based line of every path in a valid TOML ``text``.

    A path has the names of tables and keys, and indices for elements of arrays and of arrays of tables:
    ``("campaign", "conditions", 0, "lr")``. A quoted key that contains dots is one name. Tables that are only
    implied (``a`` in ``[a.b]``) stand where they first appear.
    """
    return _Walk(text.replace("\r\n", "\n")).document()


class Repeat(NamedTuple):
    """A key or table that is written twice, on these 1-based lines."""

    path: Path
    first: int
    again: int
    is_table: bool


def find_repeat(text: str) -> Repeat | None:
    """What ``text``, valid TOML but for the end of its last line, writes twice; None when it is wrong otherwise."""
    walk = _Walk(text.replace("\r\n", "\n"))
    with suppress(ValueError, IndexError):  # where the text stops to be TOML
        walk.document()
    return walk.repeat


class _Walk:
    def __init__(self, text: str):
        self.text = text
        self.position = 0
        self.counted = 0
        self.line = 1
        self.lines: dict[Path, int] = {}
        self.array_lengths: dict[Path, int] = {}
        self.written: dict[Path, int] = {}
        self.repeat: Repeat | None = None

    def document(self) -> dict[Path, int]:
        table: Path = ()
        self._skip(_FILLER)
        while self.position < len(self.text):
            if self._at("["):
                table = self._header()
            else:
                self._pair(table)
            self._skip(_FILLER)
        return self.lines

    def _at(self, text: str) -> bool:
        return self.text.startswith(text, self.position)

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.position)
        if match is None:
            raise ValueError(f"not TOML at line {self._line()}")
        self.position = match.end()
        return match.group()

    def _line(self) -> int:
        self.line += self.text.count("\n", self.counted, self.position)
        self.counted = self.position
        return self.line

    def _note(self, path: Path, line: int) -> None:
        for length in range(1, len(path) + 1):
            self.lines.setdefault(path[:length], line)

    def _write(self, path: Path, line: int, is_table: bool) -> None:
        """As ``_note``, of what may be written only once."""
        if path in self.written and self.repeat is None:
            self.repeat = Repeat(path, self.written[path], line, is_table)
        self.written.setdefault(path, line)
        self._note(path, line)

    def _name(self) -> str:
        if self.text[self.position] in "\"'":
            quoted = self._skip(_STRING)
            return next(iter(tomli.loads(f"{quoted} = 0")))
        return self._skip(_BARE_KEY)

    def _names(self) -> list[str]:
        names = []
        while True:
            self._skip(_BLANK)
            names.append(self._name())
            self._skip(_BLANK)
            if not self._at("."):
                return names
            self.position += 1

    def _header(self) -> Path:
        is_array = self._at("[[")
        self.position += 2 if is_array else 1
        line = self._line()
        names = self._names()
        self.position += 2 if is_array else 1
        path: Path = ()
        for name in names[:-1]:
            path = self._latest((*path, name))
        path = (*path, names[-1])
        if is_array:
            index = self.array_lengths.get(path, 0)
            self.array_lengths[path] = index + 1
            path = (*path, index)
        else:
            path = self._latest(path)
        self._write(path, line, is_table=True)
        return path

    def _latest(self, path: Path) -> Path:
        """Inside an array of tables, the path goes on in its latest element."""
        length = self.array_lengths.get(path)
        return path if length is None else (*path, length - 1)

    def _pair(self, table: Path) -> None:
        line = self._line()
        path = (*table, *self._names())
        for length in range(len(table) + 1, len(path)):  # a dotted key writes the tables that it goes through
            self.written.setdefault(path[:length], line)
        self.position += 1  # the equals sign
        self._write(path, line, is_table=False)
        self._skip(_BLANK)
        self._value(path)

    def _value(self, path: Path) -> None:
        if self._at("["):
            self.position += 1
            self._skip(_FILLER)
            index = 0
            while not self._at("]"):
                self._note((*path, index), self._line())
                self._value((*path, index))
                index += 1
                self._separator()
            self.position += 1
        elif self._at("{"):
            self.position += 1
            self._skip(_FILLER)
            while not self._at("}"):
                self._pair(path)
                self._separator()
            self.position += 1
        elif self.text[self.position] in "\"'":
            self._skip(_STRING)
        else:
            self._skip(_SCALAR)

    def _separator(self) -> None:
        self._skip(_FILLER)
        if self._at(","):
            self.position += 1
        self._skip(_FILLER)
