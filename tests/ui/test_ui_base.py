import pytest

from tests.ui.addresses import HOME
from tests.ui.hostile import BIDI, IMAGE, LINK, NUL, SCRIPT

MODULES = ("lib/html", "lib/answer", "components/chart", "components/marks", "components/states",
           "components/table", "colours", "charts/ticks")  # fmt: skip
# Makes the page's modules known to later scripts, and an element to render into.
LOAD = f"""async () => {{
  const static_ = document.querySelector("script[type=module]").src.replace(/app\\.js$/, "");
  window.kit = {{}};
  for (const name of {list(MODULES)!r}) Object.assign(window.kit, await import(static_ + name + ".js"));
  const root = document.createElement("div");
  root.id = "kit";
  document.getElementById("main").replaceChildren(root);
}}"""
LINES = """[
  {name: "grpo", index: 0, kind: "mean", x: [0, 1, 2], y: [0.1, 0.2, 0.3], raw: [0.0, 0.5, 0.25]},
  {name: "maxrl", index: 1, kind: "mean", x: [0, 1, 2], y: [0.4, 0.3, 0.2]},
]"""


@pytest.fixture
def kit(page):
    page.open("/").page.evaluate(LOAD)
    return page


def show(page, vnode, **values):
    """Render this expression of the modules' names and of ``values`` into the page; return its HTML."""
    script = f"""async (values) => {{
      const {{html, render, h}} = kit;
      render({vnode}, document.getElementById("kit"));
      await new Promise((done) => setTimeout(done, 50));
      return document.getElementById("kit").innerHTML;
    }}"""
    return page.page.evaluate(script, values)


def test_hostile_texts_in_children_and_attributes_are_inert(kit):
    shown = show(kit, "html`<p title=${values.bidi}>${values.script}${[values.image, values.nul]}</p>`",
                 bidi=BIDI, script=SCRIPT, image=IMAGE, nul=NUL)  # fmt: skip
    assert "&lt;script&gt;" in shown
    assert "&lt;img src=x" in shown
    assert "\u202e" not in shown
    assert "nul\u2400bell\u2407esc\u241b" in shown
    assert show(kit, "html`<a href=${values.link}>a</a>`", link=LINK) == '<a href="#">a</a>'
    assert show(kit, "html`<p>${values.fake}</p>`", fake={"type": "img", "props": {"src": "x"}}) == "<p></p>"
    for name in ("dangerouslySetInnerHTML", "innerHTML"):
        with pytest.raises(Exception, match="markup is never parsed"):
            show(kit, f"html`<p ...${{{{{name}: values}}}} />`", __html=IMAGE)
    assert kit.page.evaluate("() => window.hacked") is None


def test_a_failed_answer_is_said_and_asked_again(page):
    failing = [True]

    def fail(route):
        if failing[0]:
            route.fulfill(status=400, content_type="application/json", body='{"error": "not <b>today</b>"}')
        else:
            route.continue_()

    page.page.route("**/api/notes?*", fail)
    page.open(f"/notes{HOME}")
    assert "not <b>today</b>" in page.text(".state.wrong")
    failing[0] = False
    page.press_button("Try again")
    assert page.page.locator(".state.wrong").count() == 0
    page.wrong = [each for each in page.wrong if "400" not in each]


def test_a_chart_reads_out_the_steps_own_value_and_the_smoothed_one(kit):
    chart = "html`<${kit.Chart} title=${values.title} x='step' share=${true} lines=${kit.lines} />`"
    kit.page.evaluate(f"() => {{ kit.lines = {LINES}; }}")
    show(kit, chart, title=f"reward {SCRIPT}")
    assert kit.text(".readout").split() == ["at", "2", "grpo", "30.0%", "step", "25.0%", "maxrl", "20.0%"]
    kit.page.locator(".plot[role=application]").focus()
    kit.press("Home", "ArrowRight")
    assert kit.text(".readout").split() == ["1", "grpo", "20.0%", "step", "50.0%", "maxrl", "30.0%"]
    said = kit.page.locator("#kit p[role=status]").inner_text()
    assert said == "step 1, grpo 20.0% step 50.0%, maxrl 30.0%"
    kit.page.get_by_label("save this chart").click()
    with kit.page.expect_download() as saved:
        kit.page.get_by_role("button", name="CSV").click()
    lines = saved.value.path().read_text().splitlines()
    assert lines == ["step,grpo raw,grpo,maxrl", "0,0,0.1,0.4", "1,0.5,0.2,0.3", "2,0.25,0.3,0.2"]
    kit.page.get_by_label("save this chart").click()
    kit.page.get_by_role("button", name="copy as PNG").click()
    kit.until("document.getElementById('toast').textContent === 'Picture copied'", "the picture in the clipboard")
    types = "async () => (await navigator.clipboard.read()).flatMap((item) => item.types)"
    assert kit.page.evaluate(types) == ["image/png"]


