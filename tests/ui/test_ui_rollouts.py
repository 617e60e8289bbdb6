from contextlib import closing

import numpy as np
import pytest
from helpers.records import config, group, step, updated, with_action
from helpers.records import context as run_context

from retrain.records.recorder import RunRecorder
from tests.ui.conftest import serving

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
def url(tmp_path_factory):
    home = tmp_path_factory.mktemp("rollouts")
    settings = run_context(config=config(logging={"rollouts_every": 1}))
    with closing(RunRecorder(home / "run", settings, {}, token_text=pieces)) as recorder:
        for at in range(2):
            recorder.record_step(step([group_of("haystack"), group_of("meadow")], at))
    with serving([home / "run"], home / "cache") as url:
        yield url


KEYS = ".samples tbody tr", "(all) => all.map((row) => row.dataset.key)"


def shown(page):
    return [int(row) for row in page.page.eval_on_selector_all(*KEYS)]


def test_rollouts_are_sorted_by_advantage_length_and_reward(page):
    page.open(ADDRESS)
    assert shown(page) == [0, 1, 2, 3, 4, 5]
    for column, down, up in (("advantage", [1, 4, 2, 5, 0, 3], [0, 3, 2, 5, 1, 4]),
                             ("tokens", [0, 3, 2, 5, 1, 4], [1, 4, 2, 5, 0, 3]),
                             ("reward", [1, 4, 2, 5, 0, 3], [0, 3, 2, 5, 1, 4])):  # fmt: skip
        for order, arrow in ((down, "↓"), (up, "↑")):
            page.click(page.page.locator(".samples thead button", has_text=column))
            assert shown(page) == order, (column, arrow)
            assert page.text(".samples th[aria-sort]") == f"{column} {arrow}"


def test_words_are_found_in_answers_and_in_prompts(page):
    page.open(ADDRESS)
    field = page.page.get_by_label("search prompts and answers")
    field.fill("NEEDLE")
    page.until("() => document.querySelectorAll('.samples tbody tr').length === 2", "the rollouts found")
    assert shown(page) == [1, 4]
    assert page.page.locator(".samples mark").all_inner_texts() == ["needle", "needle"]
    field.fill("is meadow")
    page.until("() => document.querySelector('.samples tbody tr').dataset.key === '3'", "those of the other prompt")
    assert shown(page) == [3, 4, 5]
    assert "prompt: What is meadow?" in page.text(".samples tbody tr td:last-child")
    assert page.query == {"text": "is meadow"}
    page.click(page.page.locator(".samples tbody tr").nth(1))
    assert page.page.locator(".beside mark").all_inner_texts() == ["is meadow"]
    field.fill("no such words")
    page.until("() => document.querySelector('.list .state')", "that nothing is found")
    assert "No rollout passes these filters" in page.text(".list")


def found(page):
    """Return the rollouts of all steps in their order: (step, index)."""
    return [tuple(map(int, key.split()[2:])) for key in page.page.eval_on_selector_all(*KEYS)]


def test_words_are_found_in_all_steps(page):
    page.open(f"{ADDRESS}?text=needle")
    page.page.get_by_label("all steps", exact=True).check()
    page.settle()
    assert page.query == {"text": "needle", "steps": "all"}
    assert found(page) == [(1, 1), (1, 4), (0, 1), (0, 4)]
    assert page.page.locator(".samples mark").all_inner_texts() == ["needle"] * 4
    assert "4 rollouts found, 2 of 2 steps searched" in page.text()
    page.page.get_by_label("search prompts and answers").fill("first")
    page.until("() => document.querySelectorAll('.samples tbody tr').length === 8", "the rollouts found")
    for order, lengths in (("↓", (0, 2)), ("↑", (2, 0))):
        page.click(page.page.locator(".samples thead button", has_text="tokens"))
        assert page.text(".samples th[aria-sort]") == f"tokens {order}"
        assert [index % 3 for _, index in found(page)] == [*[lengths[0]] * 4, *[lengths[1]] * 4]
    page.click(page.page.locator(".samples tbody tr", has_text="step 0").first)
    assert page.path == f"{ADDRESS}?iteration=0&index=2&text=first"
    assert page.page.locator(".beside mark").all_inner_texts() == ["first"]
    page.page.go_back()
    page.settle()
    assert len(found(page)) == 8


def test_a_search_of_all_steps_goes_on_from_a_step(page):
    page.open(f"{ADDRESS}?text=needle&steps=all&first=1")
    assert found(page) == [(0, 1), (0, 4)]
    page.press_button("From the newest step")
    assert len(found(page)) == 4


def test_tokens_are_coloured_by_advantage_log_ratio_and_entropy(page):
    page.open(f"/tokens{RUN}?iteration=1&index=1")
    for button, wanted in (("advantage", ["t m6", "t", "t p6"]), ("log-ratio", ["t m6", "t m3", "t p6"]),
                           ("entropy", ["t s1", "t s3", "t s6"]), ("plain", ["t", "t", "t"])):  # fmt: skip
        page.press_button(button, exact=True)
        colours = page.page.eval_on_selector_all(".t[data-at]", "all => all.map((each) => each.className)")
        assert colours == wanted, button
    page.press_button("log-ratio", exact=True)
    page.page.locator(".t[data-at='2']").hover()
    facts = dict(zip(*(page.page.locator(f".tokenfacts {tag}").all_inner_texts() for tag in ("dt", "dd")), strict=True))
    assert (facts["token"], facts["advantage"], facts["log-ratio"]) == ("2 of 3", "+1", "+0.2 nats")
    assert page.query["colour"] == "mismatch"


def test_the_step_that_a_sample_is_chosen_from_stays(page):
    page.open(ADDRESS)
    page.press("j")
    assert page.query == {"iteration": "1", "index": "0"}
    assert page.text(".beside h2").startswith("haystack")
    page.press("l", "h")
    assert page.query["iteration"] == "0"
    assert page.text("h1 + p").startswith("train · step 0")


def test_a_page_behind_the_last_row_leads_back(page):
    page.open(f"{ADDRESS}?iteration=1&first=200")
    page.press_button("← previous")
    assert page.query == {"iteration": "1", "first": "100"}
    page.press_button("← previous")
    assert page.query == {"iteration": "1"}
    assert len(shown(page)) == 6


def test_a_click_on_a_step_of_a_metric_opens_its_rollouts(page):
    page.open(f"/metrics{RUN}?keys=mean_reward")
    area = page.page.locator(".chartcard .plot .u-over").first
    box = area.bounding_box()
    page.click(area, position={"x": 3, "y": box["height"] / 2})
    assert page.path == f"{ADDRESS}?iteration=0"
    assert shown(page) == [0, 1, 2, 3, 4, 5]
