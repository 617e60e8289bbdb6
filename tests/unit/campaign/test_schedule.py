import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.campaigns import campaign, run_cli, train

from retrain.config import load, parse_dict
from retrain.config.evaluation import last_evaluations, part_evaluations, whole_evaluations
from retrain.errors import ConfigError, UsageError
from retrain.files import read_json, read_jsonl
from retrain.verdicts.pooling import compare_directories
from retrain.verdicts.report import write_report
from retrain.verdicts.results import METRIC, Measure, RunResult

PART = "heldout~part"
SETS = ("evaluation.schedule=verdict", "evaluation.problems=17", "evaluation.samples=2", "training.eval_every=3")
SMALL = ("squeeze.enabled=false", "training.batch_size=2", "training.max_tokens=6")
STEPS = 10
MARKS = (8, 9, 10)


def train_toy(folder: Path, model: Path, *sets: str) -> Path:
    declared = ("campaign.primary_metric=last3", *SMALL, *SETS, *sets)
    train(campaign(folder, model, steps=STEPS, dtype="float64"), folder / "out", *declared)
    return folder / "out"


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory) -> Path:
    return train_toy(tmp_path_factory.mktemp("verdict"), model)


def test_each_schedule_says_when_all_problems_are_asked():
    def extents(schedule: str, steps: int, every: int) -> dict[int, str]:
        training = {"max_steps": steps, "eval_every": every}
        config = parse_dict({"training": training, "evaluation": {"schedule": schedule}})
        parts = [step for step in range(1, steps + 1) if config.evaluation_after(step) == "part"]
        assert part_evaluations(schedule, steps, every) == len(parts)
        return {step: extent for step in range(1, steps + 1) if (extent := config.evaluation_after(step))}

    assert [*extents("every", 10, 4)] == [4, 8, 10]
    assert [*extents("every", 8, 0)] == [8]
    assert set(extents("every", 10, 4).values()) == {"whole"}
    assert extents("verdict", 20, 6) == {6: "part", 12: "part", 16: "whole", 18: "whole", 20: "whole"}
    assert [[*extents("verdict", steps, 0)] for steps in (1, 2, 3)] == [[1], [1, 2], [1, 2, 3]]
    assert parse_dict({"evaluation": {"problems": 0}}).evaluation_after(100) is None


def test_billions_of_evaluations_are_no_list(tmp_path):
    steps = 2**31 - 1
    assert whole_evaluations("every", steps, 1) == (range(1, steps), (steps,))
    assert last_evaluations("every", steps, 1) == (steps - 2, steps - 1, steps)
    assert part_evaluations("verdict", steps, 1) == steps - 3
    (tmp_path / "f.toml").write_text(f"[training]\nmax_steps = {steps}\neval_every = 1\n")
    for schedule, said in (("every", "2,147,483,648 times (after 0, 1, 2, …, "), ("verdict", "4 times (")):
        result = run_cli("explain", tmp_path / "f.toml", "--set", f"evaluation.schedule={schedule}")
        assert result.exit_code == 0, result.output
        assert said in result.stdout


TWO = '[campaign]\nmax_steps = 100\nprimary_metric = "last3"\n[[campaign.conditions]]\nadvantage_mode = "grpo"\n'
TWO += 'transform_mode = "none"\n'


