import csv
import json
from pathlib import Path

import pytest
import tomli
from helpers.campaigns import ROOT, run_cli
from helpers.records import BASE, Played, campaign, shifted

from retrain.config.campaign import condition_name
from retrain.config.comparing import ComparisonFile
from retrain.errors import UsageError
from retrain.files import append_jsonl, read_json, read_jsonl, write_json
from retrain.records.foreign.collect import collect
from retrain.records.schema.base import Row
from retrain.verdicts.export import export
from retrain.verdicts.lock import Lock, read_lock, standing_of
from retrain.verdicts.pooling import compare_directories
from retrain.verdicts.results import METRIC
from retrain.verdicts.tables import judge_tables

CREATED = 1.7e9
HIGHER = shifted(0.03, noise=0.01)


def answered(folder: Path, results, **settings) -> Path:
    """A campaign with two graded answers to each of its 50 problems, at the first and the last evaluation."""
    campaign(folder, results, **settings)
    for run in (folder / "runs").iterdir():
        for row in read_jsonl(run / "evals.jsonl")[::2]:
            right = round(100 * row[METRIC])
            append_jsonl(run / "emergence/evaluations.jsonl", [
                {"step": row["step"], "name": "heldout", "problem_id": f"p{i % 50}", "sample": i // 50,
                 "correct": i < right, "num_tokens": 30, "tags": ["hard"]}
                for i in range(100)
            ])  # fmt: skip
    write_json(folder / "manifest.json", read_json(folder / "manifest.json") | {"created": CREATED, "name": "c"})
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_has_numbers_and_the_answers_at_both_ends(tmp_path):
    states = {"b+none_s2": "failed", "a+none_s3": "interrupted"}
    out = answered(tmp_path / "c", {"a+none": BASE, "b+none": HIGHER}, states=states)
    (out / "runs/b+none_s2/evals.jsonl").unlink()
    append_jsonl(out / "runs/a+none_s1/timing_spans.jsonl", [
        {"step": 0, "spans": [{"name": "eval", "wall_end": 1.8e9 + 0.25}, {"name": "update", "wall_end": 2e9}]},
        {"step": 19, "spans": [{"name": "eval", "wall_end": 1.8e9 + 60}]},
    ])  # fmt: skip
    lines = export(out, tmp_path / "table.csv")
    assert lines == [str(tmp_path / f"table.{end}") for end in ("csv", "toml", "toml.lock")]
    rows = rows_of(tmp_path / "table.csv")
    first = [row for row in rows if row["run"] == "a+none_s1"]
    numbers = [row for row in first if not row["problem"]]
    assert [(row["step"], row["value"]) for row in numbers] == [("0", "0.5"), ("10", "0.55"), ("20", "0.6")]
    assert [row["time"] for row in numbers[::2]] == ["1800000000.25", "1800000060.0"]
    assert {(row["condition"], row["seed"], row["set"], row["metric"]) for row in first} == {
        ("a", "1", "heldout", "correct_rate")
    }
    answers = [row for row in first if row["problem"]]
    assert {(row["step"], row["sample"]) for row in answers} == {("0", "0"), ("0", "1"), ("20", "0"), ("20", "1")}
    assert sum(int(row["value"]) for row in answers if row["step"] == "20") == 60
    states = {row["run"]: row["state"] for row in rows}
    assert (states["a+none_s1"], states["b+none_s2"], states["a+none_s3"]) == ("done", "failed", "unfinished")


