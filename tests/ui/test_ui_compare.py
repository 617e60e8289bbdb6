"""Runs of two campaigns and of two other tools on one chart of the view Compare."""

from urllib.parse import quote

import pytest
from helpers.pages import campaign, cookbook_run, row, trainer_state

from retrain.files import append_jsonl, read_json, write_json
from tests.ui.conftest import serving
from tests.ui.hostile import SCRIPT
from tests.ui.watch import Watched


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Two campaigns of two conditions and three seeds, with other learning rates, and runs of other tools."""
    home = tmp_path_factory.mktemp("compared")
    for name, rate in (("low", 1e-5), ("high", 3e-4)):
        path = campaign(home / name, seeds=3, steps=12)
        for number, run in enumerate(sorted((path / "runs").iterdir())):
            settings = read_json(run / "config.json")
            settings["training"] |= {"lr": rate, "note": SCRIPT}
            write_json(run / "config.json", settings)
            rows = [row(step, mean_reward=(step + number) / 30 + 100 * rate * step) for step in range(12)]
            (run / "metrics.jsonl").unlink()
            append_jsonl(run / "metrics.jsonl", rows)
    trainer_state(home / "grpo_out/checkpoint-10", 10)
    directories = [home / "low", home / "high", cookbook_run(home / "math_rl"), home / "grpo_out"]
    with serving(directories, home / "cache") as address:
        yield address


@pytest.fixture
def page(page):
    """Return the page, at the view with all four directories."""
    return page.open("/compare/low?with=high,math_rl,grpo_out&key=mean_reward")


def entries(page):
    """Return the texts of the legend and the index of the colour of each."""
    looks = "(all) => all.map((each) => [each.innerText.trim(), each.querySelector('line').getAttribute('stroke')])"
    return dict(page.page.locator(".legend button").evaluate_all(looks))


def test_groups_of_campaigns_and_tools_stand_on_one_chart(page):
    groups = entries(page)
    assert len(groups) == 6, "two conditions of two campaigns, and a run of each other tool"
    assert sum(name.endswith("(3)") for name in groups) == 4, "three seeds are one group"
    assert len(set(groups.values())) == 6
    readout = page.text(".readout")
    for name in ("low · grpo+none", "high · maxrl+none", "math_rl", "grpo_out"):
        assert any(entry.startswith(name) for entry in groups), name
        assert name in readout
    assert "n 3" in readout
    assert "[" in readout, "the interval over seeds"
    differ = page.text("table.diff")
    assert "training.lr" in differ
    assert "algorithm.advantage_mode" in differ
    assert "training.seed" not in differ
    assert page.page.locator("main script").count() == 0


def test_groups_are_coloured_by_a_key_and_put_together_by_it(page):
    page.page.get_by_label("colour").select_option("training.lr")
    page.settle()
    groups = entries(page)
    assert len(groups) == 6
    rates = {name.partition(" ·")[0]: set() for name in groups}
    for name, colour in groups.items():
        rates[name.partition(" ·")[0]].add(colour)
    assert {name: len(colours) for name, colours in rates.items()} == {"lr 0.00001": 1, "lr 0.0003": 1, "lr not set": 1}
    assert len(set(groups.values())) == 3
    looks = "(all) => all.map((each) => each.getAttribute('stroke') + each.getAttribute('stroke-dasharray'))"
    dashes = page.page.locator(".legend button line").evaluate_all(looks)
    assert len(set(dashes)) == 6, "groups of one colour differ in their dashes"
    page.click(page.page.get_by_label("group by it alone"))
    assert set(entries(page)) == {"lr 0.00001 (6)", "lr 0.0003 (6)", "lr not set (2)"}
    assert page.query["by"] == "training.lr"
    assert page.query["alone"] == "1"


def test_places_are_added_left_out_and_kept_in_the_address(page, url, context):
    page.press_button("leave out math_rl")
    assert page.query["with"] == "high,grpo_out"
    field = page.page.get_by_label("add a campaign or a run")
    field.fill("high/runs/grpo+none_s1")
    field.press("Enter")
    page.settle()
    assert page.query["with"] == f"high,grpo_out,{quote('high/runs/grpo+none_s1', safe='')}"
    assert page.page.locator(".places li").count() == 4
    page.press_button("high · grpo+none")
    assert page.page.locator(".legend .off").count() == 1
    before = page.seen()
    again = Watched(context.new_page(), url).open(page.path)
    assert again.seen() == before
    again.fine().page.close()
