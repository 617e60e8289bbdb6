"""The files of runs are found by path, and their rows become one table for each run."""

import json
import os

import pytest

from retrain.config.comparing import Compare, Results
from retrain.errors import RetrainError, UsageError
from retrain.records.foreign import paths
from retrain.records.foreign.collect import collect
from retrain.records.foreign.table import Format, ResultRow

READER = """
import json
from retrain.records.foreign.table import ResultRow

def rows(path):
    paths = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            yield ResultRow(**{"metric": "acc", "line": number, **json.loads(line)})

def broken(path):
    raise ValueError("no number")
"""


@pytest.fixture
def write(tmp_path, monkeypatch, import_path):
    """A function that writes rows to a file below the current directory, where the module ``own_reader`` is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_reader.py").write_text(READER)

    def write_rows(name, *rows):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write_rows


@pytest.fixture
def gather(tmp_path, write):
    """A function that collects the runs at these paths."""

    def tables(*paths, **compare):
        entries = [Results(path=path, format="own_reader:rows") if isinstance(path, str) else path for path in paths]
        return collect(entries, Compare(**compare), tmp_path)

    return tables


@pytest.fixture
def tool(monkeypatch):
    """A tool whose format is the only one that is known; its files are named ``eval*.jsonl``."""

    def rows(path, request):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            yield ResultRow(**{"metric": "acc", "line": number, **json.loads(line)})

    def use(patterns=("eval*.jsonl",), **options):
        known = Format("Tool", patterns, lambda path: path.name.startswith("eval"), rows, **options)
        monkeypatch.setattr(paths, "FORMATS", {"tool": "tool"})
        monkeypatch.setattr(paths, "format_of", lambda name: known)

    use()
    return use


def row(value, step=10, **others):
    return {"value": value, "step": step, **others}


def numbers(table):
    return next(iter(table.numbers.values()))


def answers(table):
    return next(iter(table.answers.values()))


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("out/{condition}/seed{seed}.jsonl", "out/grpo/seed2.jsonl"),
        ("out/{condition}_s{seed}.jsonl", "out/grpo_s2.jsonl"),
        ("out/**/{condition}/s-{seed}*", "out/a/b/grpo/s-2-again.jsonl"),
        ("out/{condition}/{condition}-{seed}.jsonl", "out/grpo/grpo-2.jsonl"),
        ("out/{run}.jsonl", "out/grpo-seed2.jsonl"),
        ("out/*", "out/grpo_s2/val.jsonl"),
        ("out/grpo_s2", "out/grpo_s2/val.jsonl"),
    ],
)
def test_the_path_names_condition_and_seed(write, gather, pattern, name):
    write(name, row(0.5))
    write("out/.hidden/grpo_s3.jsonl", row(0.1))

    (table,) = gather(pattern)

    assert (table.condition, table.seed, numbers(table)) == ("grpo", 2, {10: 0.5})


def test_a_folder_of_runs_names_those_without_results(write, gather, tool):
    write("out/grpo_s1/eval.jsonl", row(0.5))
    write("out/rloo_s1/eval.jsonl")
    write("out/rloo_s2/log.txt")
    write("out/plots/figure.txt")

    tables = gather(Results(path="out"))

    assert [(table.name, table.state) for table in tables] == [
        ("grpo seed 1", "unknown"),
        ("rloo seed 1", "failed"),
        ("rloo seed 2", "failed"),
    ]
    assert not tables[1].numbers


def test_a_directory_that_is_named_as_a_run_and_empty_is_a_failed_run(write, gather, tool):
    write("grpo_s1/eval.jsonl", row(0.5))
    write("grpo_s2/log.txt")

    tables = gather(Results(path="grpo_s1"), Results(path="grpo_s2"))

    assert [(table.name, table.state) for table in tables] == [("grpo seed 1", "unknown"), ("grpo seed 2", "failed")]


@pytest.mark.parametrize("path", ["out/{condition}", "out/*/seed*", "out/{condition}/seed{seed}", "out/**/eval.jsonl"])
def test_directories_of_seeds_inside_those_of_conditions(write, gather, tool, path):
    for condition, seed in [("grpo", 1), ("grpo", 2), ("rloo", 1), ("rloo", 2)]:
        write(f"out/{condition}/seed{seed}/eval.jsonl", row(0.5))

    tables = gather(Results(path=path))

    assert [(table.condition, table.seed) for table in tables] == [("grpo", 1), ("grpo", 2), ("rloo", 1), ("rloo", 2)]


def test_a_run_directory_whose_files_lie_deep_is_one_run(write, gather, tool):
    tool(patterns=("**/eval*.jsonl",))
    write("grpo_s1/dumps/step_1/eval.jsonl", row(0.5, step=1))
    write("grpo_s1/dumps/step_2/eval.jsonl", row(0.6, step=2))

    (table,) = gather(Results(path="grpo_s1"))

    assert (table.condition, table.seed, numbers(table)) == ("grpo", 1, {1: 0.5, 2: 0.6})


def test_one_table_holds_many_runs(write, gather):
    write("sheet.jsonl", *[row(0.5, condition=name, seed=seed) for name in ("grpo", "rloo") for seed in (1, 2)])

    tables = gather("sheet.jsonl")

    assert [table.name for table in tables] == ["grpo seed 1", "grpo seed 2", "rloo seed 1", "rloo seed 2"]


@pytest.mark.parametrize(
    ("compare", "kept"),
    [
        ({}, [0, 50]),
        ({"metric": "last3:acc"}, [0, 30, 40, 50]),
        ({"metric": "auc:heldout/acc"}, [0, 10, 20, 30, 40, 50]),
        ({"steps": 40}, [0, 40, 50]),
        ({"steps": 40, "metric": "last3:acc"}, [0, 20, 30, 40, 50]),
    ],
)
def test_only_the_steps_that_the_metric_needs_are_read(write, gather, compare, kept):
    steps = [30, 0, 50, 10, 40, 20]
    for step in steps:
        write(f"by_file/grpo_s1/{step}.jsonl", {"value": 1.0, "problem": "a"})
    write("by_row/grpo_s1.jsonl", *[row(1.0, step, problem=problem) for problem in "ab" for step in steps])
    for step in {*steps} - {*kept}:
        write(f"by_file/grpo_s1/{step}.jsonl").write_text("not to be opened")

    (by_file,) = gather("by_file/{condition}_s{seed}/{step}.jsonl", **compare)
    (by_row,) = gather("by_row/{condition}_s{seed}.jsonl", **compare)

    assert sorted(answers(by_file)) == sorted(answers(by_row)) == kept
    assert answers(by_row)[kept[-1]] == {"a": [1.0], "b": [1.0]}


def test_answers_are_ordered_by_sample_and_nan_is_not_graded(write, gather):
    graded = [row(0.0, problem="a", sample=2), row(1.0, problem="a"), row(float("nan"), problem="a", sample=1)]
    write("grpo_s1.jsonl", *graded, graded[0], row(1.0, problem="b", sample=1), row(float("nan"), metric="loss"))

    (table,) = gather("grpo_s1.jsonl", metric="acc")

    assert table.answers == {("heldout", "acc"): {10: {"a": [1.0, None, 0.0], "b": [1.0]}}}
    assert not table.numbers


def test_rows_without_a_step_are_one_checkpoint(write, gather):
    write("grpo_s1.jsonl", {"value": 0.5})
    write("rloo_s1.jsonl", {"value": 0.5}, row(0.6))

    assert numbers(gather("grpo_s1.jsonl")[0]) == {0: 0.5}
    with pytest.raises(UsageError, match=r"rloo seed 1.*some rows name a step and some do not"):
        gather("rloo_s1.jsonl")


def test_the_latest_value_counts_where_a_run_was_resumed(write, gather, tool):
    tool(latest_counts=True)
    write("grpo_s1/eval_2.jsonl", row(0.6, time=20.0), row(0.9, step=20, time=21.0))
    write("grpo_s1/eval_3.jsonl", row(0.4, time=10.0), row(0.9, step=20, time=11.0))

    (table,) = gather(Results(path="grpo_s1"))

    assert numbers(table) == {10: 0.6, 20: 0.9}
    assert (table.started, table.has_times) == (10.0, True)


def test_without_times_in_the_rows_a_run_began_with_its_oldest_file(write, gather):
    for step in (10, 20, 30):
        os.utime(write(f"grpo_s1/{step}.jsonl", row(0.5, step)), (900 + step, 1000 - step))

    (table,) = gather("{condition}_s{seed}/{step}.jsonl")

    assert (table.started, table.has_times) == (970.0, False)


def test_the_state_is_the_worst_that_a_row_tells(write, gather):
    write("grpo_s1.jsonl", row(0.5, state="done"), row(0.5, step=20, state="unfinished"))

    assert gather("grpo_s1.jsonl")[0].state == "unfinished"


def test_path_and_section_name_a_run_before_its_rows_do(write, gather):
    write("grpo/20_seed1.jsonl", row(0.5, condition="org/model", seed=7, set="other", step=3))

    (table,) = gather("{condition}/{step}_seed{seed}.jsonl")
    entry = Results(path="grpo/*.jsonl", format="own_reader:rows", condition="rloo", seed=2)
    (of_section,) = gather(entry)

    assert (table.condition, table.seed, numbers(table)) == ("grpo", 1, {20: 0.5})
    assert (of_section.condition, of_section.seed, numbers(of_section)) == ("rloo", 2, {3: 0.5})


def test_answers_without_a_number_are_numbered_in_every_file(write, gather):
    for name in ("1.jsonl", "2.jsonl"):
        write(f"grpo_s1/{name}", *[row(value, problem="a", sample=None) for value in (1.0, 0.0, 1.0)])

    (table,) = gather("{condition}_s{seed}/*.jsonl")

    assert answers(table) == {10: {"a": [1.0, 0.0, 1.0]}}  # the second file repeats the first


def test_files_that_are_named_by_seeds_are_a_run_each(write, gather, tool):
    """verl's logger writes ``<project>/<experiment>.jsonl``."""
    tool(patterns=("*.jsonl",))
    write("project/eval_grpo_s1.jsonl", row(0.5))
    write("project/eval_grpo_s2.jsonl", row(0.6))

    tables = gather(Results(path="project"))

    assert [(table.condition, table.seed, numbers(table)) for table in tables] == [
        ("eval_grpo", 1, {10: 0.5}),
        ("eval_grpo", 2, {10: 0.6}),
    ]


