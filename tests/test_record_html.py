"""Self-contained pages: what a model wrote stays text, and nothing reaches the network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata

import pytest
from pages import Reader

from retrain.record.html import data_block, escape, page, visible

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


def test_data_for_scripts_cannot_end_its_element():
    value = {"texts": HOSTILE, "numbers": [1.5, float("nan"), None]}
    block = data_block("rows", value)
    inside = block[block.index(">") + 1 : -len("</script>")]
    assert "<" not in inside
    parsed = json.loads(inside)
    assert parsed["texts"][:5] == HOSTILE[:5]
    assert parsed["numbers"] == [1.5, None, None]
