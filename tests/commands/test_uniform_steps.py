from __future__ import annotations

import pytest
from toymodels import train_quietly

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


def test_uniform_groups_are_measured_and_take_part_in_the_step_where_they_are_kept(tmp_path):
    module = tmp_path / "constant.py"
    module.write_text("def score(completion, answer):\n    return -0.5\n")
    rows = {}
    for discard in ("true", "false"):
        (tmp_path / discard).mkdir()
        rows[discard] = train_quietly(tmp_path / discard, TOML.format(module=module, discard=discard))
    for row in rows["true"]:
        assert (row["num_datums"], row["discarded_count"], row["loss"], row["grad_norm"]) == (0, 3, None, None)
        assert row["val/ratio"] is None
        assert 0 <= row["kl_divergence_inference"] < 1e-6
        assert (row["objective/non_score_reward"], row["objective/rlhf_reward"]) == (0.0, -0.5)
    for row in rows["false"]:
        assert (row["num_datums"], row["discarded_count"], row["loss"], row["grad_norm"]) == (12, 0, 0.0, 0.0)
        assert row["val/ratio"] == pytest.approx(1.0, abs=1e-4)
    for row in rows["true"] + rows["false"]:
        assert row["kl_sample_train_v2"] < 1e-6
        assert row["entropy"] == rows["true"][row["step"]]["entropy"] > 0
