"""Change one line at a time in a copy of the tree, and see that a test notices.

    python -m tests.mutants
    python -m tests.mutants --only pooling roles

Each mutant is a mistake that reads like right code: a factor dropped, a bound off by one, a copy left out. The tests
that ought to notice it are run on the copy, after they have passed there unchanged. Prints a line for each mutant,
``caught by`` the first test that failed or ``SURVIVED``; exit status 1 if one survived or could not be tried.

A file ``tests/mutants/*.patch`` is a mutant too: a unified diff whose first line names its tests, separated by blanks:

    tests: tests/test_update.py::test_clipping_and_the_first_adamw_step
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATCHES = Path(__file__).with_suffix("")
SECONDS = 120
"""Most that one test may take: a mutant may wait for ever."""


@dataclass(frozen=True)
class Mutant:
    """``old`` stands exactly once in ``file`` and becomes ``new``; one of ``tests`` (as pytest takes them, below
    ``tests/``) should fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The file's text with the mistake. Raises ValueError when ``old`` is not there exactly once."""
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.old!r} stands {found} times in {self.file}")
        return text.replace(self.old, self.new)

    @property
    def files(self) -> tuple[str, ...]:
        """Changed files, relative to the root."""
        return (self.file,)

    def apply(self, tree: Path) -> None:
        """Change the file in this tree. Raises ValueError when the mutant does not fit."""
        path = tree / self.file
        path.write_text(self.applied(path.read_text()))


@dataclass(frozen=True)
class Patch:
    """A mutant kept as a unified diff."""

    path: Path

    @property
    def name(self) -> str:
        """File name without suffix."""
        return self.path.stem

    @property
    def tests(self) -> tuple[str, ...]:
        """Tests that the first line names, relative to ``tests/``. Raises ValueError when it names none."""
        first = self.path.read_text().partition("\n")[0]
        if not (found := re.findall(r"tests/(\S+)", first.removeprefix("tests: "))):
            raise ValueError(f"{self.path}:1: names no test: write tests: tests/FILE.py::NAME")
        return tuple(found)

    @property
    def files(self) -> tuple[str, ...]:
        """Changed files, relative to the root."""
        return tuple(re.findall(r"^\+\+\+ b/(\S+)", self.path.read_text(), re.MULTILINE))

    def apply(self, tree: Path) -> None:
        """Apply the diff to this tree. Raises ValueError when it does not fit."""
        # Inside a repository, git would skip a tree that is not the repository's root.
        alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
        done = subprocess.run(["git", "apply", str(self.path)], cwd=tree, capture_output=True, text=True, env=alone)
        if done.returncode:
            raise ValueError(f"{self.name}: {'; '.join(done.stderr.splitlines())}")


JUDGING = "retrain/campaign/judging"
RUNNING = "retrain/campaign/running"
LOOKS = "test_sequential.py::test_several_comparisons_share_alpha_and_their_p_values_are_corrected"
UNDECLARED_LOOKS = "test_sequential.py::test_looks_that_were_not_declared_are_refused_once_a_run_has_begun"
LATE = "test_sequential.py::test_a_late_value_is_looked_at_once_and_may_decide"
RULE_ALONE = "test_pooling.py::test_a_rule_of_stopping_holds_for_its_own_campaign_alone"
RULE_OWN = "test_pooling.py::test_a_rule_of_stopping_holds_for_its_own_baseline_and_metric_alone"
MEASURED_ALIKE = "test_pooling.py::test_every_run_of_every_directory_is_measured_alike"
REPEATED = "test_pooling.py::test_of_a_seed_that_was_run_twice_the_first_finished_run_counts"
ENDS_OF_A_DRAW = "test_engine.py::test_the_ends_of_the_unit_interval_draw_tokens_that_have_a_probability"
WHITENING = "test_credit.py::test_whitening_weighs_every_graded_completion_by_its_tokens"
SNAPSHOT = "test_adapters.py::test_a_snapshot_does_not_change_while_training_goes_on"
PEAK = "maths/test_backpressure.py::test_a_peak_is_certain_only_two_standard_errors_above_zero"
REGIME = "maths/test_backpressure.py::test_beyond_the_peak_is_retrograde_and_below_it_the_roofline_decides"
SHARE = "maths/test_credit.py::test_the_share_is_the_decimal_that_was_written"
BAND = "maths/test_corrections.py::test_both_edges_of_the_band_belong_to_it"
EMPTY = "maths/test_losses.py::test_empty_completions_have_no_clipped_share"
ACCURACY = "maths/test_statistics.py::test_an_accuracy_is_never_known_better_than_from_independent_samples"
SAMPLED_P = "maths/test_statistics.py::test_a_sampled_p_value_counts_the_pattern_that_was_seen"
TRIMMED = "maths/test_intervals.py::test_the_trimmed_error_is_never_below_that_of_a_step_of_the_scale"
TUKEY = "maths/test_intervals.py::test_the_trimmed_interval_of_many_values_is_tukey_and_mclaughlins"
REPLICATES = "test_pooling.py::test_replicates_that_differ_only_in_what_is_kept_shown_or_given_up_are_one_condition"
RESTORED = "test_rollback.py::test_a_checkpoint_brings_back_all_that_a_run_remembers"
KEPT_BASE = "test_evaluation.py::test_the_kept_base_is_found_only_by_all_that_decides_about_it"
ALL_END = "test_lanes.py::test_what_no_run_can_go_on_from_ends_each_of_them"
OLD_RATIO = "test_updates_exact.py::test_the_ratio_of_several_updates_is_taken_against_the_trainer_before_them"
OWN_COUNTS = "test_updates_exact.py::test_each_update_divides_by_what_its_own_minibatch_counts"
OWN_SPLIT = "test_updates_exact.py::test_every_pass_splits_the_batch_in_its_own_way_and_every_step_too"
FAR_ENOUGH = "test_updates_exact.py::test_passes_end_when_the_policy_has_moved_far_enough"
SCHEDULE = "test_updates_exact.py::test_the_schedule_counts_updates_for_policy_and_critic"
LEFT_OUT = "test_update_lanes.py::test_one_update_of_four_that_is_not_finite_is_left_out"
LIMIT = "test_update_lanes.py::test_after_nonfinite_limit_the_run_fails_and_the_others_are_as_without_it"
SCORED = "test_updates_exact.py::test_policy_and_critic_are_scored_each_with_its_own_adapter"
AS_WITHOUT = "test_updates_exact.py::test_a_policy_with_a_critic_of_its_own_learns_what_one_without_learns"
WARM_UP = "test_updates_exact.py::test_a_critic_that_reads_the_policys_adapter_leaves_it_alone_while_it_warms_up"
VALUE_LOSS = "test_updates_exact.py::test_the_value_loss_is_its_definition_on_what_the_critic_says"
LAST_TOKEN = "test_updates_exact.py::test_the_score_comes_with_the_last_token_and_nothing_comes_after_it"
WHITENED_TOKENS = "test_updates_exact.py::test_advantages_are_whitened_over_tokens_not_over_padding"
BOTH_OR_NONE = "test_critic_resume.py::test_a_critic_that_is_not_finite_leaves_both_as_they_were"
GOES_ON = "test_critic_resume.py::test_a_saved_critic_goes_on_as_it_would_have"
NOT_ITS_OWN = "test_critic_resume.py::test_a_critic_that_shares_its_adapter_does_not_take_one_of_its_own"
MOVED = "test_critic_resume.py::test_a_critic_that_has_moved_is_a_change_of_weights"

