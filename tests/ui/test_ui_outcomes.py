"""What came of campaigns: the rows of the first page, the banner of a campaign, its curves and intervals."""

import fcntl
import re
from pathlib import Path

import pytest
from helpers.pages import LABELS, campaign, row

from retrain.files import append_jsonl, read_json, write_json
from tests.ui.conftest import serving
from tests.ui.watch import Watched

MANY = 200
WITHIN_MS = 1_000
THREE = (*LABELS, "rloo+none")
ERROR = "retrain.errors.RunFailed: the grader has no answer for problem p17"
TRACEBACK = f'Traceback (most recent call last):\n  File "b.py", line 9, in grade\n    raise RunFailed(name)\n{ERROR}\n'
SEED_INTERVAL = re.compile(r"\d+\.\d% \[\d+\.\d%, \d+\.\d%\] · \d of \d seeds?")
# Milliseconds from the navigation until so many rows were there.
WATCH_ROWS = f"""new MutationObserver(() => {{
  if (!window.rowsAt && document.querySelectorAll(".campaigns tbody tr").length === {MANY})
    requestAnimationFrame(() => {{ window.rowsAt = window.rowsAt || performance.now(); }});
}}).observe(document, {{childList: true, subtree: true}});"""
ROW_TOP = "(place) => document.querySelector(`tr[data-key='${place}']`).getBoundingClientRect().top"


def set_states(home: Path, changes: dict[str, dict]) -> None:
    manifest = read_json(home / "manifest.json")
    for entry in manifest["runs"]:
        entry |= changes.get(entry["run_id"], {})
    write_json(home / "manifest.json", manifest)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Campaigns that are done, failed, in training and of one seed, and many small ones."""
    home = tmp_path_factory.mktemp("outcomes")
    campaign(home / "logs/done", seeds=3, steps=60, labels=THREE)
    campaign(home / "logs/lone", seeds=1)
    failed = campaign(home / "logs/failed", seeds=3)
    set_states(failed, {"grpo+none_s2": {"state": "failed", "reason": "RunFailed: no answer", "step": 4}})
    with open(failed / "runs/grpo+none_s2/run.log", "a") as log:
        log.writelines(f"2026-01-01 00:00:09 error   {line}\n" for line in TRACEBACK.splitlines())
    training = campaign(home / "logs/training", seeds=2, state="running")
    ends = {"max_steps": 16, "state": "running"}
    set_states(training, {f"{label}_s{seed}": ends for label in LABELS for seed in (1, 2)})
    config = training / "runs/grpo+none_s1/config.json"
    write_json(config, read_json(config) | {"built": {"device": "cuda:0"}})
    with open(training / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with serving([home / "logs"], home / "cache") as address:
            yield address


def test_a_banner_has_failures_and_the_command_above_the_verdict(page):
    page.open("/campaign/logs/failed")
    page.until("() => document.querySelector('.banner')?.innerText.includes('interim')", "the campaign is read")
    assert page.page.locator(".banner").count() == 1
    banner = page.text(".banner")
    parts = ["failed", "6 runs: 1 failed, 5 finished", "grpo+none, seed 2", ERROR, "retrain resume ", "interim"]
    places = [banner.index(part) for part in parts]
    assert places == sorted(places)
    text = page.text()
    assert min(text.find(word) % len(text) for word in ("cannot tell", "interim")) > text.index(ERROR)
    page.page.locator(".banner").get_by_role("button", name="Copy").click()
    copied = page.page.evaluate("() => navigator.clipboard.readText()")
    assert re.fullmatch(r"retrain resume \S+/logs/failed --retry-failed", copied)
    page.click(page.page.get_by_label("log of grpo+none_s2", exact=True))
    assert ERROR in page.text(".log")


def test_a_banner_without_failures_has_the_verdicts_in_a_sentence_each(page):
    page.open("/campaign/logs/done")
    sentences = page.page.locator(".banner .outcome").all_inner_texts()
    assert len(sentences) == 2
    assert "rloo − grpo: +40.0 points typically" in sentences[0], "the largest difference stands first"
    assert page.text(".banner").startswith("done 9 runs: 9 finished")
    assert page.page.locator(".banner pre, .failures").count() == 0
    page.open("/campaign/logs/training")
    assert page.text(".banner").startswith("running")
    assert page.page.locator(".banner .outcome, .banner p.muted").count() == 1
    assert "about 20 s left" in page.text(".title")


def test_rates_of_a_campaign_have_n_and_one_kind_of_interval(page):
    page.open("/campaign/logs/done")
    label = page.page.locator(".forest svg").first.get_attribute("aria-label")
    assert len(SEED_INTERVAL.findall(label)) == 3
    assert "3 of 3 seeds" in label
    assert "over problems" not in page.text()
    readout = page.page.locator(".chartcard .readout .item").all_inner_texts()
    assert all(re.search(r"\[.+\]\s+n 3$", item) for item in readout)
    assert len(readout) == 3 + 2
    page.open("/campaign/logs/lone")
    label = page.page.locator(".forest svg").first.get_attribute("aria-label")
    assert "grpo+none 51.6% [39.6%, 63.4%] · n 64, 1 of 1 seed" in label
    assert "95 % interval over problems" in page.text("figure.card")


def lines(page):
    """Return how many lines the level's chart says that it has, those of the means."""
    label = page.page.locator(".chartcard .plot").first.get_attribute("aria-label")
    return int(re.search(r"(\d+) lines?\.", label)[1])


