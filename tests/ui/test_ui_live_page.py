"""A page follows files while they are written, torn and cut, and goes where it is sent."""

from __future__ import annotations

import json
import time
import urllib.request

import pytest
from ui_cases import campaign, note, row

from retrain.files import append_jsonl
from tests.ui.conftest import serving
from tests.ui.watch import Watched

SEEN_S = 2.0
RUN = "one/runs/grpo+none_s1"


@pytest.fixture
def home(tmp_path):
    return campaign(tmp_path / "one", steps=6)


@pytest.fixture
def live(home, tmp_path, browser):
    """(page, server's address) over a small campaign that a test may change."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    with serving([home], tmp_path / "cache") as url:
        yield Watched(context.new_page(), url), url
        context.close()


def at_step(step):
    """Whether the chart of the reward says that its last value is of this step."""
    return f"""() => {{ const at = document.querySelector('[data-key="mean_reward"] .readout .at');
        return at && at.textContent === "at {step}"; }}"""


def seconds_until(page, script, what, write):
    write()
    start = time.monotonic()
    page.until(script, what, SEEN_S)
    return time.monotonic() - start


def test_a_new_row_is_seen_within_two_seconds_and_a_torn_one_when_it_is_whole(live, home, capsys):
    page, _ = live
    page.open(f"/metrics/{RUN}?keys=mean_reward").until(
        "() => document.querySelector('.live').textContent === 'live'", "live"
    )
    page.until(at_step(5), "the rows there are")
    path = home / "runs/grpo+none_s1/metrics.jsonl"
    times = [
        seconds_until(page, at_step(step), f"step {step}", lambda step=step: append_jsonl(path, [row(step)]))
        for step in (6, 7)
    ]
    text = json.dumps(row(8))
    with open(path, "a") as file:
        file.write(text[:50])
    page.page.wait_for_timeout(1500)
    assert page.page.evaluate(at_step(7))
    with open(path, "a") as file:
        file.write(text[50:] + "\n")
    page.until(at_step(8), "the row that is whole", SEEN_S)
    with capsys.disabled():
        print(f"\na new row on the page after {', '.join(f'{each:.2f}' for each in times)} s")
    page.fine()


def test_a_file_that_is_cut_or_gone_and_comes_back_breaks_no_page(live, home):
    page, _ = live
    page.open(f"/metrics/{RUN}?keys=mean_reward").until(at_step(5), "the rows there are")
    path = home / "runs/grpo+none_s1/metrics.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(rows[:3]))
    page.until(at_step(2), "the rows that are left", 2 * SEEN_S)
    path.write_bytes(b"\0" * 100 + b"\n{\n[1]\n")
    page.page.wait_for_timeout(2500)
    path.unlink()
    page.page.wait_for_timeout(2500)
    path.write_text("".join(rows))
    append_jsonl(path, [row(6)])
    page.until(at_step(6), "the rows that came back", 3 * SEEN_S)
    assert not [each for each in page.wrong if "script raised" in each]


@pytest.mark.parametrize(
    "view", ["campaign/one", "problems/one", "rollouts/one", "tokens/one", "timeline/" + RUN, "notes/one", ""]
)
def test_other_pages_bear_rows_that_come_and_go(live, home, view):
    page, _ = live
    page.open(f"/{view}")
    folder = home / "runs/grpo+none_s1"
    append_jsonl(folder / "metrics.jsonl", [row(6)])
    append_jsonl(folder / "notes.jsonl", [note(6, "new", "warning")])
    for name in ("metrics.jsonl", "evals.jsonl", "notes.jsonl", "run.log"):
        with open(folder / name, "ab") as file:
            file.write(b'{"step": 7, "torn')
    page.page.wait_for_timeout(2500)
    assert page.page.locator("#main h1").count() == 1
    if view.startswith("notes"):
        page.until("() => document.querySelector('#main').innerText.includes('about new')", "the new note", 2 * SEEN_S)
    page.fine()


def test_an_open_page_is_sent_elsewhere(live):
    page, url = live
    page.open("/").until("() => document.querySelector('.live').textContent === 'live'", "live")
    for target in (f"/metrics/{RUN}?x=tokens", "/notes/one?q=start"):
        body = json.dumps({"url": target}).encode()
        asked = urllib.request.Request(f"{url}/api/view", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked) as answer:
            assert answer.status == 200
        page.until(f"() => location.pathname + location.search === {target!r}", "the page", SEEN_S)
        page.settle()
    page.page.go_back()
    page.settle()
    assert page.path == f"/metrics/{RUN}?x=tokens"
    page.fine()
