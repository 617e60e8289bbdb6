"""Self-contained HTML documents: one file, no network, dark mode, print styles, and text that cannot act.

Whatever a model, a grader or a file wrote goes through ``escape``; numbers for a page's script go through
``data_block``. The content security policy of ``page`` allows the page's own scripts by their hash and nothing else,
so that even markup that slipped through could not run or load anything.
"""

from __future__ import annotations

import base64
import hashlib
import html
from typing import Any

from retrain.files import dumps

_UNSEEN = (
    *range(0x7F, 0xA0),  # delete and the C1 controls
    *(0xAD, 0x61C, 0x180E, 0x3164, 0xFEFF),  # soft hyphen, Arabic letter mark, invisible letters, byte order mark
    *range(0x200B, 0x2010),  # zero-width characters and direction marks
    *range(0x2028, 0x202F),  # line and paragraph separators, direction overrides
    *range(0x2060, 0x2070),  # invisible operators and direction isolates
    *range(0xD800, 0xE000),  # lone surrogates
    *range(0xFDD0, 0xFDF0),  # no characters
    *(0xFFFE, 0xFFFF),
    *range(0xE0000, 0xE0080),  # invisible tags
)
SHOWN = {
    **{code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)},
    **dict.fromkeys(_UNSEEN, "\N{REPLACEMENT CHARACTER}"),
    0x7F: "\N{SYMBOL FOR DELETE}",
}
"""Characters that would act or hide → one visible character each; tabs and line feeds stay."""


def visible(text: str) -> str:
    """``text`` with every control, direction or invisible character and lone surrogate replaced by a visible mark.

    One character becomes one character, so that positions in the text stay what they were. Not escaped for HTML.
    """
    return text if text.isascii() and text.isprintable() else text.translate(SHOWN)


def escape(text: str) -> str:
    """``text`` as HTML text or attribute value: nothing in it is markup, nothing in it is invisible."""
    return html.escape(visible(str(text)), quote=True)


def data_block(identifier: str, value: Any) -> str:
    """``value`` as JSON that the page's script reads: ``JSON.parse(document.getElementById(…).textContent)``.

    ``identifier`` is ours, never a model's. Nothing in the text can end the element.
    """
    text = dumps(value)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{escape(identifier)}">{text}</script>'


def generator(made_by: str) -> str:
    """The element in a page's head that says who made it."""
    return f'<meta name="generator" content="{escape(made_by)}">'


def page(title: str, body: str, *, styles: str = "", script: str = "", made_by: str = "retrain") -> str:
    """A whole document. ``title`` is text; ``body`` is HTML made of escaped parts; ``styles`` and ``script`` are ours.

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
    scripts = [THEME_SCRIPT, script] if script else [THEME_SCRIPT]
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {hashes}; "
        "base-uri 'none'; form-action 'none'"
    )
    elements = "\n".join(f"<script>{text}</script>" for text in scripts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
{generator(made_by)}
<title>{escape(title)}</title>
<style>{BASE_STYLES}{styles}</style>
</head>
<body>
<button id="theme" class="no-print" type="button" title="light or dark" aria-label="light or dark">◐</button>
<main>
{body}
</main>
{elements}
</body>
</html>
"""


THEME_SCRIPT = """
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
"""

_LIGHT = """--ink:#1d2129; --paper:#fbfbf9; --raised:#ffffff; --sunken:#f2f2ee; --line:#dedfd9; --muted:#676d76;
--accent:#2256a8; --good:#1d7a4b; --bad:#b3372f; --warn:#946200;
--c1:#2f6db5; --c2:#c9731a; --c3:#2d8a63; --c4:#8a5bb0; --c5:#b8443c; --c6:#7a7f87; --c7:#3a98a8; --c8:#a8892b;
color-scheme:light;"""
_DARK = """--ink:#e4e6ea; --paper:#15171b; --raised:#1d2025; --sunken:#111317; --line:#343941; --muted:#9aa1ab;
--accent:#82b1f0; --good:#66c795; --bad:#f08a80; --warn:#e0b354;
--c1:#6ea6e6; --c2:#e79a4d; --c3:#62bd95; --c4:#b78ddb; --c5:#e77f77; --c6:#9299a3; --c7:#66bfcd; --c8:#d2b65b;
color-scheme:dark;"""

BASE_STYLES = f"""
:root {{ {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {_DARK} }} }}
:root[data-theme="dark"] {{ {_DARK} }}
@media print {{ :root, :root[data-theme] {{ {_LIGHT} --paper:#fff; --sunken:#f6f6f4; }} }}
*, *::before, *::after {{ box-sizing: border-box; }}
html {{ -webkit-text-size-adjust: 100%; }}
body {{ margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", sans-serif; }}
main {{ max-width: 1320px; margin: 0 auto; padding: 28px 28px 64px; }}
h1 {{ font-size: 1.5rem; line-height: 1.25; margin: 0 44px .25rem 0; font-weight: 650; letter-spacing: -.01em; }}
h2 {{ font-size: 1.12rem; margin: 2.2rem 0 .6rem; font-weight: 650; }}
h3 {{ font-size: 1rem; margin: 1.4rem 0 .4rem; font-weight: 600; }}
p {{ margin: .4rem 0; max-width: 78ch; }}
a {{ color: var(--accent); }}
code, .mono {{
  font: .88em/1.5 ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
table {{ border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }}
th {{ font-weight: 600; color: var(--muted); white-space: nowrap; }}
.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
.muted {{ color: var(--muted); }}
.good {{ color: var(--good); }} .bad {{ color: var(--bad); }} .warn {{ color: var(--warn); }}
.scroll {{ overflow-x: auto; }}
.card {{ background: var(--raised); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px; }}
.chip {{ display: inline-block; padding: 0 .5em; border: 1px solid var(--line); border-radius: 999px;
  font-size: .8rem; line-height: 1.6; color: var(--muted); white-space: nowrap; }}
summary {{ cursor: pointer; }}
button, select {{ font: inherit; font-size: .85rem; color: inherit; background: var(--raised);
  border: 1px solid var(--line); border-radius: 6px; padding: .2rem .6rem; cursor: pointer; }}
button:hover {{ border-color: var(--muted); }}
:focus-visible {{ outline: 2px solid var(--accent); outline-offset: 2px; }}
#theme {{ position: absolute; top: 24px; right: max(24px, calc(50vw - 640px)); padding: .2rem .5rem;
  line-height: 1.3; }}
@media (max-width: 640px) {{ main {{ padding: 16px 14px 40px; }} #theme {{ top: 14px; right: 12px; }} }}
@media print {{
  body {{ font-size: 10pt; }} main {{ max-width: none; padding: 0; }}
  .no-print {{ display: none !important; }} .card {{ break-inside: avoid; }} h2, h3 {{ break-after: avoid; }}
  .scroll {{ overflow: visible; }}
}}
"""
