"""The page's files: modules that import what there is, no markup made of text, no network, and a small page."""

import gzip
import re

from ui_cases import client_of

from retrain.record.html import asset
from retrain.ui.server import STATIC

MODULES = sorted(path for path in STATIC.rglob("*.js") if "vendor" not in path.parts)
SHELL = (STATIC.parent / "templates" / "shell.html").read_text(encoding="utf-8")
MOST_BYTES = 250_000
EXPORT = re.compile(r"^export (?:async )?(?:function|const|class) (\w+)", re.MULTILINE)
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|createContextualFragment"
    r"|setAttribute\(\"style\"|srcdoc|javascript:"
)


def test_no_module_makes_markup_of_text_or_names_another_server():
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        assert not MARKUP.search(text), path
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path


def test_every_module_is_reached_from_the_shell_and_nothing_that_its_policy_forbids_is_in_it():
    assert not re.search(r"<style|\bstyle=|\son\w+=|<script(?![^>]*\bsrc=)", SHELL)
    names = re.findall(r'\{\{ static \}\}/([\w./-]+)"', SHELL)
    assert all(asset(name.removeprefix("shared/")) for name in names if name.startswith("shared/"))
    reached, todo = set(), [STATIC / name for name in names if not name.startswith("shared/")]
    while todo:
        path = todo.pop().resolve()
        assert path.is_file(), path
        if path not in reached:
            reached.add(path)
            imported = re.findall(r'^import \{(.*)\} from "([./\w-]+\.js)";$', path.read_text("utf-8"), re.MULTILINE)
            todo += [path.parent / name for _, name in imported]
            for names, name in imported:
                exported = EXPORT.findall((path.parent / name).read_text("utf-8"))
                assert {each.split(" as ")[0].strip() for each in names.split(",")} <= set(exported), path
    assert {path.resolve() for path in MODULES} <= reached


def test_the_whole_page_is_small():
    """As the server sends it: files of 2,000 bytes and more are compressed."""
    files = [path.read_bytes() for path in STATIC.rglob("*") if path.is_file() and path.name != "LICENSE"]
    files += [asset(name).encode() for name in ("base.css", "charts.css")]
    assert sum(len(gzip.compress(data, 3)) if len(data) >= 2_000 else len(data) for data in files) < MOST_BYTES


def test_an_address_that_is_no_page_is_told_to_people_by_the_page_and_to_programs_in_json(tmp_path):
    client = client_of(tmp_path)
    person = client.get("/nothing", headers={"Accept": "text/html,*/*"})
    assert (person.status_code, "<main" in person.text) == (404, True)
    for path, accept in (("/nothing", "application/json"), ("/api/nothing", "text/html"), ("/static/x", "text/html")):
        answer = client.get(path, headers={"Accept": accept})
        assert (answer.status_code, list(answer.json())) == (404, ["error"])
