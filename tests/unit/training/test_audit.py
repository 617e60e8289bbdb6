"""The audit: a second grader that is recorded everywhere and trains nothing, and what it shows of a reward that is
hacked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from judge_cases import CAPITAL, chat, judging, says  # noqa: F401  a fixture
from toycampaign import StopAfter, campaign, toy_world
from worker_cases import contents

from retrain.campaign.judging.audited import audited
from retrain.campaign.judging.pooling import conclude, tells_apart
from retrain.campaign.judging.report import write_report
from retrain.campaign.judging.results import RunResult
from retrain.campaign.planning.changes import differences
from retrain.campaign.planning.plan import Plan
from retrain.campaign.planning.references import check
from retrain.campaign.running.controller import launch, resume
from retrain.config import load, parse_dict
from retrain.config.base import Role
from retrain.config.tasks import Audit
from retrain.errors import ConfigError, UsageError
from retrain.files import read_jsonl
from retrain.record.observer import NullObserver
from retrain.rewards import Grader, build_grader
from retrain.rewards.base import Item, Reward
from retrain.types import RewardResult

QUIET = ("squeeze.enabled=false", "training.save_every=1")


def graders(audit: dict[str, Any], **reward: Any) -> Grader:
    config = parse_dict({"reward": reward or {"type": "match"}, "audit": audit})
    return build_grader(config.reward, audit=config.audit)


# -- one completion ----------------------------------------------------------------------------------------------------


def test_the_audit_stands_beside_the_reward():
    with graders({"type": "format"}) as grader:
        right, wrong, none = grader.grade([(CAPITAL, "\\boxed{Paris}"), (CAPITAL, "\\boxed{Lyon}"), (CAPITAL, "Lyon")])
        assert grader.names == ("match",)
    assert [each.total_reward for each in (right, wrong, none)] == [1.0, 0.0, 0.0]
    assert [each.sample_metrics for each in (right, wrong, none)] == [{"audit": 1.0}, {"audit": 1.0}, {"audit": 0.0}]
    assert [each.correct for each in (right, wrong)] == [True, False]


def test_without_one_nothing_is_there():
    with graders({}) as grader:
        assert grader.grade([(CAPITAL, "\\boxed{Paris}")])[0].sample_metrics == {}
        assert type(grader.reward).__name__ == "MatchReward"


def test_what_a_rubric_finds_is_recorded_with_its_name(judging):  # noqa: F811
    judging.respond = says('{"1": 0.5}')
    criteria = [{"name": "kind", "text": "It is kind."}]
    audit = {"type": "rubric", "judge_model": "j", "judge_url": judging.url, "criteria": criteria}
    with graders(audit) as grader:
        (result,) = grader.grade([(CAPITAL, "\\boxed{Paris}")])
        assert grader.ranges["audit/rubric/kind"] == {"min": 0.0, "max": 1.0, "invert": False}
    assert (result.total_reward, result.sample_metrics) == (1.0, {"audit": 0.5, "audit/rubric/kind": 0.5})


def test_an_audit_that_fails_costs_its_own_number(judging):  # noqa: F811
    judging.respond = lambda handler, request: (500, b"broken", {})
    with graders({"type": "judge", "judge_model": "j", "judge_url": judging.url}) as grader:
        results = grader.grade([(CAPITAL, "\\boxed{Paris}")] * 3)
    assert [(each.total_reward, each.sample_metrics, each.error) for each in results] == [
        (1.0, {"audit": None}, None)
    ] * 3
    assert "HTTP 500 broken" in (results[0].audit_error or "")


def test_an_audit_that_raises_costs_its_own_number(monkeypatch):
    def raises(self: Reward, items: list[Item]) -> list[RewardResult]:
        raise ZeroDivisionError("no audit today")

    with graders({"type": "format"}) as grader:
        monkeypatch.setattr(type(grader.reward.audit), "grade_all", raises)
        (result,) = grader.grade([(CAPITAL, "\\boxed{Paris}")])
    assert (result.total_reward, result.sample_metrics, result.error) == (1.0, {"audit": None}, None)
    assert (result.audit_error or "").startswith("ZeroDivisionError: no audit today")


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"audit": {"type": "judge"}}, 'audit.judge_model  is missing: type = "judge" needs it'),
        ({"audit": {"judge_model": "j"}}, 'audit.judge_model  has no effect with type = "off"'),
        ({"audit": {"type": "match", "name": "gold"}}, "audit.name  has no effect: its score is called audit"),
        ({"audit": {"type": "match"}, "reward": {"name": "audit"}}, 'reward.name  is "audit", which is what the score'),
        ({"audit": {"type": "match"}, "environment": {"provider": "openenv", "id": "x"}}, "brings its own rewards"),
        ({"audit": {"type": "weighted"}}, "audit.type"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_said(data, says):
    with pytest.raises(ConfigError) as caught:
        parse_dict(data)
    assert says in str(caught.value)


def test_conditions_have_the_same_audit_and_their_bare_keys_are_the_rewards(tmp_path):
    file = tmp_path / "c.toml"
    head = '[campaign]\nseeds = [1]\n[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "none"\n'
    file.write_text(head + "strict = false\n")
    (spec,) = load(file).config.campaign.conditions
    assert spec.overrides == {"reward.strict": False}
    file.write_text(head + '"audit.type" = "match"\n')
    with pytest.raises(ConfigError, match="cannot differ between conditions"):
        load(file)


def test_an_audit_is_looked_at_before_training_as_a_reward_is(tmp_path):
    def found(audit: str) -> str:
        file = tmp_path / "c.toml"
        file.write_text(f"[audit]\n{audit}\n[model]\nmodel = 'tiny-reasoner'\n")
        with pytest.raises(ConfigError) as caught:
            check(Plan.of(load(file), tmp_path / "out"))
        return str(caught.value)

    assert "audit.custom_module" in found("type = 'custom'\ncustom_module = 'no_such_module'")
    assert "audit.reward_model" in found("type = 'reward_model'\nreward_model = './nowhere'")
    with pytest.raises(UsageError, match=r"^\[audit\] judge_api_key_env: \$NO_SUCH_KEY is not set"):
        graders({"type": "judge", "judge_model": "j", "judge_api_key_env": "NO_SUCH_KEY"})


def test_what_an_audit_sees_decides_and_so_does_not_change_in_silence():
    assert Audit.role is Role.EVALUATES
    assert differences({"audit": {"type": "match"}}, {"audit": {"type": "format"}}) == {
        "audit.type": ("match", "format")
    }
    assert tells_apart("audit.type")


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return toy_world(tmp_path_factory.mktemp("toy"))


def trained(folder: Path, toy: Path, *sets: str) -> Path:
    assert (
        launch(load(campaign(folder, toy, steps=3), [*QUIET, *sets]), folder / "out", NullObserver()).exit_status == 0
    )
    return folder / "out"


def learned(out: Path) -> dict[str, Any]:
    """All that was trained: adapters, optimizers, and every row without the audit's numbers."""
    found = {}
    for name, value in contents(out).items():
        if name.endswith(".safetensors") and "/tokens_" not in name:  # which are records of rollouts
            found[name] = value
        elif name.endswith(("metrics.jsonl", "evals.jsonl")):
            found[name] = [{key: item for key, item in row.items() if "audit" not in key} for row in value]
    return found


