import re
from pathlib import Path

import pytest
from helpers.campaigns import adapter_bytes, runs_of, toy_toml, toy_world, train
from helpers.models import campaign_head

from retrain.files import read_jsonl
from retrain.records.catalogue import METRICS
from retrain.training.checkpoints import newest_undamaged

RUN = "grpo+none_s1"
FILES = Path(__file__).parents[2] / "golden" / "campaign_directory.txt"
REWARDS = """
from retrain.rewards import RewardResult

def score(completion, answer):
    \"\"\"Share of even digits: a toy model gets a spread of it.\"\"\"
    share = sum(c in "02468" for c in completion) / max(1, len(completion))
    return RewardResult(share, sample_metrics={"digits": float(sum(c.isdigit() for c in completion))})
"""
PROBLEMS = """
def problems(split):
    numbers = range(10, 40) if split == "train" else [50]
    return [{"prompt": f"{a}+{b}=?", "answer": str(a + b), "tags": level}
            for a in numbers for b, level in enumerate(("easy", "medium", "hard"))]
"""
HEAD = campaign_head(("grpo", "none"), ("maxrl", "gtpo_sepa"), seeds=[1], max_steps=3)
SECTIONS = {
    "training": {"batch_size": 2, "max_tokens": 8, "save_every": 2, "eval_every": 2}, "evaluation": {"problems": 3},
    "data": {"source": "sums:problems", "tags_column": "tags"}, "sepa": {"steps": 2, "delay_steps": 0},
    "squeeze": {"enabled": None}, "logging": {"log_kl": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def campaign(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    (folder / "evendigits.py").write_text(REWARDS)
    (folder / "sums.py").write_text(PROBLEMS)
    (folder / "small.toml").write_text(HEAD + toy_toml(toy_world(folder), "evendigits.py", **SECTIONS))
    train(folder / "small.toml", folder / "logs")
    return folder / "logs"


def test_the_files_of_a_campaign(campaign):
    """Ranks of squeeze and hashes depend on the machine."""
    files = [str(path.relative_to(campaign)) for path in sorted(campaign.rglob("*")) if path.is_file()]
    names = re.sub(r"rank_\d+/", "rank_<r>/", "\n".join(files) + "\n")
    names = re.sub(r"evaluation_[0-9a-f]+\.npz", "evaluation_<hash>.npz", names)
    assert names == FILES.read_text(encoding="utf-8")


def test_rows_have_the_same_keys_values_and_times_that_add_up(campaign):
    """Every key of the catalogue that this configuration defines has had a value, or has a reason not to."""
    reasons = {
        r"bp_|tools/": "switched off",
        r"discarded_|.*_terminated_length|plan_": "no such group, completion or phrase in these few",
        r"env/[^/]+/format": "the reward knows of no format",
        r"eval/heldout/[^/]+/ci_": "too few problems of the tag",
    }
    parts = [metric.key for metric in METRICS if metric.key.startswith("time/") and not metric.requires]
    for run in (campaign / "runs").iterdir():
        rows = read_jsonl(run / "metrics.jsonl")
        assert [row["step"] for row in rows] == [row["progress/batch"] for row in rows] == [0, 1, 2]
        assert len({tuple(row) for row in rows}) == 1
        for row in rows:
            assert sum(row[part] for part in parts) == pytest.approx(row["step_time_s"], rel=0.02)
            assert all(row[part] >= 0 for part in parts)
    run = campaign / "runs" / RUN
    rows = read_jsonl(run / "metrics.jsonl")
    empty = [key for key in rows[0] if all(row[key] is None for row in rows)]
    assert [key for key in empty if not any(re.match(pattern, key) for pattern in reasons)] == []


def test_every_run_has_an_adapter_and_final_is_recorded_last(mixed_campaign):
    """Runs share one adapter_path, with a directory for each; pruning removes neither ``final`` nor its state."""
    runs = runs_of(mixed_campaign / "out").values()
    exported = {run.name: adapter_bytes(mixed_campaign / "export" / run.name) for run in runs}
    assert exported == {run.name: adapter_bytes(run / "final") for run in runs}
    assert len(set(exported.values())) == 4
    for run in runs:
        lines = read_jsonl(run / "checkpoints.jsonl")
        assert [(line["name"], line["batch"]) for line in lines] == [("000002", 2), ("000003", 3), ("final", 3)]
        assert not (run / lines[0]["state_path"]).exists()  # keep_last = 1
        for key in ("state_path", "sampler_path"):
            assert (run / lines[-1][key] / "adapter_model.safetensors").is_file()
        assert newest_undamaged(run, []) == run / lines[-1]["state_path"]
