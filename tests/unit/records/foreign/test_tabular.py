"""Tables are the user's own: no tool's version matters. Parquet files are written by pyarrow."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from retrain.config.comparing import Compare, Results
from retrain.errors import MissingExtra, UsageError
from retrain.records.foreign import tabular
from retrain.records.foreign.collect import collect
from retrain.records.foreign.table import CORRECT, ReadRequest, ResultRow, format_of

Reader = Callable[..., list[ResultRow]]


@pytest.fixture
def read(tmp_path: Path) -> Reader:
    def read(content: str | bytes, name: str = "results.csv", request: ReadRequest | None = None) -> list[ResultRow]:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return list(format_of("table").rows(path, request or ReadRequest()))

    return read


def parquet(path: Path, columns: Mapping[str, object], row_group_size: int = 1 << 20) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(pyarrow.table(columns), path, row_group_size=row_group_size)
    return path


def test_long_table_has_the_fields_of_a_result(read: Reader):
    content = (
        "condition,run,seed,state,step,set,metric,value,problem,sample,time\n"
        "grpo,g1,1,done,20,math,acc,0.5,p7,2,2026-11-28T10:00:00Z\n"
    )

    rows = read(content)

    assert rows == [ResultRow("acc", 0.5, 20, "math", "p7", 2, "grpo", "g1", 1, "done", 1795860000.0, 2)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("results.csv", "condition,seed,step,metric,value\ngrpo,1,20,acc,0.5\n"),
        ("results.csv", '\ufeff"condition";"seed";"step";"metric, name";"metric";"value"\ngrpo;1;20;x;acc;0.5\n'),
        ("results.tsv", "condition\tseed\tstep\tmetric\tvalue\ngrpo\t1\t20\tacc\t0.5\n"),
        ("results.jsonl", '{"condition": "grpo", "seed": 1, "step": 20, "metric": "acc", "value": 0.5}\n'),
    ],
)
def test_formats_of_text_yield_the_same_rows(read: Reader, name: str, content: str):
    rows = read(content, name)

    assert [row._replace(line=0) for row in rows] == [ResultRow("acc", 0.5, 20, condition="grpo", seed=1)]


def test_correct_column_is_the_metric_of_answers_that_are_right_or_wrong(read: Reader):
    rows = read('{"problem": 7, "correct": true}\n{"problem": 8, "correct": 0}\n{"problem": 9}\n', "answers.jsonl")

    assert [(row.metric, row.problem, row.value) for row in rows] == [
        (CORRECT, "7", 1.0),
        (CORRECT, "8", 0.0),
        (CORRECT, "9", None),
    ]


def test_column_named_by_the_metric_is_the_value(read: Reader):
    content = "condition,seed,step,loss,acc\ngrpo,1,0,0.9,0.25\ngrpo,1,10,0.8,\nrloo,1,20,0.7,\n"

    rows = read(content, request=ReadRequest("acc"))

    assert [(row.condition, row.metric, row.step, row.value) for row in rows] == [
        ("grpo", "acc", 0, 0.25),
        ("rloo", "acc", 20, None),  # a run without any value
    ]


def test_mapped_columns_and_filter(read: Reader):
    content = "method,split,epoch,acc\ngrpo,train,1,0.9\ngrpo,test,1,0.5\nrloo,test,2,0.6\n"
    columns = {"condition": "method", "step": "epoch", "value": "acc"}

    rows = read(content, request=ReadRequest(columns=columns, where={"split": "test", "epoch": 1}))

    assert rows == [ResultRow("acc", 0.5, 1, condition="grpo", line=3)]


def test_other_metrics_are_left_out(read: Reader):
    rows = read("metric,value\nacc,0.5\nloss,n/a\n", request=ReadRequest("acc"))

    assert [(row.metric, row.value) for row in rows] == [("acc", 0.5)]


@pytest.mark.parametrize("text", ["", "NaN", "null"])
def test_missing_value_is_none(read: Reader, text: str):
    rows = read(f"metric,value\nacc,{text}\n")

    assert rows == [ResultRow("acc", None, line=2)]


def test_times_that_are_no_dates_are_none_and_milliseconds_are_refused(read: Reader):
    elapsed = read("metric,value,time\nacc,0.5,12.5\nacc,0.5,1795860000\n")

    assert [row.time for row in elapsed] == [None, 1795860000.0]
    with pytest.raises(UsageError, match=r'results\.csv:2  column "time" holds "1795860000000", which is no time'):
        read("metric,value,time\nacc,0.5,1795860000000\n")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.csv", 'metric,note,value\nacc,"two\nlines",1\nacc,,n/a\n', 'r.csv:4  column "value" holds "n/a", which is'),
        ("r.csv", "metric,value,seed\nacc,1,1.5\n", 'r.csv:2  column "seed" holds "1.5", which is no whole number'),
        ("r.csv", "metric,value\nacc,inf\n", 'r.csv:2  column "value" holds "inf", which is not finite'),
        ("r.csv", "metric,value\nacc,1,2\n", "r.csv:2  has 3 values, and the first line names 2 columns"),
        ("r.csv", "metric,value,state\nacc,1,ok\n", 'r.csv:2  column "state" holds "ok", which is no state: done, fai'),
        ("r.csv", "method,acc\ngrpo,1\n", 'has no column "value"; it has method, acc. Name the one that holds the'),
        ("r.csv", "method,acc\ngrpo,1\n", "such as --metric acc"),
        ("r.csv", f"{'x' * 500},acc\n1,2\n", f'has no column "value"; it has {"x" * 40}…, acc. Name'),
        ("r.csv", b"metric,value\nacc,\xff\n", "r.csv:2  is not UTF-8 (byte 5 of the line)"),
        ("r.csv", "", 'has no column "value"; it has none'),
        ("r.jsonl", '{"value": 1, "metric": "acc"}\n\n{"value": \n', "r.jsonl:3 is no JSON object (Expecting value"),
        ("r.jsonl", "[1]\n", "r.jsonl:1 is no JSON object"),
        ("r.jsonl", '{"value": [1], "metric": "acc"}\n', 'column "value" holds "[1]", which is not a number'),
        ("r.jsonl", f'{{"value": 1{"0" * 400}, "metric": "acc"}}\n', "which is not finite"),
        ("r.parquet", "metric,value\n", "r.parquet cannot be read as Parquet"),
    ],
)
def test_bad_content_is_refused_with_its_line(read: Reader, name: str, content: str, message: str):
    with pytest.raises(UsageError) as caught:
        read(content, name)

    assert message in str(caught.value)


@pytest.mark.parametrize("metric", [None, "acc"])
def test_table_without_rows_has_no_results(read: Reader, metric: str | None):
    assert read("condition,acc\n", request=ReadRequest(metric=metric)) == []


@pytest.mark.parametrize("name", ["r.csv", "r.jsonl"])
def test_long_texts_are_read_in_small_batches(read: Reader, name: str):
    text = "x" * (tabular.BATCH_SIZE // 2)  # longer than the limit of the module csv
    lines = [
        f"{text},{value}\n" if name == "r.csv" else f'{{"output": "{text}", "acc": {value}}}\n' for value in range(5)
    ]

    rows = read("".join(["output,acc\n" if name == "r.csv" else "", *lines]), name, ReadRequest("acc"))

    assert [row.value for row in rows] == [0, 1, 2, 3, 4]


def test_times_that_no_date_has_are_refused_in_parquet(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    path = parquet(tmp_path / "r.parquet", {"value": [0.5], "time": pyarrow.array([2**30], pyarrow.date32())})

    with pytest.raises(UsageError, match=r"r\.parquet cannot be read as Parquet"):
        list(format_of("table").rows(path, ReadRequest()))


def test_missing_column_is_refused_with_the_line_to_type(read: Reader):
    with pytest.raises(UsageError) as caught:
        read("method,value\ngrpo,1\n", request=ReadRequest(columns={"condition": "algorithm"}))

    assert 'has no column "algorithm"; it has method, value' in str(caught.value)
    assert 'such as columns = { condition = "NAME" }' in str(caught.value)


def test_table_without_a_condition_is_refused_with_the_line_to_type(tmp_path: Path):
    path = tmp_path / "results.csv"
    path.write_text("method,value\ngrpo,1\n")

    with pytest.raises(
        UsageError, match=r'path = ".*" and condition = "…" or, for a table, columns = { condition = "N'
    ):
        collect([Results(path=str(path), format="table")], Compare(), tmp_path)


def test_parquet_reads_the_steps_alone_that_a_run_needs(tmp_path: Path):
    steps = [0.0, 10.0, 20.0, 30.0, 0.0, 10.0, 20.0, None]
    columns = {
        "condition": ["grpo"] * 4 + ["rloo"] * 4,
        "seed": [1.0, 1.0, 1.0, 1.0, None, None, None, None],
        "step": steps,
        "metric": ["acc"] * 8,
        "value": [0.1, 0.2, float("nan"), 0.4, 0.5, 0.6, 0.7, 0.8],
        "problem": [7] * 8,
        "split": ["test"] * 3 + ["train"] + ["test"] * 4,
    }
    path = parquet(tmp_path / "r.parquet", columns, row_group_size=2)
    rows = format_of("table").rows

    ends = list(rows(path, ReadRequest("acc", "ends", where={"split": "test"})))
    until = list(rows(path, ReadRequest("acc", "ends", last_step=10)))

    assert [(row.condition, row.seed, row.step, row.value, row.line) for row in ends] == [
        ("grpo", 1, 0, 0.1, 1),
        ("grpo", 1, 20, None, 3),
        ("rloo", None, 0, 0.5, 5),
        ("rloo", None, 20, 0.7, 7),
        ("rloo", None, None, 0.8, 8),
    ]
    assert [row.step for row in until] == [0, 10, 20, 30, 0, 10, 20, None]
    assert [row.step for row in rows(path, ReadRequest("acc", "last3"))] == [0, 10, 20, 30, 0, 10, 20, None]
    assert {row.problem for row in until} == {"7"}
    assert list(rows(path, ReadRequest("loss"))) == []


def test_wide_parquet_table_has_the_steps_with_a_value(tmp_path: Path):
    path = parquet(tmp_path / "r.parquet", {"step": ["0", "10", "20", "30"], "eval/acc": [None, 0.2, 0.3, None]})

    rows = list(format_of("table").rows(path, ReadRequest("eval/acc", "ends")))

    assert [(row.step, row.value) for row in rows] == [(10, 0.2), (20, 0.3)]


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(MissingExtra, match=r"needs the package pyarrow: pip install '\.\[data\]'"):
        list(format_of("table").rows(tmp_path / "r.parquet", ReadRequest()))
