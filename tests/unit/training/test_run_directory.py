"""A real campaign's directory: its whole shape against a golden file, and the scripts that people read runs with.

After a change of what is written, type ``python tests/unit/training/test_run_directory.py``: it writes
``tests/golden/campaign_directory.txt`` anew, whose difference is what users see.
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

import numpy as np
import pandas as pd
import pytest
from mixed_cases import adapter_bytes, rows_of, runs_of
from record_cases import find_conversations
from toymodels import campaign_head, qwen3_directory

from retrain.campaign.planning.changes import settings_changes
from retrain.campaign.planning.manifest import fingerprint, planned_configs
from retrain.campaign.planning.plan import plan
from retrain.campaign.running.controller import launch
from retrain.checkpoints import newest_whole
from retrain.config import load
from retrain.config.root import sections
from retrain.files import jsonable, read_json, read_jsonl
from retrain.record.catalogue import METRICS
from retrain.record.observer import NullObserver
from retrain.trainer import Cohort

RUN = "grpo+none_s1"
GOLDEN = Path(__file__).parents[2] / "golden" / "campaign_directory.txt"
OPEN = {
    "config": "every key of docs/configuration.md",
    "attrs": "of the element by their names",
    "discarded": "text or null",
    "comparison": "as comparison.json",
    "squeeze": "as squeeze/analysis.json",
    "rank_pattern": "of every module by its name",
    "modules": "of every module of one's own by its path",
    "types": "of every key by its dotted name",
    "packages": "of every package by its name",
    "git": "root, revision, changed; null outside a repository",
    "gpus": "each with name, memory, driver",
    "cpu_count": "number",
    "memory_gib": "number or null",
}
"""Values whose content depends on the machine or repeats what stands elsewhere."""
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


WRITES: list[tuple[str, bool, Path]] = []
"""(thread, whether a cohort was training, file) of everything that the campaign below opened for writing."""
_WATCHED: dict[str, Any] = {"folder": None, "training": False}


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    """Python calls this for every file that it opens or renames, on the thread that does."""
    if event not in ("open", "os.rename") or _WATCHED["folder"] is None:
        return
    path, flags = (arguments[1], os.O_WRONLY) if event == "os.rename" else (arguments[0], arguments[2])
    if not isinstance(path, str | os.PathLike) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    file = Path(os.fsdecode(path))
    if file.is_relative_to(_WATCHED["folder"]):
        WRITES.append((threading.current_thread().name, _WATCHED["training"], file))


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Note in ``WRITES`` who writes below ``folder`` meanwhile."""
    train = Cohort.train

    def watched_train(cohort: Cohort) -> Iterator[None]:
        with closing(train(cohort)) as pauses:
            while True:
                _WATCHED["training"] = True
                try:
                    next(pauses)
                except StopIteration:
                    return
                finally:
                    _WATCHED["training"] = False
                yield

    sys.addaudithook(_heard)  # for good: there is no way to remove one
    _WATCHED["folder"] = folder
    Cohort.train = watched_train
    try:
        yield
    finally:
        Cohort.train = train
        _WATCHED["folder"] = None


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


# -- the golden file ----------------------------------------------------------------------------------------------


def shape(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, kind) of everything in a JSON value; lists by what their items have in common."""
    key = path.rpartition(".")[2].removesuffix("[]")
    if key in OPEN:
        yield path, OPEN[key]
    elif isinstance(value, dict) and value:
        for name, item in value.items():
            yield from shape(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value:
        for item in value:
            yield from shape(item, f"{path}[]")
    else:
        kinds = {dict: "table", list: "list", str: "text", bool: "boolean", int: "number", float: "number"}
        yield path, kinds.get(type(value), "null")


def merged(values: list[Any]) -> list[str]:
    """One line per key of all the values with its kinds; a key alone is a number or null (which depends on luck)."""
    kinds: dict[str, set[str]] = {}
    for value in values:
        for path, kind in shape(value):
            kinds.setdefault(path, set()).add(kind)
    words = {path: " or ".join(sorted(seen - {"null", "number"})) for path, seen in kinds.items()}
    return [f"{path}: {word}" if word else path for path, word in words.items()]


def walk(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The node and all nodes below it."""
    yield node
    for child in node.get("children", []):
        if isinstance(child, dict):
            yield from walk(child)


