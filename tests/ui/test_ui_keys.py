import pytest

from tests.ui.addresses import FIRST, HOME, HOSTILE, SECOND, TRAINED

FRAME = {"t", "/", "y", "?", *"1234567890"}
LISTED = """() => [...document.querySelectorAll("#help table")].filter((each) =>
  !each.caption.textContent.startsWith("In a chart")).map((each) =>
  [...each.querySelectorAll("tr")].map((row) => [row.cells[0].textContent, row.cells[1].textContent]))"""
FOCUS = """() => { const own = document.activeElement;
  return own.getAttribute("href") || own.dataset.key || own.textContent.slice(0, 60); }"""

# Of each view: its keys, what j and k go along with the focus, and keys that lead back to where they began, or to
# where the first of three led, with what they change of the query.
WALKS = {
    "/": ("j k Enter", "a.open", {}),
    f"/campaign{HOME}": ("j k h l Escape", "#runs tr", {"llh": "key"}),
    f"/metrics{HOME}?tab=all": ("j k g c Escape", ".chartcard", {"cc": "lines"}),
    f"/metrics{HOME}?hist=reward": ("j k g c h l Escape", None, {"hhl": "step"}),
    f"/problems{HOME}": ("j k d s Escape", None, {"jjk": "id"}),
    f"/prompt{HOME}": ("j k g G h l H L", None, {"ggG": "problem", "jjk": "problem sample"}),
    f"/rollouts{FIRST}?iteration=5":
        ("j k h l g G Enter Escape", None, {"jjk": "index", "ggG": "index", "hl": "iteration"}),
    f"/tokens{SECOND}?iteration=10&index=8":
        ("j k h l g G c C", None, {"jk": "index", "ccC": "colour", "hl": "iteration"}),
    f"/timeline{FIRST}?step=5": ("h l", None, {"hl": "step"}),
    f"/notes{HOSTILE}": ("j k", "li.note", {}),
    TRAINED["lora"]: ("", None, {}),
    TRAINED["compare"]: ("", None, {}),
}  # fmt: skip


def changes(page, key, names):
    """Press a key, which changes the query in at most these names; return the query after it."""
    before = page.query
    page.press(key)
    after = page.query
    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    assert changed, f"{key} changes nothing at {page.path}"
    assert changed <= set(names.split()), f"{key} changes {changed} at {page.path}"
    return after


@pytest.mark.parametrize("address", WALKS)
def test_keys_of_a_view_go_on_and_back(page, address):
    keys, selector, walks = WALKS[address]
    page.open(address)
    page.press("?")
    *own, frame = page.page.evaluate(LISTED)
    assert {key for key, _ in frame} <= FRAME
    assert {key for rows in own for key, _ in rows} == set(keys.split())
    page.press("?")
    assert page.page.locator("#help").count() == 0
    if selector:
        page.press("j")
        first = page.page.evaluate(FOCUS)
        assert page.page.evaluate(f"() => Boolean(document.activeElement.closest({selector!r}))")
        page.press("j")
        assert page.page.evaluate(FOCUS) != first
        page.press("k")
        assert page.page.evaluate(FOCUS) == first
    for walk, names in walks.items():
        queries = [page.query, *(changes(page, key, names) for key in walk)]
        assert queries[-1] == queries[-3], walk


def test_keys_of_the_frame(page):
    page.open(f"/metrics{HOME}")
    page.press("?")
    *_, frame = page.page.evaluate(LISTED)
    assert {key for key, _ in frame} == FRAME
    page.press("j")  # the overlay is open: no key reaches the page
    assert page.page.evaluate("() => Boolean(document.activeElement.closest('#help'))")
    page.press("Escape")
    assert page.page.locator("#help").count() == 0
    for theme in ("dark", "light"):
        page.press("t")
        assert page.page.evaluate("() => document.documentElement.dataset.theme") == theme
    page.press("/")
    assert page.page.evaluate("() => document.activeElement.type") == "search"
    page.page.keyboard.type("entropy")
    page.settle()
    assert page.query["q"] == "entropy"
    page.press("t", "Escape", "y")  # t is typed, not pressed
    assert page.query["q"] == "entropyt"
    assert page.page.evaluate("() => navigator.clipboard.readText()") == page.page.url
    views = {text: key for key, text in frame if key.isdigit()}
    for title, key in views.items():
        page.press(key)
        assert page.text("nav[aria-label=views] a[aria-current]") == title
    page.page.keyboard.press("Control+1")
    assert page.text("nav[aria-label=views] a[aria-current]") == title


def test_enter_opens_what_has_the_focus(page):
    page.open("/").press("j")
    target = page.page.evaluate(FOCUS)
    page.press("Enter")
    assert page.path == target
    page.open("/?q=quickstart").press("Enter")
    assert page.path == f"/campaign{HOME}"
    page.open(f"/rollouts{FIRST}?iteration=5").press("j", "Enter")
    assert page.path.startswith("/tokens/")
    page.open(f"/problems{HOME}").press("j", "d")
    assert page.path.startswith("/prompt/")
    assert page.page.locator(".state.wrong").count() == 0


def test_both_sides_of_a_prompt_go_together_or_one_alone(page):
    page.open(f"/prompt{HOME}").press("g")
    back = changes(page, "h", "step_a step_b")
    more = changes(page, "H", "step_a step_b")
    assert (more["step_a"], int(more["step_b"]) < int(back["step_b"])) == (back["step_a"], True)
    assert changes(page, "L", "step_a step_b") == back
    on = changes(page, "l", "step_a step_b")
    assert int(on["step_a"]) > int(back["step_a"])
    assert int(on["step_b"]) > int(back["step_b"])


def test_tokens_by_group_and_with_arrows(page):
    page.open(f"/tokens{SECOND}?iteration=10&index=8")
    assert changes(page, "g", "index")["index"] == "16"
    assert 8 <= int(changes(page, "G", "index")["index"]) < 16
    page.open(f"/tokens{FIRST}?iteration=10&index=1")
    page.page.locator(".conversation").focus()
    moves = (("ArrowRight", "1"), ("ArrowLeft", "0"), ("End", None), ("Home", "0"), ("ArrowDown", "10"))
    for key, position in moves:
        page.press(key)
        page.page.wait_for_timeout(300)
        assert position is None or page.query["pos"] == position
        assert page.page.locator(".t[data-on]").count() == 1
        assert page.text(".conversation + p[role=status]").startswith(f"token {page.query['pos']} of ")
