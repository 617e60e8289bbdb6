"""Steps in which all groups are uniform, of the bundled model: what their rows hold, and what is trained on them."""

from __future__ import annotations

from pathlib import Path

import pytest
from toymodels import train_quietly

REWARD = "def score(completion, answer):\n    return -0.5\n"
TOML = """
[algorithm]
advantage_mode = "grpo"
discard_group_zero_advantage = {discard}
[reward]
type = "custom"
custom_module = "{module}"
[training]
max_steps = 2
batch_size = 3
group_size = 4
max_tokens = 24
[backend]
devices = "cpu"
"""


def trained_on_nothing(folder: Path, discard: str) -> list[dict]:
    (folder / "constant.py").write_text(REWARD)
    return train_quietly(folder, TOML.format(module=folder / "constant.py", discard=discard))


@pytest.fixture(scope="module")
def discarding(tmp_path_factory):
    return trained_on_nothing(tmp_path_factory.mktemp("discarding"), "true")


def test_what_sampler_and_trainer_know_is_in_the_row_of_a_step_without_signal(discarding):
    for row in discarding:
        assert (row["num_datums"], row["discarded_count"], row["loss"], row["grad_norm"]) == (0, 3, None, None)
        assert row["entropy"] == row["policy/entropy_avg"] > 0
        assert row["objective/entropy"] > row["entropy_sampled"]  # per sequence and per token
        assert 0 <= row["kl_sample_train_v2"] < 1e-6
        assert abs(row["kl_sample_train_v1"]) < 1e-4
        assert 0 <= row["kl_divergence_inference"] < 1e-6
        assert row["val/ratio"] is None
        assert row["reward_gini"] == 0.0
        assert (row["objective/non_score_reward"], row["objective/rlhf_reward"]) == (0.0, -0.5)


def test_uniform_groups_that_are_kept_take_part_in_the_step(discarding, tmp_path):
    """They count, they have ratios, and the optimizer takes its step."""
    rows = trained_on_nothing(tmp_path, "false")
    for row in rows:
        assert (row["num_datums"], row["discarded_count"], row["loss"], row["grad_norm"]) == (12, 0, 0.0, 0.0)
        assert row["kl_sample_train_v2"] < 1e-6
        assert row["val/ratio"] == pytest.approx(1.0, abs=1e-4)
        assert row["advantage_max"] == 0.0
        assert row["timing_weight_sync_trainer_total"] > 0
    assert rows[0]["entropy"] == discarding[0]["entropy"]
