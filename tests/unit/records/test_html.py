import base64
import hashlib
import json
import re
import unicodedata
from itertools import pairwise

import pytest
from helpers.records import HOSTILE, Reader

from retrain.records.html import data_block, page
from retrain.records.text import escape, visible
from retrain.records.timeline import BARS, SPANS_SHOWN, steps_of, timeline_page


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
    """Return the data that the page's script reads."""
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
    hostile[0]["spans"][0]["name"] = "</script><script>alert(1)</script>"
    assert Reader(timeline_page(steps_of(hostile), "run")).tags.count("script") == 3
    text = timeline_page(steps_of(timing(5)), "run <b>")
    reader = Reader(text)
    assert reader.tags.count("script") == 3
    assert "b" not in reader.tags
    words = " ".join(reader.texts)
    assert re.search(r"rollout\s+10\.0 s\s+51\.3%", words)
    data = spans_of(text)
    assert data["lanes"] == ["rollout", "update", "record"]
    assert data["steps"][0] == [0, 0.0, 3500.0, [0, 0.0, 2000.0, 1, 2000.0, 3500.0]]


def test_a_long_run_is_bounded():
    steps = steps_of(timing(10_000))
    text = timeline_page(steps, "run")
    assert text.count('<g class="bar"') <= BARS
    assert re.search(r"The first [\d,]+ steps are not shown here", text)
    data = spans_of(text)
    assert sum(len(one[3]) // 3 for one in data["steps"]) <= SPANS_SHOWN
    assert len(text) < 1_500_000