def test_directories_of_conditions_may_have_a_file_for_each_seed(write, gather, tool):
    tool(patterns=("*.jsonl",))
    for condition in ("grpo", "rloo"):
        write(f"project/{condition}/eval_s1.jsonl", row(0.5))
        write(f"project/{condition}/eval_s2.jsonl", row(0.6))

    tables = gather(Results(path="project/{condition}"))

    assert [(table.condition, table.seed) for table in tables] == [("grpo", 1), ("grpo", 2), ("rloo", 1), ("rloo", 2)]


def test_links_to_nothing_or_in_circles_are_no_runs(write, gather, tmp_path):
    write("out/grpo/seed1.jsonl", row(0.5))
    for link, target in (("latest", tmp_path / "gone"), ("circle", "circle"), ("up", "..")):
        (tmp_path / "out" / link).symlink_to(target)
    (tmp_path / "out/grpo/seed2.jsonl").symlink_to(tmp_path / "gone")

    assert len(gather("out/{condition}/seed{seed}.jsonl")) == 1
    assert len(gather("out/*/*.jsonl")) == 1


def test_a_file_without_read_permission_is_not_left_out(write, gather, tool, monkeypatch):
    write("grpo_s1/eval_1.jsonl", row(0.5))
    secret = write("grpo_s1/eval_2.jsonl", row(0.6))
    monkeypatch.setattr(paths.os, "access", lambda path, mode: path != secret)

    with pytest.raises(UsageError, match=r"eval_2.jsonl cannot be read: permission denied"):
        gather(Results(path="grpo_s1"))


