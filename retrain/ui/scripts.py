"""The page's modules as one classic script: a browser loads no ES module from a file system.

Our modules keep to three forms, ``import {a, b as c} from "./x.js"``, ``export function|async function|class|const``
at the beginning of a line, and nothing else of the module syntax; anything else is refused.
"""

import re
from pathlib import Path, PurePosixPath

_IMPORT = re.compile(r'^import \{([^}]*)\} from "(\.[^"]*)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|function|class|const) ([A-Za-z_$][\w$]*))", re.MULTILINE)
_OTHER = re.compile(r"^(?:import|export)\b.*$|\bimport\(", re.MULTILINE)


def joined(folder: Path, main: str) -> str:
    """``main`` below ``folder`` and all that it imports, each before who needs it. Raises ValueError for modules that
    import each other in a circle, or are written in another form."""
    order: list[str] = []
    parts = {}

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ValueError(f"{name} imports itself, over {' and '.join(above)}")
        if name in order:
            return
        text = (folder / name).read_text(encoding="utf-8")
        for _, other in _IMPORT.findall(text):
            visit(_beside(name, other), (*above, name))
        parts[name] = _wrapped(name, text)
        order.append(name)

    visit(main, ())
    return '"use strict";\n(() => {\nconst parts$ = {};\n' + "".join(parts[name] for name in order) + "})();\n"


def _wrapped(name: str, text: str) -> str:
    exported = _EXPORT.findall(text)

    def imported(match: re.Match[str]) -> str:
        names = ", ".join(" ".join(each.split()).replace(" as ", ": ") for each in match[1].split(",") if each.strip())
        return f'const {{{names}}} = parts$["{_beside(name, match[2])}"];\n'

    body = _EXPORT.sub("", _IMPORT.sub(imported, text))
    if odd := _OTHER.search(body):
        raise ValueError(f"{name}: {odd[0]!r} is a form that a copy of the page cannot have")
    return f'parts$["{name}"] = (() => {{\n{body}return {{{", ".join(exported)}}};\n}})();\n'


def _beside(name: str, other: str) -> str:
    """``other`` as named by the module ``name``, below the same folder."""
    parts: list[str] = []
    for part in (PurePosixPath(name).parent / other).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)