MUTANTS = [
    # -- sampling ---------------------------------------------------------------------------------------------------
    Mutant(
        "plain engine: temperature ignored", "retrain/engines/grid.py",
        "[[r.temperature or 1.0] for r in used]", "[[1.0] for r in used]",
        ("test_engine.py::test_logprobs_and_entropy_equal_a_fresh_forward",),
    ),
    Mutant(
        "product in two: the second is not of what was left", "retrain/policy/arithmetic.py",
        "rest = _packed_sum(x, weight, -rounded)", "rest = _packed_sum(x, weight, rounded)",
        ("test_precision.py::test_a_device_that_rounds_its_sums_gives_what_it_rounded_off_in_a_second_product",),
    ),
    Mutant(
        "attention in half precision: the gradient of another scale", "retrain/policy/fused.py",
        "out = causal_attention(wide[0], wide[1], wide[2], ctx.scale)",
        "out = causal_attention(wide[0], wide[1], wide[2], None)",
        ("test_precision.py::test_attention_in_half_precision_has_the_gradient_of_fp32",),
    ),
    Mutant(
        "decoding: the blocks of several layers' B overlap", "retrain/engines/dense.py",
        "                row += rank\n", "",
        ("test_precision.py::test_a_larger_model_decodes_from_packed_weights_what_the_update_sees",),
    ),
    Mutant(
        "decoding: a packed weight without its adapter", "retrain/engines/dense.py",
        "return packed(merged.t()) if pack else merged.t()", "return packed(self.weight) if pack else merged.t()",
        ("test_precision.py::test_a_larger_model_decodes_from_packed_weights_what_the_update_sees",),
    ),
    Mutant(
        "packing: one place alike is enough", "retrain/policy/backbone.py",
        "PROBE_QUANTILE = 0.9", "PROBE_QUANTILE = 0.0",
        ("test_precision.py::test_packing_that_computes_something_else_is_refused",),
    ),
    Mutant(
        "draw: the largest u reaches the total", "retrain/engines/draw.py",
        "    return torch.minimum(aim_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))\n",
        "    return aim_R1\n",
        (ENDS_OF_A_DRAW,),
    ),
    Mutant(
        "draw: u = 0 takes a token without mass", "retrain/engines/draw.py",
        "torch.searchsorted(below_RV, _aim(uniforms_R1, total_R1), right=True)",
        "torch.searchsorted(below_RV, _aim(uniforms_R1, total_R1))",
        (ENDS_OF_A_DRAW,),
    ),
    Mutant(
        "draw: beyond the last token with mass in its block", "retrain/engines/draw.py",
        "torch.minimum(place_R1, last_R1)", "place_R1",
        ("test_draw.py::test_tokens_without_mass_are_never_drawn",),
    ),
    Mutant(
        "draw: what lies before the block is not counted", "retrain/engines/draw.py",
        "aim_R1 - before_R1", "aim_R1",
        ("test_draw.py::test_the_token_is_the_one_of_the_inverse_in_float64",),
    ),
    Mutant(
        "off-policy: weights one step too new draw", "retrain/rollouts/versions.py",
        "if each.step <= step - self.bound]", "if each.step <= step - self.bound + 1]",
        ("test_off_policy.py::test_recent_weights",),
    ),
    Mutant(
        "off-policy: the age of weights that an update left alone", "retrain/rollouts/versions.py",
        "last = max((each.step", "last = min((each.step",
        ("test_off_policy.py::test_recent_weights",),
    ),
    Mutant(
        "off-policy: a checkpoint without the earlier weights", "retrain/run.py",
        "return [each for each in self.recent if first <= each.step < self.step]", "return []",
        ("test_off_policy.py::test_a_killed_run_goes_on_exactly",),
    ),
    Mutant(
        "off-policy: what is too old trains", "retrain/run.py",
        "if any(rollout.age > self.recent.bound for rollout in group.rollouts):", "if False:",
        ("test_off_policy.py::test_a_group_that_is_too_old_does_not_train_and_is_counted",),
    ),
    Mutant(
        "queue: a later step first", "retrain/rollouts/queue.py",
        "first = min((offer.step", "first = max((offer.step",
        ("test_off_policy.py::test_steps_are_sampled_and_taken_in_their_order",),
    ),
    Mutant(
        "m2po: equal tokens by their place", "retrain/maths/corrections.py",
        "fits_M = (means_M < threshold) & last_M", "fits_M = means_M < threshold",
        ("maths/test_corrections.py::test_equal_tokens_leave_together_and_the_mean_is_of_the_step",),
    ),
    Mutant(
        "rejection: a completion without tokens left counts", "retrain/algorithms/rejection.py",
        "sequences.get(rollout, 0) + (count > 0)", "sequences.get(rollout, 0) + 1",
        ("test_rejection.py::test_it_may_leave_the_divisor",),
    ),
    Mutant(
        "rejection: what is left out still counts", "retrain/policy/objective.py",
        "counted_BT = batch.loss_mask_BT & (batch.policy_weights_BT != 0.0)", "counted_BT = batch.loss_mask_BT",
        ("test_rejection.py::test_divisors_of_what_is_kept",),
    ),
    Mutant(
        "dppo: from the trainer, not the sampler", "retrain/maths/losses.py",
        "far_BT & (adv_BT > 0.0) & (now_BT > sampler_BT)", "far_BT & (adv_BT > 0.0)",
        ("maths/test_losses.py::test_dppo_masks_in_the_direction_of_the_advantage_alone",),
    ),
    Mutant(
        "watch: a mismatch that is only told", "retrain/run.py",
        "if self.mismatched_steps >= MISMATCHED_STEPS:", "if False:",
        ("test_server_training.py::test_a_server_that_computes_otherwise_is_found_out",),
    ),
    Mutant(
        "engine: retired weights stay", "retrain/engines/local.py",
        "self._published.pop(ref, None)", "self._published.get(ref)",
        ("test_engine.py::test_weights_that_were_not_published_are_named",),
    ),
    Mutant(
        "engine: actions without their version", "retrain/engines/local.py",
        "action.policy_version = asked[request].policy.version", "action.policy_version = 0",
        ("test_engine.py::test_what_is_published_is_sampled_with_whatever_becomes_of_the_weights",),
    ),
    Mutant(
        "plugin engine: actions without their version", "retrain/engines/plugin.py",
        "action.policy_version = ref.version", "action.policy_version = 0",
        ("test_backends.py::test_every_run_samples_with_its_own_backend_and_each_action_names_its_weights",),
    ),
    Mutant(
        "loop: weights that a stage has lowered are not published", "retrain/trainer.py",
        "        if run.policy_ref != ref:\n            run.publish_to(self.engine)\n", "",
        ("test_squeeze_modes.py::test_an_annealed_run_ends_at_its_last_rank_and_resumes_exactly",),
    ),
    # -- rollouts ---------------------------------------------------------------------------------------------------
    Mutant(
        "collect: later turns of a group share a stream", "retrain/rollouts/collect.py",
        '(*request.stream, "turn", turn, sample)', '(*request.stream, "turn", turn)',
        ("test_collect.py::test_turns_of_all_that_go_on_are_one_batch_and_a_group_is_graded_when_all_its_episodes_are_over",),
    ),
    Mutant(
        "collect: a failed episode goes on", "retrain/rollouts/collect.py",
        "self.ended = error.ended if isinstance(error, EpisodeFailed) else \"raised\"",
        "self.ended = error.ended if isinstance(error, EpisodeFailed) else None",
        ("test_collect.py::test_what_an_environment_raises_costs_the_episode_alone",),
    ),
    Mutant(
        "collect: a grader's fault at the first of its groups only", "retrain/rollouts/collect.py",
        "                for group in own:\n                    group.error",
        "                for group in own[:1]:\n                    group.error",
        ("test_collect.py::test_what_a_grader_raises_is_found_at_all_that_it_graded_together",),
    ),
    Mutant(
        "collect: what the policy said is no part of the conversation", "retrain/data/conversation.py",
        '[{"role": "assistant", "content": action.text}, *messages]', "messages",
        ("test_collect.py::test_a_template_that_wants_roles_to_alternate_hears_of_every_answer",),
    ),
    Mutant(
        "queue: pressure bounds nothing", "retrain/rollouts/queue.py",
        "self.pressure.max_rows if self.pressure else None", "None",
        ("test_collect.py::test_pressure_bounds_the_rows_and_observes_every_batch",),
    ),
    Mutant(
        "queue: scoring counts as decoding", "retrain/rollouts/queue.py",
        'for name, start, end in collected.spans if name == "rollout")', "for name, start, end in collected.spans)",
        ("test_collect.py::test_pressure_bounds_the_rows_and_observes_every_batch",),
    ),
    # -- credit -----------------------------------------------------------------------------------------------------
    Mutant(
        "whitening: every completion weighs the same", "retrain/algorithms/standard.py",
        "torch.tensor([tokens for each, _ in rated for tokens in each.tokens])",
        "torch.tensor([1 for each, _ in rated for tokens in each.tokens])",
        (WHITENING,),
    ),
    Mutant(
        "whitening: over ungraded completions too", "retrain/algorithms/turns.py",
        "if one.reward.total_reward is not None and one.turns]", "if one.turns]",
        ("test_turn_credit.py::test_rollouts_without_reward_or_turns_take_no_part",),
    ),
    Mutant(
        "gtpo_paper: uniform groups are discarded although all train", "retrain/algorithms/standard.py",
        "own_advantage and not config.algorithm.keeps_uniform_groups:", "own_advantage:",
        ("test_credit.py::test_gtpo_paper_keeps_its_uniform_groups_where_all_train",),
    ),
    Mutant(
        "entropy mask: rho as a float", "retrain/maths/credit.py",
        "math.ceil(Fraction(repr(float(rho))) * total)", "math.ceil(rho * total)", (SHARE,),
    ),
    Mutant(
        "entropy mask: rho as the nearest float", "retrain/maths/credit.py",
        "Fraction(repr(float(rho)))", "Fraction(float(rho))", (SHARE,),
    ),
    Mutant(
        "algorithm: nothing is restored", "retrain/algorithms/standard.py",
        'self.sepa = state["sepa"]', "self.sepa = sepa_start(self.schedule)",
        ("test_credit.py::test_an_algorithm_goes_on_from_its_state",),
    ),
    Mutant(
        "algorithm: SEPA's gate sees graded rollouts only", "retrain/algorithms/standard.py",
        "flags = [rollout.reward.is_correct for group in groups for rollout in group.rollouts]",
        "flags = [r.reward.is_correct for g in groups for r in g.rollouts if r.reward.total_reward is not None] or [0]",
        ("test_credit.py::test_the_gate_counts_every_rollout_that_was_sampled",),
    ),
    # -- losses and the update --------------------------------------------------------------------------------------
    Mutant(
        "IcePop: the upper edge is outside", "retrain/maths/corrections.py",
        "(ratio_BT <= self.high)", "(ratio_BT < self.high)", (BAND,),
    ),
    Mutant(
        "IcePop: the lower edge is outside", "retrain/maths/corrections.py",
        "(ratio_BT >= self.low)", "(ratio_BT > self.low)", (BAND,),
    ),
    Mutant(
        "clip ratio: an empty completion is the smallest share", "retrain/maths/losses.py",
        "low_B / length_B.clamp(min=1.0), torch.inf)", "low_B / length_B.clamp(min=1.0), 0.0)", (EMPTY,),
    ),
    Mutant(
        "update: signal by the first token", "retrain/policy/update.py",
        "bool(sample.advantages[sample.loss_mask].any())", "bool(sample.advantages[sample.loss_mask][:1].any())",
        ("test_update.py::test_signal_at_any_trained_token_is_signal",),
    ),
    Mutant(
        "update: signal by the first action token", "retrain/policy/update.py",
        "bool(sample.advantages[sample.loss_mask].any())", "bool(sample.advantages[sample.action_mask][0])",
        ("test_update.py::test_signal_at_any_trained_token_is_signal",),
    ),
    Mutant(
        "update: means of sequences ignore entropy_mask_denominator", "retrain/policy/objective.py",
        "batch.action_BT if denominators.all_tokens else None", "None",
        ("test_update.py::test_sequence_means_count_the_tokens_that_the_denominator_names",),
    ),
    Mutant(
        "update: one dropout seed for all micro-batches", "retrain/policy/update.py",
        "torch_seed(*self.dropout_stream, number)", "torch_seed(*self.dropout_stream)",
        ("test_update.py::test_every_micro_batch_draws_its_own_dropout",),
    ),
    # -- policies and snapshots -------------------------------------------------------------------------------------
    Mutant(
        "snapshot: the live weights", "retrain/policy/lora.py",
        "flat.clone() if device is None", "flat if device is None", (SNAPSHOT,),
    ),
    Mutant(
        "snapshot: the live weights on the host", "retrain/policy/lora.py",
        "flat.to(device, copy=True)", "flat.to(device)", (SNAPSHOT,),
    ),
    Mutant(
        "snapshot: the live moments", "retrain/policy/local.py",
        "torch.as_tensor(value).detach().cpu().clone()", "torch.as_tensor(value).detach().cpu()", (SNAPSHOT,),
    ),
    Mutant(
        "snapshot: rows that are no more", "retrain/policy/lora.py",
        "return LoraWeights(self.shapes, self.rank, self.scale, self.live_rank, copy)",
        "return LoraWeights(self.shapes, self.rank, self.scale, self.rank, copy)",
        ("test_squeeze_modes.py::test_an_annealed_run_ends_at_its_last_rank_and_resumes_exactly",),
    ),
    Mutant(
        "policy: moments of rows that are no more", "retrain/policy/local.py",
        "                self.optimizer.state.clear()\n", "",
        ("test_policy.py::test_a_lower_rank_begins_its_moments_anew",),
    ),
    Mutant(
        "policy: every update is another version", "retrain/policy/local.py",
        "self.version += self._changes() != before", "self.version += 1",
        ("test_policy.py::test_the_version_counts_changes_of_the_weights",),
    ),
    Mutant(
        "backend: a step without sequences is another version", "retrain/policy/plugin.py",
        "self.version += bool(sequences)", "self.version += 1",
        ("test_backends.py::test_the_version_of_a_backend_counts_the_steps_that_it_has_begun",),
    ),
    # -- a run's state ----------------------------------------------------------------------------------------------
    Mutant(
        "resume: later checkpoints stay", "retrain/run.py",
        "        forget_after(self.directory, self.step)\n", "",
        (RESTORED,),
    ),
    Mutant(
        "resume: its own checkpoint is forgotten", "retrain/checkpoints.py",
        "checkpoint_step(directory) > step:", "checkpoint_step(directory) >= step:",
        ("test_ownership.py::test_foreign_checkpoints_survive_pruning_and_forgetting_and_are_not_continued",),
    ),
    Mutant(
        "resume: the policy counts its versions anew", "retrain/run.py",
        '        self.policy.restore(state["policy"])\n', "",
        (RESTORED,),
    ),
    Mutant(
        "resume: steps in a row are counted anew", "retrain/run.py",
        'self.ungraded_steps, self.skipped_updates = state["ungraded_steps"], state["skipped_updates"]', "pass",
        (RESTORED,),
    ),
    Mutant(
        "resume: what the cohort shares begins anew", "retrain/run.py",
        '        self.saved_shared = state["shared"]\n', "",
        (RESTORED,),
    ),
    Mutant(
        "rollback: the algorithm keeps what it saw", "retrain/run.py",
        "        self.algorithm.restore(point.algorithm)\n", "",
        ("test_rollback.py::test_a_step_that_failed_is_taken_back",),
    ),
    Mutant(
        "rollback: weights that have moved", "retrain/run.py",
        "self.step != point.step or self.policy.version != point.policy_version", "self.step != point.step",
        ("test_rollback.py::test_weights_that_moved_in_the_step_that_failed_are_not_taken_back",),
    ),
    Mutant(
        "saving: published although one of the cohort is not written", "retrain/saving.py",
        "            if len(written) == len(saved):\n                run",
        "            if run in written:\n                run",
        ("test_rollback.py::test_a_checkpoint_counts_when_the_whole_cohort_has_its_own",),
    ),
    Mutant(
        "retention: keep_every is ignored", "retrain/run.py",
        "self.config.training.keep_last, self.config.training.keep_every", "self.config.training.keep_last",
        ("test_rollback.py::test_checkpoints_that_are_kept_for_good_stay_while_a_run_saves",),
    ),
    # -- the base's evaluations -------------------------------------------------------------------------------------
    Mutant(
        "evaluation: sets share their streams", "retrain/evaluation.py",
        "own = () if held_out.name == HELDOUT else (held_out.name,)", "own = ()",
        ("test_evaluation.py::test_an_answer_has_the_stream_of_its_subject_set_step_and_problem",),
    ),
    Mutant(
        "evaluation: untrained runs answer each in its own way", "retrain/run.py",
        'return (self.config.campaign.seed, "base") if self.step == 0 else self.stream', "return self.stream",
        ("test_backends.py::test_a_campaign_compares_conditions_on_a_backend",),
    ),
    Mutant(
        "base evaluations: however it was sampled", "retrain/evaluation.py",
        "held_out.sampling.requested, held_out.data,", "held_out.data,",
        (KEPT_BASE,),
    ),
    Mutant(
        "base evaluations: whatever the reference answers", "retrain/evaluation.py",
        "held_out.data, problems, setting))", "held_out.data, setting))",
        (KEPT_BASE,),
    ),
    Mutant(
        "base evaluations: however it was graded", "retrain/evaluations.py",
        "config.reward.grading, config.campaign.seed)", "config.campaign.seed)",
        ("test_evaluation.py::test_runs_that_are_graded_otherwise_have_a_base_of_their_own",),
    ),
    Mutant(
        "base evaluations: in whatever order the problems are", "retrain/record/base_evaluations.py",
        '[problem.id for problem in problems] != facts["problem_ids"]',
        'len(problems) != len(facts["problem_ids"])',
        ("test_evaluation.py::test_the_kept_base_is_the_base",),
    ),
    Mutant(
        "base evaluations: one in which a grading failed is kept", "retrain/record/base_evaluations.py",
        "if not rollouts or any(each.error or each.audit_error or each.total_reward is None for each in rewards):",
        "if not rollouts:",
        ("test_evaluation.py::test_an_evaluation_with_a_failed_grading_is_not_kept",),
    ),
    # -- executor and controller ------------------------------------------------------------------------------------
    Mutant(
        "executor: what was told before a fault is lost", f"{RUNNING}/executor.py",
        "KeyboardInterrupt) as error:\n                yield from outbox.drain()\n", "KeyboardInterrupt) as error:\n",
        ("test_executor.py::test_what_was_told_before_a_fault_is_heard",),
    ),
    Mutant(
        "executor: a single run out of memory is cut smaller", f"{RUNNING}/executor.py",
        "if is_out_of_memory(error) and len(active) > 1 and", "if is_out_of_memory(error) and",
        (ALL_END,),
    ),
    Mutant(
        "executor: a fault of the shared part ends one run alone", f"{RUNNING}/executor.py",
        "                for run in active:\n", "                for run in active[:1]:\n",
        (ALL_END,),
    ),
    Mutant(
        "executor: a run that failed counts as whole for its trackers", f"{RUNNING}/executor.py",
        "run.recorder.close(failed=run.error is not None)", "run.recorder.close(failed=False)",
        (ALL_END,),
    ),
    Mutant(
        "controller: a step is counted before it is done", f"{RUNNING}/controller.py",
        'int(row["step"]) + 1', 'int(row["step"])',
        ("test_executor.py::test_a_toy_executor_trains_a_campaign_as_this_process_does",),
    ),
    Mutant(
        "works: a job does not hear what was accepted", f"{RUNNING}/works.py",
        "accepted=list(self.campaign.approval.accepted)", "accepted=[]",
        ("test_executor.py::test_accepted_changes_reach_a_job_that_has_found_them",),
    ),
    Mutant(
        "bases: weights of the cohort before stay published", f"{RUNNING}/models.py",
        "        engine.forget()\n", "",
        ("test_base.py::test_the_next_cohort_finds_the_base_prepared",),
    ),
    Mutant(
        "bases: another precision shares the base", f"{RUNNING}/models.py",
        "config.backend.device, config.inference.dtype,\n", "config.backend.device,\n",
        ("test_base.py::test_another_base_is_loaded_when_the_first_is_gone",),
    ),
    Mutant(
        "scheduler: a run is in two jobs at once", f"{RUNNING}/scheduler.py",
        "if self._busy.isdisjoint(work.names)", "if True",
        ("test_scheduler.py::test_a_run_is_in_one_job_at_a_time",),
    ),
    Mutant(
        "scheduler: the dead begin again for ever", f"{RUNNING}/scheduler.py",
        "if deaths <= self.max_restarts:", "if True:",
        ("test_scheduler.py::test_without_restarts_the_first_death_is_the_last",),
    ),
    Mutant(
        "workers: a fault does not wait for the others", f"{RUNNING}/workers.py",
        "if not busy and self._fault is not None:", "if self._fault is not None:",
        ("test_processes.py::test_a_full_disk_ends_the_campaign_once_the_others_have_stopped",),
    ),
    Mutant(
        "workers: what is given up lives on", f"{RUNNING}/workers.py",
        "        finally:\n            self._kill_busy()\n", "        finally:\n            pass\n",
        ("test_processes.py::test_what_is_given_up_is_killed",),
    ),
    Mutant(
        "lease: nobody waits for writers", f"{RUNNING}/lease.py",
        "        if not writing:\n", "        if True:\n",
        ("test_lease.py::test_writers_that_live_on_are_waited_for",),
    ),
    Mutant(
        "looks: what is under way is marked as stopped", f"{JUDGING}/sequential.py",
        "        if spec.run_id in under_way:\n", "        if False:\n",
        ("test_processes_campaign.py::test_a_look_stops_what_is_under_way_and_begins_no_more",),
    ),
    # -- roles beside keys ------------------------------------------------------------------------------------------
    Mutant(
        "roles: a key below a table has none", "retrain/config/root.py",
        '_roles(section).get(rest.partition(".")[0])', "_roles(section).get(rest)",
        ("test_roles.py::test_every_key_has_a_role",),
    ),
    Mutant(
        "roles: what is also a record changes without a word", "retrain/campaign/planning/changes.py",
        "role is None or role not in QUIET", "role is None or not role & QUIET",
        ("test_roles.py::test_what_may_change_without_a_word_when_a_run_goes_on",),
    ),
    Mutant(
        "roles: a key with two roles shares no base", "retrain/campaign/planning/cohorts.py",
        "Role.SAMPLES in (role_of(key) or Role(0))", "role_of(key) == Role.SAMPLES",
        ("test_roles.py::test_runs_that_sample_from_something_else_have_a_base_of_their_own",),
    ),
    Mutant(
        "roles: replicates may not differ in speed", f"{JUDGING}/pooling.py",
        "MAY_DIFFER = Role.RECORDS | Role.SPEED | Role.NAMES", "MAY_DIFFER = Role.RECORDS | Role.NAMES",
        (REPLICATES,),
    ),
    Mutant(
        "roles: keep_every decides what is learned", "retrain/config/training.py",
        "    keep_every: Annotated[Natural, Role.RECORDS]", "    keep_every: Annotated[Natural, Role.LEARNS]",
        (REPLICATES,),
    ),
    Mutant(
        "roles: nonfinite_limit decides what is learned", "retrain/config/training.py",
        "    nonfinite_limit: Annotated[Count, Role.SPEED]", "    nonfinite_limit: Annotated[Count, Role.LEARNS]",
        (REPLICATES,),
    ),
    Mutant(
        "roles: timeout_s decides what is learned", "retrain/config/tasks.py",
        "timeout_s: Annotated[Positive, Role.SPEED] = 10.0", "timeout_s: Annotated[Positive, Role.LEARNS] = 10.0",
        (REPLICATES,),
    ),
    Mutant(
        "roles: reward_max decides what is learned", "retrain/config/tasks.py",
        "    reward_max: Annotated[float | None, Role.RECORDS]", "    reward_max: Annotated[float | None, Role.LEARNS]",
        (REPLICATES,),
    ),
    # -- the sequential rule ----------------------------------------------------------------------------------------
    Mutant(
        "rule: p without the number of comparisons", "retrain/maths/deciding.py",
        "p[i] = look.p, min(1.0, look.p * rule.family)", "p[i] = look.p, min(1.0, look.p)", (LOOKS,),
    ),
    Mutant(
        "rule: alpha is not shared", "retrain/maths/deciding.py",
        "np.flatnonzero(now).tolist(), rule.alpha / rule.family", "np.flatnonzero(now).tolist(), rule.alpha", (LOOKS,),
    ),
    Mutant(
        "rule: what was declared is not asked", f"{JUDGING}/sequential.py",
        "now | (manifest.content.get(\"declared\") or {})", "now", (UNDECLARED_LOOKS,),
    ),
    Mutant(
        "rule: a late value is not looked at", f"{JUDGING}/sequential.py",
        "if lead is not None and had.get(seed) is None:", "if lead is not None and seed not in had:", (LATE,),
    ),
    Mutant(
        "rule: the exact test does not know the step of the scale", f"{JUDGING}/sequential.py",
        "        record[\"resolution\"] = max(record[\"resolution\"], resolution)\n", "",
        ("test_sequential.py::test_the_exact_rule_knows_the_step_of_the_scale",),
    ),
    Mutant(
        "rule: p without what earlier looks have spent", "retrain/maths/sequential.py",
        "p, stopping = min(spent + tail, 1.0),", "p, stopping = min(tail, 1.0),",
        ("maths/test_sequential.py::test_a_p_value_holds_what_earlier_looks_have_spent",),
    ),
    Mutant(
        "rule: looks after a stop that was possible", "retrain/maths/sequential.py",
        "        going &= ~stopping\n", "",
        ("maths/test_sequential.py::test_over_all_sign_patterns_the_error_is_what_was_spent_and_at_most_alpha",),
    ),
    # -- pooling and the comparison ---------------------------------------------------------------------------------
    Mutant(
        "pooling: the first directory's stopping rule", f"{JUDGING}/pooling.py",
        'sources[0].looks if alone else None',
        'sources[0].looks', (RULE_ALONE,),
    ),
    Mutant(
        "pooling: the first of different margins", f"{JUDGING}/pooling.py",
        "return margins.pop() if len(margins) == 1 else None", "return next(iter(margins), None)",
        ("test_pooling.py::test_different_margins_are_none_and_equal_ones_hold",),
    ),
    Mutant(
        "pooling: what measured nothing is compared", f"{JUDGING}/pooling.py",
        "if evaluation is None or not run.evaluations:\n                continue",
        "if evaluation is None:\n                continue", (MEASURED_ALIKE,),
    ),
    Mutant(
        "pooling: the first run speaks for its directory", f"{JUDGING}/pooling.py",
        "        for run in source.runs:\n            evaluation = ",
        "        for run in source.runs[:1]:\n            evaluation = ",
        (MEASURED_ALIKE,),
    ),
    Mutant(
        "pooling: the first two directories speak for all", f"{JUDGING}/pooling.py",
        "_same_evaluation(sources, asked.held_out)", "_same_evaluation(sources[:2], asked.held_out)", (MEASURED_ALIKE,),
    ),
    Mutant(
        "pooling: a repeated seed counts with its last finished run", f"{JUDGING}/pooling.py",
        "if run.done and not chosen[key].done:", "if run.done:", (REPEATED,),
    ),
    Mutant(
        "pooling: of a seed that finished nowhere the last run is named", f"{JUDGING}/pooling.py",
        "if run.done and not chosen[key].done:", "if not chosen[key].done:",
        ("test_pooling.py::test_of_a_seed_that_finished_nowhere_the_first_run_is_named",),
    ),
    Mutant(
        "pooling: a repeated seed counts with its first run", f"{JUDGING}/pooling.py",
        "if run.done and not chosen[key].done:", "if False:", (REPEATED,),
    ),
    Mutant(
        "comparison: the rule for another baseline", f"{JUDGING}/comparison.py",
        "if sequential and first == labels[0] and", "if sequential and", (RULE_OWN,),
    ),
    Mutant(
        "comparison: the rule for another metric", f"{JUDGING}/comparison.py",
        ' and measure.name == sequential["metric"]:', ":", (RULE_OWN,),
    ),
    Mutant(
        "comparison: the finest evaluation decides", f"{JUDGING}/comparison.py",
        "return max((run.resolution(measure) for run in runs), default=0.0)",
        "return min((run.resolution(measure) for run in runs), default=0.0)",
        ("test_pooling.py::test_the_coarsest_evaluation_decides_how_fine_an_interval_can_be",),
    ),
    Mutant(
        "comparison: a bootstrap of too few seeds", f"{JUDGING}/comparison.py",
        "enough = pairs >= MIN_BOOTSTRAP_SEEDS", "enough = pairs > MIN_BOOTSTRAP_SEEDS",
        ("test_pooling.py::test_a_bootstrap_has_ends_from_eight_seeds_on",),
    ),
    Mutant(
        "comparison: equivalence without the scale", f"{JUDGING}/comparison.py",
        "tost_p(differences, margin, _resolution(runs, measure))", "tost_p(differences, margin)",
        ("test_pooling.py::test_equivalence_is_tested_on_the_scale_of_the_evaluation",),
    ),
    # -- statistics -------------------------------------------------------------------------------------------------
    Mutant(
        "accuracy: more trials than samples", "retrain/maths/statistics.py",
        "min(p * (1.0 - p) / error**2, len(values)) if", "p * (1.0 - p) / error**2 if", (ACCURACY,),
    ),
    Mutant(
        "accuracy: without an error the samples count", "retrain/maths/statistics.py",
        "0.0 < p < 1.0 else float(count)", "0.0 < p < 1.0 else float(len(values))", (ACCURACY,),
    ),
    Mutant(
        "sampled p: the pattern that was seen is not counted", "retrain/maths/statistics.py",
        "return (hits + 1) / (patterns + 1)", "return hits / patterns", (SAMPLED_P,),
    ),
    Mutant(
        "sampled p: counted above the line only", "retrain/maths/statistics.py",
        "return (hits + 1) / (patterns + 1)", "return (hits + 1) / patterns", (SAMPLED_P,),
    ),
    Mutant(
        "trimmed interval: less than a step of the scale", "retrain/maths/intervals.py",
        "np.maximum(squares, (kept - 1) * resolution**2 / 12.0)", "squares", (TRIMMED,),
    ),
    Mutant(
        "trimmed interval: a step of one value", "retrain/maths/intervals.py",
        "(kept - 1) * resolution**2 / 12.0)", "resolution**2 / 12.0)", (TRIMMED,),
    ),
    Mutant(
        "trimmed interval: a variance over too many", "retrain/maths/intervals.py",
        "/ (kept * (kept - 1)))", "/ (kept * kept))", (TUKEY,),
    ),
    # -- back pressure ----------------------------------------------------------------------------------------------
    Mutant(
        "back pressure: one standard error is enough", "retrain/maths/backpressure.py",
        "self.kappa - STANDARD_ERRORS * self.kappa_se > 0.0", "self.kappa - self.kappa_se > 0.0", (PEAK,),
    ),
    Mutant(
        "back pressure: exactly two are enough", "retrain/maths/backpressure.py",
        "STANDARD_ERRORS * self.kappa_se > 0.0", "STANDARD_ERRORS * self.kappa_se >= 0.0", (PEAK,),
    ),
    Mutant(
        "back pressure: retrograde beyond the aim", "retrain/maths/backpressure.py",
        'regime = "retrograde" if load > fit.n_star', 'regime = "retrograde" if load > aim', (REGIME,),
    ),
    Mutant(
        "back pressure: the roofline decides beyond the peak", "retrain/maths/backpressure.py",
        'regime = "retrograde" if load > fit.n_star else roofline or "optimal"',
        'regime = roofline or ("retrograde" if load > fit.n_star else "optimal")', (REGIME,),
    ),
    # -- episodes ---------------------------------------------------------------------------------------------------
    Mutant(
        "episodes: a sampled end token is read again", "retrain/data/conversation.py",
        'if action.stop_reason == "stop" and token_ids[:1]', 'if action.stop_reason == "length" and token_ids[:1]',
        ("test_conversation.py",),
    ),
    Mutant(
        "episodes: what was read before is not compared", "retrain/data/conversation.py",
        "if begin < 0 or not text.startswith(read, at):", "if begin < 0:", ("test_conversation.py",),
    ),
    Mutant(
        "episodes: dropped thinking goes unnoticed", "retrain/data/conversation.py",
        "and _thought(mark) not in text[at:begin]", "and _thought(mark) in text[at:begin]", ("test_conversation.py",),
    ),
    Mutant(
        "episodes: rewards to come are not discounted", "retrain/algorithms/turns.py",
        "later = reward + discount * later", "later = reward + later",
        ("test_turn_credit.py::test_each_turn_is_compared_with_those_of_its_number",),
    ),
    Mutant(
        "episodes: a turn alone is compared with nothing", "retrain/algorithms/standard.py",
        "1 if each.turns is None else 2", "1", ("test_turn_credit.py",),
    ),
    Mutant(
        "episodes: turns that cancel out are no signal", "retrain/algorithms/turns.py",
        "(one.turn_advantages or [one.advantage]", "([one.advantage]",
        ("test_turn_credit.py::test_turns_that_cancel_out_are_signal_all_the_same",),
    ),
    Mutant(
        "episodes: a kept sequence of other tokens is taken", "retrain/engines/kept.py",
        "and tuple(prompt_ids[:length]) == kept.token_ids else None", "else None",
        ("test_kept_sequences.py::test_the_oldest_leave_first_and_other_tokens_are_not_found",),
    ),
    Mutant(
        "episodes: old weights' keys stay", "retrain/engines/local.py",
        "        self._published[ref] = weights.weights\n        self.kept.clear()",
        "        self._published[ref] = weights.weights",
        ("test_kept_sequences.py::test_new_weights_forget_what_the_old_ones_computed",),
    ),
    Mutant(
        "episodes: new tokens see the padding behind them", "retrain/engines/dense.py",
        "device=self.device) <= position_RT.unsqueeze(-1)",
        "device=self.device) < columns + 0 * position_RT.unsqueeze(-1)",
        ("test_kept_sequences.py::test_what_is_drawn_is_what_a_fresh_pass_over_all_tokens_says",),
    ),
    Mutant(
        "episodes: a lost episode begins anew without its actions", "retrain/environments/hosted.py",
        "for action in self.actions:", "for action in self.actions[:0]:",
        ("test_hosted.py::test_what_goes_wrong_ends_one_episode_and_the_others_go_on",),
    ),
    Mutant(
        "episodes: what is not exact begins anew", "retrain/environments/hosted.py",
        "if not self.environment.exact:", "if not self.environment:",
        ("test_hosted.py::test_what_is_not_exact_is_not_begun_anew",),
    ),
    Mutant(
        "episodes: one more turn than max_turns", "retrain/rollouts/collect.py",
        "elif len(one.turns) == self.request.limits.turns:", "elif len(one.turns) - 1 == self.request.limits.turns:",
        ("test_collect.py::test_an_episode_ends_at_its_limits",),
    ),
    # -- several updates of a batch ---------------------------------------------------------------------------------
    Mutant(
        "updates: the old log-probabilities are the sampler's", "retrain/policy/objective.py",
        "old_BT = given_BT if given_BT is not None else logprobs_BT.detach() if correction else sampler_BT",
        "old_BT = logprobs_BT.detach() if correction else sampler_BT",
        (OLD_RATIO,),
    ),
    Mutant(
        "updates: a sample's old log-probabilities are those it was sampled with", "retrain/types.py",
        "sample.old_logprobs[sample.action_mask] = rollout.old_logprobs_T[own_T]",
        "sample.old_logprobs[sample.action_mask] = rollout.logprobs_T[own_T]",
        (OLD_RATIO,),
    ),
    Mutant(
        "updates: divided by what the whole batch counts", "retrain/updates.py",
        "TrainBatch(samples, credit.denominators_of(own), step, stream, update=update)",
        "TrainBatch(samples, credit.denominators, step, stream, update=update)",
        (OWN_COUNTS,),
    ),
    Mutant(
        "updates: groups without signal are not divided by", "retrain/updates.py",
        "if rollout.token_advantages_T is not None] for group",
        "if rollout.token_advantages_T is not None and group.discarded is None] for group",
        (OWN_COUNTS,),
    ),
    Mutant(
        "updates: the same permutation in every pass", "retrain/updates.py",
        '"minibatches", step, iteration)', '"minibatches", step)',
        (OWN_SPLIT,),
    ),
    Mutant(
        "updates: the same permutations in every step", "retrain/updates.py",
        '"minibatches", step, iteration)', '"minibatches", iteration)',
        (OWN_SPLIT,),
    ),
    Mutant(
        "updates: target_kl is ignored", "retrain/updates.py",
        "moved is not None and moved > target_kl", "moved is not None and moved > math.inf",
        (FAR_ENOUGH,),
    ),
    Mutant(
        "updates: one pass more after target_kl", "retrain/run.py",
        "far_enough(taken[-len(batches) :], training.target_kl)",
        "far_enough(taken[: -len(batches)], training.target_kl)",
        (FAR_ENOUGH,),
    ),
    Mutant(
        "updates: the schedule counts batches", "retrain/run.py",
        "at, every = self.step * training.updates + update, training.updates",
        "at, every = self.step * training.updates, training.updates",
        (SCHEDULE,),
    ),
    Mutant(
        "updates: one that is left out counts as made", "retrain/updates.py",
        'bool(each.batch.samples) and not each.numbers["optim/skipped"]', "bool(each.batch.samples)",
        (LEFT_OUT,),
    ),
    Mutant(
        "updates: those left out are not counted in a row", "retrain/run.py",
        "        self.skipped_updates += 1\n", "        self.skipped_updates = 1\n",
        (LIMIT,),
    ),
    # -- critics ----------------------------------------------------------------------------------------------------
    Mutant(
        "critic: its adapter is active while the policy is scored", "retrain/policy/scoring.py",
        "with lanes.single(adapter):",
        "with lanes.single(critic[0] if critic else adapter):",
        (SCORED,),
    ),
    Mutant(
        "critic: its values are read off the policy's adapter", "retrain/policy/scoring.py",
        "own, head = critic", "own, head = adapter, critic[1]",
        (SCORED,),
    ),
    Mutant(
        "critic: it is updated with the policy's adapter", "retrain/policy/update.py",
        "lane, frozen = critic.adapter or adapter,", "lane, frozen = adapter,",
        (AS_WITHOUT,),
    ),
    Mutant(
        "critic: the warm-up ends a step early", "retrain/policy/update.py",
        "batch.step < critic.warmup_steps", "batch.step + 1 < critic.warmup_steps",
        (WARM_UP,),
    ),
    Mutant(
        "critic: the warm-up never ends", "retrain/policy/update.py",
        "batch.step < critic.warmup_steps", "critic.warmup_steps > 0",
        (WARM_UP,),
    ),
    Mutant(
        "critic: values are clipped around the new ones", "retrain/policy/objective.py",
        "value_loss(scores.values_BT, batch.values_BT,", "value_loss(scores.values_BT, scores.values_BT,",
        (VALUE_LOSS,),
    ),
    Mutant(
        "critic: only trained tokens have a value loss", "retrain/policy/objective.py",
        "        mask_BT = batch.action_BT\n", "        mask_BT = batch.loss_mask_BT & (batch.advantages_BT > 0)\n",
        (VALUE_LOSS,),
    ),
    Mutant(
        "critic: the policy moves before the critic's loss is known to be finite", "retrain/policy/update.py",
        "    for step in steps:\n        step.check()\n", "    steps[0].check()\n",
        (BOTH_OR_NONE,),
    ),
    Mutant(
        "critic: not restored", "retrain/policy/local.py",
        "        if self.critic is not None:\n            self.critic.load(directory)\n", "",
        (GOES_ON,),
    ),
    Mutant(
        "critic: its moments are not restored", "retrain/policy/critic.py",
        "        self._load_moments(load_file(directory / MOMENTS))\n", "",
        (GOES_ON,),
    ),
    Mutant(
        "critic: what is saved goes on changing", "retrain/policy/critic.py",
        'flat.detach().to("cpu", copy=True)', 'flat.detach().to("cpu")',
        (GOES_ON,),
    ),
    Mutant(
        "critic: the moments that are saved go on changing", "retrain/policy/critic.py",
        "torch.as_tensor(value).detach().cpu().clone()", "torch.as_tensor(value).detach().cpu()",
        (GOES_ON,),
    ),
    Mutant(
        "critic: one of its own is taken for a shared one", "retrain/policy/critic.py",
        "{name: tensor.shape for name, tensor in stored.items()} !=",
        "{name: stored[name].shape for name in own if name in stored} !=",
        (NOT_ITS_OWN,),
    ),
    Mutant(
        "critic: its changes are no change of weights", "retrain/policy/local.py",
        "[self.adapter.flat, *([] if self.critic is None else self.critic.weights)]", "[self.adapter.flat]",
        (MOVED,),
    ),
    Mutant(
        "critic: the last token bootstraps from the first", "retrain/maths/critic.py",
        "torch.nn.functional.pad(packed_BT, (0, 1))[:, 1:]", "packed_BT.roll(-1, 1)",
        (LAST_TOKEN,),
    ),
    Mutant(
        "critic: a turn's reward comes with its first token", "retrain/algorithms/gae.py",
        "ends = np.cumsum([len(turn.action) for turn in rollout.turns[:-1]]) - 1",
        "ends = np.cumsum([0, *(len(turn.action) for turn in rollout.turns[:-1])])[:-1]",
        ("test_ppo.py::test_the_next_action_bootstraps_across_what_was_read",),
    ),
    Mutant(
        "critic: advantages are whitened over padding", "retrain/algorithms/gae.py",
        "whiten_tokens(advantages_BT, mask_BT)", "whiten_tokens(advantages_BT, torch.ones_like(mask_BT))",
        (WHITENED_TOKENS,),
    ),
    Mutant(
        "critic: whitening by the biased variance", "retrain/maths/critic.py",
        "centred_BT.square().sum() / (count - 1)", "centred_BT.square().sum() / count",
        (WHITENED_TOKENS,),
    ),
    Mutant(
        "critic: its learning rate is the policy's", "retrain/policy/critic.py",
        "self.scale = self.lr / training.lr", "self.scale = 1.0",
        (SCHEDULE,),
    ),
    # -- serving ----------------------------------------------------------------------------------------------------
    Mutant(
        "serving: a later piece draws the first numbers again", "retrain/engines/protocol.py",
        "uniforms(self.drawn + self.max_tokens, *stream)[self.drawn :]", "uniforms(self.max_tokens, *stream)",
        ("test_engine_pieces.py::test_a_stream_goes_on_where_it_was",),
    ),
    Mutant(
        "serving: the choices of a request share a stream", "retrain/serving/service.py",
        "(*stream, k)", "stream",
        ("test_serving.py::test_a_seed_alone_decides_whatever_else_is_drawn",),
    ),
    Mutant(
        "serving: prompts alike are drawn with one adapter", "retrain/serving/batching.py",
        "key = (each.served.ref, each.prompt_ids,", "key = (each.prompt_ids,",
        ("test_serving.py::test_adapters_are_loaded_and_unloaded_while_requests_run",),
    ),
    Mutant(
        "serving: weights under one name are one", "retrain/serving/adapters.py",
        'PolicyRef(f"{name}\\x1f{number}", number)', "PolicyRef(name, 0)",
        ("test_serving.py::test_adapters_are_loaded_and_unloaded_while_requests_run",
         "test_serving.py::test_adapters_in_place_and_uploaded"),
    ),
    Mutant(
        "serving: weights are dropped while they are used", "retrain/serving/batching.py",
        "done = [ref for ref in self._retired if ref not in used]", "done = list(self._retired)",
        ("test_serving.py::test_adapters_are_loaded_and_unloaded_while_requests_run",),
    ),
    Mutant(
        "serving: the token that stops is cut off", "retrain/serving/batching.py",
        "del generation.token_ids[before + named + 1 :]", "del generation.token_ids[before + named :]",
        ("test_serving.py::test_stops_of_the_request",),
    ),
    Mutant(
        "serving: a stream says the beginning of a stop", "retrain/serving/text.py",
        "max((len(stop) - 1 for stop in stops), default=0)", "0",
        ("test_serving.py::test_text_that_may_be_a_stop_is_held_back",),
    ),
    Mutant(
        "serving: half of a character is said", "retrain/serving/text.py",
        "len(text.rstrip(BROKEN))", "len(text)",
        ("test_serving.py::test_half_of_a_character_waits_for_the_other",),
    ),
    Mutant(
        "serving: who has left is drawn on", "retrain/serving/service.py",
        "each.cancel()", "pass",
        ("test_serving.py::test_who_has_left_is_drawn_for_no_longer",),
    ),
    Mutant(
        "serving: any name leads here", "retrain/serving/app.py",
        'if not is_local(request.url.hostname or "") or', "if",
        ("test_serving.py::test_only_this_machine_or_who_has_the_key",),
    ),
    Mutant(
        "serving: the likeliest at temperature 1", "retrain/serving/scoring.py",
        "x_RV = x_RV / how.temperature", "x_RV = x_RV / 1",
        ("test_serving.py::test_the_likeliest_tokens_are_those_of_a_forward_pass",),
    ),
    # -- recorded rollouts in a probe -------------------------------------------------------------------------------
    Mutant(
        "recorded: the sign of k3's log ratio", "retrain/probe/reread.py",
        "ratio_N - 1 - log_ratio_N", "ratio_N - 1 + log_ratio_N",
        ("test_probe_recorded.py::test_the_distance_is_that_of_the_definition",),
    ),
    Mutant(
        "recorded: groups that were too old train after all", "retrain/probe/reread.py",
        'if one.line["discarded"] == TOO_OLD:', 'if one.line["discarded"] == "":',
        ("test_probe_recorded.py::test_groups_that_were_too_old_to_train_are_left_out",),
    ),
    Mutant(
        "recorded: a checkpoint has the step before it too", "retrain/probe/recorded.py",
        "<= step < end)", "- 1 <= step < end)",
        ("test_probe_recorded.py::test_weights_with_too_few_recorded_steps_are_left_out_and_named",),
    ),
    Mutant(
        "recorded: the same direction in longer steps is no difference", "retrain/probe/words.py",
        "if ratio := _other_steps(condition):", "if ratio := None:",
        ("test_probe.py::test_the_same_direction_in_longer_steps_expects_nothing",),
    ),
]  # fmt: skip