def content(path: Path) -> list[str]:
    """What a file holds, as far as it does not depend on numbers or the machine."""
    if path.name == "state.json":
        return ["whatever a run needs to go on: nothing that others read"]
    if path.suffix == ".json":
        value = read_json(path)
        if path.name == "adapter_config.json":
            from peft import LoraConfig

            defaults = {key: jsonable(item) for key, item in LoraConfig().to_dict().items()}
            assert set(value) >= set(defaults)
            value = {key: item for key, item in value.items() if item != defaults.get(key)}
            return ["a peft.LoraConfig, with values of its own for", *merged([value])]
        if path.name == "config.json":
            value = {"config": {}} | {key: item for key, item in value.items() if key not in sections()}
        if path.name.endswith("_logtree.json"):
            nodes = [{key: item for key, item in node.items() if key != "children"} for node in walk(value.pop("root"))]
            return [*merged([value]), *(f"root and below: {line}" for line in merged(nodes))]
        return merged([value])
    if path.suffix == ".jsonl":
        return merged(read_jsonl(path))
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, "np") as file:
            names = {re.sub(r"\.\d+\.", ".<layer>.", name) for name in file.keys()}  # noqa: SIM118
        return [f"tensor {name}" for name in sorted(names)]
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return [f"array {name}" for name in sorted(arrays.files)]
    if path.suffix == ".html":
        return [path.read_text(encoding="utf-8").splitlines()[0]]
    return []


def described(campaign: Path) -> str:
    """Every file of the campaign with its content's shape; for the second run, what differs from the first."""
    lines: list[str] = []
    seen: dict[str, list[str]] = {}
    for path in sorted(campaign.rglob("*")):
        if not path.is_file():
            continue
        name, now = str(path.relative_to(campaign)), content(path)
        kind = re.sub(r"(?<=^runs/)[^/]+|(?<=step_)\d+|(?<=iteration_)\d+", "", name)  # files of one kind are alike
        kind = path.name if path.name.startswith("adapter_") else kind
        before = seen.setdefault(kind, now)
        if before is now:
            lines += [name, *(f"    {line}" for line in now)]
        else:
            changed = [f"  - {line}" for line in before if line not in now]
            changed += [f"  + {line}" for line in now if line not in before]
            lines += [f"{name}  as the first of its kind{', but for' if changed else ''}", *changed]
    names = {r"rank_\d+/": "rank_<r>/", r"evaluation_[0-9a-f]+\.npz": "evaluation_<hash>.npz"}
    for pattern, replacement in names.items():
        lines = [re.sub(pattern, replacement, line) for line in lines]
    return "\n".join(lines) + "\n"


def test_the_whole_directory(campaign):
    assert described(campaign) == GOLDEN.read_text(encoding="utf-8"), (
        "if it is meant: python tests/unit/training/test_run_directory.py"
    )


# -- what a row promises ------------------------------------------------------------------------------------------


def test_other_ranges_for_charts_leave_a_run_the_same(campaign):
    toml = campaign.parent / "small.toml"
    (run, *_), (other, *_) = (
        plan(load(toml, sets)) for sets in ([], ["reward.reward_max=5.0", "reward.metrics_ranges.digits.max=3"])
    )
    assert run.config.reward != other.config.reward
    assert fingerprint(run) == fingerprint(other)
    asked, told = settings_changes([other], planned_configs(campaign), {run.run_id: {"state": "running", "step": 1}})
    assert (asked, told) == ([], [])
    (less, *_) = plan(load(toml, ["reward.timeout_s=5"]))
    assert fingerprint(less) != fingerprint(run)
    asked, _ = settings_changes([less], planned_configs(campaign), {run.run_id: {"state": "running", "step": 1}})
    assert asked == ["reward.timeout_s: 10.0 → 5.0"]


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
        GOLDEN.write_text(described(make_campaign(Path(temporary))), encoding="utf-8")
    print(f"wrote {GOLDEN}")