def test_the_declaration_is_that_of_the_campaign(tmp_path):
    settings = {"campaign": {"equivalence_margin": 0.02, "primary_metric": "last3"}}
    out = answered(tmp_path / "c", {"a+none": BASE, "b+none": HIGHER}, config=settings)
    export(out, tmp_path / "t.csv")
    file = tomli.loads((tmp_path / "t.toml").read_text())
    assert file["results"] == [{"path": "t.csv", "format": "table"}]
    assert file["compare"] == {
        "metric": "last3:correct_rate", "higher_is_better": True, "unit": "share", "baseline": "a",
        "conditions": ["a", "b"], "seeds": [1, 2, 3, 4, 5, 6, 7, 8], "equivalence_margin": 0.02,
    }  # fmt: skip
    lock = Lock.from_row(read_json(tmp_path / "t.toml.lock"))
    assert (lock.unix, lock.sha256) == (CREATED, lock.digest)
    manifest = read_json(out / "manifest.json") | {"registry": "2026-11-28T10:53:29+00:00"}
    write_json(out / "manifest.json", manifest)
    export(out, tmp_path / "registered.csv")
    assert read_json(tmp_path / "registered.toml.lock")["time"] == "2026-11-28T10:53:29+00:00"


def test_other_metrics_are_exported_as_numbers(tmp_path):
    settings = {"campaign": {"primary_metric": "final:mean_length"}}
    export(answered(tmp_path / "c", {"a": BASE, "b": HIGHER}, config=settings), tmp_path / "t.csv")
    compare = tomli.loads((tmp_path / "t.toml").read_text())["compare"]
    assert (compare["metric"], compare["unit"]) == ("mean_length", "number")
    assert "higher_is_better" not in compare
    values = [row["value"] for row in rows_of(tmp_path / "t.csv") if row["metric"] == "mean_length"]
    assert values[:3] == ["31.0"] * 3


def test_training_metrics_have_one_value_per_run(tmp_path):
    settings = {"campaign": {"primary_metric": "final:num_tokens"}}
    lines = export(answered(tmp_path / "c", {"a": BASE, "b": HIGHER}, config=settings), tmp_path / "t.csv")
    assert "one value for each run" in lines[-1]
    assert tomli.loads((tmp_path / "t.toml").read_text())["compare"]["metric"] == "training/num_tokens"
    values = {(row["step"], row["value"]) for row in rows_of(tmp_path / "t.csv") if row["set"] == "training"}
    assert values == {("20", "1950.0")}  # the mean over the last tenth of the steps


def test_numbers_of_steps_that_differ_are_named_as_a_loss(tmp_path):
    out = answered(tmp_path / "c", {"a": BASE, "b": HIGHER})
    declared = {"conditions": ["a", "b"], "max_steps": {"a": 20, "b": 15}}
    write_json(out / "manifest.json", read_json(out / "manifest.json") | {"declared": declared})
    note = "note: conditions were declared with different numbers of steps: compare refuses the table"
    assert note in export(out, tmp_path / "t.csv")


def test_an_exploratory_comparison_gets_no_lock(tmp_path):
    played = Played(tmp_path, rule="off")
    for seed in range(1, 9):
        played.finish(seed)
    played.manifest.files.flush()
    evals = tmp_path / "out/runs/rloo+none_s3/evals.jsonl"
    evals.write_text(evals.read_text().replace("0.63", "0.93"))
    lines = export(tmp_path / "out", tmp_path / "t.csv")
    assert "no lock is written, the comparison is exploratory: protocol deviation: evals.jsonl" in lines[-1]
    assert not (tmp_path / "t.toml.lock").exists()


def test_the_interim_analysis_is_named_as_a_loss(tmp_path):
    played = Played(tmp_path)
    for seed in range(1, 9):
        played.finish(seed)
    played.manifest.files.flush()
    lines = export(tmp_path / "out", tmp_path / "t.csv")
    assert lines[-1] == "note: the table is judged without the campaign's interim analysis"
    assert f"# {lines[-1]}\n" in (tmp_path / "t.toml").read_text()


def judged(path: Path) -> Row:
    """The comparison of a file, as ``retrain compare FILE.toml`` makes it."""
    file = ComparisonFile.model_validate(tomli.loads(path.read_text()))
    tables = collect(file.results, file.compare, path.parent)
    return judge_tables(tables, file.compare, standing_of(read_lock(path), file, tables)).comparison.to_json()


def rounded(condition: Row) -> Row:
    text = json.dumps({key: condition[key] for key in SAME})
    return json.loads(text, parse_float=lambda number: round(float(number), 9))


