import json
from pathlib import Path
from urllib.parse import quote

import pytest
from helpers.pages import LABELS, RUN, adapter, campaign, manifest, note, row
from helpers.pages import evaluation as evaluation_row
from helpers.records import config, evaluation, group, step
from helpers.records import context as run_context

from retrain.files import append_jsonl, write_json
from retrain.records.recorder import RunRecorder
from tests.ui.conftest import serving
from tests.ui.watch import Watched

SEEN_S = 2.0
MOST = 8
"""Steps that a run is to have."""


@pytest.fixture
def home(tmp_path):
    return campaign(tmp_path / "one", steps=6)


@pytest.fixture
def page(home, tmp_path, context):
    """A page over a small campaign that a test may change."""
    with serving([home], tmp_path / "cache") as url:
        watched = Watched(context.new_page(), url)
        yield watched
        watched.page.close()


def opened(page, address):
    """Open this address, and wait until the page hears from the server."""
    page.open(address).until("() => document.querySelector('.live').textContent === 'live'", "live")


def at_step(step):
    """Whether the chart of the reward says that its last value is of this step."""
    return f"""() => {{ const at = document.querySelector('[data-key="mean_reward"] .readout .at');
        return at && at.textContent === "at {step}"; }}"""


def test_a_page_follows_a_file_that_grows_is_torn_cut_and_gone(page, home):
    opened(page, f"/metrics/{RUN}?keys=mean_reward")
    page.until(at_step(5), "the rows there are")
    path = home / "runs/grpo+none_s1/metrics.jsonl"
    for number in (6, 7):
        append_jsonl(path, [row(number)])
        page.until(at_step(number), f"step {number}", SEEN_S)
    text = json.dumps(row(8))
    with open(path, "a") as file:
        file.write(text[:50])
    page.page.wait_for_timeout(1500)
    assert page.page.evaluate(at_step(7))
    with open(path, "a") as file:
        file.write(text[50:] + "\n")
    page.until(at_step(8), "the completed row", SEEN_S)
    page.fine()
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(rows[:3]))
    page.until(at_step(2), "the remaining rows", 2 * SEEN_S)
    path.write_bytes(b"\0" * 100 + b"\n{\n[1]\n")
    page.page.wait_for_timeout(2500)
    path.unlink()
    page.page.wait_for_timeout(2500)
    path.write_text("".join(rows[:7]))
    page.until(at_step(6), "the rows that came back", 3 * SEEN_S)
    assert not [each for each in page.wrong if "script raised" in each]


class Training:
    """Two runs that are recorded as they train: a step of both at a time."""

    def __init__(self, home: Path):
        self.home, self.runs = home, {label: home / "runs" / f"{label}_s1" for label in LABELS}
        for number, (label, run) in enumerate(self.runs.items()):
            write_json(run / "config.json", {"run_id": run.name, "condition": label, "training": {"lr": number}})
        runs = [(run.name, label, 1) for label, run in self.runs.items()]
        manifest(home, runs, steps=MOST, state="running", step=0)
        self.recorders = [
            RunRecorder(run, run_context(condition=label, run_id=run.name, max_steps=MOST,
                                     config=config(logging={"rollouts_every": 1})), {}, token_text=pieces)
            for label, run in self.runs.items()
        ]  # fmt: skip

    def step(self, at: int) -> None:
        """All that a step leaves behind: row, rollouts, times, note, evaluation, checkpoint; and another setting."""
        for number, (recorder, run) in enumerate(zip(self.recorders, self.runs.values(), strict=True)):
            recorder.record_step(step([group([0.0, 1.0], [5, 7], problem_id=f"p{at}")], at))
            recorder.record_eval(evaluation([group([float(number)], [4], problem_id="q")], at + 1))
            adapter(run / "checkpoints" / f"step_{at + 1}", seed=at + number)
            append_jsonl(run / "notes.jsonl", [note(at, f"number {at}", "warning")])
            write_json(run / "config.json", {"run_id": run.name, "condition": run.name.partition("_")[0],
                                             "training": {"lr": number + at}})  # fmt: skip
        for recorder in self.recorders:
            recorder.flush()


def pieces(ids):
    return "x" * len(ids), [(at, at + 1) for at in range(len(ids))]


@pytest.fixture
def training(tmp_path):
    made = Training(tmp_path / "two")
    yield made
    for recorder in made.recorders:
        recorder.close()


@pytest.fixture
def following(training, tmp_path, context):
    """A page over two runs that train, before their first step."""
    with serving([training.home], tmp_path / "cache") as url:
        watched = Watched(context.new_page(), url)
        yield watched
        watched.page.close()