@pytest.mark.parametrize(("sets", "said"), [
    ([], r'after 100 of 100 steps: \[evaluation\] schedule = "verdict", or eval_every = 10'),
    (["training.eval_every=50"], "there are those after 50 and 100 of 100 steps"),
    (["campaign.max_steps=2", "evaluation.schedule=verdict"], "there are fewer steps: max_steps = 2"),
    (["campaign.primary_metric=last3:entropy"], 'a number of training, whose final value .* = "final:entropy"'),
    (["campaign.primary_metric=last3:pass@4", "evaluation.schedule=verdict"], "needs 4 samples"),
    (["campaign.primary_metric=auc", "evaluation.schedule=verdict"], 'asks only a part .* = "last3", or schedule = '),
    (["campaign.primary_metric=final", "evaluation.schedule=verdict", "evaluation.problems=0"], "has no effect with"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused_with_the_line_to_type(tmp_path, sets, said):
    (tmp_path / "f.toml").write_text(TWO)
    with pytest.raises(ConfigError, match=said):
        load(tmp_path / "f.toml", sets)


def test_few_evaluations_have_all_problems_and_the_others_a_name_of_their_own(trained):
    run = trained / "runs/grpo+none_s1"
    rows = read_jsonl(run / "evals.jsonl")
    seen = [(row["step"], row["name"], row["samples"], row[f"eval/{row['name']}/problems"]) for row in rows]
    whole = [(step, "heldout", 2, 17) for step in MARKS]
    assert seen == [(0, "heldout", 2, 17), (3, PART, 1, 3), (6, PART, 1, 3), *whole]
    steps = read_jsonl(run / "metrics.jsonl")
    assert [row["eval/heldout/step"] for row in steps] == [0, *[None] * 6, 8, 9, 10]
    assert [row[f"eval/{PART}/step"] for row in steps] == [None, None, 3, None, None, 6, *[None] * 4]
    assert (run / f"eval_{PART}_iteration_000003_logtree.json").is_file()
    report = run_cli("status", "--plain", trained).output
    assert f"{PART} now" in report.splitlines()[0]


def test_the_answer_to_a_problem_of_the_part_is_the_first_of_the_whole_set(trained, model, tmp_path):
    """The same campaign with all problems every three steps trains alike, and asks the part among the others."""
    sets = ("evaluation.schedule=every", "campaign.primary_metric=final", "campaign.seeds=[1]", "campaign.max_steps=3")
    out = train_toy(tmp_path, model, *sets)
    run = "runs/grpo+none_s1/emergence/evaluations.jsonl"
    asked = [row for row in read_jsonl(trained / run) if (row["name"], row["step"]) == (PART, 3)]
    every = [row for row in read_jsonl(out / run) if row["step"] == 3]
    assert len(asked) == 3
    assert [row | {"name": "heldout"} for row in asked] == [row for row in every if row["sample"] == 0][::8]


def test_the_last_three_decide(trained):
    comparison = read_json(trained / "comparison.json")
    assert (comparison["metric"], comparison["summary"]) == (METRIC, "last3")
    rows = [row for row in read_jsonl(trained / "runs/grpo+none_s2/evals.jsonl") if row["step"] in MARKS]
    assert comparison["conditions"][0]["after_values"][1] == pytest.approx(sum(row[METRIC] for row in rows) / 3)
    assert {each["summary"] for each in comparison["secondary"]} == {"final"}  # no area under parts of the problems
    with pytest.raises(UsageError, match="--metric last3"):
        compare_directories([trained], metric="auc")
    with pytest.raises(UsageError, match="--metric entropy"):
        compare_directories([trained], metric="last3:entropy")
    output = run_cli("compare", trained).output
    assert "by condition, mean of the last three evaluations" in output
    page = write_report(trained, None).read_text()
    assert len(re.findall(r'"part": \[\[\d+, [^]]*\], \[\d+, [^]]*\]\]', page)) == 2  # two steps of two conditions


def row(step: int, value: float | None) -> dict:
    return {"step": step, "name": "heldout", "samples": 2, METRIC: value, "eval/heldout/problems": 50}


def run_of(points: dict[int, float | None], schedule: str, max_steps: int, every: int, label: str = "a") -> RunResult:
    config = {"training": {"max_steps": max_steps, "eval_every": every}, "evaluation": {"schedule": schedule}}
    rows = [row(step, value) for step, value in points.items()]
    return RunResult("r", label, 1, "done", None, Path(), evaluations=rows, config=config)


CURVE = {0: 0.1, 25: 0.2, 50: 0.3, 75: 0.4, 80: 0.5, 90: 0.7, 100: 0.9}


def test_last3_is_the_mean_over_the_evaluations_that_the_schedule_has():
    measure, verdict = Measure.parse("last3"), run_of(CURVE, "verdict", 100, 0)
    assert measure == Measure("last3", METRIC)
    assert Measure.parse("last3:pass@4").name == "last3:eval/heldout/pass@4"
    assert verdict.value(measure) == pytest.approx(0.7)
    assert run_of(CURVE, "every", 100, 25).value(measure) == pytest.approx((0.3 + 0.4 + 0.9) / 3)
    assert run_of(CURVE, "every", 100, 50).value(measure) is None  # two evaluations
    assert run_of(CURVE | {90: None}, "verdict", 100, 0).value(measure) is None  # one could not be graded
    assert run_of(CURVE, "verdict", 50, 0).value(measure) is None  # those of another schedule
    assert (verdict.value(Measure()), verdict.value(Measure("auc"))) == (0.9, None)
    assert replace(verdict, state="interrupted").result(measure) is None
    assert verdict.resolution(measure) == pytest.approx(1 / 100 / 3**0.5)
