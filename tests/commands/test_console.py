"""What is printed: plain lines, the live view in terminals of every width, tables of results."""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
from record_cases import config, context, evaluation, group, step
from rich.console import Console

from retrain.campaign.judging.results import RunResult
from retrain.files import read_jsonl
from retrain.record.console import Board, LiveConsole, PlainConsole, board_view, make_console, visible_runs
from retrain.record.evaluation import eval_row
from retrain.record.measure import step_row
from retrain.record.numbers import duration, short
from retrain.record.recorder import RunRecorder
from retrain.record.tables import (
    accuracy_line,
    comparison_table,
    squeeze_line,
    squeeze_table,
)

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
    """Every run is planned; the first ``active`` start, are evaluated and step."""
    runs = specs(count)
    observer.plan(runs)
    for spec in runs[: count if active is None else active]:
        observer.run_started(spec, 0, 10)
        observer.evaluated(spec, "heldout", eval_row(evaluation([group([1.0, 0.0], [3, 3])])))
        for n in range(steps):
            record = step([group([1.0, 0.0, 1.0], [4, 5, 6])], n, {"loss": -0.00123}, sepa_lambda=0.5)
            observer.step(spec, step_row(record, context(condition=spec.label)))
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
    assert "\x1b" not in text
    assert text.isprintable() or all(c.isprintable() or c == "\n" for c in text)
    lines = text.splitlines()
    assert lines[0] == "plan runs=1 conditions=grpo+none seeds=1"
    assert lines[1] == "start run=grpo+none_s1 step=0 max_steps=10"
    first = dict(pair.split("=") for pair in next(line for line in lines if line.startswith("step ")).split()[1:])
    assert first["run"] == "grpo+none_s1"
    assert (first["step"], first["done"]) == ("0", "1/10")
    assert (first["reward"], first["correct"], first["loss"]) == ("0.667", "0.667", "-0.00123")
    assert first["entropy"] == "0.500"
    ends = dict(pair.split("=") for pair in [line for line in lines if line.startswith("eval ")][-1].split()[1:])
    assert (ends["step"], ends["correct"], ends["before"], ends["low"]) == ("4", "1.000", "0.500", "-")
    assert ends["reward"] == "1.000"
    assert "warning: two" in lines
    assert lines[-1].startswith("end run=grpo+none_s1 status=failed message=it broke: [bold red]")


@pytest.mark.parametrize(
    ("label", "shown"),
    [("maxrl+gtpo", "-"), ("maxrl+gtpo_sepa~lr=0.0002~sepa.steps=50", "0.50"), ("maxrl+mymodes-gtpo_sepa", "-")],
)
def test_lambda_is_shown_where_there_is_one(label, shown):
    """Rows have 0 in other transform modes, which would read as a SEPA that has not begun."""
    stream, spec = io.StringIO(), Spec("run", label, 1)
    console, board = PlainConsole(stream, verbose=True), Board()
    for observer in (console, board):
        observer.run_started(spec, 0, 10)
        observer.step(spec, step_row(step([group([None, 0.0], [4, 5])], 0, sepa_lambda=0.5), context(condition=label)))
    assert f" lambda={shown} " in stream.getvalue()
    assert " loss=- " in stream.getvalue()  # there was none
    heading, row = draw(board).splitlines()[:2]
    assert row[: heading.index("λ") + 1].split()[-1] == shown


