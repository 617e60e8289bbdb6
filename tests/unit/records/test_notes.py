from contextlib import closing
from typing import Any

import pytest
from helpers.records import config, context, group, step

from retrain.files import read_jsonl
from retrain.records.notes import RULES, WINDOW, explain
from retrain.records.recorder import RunRecorder

HEALTHY: dict[str, Any] = {
    "reward_failed": 0, "env/all/total_episodes": 64, "env/all/format": 0.9, "env/all/by_group/frac_mixed": 0.5,
    "env/all/by_group/frac_all_good": 0.25, "optim/grad_norm": 0.4, "optim/grad_clipped": False, "optim/lr": 1e-4,
    "num_datums": 32, "loss": -0.3, "clip_ratio/region_mean": 0.01, "policy/clipfrac_avg": 0.01, "val/ratio": 1.0,
    "kl_sample_train_v2": 1e-9, "entropy": 0.8, "correct_rate": 0.5, "kl": 0.01, "max_token_hit_rate": 0.05,
    "planning_fraction": 0.1, "sepa_gate_open": True, "sepa_lambda": 0.5,
}  # fmt: skip

SHORT_SEPA = config(algorithm={"transform_mode": "gtpo_sepa"}, training={"max_steps": 2, "max_tokens": 16})
SEPA = config(algorithm={"transform_mode": "gtpo_sepa"}, training={"max_steps": 40, "max_tokens": 16})


def rows(count: int, first: dict[str, Any] | None = None, **changes: Any) -> list[dict[str, Any]]:
    """``count`` rows with these values (``__`` stands for a slash), the first with ``first`` besides."""
    values = {key.replace("__", "/"): value for key, value in changes.items()}
    made = [{**HEALTHY, **values, "step": number} for number in range(count)]
    made[0].update(first or {})
    return made


def keys(made: list[dict[str, Any]], settings: Any = None, dtype: str = "float32") -> list[str]:
    return [note.key for note in explain(made, settings or config(), dtype)]


CASES: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]], Any]] = [
    ("not_graded", rows(1, reward_failed=20), rows(1, reward_failed=3), None),
    ("reward_graded", rows(1, reward_min=0.0, reward_max=1.0, mean_reward=0.5, reward_std=0.4),
     rows(1, reward_min=0.0, reward_max=1.0, mean_reward=0.25, reward_std=0.1875**0.5), None),
    ("format_never_matched", rows(3, env__all__format=0.0), rows(2, env__all__format=0.0), None),
    ("groups_uniform", rows(3, env__all__by_group__frac_mixed=0.0),
     [*rows(2, env__all__by_group__frac_mixed=0.0), rows(1)[0]], None),
    ("groups_hardly_mixed", rows(10, env__all__by_group__frac_mixed=0.05),
     rows(10, env__all__by_group__frac_mixed=0.3), None),
    ("adapter_unchanged", rows(5, num_datums=0, optim__grad_norm=None), rows(4, num_datums=0, optim__grad_norm=None),
     None),
    ("adapter_unchanged", rows(5, optim__lr=0.0), [*rows(4, optim__lr=0.0), rows(1)[0]], None),
    ("loss_near_zero", rows(3, loss=1e-6), rows(3, loss=1e-6, optim__grad_norm=0.0), None),
    ("loss_near_zero", rows(3, loss=0.0), rows(3, loss=0.0, loss_is_placeholder=True), None),
    ("nothing_clipped", rows(3, clip_ratio__region_mean=0.0), rows(3, clip_ratio__region_mean=0.0, val__ratio=1.01),
     None),
    ("sampler_and_trainer_disagree", rows(1, kl_sample_train_v2=1e-5), rows(1, kl_sample_train_v2=None), None),
    ("ratio_off", rows(2, val__ratio=1.2), [rows(1)[0], *rows(1, val__ratio=1.2)], None),
    ("much_clipped", rows(5, policy__clipfrac_avg=0.5), rows(5, policy__clipfrac_avg=0.1), None),
    ("gradient_always_clipped", rows(10, optim__grad_clipped=True, optim__grad_norm=8.0),
     rows(9, optim__grad_clipped=True, optim__grad_norm=8.0), None),
    ("gradient_not_a_number", rows(1, optim__grad_norm=None, optim__skipped=True),
     rows(1, optim__grad_norm=None, num_datums=0), None),
    ("entropy_collapsed", rows(6, {"entropy": 0.8}, entropy=0.005),
     rows(6, {"entropy": 0.8}, entropy=0.005, correct_rate=0.97), None),
    ("entropy_growing", rows(4, {"entropy": 0.8}, entropy=3.0), rows(4, {"entropy": 0.8}, entropy=1.5), None),
    ("kl_large", rows(2, kl=0.9), rows(2, kl=None), None),
    ("truncated", rows(3, max_token_hit_rate=1.0), rows(3, max_token_hit_rate=0.3), None),
    ("no_planning_tokens", rows(5, planning_fraction=0.0), rows(5, planning_fraction=0.01), SEPA),
    ("sepa_never_opened", rows(20, sepa_gate_open=False, sepa_lambda=0.0),
     rows(19, sepa_gate_open=False, sepa_lambda=0.0), SEPA),
    ("sepa_too_late", rows(40, sepa_lambda=0.2), rows(40, sepa_lambda=0.9), SEPA),
    ("sepa_too_late", rows(2, sepa_lambda=0.0), rows(1, sepa_lambda=0.0), SHORT_SEPA),
    ("heldout_worse",
     rows(4, {"eval/heldout/ci_low": 0.5, "eval/heldout/correct_rate": 0.6}, eval__heldout__ci_high=0.3,
          eval__heldout__correct_rate=0.2),
     rows(4, {"eval/heldout/ci_low": 0.5, "eval/heldout/correct_rate": 0.6}, eval__heldout__ci_high=0.55,
          eval__heldout__correct_rate=0.4), None),
]  # fmt: skip


