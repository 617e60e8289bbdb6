from dataclasses import replace

import pytest

from retrain.campaign.planning.manifest import fingerprint
from retrain.campaign.planning.plan import base_key
from retrain.config import parse_dict
from retrain.config.base import Role
from retrain.config.checking import why_fixed
from retrain.config.root import defines_run, homes, keys, role_of
from retrain.config.runs import RunSpec, condition_hash, distinguishes_runs


def test_every_key_has_a_role():
    assert [dotted for dotted in keys() if not role_of(dotted)] == []
    assert role_of("backend.options.address") == role_of("backend.options") == Role.SAMPLES


@pytest.mark.parametrize(("key", "changes_the_run", "tells_replicates_apart", "is_fixed_for_conditions"), [
    ("training.lr", True, True, False),
    ("training.seed", True, False, True),
    ("training.save_every", False, False, False),
    ("training.micro_batch_tokens", True, False, False),
    ("model.model", True, True, True),
    ("model.lora_rank", True, True, False),
    ("backend.devices", False, False, True),
    ("backend.options", True, True, True),
    ("inference.url", False, False, True),
    ("reward.type", True, True, False),
    ("reward.reward_max", False, False, False),
    ("data.source", True, True, True),
    ("backpressure.enabled", True, False, True),
    ("logging.strategic_grams", True, True, False),
    ("campaign.lanes", False, False, True),
    ("campaign.vary", True, True, True),
])  # fmt: skip
def test_what_follows_from_the_role_of_a_key(key, changes_the_run, tells_replicates_apart, is_fixed_for_conditions):
    assert defines_run(key) is changes_the_run
    assert distinguishes_runs(key) is tells_replicates_apart
    assert bool(why_fixed(key)) is is_fixed_for_conditions


def grading(**reward) -> tuple:
    return parse_dict({"reward": reward}).reward.grading


def test_what_decides_grades():
    assert grading(reward_max=2.0, reward_min=-1.0) == grading()
    for other in ({"type": "math"}, {"workers": 3}, {"timeout_s": 1.0}, {"strict": False}, {"name": "own"}):
        assert grading(**other) != grading()
    scored = {"type": "reward_model", "reward_model": "own"}
    for other in ({"reward_model": "another"}, {"reward_batch": 2}):
        assert grading(**scored | other) != grading(**scored)


OTHER_BASE = [
    {"model": {"model": "elsewhere/model"}},
    {"model": {"revision": "main"}},
    {"backend": {"backend": "mine:Own", "options": {"a": 1}}},
    {"inference": {"dtype": "float64"}},
    {"lora": {"target_modules": ["q_proj"]}},
    {"data": {"source": "gsm8k"}},
    {"data": {"system_prompt": "Think."}},
    {"evaluation": {"problems": 3}},
    {"training": {"temperature": 0.5}},  # which is also that of the evaluation
    {"training": {"deterministic": True}},
]
SAME_BASE = [
    {"training": {"seed": 3, "lr": 0.1, "batch_size": 3, "save_every": 1, "eval_every": 2, "max_steps": 3}},
    {"algorithm": {"advantage_mode": "rloo", "transform_mode": "gtpo"}},
    {"model": {"lora_rank": 2, "local_files_only": True}},
    {"reward": {"type": "math", "name": "own"}},
    {"evaluation": {"at_start": False, "schedule": "verdict"}},
    {"logging": {"log_dir": "elsewhere", "strategic_grams": ["hm"]}},
    {"backend": {"adapter_path": "elsewhere", "devices": "cpu", "shard": "dp", "ranks": 2}},
]


def base_of(data) -> str:
    return base_key(RunSpec("run", "label", 1, 0, {}, False, parse_dict(data)))


def test_runs_that_sample_from_something_else_have_a_base_of_their_own_and_others_share_it():
    assert len({base_of({}), *(base_of(data) for data in OTHER_BASE)}) == len(OTHER_BASE) + 1
    assert {base_of(data) for data in SAME_BASE} == {base_of({})}


OLD_RUN = {
    "campaign": {"seeds": [1, 2]}, "model": {"lora_rank": 8}, "training": {"lr": 0.001, "max_steps": 7},
    "algorithm": {"advantage_mode": "maxrl"}, "data": {"levels": ["easy"]}, "reward": {"type": "math"},
}  # fmt: skip


def test_hashes_of_runs_without_newer_keys_stay():
    """The values are those of the release before [warmup] existed."""
    config = parse_dict(OLD_RUN)
    spec = RunSpec("run", "label", 1, 0, {}, True, config)
    assert (condition_hash(config.to_dict()), fingerprint(spec)) == ("0dcb775080a3d343", "e6b9b1ab7416c134")
    warmed = parse_dict(OLD_RUN | {"warmup": {"source": "a.jsonl"}})
    assert condition_hash(warmed.to_dict()) != condition_hash(config.to_dict())
    assert fingerprint(replace(spec, config=warmed)) != fingerprint(spec)


def test_a_bare_key_of_a_condition_never_means_the_warm_up_where_another_section_has_it():
    assert homes("lr") == ["training.lr"]
    assert homes("batch_size") == ["training.batch_size"]
    assert homes("epochs") == ["warmup.epochs"]
