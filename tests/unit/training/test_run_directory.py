"""A real campaign's directory: its files, who writes them, what rows promise, and other tools that read them.

After a change of the files, type ``python tests/unit/training/test_run_directory.py``: it writes
``tests/golden/campaign_directory.txt`` anew.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from mixed_cases import adapter_bytes, rows_of, runs_of
from record_cases import find_conversations
from toymodels import campaign_head, qwen3_directory

from retrain.campaign.running.controller import launch
from retrain.checkpoints import newest_whole
from retrain.config import load
from retrain.files import read_json, read_jsonl
from retrain.record.catalogue import METRICS
from retrain.record.observer import NullObserver
from retrain.trainer import Cohort

RUN = "grpo+none_s1"
GOLDEN = Path(__file__).parents[2] / "golden" / "campaign_directory.txt"
REWARDS = """
from retrain.rewards import RewardResult

reward_min, reward_max = 0.0, 1.0
metrics_ranges = {"digits": {"min": 0, "max": 12}}

def score(completion, answer):
    \"\"\"Share of even digits: a toy model gets a spread of it.\"\"\"
    share = sum(c in "02468" for c in completion) / max(1, len(completion))
    return RewardResult(share, sample_metrics={"digits": float(sum(c.isdigit() for c in completion))})
"""
PROBLEMS = """
metrics_ranges = {"digits": {"min": 0, "max": 99}, "carries": {"max": 3, "invert": True}}
reward_max = 7.0

def problems(split):
    numbers = range(10, 40) if split == "train" else [50]
    return [{"prompt": f"{a}+{b}=?", "answer": str(a + b), "tags": level}
            for a in numbers for b, level in enumerate(("easy", "medium", "hard"))]
"""
HEAD = campaign_head(("grpo", "none"), ("maxrl", "gtpo_sepa"), seeds=[1], max_steps=3)
TOML = """
[model]
model = "{model}"
lora_rank = 4
[training]
batch_size = 2
group_size = 4
max_tokens = 8
lr = 0.01
save_every = 2
eval_every = 2
[evaluation]
problems = 3
[data]
source = "sums:problems"
tags_column = "tags"
[sepa]
steps = 2
delay_steps = 0
[reward]
type = "custom"
custom_module = "{module}"
workers = 1
[inference]
dtype = "float32"
[logging]
log_kl = true
"""


WRITES: list[tuple[str, str]] = []
"""(thread, file name) of everything that was opened for writing while the cohort of the campaign below trained."""
_WATCHED: dict[str, Any] = {"folder": None}


def _on_open(event: str, arguments: tuple[Any, ...]) -> None:
    """Called by Python for every file that it opens or renames, on the thread that does."""
    if event not in ("open", "os.rename") or _WATCHED["folder"] is None:
        return
    path, flags = (arguments[1], os.O_WRONLY) if event == "os.rename" else (arguments[0], arguments[2])
    if not isinstance(path, str | os.PathLike) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    file = Path(os.fsdecode(path))
    if file.is_relative_to(_WATCHED["folder"]):
        WRITES.append((threading.current_thread().name, file.name))


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Note in ``WRITES`` who writes below ``folder`` while a cohort trains."""
    train = Cohort.train

    def watched_train(cohort: Cohort) -> Iterator[None]:
        with closing(train(cohort)) as pauses:
            while True:
                _WATCHED["folder"] = folder
                try:
                    next(pauses)
                except StopIteration:
                    return
                finally:
                    _WATCHED["folder"] = None
                yield

    sys.addaudithook(_on_open)  # there is no way to remove one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cohort, "train", watched_train)
        yield


def make_campaign(folder: Path) -> Path:
    """A campaign of two runs of three steps, trained for real."""
    (folder / "evendigits.py").write_text(REWARDS)
    (folder / "sums.py").write_text(PROBLEMS)
    model = qwen3_directory(folder / "model", ["12+34=? 7*46-58+23=? the answer is \\boxed{46}", "let me check 0 2 4"])
    (folder / "small.toml").write_text(HEAD + TOML.format(model=model, module=folder / "evendigits.py"))
    with watched(folder / "logs"):
        outcome = launch(load(folder / "small.toml"), folder / "logs", NullObserver())
    assert outcome.exit_status == 0
    return folder / "logs"


@pytest.fixture(scope="session")
def campaign(tmp_path_factory) -> Path:
    return make_campaign(tmp_path_factory.mktemp("small"))


# -- the files ----------------------------------------------------------------------------------------------------


def names(campaign: Path) -> str:
    """Return one line for every file of the campaign; ranks of squeeze and hashes depend on the machine."""
    files = [str(path.relative_to(campaign)) for path in sorted(campaign.rglob("*")) if path.is_file()]
    text = "\n".join(files) + "\n"
    return re.sub(r"evaluation_[0-9a-f]+\.npz", "evaluation_<hash>.npz", re.sub(r"rank_\d+/", "rank_<r>/", text))


