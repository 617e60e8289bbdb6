import io
from dataclasses import dataclass
from typing import Any

import pytest
from helpers.records import context, evaluation, group, step
from rich.console import Console

from retrain.cli.console import Board, LiveConsole, PlainConsole, board_view, make_console, status_view
from retrain.cli.output import comparison_table, plain_text, print_table, squeeze_line, squeeze_table
from retrain.records.measure import measure_step
from retrain.records.schema.rows import START
from retrain.records.scores import eval_row
from retrain.util.text import plain

NASTY = "[bold red]<b>\x1b[2J\x1b]0;owned\x07 \u202e\udc80[/] 答案"


@dataclass(frozen=True)
class Spec:
    run_id: str
    label: str
    seed: int


def specs(count: int) -> list[Spec]:
    labels = ("grpo+none", "maxrl+none", "maxrl+gtpo", "maxrl+gtpo_hicra", "maxrl+gtpo_sepa")
    return [Spec(f"{labels[i % 5]}_s{i // 5 + 1}", labels[i % 5], i // 5 + 1) for i in range(count)]


def play(observer: Any, count: int = 3, steps: int = 4, active: int | None = None) -> None:
    """Plan every run; start, evaluate and step the first ``active``."""
    runs = specs(count)
    observer.plan(runs)
    for spec in runs[: count if active is None else active]:
        observer.run_started(spec, 0, 10)
        observer.evaluated(spec, "heldout", eval_row(evaluation([group([1.0, 0.0], [3, 3])])))
        for n in range(steps):
            record = step([group([1.0, 0.0, 1.0], [4, 5, 6])], n, {"loss": -0.00123}, sepa_lambda=0.5)
            observer.step(spec, measure_step(record, context(condition=spec.label), START)[0])
        observer.evaluated(spec, "heldout", eval_row(evaluation([group([1.0, 1.0], [3, 3])], number=4)))


def draw(board: Board, width: int = 80, height: int = 24) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, height=height, force_terminal=True, color_system=None)
    console.print(board_view(board, width, height, board.clock()))
    return stream.getvalue()


def test_plain_lines_can_be_parsed_and_hold_no_escapes():
    stream = io.StringIO()
    console = PlainConsole(stream, verbose=True)
    play(console, count=1)
    console.message("two\nlines", "warning")
    console.run_finished(specs(1)[0], "failed", f"it broke:\n{NASTY}")
    console.close()
    text = stream.getvalue()
    assert all(c.isprintable() or c == "\n" for c in text)
    lines = text.splitlines()
    assert lines[:2] == ["plan runs=1 conditions=grpo+none seeds=1", "start run=grpo+none_s1 step=0 max_steps=10"]
    first = dict(pair.split("=") for pair in next(line for line in lines if line.startswith("step ")).split()[1:])
    assert (first["run"], first["step"], first["done"]) == ("grpo+none_s1", "0", "1/10")
    assert (first["reward"], first["correct"], first["loss"]) == ("0.667", "0.667", "-0.00123")
    ends = dict(pair.split("=") for pair in [line for line in lines if line.startswith("eval ")][-1].split()[1:])
    assert (ends["step"], ends["correct"], ends["before"], ends["low"]) == ("4", "1.000", "0.500", "-")
    assert "warning: two" in lines
    assert lines[-1].startswith("end run=grpo+none_s1 status=failed message=it broke: [bold red]")


def test_progress_is_a_line_for_each_tenth_of_all_steps_or_every_ten_seconds():
    """Three runs of 10 steps, one of them resumed at 8, one second a step; then one step of 12 seconds."""
    stream, now = io.StringIO(), [100.0]
    console, runs = PlainConsole(stream), specs(4)
    console.clock = lambda: now[0]
    console.plan(runs)

    def progress() -> list[str]:
        return [line for line in stream.getvalue().splitlines() if line.startswith(("progress ", "step "))]

    for spec, begin in zip(runs[:3], (0, 0, 8), strict=True):
        console.run_started(spec, begin, 10)
    for n in range(2):
        for index, (spec, begin) in enumerate(zip(runs[:3], (0, 0, 8), strict=True)):
            console.step(spec, {"step": begin + n, "mean_reward": index / 2, "correct_rate": None})
        now[0] += 1.0
    assert progress()[0].split(" eta=")[0] == (
        "progress done=12/40 running=3 waiting=1 reward=0.500 correct=- length=- truncated=- entropy=-"
    )
    now[0] += 12.0
    console.step(runs[0], {"step": 2, "mean_reward": 0.0})
    console.run_finished(runs[1], "failed", "it broke")
    console.run_finished(runs[2], "done")
    console.run_started(runs[3], 0, 10)
    for n in range(4):
        console.step(runs[3], {"step": n})
    assert [line.split()[1] for line in progress()] == ["done=12/40", "done=15/40", "done=19/32"]


def test_the_live_view_fits_80_columns_and_24_lines():
    board = Board()
    play(board, count=40, active=10)
    lines = draw(board).splitlines()
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    for word in ("done", "step", "ETA", "reward", "correct", "held-out", "tok/s", "λ", "last steps", "30 waiting"):
        assert word in text
    for value in ("grpo+none_s1", "4/10", "50 → 100%"):
        assert value in text
    assert "grpo+none_s3" not in text


def test_the_live_console_obeys_nothing_that_a_model_wrote():
    stream = io.StringIO()
    console = LiveConsole(Console(file=stream, width=80, height=24, force_terminal=True, color_system=None))
    play(console, count=2)
    console.message(NASTY)
    console.run_finished(specs(2)[1], "failed", NASTY)
    console.close()
    text = stream.getvalue()
    assert "\x1b[2J" not in text
    assert "\x1b]0;" not in text
    assert "[bold red]<b>" in text
    assert "答案" in text
    assert "error: maxrl+none_s1 failed" in text
    assert "last steps" in text


def test_names_and_reasons_of_files_are_shown_as_they_are():
    """Rich would read a name in brackets as markup, and the terminal would obey an escape sequence."""
    run = {
        "run_id": "a_s1", "label": "a", "seed": 1, "state": "failed", "reason": NASTY, "worker": None, "step": 0,
        "max_steps": 4, "row": {}, "age_s": None,
        "evaluations": {name: {"before": 0.5, "now": None} for name in ("heldout", "[red]hard")},
    }  # fmt: skip
    stream = io.StringIO()
    console = Console(file=stream, width=120, force_terminal=True, color_system=None)
    console.print(status_view({"runs": [run], "recommended_rank": None}, 120))
    assert "[red]hard" in stream.getvalue()
    assert "a_s1: [bold red]<b>␛[2J␛]0;owned" in stream.getvalue()


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1", "TERM": "dumb"}])
def test_a_table_in_a_pipe_has_one_line_for_each_row(variables, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    print_table(("run", "[red]hard :x:"), [("a", "long " * 50 + "\n\x1b[31mend"), ("b", "[bold]short")], ("run",))
    long = "long " * 50 + r"\n\x1b[31mend"
    lines = [f"run  {'[red]hard :x:':>{len(long)}}", f"a    {long}", f"b    {'[bold]short':>{len(long)}}"]
    assert capsys.readouterr().out.splitlines() == lines


def test_which_console(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert isinstance(make_console(Terminal()), LiveConsole)
    assert isinstance(make_console(Terminal(), plain=True), PlainConsole)
    assert isinstance(make_console(io.StringIO()), PlainConsole)
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert isinstance(make_console(Terminal()), PlainConsole)


def printed(renderable, width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(renderable, crop=False)
    assert all(len(line) <= width or line == COMMAND for line in stream.getvalue().splitlines())
    return stream.getvalue()


def condition(label: str, **values: Any) -> dict[str, Any]:
    """A row of a comparison of which nothing is known but the given values."""
    nothing = dict.fromkeys(("after_mean", "interval", "typical_difference", "difference_interval", "p_value"))
    given = {"label": label, "seeds": [1, 2], "finished": [1, 2], "before": 0.5, "verdict": "", "sentence": ""}
    return nothing | given | {"tokens": 1000, "seconds": 60.0} | values


COMMAND = f"retrain train a.toml --set 'campaign.seeds=[{','.join(map(str, range(3, 40)))}]' --out logs/a_seeds3-39"
"""Longer than any of the terminals, and not to be broken into lines."""

COMPARISON = {
    "baseline": "grpo+none",
    "metric": "eval/heldout/correct_rate",
    "summary": "final",
    "share": True,
    "conditions": [
        condition("grpo+none", after_mean=0.7, interval=[0.65, 0.75]),
        condition("maxrl+gtpo_hicra[red]", typical_difference=0.123, difference_interval=[-0.01, 0.256], p_value=0.5,
                  finished=[2], verdict="2 pairs: no verdict possible", sentence="With 2 pairs no verdict is possible.",
                  tokens=2000, seconds=61.0),
    ],
    "note": "Fewer than 6 pairs.",
    "follow_up": f"A new campaign finds it; declare it with\n{COMMAND}",
}  # fmt: skip


def test_the_comparison():
    plain = plain_text(comparison_table(COMPARISON))
    for text in (printed(comparison_table(COMPARISON, 120), 120), plain):
        for part in ("maxrl+gtpo_hicra[red]", "+12.3 [−1.0, +25.6]", "1/2", "65 to 75%", "50.0% → 70.0%",
                     "no verdict possible", "Fewer than 6 pairs.", "3.0k tokens, 2:01"):  # fmt: skip
            assert part in text
        assert COMMAND in text.splitlines()
    medium = printed(comparison_table(COMPARISON, 80), 80)
    assert "+12.3 [−1.0, +25.6]" in medium
    assert "With 2 pairs no verdict is possible." in medium
    narrow = printed(comparison_table(COMPARISON, 60), 60)
    assert any(line.startswith("grpo ") and "50.0% → 70.0%" in line for line in narrow.splitlines())
    assert "…" not in narrow


def test_differences_of_numbers_have_a_sign_and_no_exponent():
    assert [plain(value, sign=True) for value in (2.5, -1234.6, 999.7, 0.0)] == ["+2.5", "−1,235", "+1,000", "+0"]
    longer = [{**condition, "typical_difference": 1234.6} for condition in COMPARISON["conditions"]]
    assert "+1,235 [" in plain_text(comparison_table({**COMPARISON, "share": False, "conditions": longer}))


SQUEEZE = {
    "run": "grpo+none_s1", "source_rank": 8, "recommended_rank": 4, "min_variance_retention": 0.95,
    "rows": [{"rank": 2, "mean_variance": 0.8, "min_variance": 0.7, "max_variance": 0.9, "relative_error": 0.447},
             {"rank": 4, "mean_variance": 0.97, "min_variance": 0.95, "max_variance": 0.99, "relative_error": 0.173}],
    "message": "Train high, then compress.",
}  # fmt: skip


def test_the_recommended_rank():
    for text in (printed(squeeze_table(SQUEEZE, 80), 80), plain_text(squeeze_table(SQUEEZE))):
        marked = next(line for line in text.splitlines() if "<- recommended" in line)
        assert marked.split() == ["4", "97.0%", "95.0%", "17.3%", "<-", "recommended"]
    line = squeeze_line(SQUEEZE)
    assert " 4 of 8, which keeps at least 95% of the energy" in line
    assert "differ by up to 22% from" in line
    untrained = SQUEEZE | {"rows": [], "recommended_rank": None, "message": "The adapter is untrained."}
    assert squeeze_line(untrained) == "The adapter is untrained."
    assert "untrained" in plain_text(squeeze_table(untrained))


@pytest.mark.parametrize("width", [30, 56, 100])
def test_names_of_runs_keep_eight_columns_beside_workers_and_further_sets(width):
    board = Board()
    play(board, count=2)
    for spec in specs(2):
        board.placed(spec, "host3.cluster gpu:1")
        for name in ("hard", "math-500"):
            board.evaluated(spec, name, eval_row(evaluation([group([1.0, 0.0], [3, 3])], name=name)))
    names = [line[:7] for line in draw(board, width=width).splitlines()]
    assert names[:3] == ["run    ", "grpo+no", "maxrl+n"]


@pytest.mark.parametrize(("width", "last"), [(40, "correct"), (60, "held-out"), (110, "λ")])
def test_a_narrow_terminal_shows_fewer_columns_and_cuts_no_number(width, last):
    board = Board()
    play(board, count=3)
    board.run_finished(specs(3)[0], "interrupted")
    text = draw(board, width=width)
    headings = [line.split() for line in text.splitlines() if line.startswith(("run ", "last steps "))]
    assert all(len(line) <= width for line in text.splitlines())
    assert (headings[0][:3], headings[0][-1]) == (["run", "done", "ETA"], last)
    assert "interrupted" in text
    assert not any(word.endswith("…") for words in headings for word in words)
