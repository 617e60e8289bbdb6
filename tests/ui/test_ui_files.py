import re
from contextlib import closing

import numpy as np
import pytest
from helpers.records import config, context, group, step, updated, with_action

from retrain.records.recorder import RunRecorder
from tests.ui.hostile import RUNS
from tests.ui.watch import Watched


@pytest.fixture
def file(browser):
    """file(path, fragment="", **options): a page of a file, on which nothing may go wrong."""
    opened = []

    def open_file(path, fragment="", **options):
        page = browser.new_context(viewport={"width": 1200, "height": 900}, **options).new_page()
        opened.append(Watched(page, ""))
        page.goto(path.as_uri() + fragment, wait_until="load")
        return page

    yield open_file
    for watched in opened:
        watched.fine().page.context.close()


def test_of_hostile_rollouts_a_browser_runs_our_script_alone(file, hostile):
    page = file(hostile / "runs" / RUNS[0] / "train_iteration_000000.html", "#color=s")
    page.wait_for_selector(".t.su", state="attached")
    assert page.evaluate("() => window.hacked") is None
    assert page.locator("main script, main img, main svg").count() == 0


def test_values_and_signed_advantages_are_coloured_and_labelled(file, tmp_path):
    """Values go from the page's lowest to its highest, advantages from 0 to the largest of either sign."""
    settings = context(config=config(logging={"rollouts_every": 1}))
    places = [(at, at + 1) for at in range(5)]
    with closing(RunRecorder(tmp_path, settings, {}, token_text=lambda ids: ("abcde", places))) as recorder:
        for number in (0, 1):
            credit = {
                "token_advantages_T": np.array([-0.5, 2.0, 0.0004, -1.9996, np.nan]) if number == 0 else np.zeros(5),
                "values_T": np.array([-0.25, 0.0, 0.1234, 0.4996, 0.75] if number == 0 else [0.5] * 5, np.float32),
                "value_targets_T": np.array([0.0, 0.5, 0.25, 1.0, 1.5], dtype=np.float32),
            }
            recorder.record_step(step([updated(with_action(group([1.0], [5]), text="abcde"), credit)], number))
    page = file(tmp_path / "train_iteration_000000.html")
    for mode, classes, legend in (
        ("v", "va h0,va h2,va h2,va h5,va h6", "−0.25 0.25 0.75"),
        ("a", "dn h3,up h6,,dn h6,", "−2.00 −0.50 0 +0.50 +2.00"),
    ):
        page.click(f"[data-mode={mode}]")
        page.wait_for_selector(f".sample[data-shown={mode}]")
        shown = "() => [...document.querySelectorAll('.sample .t')].map((each) => each.className.slice(2)).join()"
        assert page.evaluate(shown) == classes
        assert " ".join(page.locator("#legend .t").all_text_contents()) == legend
        page.hover(".sample .t >> nth=0")
        readout = '"a" · token 0 · surprisal 1.00 · advantage −0.500 · V −0.250 (target 0.000)'
        assert page.text_content("#readout") == readout
    page = file(tmp_path / "train_iteration_000001.html", "#color=v")
    assert page.text_content("#legend") == "0.500"  # equal values have no scale
    page.click("[data-mode=a]")
    assert page.text_content("#legend") == "0"


def test_a_timeline_shows_hovers_zooms_and_moves(file, tmp_path):
    """40 steps of 4 s: rollout 2 s, update 1 s, and 1 s without a name."""
    with closing(RunRecorder(tmp_path, context())) as recorder:
        for number in range(40):
            recorder.record_step(step([group([1.0, 0.0], [3, 4])], number))
    page = file(tmp_path / "timeline.html")

    def spans():
        return page.eval_on_selector_all("#detail .span", "all => all.map((each) => each.dataset.text)")

    def numbers():
        return [int(text) for text in page.locator("#detail text.number").all_text_contents()]

    every_number = numbers()
    assert len([text for text in spans() if "rollout" in text or "update" in text]) == 80
    page.hover("#steps .bar:nth-of-type(4) .hit", force=True)
    assert re.match(r"step \d+: 4\.0 s = rollout 2\.0 s, update 1\.0 s", page.text_content("#stepreadout"))
    page.click('#steps .bar[data-step="7"] .hit', force=True)
    assert numbers() == [7]
    assert {text.split(" · ")[0] for text in spans()} == {"step 7"}
    page.click('[data-do="right"]')
    assert numbers() == [8]
    page.click('[data-do="all"]')
    assert numbers() == every_number
    page.hover("#detail", force=True)
    for _ in range(8):
        page.mouse.wheel(0, -100)
    page.wait_for_function("() => document.querySelectorAll('#detail .span').length < 40")
    near = {int(text.split()[1]) for text in spans()}
    assert 19 in near  # around the pointer
    box = page.locator("#detail").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 400, y, steps=4)
    page.mouse.up()
    assert min(int(text.split()[1]) for text in spans()) < min(near)
    page.keyboard.press("0")
    assert numbers() == every_number
