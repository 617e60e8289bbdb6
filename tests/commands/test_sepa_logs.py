from __future__ import annotations

from pathlib import Path

from toymodels import train_quietly

from retrain.plugins import load_file

TOML = """
[algorithm]
transform_mode = "gtpo_sepa"
[gtpo]
beta = 0.5
[sepa]
steps = 2
correct_rate_gate = 0.0
[training]
max_steps = 3
batch_size = 4
group_size = 4
max_tokens = 40
[backend]
devices = "cpu"
"""


def test_pooling_changes_no_planning_weight_in_the_logs(tmp_path):
    """λ follows its ramp, pooling shrinks the variance of execution weights by (1 − λ)², planning weights stay."""
    script = load_file(Path(__file__).parents[2] / "scripts" / "sepa_in_the_logs.py", "sepa_in_the_logs")
    train_quietly(tmp_path, TOML)
    rows = script.read(tmp_path / "out")
    assert [row["sepa_lambda"] for row in rows] == [0.0, 0.5, 1.0]
    for row in rows:
        assert row["plan_weight_mean"] > 0
        assert row["plan_weight_change"] < 1e-12  # the identity
    # Within a completion pooled deviations are (1 − λ) times the raw ones; what is left at λ = 1 lies between them.
    assert rows[0]["exec_weight_var"] == rows[0]["exec_weight_var_unpooled"]
    assert rows[1]["exec_weight_var"] < rows[1]["exec_weight_var_unpooled"]
    assert rows[2]["exec_weight_var"] < 0.5 * rows[2]["exec_weight_var_unpooled"]
    assert len(script.markdown(rows).splitlines()) == 5
