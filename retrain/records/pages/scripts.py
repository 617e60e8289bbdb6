"""Join ES modules of the page into one classic script, because browsers do not load ES modules from ``file://``.

Imports are ``import {a, b as c} from "./x.js"``, ``import a from "./x.js"`` or ``import * as a from "./x.js"``.
Exports stand before ``function``, ``async function``, ``class`` or ``const``, after ``export default``, or in a list,
``export {a, b as c}``, which may end in ``from "./x.js"``. All other module syntax raises ValueError.
"""

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

# A statement begins a line or, in a minified vendored file, follows another statement
_START = r"(?:^|(?<=[;}]))"
_FROM = r'\s*from\s*"(\.[^"]*)"\s*(?:;|$)'
_IMPORT = re.compile(_START + r"import\s*(\{[^{}]*\}|\*\s*as\s+[\w$]+|[\w$]+)" + _FROM, re.MULTILINE)
_REEXPORT = re.compile(_START + r"export\s*\{([^{}]*)\}" + _FROM, re.MULTILINE)
_LIST = re.compile(_START + r"export\s*\{([^{}]*)\}\s*(?:;|$)", re.MULTILINE)
_DEFAULT = re.compile(_START + r"export default ", re.MULTILINE)
_DECLARATION = re.compile(
    _START + r"export (?=(?:async function\*?|function\*?|class|const) ([A-Za-z_$][\w$]*))", re.MULTILINE
)
_TYPES = re.compile(r"/\*\*.*?\*/", re.DOTALL)  # JSDoc may name types as import("./x.js").A
_OTHER = re.compile(_START + r"(?:import|export)\b.*$|\bimport\s*\(", re.MULTILINE)


def joined(folder: Path, main: str) -> str:
    """Return one script that contains module ``main`` in ``folder`` and all modules that it imports.

    Raises ValueError if modules import each other in a circle or use other module syntax than listed above.
    """
    parts: dict[str, str] = {}

    def visit(name: str, importers: tuple[str, ...]) -> None:
        if name in importers:
            raise ValueError(f"{name} imports itself, over {' and '.join(importers)}")
        if name in parts:
            return
        text = (folder / name).read_text(encoding="utf-8")
        for _, other in [*_IMPORT.findall(text), *_REEXPORT.findall(text)]:
            visit(_resolved(name, other), (*importers, name))
        parts[name] = _wrapped(name, text)

    visit(main, ())
    return '(() => {\n"use strict";\nconst parts$ = {};\n' + "".join(parts.values()) + "})();\n"


def _wrapped(name: str, text: str) -> str:
    """Return the module's code as a function that is called at once and returns an object with the exports."""
    exports: list[str] = []  # "exported name: expression"

    def module(other: str) -> str:
        return f'parts$["{_resolved(name, other)}"]'

    def imported(match: re.Match[str]) -> str:
        names, source = match[1], module(match[2])
        if names.startswith("*"):
            return f"const {names.split()[-1]} = {source};"
        if names.startswith("{"):
            pairs = ", ".join(f"{outside}: {inside}" for outside, inside in _pairs(names[1:-1]))
            return f"const {{{pairs}}} = {source};"
        return f"const {names} = {source}.default;"

    def reexported(match: re.Match[str]) -> str:
        exports.extend(f"{outside}: {module(match[2])}.{inside}" for inside, outside in _pairs(match[1]))
        return ""

    def listed(match: re.Match[str]) -> str:
        exports.extend(f"{outside}: {inside}" for inside, outside in _pairs(match[1]))
        return ""

    def defaulted(match: re.Match[str]) -> str:
        exports.append("default: default$")
        return "const default$ = "

    exports += [f"{each}: {each}" for each in _DECLARATION.findall(text)]
    body = _DECLARATION.sub("", _IMPORT.sub(imported, text))
    body = _DEFAULT.sub(defaulted, _LIST.sub(listed, _REEXPORT.sub(reexported, body)))
    if odd := _OTHER.search(_TYPES.sub("", body)):
        raise ValueError(f"{name}: {odd[0][:100]!r} is a form that a copy of the page cannot have")
    return f'parts$["{name}"] = (() => {{\n{body}\nreturn {{{", ".join(exports)}}};\n}})();\n'


def _pairs(names: str) -> Iterable[tuple[str, str]]:
    """Yield (name before ``as``, name after it) for each item of a list; both are the same without ``as``."""
    for item in names.split(","):
        if words := item.split():
            yield words[0], words[-1]


def _resolved(name: str, other: str) -> str:
    """Return the path, below the folder of the scripts, of the module that ``name`` imports as ``other``."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), other))
