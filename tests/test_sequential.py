"""The sequential rule in a campaign: what it looks at, what it stops, what it writes, and that resuming repeats it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from toymodels import campaign_head, qwen3_directory

from retrain.campaign.judging.comparison import compare
from retrain.campaign.judging.sequential import look
from retrain.campaign.planning.manifest import Manifest
from retrain.campaign.planning.plan import plan
from retrain.campaign.running.controller import launch, resume
from retrain.config import load, parse_dict
from retrain.errors import ConfigError, UsageError
from retrain.files import append_jsonl, read_json
from retrain.maths.sequential import fewest_pairs
from retrain.record.observer import NullObserver

EIGHT = list(range(1, 9))
GRPO, RLOO, DR_GRPO = ("grpo", "none"), ("rloo", "none"), ("dr_grpo", "none")


def configuration(
    tmp_path: Path, conditions=(GRPO, RLOO), rule="linear", seeds: list[int] = EIGHT, rest="", **keys
) -> Path:
    path = tmp_path / "rule.toml"
    tmp_path.mkdir(exist_ok=True)
    path.write_text(campaign_head(*conditions, seeds=seeds, max_steps=1, sequential=rule, **keys) + rest)
    return path


class Played:
    """A campaign whose runs are put on the disk instead of trained: accuracy by condition and seed."""

    def __init__(self, tmp_path: Path, effect: float = 0.1, **settings):
        self.loaded = load(configuration(tmp_path, **settings))
        self.specs = plan(self.loaded)
        self.manifest = Manifest.open(tmp_path / "out", "rule", self.specs)
        self.effect = effect

    def finish(self, seed: int, state: str = "done", only: str | None = None, sign: int = 1) -> None:
        for spec in self.specs:
            stopped = self.manifest.run(spec.run_id)["state"] == "stopped"
            if spec.seed == seed and spec.label.startswith(only or "") and not stopped:
                folder = self.manifest.directory / "runs" / spec.run_id
                value = 0.5 + 0.01 * seed + (sign * self.effect if spec.label.startswith("rloo") else 0.0)
                row = {"step": 1, "name": "heldout", "eval/heldout/correct_rate": value}
                append_jsonl(folder / "evals.jsonl", [row])
                append_jsonl(folder / "metrics.jsonl", [{"step": 0, "num_tokens": 5, "correct_rate": value}])
                self.manifest.update(spec.run_id, state=state)

    def look(self) -> dict:
        look(self.manifest, self.specs, NullObserver())
        return self.manifest.content["sequential"]["conditions"]["rloo+none"]

    def states(self, label: str = "") -> list[str]:
        return [run["state"] for run in self.manifest.content["runs"] if run["label"].startswith(label)]

    def compare(self) -> dict:
        labels = [spec.label for spec in self.specs]
        rule = self.manifest.content["sequential"]
        return compare(self.manifest.directory, self.manifest.content["runs"], labels, sequential=rule)


def test_a_clear_difference_stops_after_six_pairs_and_the_rest_is_listed(tmp_path):
    played = Played(tmp_path)
    for seed in range(1, 6):
        played.finish(seed)
        assert played.look()["stopped_after"] is None
    found = played.compare()["conditions"][1]
    assert found["verdict"] == "cannot tell: the sequential rule has not decided yet"
    assert found["p_value"] is None
    played.finish(6)
    condition = played.look()
    assert condition["stopped_after"] == 6
    assert [each["pairs"] for each in condition["looks"]] == [1, 2, 3, 4, 5, 6]
    assert condition["looks"][-1]["p"] == condition["looks"][-1]["spent"] == 2**-5
    assert played.states() == ["done"] * 12 + ["stopped"] * 4
    stopped = played.manifest.run("rloo+none_s7")
    assert stopped["reason"] == "sequential rule: decided after 6 of 8 pairs, p = 0.031 at level 0.05"
    assert played.manifest.run("grpo+none_s7")["reason"] == "sequential rule: every comparison is decided"
    comparison = played.compare()
    found = comparison["conditions"][1]
    assert (found["verdict"], found["p_value"], found["p_holm"]) == ("better", 2**-5, 2**-5)
    assert "Stopped after 6 of 8 pairs by the sequential rule, 0.031 of 0.05 spent." in found["sentence"]
    assert [run["state"] for run in found["missing"]] == ["stopped", "stopped"]
    assert "4 stopped (sequential rule) runs are not in the means" in comparison["note"]


def test_the_decision_does_not_depend_on_when_and_how_often_one_looks(tmp_path):
    often, once = Played(tmp_path / "often"), Played(tmp_path / "once")
    for seed in EIGHT:
        often.finish(seed)
        once.finish(seed)
        often.look()
    mine, other = often.look(), once.look()
    assert mine == other
    assert other["stopped_after"] == 6  # the look after six pairs decides, although eight were there
    once.manifest.files.flush()
    again = Played.__new__(Played)
    again.specs, again.manifest = once.specs, Manifest.open(once.manifest.directory, "rule", once.specs)
    for file in (once.manifest.directory / "runs").rglob("evals.jsonl"):
        file.unlink()  # what was looked at stands in the manifest
    assert again.look() == other


def test_no_difference_runs_to_the_end(tmp_path):
    played = Played(tmp_path)
    for seed in EIGHT:
        played.finish(seed, sign=1 if seed % 2 else -1)
        played.look()
    assert played.states() == ["done"] * 16
    found = played.compare()["conditions"][1]
    assert found["verdict"] == "no difference shown"
    assert found["sentence"].endswith("Sequential rule: not stopped in 8 looks, 0.031 of 0.05 spent.")


@pytest.mark.parametrize("seeds", [[1], [1, 2, 3, 4, 5, 6, 7]])
def test_a_rule_without_a_second_condition_is_an_error(tmp_path, seeds):
    path = configuration(tmp_path, [GRPO], seeds=seeds)
    with pytest.raises(ConfigError, match=r'rule.toml:4 .*there is one condition.*sequential = "off"'):
        load(path)


@pytest.mark.parametrize("conditions", [2, 3, 4, 5])
@pytest.mark.parametrize("rule", ["linear", "pocock", "obrien_fleming"])
def test_seeds_that_are_accepted_are_the_fewest_that_can_stop_early(conditions, rule):
    least = next(n for n in range(2, 20) if (fewest_pairs(n, alpha=0.05 / (conditions - 1), spending=rule) or n) < n)
    modes = [{"advantage_mode": mode, "transform_mode": "none"} for mode in ("grpo", "rloo", "maxrl", "dr_grpo")]
    modes = [*modes, {"advantage_mode": "maxrl", "transform_mode": "gtpo"}][:conditions]
    settings = {"conditions": modes, "sequential": rule}
    assert parse_dict({"campaign": {**settings, "seeds": list(range(least))}}).campaign.sequential == rule
    with pytest.raises(ConfigError, match="to stop early"):
        parse_dict({"campaign": {**settings, "seeds": list(range(least - 1))}})


def test_failed_runs_are_no_pairs_and_come_in_when_tried_again(tmp_path):
    played = Played(tmp_path)
    played.finish(1)
    played.finish(2, only="grpo")
    played.finish(3)
    assert played.look()["differences"][-1][0] == 1  # seed 2 is not complete and holds back seed 3
    played.finish(2, state="failed", only="rloo")
    assert [seed for seed, value in played.look()["differences"] if value is not None] == [1, 3]
    played.manifest.update("rloo+none_s2", state="pending")
    assert len(played.look()["looks"]) == 2
    played.finish(2, only="rloo")
    assert [seed for seed, _ in played.look()["differences"]] == [1, 3, 2]


def test_three_conditions_share_the_error_and_stop_one_by_one(tmp_path):
    played = Played(tmp_path, conditions=[GRPO, RLOO, DR_GRPO], seeds=list(range(1, 13)))
    for seed in range(1, 13):
        played.finish(seed)
        played.look()
    record = played.manifest.content["sequential"]["conditions"]
    assert record["rloo+none"]["stopped_after"] == 8  # 2^-7 fits 0.025 * 8/12
    assert record["dr_grpo+none"]["stopped_after"] is None
    assert played.states("rloo").count("stopped") == 4
    assert "stopped" not in played.states("grpo") + played.states("dr_grpo")


def test_the_rule_is_fixed_with_the_first_look(tmp_path):
    played = Played(tmp_path)
    played.finish(1)
    played.look()
    changed: list[dict[str, Any]] = [
        {"rule": "pocock"},
        {"rule": "off"},
        {"seeds": list(range(1, 10))},
        {"primary_metric": "auc"},
    ]
    for settings in changed:
        rest = "[training]\neval_every = 1" if "primary_metric" in settings else ""
        other = plan(load(configuration(tmp_path, **settings, rest=rest)))
        with pytest.raises(UsageError, match="fixed before the first look"):
            look(played.manifest, other, NullObserver())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seeds": [1, 2, 3]}, r"rule.toml:4 .*after 6 at the earliest.*seeds = \[1, 2, 3, 4, 5, 6, 7, 8\]"),
        ({"seeds": [1, 2, 3, 4, 5, 6]}, "takes 7 to 20 to stop early"),
        ({"seeds": list(range(30))}, "to 20"),
        ({"lanes": 16}, 'lanes = 16 trains all 16 runs at once.*lanes = "auto"'),
    ],
)
def test_impossible_rules_are_configuration_errors(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        load(configuration(tmp_path, **settings))
    text = (tmp_path / "rule.toml").read_text().split("[[campaign.conditions]]")
    (tmp_path / "one.toml").write_text(f"{text[0]}[[campaign.conditions]]{text[1]}")
    with pytest.raises(ConfigError, match="one condition"):
        load(tmp_path / "one.toml")


REWARD = "def score(completion, answer):\n    return float(len(completion) % 2)\n"
WORLD = """
[model]
model = "{folder}/model"
lora_rank = 2
[training]
batch_size = 2
group_size = 2
max_tokens = 8
save_every = 0
[evaluation]
problems = 0
[reward]
type = "custom"
custom_module = "{folder}/oddrewards.py"
custom_function = "score"
workers = 1
[squeeze]
enabled = false
"""


def test_a_campaign_that_stops_itself_and_a_resumed_one_agree(tmp_path):
    (tmp_path / "oddrewards.py").write_text(REWARD)
    qwen3_directory(tmp_path / "model", ["12+34=? the answer is \\boxed{46}"])
    path = configuration(
        tmp_path,
        primary_metric="final:completions/mean_length",
        rest="[campaign.conditions.training]\nmax_tokens = 3\n" + WORLD.format(folder=tmp_path),
    )
    outcome = launch(load(path), tmp_path / "out", NullObserver())
    assert outcome.exit_status == 0
    states = [run["state"] for run in outcome.summary["runs"]]
    assert states == ["done"] * 12 + ["stopped"] * 4  # three cohorts of two seeds, then decided
    condition = outcome.summary["comparison"]["conditions"][1]
    assert condition["verdict"] == "lower"
    assert condition["sequential"]["stopped_after"] == 6
    # Killed before the third cohort: resuming gives the same looks, bit by bit.
    manifest = read_json(tmp_path / "out/manifest.json")
    looks = json.loads(json.dumps(manifest["sequential"]))
    for run in manifest["runs"][8:]:
        run |= {"state": "pending", "reason": None, "step": 0}
        shutil.rmtree(tmp_path / "out" / run["path"], ignore_errors=True)
    only = manifest["sequential"]["conditions"]["rloo+none~max_tokens=3"]
    only |= {"differences": only["differences"][:4], "looks": only["looks"][:4], "stopped_after": None}
    (tmp_path / "out/manifest.json").write_text(json.dumps(manifest))
    again = resume(tmp_path / "out", NullObserver())
    assert [run["state"] for run in again.summary["runs"]] == states
    assert read_json(tmp_path / "out/manifest.json")["sequential"] == looks


def test_several_comparisons_share_alpha_and_their_p_values_are_corrected(tmp_path):
    played = Played(tmp_path, conditions=(GRPO, RLOO, DR_GRPO))
    for seed in EIGHT:
        played.finish(seed)
        condition = played.look()
    last = condition["looks"][-1]
    assert last["allowed"] == pytest.approx(0.05 / 2 * last["pairs"] / 8)
    for found in played.compare()["conditions"][1:]:
        looks = played.manifest.content["sequential"]["conditions"][found["label"]]["looks"]
        assert found["p_value"] == looks[-1]["p"]
        assert found["p_holm"] == min(1.0, 2 * looks[-1]["p"])
    assert played.compare()["conditions"][1]["p_holm"] == 2 * 2**-6