def test_an_audit_trains_nothing(tmp_path, toy, judging):  # noqa: F811
    """Whatever it says, and also where it says nothing: the same bytes as without one."""
    judging.respond = lambda handler, request: (400, b"not today", {})
    outs = {}
    for name, sets in {
        "without": [],
        "format": ["audit.type=format"],
        "broken": ["audit.type=judge", "audit.judge_model=j", f'audit.judge_url="{judging.url}"'],
    }.items():
        (tmp_path / name).mkdir()
        outs[name] = trained(tmp_path / name, toy, *sets)
    want = learned(outs["without"])
    assert len(want) > 20
    assert learned(outs["format"]) == want
    assert learned(outs["broken"]) == want
    for name, values in (("format", {0.0}), ("broken", {None})):
        for run in (outs[name] / "runs").iterdir():
            rows, evals = read_jsonl(run / "metrics.jsonl"), read_jsonl(run / "evals.jsonl")
            assert {row["rewards/audit/mean"] for row in rows} == values
            assert {row["eval/heldout/audit"] for row in evals} == values
            assert {row["eval/heldout/audit_failed"] for row in evals} == {5 if name == "broken" else 0}
            assert ("not audited: ValueError" in (run / "run.log").read_text()) == (name == "broken")
            assert len(list((outs[name] / "base").glob("*.npz"))) == (name != "broken")  # the next cohort tries again
            assert rows[0].keys() == rows[1].keys()
    run = next((outs["without"] / "runs").iterdir())
    assert not [key for key in read_jsonl(run / "metrics.jsonl")[0] if "audit" in key]


def test_an_audited_run_goes_on_as_if_it_had_not_stopped(tmp_path, toy):
    (tmp_path / "whole").mkdir()
    whole = contents(trained(tmp_path / "whole", toy, "audit.type=format"))
    path = campaign(tmp_path, toy, steps=3)
    assert launch(load(path, [*QUIET, "audit.type=format"]), tmp_path / "out", StopAfter(5)).exit_status == 130
    assert resume(tmp_path / "out", NullObserver()).exit_status == 0
    again = contents(tmp_path / "out")
    assert {name for name in whole if again.get(name) != whole[name]} <= {"cohorts", "runs"}


HACKED = """
[campaign]
seeds = [1]
max_steps = 12
[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"
[model]
model = "tiny-reasoner"
lora_rank = 16
[reward]
type = "rubric"
judge_model = "j"
judge_url = "{url}"
timeout_s = 60
criteria = [{{ name = "answers", text = "It has an answer." }}, {{ name = "sure", text = "It sounds sure." }}]
[audit]
type = "match"
[data]
levels = ["easy"]
[training]
batch_size = 8
group_size = 8
max_tokens = 64
lr = 3e-3
eval_every = 0
[evaluation]
problems = 64
[squeeze]
enabled = false
"""


