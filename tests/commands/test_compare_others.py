"""``retrain compare`` and ``retrain check`` with results of other tools, from the command line to the output."""

import json

import pytest
from helpers.campaigns import run_cli
from helpers.records import BASE, campaign

SEEDS = range(1, 9)
PATTERN = "outputs/{condition}/seed{seed}/{step}.jsonl"
FILE = f"""\
[compare]
metric = "acc"
baseline = "grpo"
conditions = ["grpo", "rloo"]
seeds = [1, 2, 3, 4, 5, 6, 7, 8]

[[results]]
path = "{PATTERN}"
"""


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The current directory with 2 conditions × 8 seeds in the format of verl's validation dumps; rloo solves one more
    of 20 problems in every run."""
    monkeypatch.chdir(tmp_path)
    for seed in SEEDS:
        for condition in ("grpo", "rloo"):
            for step in (0, 20, 40):
                solved = 6 + seed % 3 + (step // 20) * (2 if condition == "rloo" else 1)
                rows = [{"input": f"p{n}", "output": "", "gts": str(n), "score": float(n < solved), "step": step,
                         "acc": float(n < solved)} for n in range(20)]  # fmt: skip
                path = tmp_path / f"outputs/{condition}/seed{seed}/{step}.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "compare.toml").write_text(FILE)
    return tmp_path


def refusal(*arguments):
    result = run_cli(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr.strip()


def test_check_counts_the_runs(results):
    line = run_cli("check", "compare.toml").stdout.strip()

    assert line == (
        "compare.toml: fine, read 16 runs from verl: 2 conditions, 20 problems × 1 answer, steps 0, 40; problem sets "
        "equal; metric final:acc"
    )


@pytest.mark.parametrize(
    "arguments", [["compare.toml"], [PATTERN, "--metric", "acc"], ["outputs/*/*", "--metric", "acc"]]
)
def test_a_file_and_a_pattern_give_the_same_comparison(results, arguments):
    report = json.loads(run_cli("compare", *arguments, "--json").stdout)

    grpo, rloo = report["conditions"]
    assert (grpo["after_mean"], rloo["typical_difference"]) == (pytest.approx(0.45, abs=0.01), pytest.approx(0.1))
    assert (rloo["pairs"], rloo["standing"], rloo["p_value"]) == (8, "exploratory", 2**-7)


def test_the_terminal_shows_what_was_read_and_the_runs_that_are_missing(results):
    (results / "outputs/rloo/seed5/40.jsonl").unlink()
    for step in (0, 20):
        (results / f"outputs/rloo/seed5/{step}.jsonl").unlink()

    lines = run_cli("compare", "compare.toml").stdout.splitlines()

    assert lines[0].startswith("read 15 runs from verl: 2 conditions")
    assert lines[-1].endswith("1 missing run is not in the means: rloo seed 5.")


def test_runs_that_end_early_are_refused_or_unfinished(results):
    (results / "outputs/rloo/seed5/40.jsonl").unlink()

    line = refusal("compare", "compare.toml")
    assert refusal("check", "compare.toml") == line
    report = json.loads(run_cli("compare", "compare.toml", "--steps", "40", "--json").stdout)

    assert "rloo seed 5 ends after 20 steps" in line
    assert report["conditions"][1]["missing"][0]["reason"] == "it has no evaluation after 40 steps"


def test_a_declaration_before_the_results_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "compare.toml").write_text(FILE)

    assert "nothing matches outputs" in refusal("check", "compare.toml")
    assert run_cli("compare", "compare.toml", "--declare").exit_code == 0
    assert run_cli("check", "compare.toml").stdout == "compare.toml: fine, and there are no results yet\n"
    assert refusal("compare", "compare.toml").startswith("compare.toml: there are no results yet")


def test_a_report_has_the_whole_curve_and_nothing_of_the_current_directory(results):
    (results / "warmup/run").mkdir(parents=True)
    row = {"name": "heldout", "step": 0, "eval/heldout/correct_rate": 0.5}
    (results / "warmup/run/evals.jsonl").write_text(f"{json.dumps(row)}\n" * 2)

    lines = run_cli("compare", "compare.toml", "--report", "report.html").stdout.splitlines()
    json_only = run_cli("compare", "compare.toml", "--report", "report.html", "--json").stdout

    assert (lines[1], lines[-1]) == ("acc by condition", "report.html")
    assert json.loads(json_only)["metric"] == "acc"
    page = (results / "report.html").read_text()
    assert "[20, " in page
    assert "after the warm-up" not in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["outputs/*/*"], "the results have 2 metrics; name one: --metric acc, --metric score"),
        (["outputs/*/*", "--metric", "acc", "--unit", "percent"], 'command line  compare.unit  is "percent"'),
        (["compare.toml", "--metric", "score"], 'compare.toml has metric = "acc", and on the command line "score"'),
        (["compare.toml", "--format", "verl"], 'compare.toml names formats itself: write format = "verl" under'),
        (["compare.toml", "outputs"], "compare.toml describes all of a comparison"),
        (["outputs/*/*", "--declare"], "--declare needs a comparison file"),
        (["outputs/*/*", "--export", "a.csv"], "--export writes a campaign of retrain"),
        (["outputs"], "outputs and its subdirectories: no file in a known format. Type where the files are"),
    ],
)
def test_mistakes_on_the_command_line(results, arguments, message):
    assert refusal("compare", *arguments).startswith(message)


def test_retrains_campaigns_are_not_mixed_with_other_results(results):
    ours = campaign(results / "ours", {"grpo": list(BASE), "rloo": list(BASE)})

    assert f"retrain compare {ours} --export FILE.csv" in refusal("compare", ours, "outputs/*/*")
    assert "only --metric, --baseline, --json and --export apply" in refusal("compare", ours, "--unit", "share")
    assert "name one directory and no other option" in refusal("compare", ours, "--export", "a.csv", "--metric", "auc")
