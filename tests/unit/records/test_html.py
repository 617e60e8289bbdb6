"""Self-contained pages: what a model wrote stays text, and nothing reaches the network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata
from pathlib import Path

import pytest
from browser import Browser, needs_chromium
from pages import Reader

from retrain.record.html import asset, data_block, escape, page, visible

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "</style></title></textarea><svg onload=alert(1)>",
    "\" onmouseover='alert(1)' x=`",
    "<!-- --><![CDATA[ ]]>&lt;&#60;script&#62;",
    "\x1b[31mred\x1b[0m\x07\x1b]0;title\x07\x00\r\n",
    "\ud800 lone \udfff",
    "\u202eevil\u2066\u200b\ufeff\u2028",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(text):
    for place in (f"<p>{escape(text)}</p>", f'<p title="{escape(text)}"></p>'):
        reader = Reader(place)
        assert reader.tags == ["p"]
        shown = reader.texts or [value or "" for _, value in reader.attributes]
        assert "".join(shown) == visible(text)


def test_every_character_is_inert_and_visible():
    everything = "".join(map(chr, range(0x110000)))
    shown = visible(everything)
    assert len(shown) == len(everything)
    kinds = {unicodedata.category(character) for character in shown if character not in "\t\n"}
    assert not kinds & {"Cc", "Cs", "Zl", "Zp"}
    assert not {"\u202e", "\u2066", "\u200b", "\ufeff"} & set(shown)
    assert visible("a\tb\nc é 漢 🙂") == "a\tb\nc é 漢 🙂"
    assert visible("\x1b\x7f\r") == "␛␡␍"


def test_a_page_is_whole_and_loads_nothing():
    text = page("<b> & co", f"<p>{escape(HOSTILE[1])}</p>", styles="p{color:red}", script="document.title;")
    reader = Reader(text)
    assert reader.tags.count("script") == 2
    assert not {"img", "link", "iframe", "svg", "b"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name.startswith("on") or name in ("src", "href")]
    assert "<title>&lt;b&gt; &amp; co</title>" in text
    policy = re.search(r'Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    assert "unsafe-inline" not in policy[1].partition("script-src")[2]
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert text.encode()  # no lone surrogates


def test_a_script_or_style_cannot_end_itself():
    with pytest.raises(ValueError, match="end tag"):
        page("t", "", script="x = '</SCRIPT>'")
    with pytest.raises(ValueError, match="end tag"):
        page("t", "", styles="</style>")


ASSETS = Path(__file__).parents[3] / "retrain" / "record" / "assets"


def test_every_asset_of_ours_has_a_page_that_takes_it():
    code = "".join(path.read_text(encoding="utf-8") for path in ASSETS.parents[1].rglob("*.py"))
    assert set(re.findall(r'asset\("([^"]+)"\)', code)) == {path.name for path in ASSETS.iterdir()}


@pytest.mark.parametrize("path", sorted([*ASSETS.glob("*.css"), *ASSETS.glob("*.js")]), ids=lambda path: path.name)
def test_our_styles_and_scripts_load_nothing_and_stay_inside_their_element(path):
    text = asset(path.name)
    assert not re.search(r"</s(tyle|cript)|<!--|\burl\(|@import|\bfetch\(|\bimport\b", text)
    assert not re.findall(r"https?:(?!//www\.w3\.org/)", text)


LIGHT, DARK, PAPER = "rgb(251, 251, 249)", "rgb(21, 23, 27)", "rgb(255, 255, 255)"


@needs_chromium
def test_the_button_turns_light_into_dark_and_back_and_paper_is_white(tmp_path):
    (tmp_path / "page.html").write_text(page("t", "<p>text</p>"), encoding="utf-8")
    ground = "getComputedStyle(document.body).backgroundColor"
    with Browser() as browser:
        for dark in (False, True):
            browser.open(tmp_path / "page.html", dark=dark)
            seen = [browser.run(ground)]
            for _ in range(2):
                browser.click(*browser.centre("#theme"))
                seen.append(browser.run(ground))
            assert seen == ([DARK, LIGHT, DARK] if dark else [LIGHT, DARK, LIGHT])
            browser.open(tmp_path / "page.html", dark=dark)
            browser.call("Emulation.setEmulatedMedia", media="print")
            assert browser.run(ground) == PAPER
            browser.call("Emulation.setEmulatedMedia", media="")


def test_data_for_scripts_cannot_end_its_element():
    value = {"texts": HOSTILE, "numbers": [1.5, float("nan"), None]}
    block = data_block("rows", value)
    inside = block[block.index(">") + 1 : -len("</script>")]
    assert "<" not in inside
    parsed = json.loads(inside)
    assert parsed["texts"][:5] == HOSTILE[:5]
    assert parsed["numbers"] == [1.5, None, None]
