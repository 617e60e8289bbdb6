"""Rows against numbers worked by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from mixed_cases import completions_of, rows_of, runs_of
from record_cases import completion, config, context, evaluation, group, step
from timing_keys import is_timing_key

from retrain.record.catalogue import METRICS, row_metrics
from retrain.record.context import RunContext, chart_ranges
from retrain.record.evaluation import eval_row
from retrain.record.measure import Totals, env_metrics, step_row
from retrain.record.samples import collect, gini, group_shares
from retrain.types import RewardResult, Turn


def test_correct_rate_counts_groups_that_did_not_train():
    """One group trains with 1 of 2 correct, three groups are all wrong and dropped: 1/8, not 1/2."""
    groups = [group([1.0, 0.0], [4, 4])] + [group([0.0, 0.0], [4, 4], discarded="zero_advantage") for _ in range(3)]
    row = step_row(step(groups), context())
    assert row["correct_rate"] == row["env/all/correct"] == 0.125
    assert row["mean_reward"] == row["reward"] == row["env/all/reward/total"] == row["objective/scores"] == 0.125
    assert row["num_datums"] == 2
    assert row["discarded_count"] == 3
    assert row["discarded_zero_advantage_pct"] == 75.0
    assert row["discarded_zero_advantage_all_zero_pct"] == 100.0
    assert row["discarded_zero_advantage_all_positive_pct"] == 0.0
    assert row["discarded_no_reward_pct"] == row["discarded_max_async_pct"] == 0.0
    assert row["discarded_reward_mean"] == row["discarded_reward_sum_mean"] == 0.0
    assert row["discarded_length_completion_mean"] == 4.0
    assert row["advantage_mean"] == 0.0
    assert row["advantage_max"] == 0.5


def test_group_shares():
    groups = [
        group([1.0, 0.0], [2, 2]),
        group([0.7, 0.7], [2, 2]),
        group([0.1, 0.1], [2, 2]),
        group([0.1 + 0.2, 0.3], [2, 2]),  # float noise is equality
        group([None, None], [2, 2]),  # says nothing
    ]
    row = step_row(step(groups), context())
    assert row["env/all/by_group/frac_mixed"] == 0.25
    assert row["env/all/by_group/frac_all_good"] == 0.25
    assert row["env/all/by_group/frac_all_bad"] == 0.5
    assert row["frac_reward_zero_std"] == 0.75
    assert group_shares([]) == {"frac_mixed": None, "frac_all_good": None, "frac_all_bad": None}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 1, 1, 1], 0.0),
        ([0, 0, 0, 5], 1.0),
        ([0, 1], 1.0),
        ([1, 3], 0.5),
        ([0, 0], 0.0),
        ([2], None),
    ],
)
def test_gini(values, expected):
    result = gini(np.array(values, dtype=float))
    assert result == (None if expected is None else pytest.approx(expected, abs=1e-12))
    if expected is not None and any(values):
        x = np.array(values, dtype=float)
        n = len(x)
        pairs = np.abs(x[:, None] - x[None, :]).sum()
        assert result == pytest.approx(pairs / (2 * n * n * x.mean()) * n / (n - 1))


def test_the_gini_of_a_row_counts_uniform_groups_and_shifts_negative_rewards():
    """Means over groups worked by hand: uniform groups count 0, penalties from what is declared or found."""

    def gini_of(*groups, ranges=None):
        row = step_row(step(list(groups)), context(ranges=ranges or {}))
        return row["reward_gini"], row["reward_gini_mean"]

    half, zero, one = group([1.0, 3.0], [2, 2]), group([0.0, 0.0], [2, 2]), group([1.0, 1.0], [2, 2])
    assert gini_of(half, zero, one, group([None, 1.0], [2, 2])) == pytest.approx((0.5 / 3,) * 2)
    penalised = group([-1.0, 3.0], [2, 2])
    assert gini_of(penalised) == (1.0, 1.0)  # from its own −1: 0 and 4
    declared = {"reward": {"min": -3.0, "max": 3.0}}
    assert gini_of(penalised, ranges=declared) == pytest.approx((0.5, 0.5))  # from −3: 2 and 6
    assert gini_of(half, ranges={"reward": {"min": -1.0}}) == pytest.approx((1 / 3,) * 2)  # 2 and 4
    parts = group([RewardResult(0.0, sample_metrics={"delay": delay}) for delay in (-1.0, 3.0)], [2, 2])
    ranges = {"delay": {"min": -3.0}, "reward": {"min": -100.0}}
    row = step_row(step([parts]), context(ranges=ranges))
    assert row["rewards/delay/gini"] == row["reward_delay_gini_mean"] == pytest.approx(0.5)
    assert row["reward_gini"] == 0.0


def test_failed_grading_is_neither_zero_reward_nor_lost():
    groups = [group([1.0, None, 0.5, None], [4, 6, 2, 8])]
    row = step_row(step(groups), context())
    assert row["mean_reward"] == 0.75
    assert row["reward_std"] == 0.25
    assert (row["reward_min"], row["reward_max"]) == (0.5, 1.0)
    assert row["reward_failed"] == 2
    assert row["correct_rate"] == 0.25
    assert row["num_datums"] == 2
    assert row["completions/mean_length"] == 5.0
    assert row["episode"] == 4
    assert row["reward_gini"] == row["reward_gini_mean"] == pytest.approx(1 / 3)


def test_a_step_where_nothing_could_be_graded():
    row = step_row(step([group([None, None], [3, 3], discarded="no_reward")]), context())
    for key in ("mean_reward", "reward", "reward_std", "reward_gini", "advantage_mean", "objective/rlhf_reward"):
        assert row[key] is None
    assert (row["entropy"], row["entropy_sampled"]) == (0.5, 1.0)  # what the sampler knows needs no grading
    assert row["correct_rate"] == 0.0
    assert row["discarded_no_reward_pct"] == 100.0
    assert row["env/all/by_group/frac_mixed"] is None


def test_an_empty_step_is_a_full_row():
    empty, full = step_row(step([]), context()), step_row(step([group([1.0, 0.0], [2, 2])]), context())
    assert set(empty) == set(full)
    assert empty["correct_rate"] is None
    assert empty["env/all/total_episodes"] == 0


def test_lengths_and_stop_reasons():
    groups = [group([1.0, 0.0], [4, 10], prompt_length=3, stops=[True, False]), group([0.0, 1.0], [2, 8], 5)]
    row = step_row(step(groups), context())
    assert row["completions/mean_length"] == row["length_completion_mean"] == row["ac_tokens_per_turn"] == 6.0
    assert row["completions/mean_terminated_length"] == pytest.approx(14 / 3)
    assert (row["completions/min_terminated_length"], row["completions/max_terminated_length"]) == (2.0, 8.0)
    assert row["max_token_hit_rate"] == row["completions/clipped_ratio"] == 0.25
    assert row["stop_reason_length_pct"] == 25.0
    assert row["val/num_eos_tokens"] == 3
    assert row["length_prompt_mean"] == 4.0
    assert (row["length_sum_min"], row["length_sum_max"]) == (7.0, 13.0)
    assert row["group_length_max_median_ratio_mean"] == pytest.approx((10 / 7 + 8 / 5) / 2)
    assert row["group_length_gini_mean"] == pytest.approx((6 / 14 + 6 / 10) / 2)
    assert row["num_tokens"] == 24 + 2 * 3 + 2 * 5


def test_terminated_lengths_are_null_when_all_were_cut_off():
    row = step_row(step([group([0.0, 0.0], [8, 8], stops=[False, False])]), context())
    assert row["max_token_hit_rate"] == 1.0
    assert [row[f"completions/{s}_terminated_length"] for s in ("mean", "min", "max")] == [None] * 3


def test_components_and_sample_metrics():
    def result(correct: float, form: float | None, steps: float) -> RewardResult:
        return RewardResult(
            correct + 0.1 * ((form or 0.0) - 1),
            sample_metrics={"steps": steps},
            components={"correct": correct, "format": form},
            correct=correct == 1.0,
            format_ok=None if form is None else form == 1.0,
        )

    first, second = [result(1.0, 1.0, 2), result(0.0, 1.0, 4)], [result(0.0, 0.0, 6), result(0.0, None, 8)]
    groups = [group(first, [2, 2]), group(second, [2, 2])]
    row = step_row(step(groups), context())
    assert row["rewards/correct/mean"] == 0.25
    assert row["rewards/format/mean"] == row["env/all/format"] == pytest.approx(2 / 3)
    assert row["reward_format_mean"] == pytest.approx(2 / 3)
    assert row["rewards/steps/mean"] == row["env/all/steps"] == row["reward_steps_mean"] == 5.0
    assert row["rewards/steps/std"] == pytest.approx(math.sqrt(5))
    assert row["rewards/steps/gini"] == row["reward_steps_gini_mean"] == pytest.approx((1 / 3 + 1 / 7) / 2)
    assert row["env/all/correct"] == 0.25


def test_a_sample_metric_may_be_none():
    results = [RewardResult(1.0, sample_metrics={"steps": steps}) for steps in (4.0, None, 8.0)]
    row = step_row(step([group(results, [2, 2, 2])]), context())
    assert (row["rewards/steps/mean"], row["rewards/steps/min"]) == (6.0, 4.0)
    nothing = [RewardResult(1.0, sample_metrics={"steps": None})]
    assert step_row(step([group(nothing, [2])]), context())["rewards/steps/mean"] is None


def test_configured_components_have_keys_before_they_have_values():
    row = step_row(step([group([1.0], [2])]), context(reward_names=("correct", "format")))
    assert row["rewards/correct/mean"] is None
    assert row["rewards/format/max"] is None


def test_tags_appear_when_one_is_a_strict_subset():
    easy, hard = (
        group([1.0, 0.0], [2, 4], tags=("all-problems", "easy")),
        group([0.0, 0.0], [6, 8], tags=("all-problems",)),
    )
    row = step_row(step([easy, hard]), context())
    assert row["env/easy/reward/total"] == row["env/easy/correct"] == 0.5
    assert row["env/easy/by_group/frac_mixed"] == 1.0
    assert row["env/easy/ac_tokens_per_turn"] == 3.0
    assert row["env/all-problems/correct"] == 0.25
    one = step_row(step([hard]), context())
    assert not any(key.startswith("env/all-problems") for key in one)
    planned = step_row(step([hard]), context(tags=("easy", "all-problems")))
    assert planned["env/easy/reward/total"] is None
    assert planned["env/easy/total_episodes"] == 0


def test_tags_of_single_completions():
    tagged = group([RewardResult(1.0, tags=("short",)), 0.0], [2, 9])
    row = step_row(step([tagged]), context())
    assert row["env/short/reward/total"] == 1.0
    assert row["env/short/ac_tokens_per_turn"] == 2.0


def test_rollouts_of_several_turns_are_counted_turn_by_turn():
    """Two turns of 3 tokens read and 4 sampled, then 2 and 6; beside it one turn of 3 and 2."""
    several = group([1.0, 0.0], [4, 2])
    several.rollouts[0].turns.append(Turn((7, 8), completion(6, entropy=2.0)))
    row = step_row(step([several]), context())
    assert (row["env/all/total_turns"], row["env/all/turns_per_episode"]) == (3, 1.5)
    assert (row["env/all/total_ob_tokens"], row["env/all/ob_tokens_per_turn"]) == (8, 8 / 3)
    assert row["env/all/total_ac_tokens"] == 12
    assert row["env/all/ac_tokens_per_turn"] == row["ac_tokens_per_turn"] == 4.0  # 12 tokens in 3 turns
    assert row["completions/mean_length"] == row["length_completion_mean"] == 6.0  # 12 tokens in 2 completions
    assert env_metrics(collect([several]))["ac_tokens_per_turn"] == 4.0
    assert row["entropy"] == (6 * 0.5 + 6 * 2.0) / 12


def test_policy_numbers_come_from_the_step_and_entropy_from_all_completions():
    """104 tokens of 0.5 nats, of which 50 have 9.0: trained or not, with a reward or without."""
    groups = [group([1.0, None], [2, 2]), group([0.0, 0.0], [50, 50], discarded="zero_advantage")]
    groups[1].rollouts[0].turns[0].action.entropy_T = np.full(50, 9.0)
    groups[1].rollouts[1].turns[0].action.logprobs_T = np.full(50, -3.0)
    row = step_row(step(groups, update={"loss": np.float32(0.25), "optim/lr": 1e-4, "val/ratio": 1.0}), context())
    assert row["entropy"] == row["policy/entropy_avg"] == (54 * 0.5 + 50 * 9.0) / 104
    sums = [-one.logprobs_T.sum() for each in groups for one in each.rollouts]
    assert row["objective/entropy"] == pytest.approx(np.mean(sums))  # per sequence
    assert row["entropy_sampled"] == (54 * 1.0 + 50 * 3.0) / 104
    assert row["loss"] == row["loss/policy_avg"] == 0.25
    assert row["optim/lr"] == row["learning_rate"] == row["lr"] == 1e-4
    groups[0].rollouts[1].turns[0].action.entropy_T = None
    assert step_row(step(groups), context())["entropy"] is None


def test_state_numbers_and_the_mirrored_entropy_names():
    record = step(
        [group([1.0], [2])], sepa_lambda=0.5, sepa_gate_open=True, exec_surprisal_mean=1.5, plan_surprisal_var=0.2
    )
    row = step_row(record, context())
    assert (row["sepa_lambda"], row["sepa_gate_open"], row["uncertainty_kind"]) == (0.5, True, "surprisal")
    assert (row["exec_entropy_mean"], row["plan_entropy_var"]) == (1.5, 0.2)
    shannon = config(algorithm={"uncertainty_kind": "shannon_entropy"})
    record.state["exec_entropy_mean"] = 0.7
    row = step_row(record, context(config=shannon))
    assert (row["exec_surprisal_mean"], row["exec_entropy_mean"], row["plan_entropy_var"]) == (1.5, 0.7, None)


def test_controllers_that_are_off_say_so_in_every_row():
    from retrain.record.trackers import tracker_values

    row = step_row(step([group([1.0], [2])]), context())
    off = {"sepa_lambda": 0.0, "sepa_gate_open": False, "bp_action": "off", "bp_regime": "off"}
    assert {key: row[key] for key in off} == off
    assert row["sepa_gate_open"] is False
    shown = tracker_values(row)
    assert (shown["train/sepa_lambda"], shown["train/sepa_gate_open"]) == (0.0, 0)
    assert shown["train/backpressure/action"] == shown["train/backpressure/regime"] == "off"
    on = step_row(step([], bp_action="hold", bp_regime="optimal"), context())
    assert (on["bp_action"], on["bp_regime"]) == ("hold", "optimal")


def test_the_score_and_its_penalty_stand_in_every_row():
    """0 and the mean reward without KL; with it what the update says, and null where nobody can say."""

    def objective(config=None, **update):
        made = step([group([1.0, 0.5], [2, 2])], update={f"objective/{key}": value for key, value in update.items()})
        row = step_row(made, context(**({"config": config} if config else {})))
        return row["objective/non_score_reward"], row["objective/rlhf_reward"], row["reward/total"]

    assert objective() == (0.0, 0.75, 0.75)
    with_kl = config(algorithm={"kl_coef": 0.1})
    assert objective(with_kl, non_score_reward=-0.25) == (-0.25, 0.5, 0.75)
    assert objective(with_kl) == (None, None, 0.75)


def test_planning_fraction():
    marked = group([1.0, 0.0], [4, 6])
    for rollout, planning_T in zip(marked.rollouts, (np.arange(4) == 0, np.zeros(6, dtype=bool)), strict=True):
        rollout.planning_T = planning_T
    assert step_row(step([marked]), context())["planning_fraction"] == 0.1


def test_times_add_up():
    row = step_row(step([group([1.0, 0.0], [4, 6])]), context())
    parts = [row[m.key] for m in METRICS if m.key.startswith("time/") and not m.requires]
    assert sum(parts) == row["step_time_s"] == row["time/total"] == row["timing_step_total"] == 4.0
    assert (row["time/rollout"], row["time/update"], row["time/other"]) == (2.0, 1.0, 1.0)
    assert row["perf/completion_tokens_per_s"] == 2.5
    assert row["perf/tokens_per_s"] == row["tokens_per_second"] == 4.0
    assert row["perf/episodes_per_s"] == row["eps"] == 0.5


def test_only_what_lies_within_the_step_counts_as_its_time():
    record = step([group([1.0], [4])])
    record.spans += [("eval", record.step_start - 60.0, record.step_start), ("probe", record.step_end - 0.5, 2e9)]
    row = step_row(record, context())
    assert (row["time/eval"], row["time/probe"], row["time/other"]) == (0.0, 0.5, 0.5)


def test_running_totals():
    totals = Totals(episodes=10, correct=5, tokens=100)
    row = step_row(step([group([1.0, 1.0], [1, 1], prompt_length=2)], number=4), context(), totals)
    assert row["running_correct_rate"] == pytest.approx(7 / 12)
    assert row["episode"] == 12
    assert row["num_tokens"] == 106
    assert row["progress/done_frac"] == 0.5
    assert row["progress/batch"] == row["step"] == 4


def test_rows_are_strict_json_and_take_further_keys():
    record = step(
        [group([1.0], [2])], update={"loss": math.nan, "my/plugin": math.inf, "optim/grad_norm": np.float64(2)}
    )
    record.state["zeta"] = "free text"
    record.state["ignored"] = {"nested": 1}
    row = step_row(record, context())
    text = json.dumps(row, allow_nan=False)
    assert row["loss"] is None
    assert row["my/plugin"] is None
    assert row["zeta"] == "free text"
    assert "ignored" not in row
    assert json.loads(text) == row


def test_only_chosen_aliases_stand_in_a_row():
    row = step_row(step([group([1.0], [2])]), context(config=config(logging={"aliases": ["trl"]})))
    assert "reward" in row
    assert "env/all/reward/total" not in row
    assert "reward_sum_mean" not in row
    none = step_row(step([group([1.0], [2])]), context(config=config(logging={"aliases": []})))
    assert "reward" not in none
    assert "mean_reward" in none


# What each tool writes with its default settings, from its own sources and documents.
DEFAULT_NAMES = {
    # docs/rl/rl-logging, rl/train.py, rl/metrics.py, rl/metric_util.py and recipes/rl_loop.py of the Tinker cookbook
    "tinker": """progress/batch progress/done_frac optim/lr optim/entropy optim/kl_sample_train_v1
        optim/kl_sample_train_v2 kl_sample_train_v1 kl_sample_train_v2 entropy ac_tokens_per_turn time/total
        reward/total env/all/reward/total env/all/correct env/all/format env/all/ac_tokens_per_turn
        env/all/ob_tokens_per_turn env/all/turns_per_episode env/all/total_episodes env/all/total_turns
        env/all/total_ac_tokens env/all/total_ob_tokens env/all/by_group/frac_mixed env/all/by_group/frac_all_good
        env/all/by_group/frac_all_bad env/all/depth env/sums/reward/total env/sums/correct""",
    # Logged metrics of TRL's GRPO trainer, of its PPO trainer, and what transformers' Trainer adds
    "trl": """loss grad_norm learning_rate epoch num_tokens step_time reward reward_std frac_reward_zero_std entropy kl
        completions/mean_length completions/min_length completions/max_length completions/mean_terminated_length
        completions/min_terminated_length completions/max_terminated_length completions/clipped_ratio
        rewards/depth/mean rewards/depth/std clip_ratio clip_ratio/region_mean clip_ratio/low_mean clip_ratio/low_min
        clip_ratio/high_mean clip_ratio/high_max
        eps lr episode objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward objective/scores
        policy/approxkl_avg policy/clipfrac_avg policy/entropy_avg loss/policy_avg loss/value_avg val/clipfrac_avg
        val/ratio val/ratio_var val/num_eos_tokens""",
    # Step metrics of Telescope's trainer and of the catalogue of its charts
    "telescope": """grad_norm learning_rate entropy kl_divergence_inference off_policy_steps_mean
        reward_sum_mean reward_sum_std reward_sum_min reward_sum_max reward_gini_mean
        reward_depth_mean reward_depth_std reward_depth_min reward_depth_max reward_depth_gini_mean
        advantage_mean advantage_std advantage_min advantage_max
        length_prompt_mean length_prompt_std length_prompt_min length_prompt_max
        length_completion_mean length_completion_std length_completion_min length_completion_max
        length_sum_mean length_sum_std length_sum_min length_sum_max
        stop_reason_length_pct group_length_gini_mean group_length_max_median_ratio_mean
        discarded_count discarded_zero_advantage_pct discarded_max_async_pct discarded_stop_reason_length_pct
        discarded_group_length_gini_mean discarded_group_length_max_median_ratio_mean
        discarded_zero_advantage_all_zero_pct discarded_zero_advantage_all_positive_pct
        discarded_zero_advantage_mean_reward discarded_reward_sum_mean
        discarded_length_prompt_mean discarded_length_completion_max discarded_length_sum_std
        timing_step_total timing_waiting_for_data timing_forward_total timing_backward_total
        timing_loss_computation_total timing_data_to_device_total timing_prepare_tensors_total
        timing_weight_sync_trainer_total timing_forward_microbatch_mean timing_backward_microbatch_mean
        timing_loss_computation_microbatch_mean timing_data_to_device_microbatch_mean
        timing_prepare_tensors_microbatch_mean tokens_per_second""",
    # docs/logging.md and trainer.py of retrain 0.3
    "retrain": """step condition advantage_mode transform_mode uncertainty_kind loss reported_loss loss_is_placeholder
        backend_reports_sync_loss backend_preserves_token_advantages mean_reward correct_rate running_correct_rate
        reward_tie_eligible_groups reward_tie_groups reward_uniform_groups reward_tie_group_rate
        reward_uniform_group_rate reward_tie_pair_rate reward_unique_fraction_mean sepa_lambda sepa_gate_open
        num_datums max_token_hit_rate step_time_s sample_time_s train_time_s batch_size group_size bp_warmup bp_action
        bp_regime bp_p_star bp_sigma bp_kappa bp_utilization bp_throughput tokens_per_second clip_fraction
        exec_entropy_mean exec_entropy_var plan_entropy_mean plan_entropy_var exec_surprisal_mean exec_surprisal_var
        plan_surprisal_mean plan_surprisal_var lr""",
}


@pytest.mark.parametrize("tool", DEFAULT_NAMES)
def test_the_aliases_of_one_tool_are_all_its_default_names(tool, monkeypatch):
    monkeypatch.setattr(RunContext, "features", frozenset({"critic", "evaluation"}))  # no mode has a critic yet
    settings = config(logging={"aliases": [tool]}, algorithm={"kl_coef": 0.1})
    groups = [group([RewardResult(1.0, {"depth": 2.0}), 0.0], [4, 5], tags=("sums",)), group([1.0], [3])]
    row = step_row(step(groups), context(config=settings))
    assert set(DEFAULT_NAMES[tool].split()) - set(row) == set()


def test_every_tool_has_the_learning_rate_and_the_gradient_under_its_own_names():
    update = {"optim/lr": 1e-3, "optim/grad_norm": 2.0, "policy/clipfrac_avg": 0.25}
    rows = {
        tool: step_row(
            step([group([1.0, 0.0], [2, 2])], update=update), context(config=config(logging={"aliases": [tool]}))
        )
        for tool in DEFAULT_NAMES
    }
    assert [rows["trl"][key] for key in ("learning_rate", "lr", "grad_norm")] == [1e-3, 1e-3, 2.0]
    assert [rows["telescope"][key] for key in ("learning_rate", "grad_norm")] == [1e-3, 2.0]
    assert rows["retrain"]["clip_fraction"] == 0.25
    assert rows["tinker"]["reward/total"] == 0.5
    assert rows["tinker"]["optim/entropy"] == 1.0
    assert "grad_norm" not in rows["tinker"]


def test_ties_of_rewards():
    """Groups of rewards (1, 1, 0), (1, 1), (0.3, 0.1 + 0.2) and one that is alone: 3 of 5 pairs are equal."""
    groups = [group([1.0, 1.0, 0.0], [2, 2, 2]), group([1.0, 1.0], [2, 2]), group([0.3, 0.1 + 0.2], [2, 2]),
              group([1.0, None], [2, 2])]  # fmt: skip
    row = step_row(step(groups), context())
    assert (row["reward_tie_eligible_groups"], row["reward_tie_groups"], row["reward_uniform_groups"]) == (3, 3, 2)
    assert row["reward_tie_pair_rate"] == pytest.approx(3 / 5)
    assert row["reward_uniform_group_rate"] == pytest.approx(2 / 3)
    assert row["reward_unique_fraction_mean"] == pytest.approx((2 / 3 + 1 / 2 + 1 / 2) / 3)
    assert step_row(step([]), context())["reward_tie_pair_rate"] is None


def test_every_key_without_a_slash_stands_in_every_row(monkeypatch):
    row = step_row(step([]), context())
    assert {m.key for m in METRICS if "/" not in m.key and not m.requires} <= set(row)
    assert "kl" in row
    assert "bp_action" in row
    assert "loss/value_avg" not in row
    assert [m.key for m in row_metrics(context())] == [
        key for key in row if key in {m.key for m in row_metrics(context())}
    ]
    monkeypatch.setattr(RunContext, "features", frozenset({"critic"}))  # no mode has one yet
    critic = step_row(step([]), context(config=config(algorithm={"kl_coef": 0.1})))
    assert {"loss/value_avg", "val/clipfrac_avg", "objective/rlhf_reward"} <= set(critic)


def test_evaluation_row():
    groups = [group([1.0, 1.0], [2, 2], tags=("easy",)), group([1.0, 0.0], [4, 4], tags=("hard",), stops=[True, False])]
    row = eval_row(evaluation(groups, number=20))
    assert row["eval/heldout/step"] == 20
    assert row["eval/heldout/correct_rate"] == row["eval/heldout/reward_mean"] == 0.75
    assert row["eval/heldout/easy/correct_rate"] == 1.0
    assert row["eval/heldout/hard/correct_rate"] == 0.5
    assert row["eval/heldout/problems"] == 2
    assert row["eval/heldout/max_token_hit_rate"] == 0.25
    assert 0.0 < row["eval/heldout/ci_low"] < 0.75 < row["eval/heldout/ci_high"] < 1.0


def test_the_interval_is_clustered_by_problem():
    """Ten copies of each answer say nothing more than one; all right or all wrong still has an interval."""
    rates = [1.0] * 30 + [0.0] * 10
    single = eval_row(evaluation([group([r], [1]) for r in rates]))
    copies = eval_row(evaluation([group([r] * 10, [1] * 10) for r in rates]))
    assert copies["eval/heldout/ci_low"] == pytest.approx(single["eval/heldout/ci_low"], abs=1e-12)
    assert copies["eval/heldout/ci_high"] == pytest.approx(single["eval/heldout/ci_high"], abs=1e-12)
    assert 0.55 < single["eval/heldout/ci_low"] < 0.65
    perfect = eval_row(evaluation([group([1.0], [1]) for _ in range(20)]))
    assert 0.75 < perfect["eval/heldout/ci_low"] < perfect["eval/heldout/ci_high"] == 1.0
    empty = eval_row(evaluation([]))
    assert (empty["eval/heldout/correct_rate"], empty["eval/heldout/problems"]) == (None, 0)


def test_timing_keys_are_the_only_ones_that_differ_between_equal_steps():
    first = step([group([1.0, 0.0], [4, 6])])
    second = step([group([1.0, 0.0], [4, 6])])
    second.step_end += 3.21
    second.spans = [("rollout", 0.0, 1.0)]
    a, b = step_row(first, context()), step_row(second, context())
    differing = {key for key in a if a[key] != b[key]}
    assert differing
    assert all(is_timing_key(key) for key in differing)
    assert not is_timing_key("mean_reward")
    assert is_timing_key("step_time_s")


def test_an_evaluation_that_nobody_graded_has_no_accuracy():
    tagged = group([None, None], [2, 2], tags=("easy",))
    row = eval_row(evaluation([tagged, group([None], [2], tags=("hard",))]))
    for key in ("correct_rate", "ci_low", "ci_high", "reward_mean", "easy/correct_rate"):
        assert row[f"eval/heldout/{key}"] is None
    assert row["eval/heldout/failed"] == 3
    partly = eval_row(evaluation([group([None, 1.0], [2, 2])]))
    assert (partly["eval/heldout/correct_rate"], partly["eval/heldout/failed"]) == (0.5, 1)


def test_a_step_that_trained_nothing_has_no_loss():
    groups = [group([0.0, 0.0], [4, 4], discarded="zero_advantage")]
    row = step_row(step(groups, update={"loss": 0.0, "reported_loss": 0.0, "num_datums": 0}), context())
    assert (row["num_datums"], row["loss"], row["reported_loss"], row["loss/policy_avg"]) == (0, None, None, None)
    assert row["discarded_length_sum_mean"] == 7.0
    assert (row["discarded_group_length_gini_mean"], row["discarded_max_token_hit_rate"]) == (0.0, 0.0)


def test_planning_fraction_counts_what_was_sampled_not_what_was_graded():
    marked = group([1.0, None], [4, 6])
    for rollout, planning_T in zip(marked.rollouts, (np.arange(4) == 0, np.zeros(6, dtype=bool)), strict=True):
        rollout.planning_T = planning_T
    assert step_row(step([marked], planning_fraction=0.25), context())["planning_fraction"] == 0.1


def test_waiting_in_a_cohort_has_its_own_time():
    record = step([group([1.0], [4])])
    record.spans.append(("cohort", record.step_end - 0.75, record.step_end))
    row = step_row(record, context())
    assert (row["time/cohort"], row["time/other"]) == (0.75, 0.25)
    assert (row["timing_waiting_for_data"], row["timing_step_active"]) == (2.0, 1.25)
    assert step_row(step([]), context())["time/cohort"] == 0.0


def test_numbers_of_all_kinds_flow_through_under_their_names():
    """Of a reward, a plug-in's state and the update; and a name that is known before gives the first row its key."""
    result = RewardResult(1.0, sample_metrics={"tool calls/search": 2.0})
    record = step([group([result], [2])], update={"mine/spread": np.float32(0.5)}, my_gate=True)
    row = step_row(record, context(reward_names=("depth",)))
    assert row["rewards/tool calls/search/mean"] == row["env/all/tool calls/search"] == 2.0
    assert (row["mine/spread"], row["my_gate"]) == (0.5, True)
    assert row["rewards/depth/mean"] is None


