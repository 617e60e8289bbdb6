"""The page's files: small modules that import one another, no markup made of text, no network, all of it in the wheel's
package, and small enough."""

import gzip
import re
from pathlib import Path

import pytest

from retrain.record.html import asset

UI = Path(__file__).parents[3] / "retrain" / "ui"
STATIC = UI / "static"
OWN = sorted(path for path in STATIC.rglob("*.js") if "vendor" not in path.parts)
MOST_LINES, MOST_BYTES = 300, 250_000
IMPORT = re.compile(r'^import \{[\w, ]+\} from "(\.{1,2}/[\w/.-]+\.js)";$')
EXPORT = re.compile(r"^export (?:async )?(?:function|const|class) (\w+)", re.MULTILINE)
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|createContextualFragment"
    r"|setAttribute\(\"style\"|srcdoc|javascript:"
)
names = pytest.mark.parametrize("path", OWN, ids=lambda path: path.relative_to(STATIC).as_posix())


@names
def test_module(path: Path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith("//"), "the first line says what a module is for"
    assert len(text.splitlines()) <= MOST_LINES
    assert not MARKUP.search(text)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


@names
def test_imports_are_of_one_form_and_name_what_there_is(path: Path):
    for line in path.read_text(encoding="utf-8").splitlines():
        if not re.match(r"\s*import\b|.*\bimport\(", line):
            continue
        match = IMPORT.match(line)
        assert match, line
        other = (path.parent / match[1]).resolve()
        assert other.is_file(), line
        wanted = {part.split(" as ")[0].strip() for part in line[line.index("{") + 1 : line.index("}")].split(",")}
        assert wanted <= set(EXPORT.findall(other.read_text(encoding="utf-8"))), line


def test_every_module_is_reached_from_the_shell():
    shell = (UI / "templates" / "shell.html").read_text(encoding="utf-8")
    todo = [STATIC / name for name in re.findall(r'src="\{\{ static \}\}/([\w./-]+)"', shell)]
    seen = set()
    while todo:
        path = todo.pop().resolve()
        assert path.is_file(), path
        if path not in seen:
            seen.add(path)
            lines = path.read_text(encoding="utf-8").splitlines()
            todo += [path.parent / match[1] for line in lines if (match := IMPORT.match(line))]
    assert {path.resolve() for path in OWN} <= seen


def test_shell_has_nothing_that_its_policy_forbids():
    shell = (UI / "templates" / "shell.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\bstyle=|\son\w+=|<script(?![^>]*\bsrc=)", shell)
    for name in re.findall(r'\{\{ static \}\}/([\w./-]+)"', shell):
        if name.startswith("shared/"):
            assert asset(name.removeprefix("shared/"))
        else:
            assert (STATIC / name).is_file(), name


def test_the_whole_page_is_small():
    """As the server sends it: files of 2,000 bytes and more are compressed."""
    files = [path.read_bytes() for path in STATIC.rglob("*") if path.is_file() and path.name != "LICENSE"]
    files += [asset(name).encode() for name in ("base.css", "charts.css")]
    assert sum(len(gzip.compress(data, 3)) if len(data) >= 2_000 else len(data) for data in files) < MOST_BYTES


def test_what_is_vendored_has_its_licence_beside_it():
    assert "MIT" in (STATIC / "vendor" / "uplot" / "LICENSE").read_text(encoding="utf-8")


def test_an_address_that_is_no_page_is_told_to_people_by_the_page_and_to_programs_in_json(tmp_path):
    from ui_cases import client_of

    client = client_of(tmp_path)
    person = client.get("/nothing", headers={"Accept": "text/html,*/*"})
    assert (person.status_code, "<main" in person.text) == (404, True)
    for path, accept in (("/nothing", "application/json"), ("/api/nothing", "text/html"), ("/static/x", "text/html")):
        answer = client.get(path, headers={"Accept": accept})
        assert (answer.status_code, list(answer.json())) == (404, ["error"])
