from retrain.training.state import HealthCounters, RunState

STATE = {
    "step": 4, "cursor": 12, "algorithm": {"sepa": None}, "policy": {"version": 4}, "ungraded_steps": 1,
    "skipped_updates": 2, "mismatched_steps": 3, "recorder": {"rows": {"metrics.jsonl": 4}},
    "earlier": [[2, 2], [3, 3]], "base": "weights", "run_id": "grpo+none_s1",
    "shared": {"pressure": None, "engine": {}},
}  # fmt: skip


def test_a_state_is_written_as_it_was_read_with_its_keys_in_order():
    state = RunState.from_dict(STATE)
    assert state.health == HealthCounters(ungraded_steps=1, skipped_updates=2, mismatched_steps=3)
    assert list(state.to_dict().items()) == list(STATE.items())
