import html
import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from retrain.errors import UsageError
from retrain.records.pages.scripts import joined
from retrain.ui.bundle import without_paths, write_bundle
from retrain.ui.library import Library
from retrain.ui.places import Places


@pytest.mark.parametrize(("text", "copied"), [
    ("adapter at /home/me/x y/final.", "adapter at …/x y/final."),
    ('"/home/me/runs/a": ("/tmp/b/c.py", line 3)', '"…/a": ("…/c.py", line 3)'),
    ("file:///home/me/a and ~/a/b and https://me.org/a/b", "file://…/a and ~/a/b and https://me.org/a/b"),
    ("and/or, 3 / 4, ../a/b, --- /dev/null", "and/or, 3 / 4, ../a/b, --- /dev/null"),
])  # fmt: skip
def test_of_a_path_of_the_machine_the_last_part_is_told(text, copied):
    assert without_paths({"a": [text, None, 1.5], text: text}) == {"a": [copied, None, 1.5], copied: copied}


@pytest.fixture(scope="module")
def copied(mixed_campaign, tmp_path_factory):
    out = tmp_path_factory.mktemp("copy") / "page"
    size = write_bundle(Library(Places([mixed_campaign])), out)
    assert size == sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return out


def test_a_copy_holds_every_answer_that_its_index_names_and_loads_nothing_else(copied, mixed_campaign):
    about = json.loads((copied / "data.js").read_text().removeprefix("globalThis.RETRAIN_COPY = ").removesuffix(";\n"))
    (home,) = about["homes"]
    assert home == f"{mixed_campaign.name}/out"
    assert f"columns?at={home}&key=step&x=step" in about["files"]
    answers = {}
    for name in set(about["files"].values()):
        text = (copied / "data" / f"{name}.js").read_text()
        answers[name] = json.loads(text.removeprefix("retrainAnswers(").removesuffix(");\n"))
        assert "Traceback" not in text
    assert {key: name for name, each in answers.items() for key in each} == about["files"]
    kinds = {key.partition("?")[0] for key in about["files"]}
    assert kinds >= {"places", "campaign", "metrics", "columns", "curves", "notes", "timeline", "rollouts", "rollout",
                     "iterations", "compare", "log", "lora"}  # fmt: skip
    assert answers["000_campaign"][f"campaign?at={home}"]["comparison"]["conditions"]
    page = (copied / "index.html").read_text()
    links = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert {"data.js", "app.js"} <= set(links)
    assert all((copied / link).is_file() for link in links)
    assert "default-src 'none'" in html.unescape(page)
    assert 'type="module"' not in page


def test_a_copy_has_nothing_of_the_machine(copied, mixed_campaign):
    """Of the computer that trained and made the copy, neither its name, nor who uses it, nor where its files lie."""
    user = pwd.getpwuid(os.getuid())
    names = {socket.gethostname(), user.pw_name}
    places = {str(Path.home()), user.pw_dir, tempfile.gettempdir(), sys.prefix, str(Path(__file__).parents[3])}
    places |= {str(mixed_campaign), str(copied)}
    for path in sorted(each for each in copied.rglob("*") if each.is_file()):
        # The page's own code, the same everywhere, may have a variable of that name.
        words = places | names if path.parent.name == "data" or path.name == "data.js" else places
        told = re.compile("|".join(rf"(?<![\w.]){re.escape(word)}(?!\w)" for word in words if len(word) > 1))
        found = told.search(path.read_text("utf-8", "replace"))
        assert found is None, (path.name, found and found.string[max(0, found.start() - 80) : found.end() + 60])


def test_nothing_that_is_there_is_written_over(copied, mixed_campaign, tmp_path):
    library = Library(Places([mixed_campaign]))
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="is there already"):
        write_bundle(library, copied)
    assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no campaign and no run to copy"):
        write_bundle(Library(Places([empty])), tmp_path / "out")


NODE = shutil.which("node")
MODULES = {
    "lib/words.js": 'export {shout, quiet as whisper, default as twice} from "../deep/base.js";\nexport {own};\n'
    "const own = 3;\n",
    "deep/base.js": "/** @type {import('./x.js').X} */\nexport const quiet = (text) => text.toLowerCase();\n"
    "export async function later() {}\nexport function shout(text) { return text.toUpperCase(); }\n"
    "export default function (n) { return 2 * n; }\n",
    "mini.js": 'import{shout as s}from"./deep/base.js";const a=s("mini");export{a as name,s};\n//# sourceMappingURL=x',
}


def write_modules(folder, main):
    for name, text in (MODULES | {"main.js": main}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_joined_script_runs_as_the_modules_would(tmp_path):
    main = """import {
  shout as loud,
  whisper,
} from "./lib/words.js";
import * as base from "./deep/base.js";
import double from "./deep/base.js";
import {name, s} from "./mini.js";
import {own, twice} from "./lib/words.js";
console.log(loud("a"), whisper("B"), base.quiet("C"), double(own), twice(1), name, s("d"), typeof base.later);
"""
    script = tmp_path / "joined.txt"
    script.write_text(joined(write_modules(tmp_path, main), "main.js"))
    run = subprocess.run([NODE, "-e", script.read_text()], capture_output=True, text=True)
    assert (run.stdout.split(), run.stderr) == (["A", "b", "c", "6", "2", "MINI", "D", "function"], "")


def test_a_module_comes_once_and_before_those_that_import_it(tmp_path):
    main = 'import {own} from "./lib/words.js";\nimport {name} from "./mini.js";\nglobalThis.seen = [own, name];\n'
    script = joined(write_modules(tmp_path, main), "main.js")
    order = re.findall(r'^parts\$\["([^"]+)"\] = ', script, re.MULTILINE)
    assert order == ["deep/base.js", "lib/words.js", "mini.js", "main.js"]
    assert not re.search(r"^\s*(import|export)\b", script, re.MULTILINE)


@pytest.mark.parametrize("main", [
    'import "./mini.js";\n', 'import a, {b} from "./mini.js";\n', 'export * from "./mini.js";\n', "export let a = 1;\n",
    'const a = await import("./mini.js");\n', 'import {a} from "preact";\n',
])  # fmt: skip
def test_other_forms_of_the_module_syntax_are_refused(tmp_path, main):
    with pytest.raises(ValueError, match=r"main\.js: .* is a form that a copy of the page cannot have"):
        joined(write_modules(tmp_path, main), "main.js")


def test_modules_that_import_each_other_are_refused(tmp_path):
    (tmp_path / "a.js").write_text('import {b} from "./b.js";\nexport const a = 1;\n')
    (tmp_path / "b.js").write_text('import {a} from "./a.js";\nexport const b = 1;\n')
    with pytest.raises(ValueError, match=r"a\.js imports itself, over a\.js and b\.js"):
        joined(tmp_path, "a.js")