def test_progress_is_a_line_for_each_tenth_of_all_steps_or_every_ten_seconds():
    """Four runs of 10 steps side by side, three of them at once, one second a step; then one step of 12 seconds."""
    stream, now = io.StringIO(), [100.0]
    console, runs = PlainConsole(stream), specs(4)
    console.clock = lambda: now[0]
    console.plan(runs)

    def progress() -> list[str]:
        return [line for line in stream.getvalue().splitlines() if line.startswith(("progress ", "step "))]

    for spec in runs[:3]:
        console.run_started(spec, 0, 10)
    for n in range(2):
        for index, spec in enumerate(runs[:3]):
            console.step(spec, {"step": n, "mean_reward": index / 2, "correct_rate": None})
        now[0] += 1.0
    assert progress() == [
        "progress done=4/40 running=3 waiting=1 reward=0.500 correct=- length=- truncated=- entropy=- eta=0:09"
    ]
    now[0] += 12.0
    console.step(runs[0], {"step": 2, "mean_reward": 0.0})
    assert [line.split()[1] for line in progress()] == ["done=4/40", "done=7/40"]
    console.run_finished(runs[1], "failed", "it broke")
    console.run_finished(runs[2], "done")
    console.run_started(runs[3], 0, 10)
    for n in range(4):
        console.step(runs[3], {"step": n})
    assert [line.split()[1:4] for line in progress()[2:]] == [["done=11/32", "running=2", "waiting=0"]]


def test_progress_begins_where_runs_were_resumed():
    stream = io.StringIO()
    console, (spec,) = PlainConsole(stream), specs(1)
    console.plan([spec])
    console.run_started(spec, 90, 100)
    for n in range(90, 100):
        console.step(spec, {"step": n})
    (line,) = [line for line in stream.getvalue().splitlines() if line.startswith("progress ")]
    assert line.startswith("progress done=100/100 running=1 waiting=0 ")


@pytest.mark.parametrize("count", [1, 40])
def test_the_live_view_fits_80_columns_and_24_lines(count):
    board = Board()
    play(board, count=count, active=min(count, 10))
    lines = draw(board).splitlines()
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    for word in ("done", "step", "ETA", "reward", "correct", "held-out", "tok/s", "λ", "last steps"):
        assert word in text
    assert "grpo+none_s1" in text
    assert "4/10" in text
    assert "50 → 100%" in text
    if count == 40:
        assert "30 waiting" in text
        assert "grpo+none_s3" not in text


def test_finished_runs_stay_while_there_is_room():
    board = Board()
    play(board, count=6)
    for spec in specs(4):
        board.run_finished(spec, "done")
    views = list(board.runs.values())
    assert [v.run_id for v in visible_runs(views, 10)] == [v.run_id for v in views]
    assert [v.run_id for v in visible_runs(views, 3)] == [views[3].run_id, views[4].run_id, views[5].run_id]
    assert "4 done" in draw(board)


def test_eta_counts_from_where_the_run_was_resumed():
    board = Board()
    now = [100.0]
    board.clock = lambda: now[0]
    spec = specs(1)[0]
    board.run_started(spec, 4, 10)
    assert board.runs[spec.run_id].eta(105.0) is None
    board.step(spec, {"step": 4})
    board.step(spec, {"step": 5})
    assert board.runs[spec.run_id].eta(120.0) == 40.0


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


def test_which_console(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert isinstance(make_console(Terminal()), LiveConsole)
    assert isinstance(make_console(Terminal(), plain=True), PlainConsole)
    assert isinstance(make_console(io.StringIO()), PlainConsole)
    monkeypatch.setenv("NO_COLOR", "1")
    assert isinstance(make_console(Terminal()), PlainConsole)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_console(Terminal()), PlainConsole)


def test_durations_and_numbers():
    seconds = (None, 0, 61.4, 3661, 90000)
    assert [duration(value) for value in seconds] == ["-", "0:00", "1:01", "1:01:01", "1d 1h"]
    assert [short(value) for value in (None, 987, 12345, 4.56e6)] == ["-", "987", "12.3k", "4.6M"]


COMPARISON = {
    "baseline": "grpo+none",
    "metric": "eval/heldout/correct_rate",
    "conditions": [
        {"label": "grpo+none", "seeds": [1, 2], "before": 0.5, "after_mean": 0.7, "after_values": [0.7, 0.7],
         "interval": [0.65, 0.75], "difference": None, "difference_interval": None, "p_value": None, "pairs": 0,
         "verdict": "", "failed": 0, "tokens": 1000, "seconds": 60.0},
        {"label": "maxrl+gtpo_hicra[red]", "seeds": [1, 2], "before": 0.5, "after_mean": None, "after_values": [],
         "interval": None, "difference": 0.123, "difference_interval": [-0.01, 0.256], "p_value": 0.5, "pairs": 2,
         "verdict": "2 pairs: no verdict possible", "failed": 1, "tokens": 2000, "seconds": 61.0},
    ],
    "note": "Fewer than 6 pairs.",
}  # fmt: skip

