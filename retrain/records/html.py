"""Self-contained HTML documents: one file, no network, dark mode, print styles, and text that cannot act.

Whatever a model, a grader or a file wrote goes through ``text.escape``; numbers for a page's script go through
``data_block``. The content security policy of ``page`` allows the page's own scripts by their hash and nothing else,
so that even markup that slipped through could not run or load anything. Styles, scripts and the frame of a page
are the files of ``assets/``, written into each page.
"""

import base64
import hashlib
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from importlib.resources import files
from string import Template

from retrain.files import dumps
from retrain.records.text import escape


def data_block(identifier: str, value: object) -> str:
    """Return ``value`` as JSON that the page's script reads: ``JSON.parse(document.getElementById(…).textContent)``.

    ``identifier`` is ours, never a model's. Nothing in the text can end the element.
    """
    text = dumps(value)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{escape(identifier)}">{text}</script>'


@cache
def asset(name: str) -> str:
    """Return the text of a style sheet or script of ours, by its name in ``assets/``."""
    return (files("retrain.records") / "assets" / name).read_text(encoding="utf-8")


def generator(made_by: str) -> str:
    """Return the element in a page's head that says who made it."""
    return f'<meta name="generator" content="{escape(made_by)}">'


def facts(items: Iterable[Sequence[str]]) -> str:
    """Return a row of numbers with what they count: (name, value) or (name, value, hint), each of them HTML."""
    parts = []
    for name, value, *hint in items:
        title = f' title="{hint[0]}"' if any(hint) else ""
        parts.append(f"<div{title}><dt>{name}</dt><dd>{value}</dd></div>")
    return f'<dl class="facts">{"".join(parts)}</dl>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], texts: Collection[int], css: str = "") -> str:
    """Return a table that scrolls inside itself; cells are HTML, all columns but ``texts`` are numbers."""
    classes = ["" if i in texts else ' class="number"' for i in range(len(heads))]

    def line(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}{c}>{cell}</{tag}>' for c, cell in zip(classes, cells, strict=True))}</tr>"

    head, body = line("th", [escape(text) for text in heads]), "\n".join(line("td", row) for row in rows)
    css = f' class="{css}"' if css else ""
    return f'<div class="scroll"><table{css}><thead>{head}</thead>\n<tbody>{body}</tbody></table></div>'


def page(title: str, body: str, *, styles: str = "", script: str = "", made_by: str = "retrain") -> str:
    """Return a whole document.

    ``title`` is text; ``body`` is HTML made of escaped parts; ``styles`` and ``script`` are ours.

    The styles give ``body`` a palette as CSS variables (``--ink --paper --raised --line --muted --accent --good --bad
    --warn`` and ``--c1`` to ``--c8`` for series), the classes ``.muted``, ``.number``, ``.chip``, ``.card``,
    ``.scroll`` (wide content scrolls inside it), ``.no-print``, and plain tables. A header, if any, belongs to
    ``body``.

    Raises:
        ValueError: ``styles`` or ``script`` would end their own element.
    """
    for name, text in (("style", styles), ("script", script)):
        if f"</{name}" in text.lower() or "<!--" in text:
            raise ValueError(f"the {name} of a page must not contain its own end tag or a comment opening")
    scripts = [asset("page.js"), *([script] if script else [])]
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {hashes}; "
        "base-uri 'none'; form-action 'none'"
    )
    elements = "\n".join(f"<script>{text}</script>" for text in scripts)
    return Template(asset("page.html")).substitute(
        policy=policy,
        generator=generator(made_by),
        title=escape(title),
        styles=asset("base.css") + asset("page.css") + styles,
        body=body,
        scripts=elements,
    )
