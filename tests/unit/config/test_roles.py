"""Every key has a role, and what follows from the roles is what the tool promises of a key: these lists."""

from __future__ import annotations

from retrain.campaign.judging.pooling import tells_apart
from retrain.campaign.planning.changes import counts
from retrain.campaign.planning.cohorts import base_key
from retrain.campaign.planning.plan import RunSpec
from retrain.config import parse_dict
from retrain.config.base import Role
from retrain.config.conditions import why_fixed
from retrain.config.root import keys, role_of


def expanded(*names: str) -> set[str]:
    """The keys themselves, and all keys of the sections."""
    return {dotted for dotted in keys() for name in names if dotted == name or dotted.startswith(f"{name}.")}


WHERE = (
    "inference.url", "inference.launch", "inference.launch_gpus", "inference.api_key_env", "inference.adapter_dir",
    "inference.upload", "inference.replicas",
)  # fmt: skip
"""Where servers are: it changes nothing that is computed."""
TEACHERS = ("distillation.url", "distillation.server", "distillation.api_key_env")
"""Where a teacher's server is, and how to talk to it: the teacher is the same."""
TEACHERS_PATIENCE = ("distillation.timeout_s", "distillation.patience_s", "distillation.max_in_flight")
CHARTS = ("reward.metrics_ranges", "reward.reward_min", "reward.reward_max")


def test_every_key_has_a_role():
    assert [dotted for dotted in keys() if not role_of(dotted)] == []
    assert role_of("backend.options.address") == role_of("backend.options") == Role.SAMPLES


def test_what_may_change_without_a_word_when_a_run_goes_on():
    quiet = {dotted for dotted in keys() if not counts(dotted)}
    whole = expanded("logging", "squeeze", "campaign", "ray", "slurm")
    assert quiet == (whole - {"logging.strategic_grams", "campaign.seed", "campaign.vary"}) | {
        "training.save_every", "training.keep_last", "training.keep_every", "model.local_files_only",
        "backend.adapter_path", "backend.devices", "backend.shard", "backend.ranks", "environment.python",
        *WHERE, *TEACHERS, *CHARTS,
    }  # fmt: skip
    assert counts("a.key_of_another_release")


def test_in_what_replicates_may_differ():
    may = {dotted for dotted in keys() if not tells_apart(dotted)}
    whole = expanded("campaign", "logging", "squeeze", "ray", "slurm", "backpressure")
    assert may == (whole - {"logging.strategic_grams", "campaign.vary"}) | {
        "training.seed", "training.save_every", "training.keep_last", "training.keep_every",
        "training.micro_batch_tokens", "training.nonfinite_limit", "training.eval_every", "evaluation.at_start",
        "evaluation.schedule",
        "backend.adapter_path", "backend.devices", "backend.shard", "backend.ranks", "model.local_files_only",
        "reward.timeout_s", "reward.workers",
        "reward.reward_batch",
        "environment.timeout_s", "environment.workers", "environment.memory_gb", "environment.python", *CHARTS, *WHERE,
        *TEACHERS, *TEACHERS_PATIENCE,
        "inference.timeout_s", "inference.patience_s", "inference.max_in_flight", "inference.sleep",
        "inference.tolerance", "inference.mismatch_limit",
    }  # fmt: skip


def test_what_a_condition_may_override():
    whole = ("campaign", "model", "backend", "inference", "data", "audit", "environment", "evaluation", "backpressure",
             "slurm", "squeeze", "resume", "logging", "training.seed")  # fmt: skip
    fixed = {dotted for dotted in keys() if why_fixed(dotted)}
    assert fixed == (expanded(*whole) | {*TEACHERS, *TEACHERS_PATIENCE}) - {
        "model.lora_rank",
        "logging.strategic_grams",
        "environment.correct_metric",
    }


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
    {"model": {"trust_remote_code": True}},
    {"backend": {"backend": "mine:Own", "options": {"a": 1}}},
    {"inference": {"dtype": "float64"}},
    {"lora": {"target_modules": ["q_proj"]}},
    {"data": {"source": "gsm8k"}},
    {"data": {"system_prompt": "Think."}},
    {"data": {"source": "owner/name", "subset": "main"}},
    {"data": {"max_prompt_tokens": 50}},
    {"evaluation": {"problems": 3}},
    {"training": {"temperature": 0.5}},  # which is also that of the evaluation
    {"training": {"deterministic": True}},
]
SAME_BASE = [
    {"training": {"seed": 3, "lr": 0.1, "batch_size": 3, "save_every": 1, "eval_every": 2, "max_steps": 3}},
    {"algorithm": {"advantage_mode": "rloo", "transform_mode": "gtpo"}},
    {"model": {"lora_rank": 2, "local_files_only": True}},
    {"lora": {"alpha": 3.0}},
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