def test_the_files_of_a_campaign(campaign):
    message = "if it is meant: python tests/unit/training/test_run_directory.py"
    assert names(campaign) == GOLDEN.read_text(encoding="utf-8"), message


# -- what a row promises ------------------------------------------------------------------------------------------


def test_the_training_thread_writes_nothing(campaign):
    """Neither records nor checkpoints, states, facts of the run or the untrained model's answers."""
    main = threading.main_thread().name
    while_training = {file.name for _, training, file in WRITES if training}
    kinds = ("metrics.jsonl", "timing_spans.jsonl", "timeline.html", "manifest.json", "checkpoints.jsonl", "state.json",
             "train_iteration_000000.html", "run.log")  # fmt: skip
    assert {*kinds} <= while_training
    assert [file for thread, training, file in WRITES if training and thread == main] == []


# -- what a row promises ------------------------------------------------------------------------------------------


def test_rows_have_the_same_keys_values_and_times_that_add_up(campaign):
    """Every key of the catalogue that this configuration defines has had a value, or has a reason not to."""
    reasons = {
        r"bp_|tools/": "switched off",
        r"discarded_|.*_terminated_length|plan_": "no such group, completion or phrase in these few",
        r"env/[^/]+/format": "the reward knows of no format",
        r".*carries": "declared by the data source, measured by nobody",
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
    # Where the data source and the reward both declare a range, that of the reward counts.
    assert read_json(run / "config.json")["ranges"] == {
        "reward": {"min": 0.0, "max": 1.0},
        "score": {"min": 0.0, "max": 1.0},
        "digits": {"min": 0, "max": 12},
        "carries": {"max": 3, "invert": True},
    }


def test_other_tools_read_the_files_of_a_run(campaign):
    """pandas, the cookbook's log tree and rollout summaries, TRL's metric names."""
    run = campaign / "runs" / RUN
    metrics: Any = pd.read_json(run / "metrics.jsonl", lines=True)
    assert metrics["env/all/reward/total"].tolist() == metrics["mean_reward"].tolist()
    trl = metrics[["reward", "kl", "entropy", "completions/clipped_ratio", "clip_ratio/region_mean"]]
    assert trl.notna().all(axis=None)
    assert (trl["kl"] >= 0).all()
    assert (trl["entropy"] > 0).all()
    completions: Any = pd.read_json(run / "emergence/generations.jsonl", lines=True)
    completions["digits"] = completions["completion"].str.count(r"\d")
    by_step = completions.groupby("step")["digits"]
    assert metrics["rewards/digits/mean"].tolist() == pytest.approx(by_step.mean().tolist())
    assert metrics["rewards/digits/std"].tolist() == pytest.approx(by_step.std(ddof=0).tolist())
    conversations = find_conversations(read_json(run / "eval_heldout_iteration_000003_logtree.json")["root"])
    answers = [row for row in read_jsonl(run / "emergence/evaluations.jsonl") if row["step"] == 3]
    messages = [conversation["messages"] for conversation in conversations]
    assert [(m[-1]["role"], m[-1]["content"]) for m in messages] == [("assistant", a["completion"]) for a in answers]
    assert [m[-2]["content"] for m in messages] == [row["prompt"] for row in answers]
    trajectories = read_jsonl(run / "train_iteration_000002_rollout_summaries.jsonl")
    rows = [row for row in read_jsonl(run / "emergence/generations.jsonl") if row["step"] == 2]
    assert [t["total_reward"] for t in trajectories] == pytest.approx([row["reward"] for row in rows])
    assert [(t["group_idx"], t["traj_idx"]) for t in trajectories] == [(row["group"], row["sample"]) for row in rows]
    assert [t["steps"][0]["ac_len"] for t in trajectories] == [row["num_tokens"] for row in rows]


# -- checkpoints and adapters -------------------------------------------------------------------------------------


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
        assert newest_whole(run, []) == run / lines[-1]["state_path"]


def test_steps_without_signal_leave_rows_and_checkpoints(silent_campaign):
    for run in runs_of(silent_campaign / "out").values():
        rows = rows_of(run)
        assert [(row["step"], row["num_datums"], row["mean_reward"]) for row in rows] == [
            (step, 0, 0.25) for step in range(3)
        ]
        assert [row["name"] for row in read_jsonl(run / "checkpoints.jsonl")] == ["000001", "000002", "000003", "final"]
        assert [step["step"] for step in read_jsonl(run / "emergence/steps.jsonl")] == [0, 1, 2]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    with tempfile.TemporaryDirectory() as temporary:
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(names(make_campaign(Path(temporary))), encoding="utf-8")
    print(f"wrote {GOLDEN}")
