"""Keys that do not go together are refused; the message has the fault and the fix."""

import pytest

from retrain.config import parse_dict
from retrain.errors import ConfigError

JUDGE = {"type": "rubric", "judge_model": "j"}
CRITERION = {"name": "correct", "text": "The answer is Paris."}
LAUNCH = {"engine": "vllm", "launch": "vllm serve"}
SLURM = {"campaign": {"executor": "slurm", "workers": 3, "seeds": [1, 2]}}
INT8 = {"model": {"quantize": "int8"}}


def sharing(part: float, **backend) -> dict:
    """Return the configuration of workers whose cohorts have so many GPUs each."""
    return {"campaign": {"executor": "processes", "gpus_per_cohort": part}, "backend": backend}


def taught(**keys) -> dict:
    return {"distillation": {"teacher": "base", **keys}}


def warmed(**keys) -> dict:
    return {"warmup": {"source": "a.jsonl", **keys}}


REFUSED = [
    ({"audit": {"type": "judge"}}, 'audit.judge_model  is missing: type = "judge" needs it'),
    ({"audit": {"judge_model": "j"}}, 'audit.judge_model  has no effect with type = "off"'),
    ({"audit": {"type": "match", "name": "gold"}}, "audit.name  has no effect: its score is called audit"),
    ({"audit": {"type": "match"}, "reward": {"name": "audit"}}, 'reward.name  is "audit", which is what the score'),
    ({"audit": {"type": "match"}, "environment": {"provider": "openenv", "id": "x"}}, "brings its own rewards"),
    ({"audit": {"type": "weighted"}}, "audit.type"),
    ({"reward": JUDGE}, 'criteria  is missing: type = "rubric" needs some: criteria = [{ name = "correct"'),
    ({"reward": JUDGE | {"criteria": [CRITERION] * 2}}, 'has "correct" twice: their metrics would be one'),
    ({"reward": JUDGE | {"criteria": [CRITERION | {"weight": 0}]}}, "has no weight but 0"),
    ({"reward": {"criteria": [CRITERION]}}, 'has no effect with type = "match": type = "rubric"'),
    ({"reward": {"overlong_tokens": 300}}, "is 300, more than max_tokens = 256: overlong_tokens = 51"),
    ({"reward": {"overlong_tokens": 9}, "algorithm": {"advantage_mode": "maxrl"}}, "makes rewards below 0"),
    ({"reward": {"overlong_tokens": 9}, "environment": {"tools": ["calculator"]}}, "for single answers"),
    ({"algorithm": {"advantage_mode": "gae"}, "critic": {"lam_length": 0.05, "lam_policy": 0.9}},
     "is 0.05 beside lam_policy = 0.9: keep one"),
    ({"algorithm": {"loss": "m2po", "rejection_denominator": "kept"}, "training": {"num_iterations": 2}},
     " before each of the step's several updates"),
    (taught(teacher="", clamp=3.0), "has no effect without a teacher: teacher = "),
    (taught(url="gpu1:8000"), "no address"),
    (taught() | {"training": {"dynamic_sampling": 2}}, "drops groups"),
    (taught() | {"algorithm": {"advantage_mode": "gae"}}, "its critic trains for nothing"),
    (taught() | {"algorithm": {"transform_mode": "gtpo"}}, "no effect with reward_weight = 0"),
    (taught(url="http://a:1") | {"training": {"temperature": 0.7}}, "at temperature 1"),
    (taught() | {"backend": {"backend": "mine:Own"}}, "gives no log-probabilities of sampled tokens"),
    (taught(reward_weight=1.0) | {"training": {"group_size": 1}}, "advantages compare the completions of a group"),
    (taught(teacher="policy"), "the student itself, which without a context teaches nothing"),
    (taught(context_text="{context}"), "has no effect without a context"),
    (taught(context="answer", context_text="the answer"), "does not say where the answer stands"),
    (taught(context="answer") | {"environment": {"tools": ["calculator"], "max_turns": 3}}, "may have several turns"),
    (taught(context="sibling") | {"training": {"group_size": 1}}, "with group_size = 1 no completion has one"),
    (taught(estimate="vocabulary", url="http://a:1"), "a server gives log-probabilities of sampled tokens only"),
    (taught(estimate="vocabulary") | {"training": {"top_k": 5}}, "top_k leaves tokens out of what is sampled from"),
    (taught(estimate="vocabulary") | {"backend": {"shard": "dp", "ranks": 2}}, "ranks have no teacher"),
    ({"backend": {"devices": "all"}}, 'is "all", and one process trains on one device: devices = "auto"'),
    ({"campaign": {}, "backend": {"devices": "gpu:0-3"}}, 'or executor = "processes" in [campaign]'),
    ({"backend": {"devices": ["cpu"]}}, "GPUs such as"),
    ({"campaign": {"workers": 2}}, "campaign.workers  has no effect"),
    ({"campaign": {"gpus_per_cohort": 0.5}}, 'gpus_per_cohort  has no effect with executor = "inprocess"'),
    (sharing(0.5, devices="cpu"), 'has no effect with devices = "cpu"'),
    (sharing(2), 'with shard = "none" a cohort trains on one GPU'),
    (sharing(1.5), "is 1.5: a cohort has a part of one GPU, or whole GPUs"),
    (sharing(0.5, shard="dp"), "has one device: there is nothing to divid"),
    ({"campaign": {"executor": "ray", "gpus_per_cohort": 4}, "backend": {"shard": "dp", "ranks": 2}},
     "each rank of a worker has one GPU"),
    ({"campaign": SLURM["campaign"] | {"gpus_per_cohort": 0.5}}, "a job of Slurm's has whole GPUs"),
    ({"backend": {"backend": "own:Own", "shard": "dp"}}, "own:Own computes its updates itself"),
    ({"backend": {"devices": "gpu:0-1"}}, "one process trains on one device"),
    ({"backend": {"shard": "fsdp2"}, "training": {"update_dtype": "bfloat16"}}, 'update_dtype = "model", or shard ='),
    ({"inference": LAUNCH, "backend": {"shard": "dp"}}, 'backend.shard  is "dp", and servers that are launched here'),
    ({"inference": {"engine": "local", "mismatch_limit": 0.1}}, "mismatch_limit"),
    ({"inference": {"engine": "vllm", "url": "http://a", "replicas": 2}}, "replicas  has no effect without launch"),
    ({"inference": LAUNCH | {"launch_gpus": "0,1,2", "replicas": 2}}, "has 3, which 2 replicas cannot divide up"),
    (SLURM | {"inference": LAUNCH, "backend": {}}, "is no node with a GPU"),
    ({"campaign": {"executor": "ray"}, "inference": LAUNCH | {"launch_gpus": "0"}}, "[ray] server_gpus = 1"),
    ({"campaign": {"executor": "processes"}, "inference": LAUNCH | {"sleep": True, "launch_gpus": "0"}},
      "sleep = false"),
    ({"campaign": {"executor": "processes", "gpus_per_cohort": 2}, "backend": {"shard": "dp"},
      "inference": LAUNCH | {"sleep": True}}, "gpus_per_cohort = 1"),
    (SLURM | {"inference": LAUNCH}, "url, with the addresses of servers of"),
    ({"campaign": {"executor": "slurm"}}, 'campaign.workers  is "auto": say how many are asked of Slurm'),
    (SLURM | {"backend": {"devices": "all"}}, 'each worker has the GPU that Slurm gives it: devices = "auto"'),
    (SLURM | {"slurm": {"cluster": "local"}}, 'cluster = "slurm", or devices = "cpu"'),
    (SLURM | {"slurm": {"memory": "64GB"}}, 'memory = "64G"'),
    (SLURM | {"slurm": {"extra": {"array": "0-1"}}}, 'has "array", which stands here in its own place'),
    (SLURM | {"slurm": {"gpu_type": "h100", "extra": {"gres": "gpu:1"}}}, "has no effect with gres in extra"),
    (SLURM | {"slurm": {"gpu_type": "h100"}, "backend": {"devices": "cpu"}}, 'no effect with devices = "cpu"'),
    ({"campaign": {}, "slurm": {"partition": "gpu"}}, 'has no effect with executor = "inprocess": remove the line'),
    *((SLURM | {"slurm": {"time": limit}}, "slurm.time") for limit in ("", "four hours", "1:2:3:4", "0", "-1", "1-")),
    (INT8 | {"inference": {"engine": "vllm", "url": "http://localhost:1"}}, "a server samples with a base of its own"),
    (INT8 | {"backend": {"shard": "fsdp2", "ranks": 2}}, "fsdp2 cuts weights in the base's number format alone"),
    (INT8 | {"training": {"update_dtype": "bfloat16"}}, "keeps a copy of every weight"),
    (INT8 | {"backend": {"backend": "mine:Backend"}}, "has a model of its own"),
    (warmed(source=None, lr=0.1), 'warmup.lr  has no effect without a source: source = "examples.jsonl"'),
    (warmed(steps=0), "warmup.steps  is 0, but must be an integer ≥ 1"),
    (warmed(steps=3, epochs=2), "warmup.epochs  is 2 beside steps = 3, and both set the length"),
    (warmed(source="arithmetic"), 'warmup.source  is "arithmetic", but must be a file ending in .jsonl, .csv'),
    (warmed(source="a.json"), 'warmup.source  is "a.json", but must be a file'),
    (warmed(eval_split="dev"), "warmup.eval_split  has no effect without eval_source"),
    (warmed(eval_source="a.jsonl"), "warmup.eval_source  is \"a.jsonl\", the examples that are trained on"),
    (warmed(source="a/b", eval_source="a/b", split="test"), "the examples that are trained on"),
    (warmed() | {"backend": {"backend": "mine:Own"}}, "mine:Own\": it computes its updates itself: remove the section"),
    ({"training": {"sft_lr": 0.1}}, "training.sft_lr  is not a key: the supervised warm-up has a section: [warmup] lr"),
    ({"campaign": {"test": "normal"}}, "is not a key: one rule decides every verdict"),
    *(({"campaign": {key: True}}, "is not a key: stopping conditions that are undecided raises the error")
      for key in ("futility", "race")),
    ({"campaign": {"prior_spread": 0.04}}, "is not a key: the rule assumes no spread"),
    ({"campaign": {"prior_freedom": 4}}, "is not a key: the rule assumes no spread"),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "message"), REFUSED)
def test_what_does_not_go_together_or_was_removed_is_refused_in_one_line(sections, message):
    with pytest.raises(ConfigError) as caught:
        parse_dict(sections)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_that_go_together_are_accepted():
    parse_dict(warmed(source="a/b", eval_source="a/b", epochs=2))
    parse_dict(INT8 | {"inference": {"mismatch_limit": 0.1}})
    parse_dict({"backend": {"devices": "gpu:0-1", "shard": "dp"}, "training": {"update_dtype": "bfloat16"}})
