import csv
import re
import struct

import pytest
from helpers.pages import LABELS, campaign, row

from retrain.files import append_jsonl
from tests.ui.conftest import serving

STEPS = 3000
CURVES = "/campaign/long?key=mean_reward&thin=0"
CHARTS = "/metrics/long?keys=mean_reward,correct_rate"
# Every chart that is made, to be asked for its axes.
KEPT = """(() => { let kept; window.charts = []; Object.defineProperty(window, "uPlot", {get: () => kept, set(real) {
  kept = function (...values) { const made = new real(...values); charts.push(made); return made; };
  Object.assign(kept, real); }}); })()"""
AXES = """() => charts.filter((each) => each.root.isConnected).map((each) =>
  ["x", "y"].map((axis) => [each.scales[axis].min, each.scales[axis].max]))"""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Two conditions, two seeds, of so many steps that no chart has a point for each."""
    home = campaign(tmp_path_factory.mktemp("charts") / "long", steps=STEPS)
    flat = campaign(home.parent / "flat", seeds=1, steps=0, labels=LABELS[:1])
    append_jsonl(flat / "runs" / f"{LABELS[0]}_s1" / "metrics.jsonl", [row(step) for step in range(40)])
    with serving([home, flat], home.parent / "cache") as address:
        yield address


@pytest.fixture
def page(page):
    page.page.add_init_script(KEPT)
    return page


def asked(page, name="curves"):
    return [each for each in page.requests if f"/api/{name}?" in each]


def at(page, chart=0):
    """Return the step at which the chart's legend says that its cursor stands."""
    text = page.page.locator(".chartcard .readout .at").nth(chart).inner_text()
    return float(text.removeprefix("at ").replace("k", "e3"))


def x_axes(page):
    page.page.wait_for_timeout(100)
    return [x for x, _ in page.page.evaluate(AXES)]


def test_a_drag_zooms_every_chart_to_finer_points_and_a_double_click_goes_back(page):
    page.open(CURVES)
    whole, before = x_axes(page), len(asked(page))
    assert whole == [[0, STEPS - 1]] * 2
    page.page.locator(".plot").first.scroll_into_view_if_needed()
    page.settle()
    box = page.page.locator(".plot .u-over").first.bounding_box()
    height = box["y"] + box["height"] / 2
    page.page.mouse.move(box["x"] + 0.5 * box["width"], height)
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + 0.52 * box["width"], height, steps=4)
    page.page.mouse.up()
    page.settle()
    low, high = map(float, page.query["zoom"].split(","))
    assert 1480 < low < 1510 < 1545 < high < 1575
    assert x_axes(page) == [[pytest.approx(low), pytest.approx(high)]] * 2
    assert len(asked(page)) == before + 1
    assert re.search(r"[?&]from=15?\d+\.?\d*&to=15\d+", asked(page)[-1])
    page.page.locator(".plot").first.focus()
    page.press("Home")
    first = at(page)
    page.press("ArrowRight")
    assert at(page) == first + 1, "every step is there"
    page.page.locator(".plot .u-over").first.dblclick()
    page.settle()
    assert "zoom" not in page.query
    assert x_axes(page) == whole
    assert len(asked(page)) == before + 2


@pytest.mark.parametrize("lines", ["", "&lines=conditions"])
def test_an_address_with_a_part_of_the_axis_shows_all_of_its_points(page, lines):
    page.open(f"{CHARTS}{lines}&zoom=100,120")
    page.until("() => document.querySelectorAll('.plot[tabindex]').length === 2", "both charts")
    assert x_axes(page) == [[100, 120]] * 2
    columns = asked(page, "curves" if lines else "columns")
    assert columns
    assert all("from=100&to=120" in each for each in columns)
    assert page.page.locator(".readout .at").all_inner_texts() == ["at 120"] * 2
    for chart in (0, 1):
        page.page.locator(".plot").nth(chart).focus()
        page.press("Home", "ArrowRight", "ArrowRight")
        assert at(page, chart) == 102
    page.press("Escape")
    assert "zoom" not in page.query
    assert all(low < 5 and high == STEPS - 1 for low, high in x_axes(page))