@pytest.mark.parametrize(
    ("files", "pattern", "message"),
    [
        ({}, "{condition}/x.jsonl", r"nothing matches {condition}/x.jsonl: .*own_reader.py is a file"),
        ({"a/val": []}, "a/vals/x", r"^nothing matches a/vals/x: .*a has no vals; did you mean val\?"),
        ({"grpo_s1.jsonl": [row(0.5)]}, "{condition}_s{sed}.jsonl", r"{sed} is not a placeholder; there are"),
        ({"x/grpo_s1.jsonl": [row(0.5)], "y/grpo_s1.jsonl": [row(0.5)]}, "*/*.jsonl",
         r"two runs of grpo with seed 1: .*x/grpo_s1.jsonl and .*y/grpo_s1.jsonl"),
        ({"grpo_s1.jsonl": [row(0.5), row(0.6)]}, "*.jsonl",
         r"grpo_s1.jsonl:1 and .*grpo_s1.jsonl:2 have different values of acc .*step 10\); remove .* of two runs"),
        ({"grpo_s1.jsonl": [row(0.5, None), row(0.6, None)]}, "*.jsonl",
         r"have different values of acc \(grpo seed 1, set heldout\); remove"),
        ({"grpo_s1.jsonl": [row(0.5, problem="p"), row(0.6, problem="p")]}, "*.jsonl", "problem p, answer 0"),
        ({"a.jsonl": [row(0.5)]}, "a.jsonl", "a.jsonl names no condition"),
        ({"a.jsonl": [row(0.5, run="1")]}, "a.jsonl", "a.jsonl names no condition"),
        ({"grpo_s1.jsonl": [row(0.5), row(0.5, metric="score")]}, "*.jsonl",
         "2 metrics; name one: --metric acc, --metric score"),
        ({"grpo_s1.jsonl": [row(0.5, set="a"), row(0.5, set="b")]}, "*.jsonl",
         "2 metrics; name one: --metric a/acc, --metric b/acc"),
        ({"grpo_s1.jsonl": []}, "*.jsonl", "no results in .*grpo_s1.jsonl"),
    ],
)  # fmt: skip
def test_mistakes(write, gather, files, pattern, message):
    for name, rows in files.items():
        write(name, *rows)

    with pytest.raises(UsageError, match=message):
        gather(pattern)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "verll"}, 'format "verll" is unknown: did you mean verl'),
        (
            {"format": "own_reader:broken"},
            r"'own_reader:broken' failed on .*: ValueError: no number \(own_reader.py:\d+\)",
        ),
        ({"format": "own_reader:nothing"}, "has no function 'nothing'"),
        ({"format": "own_reader:rows"}, "'own_reader:rows' yields value = '0.5', which is not a number"),
    ],
)
def test_mistakes_in_the_format(write, gather, options, message):
    write("grpo_s1.jsonl", row("0.5"))

    with pytest.raises(RetrainError, match=message):
        gather(Results(path="grpo_s1.jsonl", **options))