TEXT = "document.querySelector('#main').innerText"
AT_6 = "document.querySelector('[data-key=mean_reward] .readout .at')?.textContent === 'at 6'"
OWN, OTHER = (f"two/runs/{label}_s1" for label in LABELS)
STEP_6 = {
    "": f"{TEXT}.includes('14 of 16')",
    "campaign/two": f"{TEXT}.includes('7 of 8')",
    "metrics/two?keys=mean_reward": AT_6,
    "metrics/two?keys=mean_reward&lines=conditions": AT_6,
    "problems/two": f"{TEXT}.includes('→ 7')",
    "prompt/two": f"{TEXT}.includes('step 7')",
    "rollouts/two": "document.querySelector('h1 + p')?.textContent.includes('step 6')",
    "tokens/two": "document.querySelector('.steps input')?.getAttribute('aria-valuetext').endsWith('of 7')",
    f"timeline/{OWN}": f"{TEXT}.includes('steps 0 to 6')",
    "lora/two": f"{TEXT}.includes('step 7')",
    f"compare/two?a={quote(OWN)}&b={quote(OTHER)}":
        "[...document.querySelectorAll('.diff td')].map((each) => each.textContent).join().includes('6,7')",
    "notes/two": f"{TEXT}.includes('about number 6')",
}  # fmt: skip

FIRST_STEP = {
    "campaign/two": ".chartcard .readout b", "metrics/two?keys=mean_reward": ".chartcard .readout .at",
    "problems/two": ".matrixtable", "prompt/two": ".sides .message", "rollouts/two": "tr[data-key]", "tokens/two": ".t",
    "lora/two": ".matrix",
}  # fmt: skip


@pytest.mark.parametrize("view", STEP_6)
def test_a_page_that_is_opened_before_anything_is_recorded_fills_and_shows_later_steps(following, training, view):
    opened(following, f"/{view}")
    if selector := FIRST_STEP.get(view):
        assert following.page.locator(f"#main {selector}").count() == 0
    training.step(0)
    if selector:
        following.until(f"() => document.querySelector('#main {selector}')", "the first step", 5 * SEEN_S)
    for at in range(1, 7):
        training.step(at)
    for path in training.runs.values():
        for name in ("metrics.jsonl", "evals.jsonl", "notes.jsonl", "run.log"):
            with open(path / name, "ab") as file:
                file.write(b'{"step": 7, "torn')
    following.until(f"() => Boolean({STEP_6[view]})", "step 6", 5 * SEEN_S)
    following.fine()


def test_the_choice_of_a_run_shows_the_run_in_sight(following, training):
    training.step(0)
    following.open(f"/lora/two?run={quote(OTHER)}x")
    assert following.page.get_by_label("run", exact=True).input_value() == OWN
    following.page.get_by_label("run", exact=True).select_option(OTHER)
    assert following.query == {"run": OTHER}


def test_a_log_is_read_a_page_at_a_time(page, home):
    log = home / "runs/grpo+none_s1/run.log"
    log.write_text("".join(f"2026-01-01 00:00:09 info    line {number}.\n" for number in range(700)))
    page.open(f"/notes/{RUN}?q=line")
    assert page.text(".log").startswith("2026-01-01 00:00:09 info    line 200.")
    for button, has in (("Older lines", "line 0."), ("Newest lines", "line 699.")):
        page.press_button(button)
        assert has in page.text(".log")
    page.press_button("Older lines")
    with open(log, "a") as file:
        file.write("2026-01-01 00:00:09 info    line 700.\n")
    page.page.wait_for_timeout(1000 * SEEN_S)
    assert "line 199." in page.text(".log"), "older lines stay"
    page.page.locator("input[type=search]").fill("line 7")
    page.press("Tab")
    assert "before" not in page.query
    page.until("() => document.querySelector('.log').innerText.includes('line 700.')", "the newest lines")
    page.fine()


def test_pages_whose_server_came_back_show_what_happened_meanwhile(home, tmp_path, context):
    pages = {view: Watched(context.new_page(), "") for view in ("problems", "notes", "metrics")}
    with serving([home], tmp_path / "cache") as url:
        port = url.rpartition(":")[2]
        for view, page in pages.items():
            opened(page, f"{url}/{view}/one" + "?keys=mean_reward" * (view == "metrics"))
    run = home / "runs/grpo+none_s1"
    append_jsonl(run / "metrics.jsonl", [row(6)])
    append_jsonl(run / "evals.jsonl", [evaluation_row(7, 0.5)])
    append_jsonl(run / "notes.jsonl", [note(6, "meanwhile")])
    again = "performance.getEntriesByType('resource').filter((each) => each.name.includes('/api/problems')).length"
    expected = {"problems": f"{again} > 1", "notes": f"{TEXT}.includes('about meanwhile')", "metrics": AT_6}
    for page in pages.values():
        page.page.bring_to_front()
        page.until("() => document.querySelector('.live').textContent === 'connection lost'", "lost")
    with serving([home], tmp_path / "cache2", port):
        for view, page in pages.items():
            page.page.bring_to_front()
            page.until("() => document.querySelector('.live').textContent === 'live'", "live again", 15)
            page.until(f"() => Boolean({expected[view]})", "what happened meanwhile", 5 * SEEN_S)
            page.page.close()
