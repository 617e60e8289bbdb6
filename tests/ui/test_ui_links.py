import time

import pytest

from tests.ui.addresses import FIRST, HOME, TRAINED, A, B
from tests.ui.watch import Watched, differences, links, shape

PAGES = (
    "campaigns", "campaign", "watch", "problem", "prompt", "rollout", "tokens, entropy", "timeline", "lora", "compare",
    "notes",
)  # fmt: skip
FREE = """[...document.querySelectorAll("main button[aria-pressed]")].filter((each) =>
  each.checkVisibility() && !each.disabled)"""
BUTTONS = f"""() => {FREE}
  .map((each) => [each.getAttribute("aria-label") || each.textContent, each.getAttribute("aria-pressed")])"""
PRESS = f"(at) => {FREE}[at].click()"
SELECTS = """() => [...document.querySelectorAll("main select")].map((each) =>
  [each.getAttribute("aria-label"), [...each.options].map((one) => one.value)])"""


@pytest.fixture
def other(context, server):
    watched = Watched(context.new_page(), server)
    yield watched
    watched.page.close()


def agree(shown, wanted, what):
    """What two calls tell becomes the same, within the time that a busy machine takes to draw it."""
    deadline = time.monotonic() + 10
    while apart := differences(wanted(), shown()):
        assert time.monotonic() < deadline, f"{what}\n{apart}"
        time.sleep(0.2)  # the calls let the browser go on


def same_anew(page, other, what):
    """The page as it stands, and its address opened anew, show the same; what that is."""
    other.open(page.path)

    def seen():
        page.settle(0.1)
        return page.seen()

    def anew():
        other.settle(0.1)
        return other.seen()

    agree(anew, seen, f"{what} → {page.path}")
    return seen()


@pytest.mark.parametrize("name", PAGES)
def test_links_are_restored_from_their_address_back_and_forth(page, other, name):
    page.open(TRAINED[name])
    start, before = page.path, same_anew(page, other, name)
    # The navigation is the same everywhere: it is followed from a campaign and from a run.
    kinds = {shape(href): href for href in links(page.page, "body" if name in ("campaign", "timeline") else "main")}
    for kind, href in kinds.items():
        page.page.bring_to_front()
        page.page.evaluate(
            "(href) => [...document.querySelectorAll('a[href]')].find((each) => each.getAttribute('href') === href)"
            ".click()",
            href,
        )
        page.settle()
        assert page.path.partition("?")[0].split("/")[1] == kind[0]
        after = same_anew(page, other, href)
        if page.path == start:
            continue
        page.page.go_back()
        page.settle()
        assert page.path == start
        agree(page.seen, lambda: before, f"back from {href}")
        page.page.go_forward()
        page.settle()
        agree(page.seen, lambda after=after: after, f"forward to {href}")
        page.open(start)
    page.fine()
    other.fine()


@pytest.mark.parametrize("name", PAGES)
def test_what_is_chosen_stands_in_the_address(page, other, name):
    page.open(TRAINED[name])
    start = page.path
    for label, values in page.page.evaluate(SELECTS):
        select = page.page.locator(f'main select[aria-label="{label}"]').first
        other_value = next((value for value in reversed(values) if value != select.input_value()), values[0])
        select.select_option(other_value)
        page.settle()
        assert page.path != start or len(values) < 2, f"{label} of {start} is not in the address"
        same_anew(page, other, label)
        page.open(start)
    for at, (label, pressed) in enumerate(page.page.evaluate(BUTTONS)[:14]):
        page.page.evaluate(PRESS, at)
        page.settle()
        if pressed == "false":
            same_anew(page, other, label)
        page.open(start)
    ticks = page.page.locator("main input[type=checkbox]")
    for at in range(ticks.count()):
        page.click(ticks.nth(at))
        assert page.path != start
        same_anew(page, other, f"tick {at}")
        page.open(start)
    page.fine()
    other.fine()


WALK = "(to) => { history.pushState(null, '', to); dispatchEvent(new PopStateEvent('popstate')); }"
LATE = {
    "tokens": (f"/tokens{FIRST}?iteration=10&index=0", f"/tokens{FIRST}?iteration=10&index=1", "rollout", "h1 + p"),
    "compare": (f"/compare{HOME}?a={A}&b={A}", f"/compare{HOME}?a={A}&b={B}", "compare", "#main"),
    "distribution": (f"/metrics{HOME}?hist=reward&step=2", f"/metrics{HOME}?hist=reward&step=5", "histogram",
                     ".histplace h3"),
    "log": (f"/notes{HOME}", f"/notes{HOME}?q=nothing+like+this", "log", ".log"),
    "curves": (f"/campaign{HOME}?key=mean_reward", f"/campaign{HOME}?key=entropy", "curves", ".chartcard .heading"),
    "timeline": (f"/timeline{FIRST}?from=0&to=5", f"/timeline{FIRST}?from=5&to=9", "timeline", "#main .tools"),
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
