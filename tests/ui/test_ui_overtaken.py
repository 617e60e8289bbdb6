"""Answers that come late, and views that are left: only what was asked last is shown, only the view in sight acts."""

from __future__ import annotations

import pytest

from tests.ui.addresses import FIRST, HOME, A, B

WALK = "(to) => { history.pushState(null, '', to); dispatchEvent(new PopStateEvent('popstate')); }"
LATE = {
    "tokens": (f"/tokens{FIRST}?iteration=10&index=0", f"/tokens{FIRST}?iteration=10&index=1", "rollout", "h1 + p"),
    "compare": (f"/compare{HOME}?a={A}&b={A}", f"/compare{HOME}?a={A}&b={B}", "compare", "#main"),
    "distribution": (f"/metrics{HOME}?hist=reward&step=2", f"/metrics{HOME}?hist=reward&step=5", "histogram",
                     ".histplace h3"),
    "notes": (f"/notes{HOME}", f"/notes{HOME}?q=nothing+like+this", "notes", ".notes"),
    "log": (f"/notes{HOME}", f"/notes{HOME}?q=nothing+like+this", "log", ".log"),
    "curves": (f"/campaign{HOME}?key=mean_reward", f"/campaign{HOME}?key=entropy", "curves", ".chartcard .heading"),
    "lora": (f"/lora{HOME}?run={A}", f"/lora{HOME}?run={B}", "lora", "#main .tools"),
    "timeline": (f"/timeline{FIRST}?from=0&to=5", f"/timeline{FIRST}?from=5&to=9", "timeline", "#main .tools"),
    "problem": (f"/problems{HOME}?sort=problem", f"/problems{HOME}?sort=worse", "problems", ".matrixtable"),
    "prompt": (f"/prompt{HOME}?a={A}&b={A}&step_a=0", f"/prompt{HOME}?a={A}&b={A}&step_a=10", "prompt", ".parting"),
}  # fmt: skip


@pytest.mark.parametrize("name", LATE)
def test_an_answer_that_comes_late_is_not_drawn(page, name):
    start, other, endpoint, selector = LATE[name]
    page.open(start)
    seen, held, holding = page.text(selector), [], [True]
    page.page.route(f"**/api/{endpoint}?**", lambda route: held.append(route) if holding[0] else route.continue_())
    page.page.evaluate(WALK, other)
    page.page.wait_for_timeout(400)
    assert held, "the other view asks"
    holding[0] = False
    page.page.evaluate(WALK, start)
    page.page.wait_for_timeout(400)
    for route in held:
        route.continue_()
    page.settle(0.5)
    assert page.text(selector) == seen


@pytest.mark.parametrize(
    ("address", "label"),
    [(f"/notes{HOME}", "search notes and log"), (f"/problems{HOME}", "search in problems"),
     (f"/metrics{HOME}", "search metrics by regular expression"), (f"/rollouts{FIRST}", "search in the texts")],
)  # fmt: skip
def test_what_a_view_had_still_to_do_does_not_change_the_address_of_the_next(page, address, label):
    page.open(address)
    page.page.get_by_label(label, exact=True).fill("typed")
    page.page.evaluate(WALK, f"/timeline{FIRST}")  # within the pause that a search waits for more letters
    page.page.wait_for_timeout(700)
    page.settle()
    assert page.path == f"/timeline{FIRST}"