def copied(root: Path, place: Path) -> Path:
    """A copy of the tree in ``place``, without what is hidden, built or a run's."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "logs", "site", "dist", "build")
    return Path(shutil.copytree(root, place / "tree", ignore=ignored))


def failed_test(tree: Path, tests: Iterable[str]) -> str | None:
    """The first of these tests that fails in the tree, None when all pass. Raises ValueError when they cannot be run:
    a mutant that cannot be imported shows nothing."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-o", f"timeout={SECONDS}"]
    try:
        done = subprocess.run(
            [*command, *(f"tests/{test}" for test in tests)], cwd=tree, capture_output=True, text=True,
            env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}, timeout=10 * SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "tests that do not end"
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) tests/(\S+::.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if found:
        return found[1]
    raise ValueError(f"pytest ended with status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def patches() -> list[Patch]:
    """Return the patches of ``tests/mutants``, by name."""
    return [Patch(path) for path in sorted(PATCHES.glob("*.patch"))]


def verdict(tree: Path, mutant: Mutant | Patch) -> str:
    """Apply the mutant to the tree, run its tests, take it back: ``caught by …``, ``SURVIVED`` or ``BROKEN: …``."""
    before = {path: (path.read_text(), path.stat()) for path in (tree / file for file in mutant.files)}
    try:
        mutant.apply(tree)
        for path in before:
            forget_compiled(path)
        failed = failed_test(tree, mutant.tests)
        return f"caught by {failed}" if failed else "SURVIVED"
    except ValueError as error:
        return f"BROKEN: {error}"
    finally:
        for path, (text, times) in before.items():
            path.write_text(text)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            forget_compiled(path)


def forget_compiled(path: Path) -> None:
    """Remove the byte code of a module: Python tells versions apart by size and whole seconds."""
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def check(root: Path, mutants: Sequence[Mutant | Patch], work: Path | None = None) -> bool:
    """Try these mutants on a copy of ``root`` in ``work``, a line for each; whether all were caught."""
    with tempfile.TemporaryDirectory(prefix="mutants_", dir=work) as place:
        tree = copied(root, Path(place))
        tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
        if failed := failed_test(tree, tests):
            print(f"nothing was changed yet and {failed} fails")
            return False
        found = []
        for mutant in mutants:
            begin = time.monotonic()
            found.append(verdict(tree, mutant))
            print(f"{mutant.name}: {found[-1]} ({time.monotonic() - begin:.0f} s)", flush=True)
    caught = sum(each.startswith("caught") for each in found)
    print(f"{caught} of {len(mutants)} mutants caught")
    return caught == len(mutants)


def main() -> int:
    """Parse, try, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="those whose names hold one of these")
    parser.add_argument("--dir", type=Path, default=None, help="where to copy the tree to")
    options = parser.parse_args()
    chosen = [mutant for mutant in (*MUTANTS, *patches()) if any(name in mutant.name for name in options.only)]
    if not chosen:
        parser.error(f"no mutant is called {' or '.join(options.only)}")
    return 0 if check(ROOT, chosen, options.dir) else 1


if __name__ == "__main__":
    sys.exit(main())
