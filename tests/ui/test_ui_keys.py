"""Every key that the overlay names does what it says there."""

from __future__ import annotations

from tests.ui.addresses import FIRST, HOME, HOSTILE, SECOND, TRAINED

FRAME = {"t", "/", "y", "?", *"1234567890"}
LISTED = """() => [...document.querySelectorAll("#help table")].filter((each) =>
  !each.caption.textContent.startsWith("In a chart")).map((each) =>
  [...each.querySelectorAll("tr")].map((row) => [row.cells[0].textContent, row.cells[1].textContent]))"""
FOCUS = """() => { const own = document.activeElement;
  return own.getAttribute("href") || own.dataset.key || own.textContent.slice(0, 60); }"""


def listed(page):
    """The keys of this page alone, from the overlay, which is opened and closed by its key."""
    page.press("?")
    *own, frame = page.page.evaluate(LISTED)
    assert {key for key, _ in frame} <= FRAME
    page.press("?")
    assert page.page.locator("#help").count() == 0
    return {key for rows in own for key, _ in rows}


def changes(page, key, *names):
    """The key changes exactly this of the query (or, without names, something); what it was and what it is."""
    before = page.query
    page.press(key)
    after = page.query
    apart = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    assert apart, f"{key} changes nothing at {page.path}"
    if names:
        assert apart <= set(names), f"{key} changes {apart} at {page.path}"
    return before, after


def moves_focus(page, on, back, selector):
    """j goes on and k goes back along these elements, with the focus."""
    page.press(on)
    first = page.page.evaluate(FOCUS)
    assert page.page.evaluate(f"() => Boolean(document.activeElement.closest({selector!r}))")
    page.press(on)
    assert page.page.evaluate(FOCUS) != first
    page.press(back)
    assert page.page.evaluate(FOCUS) == first


def test_keys_of_the_frame(page, server):
    page.open(f"/metrics{HOME}")
    page.press("?")
    *_, frame = page.page.evaluate(LISTED)
    assert {key for key, _ in frame} == FRAME
    page.press("j")  # the overlay is open: no key reaches the page
    assert page.page.evaluate("() => Boolean(document.activeElement.closest('#help'))")
    page.press("Escape")
    assert page.page.locator("#help").count() == 0
    theme = "() => document.documentElement.dataset.theme"
    page.press("t")
    assert page.page.evaluate(theme) == "dark"
    page.press("t")
    assert page.page.evaluate(theme) == "light"
    page.press("/")
    assert page.page.evaluate("() => document.activeElement.type") == "search"
    page.page.keyboard.type("entropy")
    page.settle()
    assert page.query["q"] == "entropy"
    page.press("t", "Escape", "y")  # t is typed, not pressed
    assert page.query["q"] == "entropyt"
    assert page.page.evaluate("() => navigator.clipboard.readText()") == page.page.url
    assert page.text("#toast") == "Link copied"
    views = {words: key for key, words in frame if key.isdigit()}
    for title, key in views.items():
        page.press(key)
        assert page.text("nav[aria-label=views] a[aria-current]") == title
        assert page.page.title().startswith("Notes and logs" if title == "Notes" else title)
    page.page.keyboard.press("Control+1")
    assert page.text("nav[aria-label=views] a[aria-current]") == title


def test_campaigns(page):
    page.open("/")
    assert listed(page) == {"j", "k", "Enter"}
    moves_focus(page, "j", "k", "a.open")
    wanted = page.page.evaluate(FOCUS)
    page.press("Enter")
    assert page.path == wanted
    page.open("/?q=quickstart").press("Enter")
    assert page.path == f"/campaign{HOME}"


def test_campaign(page):
    page.open(f"/campaign{HOME}")
    assert listed(page) == {"j", "k", "h", "l", "Escape"}
    moves_focus(page, "j", "k", "#runs a.open")
    _, after = changes(page, "l", "key")
    changes(page, "l", "key")
    assert changes(page, "h", "key")[1] == after
    page.open(f"/campaign{HOME}?key=mean_reward&zoom=2,5")
    assert "zoom" not in changes(page, "Escape", "zoom")[1]


def test_metrics(page):
    page.open(f"/metrics{HOME}?tab=all")
    assert listed(page) == {"j", "k", "g", "c", "h", "l", "Escape"}
    moves_focus(page, "j", "k", ".chartcard")
    page.press("g")
    head = page.page.evaluate("() => document.activeElement.className")
    assert head == "section"
    first = page.page.evaluate(FOCUS)
    page.press("g")
    assert page.page.evaluate(FOCUS) != first
    assert changes(page, "c", "lines")[1]["lines"] == "conditions"
    assert "lines" not in changes(page, "c", "lines")[1]
    page.open(f"/metrics{HOME}?zoom=2,5")
    assert "zoom" not in changes(page, "Escape", "zoom")[1]
    page.open(f"/metrics{HOME}?hist=reward")
    shown = page.text("section.card.wide h3")
    _, after = changes(page, "h", "step")
    assert page.text("section.card.wide h3") != shown
    changes(page, "h", "step")
    assert changes(page, "l", "step")[1] == after


