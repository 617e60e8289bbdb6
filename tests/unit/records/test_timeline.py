"""The timeline: seconds by phase add up to the steps, the page is inert and bounded."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from browser import Browser, needs_chromium
from pages import Reader
from record_cases import context, group, step

from retrain.record.recorder import RunRecorder
from retrain.record.timeline import BARS, SPANS_SHOWN, steps_of, timeline_page, write_timeline


def rows(count: int, seconds: float = 4.0) -> list[dict]:
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


def spans_of(text: str) -> dict[str, Any]:
    """The data that the page's script reads."""
    match = re.search(r'id="spans">(.*?)</script>', text)
    assert match is not None
    return json.loads(match[1])


def test_phases_add_up_to_the_steps():
    steps = steps_of(rows(5))
    assert [one.number for one in steps] == [0, 1, 2, 3, 4]
    for before, one in pairwise(steps):
        assert one.start == before.end
        assert sum(one.seconds.values()) == pytest.approx(one.end - one.start)
        assert one.seconds["other"] == pytest.approx(0.25)
    assert steps[0].seconds == pytest.approx({"rollout": 2.0, "update": 1.5, "other": 0.0})
    resumed = rows(2)
    for span in resumed[1]["spans"]:
        span["wall_start"] += 3600.0
        span["wall_end"] += 3600.0
    assert steps_of(resumed)[1].end - steps_of(resumed)[1].start < 5  # the gap of a resume belongs to no step


def test_the_page_says_where_the_time_went_and_names_stay_text():
    hostile = rows(1)
    hostile[0]["spans"][0]["name"] = "</script><script>alert(1)</script>"
    assert Reader(timeline_page(steps_of(hostile), "run")).tags.count("script") == 3
    text = timeline_page(steps_of(rows(5)), "run <b>")
    reader = Reader(text)
    assert reader.tags.count("script") == 3
    assert "b" not in reader.tags
    words = " ".join(reader.texts)
    assert re.search(r"rollout\s+10\.0 s\s+51\.3%", words)
    data = spans_of(text)
    assert data["lanes"] == ["rollout", "update", "record"]
    assert data["steps"][0] == [0, 0.0, 3500.0, [0, 0.0, 2000.0, 1, 2000.0, 3500.0]]


def test_a_long_run_is_bounded():
    steps = steps_of(rows(10_000))
    text = timeline_page(steps, "run")
    assert text.count('<g class="bar"') <= BARS
    assert re.search(r"The first [\d,]+ steps are not shown here", text)
    data = spans_of(text)
    assert sum(len(one[3]) // 3 for one in data["steps"]) <= SPANS_SHOWN
    assert len(text) < 1_500_000


def test_the_recorder_writes_it_at_the_end(tmp_path):
    with RunRecorder(tmp_path, context()) as recorder:
        recorder.record_step(step([group([1.0, 0.0], [3, 4])]))
        recorder.flush()
        assert not (tmp_path / "timeline.html").exists()
        recorder.record_checkpoint({"name": "000001", "batch": 1})
        recorder.flush()
        assert (tmp_path / "timeline.html").is_file()
        (tmp_path / "timeline.html").unlink()
    assert "<title>Timeline" in (tmp_path / "timeline.html").read_text()
    with RunRecorder(tmp_path / "empty", context()) as recorder:
        recorder.start()
    assert not (tmp_path / "empty" / "timeline.html").exists()


@needs_chromium
def test_a_browser_shows_hovers_zooms_and_moves(tmp_path):
    """Real events of mouse and keyboard; 40 steps of 4 s: two spans each, records of all but the first."""
    numbers = "[...document.querySelectorAll('#detail text.number')].map(each => Number(each.textContent))"
    spans = "[...document.querySelectorAll('#detail .span')].map(each => each.dataset.text)"
    (tmp_path / "timing_spans.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(40)))
    path = write_timeline(tmp_path)
    assert path is not None
    with Browser() as browser:
        browser.open(path)
        assert len(browser.run(spans)) == 40 * 3 - 1
        everything = browser.run(numbers)

        browser.mouse("mouseMoved", *browser.centre("#steps .bar:nth-of-type(4) .hit"))
        told = browser.run("document.getElementById('stepreadout').textContent")
        assert re.match(r"step (\d+): 4\.0 s = rollout 2\.0 s, update 1\.5 s", told), told
        browser.mouse("mouseMoved", *browser.centre("#detail .span.p4"))
        told = browser.run("document.getElementById('readout').textContent")
        assert told == "step 0 · update · 1.5 s · from 2.0 s"

        browser.click(*browser.centre('#steps .bar[data-step="7"] .hit'))
        assert browser.run(numbers) == [7]
        assert {each.split(" · ")[0] for each in browser.run(spans)} == {"step 7"}
        browser.click(*browser.centre('[data-do="right"]'))
        assert browser.run(numbers) == [8]
        browser.click(*browser.centre('[data-do="all"]'))
        assert browser.run(numbers) == everything

        x, y = browser.centre("#detail")
        for _ in range(8):
            browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100)
        near = {int(each.split()[1]) for each in browser.run(spans)}
        assert {15, 18, 21} < near <= {*range(15, 23)}  # around the pointer
        browser.mouse("mousePressed", x, y)
        browser.mouse("mouseMoved", x + 400, y, buttons=1)
        browser.mouse("mouseReleased", x + 400, y)
        assert max(browser.run(numbers)) < 21
        browser.key("0")
        assert browser.run(numbers) == everything
        assert browser.errors == []
