from contextlib import closing

import pytest
from helpers.pages import manifest
from helpers.records import context, evaluation, group, with_action

from retrain.records.recorder import RunRecorder
from tests.ui.conftest import serving

PROBLEMS = ("falls", "dips", "stays")
ENDS = 10
"""The step of the last evaluation."""


def solved(label, seed):
    """Return what a run solves before and after: the first problem falls in every seed, the second in one."""
    before = dict.fromkeys(PROBLEMS, 1.0)
    after = before | ({"falls": 0.0, "dips": float(seed > 1)} if label == "worse" else {})
    return {0: before, 6: before, ENDS: after}


def campaign(path, seeds):
    """Record two conditions that answer three problems three times."""
    runs = [(f"{label}_s{seed}", label, seed) for seed in range(1, seeds + 1) for label in ("grpo", "worse")]
    for run_id, label, seed in runs:
        facts = context(condition=label, run_id=run_id, seed=seed, max_steps=ENDS)
        with closing(RunRecorder(path / "runs" / run_id, facts, {})) as recorder:
            for step, rewards in solved(label, seed).items():
                groups = [with_action(group([reward], [3], problem_id=name), text=f"seed {seed} at {step}")
                          for name, reward in rewards.items()]  # fmt: skip
                recorder.record_eval(evaluation(groups, step))
    return manifest(path, runs, ENDS)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    home = tmp_path_factory.mktemp("problems")
    directories = [campaign(home / name, seeds) for name, seeds in (("eight", 8), ("one", 1))]
    with serving(directories, home / "cache") as url:
        yield url


def cells(page, problem):
    """Return what the row of a problem shows under each condition."""
    row = page.page.locator(f".matrixtable tr[data-key='{problem}'] td")
    return [" ".join(text.split()) for text in row.all_inner_texts()[1:]]


def test_problems_that_got_worse_are_told_by_the_test_over_seeds(page):
    page.open("/problems/eight?sort=worse")
    assert page.text(".judgement summary").startswith("Some problems got worse")
    assert "worse: 1 problem of 3 worse than under the baseline over 8 runs" in page.text(".judgement")
    calm, fell = cells(page, "falls")
    assert calm == "100% 68–100%, n 8 → 100% 68–100%, n 8"
    assert fell.startswith("100% 68–100%, n 8 → 0% 0–32%, n 8 ▼ worse than")
    calm, dipped = cells(page, "dips")  # one draw of eight is no verdict
    assert "▼" not in dipped
    assert dipped.startswith("100% 68–100%, n 8 → 88% 53–98%, n 8 p 0.")
    assert "▼" not in cells(page, "stays")[1]
    assert page.page.locator(".matrixtable tbody tr").first.get_attribute("data-key") == "falls"


def test_of_one_seed_nothing_is_told_and_three_problems_are_no_percentage(page):
    page.open("/problems/one?sort=worse")
    few = "Too few runs to tell whether a problem got worse · 3 problems: too few for a percentage over all"
    assert page.text(".judgement summary") == few
    page.page.locator(".judgement summary").click()
    assert "nothing can be shown" in page.text(".judgement ul")
    assert page.page.locator(".matrixtable th .all").count() == 0
    assert cells(page, "falls")[1] == "100% 21–100%, n 1 → 0% 0–79%, n 1"
    page.open(f"/problems/one?id={PROBLEMS[0]}")
    assert "[20.7%, 100.0%] n 1" in page.text(".beside .readout")


def test_a_click_on_a_step_of_the_chart_opens_its_answers(page):
    page.open("/problems/eight?id=falls")
    area = page.page.locator(".beside .plot .u-over")
    box = area.bounding_box()
    for share, height, step, run in ((0.62, 0.05, "6", "grpo_s1"), (0.98, 0.95, "10", "worse_s1")):
        page.click(area, position={"x": share * box["width"], "y": height * box["height"]})
        assert page.path.startswith(f"/rollouts/eight/runs/{run}?")
        assert page.query == {"split": "eval/heldout", "problem": "falls", "iteration": step}
        assert page.page.locator(".samples tbody tr").count() == 1
        assert f"seed 1 at {step}" in page.text(".samples")
        page.page.go_back()
        page.settle()
        area = page.page.locator(".beside .plot .u-over")


def test_a_problem_opens_at_two_steps_and_under_two_conditions(page):
    for link, steps in (("grpo and worse", (10, 10)), ("worse: step 0 and 10", (0, 10))):
        page.open("/problems/eight?id=falls")
        page.click(page.page.get_by_role("link", name=link, exact=True))
        sides = [page.text(f"section.side.{side}") for side in "ab"]
        for text, step, end in zip(sides, steps, ("✓ yes", "✗ no"), strict=True):
            assert f"step {step}" in text
            assert end in text
            assert f"seed 1 at {step}" in text
