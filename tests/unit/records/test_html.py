"""Self-contained pages: what a model wrote stays text, and nothing reaches the network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata

import pytest
from hostile import HOSTILE, Reader

from retrain.record.html import data_block, escape, page, visible


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