def test_a_chart_says_that_it_reads_is_empty_or_has_failed(kit):
    chart = "html`<${kit.Chart} title='reward' x='step' lines=${kit.lines} error=${values.error} />`"
    for lines, error, words in (("null", None, "Reading …"), ("[]", None, "No values yet"),
                                ("null", {"sentence": "no such key"}, "no such key")):  # fmt: skip
        kit.page.evaluate(f"() => {{ kit.lines = {lines}; }}")
        show(kit, chart, error=error)
        assert words in kit.text(".plot")


@pytest.mark.parametrize(("kind", "ticks", "texts"), [
    ("step", [0, 1, 2], ["0", "1", "2"]),
    ("step", [10_000, 10_500, 11_000], ["10.0k", "10.5k", "11.0k"]),
    ("step", [100_000, 100_200, 100_400], ["100000", "100200", "100400"]),
    ("tokens", [1_000_000, 1_020_000, 1_040_000], ["1000000", "1020000", "1040000"]),
    ("wall", [90_000, 91_800, 93_600], ["1 d 1 h", "", "1 d 2 h"]),
])  # fmt: skip
def test_ticks_of_an_axis_do_not_repeat(kit, kind, ticks, texts):
    assert kit.page.evaluate("([kind, ticks]) => kit.xTexts(kind, ticks)", [kind, ticks]) == texts


def test_ticks_of_a_picture_s_step_axis_are_whole_numbers(kit):
    assert kit.page.evaluate("() => kit.linearTicks(0, 2, 7, 'step').ticks") == [0, 1, 2]


def test_a_table_sorts_by_its_columns_and_keys_go_along_its_rows(kit):
    kit.page.evaluate("""() => {
      kit.columns = [{key: "name", title: "name", value: (row) => row[0], cell: (row) => row[0]},
        {key: "n", title: "n", number: true, value: (row) => row[1], cell: (row) => row[1] ?? "–"}];
      kit.rows = [["b10", 2], ["b9", null], ["a", 7]];
      kit.draw = (sort, down) => kit.render(kit.html`<${kit.Table} label="runs" columns=${kit.columns}
        rows=${kit.rows} keyOf=${(row) => row[0]} sort=${sort} down=${down} noun="run" onSort=${kit.draw} />`,
        document.getElementById("kit"));
      kit.draw();
    }""")
    order = "() => [...document.querySelectorAll('#kit tbody tr')].map((row) => row.dataset.key)"
    assert kit.page.evaluate(order) == ["b10", "b9", "a"]
    kit.page.get_by_role("button", name="name").click()
    assert kit.page.evaluate(order) == ["a", "b9", "b10"]
    kit.page.get_by_role("button", name="n", exact=True).click()
    assert kit.page.evaluate(order) == ["a", "b10", "b9"]
    kit.page.get_by_role("button", name="n ↓").click()
    assert kit.page.evaluate(order) == ["b10", "a", "b9"], "what has no value stays at the end"


def test_colours_can_be_told_apart_by_deuteranopes(kit):
    """Smallest distance of two colours in CIELAB, as Machado's matrix shows them to deuteranopes."""
    np = pytest.importorskip("numpy")
    deutan = np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]])
    to_xyz = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175],
                       [0.0193339, 0.119192, 0.9503041]])  # fmt: skip
    for scheme in ("light", "dark"):
        kit.page.emulate_media(color_scheme=scheme)
        kit.page.evaluate("() => kit.themeChanged()")
        shown = kit.page.evaluate("() => [1, 2, 3, 4, 5, 6, 7, 8].map((i) => kit.css(`--c${i}`).match(/[0-9.]+/g))")
        rgb = np.array(shown, dtype=float)[:, :3] / 255
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        xyz = np.clip(linear @ deutan.T, 0, 1) @ to_xyz.T / np.array([0.95047, 1, 1.08883])
        f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
        lab = np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], 1)
        apart = np.linalg.norm(lab[:, None] - lab[None], axis=-1)[np.triu_indices(8, 1)]
        assert apart.min() > 15, scheme
