import json
from pathlib import Path
from typing import Any

import pytest
from helpers.campaigns import StopAfter, contents, continue_training, toy_toml, train
from helpers.models import campaign_head
from helpers.servers import CAPITAL, judging, says  # noqa: F401  a fixture

from retrain.campaign.planning.plan import Plan
from retrain.campaign.planning.references import check
from retrain.config import load, parse_dict
from retrain.config.runs import differences, distinguishes_runs
from retrain.errors import ConfigError, UsageError
from retrain.files import read_json, read_jsonl
from retrain.records.observer import NullObserver
from retrain.rewards import Grader, build_grader
from retrain.verdicts.audited import audited
from retrain.verdicts.pooling import conclude
from retrain.verdicts.report import write_report
from retrain.verdicts.results import RunResult


def graders(audit: dict[str, Any]) -> Grader:
    config = parse_dict({"reward": {"type": "match"}, "audit": audit})
    return build_grader(config.reward, audit=config.audit)


def asking(url: str) -> dict[str, str]:
    return {"judge_model": "j", "judge_url": url}


def test_the_audit_is_recorded_beside_the_reward():
    answers = [(CAPITAL, "\\boxed{Paris}"), (CAPITAL, "\\boxed{Lyon}"), (CAPITAL, "Lyon")]
    with graders({"type": "format"}) as grader:
        results = grader.grade(answers)
        assert grader.names == ("match",)
    found = [(result.total_reward, result.correct, result.sample_metrics) for result in results]
    assert found == [(1.0, True, {"audit": 1.0}), (0.0, False, {"audit": 1.0}), (0.0, False, {"audit": 0.0})]
    with graders({}) as grader:
        assert grader.grade(answers)[0].sample_metrics == {}


def test_criteria_of_a_rubric_are_recorded_by_name(judging):  # noqa: F811
    judging.respond = says('{"1": 0.5}')
    criteria = [{"name": "kind", "text": "It is kind."}]
    with graders({"type": "rubric", "criteria": criteria, **asking(judging.url)}) as grader:
        (result,) = grader.grade([(CAPITAL, "\\boxed{Paris}")])
        assert grader.ranges["audit/rubric/kind"] == {"min": 0.0, "max": 1.0, "invert": False}
    assert (result.total_reward, result.sample_metrics) == (1.0, {"audit": 0.5, "audit/rubric/kind": 0.5})


@pytest.mark.parametrize(("kind", "reason"), [("judge", "HTTP 500 broken"), ("format", "ZeroDivisionError: today")])
def test_an_audit_that_fails_costs_only_its_number(kind, reason, judging, monkeypatch):  # noqa: F811
    def raises(items):
        raise ZeroDivisionError("today")

    judging.respond = lambda handler, request: (500, b"broken", {})
    with graders({"type": kind, **(asking(judging.url) if kind == "judge" else {})}) as grader:
        if kind == "format":
            monkeypatch.setattr(grader.audit, "grade_all", raises, raising=False)
        results = grader.grade([(CAPITAL, "\\boxed{Paris}")] * 3)
    for result in results:
        assert (result.total_reward, result.sample_metrics, result.error) == (1.0, {"audit": None}, None)
        assert reason in (result.audit_error or "")


