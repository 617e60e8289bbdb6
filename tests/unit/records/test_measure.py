import json
import math
from typing import Any

import numpy as np
import pytest
from helpers.records import completion, config, context, evaluation, group, step, updated, with_action

from retrain.records.catalogue import METRICS
from retrain.records.measure import measure_step
from retrain.records.schema.rows import START
from retrain.records.scores import eval_row, evaluation_keys
from retrain.types import CreditedGroup, RewardResult, Turn


def row_of(
    *groups: CreditedGroup, settings: dict[str, Any] | None = None, update: dict[str, Any] | None = None, **state: Any
):
    """Return the row of one step; ``settings`` change the context, ``update`` and ``state`` the step."""
    run = context(**(settings or {}))
    return measure_step(step(list(groups), update=update, **state), run, START, evaluation_keys(run))[0]


def test_correct_rate_counts_groups_that_did_not_train():
    """One group trains with 1 of 2 correct, three groups are all wrong and dropped: 1/8, not 1/2."""
    dropped = [group([0.0, 0.0], [4, 4], discarded="zero_advantage") for _ in range(3)]
    row = row_of(group([1.0, 0.0], [4, 4]), *dropped)
    assert row["correct_rate"] == row["env/all/correct"] == 0.125
    assert row["mean_reward"] == row["reward"] == row["env/all/reward/total"] == row["objective/scores"] == 0.125
    assert (row["num_datums"], row["discarded_count"], row["discarded_zero_advantage_pct"]) == (2, 3, 75.0)
    shares = [row[f"discarded_zero_advantage_all_{name}_pct"] for name in ("zero", "positive")]
    assert shares == [100.0, 0.0]
    assert (row["discarded_reward_mean"], row["discarded_length_completion_mean"]) == (0.0, 4.0)
    assert (row["advantage_mean"], row["advantage_max"]) == (0.0, 0.5)


