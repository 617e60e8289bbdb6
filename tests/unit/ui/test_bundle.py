import html
import json
import os
import pwd
import re
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from retrain.errors import UsageError
from retrain.ui.bundle import without_paths, write_bundle
from retrain.ui.library import Library
from retrain.ui.numbers import Pool
from retrain.ui.places import Places


@pytest.mark.parametrize(
    ("text", "copied"),
    [
        ("adapter at /home/me/x y/final.", "adapter at …/x y/final."),
        ('"/home/me/runs/a": ("/tmp/b/c.py", line 3)', '"…/a": ("…/c.py", line 3)'),
        ("file:///home/me/a and ~/a/b and https://me.org/a/b", "file://…/a and ~/a/b and https://me.org/a/b"),
        ("and/or, 3 / 4, ../a/b, --- /dev/null", "and/or, 3 / 4, ../a/b, --- /dev/null"),
    ],
)
def test_of_a_path_of_the_machine_the_last_part_is_told(text, copied):
    assert without_paths({"a": [text, None, 1.5], text: text}) == {"a": [copied, None, 1.5], copied: copied}


@pytest.fixture(scope="module")
def copied(mixed_campaign, tmp_path_factory):
    out = tmp_path_factory.mktemp("copy") / "page"
    size = write_bundle(Library(Places([mixed_campaign]), Pool()), out)
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
    assert all((copied / link).is_file() for link in re.findall(r'(?:src|href)="([^"#]+)"', page))
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
    library = Library(Places([mixed_campaign]), Pool())
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="is there already"):
        write_bundle(library, copied)
    assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no campaign and no run to copy"):
        write_bundle(Library(Places([empty]), Pool()), tmp_path / "out")