def test_of_several_ranges_the_last_one_counts():
    declared = {"reward": {"min": 0.0, "max": 1.0}, "steps": {"max": 9, "invert": True}}
    written = {"steps": {"max": 20.0}, "reward": {"min": -1.0}}
    assert chart_ranges(declared, written) == {
        "reward": {"min": -1.0, "max": 1.0},
        "steps": {"max": 20.0, "invert": True},
    }
    assert declared["reward"] == {"min": 0.0, "max": 1.0}
    assert chart_ranges() == {}


def test_metrics_count_what_was_sampled(mixed_campaign, silent_campaign):
    """Metrics computed after filtering: correct 0.25 reported where it was 0.0."""
    skipped = 0
    for run in [*runs_of(mixed_campaign / "out").values(), *runs_of(silent_campaign / "out").values()]:
        for row in rows_of(run):
            own = [one for one in completions_of(run) if one["step"] == row["step"]]
            assert len(own) == 12
            assert row["mean_reward"] == pytest.approx(np.mean([one["reward"] for one in own]))
            assert row["correct_rate"] == pytest.approx(np.mean([one["correct"] for one in own]))
            by_group: dict[int, set[float]] = {}
            for one in own:
                by_group.setdefault(one["group"], set()).add(one["reward"])
            skipped += (
                sum(len(rewards) == 1 for rewards in by_group.values()) if run.is_relative_to(mixed_campaign) else 0
            )
    assert skipped  # some groups of the mixed campaign were without signal, or this shows nothing
