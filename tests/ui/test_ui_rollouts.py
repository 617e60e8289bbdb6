from contextlib import closing

import numpy as np
import pytest
from helpers.records import config, group, step, updated, with_action
from helpers.records import context as run_context

from retrain.records.recorder import RunRecorder
from tests.ui.conftest import serving
from tests.ui.watch import Watched

RUN = "/run"
ADDRESS = f"/rollouts{RUN}"
WORDS = ("a ", "first ", "guess ", "the ", "needle ", "is ", "not ", "here ")
ANSWERS = ((0, 1, 2, 5, 6), (3, 4, 7), (0, 1, 6, 7))  # Places in WORDS
REWARDS = (0.0, 1.0, 0.5)


def pieces(ids):
    """Return the text of these tokens, and where each of them lies in it."""
    words = [WORDS[each] for each in ids]
    ends = np.cumsum([len(word) for word in words]).tolist()
    return "".join(words), list(zip([0, *ends[:-1]], ends, strict=True))


def group_of(problem):
    """Return three answers of other lengths, rewards and advantages, with what is known of their tokens."""
    lengths = [len(answer) for answer in ANSWERS]
    made = group(list(REWARDS), lengths, problem_id=problem)
    for sample, answer in enumerate(ANSWERS):
        entropy = np.linspace(0.1, 1.9, len(answer)).astype(np.float32)
        made = with_action(made, sample, token_ids=list(answer), entropy_T=entropy)
    tokens = [{"token_advantages_T": np.linspace(-1, 1, n).astype(np.float32),
               "old_logprobs_T": np.linspace(-1.4, -0.8, n).astype(np.float32)} for n in lengths]  # fmt: skip
    return updated(made, *tokens)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The address of a server over a run of two steps."""
    home = tmp_path_factory.mktemp("rollouts")
    settings = run_context(config=config(logging={"rollouts_every": 1}))
    with closing(RunRecorder(home / "run", settings, {}, token_text=pieces)) as recorder:
        for at in range(2):
            recorder.record_step(step([group_of("haystack"), group_of("meadow")], at))
    with serving([home / "run"], home / "cache") as url:
        yield url


@pytest.fixture
def read(run, context):
    watched = Watched(context.new_page(), run)
    yield watched
    watched.fine().page.close()


def shown(page):
    """Return the rollouts of the table in their order."""
    return [
        int(row)
        for row in page.page.eval_on_selector_all(".samples tbody tr", "all => all.map((row) => row.dataset.key)")
    ]


def test_rollouts_are_sorted_by_advantage_length_and_reward(read):
    read.open(ADDRESS)
    assert shown(read) == [0, 1, 2, 3, 4, 5]
    for column, down, up in (("advantage", [1, 4, 2, 5, 0, 3], [0, 3, 2, 5, 1, 4]),
                             ("tokens", [0, 3, 2, 5, 1, 4], [1, 4, 2, 5, 0, 3]),
                             ("reward", [1, 4, 2, 5, 0, 3], [0, 3, 2, 5, 1, 4])):  # fmt: skip
        for order, arrow in ((down, "↓"), (up, "↑")):
            read.page.locator(".samples thead button", has_text=column).click()
            read.settle()
            assert shown(read) == order, (column, arrow)
            assert read.text(".samples th[aria-sort]") == f"{column} {arrow}"


def test_words_are_found_in_answers_and_in_prompts(read):
    read.open(ADDRESS)
    field = read.page.get_by_label("search prompts and answers")
    field.fill("NEEDLE")
    read.until("() => document.querySelectorAll('.samples tbody tr').length === 2", "the rollouts found")
    assert shown(read) == [1, 4]
    assert read.page.locator(".samples mark").all_inner_texts() == ["needle", "needle"]
    field.fill("is meadow")
    read.until("() => document.querySelector('.samples tbody tr').dataset.key === '3'", "those of the other prompt")
    assert shown(read) == [3, 4, 5]
    assert "prompt: What is meadow?" in read.text(".samples tbody tr td:last-child")
    assert read.query == {"text": "is meadow"}
    read.page.locator(".samples tbody tr").nth(1).click()
    read.settle()
    assert read.page.locator(".beside mark").all_inner_texts() == ["is meadow"]
    field.fill("no such words")
    read.until("() => document.querySelector('.list .state')", "that nothing is found")
    assert "No rollout passes these filters" in read.text(".list")


def colours(page):
    page.settle()
    return page.page.eval_on_selector_all(".t[data-at]", "all => all.map((each) => each.className)")


def test_tokens_are_coloured_by_advantage_log_ratio_and_entropy(read):
    read.open(f"/tokens{RUN}?iteration=1&index=1")
    for button, wanted in (("advantage", ["t m6", "t", "t p6"]), ("log-ratio", ["t m6", "t m3", "t p6"]),
                           ("entropy", ["t s1", "t s3", "t s6"]), ("plain", ["t", "t", "t"])):  # fmt: skip
        read.page.get_by_role("button", name=button, exact=True).click()
        assert colours(read) == wanted, button
    read.page.get_by_role("button", name="log-ratio", exact=True).click()
    read.settle()
    read.page.locator(".t[data-at='2']").hover()
    facts = dict(zip(*(read.page.locator(f".tokenfacts {tag}").all_inner_texts() for tag in ("dt", "dd")), strict=True))
    assert (facts["token"], facts["advantage"], facts["log-ratio"]) == ("2 of 3", "+1", "+0.2 nats")
    assert read.query["colour"] == "mismatch"


def test_the_step_that_a_sample_is_chosen_from_stays(read):
    read.open(ADDRESS)
    asked = len([url for url in read.requests if "/api/rollouts" in url])
    read.press("j")
    assert read.query == {"iteration": "1", "index": "0"}
    assert len([url for url in read.requests if "/api/rollouts" in url]) == asked, "the list is not asked for again"
    assert read.text(".beside h2").startswith("haystack")
    read.press("l", "h")
    assert read.query["iteration"] == "0"
    assert read.text("h1 + p").startswith("train · step 0")


def test_a_click_on_a_step_of_a_metric_opens_its_rollouts(read):
    read.open(f"/metrics{RUN}?keys=mean_reward")
    area = read.page.locator(".chartcard .plot .u-over").first
    box = area.bounding_box()
    area.click(position={"x": 3, "y": box["height"] / 2})
    read.settle()
    assert read.path == f"{ADDRESS}?iteration=0"
    assert shown(read) == [0, 1, 2, 3, 4, 5]