SQUEEZE = {
    "run": "grpo+none_s1",
    "source_rank": 8,
    "recommended_rank": 4,
    "min_variance_retention": 0.95,
    "rows": [
        {"rank": 2, "mean_variance": 0.8, "min_variance": 0.7, "max_variance": 0.9, "relative_error": 0.447},
        {"rank": 4, "mean_variance": 0.97, "min_variance": 0.95, "max_variance": 0.99, "relative_error": 0.173},
    ],
    "message": "Train high, then compress.",
}


def printed(renderable, width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(renderable)
    assert all(len(line) <= width for line in stream.getvalue().splitlines())
    return stream.getvalue()


def test_the_comparison():
    plain = comparison_table(COMPARISON).text()
    for text in (printed(comparison_table(COMPARISON, 120).rich(), 120), plain):
        for part in ("maxrl+gtpo_hicra[red]", "+12.3 [−1.0, +25.6]", "1/2", "65 to 75%", "50.0% → 70.0%",
                     "no verdict possible", "Fewer than 6 pairs.", "3.0k tokens, 2:01"):  # fmt: skip
            assert part in text
    assert plain.splitlines()[3].split() == [
        "maxrl+gtpo_hicra[red]", "1/2", "50.0%", "→", "-", "-", "+12.3", "[−1.0,", "+25.6]", "0.500",
        "2", "pairs:", "no", "verdict", "possible",
    ]  # fmt: skip
    medium = printed(comparison_table(COMPARISON, 80).rich(), 80)
    assert "+12.3 [−1.0, +25.6]" in medium
    assert "maxrl+gtpo_hicra[red]: 2 pairs: no verdict possible" in medium
    narrow = printed(comparison_table(COMPARISON, 60).rich(), 60)
    assert any(line.startswith("grpo ") and "50.0% → 70.0%" in line for line in narrow.splitlines())
    assert "…" not in narrow


VERIFIED = {
    "full": {"rank": 8, "accuracy": 0.81},
    "ranks": [{"rank": 4, "accuracy": 0.8, "difference": {"mean": -0.01, "low": -0.019, "high": -0.001}}],
    "sentence": "Verified on 9 problems.",
}
UNTRAINED = {**SQUEEZE, "rows": [], "recommended_rank": None, "message": "The adapter is untrained."}


def test_the_recommended_rank():
    for text in (printed(squeeze_table(SQUEEZE, 80).rich(), 80), squeeze_table(SQUEEZE).text()):
        marked = next(line for line in text.splitlines() if "<- recommended" in line)
        assert marked.split() == ["4", "97.0%", "95.0%", "17.3%", "<-", "recommended"]
        assert "Train high, then compress." in text
        assert "Accuracy was not measured" in text
    assert squeeze_line(SQUEEZE | {"message": "", "verified": VERIFIED}) == (
        "recommended rank by energy: 4 of 8. Verified on 9 problems. "
        "All ranks: retrain squeeze grpo+none_s1 (--to RANK compresses to another)"
    )
    assert " 4 of 8. Accuracy was not measured" in squeeze_line(SQUEEZE)
    assert squeeze_line(UNTRAINED) == "The adapter is untrained."
    assert "untrained" in squeeze_table(UNTRAINED).text()
    assert "untrained" in printed(squeeze_table(UNTRAINED, 80).rich(), 80)


def test_the_recommended_rank_verified_on_held_out_problems():
    report = SQUEEZE | {"verified": VERIFIED}
    lines = squeeze_table(report).text().splitlines()
    assert lines[2].split() == ["2", "80.0%", "70.0%", "44.7%", "-", "-"]  # a rank of the table that was not tried
    assert lines[3].split()[4:] == ["80.0%", "−1.0", "[−1.9,", "−0.1]", "<-", "recommended"]
    assert lines[-1] == "Verified on 9 problems."
    narrow = printed(squeeze_table(report, 60).rich(), 60)
    assert "−1.0 [−1.9, −0.1]" in narrow
    assert [line.split()[-1] for line in narrow.splitlines() if "97.0%" in line] == ["<-"]
    assert "…" not in narrow
    assert "By energy alone" not in narrow


def test_the_accuracy_of_a_single_run_in_one_line():
    accuracy = {"before": 0.38, "after": 0.835, "ci_low": 0.78, "ci_high": 0.88, "problems": 200}
    line = accuracy_line("heldout", accuracy)
    assert line == "Held-out accuracy: 38.0% → 83.5%, 95 % interval over problems 78 to 88%"
    assert accuracy_line("hard", accuracy | {"ci_low": None}) == "Held-out accuracy on hard: 38.0% → 83.5%"


@pytest.mark.parametrize("width", [40, 60, 110])
def test_a_narrow_terminal_shows_fewer_columns_and_cuts_no_number(width):
    board = Board()
    play(board, count=3)
    board.run_finished(specs(3)[0], "interrupted")
    text = draw(board, width=width)
    headings = [line.split() for line in text.splitlines() if line.startswith(("run ", "last steps "))]
    assert all(len(line) <= width for line in text.splitlines())
    last = {40: "correct", 60: "held-out", 110: "λ"}[width]
    assert (headings[0][:3], headings[0][-1]) == (["run", "done", "ETA"], last)
    assert headings[1][:5] == ["last", "steps", "step", "reward", "correct"]
    assert "interrupted" in text
    assert ("━" in text) == (width == 110)
    assert not any(word.endswith("…") for words in headings for word in words)


def test_a_step_has_one_number_everywhere(tmp_path):
    """The third of three steps on the terminal, in its row, on its page, in the logtree, the timeline and the log."""
    stream, board = io.StringIO(), Board()
    plain, spec = PlainConsole(stream, verbose=True), specs(1)[0]
    settings = config(logging={"rollouts_every": 1})
    with RunRecorder(tmp_path, context(config=settings, max_steps=3)) as recorder:
        for console in (plain, board):
            console.plan([spec])
            console.run_started(spec, 0, 3)
        for number in range(3):
            row = recorder.record_step(step([group([1.0, 0.0], [3, 4])], number))
            for console in (plain, board):
                console.step(spec, row)
    assert row["step"] == 2
    assert "step run=grpo+none_s1 step=2 done=3/3 " in stream.getvalue()
    shown = draw(board)
    assert "3/3" in shown
    assert shown.splitlines()[-1].split()[:2] == ["grpo+none_s1", "2"]
    assert "<h1>Step 2</h1>" in (tmp_path / "train_iteration_000002.html").read_text()
    assert json.loads((tmp_path / "train_iteration_000002_logtree.json").read_text())["title"].endswith(": step 2")
    timeline = (tmp_path / "timeline.html").read_text()
    assert 'data-step="2"' in timeline
    assert 'data-step="3"' not in timeline
    recorded = RunResult("a_s1", "a", 1, "done", None, tmp_path, rows=read_jsonl(tmp_path / "metrics.jsonl"))
    assert recorded.curve("mean_reward")[-1] == (2, 0.5)  # as the report draws it


def test_the_table_says_which_worker_trains_a_run_where_there_are_several():
    board, stream = Board(), io.StringIO()
    play(board)
    assert "worker" not in draw(board, width=120)
    for observer in (board, PlainConsole(stream)):
        for spec, worker in zip(specs(3), ("1 gpu:0", "2 gpu:1", "2 gpu:1"), strict=True):
            observer.placed(spec, worker)
    board.run_finished(specs(3)[2], "done")
    for width in (80, 120):
        text = draw(board, width=width)
        assert re.search(r" worker\s", text)
        assert (text.count("1 gpu:0"), text.count("2 gpu:1")) == (1, 1)  # of those that run
    assert stream.getvalue().splitlines()[0] == f"worker run={specs(1)[0].run_id} worker=1_gpu:0"
