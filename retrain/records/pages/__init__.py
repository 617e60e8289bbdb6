"""Make self-contained HTML documents from templates: single files that load nothing and run no code of recorded texts.

Templates, styles and scripts are shared with the live page (``retrain/ui``). Every value that a template writes is
escaped and has its invisible characters replaced. The content security policy allows only the document's own script,
by its hash, so that even markup that slipped through could not run or load anything.
"""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from retrain.files import dumps
from retrain.records.pages.scripts import joined
from retrain.util.text import escape, visible

UI = Path(__file__).parents[2] / "ui"
STATIC, TEMPLATES = UI / "static", UI / "templates"
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{}'; base-uri 'none'; "
    "form-action 'none'"
)


def document(template: str, *, styles: Sequence[str], script: str, libraries: Sequence[str] = (),
             made_by: str = "retrain", **values: object) -> str:  # fmt: skip
    """Return an HTML document made from a template that extends ``page.html``.

    ``styles``, ``script`` and ``libraries`` are paths below ``retrain/ui/static``. ``script`` is an ES module, which is
    joined with the modules that it imports; ``libraries`` are classic scripts that run before it. ``values`` are the
    template's variables and must include ``title``.
    """
    code = _script(script, tuple(libraries))
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    ours = {
        "policy": POLICY.format(digest),
        "generator": generator(made_by),
        "style": _styles(("base.css", "pages/page.css", *styles)),
        "script": code,
    }
    return environment().get_template(template).render(ours | values)


def generator(made_by: str) -> str:
    return f'<meta name="generator" content="{escape(made_by)}">'


@cache
def environment() -> Any:
    """Return the Jinja environment of the page's templates. It escapes every value; undefined names are errors."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=_finalize,
    )  # fmt: skip
    made.policies["json.dumps_function"] = lambda value, **options: dumps(value)
    return made


def _finalize(value: object) -> object:
    """Replace the invisible characters of a text; markup, which only templates make, is returned unchanged."""
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


@cache
def _styles(names: tuple[str, ...]) -> str:
    return _inside("style", "".join((STATIC / name).read_text(encoding="utf-8") for name in names))


@cache
def _script(name: str, libraries: tuple[str, ...]) -> str:
    classic = [(STATIC / library).read_text(encoding="utf-8") + "\n" for library in libraries]
    return _inside("script", "".join(classic) + joined(STATIC, name))


def _inside(element: str, text: str) -> str:
    if f"</{element}" in text.lower() or "<!--" in text:
        raise ValueError(f"the {element} of a page must not contain its own end tag or a comment opening")
    return text