def test_curves_begin_with_means_and_one_legend_entry_for_each_condition(page):
    page.open("/campaign/logs/done?key=mean_reward")
    legend = page.page.locator(".legend button")
    assert legend.all_inner_texts() == list(THREE)
    looks = [(each.locator("line").get_attribute("stroke"), each.locator("line").get_attribute("stroke-dasharray"),
              each.locator("path").get_attribute("d")) for each in legend.all()]  # fmt: skip
    assert all(len(set(column)) == 3 for column in zip(*looks, strict=True)), "colour, dash and shape differ"
    assert lines(page) == 3
    assert not page.page.get_by_label("every seed").is_checked()
    assert "band: 95 % interval over seeds" in page.text(".chartcard")
    page.click(legend.nth(1))
    assert (lines(page), page.query["hide"]) == (2, "1")
    page.page.reload()
    page.settle()
    assert (lines(page), legend.nth(1).get_attribute("aria-pressed")) == (2, "false")
    page.click(legend.nth(1))
    assert (lines(page), "hide" in page.query) == (3, False)


def test_marks_on_a_chart_have_the_shape_of_their_condition(page):
    """The lines of two conditions are drawn with marks of which one fills its box more than the other."""
    page.page.add_init_script("""
      window.marks = [];
      const add = Path2D.prototype.addPath;
      Path2D.prototype.addPath = function (path, ...more) { marks.push(path); return add.call(this, path, ...more); };
      const make = window.Path2D;
      window.Path2D = class extends make { constructor(d) { super(d); this.shape = typeof d === "string" && d; } };
    """)
    page.open("/campaign/logs/done?key=mean_reward")
    shapes = page.page.evaluate("() => [...new Set(marks.map((each) => each.shape.replace(/[-\\d. ]+/g, '')))]")
    assert sorted(shapes) == ["MLHZ", "MaaZ", "MhvhZ"]
    assert page.page.evaluate("() => marks.length") < 400, "a dozen marks for a line of many points"


def test_a_row_of_the_first_page_has_the_state_of_its_campaign(page):
    page.open("/")
    texts = {each.get_attribute("data-key"): each.inner_text() for each in page.page.locator("tbody tr").all()}
    done, failed, training = (texts[f"logs/{name}"] for name in ("done", "failed", "training"))
    for text in ("done", "53%", "41–65%, n 64", "rloo+none", "cannot tell", "540 of 540", "3 of 3 seeds",
                 "step 4, rloo+none_s3: about truncated"):  # fmt: skip
        assert text in done
    assert "1 failed" in failed
    assert failed.index("1 failed") < failed.index("interim")
    for text in ("running", "24 of 64", "about 20 s left", "cuda:0"):
        assert text in training
    sparks = page.page.locator("tr[data-key='logs/done'] svg.spark")
    assert sparks.locator("polyline").count() == 3
    assert "held-out accuracy over the steps: grpo+none 53.1%" in sparks.get_attribute("aria-label")
    assert page.page.locator("tr[data-key='logs/done'] svg.bar").count() == 1


def order(page):
    return page.page.locator("tbody tr").evaluate_all("(rows) => rows.map((row) => row.dataset.key)")


def test_filter_and_order_of_the_first_page_stand_in_the_address(page):
    page.open("/")
    page.press_button("held-out accuracy")
    assert page.query == {"sort": "accuracy"}
    assert order(page)[0] == "logs/done", "the best first"
    page.press_button("held-out accuracy")
    assert page.query == {"sort": "accuracy", "order": "up"}
    page.page.get_by_label("search name").fill("logs")
    page.click(page.page.get_by_label("state").get_by_role("button", name="done"))
    seen = order(page)
    assert seen[-1] == "logs/done"
    assert page.query == {"sort": "accuracy", "order": "up", "q": "logs", "state": "done"}
    page.page.reload()
    page.settle()
    assert order(page) == seen
    assert page.page.get_by_label("search name").input_value() == "logs"


def small(home: Path, number: int) -> Path:
    return campaign(home / f"c{number:03}", seeds=1, steps=4)


def test_new_rows_do_not_move_what_is_in_sight(context, tmp_path):
    for number in range(40):
        small(tmp_path / "logs", number)
    with serving([tmp_path / "logs"], tmp_path / "cache") as url:
        page = Watched(context.new_page(), url).open("/")
        page.until("() => document.querySelectorAll('tbody tr').length === 40", "all rows")
        page.page.evaluate("() => scrollTo(0, 1500)")
        page.settle()
        place = page.page.evaluate("() => document.elementFromPoint(300, innerHeight / 2).closest('tr').dataset.key")
        before = page.page.evaluate(ROW_TOP, place)
        for number in (40, 41):
            small(tmp_path / "logs", number)
        # The last row changes, and so becomes one of the first.
        append_jsonl(tmp_path / "logs/c000/runs/grpo+none_s1/metrics.jsonl", [row(4)])
        page.until("() => document.querySelectorAll('tbody tr').length === 42", "the new rows", 15)
        first = "[...document.querySelectorAll('tbody tr')].slice(0, 3)"
        page.until(f"() => {first}.some((row) => row.dataset.key === 'logs/c000')", "the changed row", 15)
        page.page.wait_for_timeout(300)
        assert page.page.evaluate(ROW_TOP, place) == pytest.approx(before, abs=1.0)
        assert {*order(page)[:3]} == {"logs/c000", "logs/c040", "logs/c041"}
        page.fine().page.close()


def test_many_campaigns_are_shown_within_a_second(context, tmp_path):
    for number in range(MANY):
        small(tmp_path / "logs", number)
    with serving([tmp_path / "logs"], tmp_path / "cache") as url:
        page = Watched(context.new_page(), url)
        page.page.add_init_script(WATCH_ROWS)
        page.open("/")
        page.until("() => !document.querySelector('.spin')", "all are read", 60)
        times = []
        for _ in range(3):
            page.open("/")
            times.append(page.until("() => window.rowsAt", "all rows"))
        assert min(times) < WITHIN_MS, times
        page.fine().page.close()
