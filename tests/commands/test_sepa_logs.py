"""SEPA on the bundled reasoner, read back from the rows that it logged."""

from __future__ import annotations

from pathlib import Path

from toymodels import train_quietly

from retrain.plugins import load_file

SCRIPT = Path(__file__).parents[2] / "scripts" / "sepa_in_the_logs.py"


def test_pooling_changes_no_planning_weight_in_the_logs(tmp_path):
    """λ follows its ramp, pooling shrinks the variance of execution weights by (1 − λ)², planning weights stay."""
    script = load_file(SCRIPT, "sepa_in_the_logs")
    toml = """
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
    train_quietly(tmp_path, toml)
    rows = script.read(tmp_path / "out")
    assert [row["sepa_lambda"] for row in rows] == [0.0, 0.5, 1.0]
    assert all(row["sepa_gate_open"] for row in rows)
    for row in rows:
        assert row["planning_fraction"] > 0
        assert row["plan_weight_mean"] > 0
        assert row["plan_weight_change"] < 1e-12  # the identity
        for key in ("exec_surprisal_mean", "exec_surprisal_var", "plan_surprisal_mean", "plan_surprisal_var"):
            assert row[key] is not None
    assert rows[0]["exec_weight_var"] == rows[0]["exec_weight_var_unpooled"]
    assert rows[0]["plan_weight_change"] == 0
    # Within a completion pooled deviations are (1 − λ) times the raw ones; what is left at λ = 1 lies between them.
    assert rows[1]["exec_weight_var"] < rows[1]["exec_weight_var_unpooled"]
    assert rows[2]["exec_weight_var"] < 0.5 * rows[2]["exec_weight_var_unpooled"]
    assert len(script.markdown(rows).splitlines()) == 5