def test_shares_of_mixed_groups_and_ties():
    groups = [
        group([1.0, 1.0, 0.0], [2, 2, 2]),
        group([0.7, 0.7], [2, 2]),
        group([0.3, 0.1 + 0.2], [2, 2]),  # float noise is equality
        group([None, None], [2, 2]),
    ]
    row = row_of(*groups)
    shares = [row[f"env/all/by_group/frac_{name}"] for name in ("mixed", "all_good", "all_bad")]
    assert shares == pytest.approx([1 / 3] * 3)
    assert row["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert (row["reward_tie_eligible_groups"], row["reward_tie_groups"], row["reward_uniform_groups"]) == (3, 3, 2)
    assert row["reward_tie_pair_rate"] == pytest.approx(3 / 5)
    assert row["reward_uniform_group_rate"] == pytest.approx(2 / 3)
    assert row["reward_unique_fraction_mean"] == pytest.approx((2 / 3 + 1 / 2 + 1 / 2) / 3)


def test_the_gini_of_a_row_counts_uniform_groups_and_shifts_negative_rewards():
    """Uniform groups count 0; negative rewards are shifted by the declared minimum, else by the group's."""
    half, zero, one = group([1.0, 3.0], [2, 2]), group([0.0, 0.0], [2, 2]), group([1.0, 1.0], [2, 2])
    row = row_of(half, zero, one, group([None, 1.0], [2, 2]))
    assert row["reward_gini"] == row["reward_gini_mean"] == pytest.approx(0.5 / 3)
    penalised = group([-1.0, 3.0], [2, 2])
    assert row_of(penalised)["reward_gini"] == 1.0  # from −1: 0 and 4
    shifted = row_of(penalised, settings={"ranges": {"reward": {"min": -3.0}}})
    assert shifted["reward_gini"] == pytest.approx(0.5)  # from −3: 2 and 6


def test_failed_grading_is_neither_zero_reward_nor_lost():
    row = row_of(group([1.0, None, 0.5, None], [4, 6, 2, 8]))
    assert (row["mean_reward"], row["reward_std"], row["reward_min"], row["reward_max"]) == (0.75, 0.25, 0.5, 1.0)
    assert (row["reward_failed"], row["correct_rate"], row["num_datums"], row["episode"]) == (2, 0.25, 2, 4)


def test_steps_without_rewards_losses_or_completions_have_full_rows():
    full = row_of(group([1.0, 0.0], [2, 2]))
    ungraded = row_of(group([None, None], [3, 3], discarded="no_reward"))
    for key in ("mean_reward", "reward", "reward_std", "reward_gini", "advantage_mean", "objective/rlhf_reward"):
        assert ungraded[key] is None
    assert (ungraded["entropy"], ungraded["entropy_sampled"]) == (0.5, 1.0)
    assert (ungraded["correct_rate"], ungraded["discarded_no_reward_pct"]) == (0.0, 100.0)
    empty = row_of()
    assert set(empty) == set(full) == set(ungraded)
    assert {metric.key for metric in METRICS if "/" not in metric.key and not metric.requires} <= set(empty)
    assert (empty["correct_rate"], empty["reward_tie_pair_rate"], empty["env/all/total_episodes"]) == (None, None, 0)
    update = {"loss": 0.0, "reported_loss": 0.0, "num_datums": 0}
    untrained = row_of(group([0.0, 0.0], [4, 4], discarded="zero_advantage"), update=update)
    assert (untrained["loss"], untrained["reported_loss"]) == (None, None)


def test_lengths_and_stop_reasons():
    row = row_of(group([1.0, 0.0], [4, 10], 3, stops=[True, False]), group([0.0, 1.0], [2, 8], 5))
    assert row["completions/mean_length"] == row["length_completion_mean"] == row["ac_tokens_per_turn"] == 6.0
    assert row["completions/mean_terminated_length"] == pytest.approx(14 / 3)
    assert (row["completions/min_terminated_length"], row["completions/max_terminated_length"]) == (2.0, 8.0)
    assert row["max_token_hit_rate"] == row["completions/clipped_ratio"] == 0.25
    assert (row["stop_reason_length_pct"], row["val/num_eos_tokens"]) == (25.0, 3)
    assert (row["length_prompt_mean"], row["length_sum_min"], row["length_sum_max"]) == (4.0, 7.0, 13.0)
    assert row["group_length_max_median_ratio_mean"] == pytest.approx((10 / 7 + 8 / 5) / 2)
    assert row["group_length_gini_mean"] == pytest.approx((6 / 14 + 6 / 10) / 2)
    assert row["num_tokens"] == 24 + 2 * 3 + 2 * 5
    truncated = row_of(group([0.0, 0.0], [8, 8], stops=[False, False]))
    assert [truncated[f"completions/{name}_terminated_length"] for name in ("mean", "min", "max")] == [None] * 3


def test_components_and_sample_metrics():
    def result(correct: float, form: float | None, steps: float | None) -> RewardResult:
        parts = {"correct": correct, "format": form}
        is_well_formed = None if form is None else form == 1.0
        total = correct + 0.1 * ((form or 0.0) - 1)
        return RewardResult(total, {"steps": steps}, components=parts, correct=correct == 1.0, format_ok=is_well_formed)

    first, second = [result(1.0, 1.0, 2), result(0.0, 1.0, 4)], [result(0.0, 0.0, 6), result(0.0, None, 8)]
    settings = {"reward_names": ("correct", "depth")}
    row = row_of(group(first, [2, 2]), group(second, [2, 2]), settings=settings)
    assert row["rewards/correct/mean"] == row["env/all/correct"] == 0.25
    assert row["rewards/format/mean"] == row["env/all/format"] == row["reward_format_mean"] == pytest.approx(2 / 3)
    assert row["rewards/steps/mean"] == row["env/all/steps"] == row["reward_steps_mean"] == 5.0
    assert row["rewards/steps/std"] == pytest.approx(math.sqrt(5))
    assert row["rewards/steps/gini"] == row["reward_steps_gini_mean"] == pytest.approx((1 / 3 + 1 / 7) / 2)
    assert row["rewards/depth/mean"] is None  # a configured component has its keys before it has values


def test_tags_appear_when_one_is_a_strict_subset():
    easy = group([1.0, 0.0], [2, 4], tags=("all-problems", "easy"))
    hard = group([RewardResult(0.0, tags=("short",)), 0.0], [6, 8], tags=("all-problems",))
    row = row_of(easy, hard)
    assert row["env/easy/reward/total"] == row["env/easy/correct"] == 0.5
    assert row["env/easy/by_group/frac_mixed"] == 1.0
    assert row["env/easy/ac_tokens_per_turn"] == 3.0
    assert row["env/all-problems/correct"] == 0.25
    assert (row["env/short/reward/total"], row["env/short/ac_tokens_per_turn"]) == (0.0, 6.0)
    untagged = group([0.0, 0.0], [6, 8], tags=("all-problems",))
    assert not any(key.startswith("env/all-problems") for key in row_of(untagged))
    planned = row_of(untagged, settings={"tags": ("easy", "all-problems")})
    assert (planned["env/easy/reward/total"], planned["env/easy/total_episodes"]) == (None, 0)


def test_rollouts_of_several_turns_are_counted_turn_by_turn():
    """Two turns of 3 tokens read and 4 sampled, then 2 and 6; beside it one turn of 3 and 2."""
    several = group([1.0, 0.0], [4, 2])
    turns = (*several.rollouts[0].turns, Turn((7, 8), completion(6, entropy=2.0)))
    row = row_of(updated(several, {"turns": turns}))
    assert (row["env/all/total_turns"], row["env/all/turns_per_episode"]) == (3, 1.5)
    assert (row["env/all/total_ob_tokens"], row["env/all/ob_tokens_per_turn"]) == (8, 8 / 3)
    assert row["env/all/total_ac_tokens"] == 12
    assert row["env/all/ac_tokens_per_turn"] == row["ac_tokens_per_turn"] == 4.0  # 12 tokens in 3 turns
    assert row["completions/mean_length"] == row["length_completion_mean"] == 6.0  # 12 tokens in 2 completions
    assert row["entropy"] == (6 * 0.5 + 6 * 2.0) / 12


def test_policy_numbers_come_from_the_step_and_entropy_from_all_completions():
    """104 tokens of 0.5 nats, of which 50 have 9.0: trained or not, with a reward or without."""
    first, second = group([1.0, None], [2, 2]), group([0.0, 0.0], [50, 50], discarded="zero_advantage")
    second = with_action(second, 0, entropy_T=np.full(50, 9.0))
    second = with_action(second, 1, logprobs_T=np.full(50, -3.0))
    row = row_of(first, second, update={"loss": np.float32(0.25), "optim/lr": 1e-4})
    assert row["entropy"] == row["policy/entropy_avg"] == (54 * 0.5 + 50 * 9.0) / 104
    assert row["objective/entropy"] == (2 + 2 + 50 + 150) / 4  # per sequence
    assert row["entropy_sampled"] == (54 * 1.0 + 50 * 3.0) / 104
    assert row["loss"] == row["loss/policy_avg"] == 0.25
    assert row["optim/lr"] == row["learning_rate"] == row["lr"] == 1e-4
    assert row_of(with_action(first, 1, entropy_T=None), second)["entropy"] is None


def test_the_score_and_its_penalty_stand_in_every_row():
    """Without KL the penalty is 0; with KL both values come from the update, and are null without one."""

    def objective(kl_coef: float, **update):
        settings = {"config": config(algorithm={"kl_coef": kl_coef})}
        row = row_of(group([1.0, 0.5], [2, 2]), settings=settings, update=update)
        return row["objective/non_score_reward"], row["objective/rlhf_reward"], row["reward/total"]

    assert objective(0.0) == (0.0, 0.75, 0.75)
    assert objective(0.1, **{"objective/non_score_reward": -0.25}) == (-0.25, 0.5, 0.75)
    assert objective(0.1) == (None, None, 0.75)


def test_planning_fraction_counts_what_was_sampled_not_what_was_graded():
    masks = ({"planning_T": np.arange(4) == 0}, {"planning_T": np.zeros(6, dtype=bool)})
    marked = updated(group([1.0, None], [4, 6]), *masks)
    assert row_of(marked, planning_fraction=0.25)["planning_fraction"] == 0.1


def test_times_add_up_and_only_what_lies_within_the_step_counts():
    row = row_of(group([1.0, 0.0], [4, 6]))
    parts = [row[m.key] for m in METRICS if m.key.startswith("time/") and not m.requires]
    assert sum(parts) == row["step_time_s"] == row["time/total"] == row["timing_step_total"] == 4.0
    assert (row["time/rollout"], row["time/update"], row["time/other"]) == (2.0, 1.0, 1.0)
    assert row["perf/completion_tokens_per_s"] == 2.5
    assert row["perf/tokens_per_s"] == row["tokens_per_second"] == 4.0
    assert row["perf/episodes_per_s"] == row["eps"] == 0.5
    record = step([group([1.0], [4])])
    record.spans += [
        ("eval", record.step_start - 60.0, record.step_start),
        ("probe", record.step_end - 0.5, 2e9),
        ("cohort", record.step_end - 0.75, record.step_end - 0.5),
    ]
    row = measure_step(record, context(), START)[0]
    assert [row[f"time/{name}"] for name in ("eval", "probe", "cohort", "other")] == [0.0, 0.5, 0.25, 0.25]
    assert (row["timing_waiting_for_data"], row["timing_step_active"]) == (2.0, 1.75)


def test_rows_are_strict_json_and_take_further_keys():
    update = {"loss": math.nan, "my/plugin": math.inf, "mine/spread": np.float32(0.5), "optim/grad_norm": np.float64(2)}
    named = group([RewardResult(1.0, sample_metrics={"tool calls/search": 2.0})], [2])
    row = row_of(named, update=update, zeta="free text", my_gate=True, ignored={"nested": 1})
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert (row["loss"], row["my/plugin"], row["mine/spread"]) == (None, None, 0.5)
    assert (row["zeta"], row["my_gate"], "ignored" in row) == ("free text", True, False)
    assert row["rewards/tool calls/search/mean"] == row["env/all/tool calls/search"] == 2.0


# Of each kind of name that a tool writes with its default settings, one or two, from its own sources and documents.
DEFAULT_NAMES = {
    # docs/rl/rl-logging, rl/train.py, rl/metrics.py, rl/metric_util.py and recipes/rl_loop.py of the Tinker cookbook
    "tinker": """progress/batch optim/lr optim/entropy optim/kl_sample_train_v1 kl_sample_train_v2 time/total
        reward/total env/all/reward/total env/all/correct env/all/format env/all/ac_tokens_per_turn
        env/all/total_ob_tokens env/all/by_group/frac_mixed env/all/depth env/sums/reward/total env/sums/correct""",
    # Logged metrics of TRL's GRPO trainer, of its PPO trainer, and what transformers' Trainer adds
    "trl": """loss grad_norm learning_rate epoch num_tokens step_time reward reward_std frac_reward_zero_std entropy kl
        completions/mean_terminated_length completions/clipped_ratio rewards/depth/mean rewards/depth/std
        clip_ratio/region_mean clip_ratio/low_min eps lr episode objective/kl objective/rlhf_reward policy/approxkl_avg
        policy/clipfrac_avg loss/policy_avg loss/value_avg val/clipfrac_avg val/ratio_var val/num_eos_tokens""",
    # Step metrics of Telescope's trainer and of the catalogue of its charts
    "telescope": """grad_norm kl_divergence_inference off_policy_steps_mean reward_sum_mean reward_gini_mean
        reward_depth_std reward_depth_gini_mean advantage_max length_prompt_mean length_completion_std length_sum_min
        stop_reason_length_pct group_length_gini_mean discarded_zero_advantage_pct discarded_max_async_pct
        discarded_zero_advantage_all_positive_pct discarded_reward_sum_mean discarded_length_completion_max
        timing_step_total timing_forward_total timing_backward_microbatch_mean tokens_per_second""",
    # docs/logging.md and trainer.py of retrain 0.3
    "retrain": """step condition loss reported_loss backend_reports_sync_loss mean_reward running_correct_rate
        reward_tie_group_rate reward_unique_fraction_mean sepa_lambda sepa_gate_open num_datums max_token_hit_rate
        train_time_s batch_size bp_action bp_p_star clip_fraction exec_entropy_mean plan_surprisal_var lr""",
}


def row_with_aliases(*aliases: str, **algorithm: Any) -> dict[str, Any]:
    settings = {"config": config(logging={"aliases": list(aliases)}, algorithm=algorithm)}
    groups = [group([RewardResult(1.0, {"depth": 2.0}), 0.0], [4, 5], tags=("sums",)), group([1.0], [3])]
    update = {"optim/lr": 1e-3, "optim/grad_norm": 2.0, "policy/clipfrac_avg": 0.25}
    return row_of(*groups, settings=settings, update=update)


@pytest.mark.parametrize("tool", DEFAULT_NAMES)
def test_the_aliases_of_one_tool_are_all_its_default_names(tool):
    names = set(DEFAULT_NAMES[tool].split())
    with_critic = set(row_with_aliases(tool, advantage_mode="gae", transform_mode="none"))
    with_kl = set(row_with_aliases(tool, kl_coef=0.1))
    assert names - with_critic - with_kl == set()


def test_only_chosen_aliases_stand_in_a_row_and_have_the_value_of_their_metric():
    rows = {tool: row_with_aliases(tool) for tool in DEFAULT_NAMES}
    assert [rows["trl"][key] for key in ("learning_rate", "lr", "grad_norm")] == [1e-3, 1e-3, 2.0]
    assert rows["retrain"]["clip_fraction"] == 0.25
    assert (rows["tinker"]["reward/total"], rows["tinker"]["optim/entropy"]) == (pytest.approx(2 / 3), 1.0)
    assert not {"grad_norm", "reward", "reward_sum_mean"} & set(rows["tinker"])
    assert not {"reward", "env/all/reward/total", "reward_sum_mean"} & set(row_with_aliases())


def test_evaluation_row():
    easy = group([1.0, 1.0], [2, 2], tags=("easy",))
    hard = group([1.0, 0.0], [4, 4], tags=("hard",), stops=[True, False])
    row = eval_row(evaluation([easy, hard], number=20))
    assert (row["eval/heldout/step"], row["eval/heldout/problems"]) == (20, 2)
    assert row["eval/heldout/correct_rate"] == row["eval/heldout/reward_mean"] == 0.75
    assert (row["eval/heldout/easy/correct_rate"], row["eval/heldout/hard/correct_rate"]) == (1.0, 0.5)
    assert row["eval/heldout/max_token_hit_rate"] == 0.25
    assert 0.0 < row["eval/heldout/ci_low"] < 0.75 < row["eval/heldout/ci_high"] < 1.0
    ungraded = eval_row(evaluation([group([None, None], [2, 2], tags=("easy",)), group([None], [2])]))
    for key in ("correct_rate", "ci_low", "ci_high", "reward_mean", "easy/correct_rate"):
        assert ungraded[f"eval/heldout/{key}"] is None
    assert ungraded["eval/heldout/failed"] == 3


def test_the_interval_is_clustered_by_problem():
    """Ten copies of each answer add no information; all correct or all wrong still has an interval."""
    rates = [1.0] * 30 + [0.0] * 10
    single = eval_row(evaluation([group([rate], [1]) for rate in rates]))
    copies = eval_row(evaluation([group([rate] * 10, [1] * 10) for rate in rates]))
    for key in ("eval/heldout/ci_low", "eval/heldout/ci_high"):
        assert copies[key] == pytest.approx(single[key], abs=1e-12)
    assert 0.55 < single["eval/heldout/ci_low"] < 0.65
    perfect = eval_row(evaluation([group([1.0], [1]) for _ in range(20)]))
    assert 0.75 < perfect["eval/heldout/ci_low"] < perfect["eval/heldout/ci_high"] == 1.0
    empty = eval_row(evaluation([]))
    assert (empty["eval/heldout/correct_rate"], empty["eval/heldout/problems"]) == (None, 0)
