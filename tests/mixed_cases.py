"""A campaign whose two conditions differ in every key that can reach sampling and update, and one without signal.

The fixtures ``toy_home``, ``mixed_campaign`` and ``silent_campaign`` of ``conftest.py`` train them once for all tests.
"""

from pathlib import Path

from toymodels import TWO_CONDITIONS, qwen3_directory

from retrain.campaign.running.controller import launch
from retrain.config import load
from retrain.files import append_jsonl, read_json, read_jsonl
from retrain.record.observer import NullObserver

REWARDS = '''
def score(completion, answer):
    """Right when there is a 2: most groups of a toy model are mixed, some have no signal."""
    return float("2" in completion)

def even(completion, answer):
    return sum(c in "02468" for c in completion) / max(1, len(completion))

def same(completion, answer):
    return 0.25
'''
SETTINGS = """
[model]
model = "{home}/model"
lora_rank = 4
[training]
batch_size = 3
group_size = 4
max_tokens = 10
max_steps = 3
lr = 0.01
save_every = 2
keep_last = 1
[data]
source = "{home}/subjects.jsonl"
[evaluation]
problems = 0
[reward]
type = "custom"
custom_module = "{home}/rewards.py"
custom_function = "{reward}"
workers = 1
[inference]
dtype = "float64"
[squeeze]
enabled = false
"""
OTHER = """
lr = 0.002
temperature = 0.7
max_tokens = 5
group_size = 6
batch_size = 2
"model.lora_rank" = 2
"""
BASE, CHANGED = 0, 1
"""Positions of the two conditions of a campaign in ``runs_of``."""


def toy_world_of_subjects(home: Path) -> Path:
    """A model, rewards, and problems that are sorted by subject, in ``home``."""
    qwen3_directory(home / "model", ["12+34=? 7*46-58+23=? the answer is \\boxed{46}", "let me check 0 2 4 6 8"])
    (home / "rewards.py").write_text(REWARDS)
    subjects = [{"prompt": f"{'algebra' if i < 20 else 'counting'} {i}: 2 + {i} = ?", "answer": "x"} for i in range(40)]
    append_jsonl(home / "subjects.jsonl", subjects)
    return home


def toy_file(home: Path, path: Path, *, pair: str | None = None, reward: str = "score") -> Path:
    """A single run's file, or with ``pair`` (further keys of the second condition) a campaign's."""
    campaign = "" if pair is None else TWO_CONDITIONS + pair + "\n"
    path.write_text(campaign + SETTINGS.format(home=home, reward=reward))
    return path


def launch_file(path: Path, out: Path, *sets: str):
    return launch(load(path, sets), out, NullObserver())


def runs_of(out: Path) -> dict[tuple[int, int], Path]:
    """Run directories by (position of the condition, seed)."""
    runs = read_json(out / "manifest.json")["runs"]
    assert len(runs) == 4
    labels = list(dict.fromkeys(run["label"] for run in runs))
    return {(labels.index(run["label"]), run["seed"]): out / run["path"] for run in runs}


def rows_of(run: Path) -> list[dict]:
    return read_jsonl(run / "metrics.jsonl")


def completions_of(run: Path) -> list[dict]:
    return read_jsonl(run / "emergence" / "generations.jsonl")


def adapter_bytes(directory: Path) -> bytes:
    return (directory / "adapter_model.safetensors").read_bytes()


def train_mixed(home: Path, folder: Path) -> Path:
    """A finished cohort whose two conditions differ in every key that has reached sampling and update."""
    path = toy_file(home, folder / "mixed.toml", pair=OTHER)
    export, trackers = f'backend.adapter_path="{folder}/export"', 'logging.report_to=["tensorboard"]'
    assert launch_file(path, folder / "out", "campaign.lanes=4", export, trackers).exit_status == 0
    return folder


def train_silent(home: Path, folder: Path) -> Path:
    """A finished campaign in which every completion scores the same: no update, the adapters stay as initialised."""
    path = toy_file(home, folder / "silent.toml", pair="", reward="same")
    assert launch_file(path, folder / "out", "training.save_every=1", "data.shuffle=false").exit_status == 0
    return folder