SAME = ("verdict", "standing", "after_values", "before", "interval", "differences", "typical_difference",
        "difference_interval", "difference_new_problems", "p_value", "finished", "iqm")  # fmt: skip


@pytest.mark.parametrize(("results", "campaign_keys", "states", "verdict"), [
    ({"a+none": BASE, "b+none": HIGHER}, {}, {}, "better"),
    ({"b+none": HIGHER, "a+none": BASE}, {}, {}, "worse"),
    ({"a": BASE, "b": BASE}, {"equivalence_margin": 0.02}, {}, "typical runs alike"),
    ({"a": BASE, "b": HIGHER, "c": shifted(0.05, 0.01)}, {"primary_metric": "auc"}, {}, "better"),
    ({"a": BASE, "b": HIGHER}, {"primary_metric": "final:mean_length"}, {}, "no difference shown"),
    ({"a": BASE, "b": HIGHER}, {"primary_metric": "final:hard/correct_rate"}, {}, "better"),
    ({"a": BASE, "b": HIGHER}, {}, {"b_s2": "failed"}, "interim: 7 of 8 pairs"),
    ({"a": BASE[:5], "b": HIGHER[:5]}, {}, {}, "cannot tell: 5 pairs of seeds, 6 needed"),
])  # fmt: skip
def test_table_and_directory_have_the_same_verdict(tmp_path, results, campaign_keys, states, verdict):
    out = answered(tmp_path / "c", results, config={"campaign": campaign_keys}, states=states)
    export(out, tmp_path / "t.csv")
    from_directory, from_table = compare_directories([out]), judged(tmp_path / "t.toml")
    assert from_table["conditions"][1]["verdict"] == verdict
    for expected, condition in zip(from_directory["conditions"], from_table["conditions"], strict=True):
        assert condition_name(expected["label"]) == condition["label"]
        assert rounded(condition) == rounded(expected)
    (tmp_path / "t.toml.lock").unlink()
    exploratory = judged(tmp_path / "t.toml")["conditions"][1]
    assert exploratory["standing"] == "exploratory"
    assert exploratory["difference_interval"] == from_table["conditions"][1]["difference_interval"]


def test_the_command_exports_and_reads_the_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answered(tmp_path / "c", {"a": BASE[:6], "b": HIGHER[:6]})
    assert run_cli("compare", "c", "--export", "t.csv").stdout.split() == ["t.csv", "t.toml", "t.toml.lock"]
    arguments = (["c"], ["t.toml"], ["t.csv", "--format", "table"])
    reports = [json.loads(run_cli("compare", *each, "--json").stdout) for each in arguments]
    conditions = [rounded(report["conditions"][1]) for report in reports]
    assert conditions[0] == conditions[1]
    assert conditions[2] == conditions[1] | {"standing": "exploratory", "verdict": "exploratory"}


def test_the_example_of_the_documentation():
    path = ROOT / "docs/examples/results.toml"
    baseline, condition = judged(path)["conditions"]
    assert (baseline["label"], condition["label"]) == ("grpo", "maxrl+gtpo_sepa")
    assert (condition["verdict"], condition["standing"], condition["p_value"]) == ("worse", "declared", 0.03125)
    assert condition["difference"] == pytest.approx(-0.1283, abs=1e-4)
    assert condition["difference_interval"] == pytest.approx([-0.23, -0.05], abs=1e-6)
    assert (baseline["after_mean"], condition["after_mean"]) == pytest.approx((0.823, 0.695), abs=1e-3)
    assert path.with_suffix(".csv").stat().st_size < 300_000


@pytest.mark.parametrize("name", ["t.csv", "t.toml", "t.toml.lock"])
def test_existing_files_are_left_as_they_are(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match="exists and is left as it is"):
        export(answered(tmp_path / "c", {"a": BASE, "b": HIGHER}), tmp_path / "t.csv")
    assert [path.name for path in tmp_path.glob("t.*")] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_the_table_has_to_be_csv(tmp_path):
    with pytest.raises(UsageError, match=r"has to end in \.csv"):
        export(tmp_path, tmp_path / "t.parquet")