def test_conditions_have_the_same_audit_and_another_audit_is_a_difference(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(campaign_head(("grpo", "none"), seeds=[1]) + '"audit.type" = "match"\n')
    with pytest.raises(ConfigError, match="cannot differ between conditions"):
        load(file)
    changed = differences({"audit": {"type": "match"}}, {"audit": {"type": "format"}})
    assert changed == {"audit.type": ("match", "format")}
    assert distinguishes_runs("audit.type")


def test_an_audit_is_checked_before_training(tmp_path):
    file = tmp_path / "c.toml"
    for audit, key in (
        ("type = 'custom'\ncustom_module = 'no_such_module'", "audit.custom_module"),
        ("type = 'reward_model'\nreward_model = './nowhere'", "audit.reward_model"),
    ):
        file.write_text(f"[audit]\n{audit}\n[model]\nmodel = 'tiny-reasoner'\n")
        with pytest.raises(ConfigError, match=key):
            check(Plan.of(load(file), tmp_path / "out"))
    with pytest.raises(UsageError, match=r"^\[audit\] judge_api_key_env: \$NO_SUCH_KEY is not set"):
        graders({"type": "judge", "judge_model": "j", "judge_api_key_env": "NO_SUCH_KEY"})


def learned(out: Path) -> dict[str, Any]:
    """Return all that was trained: adapters, optimizers, and every row without the audit's numbers."""
    files = contents(out)
    trained = {name: files[name] for name in files if name.endswith(".safetensors") and "/tokens_" not in name}
    for name in files:
        if name.endswith(("metrics.jsonl", "evals.jsonl")):
            trained[name] = [{key: row[key] for key in row if "audit" not in key} for row in files[name]]
    return trained


def test_an_audit_trains_nothing(tmp_path, model, judging):  # noqa: F811
    """The same bytes without an audit, with one whose judge fails, and with one, interrupted, that decides. All
    answers have the same reward, which needs no process of its own; what trains is the entropy bonus."""
    judging.respond = lambda handler, request: (400, b"not today", {})
    audits = {
        "without": [],
        "format": ["audit.type=format", 'campaign.primary_metric="final:audit"'],
        "broken": ["audit.type=judge", "audit.judge_model=j", f'audit.judge_url="{judging.url}"'],
    }
    penalty = [{"type": "format", "weight": 0.5, "offset": -1.0}]
    sections = {
        "reward": {"type": "weighted", "components": penalty, "custom_module": None, "workers": None},
        "training": {"max_tokens": 6, "save_every": 1, "eval_every": 2},
        "algorithm": {"entropy_coef": 0.1, "discard_group_zero_advantage": False},
    }
    path = tmp_path / "audited.toml"
    head = campaign_head(("grpo", "none"), seeds=[1, 2], max_steps=2)
    path.write_text(head + toy_toml(model, evaluation={"problems": 5}, **sections))
    for name, sets in audits.items():
        observer = StopAfter(1) if name == "format" else NullObserver()
        train(path, tmp_path / name, *sets, observer=observer, status=130 if name == "format" else 0)
    continue_training(tmp_path / "format")
    expected = learned(tmp_path / "without")
    assert len(expected) > 10
    assert all(row["optim/grad_norm"] > 0 for name in expected if "metrics" in name for row in expected[name])
    assert learned(tmp_path / "format") == learned(tmp_path / "broken") == expected
    for name, values, failed in (("format", {0.0}, {0}), ("broken", {None}, {5})):
        for run in (tmp_path / name / "runs").iterdir():
            rows, evals = read_jsonl(run / "metrics.jsonl"), read_jsonl(run / "evals.jsonl")
            assert {row["rewards/audit/mean"] for row in rows} == values
            assert {row["eval/heldout/audit"] for row in evals} == values
            assert {row["eval/heldout/audit_failed"] for row in evals} == failed
            assert ("not audited: ValueError" in (run / "run.log").read_text()) == (name == "broken")
            assert rows[0].keys() == rows[1].keys()
    assert [len(list((tmp_path / name / "base").glob("*.npz"))) for name in ("format", "broken")] == [1, 0]
    run = next((tmp_path / "without/runs").iterdir())
    assert not [key for key in read_jsonl(run / "metrics.jsonl")[0] if "audit" in key]
    report_says_where_the_reward_is_hacked(tmp_path / "format")


def report_says_where_the_reward_is_hacked(out: Path) -> None:
    comparison = read_json(out / "comparison.json")
    assert comparison["metric"] == "eval/heldout/audit"
    assert "hacked" not in comparison["note"]
    for seed, run in enumerate(sorted((out / "runs").glob("grpo*"))):  # rewrite what its evaluations found
        rows = read_jsonl(run / "evals.jsonl")
        rows[0] |= {"eval/heldout/reward_mean": 0.1, "eval/heldout/audit": 0.9}
        rows[-1] |= {"eval/heldout/reward_mean": 0.9 + seed / 100, "eval/heldout/audit": 0.1 + seed / 100}
        (run / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sentence = "grpo: the reward is hacked: it rises while the audit falls, from step 2 on (reward +0.805 [+0.741, "
    assert sentence in conclude(out)["note"]
    report = write_report(out).read_text()
    assert "Reward and audit" in report
    assert report.count("the reward is hacked") == 2  # below the verdict and below its chart


def run_of(seed: int, reward: list[float], audit: list[float | None]) -> RunResult:
    evaluations = [
        {"step": 10 * i, "name": "heldout", "eval/heldout/reward_mean": r, "eval/heldout/audit": a}
        for i, (r, a) in enumerate(zip(reward, audit, strict=True))
    ]
    return RunResult(f"a_{seed}", "a", seed, "done", None, Path(), (0, seed), evaluations=evaluations)


RISING = [[0.2, 0.5, 0.9], [0.2, 0.6, 0.8]]


@pytest.mark.parametrize(("rewards", "audits", "standing", "step"), [
    (RISING, [[0.5, 0.4, 0.1], [0.5, 0.5, 0.2]], "hacked", 10),
    (RISING, [[0.5, 0.6, 0.1], [0.5, 0.7, 0.2]], "hacked", 20),
    (RISING, [[0.5, 0.6, 0.8], [0.5, 0.6, 0.9]], "together", None),
    (RISING, [[0.5, 0.6, 0.4], [0.5, 0.6, 0.6]], "apart", None),
    ([[0.2, 0.5, 0.1], [0.2, 0.6, 0.2]], [[0.5, 0.6, 0.4], [0.5, 0.6, 0.4]], "unpaid", None),
    (RISING[:1], [[0.5, 0.4, 0.1]], "cannot tell", 10),
])  # fmt: skip
def test_what_two_curves_say(rewards, audits, standing, step):
    pairs = list(zip(rewards, audits, strict=True)) * (1 if len(rewards) == 1 else 4)
    (found,) = audited([run_of(seed, *pair) for seed, pair in enumerate(pairs)], ["a"])
    assert (found.standing, found.step, found.seeds) == (standing, step, len(pairs))
    assert found.sentence.startswith("a: ")
    assert ("hacked" in found.sentence) == (standing == "hacked")


def test_the_numbers_are_the_change_within_a_seed():
    """Two seeds that begin apart and change alike: t with one degree of freedom, by hand."""
    runs = [run_of(1, [0.0, 0.4], [0.9, 0.5]), run_of(2, [0.5, 1.0], [0.4, -0.2])]
    (found,) = audited(runs, ["a"])
    assert found.reward.mean == pytest.approx(0.45)
    assert found.audit.mean == pytest.approx(-0.5)
    assert found.reward.low == pytest.approx(0.45 - 12.7062 * 0.05, abs=1e-4)
    assert found.audit.high == pytest.approx(-0.5 + 12.7062 * 0.1, abs=1e-4)


def test_without_an_audit_there_is_nothing_to_say():
    assert audited([run_of(1, [0.1, 0.2], [None, None])], ["a"]) == []
    assert audited([run_of(1, [0.1], [0.2])], ["a"]) == []
    unfinished = run_of(1, [0.1, 0.2], [0.1, 0.2])
    unfinished.state = "running"
    assert audited([unfinished], ["a"]) == []
