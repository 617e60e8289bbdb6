"""The cohort's controller: what decoding costs by the shapes of a real model, and the regimes that follow."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from toymodels import train_quietly

from retrain.config.upkeep import Backpressure
from retrain.pressure import Pressure, decode_work


def settings(**changes):
    return Backpressure.model_validate({"max_batch_size": 16, "warmup_steps": 0} | changes)


def test_the_work_is_read_off_the_model(base):
    """2 layers of 32 hidden units, 4 heads of 8 on 2 keys and values, float32, embeddings apart from the output."""
    work = decode_work(base)
    assert work is not None
    weights = dict(base.model.named_parameters())
    table = weights["model.embed_tokens.weight"].numel()
    assert work.parameters == sum(w.numel() for w in weights.values()) - table
    assert (work.parameter_bytes, work.operations_per_position, work.cache_bytes) == (4, 4 * 2 * 32, 2 * 2 * 2 * 8 * 4)
    # Every parameter of a matrix costs two operations in a real forward pass over one token; norms cost less.
    matrices = sum(w.numel() for name, w in weights.items() if w.dim() == 2 and "embed" not in name)
    assert matrices <= work.parameters < 1.02 * matrices


def test_experts_are_not_guessed(base):
    experts = SimpleNamespace(get_text_config=lambda: SimpleNamespace(
        num_hidden_layers=2, num_attention_heads=4, hidden_size=32, num_experts=8
    ))  # fmt: skip
    assert decode_work(SimpleNamespace(model=SimpleNamespace(config=experts))) is None
    assert decode_work(SimpleNamespace(model=None)) is None


def test_a_real_run_records_what_its_fit_predicts(tmp_path):
    """The bundled model: from the fourth measurement at the third load on, every row has all of it."""
    rows = train_quietly(
        tmp_path,
        """
        [training]
        max_steps = 6
        batch_size = 8
        group_size = 2
        max_tokens = 12
        [backpressure]
        enabled = true
        warmup_steps = 1
        [backend]
        devices = "cpu"
        """,
    )
    keys = ("bp_p_star", "bp_utilization", "bp_sigma", "bp_kappa")
    known = [all(row[key] is not None for key in keys) for row in rows]
    assert known == [False] * 3 + [True] * 3  # loads 8, 8, 4, 2 and what follows from them
    assert not any(row[key] is not None for row in rows[:3] for key in keys)
    for row in rows[3:]:
        assert 1 <= row["bp_p_star"] <= 8
        assert row["bp_utilization"] > 0
    assert {row["bp_action"] for row in rows} <= {"hold", "increase", "throttle"}


@pytest.mark.parametrize(("gflops", "regime"), [(1e3, "compute_bound"), (1e6, "memory_bound"), (0.0, None)])
def test_the_roofline_shows_in_the_regime(base, gflops, regime):
    """Throughput that only grows: the load stays at the maximum, and the ridge decides what bounds it."""
    pressure = Pressure(settings(peak_gflops=gflops, peak_bw_gb_s=1e3), 16, 8, decode_work(base))
    regimes = []
    for _ in range(8):
        pressure.observe(tokens=100 * pressure.load, seconds=1.0, context=40.0)
        regimes.append(pressure.metrics()["bp_regime"])
    assert pressure.load == 16
    assert regimes[-1] == (regime or "optimal")
    work = decode_work(base)
    assert work is not None
    if regime:
        assert (work.intensity(128, 40.0) < gflops / 1e3) == (regime == "memory_bound")