def test_problems(page):
    page.open(f"/problems{HOME}")
    assert listed(page) == {"j", "k", "d", "s", "Escape"}
    _, first = changes(page, "j", "id")
    assert page.page.locator("tr.on").get_attribute("data-id") == first["id"]
    changes(page, "j", "id")
    assert changes(page, "k", "id")[1] == first
    changes(page, "Escape", "id")
    assert changes(page, "s", "sort")[1]["sort"] == "worse"
    page.press("j", "d")
    assert page.path.startswith("/prompt/")
    assert page.page.locator(".state.wrong").count() == 0


def test_same_prompt(page):
    page.open(f"/prompt{HOME}")
    assert listed(page) == {"j", "k", "g", "G", "h", "l", "H", "L", "c", "C", "d"}
    _, first = changes(page, "g", "problem")
    changes(page, "g", "problem")
    assert changes(page, "G", "problem")[1] == first
    changes(page, "j", "problem", "sample")
    assert changes(page, "k", "problem", "sample")[1] == first
    assert changes(page, "d", "colour")[1]["colour"] == "plain"
    assert "colour" not in changes(page, "d", "colour")[1]
    colours = [changes(page, "c", "colour")[1].get("colour") for _ in range(3)]
    assert colours[0] == "plain"
    assert len(set(colours)) == 3
    assert changes(page, "C", "colour")[1]["colour"] == colours[1]
    assert page.page.locator("[aria-label='what is marked'] [aria-pressed=true]").count() == 1
    _, back = changes(page, "h", "step_a", "step_b")
    _, more = changes(page, "H", "step_a", "step_b")
    assert (more["step_a"], int(more["step_b"]) < int(back["step_b"])) == (back["step_a"], True)
    assert changes(page, "L", "step_a", "step_b")[1] == back
    _, on = changes(page, "l", "step_a", "step_b")
    assert int(on["step_a"]) > int(back["step_a"])
    assert int(on["step_b"]) > int(back["step_b"])


def test_rollouts(page):
    page.open(f"/rollouts{FIRST}?iteration=5")
    assert listed(page) == {"j", "k", "h", "l", "g", "G", "Enter", "Escape"}
    _, first = changes(page, "j", "index")
    changes(page, "j", "index")
    assert page.page.locator("tr.on").get_attribute("data-index") == page.query["index"]
    assert changes(page, "k", "index")[1] == first
    _, second = changes(page, "g", "index")
    heading = page.text("aside.beside h2")
    changes(page, "g", "index")
    assert page.text("aside.beside h2") != heading
    assert changes(page, "G", "index")[1] == second
    assert changes(page, "h", "iteration")[1]["iteration"] == "4"
    assert changes(page, "l", "iteration")[1]["iteration"] == "5"
    changes(page, "Escape", "index")
    assert page.text("aside.beside") == ""
    page.press("j", "Enter")
    assert page.path.startswith("/tokens/")


def test_tokens(page):
    page.open(f"/tokens{SECOND}?iteration=10&index=8")
    assert listed(page) == {"j", "k", "h", "l", "g", "G", "c", "C"}
    assert changes(page, "j", "index")[1]["index"] == "9"
    assert changes(page, "k", "index")[1]["index"] == "8"
    assert changes(page, "g", "index")[1]["index"] == "16"
    changes(page, "G", "index")
    assert 8 <= int(page.query["index"]) < 16
    _, first = changes(page, "c", "colour")
    changes(page, "c", "colour")
    assert changes(page, "C", "colour")[1] == first
    _, after = changes(page, "h", "iteration")
    assert int(after["iteration"]) < 10
    assert changes(page, "l", "iteration")[1]["iteration"] == "10"


def test_tokens_with_arrows(page):
    page.open(f"/tokens{FIRST}?iteration=10&index=1")
    page.page.locator(".conversation").focus()
    for key, at in (
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("End", None),
        ("Home", 0),
        ("ArrowDown", 10),
    ):
        page.press(key)
        page.page.wait_for_timeout(300)
        assert at is None or page.query["pos"] == str(at)
        assert page.page.locator(".t[data-on]").count() == 1
        assert page.text(".conversation + p[role=status]").startswith(f"token {page.query['pos']} of ")


def test_timeline(page):
    page.open(f"/timeline{FIRST}?step=5")
    assert listed(page) == {"h", "l"}
    assert changes(page, "h", "step")[1]["step"] == "4"
    assert changes(page, "l", "step")[1]["step"] == "5"
    assert "Step 5" in page.text()


def test_lora_and_compare_have_none(page):
    for view in ("lora", "compare"):
        page.open(TRAINED[view])
        assert listed(page) == set()


def test_notes(page):
    page.open(f"/notes{HOSTILE}")
    assert listed(page) == {"j", "k"}
    moves_focus(page, "j", "k", "li.note")
