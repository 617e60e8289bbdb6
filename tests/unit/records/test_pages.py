import base64
import hashlib
import html
import json
import re
import unicodedata
from itertools import pairwise

import pytest
from helpers.records import HOSTILE, Reader

from retrain.records.pages.timeline import SPANS_SHOWN, steps_of, timeline_page
from retrain.util.text import one_line, visible


def test_every_character_is_inert_and_visible():
    everything = "".join(map(chr, [*range(0x20000), *range(0xE0000, 0xE0200), *range(0x10FF00, 0x110000)]))
    shown = visible(everything)
    assert len(shown) == len(everything)
    kinds = {unicodedata.category(character) for character in set(shown) if character not in "\t\n"}
    assert not kinds & {"Cc", "Cs", "Zl", "Zp"}
    assert not {"\u202e", "\u2066", "\u200b", "\ufeff"} & set(shown)
    assert visible("a\tb\nc é 漢 🙂\x1b\x7f\r") == "a\tb\nc é 漢 🙂␛␡␍"
    assert set(visible(one_line(everything))) == set(one_line(everything))
    assert one_line("a\tb\nc é 漢 🙂\x1b\x7f\u202e\U000e0041") == r"a\tb\nc é 漢 🙂\x1b\x7f\u202e\U000e0041"


def test_a_page_is_whole_and_loads_nothing():
    text = timeline_page(steps_of(timing(1)), f"<b> & co {HOSTILE['image']}")
    reader = Reader(text)
    assert reader.tags.count("script") == 2  # the data, and the page's own
    assert not {"img", "link", "iframe", "svg", "b"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name.startswith("on") or name in ("src", "href")]
    assert "<title>Timeline · &lt;b&gt; &amp; co &lt;img" in text
    policy = html.unescape(re.search(r'Security-Policy" content="([^"]*)"', text)[1])
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2]


def timing(count: int, seconds: float = 4.0) -> list[dict]:
    """Steps of rollout, update, then half a second without a name; the record of a step stands in the next row."""
    made = []
    for number in range(count):
        start = 1000.0 + number * seconds
        spans = [("rollout", start, start + 2.0), ("update", start + 2.0, start + seconds - 0.5)]
        if number:
            spans.insert(0, ("record", start - 0.5, start - 0.25))
        made.append({
            "step": number,
            "spans": [{"name": n, "duration": b - a, "wall_start": a, "wall_end": b} for n, a, b in spans],
        })  # fmt: skip
    return made


def spans_of(text: str) -> dict:
    return json.loads(re.search(r'id="spans">(.*?)</script>', text)[1])


def test_phases_add_up_to_the_steps():
    steps = steps_of(timing(5))
    assert [one.number for one in steps] == [0, 1, 2, 3, 4]
    for before, one in pairwise(steps):
        assert one.start == before.end
        assert sum(one.seconds.values()) == pytest.approx(one.end - one.start)
        assert one.seconds["other"] == pytest.approx(0.25)
    assert steps[0].seconds == pytest.approx({"rollout": 2.0, "update": 1.5, "other": 0.0})
    resumed = timing(2)
    for span in resumed[1]["spans"]:
        span["wall_start"] += 3600.0
        span["wall_end"] += 3600.0
    assert steps_of(resumed)[1].end - steps_of(resumed)[1].start < 5  # the gap of a resume belongs to no step


def test_the_page_says_where_the_time_went_and_names_stay_text():
    hostile = timing(1)
    hostile[0]["spans"] = [hostile[0]["spans"][0] | {"name": name} for name in HOSTILE.values()]
    text = timeline_page(steps_of(hostile), "run")
    assert Reader(text).tags.count("script") == 2
    inside = re.search(r'id="spans">(.*?)</script>', text)[1]
    assert not set(inside) & set("<>&")
    assert {HOSTILE[name] for name in ("script", "script_end", "image")} <= set(json.loads(inside)["lanes"])
    text = timeline_page(steps_of(timing(5)), "run")
    words = " ".join(" ".join(Reader(text).texts).split())
    assert "rollout 10.0 s 51.3% 2.0 s 2.0 s 0" in words, "it reads without its script"
    data = spans_of(text)
    assert data["lanes"] == ["rollout", "update", "record"]
    assert data["shown"][0]["spans"] == [[0, 0.0, 2.0], [1, 2.0, 3.5]]


def test_a_long_run_is_bounded():
    text = timeline_page(steps_of(timing(10_000)), "run")
    assert re.search(r"The first [\d,]+ steps are not drawn here", text)
    data = spans_of(text)
    assert sum(len(step["spans"]) for step in data["shown"]) <= SPANS_SHOWN
    assert data["shown"][-1]["step"] == 9_999
    assert len(text) < 1_500_000
