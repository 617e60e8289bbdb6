from contextlib import closing

import numpy as np
import pytest
from helpers.records import config, context, group, step, updated, with_action

from retrain.records.recorder import RunRecorder
from tests.ui.conftest import retrain
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


def test_of_hostile_texts_a_browser_runs_our_script_alone(file, hostile):
    page = file(hostile / "runs" / RUNS[0] / "train_iteration_000000.html", "#color=s")
    page.wait_for_selector(".t.s6", state="attached")
    assert page.evaluate("() => window.hacked") is None
    assert page.locator("main script, main img, main svg").count() == 0
    retrain("report", str(hostile))
    drawn_report(file, hostile)


def drawn_report(file, campaign):
    """A report in a narrow window and the dark theme, with every chart drawn."""
    page = file(campaign / "report.html", color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 844})
    drawn = "() => [...document.querySelectorAll('[data-charts]')].map((each) => Boolean(each.querySelector('svg')))"
    assert set(page.evaluate(drawn)) == {True}
    assert page.evaluate("() => [window.hacked, document.documentElement.scrollWidth]") == [None, 390]
    return page


def test_a_report_is_printed_in_the_light_theme(file, logs):
    page = drawn_report(file, logs / "quickstart")
    assert page.locator("canvas").count() == 7  # five curves, energy and accuracy by rank
    theme = "(name) => { dispatchEvent(new Event(name)); return getComputedStyle(document.body).colorScheme; }"
    assert page.evaluate(theme, "beforeprint") == "light"
    assert page.evaluate(theme, "afterprint") == "light dark"


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
    for mode, classes, legend in (("value", ",s2,s3,s5,s6", "−0.25 0 0.25 0.5 0.75"),
                                  ("advantage", "m2,p6,,m6,", "≤ −2 −1 0 +1 ≥ +2")):  # fmt: skip
        page.click(f"[data-mode={mode[0]}]")
        page.wait_for_selector(f".sample[data-shown={mode}]")
        shown = "() => [...document.querySelectorAll('.sample .t')].map((each) => each.className.slice(2)).join()"
        assert page.evaluate(shown) == classes
        assert " ".join(page.locator("#legend .t").all_text_contents()) == legend
        page.hover(".sample .t >> nth=0")
        readout = '"a" · token 0 · surprisal 1 nats · advantage −0.5 · value −0.25 · value target 0'
        assert page.text_content("#readout") == readout
    page = file(tmp_path / "train_iteration_000001.html", "#color=v")
    assert page.text_content("#legend") == "0.5"  # equal values have no scale
    page.click("[data-mode=a]")
    assert page.text_content("#legend") == "0"


def test_answers_and_rows_of_a_page_are_sorted(file, tmp_path):
    """Four answers: the order of sampling, then by reward, by length, and the table by its columns."""
    made = group([0.0, 1.0, 0.5, None], [3, 5, 9, 2])
    with closing(RunRecorder(tmp_path, context(config=config(logging={"rollouts_every": 1})), {})) as recorder:
        recorder.record_step(step([made], 0))
    page = file(tmp_path / "train_iteration_000000.html")
    order = "() => [...document.querySelectorAll('.samples article')].map((each) => each.dataset.index).join()"
    assert page.evaluate(order) == "0,1,2,3"
    for key, expected in (("reward", "1,2,0,3"), ("tokens", "2,1,0,3"), ("index", "0,1,2,3")):
        page.select_option("#order", key)
        assert page.evaluate(order) == expected, key
    page.click("details.all summary")
    rows = "() => [...document.querySelectorAll('.trajectories tbody tr')].map((row) => row.cells[7].innerText).join()"
    for expected in ("9,5,3,2", "2,3,5,9"):
        page.get_by_role("button", name="tokens", exact=True).click()
        assert page.evaluate(rows) == expected


def test_pages_of_a_run_read_without_scripts(file, logs):
    run = logs / "quickstart/runs/grpo+none_s1"
    page = file(run / "train_iteration_000010.html", java_script_enabled=False)
    assert page.locator(".samples article .sample").first.inner_text().strip()
    assert page.locator(".samples article [title=reward]").count() == page.locator(".samples article").count() > 8
    assert page.locator(".prompt .message").first.inner_text().strip()
    assert not page.locator("#toolbar").is_visible(), "what needs the script is not shown"
    page = file(run / "timeline.html", java_script_enabled=False)
    assert page.locator("tbody tr", has_text="rollout").is_visible()
    page = file(logs / "quickstart/report.html", java_script_enabled=False)
    assert page.locator("#results tbody tr", has_text="maxrl+gtpo_sepa").is_visible()


def test_a_timeline_shows_the_spans_of_a_step_and_moves(file, tmp_path):
    """90 steps of 4 s: rollout 2 s, update 1 s, and 1 s without a name."""
    with closing(RunRecorder(tmp_path, context())) as recorder:
        for number in range(90):
            recorder.record_step(step([group([1.0, 0.0], [3, 4])], number))
    page = file(tmp_path / "timeline.html")
    bars = page.locator(".column title")
    heading = page.locator("#times figure h2").nth(1)
    assert bars.count() == 60
    assert "steps 30 to 89" in page.inner_text(".tools")
    assert heading.inner_text().startswith("Step 89")
    page.locator(".column", has_text="step 37:").click(force=True)
    assert heading.inner_text().startswith("Step 37")
    spans = page.locator("#times svg[aria-label^='lanes of step 37'] rect title").all_text_contents()
    assert "rollout: 2.0 s" in spans
    assert "update: 1.0 s" in spans
    page.keyboard.press("h")
    assert heading.inner_text().startswith("Step 36")
    page.get_by_role("button", name="earlier").click()
    assert "steps 0 to 59" in page.inner_text(".tools")
    page.locator(".column", has_text="step 59:").click(force=True)
    page.keyboard.press("l")
    assert heading.inner_text().startswith("Step 60")
    assert "steps 60 to 89" in page.inner_text(".tools")


def test_a_timeline_moves_between_its_pages_where_step_numbers_are_missing(file, tmp_path):
    numbers = [*range(30), *range(40, 70), *range(80, 110)]
    with closing(RunRecorder(tmp_path, context())) as recorder:
        for number in numbers:
            recorder.record_step(step([group([1.0, 0.0], [3, 4])], number))
    page = file(tmp_path / "timeline.html")
    heading = page.locator("#times figure h2").nth(1)
    assert "steps 40 to 109" in page.inner_text(".tools")
    for chosen, key, other, window in ((40, "h", 29, "steps 0 to 69"), (69, "l", 80, "steps 80 to 109")):
        page.locator(".column", has_text=f"step {chosen}:").click(force=True)
        page.keyboard.press(key)
        assert heading.inner_text().startswith(f"Step {other}\n") or heading.inner_text() == f"Step {other}", window
        assert window in page.inner_text(".tools")
