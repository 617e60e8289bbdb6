import json
from dataclasses import asdict

import pytest

from retrain.algorithms.credit.sepa_pooling import SepaState
from retrain.config.algorithm import Sepa
from retrain.training.updates import learning_rate


def test_learning_rate_points():
    rates = [learning_rate("linear", step, 10, 4, 1.0) for step in range(11)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 5 / 6, 4 / 6, 0.5, 2 / 6, 1 / 6, 0.0])
    assert [learning_rate("cosine", step, 10, 0, 2.0) for step in (0, 5, 10)] == pytest.approx([2.0, 1.0, 0.0])
    assert [learning_rate("constant", s, 3, 0, 0.1) for s in range(3)] == [0.1] * 3
    for schedule in ("constant", "linear", "cosine"):  # also where the warm-up is longer than the run
        assert all(0.0 < learning_rate(schedule, step, 5, 9, 1e-4) <= 1e-4 for step in range(5))


def run(sepa: Sepa, batches: list[tuple[float, float | None]]) -> list[float]:
    state, values = SepaState.before_training(sepa), []
    for step, (correct, variance) in enumerate(batches):
        values.append(state.pooling(sepa, step))
        after = state.after(sepa, step, correct, variance)
        state = SepaState(**json.loads(json.dumps(asdict(after), allow_nan=False)))
    return values


def test_gate_starts_the_clock_and_stays_open():
    no_gate = Sepa(steps=4, delay_steps=1, correct_rate_gate=0.0)
    assert run(no_gate, [(0.0, None)] * 7) == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    batches = [(0.1, 1.0), (0.0, None), (0.5, 1.0), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0)]
    assert run(Sepa(steps=2, correct_rate_gate=0.5), batches) == [0.0, 0.0, 0.0, 0.0, 0.5, 1.0]
    assert run(Sepa(steps=0, correct_rate_gate=0.0), batches) == [0.0] * 6


def test_auto_follows_the_fall_of_the_variance():
    rules = {"schedule": "auto", "correct_rate_gate": 0.0}
    sepa = Sepa(**rules, steps=1000, ema_decay=0.5, threshold=0.5, warmup_steps=2)
    values = run(sepa, [(0, 4.0), (0, 4.0), (0, None), (0, 0.0), (0, 0.0), (0, 0.0)])
    ema = [4.0, 4.0, 4.0, 2.0, 1.0]
    auto = [1 - min(e / (4.0 * 0.5), 1) for e in ema]
    assert values[1] == 0.001  # the linear floor, before warm-up has ended
    assert values[4:] == pytest.approx([max(auto[3], 0.004), auto[4]])
    without = run(Sepa(**rules, steps=10, warmup_steps=1), [(0, 0.0)] * 4)
    assert without == pytest.approx([0.0, 0.1, 0.2, 0.3])
    state = SepaState.before_training(sepa)
    for step, variance in enumerate((4.0, 2.0, 1.0)):
        state = state.after(sepa, step, 0.0, variance)
    assert state == SepaState(opened_at=0, var_ema=2.0, var_0=3.0, observed=3)
