"""Edits of a campaign's records, and declarations made after results were there: none passes without a word."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.campaigns import SUBJECT_REWARDS, run_cli, toy_toml
from helpers.models import campaign_head, qwen3_directory
from helpers.pages import client_of, get
from helpers.records import seal_of

from retrain.files import read_json, read_jsonl, write_json

SEEDS = list(range(1, 9))
RUN = "rloo+none_s3"
EVALS, ANSWERS = f"runs/{RUN}/evals.jsonl", f"runs/{RUN}/emergence/evaluations.jsonl"


def command(*words: str | Path, status: int = 0) -> str:
    done = run_cli(*words)
    assert done.exit_code == status, done.output
    return done.output


def file(home: Path, name: str, seeds: list[int]) -> Path:
    path = home / f"{name}.toml"
    head = campaign_head(("grpo", "none"), ("rloo", "none"), seeds=seeds, max_steps=1, sequential="off")
    training = {"batch_size": 1, "group_size": 2, "max_tokens": 4}
    path.write_text(head + toy_toml(home / "model", training=training, evaluation={"problems": 3}))
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """A folder with model, rewards, and the finished campaign ``logs/first`` of 8 seeds in its registry."""
    home = tmp_path_factory.mktemp("attacked")
    (home / "toyrewards.py").write_text(SUBJECT_REWARDS)
    qwen3_directory(home / "model", ["12+34=? 7*46-58+23=?", "let me check 0 2 4 6 8"])
    command("train", file(home, "first", SEEDS), "--out", home / "logs/first", "--plain")
    return home


@pytest.fixture
def logs(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained / "logs", tmp_path / "logs"))


@pytest.fixture
def first(logs) -> Path:
    return logs / "first"


def edit_manifest(directory: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """``change`` gets the manifest and its entry of ``RUN``."""
    content = read_json(directory / "manifest.json")
    change(content, next(run for run in content["runs"] if run["run_id"] == RUN))
    write_json(directory / "manifest.json", content)


def edit_rows(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    rows = read_jsonl(path)
    for row in rows:
        change(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def outputs(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """The comparison as JSON, and the texts of the four outputs."""
    report = json.loads(command("compare", directory, "--json"))
    page = get(client_of(directory), "/api/campaign", at=directory.name, wait_ms=60_000)["comparison"]
    html = Path(command("report", directory).strip()).read_text()
    console = command("compare", directory).replace("\n", " ")
    return report, [console, json.dumps(report), html, json.dumps(page)]


def said(directory: Path, *words: str) -> str:
    """The standing after an attack, once every output is seen to have these words and no verdict."""
    report, texts = outputs(directory)
    for text in texts:
        for word in words:
            assert word in text
    (other,) = report["conditions"][1:]
    assert other["verdict"].startswith(("interim", "exploratory"))
    return other["standing"]


def test_a_campaign_that_nobody_touched_is_declared_and_has_no_remark(first):
    report, texts = outputs(first)
    assert report["standing"] == "declared"
    for words in ("deviation", "ealed", "egist", "declaration of this"):
        assert not any(words in text for text in texts), words
    declared = report["declared"]
    assert (declared["seeds"], declared["max_steps"]) == (SEEDS, {"grpo+none": 1, "rloo+none": 1})
    assert set(declared["data"]) == set(declared["settings"]) == {"grpo+none", "rloo+none"}
    lines = read_jsonl(first.parent / "registry.jsonl")
    assert [line["kind"] for line in lines] == ["declaration"] + ["run"] * 16
    entry = next(run for run in read_json(first / "manifest.json")["runs"] if run["run_id"] == RUN)
    line = next(line for line in lines if line.get("run_id") == RUN)
    assert line["sha256"] == entry["seal"]["evaluations_sha256"]
    assert (line["data"], line["condition"]) == (declared["data"]["rloo+none"], declared["settings"]["rloo+none"])
    assert line["result"] == {"heldout": read_jsonl(first / EVALS)[-1]["eval/heldout/correct_rate"]}
    assert entry["seal"] | {"data": "data"} == seal_of(first / "runs" / RUN)


def test_an_entry_that_is_removed_from_the_manifest(first):
    edit_manifest(first, lambda content, entry: content["runs"].remove(entry))
    assert said(first, RUN, "had finished with", "is not in the manifest") == "exploratory"
    (first.parent / "registry.jsonl").unlink()
    assert said(first, f"1 missing run is not in the means: {RUN}", "does not have its declaration") == "interim"


def test_a_run_directory_that_is_deleted(first):
    shutil.rmtree(first / "runs" / RUN)
    assert said(first, f"1 unfinished run is not in the means: {RUN}", "missing seeds could change") == "interim"


def test_a_state_that_is_set_to_failed(first):
    edit_manifest(first, lambda content, entry: entry.update(state="failed"))
    assert said(first, f"{RUN} had finished with", "and is failed") == "exploratory"
    (first.parent / "registry.jsonl").unlink()
    assert said(first, f"1 failed run is not in the means: {RUN}", "missing seeds could change") == "interim"


def test_a_seed_that_is_changed(first):
    edit_manifest(first, lambda content, entry: entry.update(seed=99))
    assert said(first, "protocol deviation: 1 seed was added: 99", "the seed in the manifest is not") == "exploratory"


def test_seeds_that_are_exchanged(first):
    """Pairs would be other ones."""

    def exchange(content: dict[str, Any], entry: dict[str, Any]) -> None:
        other = next(run for run in content["runs"] if run["run_id"] == "rloo+none_s4")
        entry["seed"], other["seed"] = other["seed"], entry["seed"]

    edit_manifest(first, exchange)
    assert said(first, f"the seed in the manifest is not that of the run (rloo+none_s4, {RUN})") == "exploratory"


def test_a_campaign_seed_that_is_changed_unpairs_a_run(first):
    config = first / "runs" / RUN / "config.json"
    content = read_json(config)
    content["campaign"]["seed"] = 5
    write_json(config, content)
    assert said(first, f"the settings are not those that were declared ({RUN})") == "exploratory"


def raised(row: dict[str, Any]) -> None:
    row["eval/heldout/correct_rate"] = 1.0


def test_evaluations_that_are_edited(first):
    edit_rows(first / EVALS, raised)
    assert said(first, f"evals.jsonl is not what was recorded ({RUN})", "its completions were graded") == "exploratory"
    edit_rows(first / ANSWERS, lambda row: row.update(correct=True))  # and then the grades and the hashes too

    def seal_again(content: dict[str, Any], entry: dict[str, Any]) -> None:
        entry["seal"] = seal_of(first / "runs" / RUN) | {"data": entry["seal"]["data"]}

    edit_manifest(first, seal_again)
    assert said(first, f"{RUN} had finished with", "and has other evaluations") == "exploratory"


def test_hashes_that_are_removed(first):
    edit_rows(first / EVALS, raised)
    edit_manifest(first, lambda content, entry: entry.pop("seal"))
    assert said(first, f"the manifest has lost the hashes of its evaluations ({RUN})") == "exploratory"


def test_evaluations_that_are_copied_from_another_run(first):
    for name in ("evals.jsonl", "emergence/evaluations.jsonl"):
        shutil.copy(first / "runs/rloo+none_s7" / name, first / "runs" / RUN / name)
    one, other = (f"{name} is not what was recorded ({RUN})" for name in ("evals.jsonl", "emergence/evaluations.jsonl"))
    assert said(first, one, other) == "exploratory"


def test_a_declaration_that_is_removed(first):
    edit_manifest(first, lambda content, entry: content.pop("declared"))
    assert "no declaration, although runs have begun" in command("resume", first, status=2)


def test_a_manifest_that_is_deleted_and_declared_anew(trained, first):
    (first / "manifest.json").unlink()
    before = sorted(first.rglob("*"))
    for words in (["train", file(trained, "first", SEEDS[:4]), "--out", first], ["resume", first]):
        for accepted in ([], ["--accept-changes"]):
            assert "no manifest.json" in command(*words, *accepted, status=2)
    for name in ("compare", "report"):
        assert "it has no manifest.json" in command(name, first, status=2)
    assert sorted(first.rglob("*")) == before
    shutil.rmtree(first / "runs")
    (first / "plan.json").unlink()
    command("train", file(trained, "again", SEEDS[:4]), "--out", first, "--plain")
    assert said(first, "declared anew in its directory after 16 runs had finished there") == "exploratory"


def test_the_best_four_of_eight_seeds_declared_under_a_new_name(trained, logs):
    best = file(trained, "best", [2, 3, 5, 7])
    shutil.rmtree(logs / "first")
    command("train", best, "--out", logs / "best", "--plain")
    known = "seeds had finished before they were declared (2, 3, 5, 7; in first)"
    earlier = "Second declaration of this comparison; before it: first (8 seeds, 16 runs finished, directory gone)."
    assert said(logs / "best", f"protocol deviation: {known}", earlier) == "exploratory"
    # without the registry it can be had, and is said
    command("train", best, "--out", logs / "quiet", "--plain", "--no-registry")
    report, texts = outputs(logs / "quiet")
    assert report["standing"] == "declared"
    for text in texts:
        assert "Not registered (--no-registry, or" in text
    assert {line["directory"] for line in read_jsonl(logs / "registry.jsonl")} == {"first", "best"}


def test_the_same_campaign_again_is_counted_and_stays_declared(trained, logs):
    command("train", file(trained, "best", SEEDS[:4]), "--out", logs / "a", "--plain")
    command("train", file(trained, "best", SEEDS[:4]), "--out", logs / "b", "--plain")
    report, texts = outputs(logs / "b")
    assert report["standing"] == "declared"
    for text in texts:
        assert "Third declaration of this comparison; before it: first (8 seeds, 16 runs finished), a (4" in text


def test_a_registry_of_another_program_is_left_alone(trained, tmp_path):
    (tmp_path / "registry.jsonl").write_text('{"mine": 1}\n')
    out = tmp_path / "out"
    path = file(trained, "small", [1])
    assert "is not a registry of retrain" in command("train", path, "--out", out, status=2)
    assert (tmp_path / "registry.jsonl").read_text() == '{"mine": 1}\n'
    assert not out.exists()