@pytest.mark.parametrize("smooth", [1, 20])  # addresses of earlier releases have the steps of a moving average
def test_what_stands_under_the_cursor_is_of_that_step(page, smooth):
    """Where a chart has a point for every third step alone."""
    page.open(f"{CHARTS}&smooth={smooth}")
    page.page.locator(".plot").first.focus()
    page.press("Home", "Shift+ArrowRight", "Shift+ArrowRight")
    step = at(page)
    assert step > 40, "points are left out"
    value = page.page.locator(".readout b").first.inner_text()
    assert float(value) == pytest.approx(0.1 * (step - (smooth - 1) / 2), rel=2e-3)
    assert all(f"smooth={smooth}" in each for each in asked(page, "columns") if "mean_reward" in each)
    page.page.get_by_label("smoothing").select_option("ema:0.9")
    page.settle()
    assert "smooth=ema%3A0.9" in asked(page, "columns")[-1]
    page.press("End")
    assert at(page) == STEPS - 1


def test_the_cursor_goes_by_keys_and_is_told(page):
    page.open("/metrics/flat?keys=mean_reward,correct_rate")
    chart = page.page.locator(".plot").first
    assert chart.get_attribute("role") == "application"
    assert "mean_reward" in chart.get_attribute("aria-label")
    chart.focus()
    for key, place in (("End", 39), ("ArrowLeft", 38), ("Home", 0), ("ArrowLeft", 0), ("ArrowRight", 1),
                       ("Shift+ArrowRight", 11), ("Shift+ArrowLeft", 1)):  # fmt: skip
        page.page.keyboard.press(key)
        page.page.wait_for_timeout(60)
        assert at(page) == place
        assert at(page, 1) == place, "one cursor runs through all charts"
        told = page.page.locator(".chartcard > p[role=status]").first.text_content()
        assert told.startswith(f"step {place}, grpo+none")
        assert told.removesuffix(", evaluation").endswith(f" {0.1 * place:.3g}")
    for back in ("-", "Escape"):
        page.press("+")
        assert x_axes(page)[0][1] < 39
        assert at(page) == 1, "the cursor stays where it is"
        page.press(back)
        assert "zoom" not in page.query
    page.press("j")  # the page's own keys stay its own
    assert page.page.evaluate("() => Boolean(document.activeElement.closest('.chartcard'))")
    page.page.evaluate("() => document.activeElement.blur()")
    assert page.page.locator(".readout .at").first.inner_text() == "at 39"


def saved(page, card, kind):
    """Save a card as this kind of file; return its name and content."""
    card.locator("summary[aria-label='save this chart']").click()
    with page.page.expect_download() as download:
        card.get_by_role("button", name=kind, exact=True).click()
    return download.value.suggested_filename, download.value.path().read_bytes()


def test_a_line_chart_is_saved_as_table_and_picture_of_its_canvas(page):
    page.open(CHARTS)
    card = page.page.locator(".chartcard").first
    rows = list(csv.reader(saved(page, card, "CSV")[1].decode().splitlines()))
    assert rows[0][0] == "step"
    assert len(rows) > 100
    name, data = saved(page, card, "PNG")
    assert name.endswith(".png")
    width, height = struct.unpack(">II", data[16:24])
    canvas = page.page.evaluate("() => { const {width, height} = document.querySelector('.plot canvas');"
                                " return [width, height]; }")  # fmt: skip
    assert width == canvas[0]
    assert height >= canvas[1] + 40, "title and legend stand above"
    assert len(data) > 5000, "something is drawn"
    card.locator("summary[aria-label='save this chart']").click()
    assert card.get_by_role("button", name="SVG", exact=True).count() == 0


def test_forests_are_saved_as_table_and_picture(page):
    page.open("/campaign/long")
    figures = page.page.locator("figure.card:has(.forest)")
    assert figures.count() == 2
    for at, head in enumerate((["condition", "seed"], ["condition", "baseline"])):
        name, data = saved(page, figures.nth(at), "CSV")
        rows = list(csv.reader(data.decode().splitlines()))
        assert name.endswith(".csv")
        assert rows[0][: len(head)] == head
        assert {each[0] for each in rows[1:]} <= set(LABELS)
        assert len({len(each) for each in rows}) == 1
        name, data = saved(page, figures.nth(at), "SVG")
        assert name.endswith(".svg")
        assert data.startswith(b"<svg")
        assert b"var(" not in data, "a file has colours of its own"
        assert LABELS[1].encode() in data
        assert saved(page, figures.nth(at), "PNG")[1].startswith(b"\x89PNG")