@pytest.mark.parametrize(("key", "odd", "ordinary", "settings"), CASES)
def test_each_remark_is_made_when_it_should_and_not_otherwise(key, odd, ordinary, settings):
    assert key in keys(odd, settings)
    assert key not in keys(ordinary, settings)
    assert key not in [note.key for note in explain(odd, settings or config(), omitted={key})]


def test_ordinary_runs_get_no_remark_and_every_rule_has_its_case():
    assert {case[0] for case in CASES} == set(RULES)
    for count in (1, 3, 10, 40):
        assert keys(rows(count), SEPA) == []
    assert explain([], config()) == []
    assert keys(rows(20, planning_fraction=0.0, sepa_gate_open=None, sepa_lambda=None)) == []  # not used
    disagreement = rows(1, kl_sample_train_v2=1e-4)
    assert keys(disagreement) == ["sampler_and_trainer_disagree"]
    assert keys(disagreement, dtype="bfloat16") == []


def test_uniform_groups_are_distinguished():
    for all_good, matched, cut_off, words in (
        (1.0, 1.0, 0.0, "too easy"), (0.0, 1.0, 1.0, "cut off"), (0.0, 1.0, 0.0, "too hard"),
    ):  # fmt: skip
        groups = {"env__all__by_group__frac_mixed": 0.0, "env__all__by_group__frac_all_good": all_good}
        made = rows(3, env__all__format=matched, max_token_hit_rate=cut_off, **groups)
        assert words in next(note.text for note in explain(made, config()) if note.key == "groups_uniform")


def test_remarks_stand_in_the_log_and_in_a_file_once_and_warnings_are_heard(tmp_path):
    heard: list[str] = []
    with closing(RunRecorder(tmp_path, context(), warn=heard.append)) as recorder:
        recorder.start({"built": {"dtype": "bfloat16"}})
        for number in range(WINDOW + 10):
            update = {"loss": 1e-9, "optim/grad_norm": 0.1}
            recorder.record_step(step([group([0.0, 0.0], [3, 4], stops=[False, False])], number, update))
    log = (tmp_path / "run.log").read_text()
    assert log.splitlines()[0].endswith(" start grpo+none_s1: grpo+none, seed 1")
    assert log.count("ended at max_tokens = 16") == 1
    lines = read_jsonl(tmp_path / "notes.jsonl")
    keys = [line["key"] for line in lines]
    assert {"truncated", "groups_uniform", "loss_near_zero"} <= {*keys}
    assert len(keys) == len({*keys})
    assert all(f"{line['level']:<7} step {line['step']}: {line['text']}" in log for line in lines)
    expected = [f"grpo+none_s1: step {line['step']}: {line['text']}" for line in lines if line["level"] == "warning"]
    assert len(heard) == len(expected)  # warnings alone
    assert all(text.startswith(start) for text, start in zip(heard, expected, strict=True))
    assert set(lines[0]) == {"step", "key", "level", "text", "remedy"}