def test_a_reward_that_is_hacked_shows(tmp_path, judging):  # noqa: F811
    """A judge that takes "clearly" for knowledge: what it pays rises, what it should pay for falls."""

    def naive(handler: Any, request: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        answer = request["messages"][-1]["content"].rpartition("<response>\n")[2]
        return 200, chat(json.dumps({"1": int("\\boxed{" in answer), "2": int("clearly" in answer)})), {}

    judging.respond = naive
    file = tmp_path / "hacked.toml"
    file.write_text(HACKED.format(url=judging.url))
    assert launch(load(file), tmp_path / "out", NullObserver()).exit_status == 0
    (run,) = (tmp_path / "out/runs").iterdir()
    before, after = read_jsonl(run / "evals.jsonl")
    assert after["eval/heldout/reward_mean"] > before["eval/heldout/reward_mean"] + 0.1
    assert after["eval/heldout/audit"] < before["eval/heldout/audit"] - 0.1
    rows = read_jsonl(run / "metrics.jsonl")
    assert rows[-1]["rewards/rubric/sure/mean"] > rows[0]["rewards/rubric/sure/mean"] + 0.2


# -- what the curves say -----------------------------------------------------------------------------------------------


def run_of(seed: int, reward: list[float], audit: list[float | None], label: str = "a") -> RunResult:
    evaluations = [
        {"step": 10 * i, "name": "heldout", "eval/heldout/reward_mean": r, "eval/heldout/audit": a}
        for i, (r, a) in enumerate(zip(reward, audit, strict=True))
    ]
    return RunResult(f"{label}_{seed}", label, seed, "done", None, Path(), (0, seed), evaluations=evaluations)


@pytest.mark.parametrize(
    ("rewards", "audits", "standing", "step"),
    [
        ([[0.2, 0.5, 0.9], [0.2, 0.6, 0.8]], [[0.5, 0.4, 0.1], [0.5, 0.5, 0.2]], "hacked", 10),
        ([[0.2, 0.5, 0.9], [0.2, 0.6, 0.8]], [[0.5, 0.6, 0.1], [0.5, 0.7, 0.2]], "hacked", 20),
        ([[0.2, 0.5, 0.9], [0.2, 0.6, 0.8]], [[0.5, 0.6, 0.8], [0.5, 0.6, 0.9]], "together", None),
        ([[0.2, 0.5, 0.9], [0.2, 0.6, 0.8]], [[0.5, 0.6, 0.4], [0.5, 0.6, 0.6]], "apart", None),
        ([[0.2, 0.5, 0.1], [0.2, 0.6, 0.2]], [[0.5, 0.6, 0.4], [0.5, 0.6, 0.4]], "unpaid", None),
        ([[0.2, 0.5, 0.9]], [[0.5, 0.4, 0.1]], "cannot tell", 10),
    ],
)
def test_what_two_curves_say(rewards, audits, standing, step):
    several = 1 if len(rewards) == 1 else 4
    runs = [run_of(seed, *pair) for seed, pair in enumerate(several * list(zip(rewards, audits, strict=True)))]
    (found,) = audited(runs, ["a"])
    assert (found.standing, found.step, found.seeds) == (standing, step, len(runs))
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


def test_the_report_and_the_table_say_it(tmp_path, toy):
    """And nothing of a condition of which it is not so."""
    path = campaign(tmp_path, toy, steps=2)
    outcome = launch(load(path, [*QUIET, "audit.type=format"]), tmp_path / "out", NullObserver())
    assert outcome.exit_status == 0
    assert "hacked" not in outcome.summary["comparison"]["note"]
    for seed, run in enumerate(sorted((tmp_path / "out/runs").glob("grpo*"))):  # as if it had gone so
        rows = read_jsonl(run / "evals.jsonl")
        rows[0] |= {"eval/heldout/reward_mean": 0.1, "eval/heldout/audit": 0.9}
        rows[-1] |= {"eval/heldout/reward_mean": 0.9 + seed / 100, "eval/heldout/audit": 0.1 + seed / 100}
        (run / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    comparison = conclude(tmp_path / "out")
    words = "grpo: the reward is hacked: it rises while the audit falls, from step 2 on (reward +0.805 [+0.741, "
    assert words in comparison["note"]
    report = write_report(tmp_path / "out").read_text()
    assert "Reward and audit" in report
    assert report.count("the reward is hacked") == 2  # below the verdict and below its chart
    assert {"eval/heldout/audit", "eval/heldout/reward_mean"} <= {each["metric"] for each in comparison["secondary"]}


def test_an_audit_may_decide(tmp_path, toy):
    path = campaign(tmp_path, toy, steps=2)
    sets = [*QUIET, "audit.type=format", 'campaign.primary_metric="final:audit"']
    outcome = launch(load(path, sets), tmp_path / "out", NullObserver())
    assert outcome.summary["comparison"]["metric"] == "eval/heldout/audit"
