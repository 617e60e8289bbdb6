import pytest
from helpers.pages import LABELS, campaign, row

from retrain.files import append_jsonl, write_json
from tests.ui.conftest import serving

STEPS = 4000
FIRST = f"long/runs/{LABELS[0]}_s1"
FACTS = f"/metrics/{FIRST.replace('+', '%2B')}"


def value(step):
    """A line with a spike that thinning must keep."""
    return 50.0 if step == 2345 else step % 7


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Two conditions with a seed each: a long line, a custom metric, checkpoints, a resume and a plan."""
    home = campaign(tmp_path_factory.mktemp("metrics") / "long", seeds=1, steps=0)
    for label in LABELS:
        run = home / "runs" / f"{label}_s1"
        rows = [row(step, mean_reward=value(step), **{"game/board/size": step % 3}) for step in range(STEPS)]
        append_jsonl(run / "metrics.jsonl", rows)
        append_jsonl(run / "checkpoints.jsonl", [{"name": "002000", "batch": 2000}, {"name": "final", "batch": 3000}])
        (run / "run.log").write_text("2026-01-01 00:00:00 info    continues at step 2000\n")
    write_json(home / "plan.json", {"file": "quick.toml", "folder": "/data", "sets": ["training.seed=1 2"]})
    with serving([home], home.parent / "cache") as address:
        yield address


TICKS = """() => { const texts = []; const fill = CanvasRenderingContext2D.prototype.fillText;
      CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
        if (this.canvas === document.querySelector(".plot canvas")) texts.push([text, Math.round(y)]);
        return fill.call(this, text, x, y); };
      document.dispatchEvent(new CustomEvent("theme"));
      return new Promise((done) => setTimeout(() => { CanvasRenderingContext2D.prototype.fillText = fill;
        const bottom = Math.max(...texts.map(([, y]) => y)); done(texts.filter(([, y]) => y === bottom)
          .map(([text]) => text)); }, 100)); }"""
"""The texts of the x axis of the first chart, as they are drawn."""


@pytest.mark.parametrize("zoom", ["", "&zoom=2000,2010"])
def test_the_step_s_own_value_stands_beside_the_smoothed_one(page, zoom):
    page.open(f"/metrics/long?keys=mean_reward&smooth=ema:0.9{zoom}")
    page.page.locator(".plot").first.focus()
    page.press("Home", "ArrowRight", "ArrowRight")
    readout = page.page.locator(".chartcard .readout").first
    step = int(readout.locator(".at").inner_text())
    assert step == 2002 if zoom else step > 1
    last = 0.0  # TensorBoard's debiased average
    for each in range(step + 1):
        last = 0.9 * last + 0.1 * value(each)
    smoothed = float(readout.locator("b").first.inner_text())
    expected = last / (1 - 0.9 ** (step + 1))
    assert smoothed == pytest.approx(expected, rel=6e-3), "all rows are smoothed, then thinned"
    assert readout.locator(".item .muted").first.inner_text() == f"step {value(step)}"


@pytest.mark.parametrize("zoom", ["100,102.2", "10,15", "0,3999", "2000,2000.6"])
def test_ticks_of_a_step_axis_are_whole_and_do_not_repeat(page, zoom):
    page.open(f"/metrics/long?keys=mean_reward&zoom={zoom}")
    texts = [text for text in page.page.evaluate(TICKS) if text]
    assert texts
    assert all(text.isdecimal() for text in texts)
    assert len(set(texts)) == len(texts)


def test_a_run_has_tiles_its_command_and_marks_on_every_chart(page):
    page.open(FACTS)
    tiles = page.page.locator(".tile").all_inner_texts()
    assert [each.split("\n")[0] for each in tiles] == ["reward", "held-out", "entropy"]
    assert tiles[0].split("\n")[1:] == [str(value(STEPS - 1)), f"step {STEPS - 1}"]
    assert "n 64" in tiles[1]
    assert page.page.locator(".marks .mark").all_inner_texts() == ["▽ 1 evaluation", "▼ 2 checkpoints", "┆ 1 resume"]
    page.page.locator(".runfacts").get_by_role("button", name="Copy").click()
    copied = page.page.evaluate("() => navigator.clipboard.readText()")
    assert copied == page.text(".runfacts pre")
    assert copied.startswith("retrain train /data/quick.toml --out ")
    assert copied.endswith("--set 'training.seed=1 2'")
    page.click(page.page.locator(".tile").first)
    assert page.query["open"] == "mean_reward"
    assert page.text(".big .chartcard .heading").startswith("mean_reward")
    page.open(f"{FACTS}?keys=mean_reward,entropy&zoom=1990,2010")
    for chart in range(2):
        page.page.locator(".plot[tabindex]").nth(chart).focus()
        page.press("Home", "Shift+ArrowRight")
        events = page.page.locator(".readout .events").all_inner_texts()
        assert events == ["checkpoint, resume"] * 2, "one cursor runs through both charts"
        page.press("ArrowRight")
        assert page.page.locator(".readout .events").count() == 0


def test_marks_follow_the_axis(page):
    page.open(f"{FACTS}?keys=mean_reward&x=tokens&zoom=199000,201000")
    page.page.locator(".plot[tabindex]").focus()
    page.press("Home", *["ArrowRight"] * 9)
    found = set()
    for _ in range(4):
        found |= set(page.page.locator(".readout .events").all_inner_texts())
        page.press("ArrowRight")
    assert "checkpoint, resume" in found


def test_all_metrics_by_section_with_an_index_and_a_custom_one_in_its_own_group(page):
    page.open("/metrics/long?tab=all")
    sections = page.page.locator("nav.sections button").all_inner_texts()
    heads = page.page.evaluate("() => [...document.querySelectorAll('h2.section')].map((each) => each.id)")
    assert [f"section {each.rpartition(' ')[0]}" for each in sections] == heads
    assert "game 1" in sections
    page.page.get_by_role("button", name="game 1").click()
    section = page.page.locator("section:has(> #section\\ game)")
    assert page.page.evaluate("() => document.activeElement.textContent").startswith("game")
    assert section.locator("h3.group").inner_text() == "board"
    page.page.locator("input[type=search]").fill("^game/.*size")
    page.settle()
    assert page.page.locator(".chartcard .heading").all_inner_texts() == ["game/board/size"]
    assert page.page.locator("nav.sections").count() == 0


def test_pinned_charts_are_kept_in_the_address(page):
    page.open("/metrics/long?tab=all&q=reward")
    page.page.get_by_role("button", name="add mean_reward to Mine").click()
    page.page.locator("input[type=search]").fill("entropy")
    page.settle()
    page.page.get_by_role("button", name="add entropy to Mine").click()
    assert page.query["keys"] == "mean_reward,entropy"
    page.page.get_by_role("button", name="Mine 2").click()
    page.page.locator("input[type=search]").fill("")
    page.settle()
    page.page.get_by_role("button", name="move entropy forward").click()
    assert page.query["keys"] == "entropy,mean_reward"
    page.until("() => document.querySelectorAll('.plot[tabindex]').length === 2", "the charts")
    page.page.get_by_role("button", name="take entropy out of Mine").click()
    assert page.query["keys"] == "mean_reward"
    page.open("/metrics/long?keys=entropy,mean_reward,entropy")
    assert page.page.locator(".chartplace").count() == 2, "each once"
    page.page.get_by_role("button", name="move entropy back").click()
    assert page.query["keys"] == "mean_reward,entropy"


# All within one frame, in which uPlot's own selection has not yet followed the pointer.
DRAG = """([from, to]) => { const over = document.querySelector(".plot .u-over");
  const {left, width, top} = over.getBoundingClientRect();
  const fire = (target, type, x) => target.dispatchEvent(new MouseEvent(type,
    {clientX: left + x * width, clientY: top + 20, bubbles: true, button: 0}));
  fire(over, "mousedown", from); fire(over, "mousemove", to); fire(document, "mouseup", to); }"""


def test_a_drag_within_one_frame_zooms(page):
    page.open("/metrics/long?keys=mean_reward,entropy")
    page.page.evaluate(DRAG, [0.25, 0.251])
    page.settle()
    assert "zoom" not in page.query, "hardly a drag"
    page.page.evaluate(DRAG, [0.5, 0.25])
    page.settle()
    start, end = page.query["zoom"].split(",")
    assert [float(start), float(end)] == pytest.approx([0.25 * STEPS, 0.5 * STEPS], abs=15)  # a pixel is 9 steps
    parts = [each for each in page.requests if "/api/columns?" in each and f"from={start}&to={end}" in each]
    assert len(parts) == 2
    page.press("Escape")
    assert "zoom" not in page.query
