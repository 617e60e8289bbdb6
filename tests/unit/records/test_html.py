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
from hostile import HOSTILE
from pages import Reader

from retrain.record import html
from retrain.record.html import asset, data_block, escape, page, visible

ASSETS = Path(html.__file__).parent / "assets"


def test_hostile_text_stays_text():
    for text in filter(None, HOSTILE.values()):
        for place in (f"<p>{escape(text)}</p>", f'<p title="{escape(text)}"></p>'):
            reader = Reader(place)
            assert reader.tags == ["p"]
            assert "".join(reader.texts or [value or "" for _, value in reader.attributes]) == visible(text)


def test_every_character_is_inert_and_visible():
    everything = "".join(map(chr, [*range(0x20000), *range(0xE0000, 0xE0200), *range(0x10FF00, 0x110000)]))
    shown = visible(everything)
    assert len(shown) == len(everything)
    kinds = {unicodedata.category(character) for character in set(shown) if character not in "\t\n"}
    assert not kinds & {"Cc", "Cs", "Zl", "Zp"}
    assert not {"\u202e", "\u2066", "\u200b", "\ufeff"} & set(shown)
    assert visible("a\tb\nc é 漢 🙂\x1b\x7f\r") == "a\tb\nc é 漢 🙂␛␡␍"


def test_a_page_is_whole_and_loads_nothing():
    text = page("<b> & co", f"<p>{escape(HOSTILE['image'])}</p>", styles="p{color:red}", script="document.title;")
    reader = Reader(text)
    assert reader.tags.count("script") == 2
    assert not {"img", "link", "iframe", "svg", "b"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name.startswith("on") or name in ("src", "href")]
    assert "<title>&lt;b&gt; &amp; co</title>" in text
    policy = re.search(r'Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    for script in re.findall(r"<script>(.*?)</script>", text, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    assert "unsafe-inline" not in policy[1].partition("script-src")[2]


def test_scripts_styles_and_data_cannot_end_their_element():
    with pytest.raises(ValueError, match="end tag"):
        page("t", "", script="x = '</SCRIPT>'")
    with pytest.raises(ValueError, match="end tag"):
        page("t", "", styles="</style>")
    block = data_block("rows", {"texts": [*HOSTILE.values()], "numbers": [1.5, float("nan"), None]})
    inside = block[block.index(">") + 1 : -len("</script>")]
    assert "<" not in inside
    assert json.loads(inside)["texts"][:10] == [*HOSTILE.values()][:10]
    assert json.loads(inside)["numbers"] == [1.5, None, None]


def test_our_styles_and_scripts_load_nothing_and_stay_inside_their_element():
    for path in [*ASSETS.glob("*.css"), *ASSETS.glob("*.js")]:
        text = asset(path.name)
        assert not re.search(r"</s(tyle|cript)|<!--|\burl\(|@import|\bfetch\(|\bimport\b", text), path
        assert not re.findall(r"https?:(?!//www\.w3\.org/)", text), path


@needs_chromium
def test_the_button_turns_light_into_dark_and_back_and_paper_is_white(tmp_path):
    light, dark, paper = "rgb(251, 251, 249)", "rgb(21, 23, 27)", "rgb(255, 255, 255)"
    (tmp_path / "page.html").write_text(page("t", "<p>text</p>"), encoding="utf-8")
    ground = "getComputedStyle(document.body).backgroundColor"
    with Browser() as browser:
        for prefers_dark, colours in ((False, [light, dark, light]), (True, [dark, light, dark])):
            browser.open(tmp_path / "page.html", dark=prefers_dark)
            seen = [browser.run(ground)]
            for _ in range(2):
                browser.click(*browser.centre("#theme"))
                seen.append(browser.run(ground))
            assert seen == colours
            browser.call("Emulation.setEmulatedMedia", media="print")
            assert browser.run(ground) == paper
            browser.call("Emulation.setEmulatedMedia", media="")
