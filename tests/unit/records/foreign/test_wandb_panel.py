"""CSV exports of Weights & Biases' pages (wandb 0.31.0), in the form of wandb/wandb#5349 and #6474."""

from pathlib import Path

import pytest

from retrain.errors import UsageError
from retrain.records.foreign.table import ReadRequest, ResultRow, format_of

WANDB = format_of("wandb")
PANEL = (
    '"Step","grpo_s1 - eval/acc","grpo_s1 - eval/acc__MIN","grpo_s1 - eval/acc__MAX",'
    '"grpo_s2 - eval/acc","grpo_s2 - eval/acc__MIN","grpo_s2 - eval/acc__MAX"\n'
    '"0","0.25","0.25","0.25","","",""\n'
    '"10","NaN","0.3","0.5","0.5","0.5","0.5"\n'
)
RUNS = (
    "Name,State,Group,Created,seed,learning_rate_schedule,_step,eval/acc\n"
    "brave-sun-3,finished,grpo,2026-11-28T10:00:00.000Z,1,cosine,200,0.7\n"
    "calm-sea-4,crashed,grpo,2026-11-28T10:00:00.000Z,2,cosine,80,0.5\n"
    "rloo_s3,running,,2026-11-28T10:00:00.000Z,,cosine,10,\n"
)


def rows_of(path: Path, content: str, metric: str | None = None) -> list[ResultRow]:
    path.write_text(content)
    assert WANDB.recognises(path)
    return list(WANDB.rows(path, ReadRequest(metric)))


def test_panel_has_a_column_for_each_run(tmp_path: Path):
    rows = rows_of(tmp_path / "panel.csv", PANEL)

    assert rows == [
        ResultRow("eval/acc", 0.25, 0, condition="grpo", run="grpo_s1", seed=1, line=2),
        ResultRow("eval/acc", None, 10, condition="grpo", run="grpo_s1", seed=1, line=3),
        ResultRow("eval/acc", 0.5, 10, condition="grpo", run="grpo_s2", seed=2, line=3),
    ]


def test_names_of_runs_and_metrics_may_contain_the_separator(tmp_path: Path):
    content = "train/step,a - b_s1 - val - acc,a - b_s1 - val - acc__MIN,a - b_s1 - _step\n1,0.5,0.5,1\n"

    (of_metric,) = rows_of(tmp_path / "panel.csv", content, "val - acc")
    (without,) = rows_of(tmp_path / "panel.csv", content)
    assert (of_metric.run, of_metric.metric) == ("a - b_s1", "val - acc")
    assert (without.run, without.metric) == ("a - b_s1 - val", "acc")


def test_panel_of_several_metrics(tmp_path: Path):
    content = "Step,a_s1 - acc,a_s1 - loss\n1,0.5,2\n"

    assert [row.metric for row in rows_of(tmp_path / "panel.csv", content)] == ["acc", "loss"]
    assert [row.value for row in rows_of(tmp_path / "panel.csv", content, "loss")] == [2.0]


def test_grouped_panel_has_conditions_without_seeds(tmp_path: Path):
    rows = rows_of(tmp_path / "panel.csv", "Step,method: grpo_s1 - acc,method: rloo - acc\n1,0.5,0.6\n")

    assert [(row.condition, row.seed) for row in rows] == [("grpo_s1", None), ("rloo", None)]


def test_table_of_runs(tmp_path: Path):
    rows = rows_of(tmp_path / "runs.csv", RUNS, "eval/acc")

    with pytest.raises(UsageError, match="it has Name, State, Group"):
        rows_of(tmp_path / "runs.csv", RUNS)
    assert rows == [
        ResultRow("eval/acc", 0.7, 200, "heldout", None, 0, "grpo", "brave-sun-3", 1, "done", 1795860000.0, 2),
        ResultRow("eval/acc", 0.5, 80, "heldout", None, 0, "grpo", "calm-sea-4", 2, "failed", 1795860000.0, 3),
        ResultRow("eval/acc", None, 10, "heldout", None, 0, "rloo", "rloo_s3", 3, "unfinished", 1795860000.0, 4),
    ]


def test_run_without_any_point_has_no_value(tmp_path: Path):
    rows = rows_of(tmp_path / "panel.csv", "Step,a_s1 - acc,b_s1 - acc\n0,0.5,\n")

    assert [(row.condition, row.step, row.value) for row in rows] == [("a", 0, 0.5), ("b", None, None)]


def test_text_in_a_panel_is_refused_with_its_line(tmp_path: Path):
    with pytest.raises(UsageError, match=r'panel\.csv:3  column "a_s1 - acc" holds "high", which is not a number'):
        rows_of(tmp_path / "panel.csv", "Step,a_s1 - acc\n0,0.5\n10,high\n")


@pytest.mark.parametrize("content", ["condition,seed,acc\ngrpo,1,0.5\n", "", "Step\n1\n"])
def test_other_tables_are_not_recognised(tmp_path: Path, content: str):
    path = tmp_path / "table.csv"
    path.write_text(content)

    assert not WANDB.recognises(path)