def test_a_file_in_no_known_format(write, gather, tool):
    write("grpo_s1.txt", row(0.5))

    with pytest.raises(UsageError, match=r"grpo_s1.txt is in no known format. Formats: trl, .*; name one by format = "):
        gather(Results(path="grpo_s1.txt"))


def test_deep_nesting_is_refused(write, gather, tool):
    write("grpo_s1/eval.jsonl").write_text("[" * 100_000)

    with pytest.raises(UsageError, match=r"eval.jsonl is nested too deeply"):
        gather(Results(path="grpo_s1"))


def test_a_missing_metric_is_named_with_similar_ones(write, gather):
    write("grpo_s1.jsonl", row(0.5, metric="accuracy"), row(0.5, metric="loss"))

    with pytest.raises(UsageError, match="no file has the metric acuracy; type --metric accuracy"):
        gather("grpo_s1.jsonl", metric="acuracy")


def test_runs_that_are_declared_may_still_be_missing(write, tmp_path):
    write("grpo_s1.jsonl", row(0.5))
    entries = [Results(path=path, format="own_reader:rows") for path in ("{condition}_s{seed}.jsonl", "later/*")]

    assert len(collect(entries, Compare(), tmp_path, allow_missing=True)) == 1
    assert collect(entries[1:], Compare(), tmp_path, allow_missing=True) == []
    assert not collect(entries[:1], Compare(metric="other"), tmp_path, allow_missing=True)[0].numbers
