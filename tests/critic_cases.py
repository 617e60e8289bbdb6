"""Campaigns with and without critics, and what must be equal in directories of interrupted and uninterrupted runs."""

import json
from pathlib import Path

from timing_keys import is_timing_key
from toycampaign import WORLD
from toymodels import campaign_head

from retrain.files import read_json, read_jsonl
from retrain.policy.critic import MOMENTS, WEIGHTS

OWN = ("gae", 'kl_coef = 0.05\nkl_in_reward = "k1"\ncritic = {warmup_steps = 1, lr = 0.02, lora_rank = 3}\n')
SHARED = ("gae", "critic = {share_adapter = true}\n")
ALL = (("grpo", ""), ("grpo", "num_iterations = 2\nminibatches = 2\n"), OWN, SHARED)
"""Advantage mode and further keys of a condition. The critic of its own trains alone in the first step."""
NAMES = ("once", "four", "own", "shared")
TOML = (
    """
[training]
batch_size = 3
group_size = 4
max_tokens = 8
lr = 0.01
{training}
[evaluation]
problems = 0
[squeeze]
enabled = false
"""
    + WORLD
)


def critic_campaign(
    folder: Path, model: Path, *conditions: tuple[str, str], training: str = "save_every = 2", steps: int = 4,
    lanes: int = 4, dtype: str = "float32",
) -> Path:  # fmt: skip
    head = campaign_head(seeds=[1], max_steps=steps, lanes=lanes)
    for advantage, keys in conditions:
        head += campaign_head((advantage, "none")).removeprefix("[campaign]\n") + keys
    path = folder / "critics.toml"
    values = {"model": model, "module": model.parent / "toyrewards.py", "training": training, "dtype": dtype}
    path.write_text(head + TOML.format(**values))
    return path


def single_run(folder: Path, model: Path, name: str, algorithm: str, training: str = "max_steps = 2") -> Path:
    """A file of one run; ``algorithm`` are the lines of [algorithm] and of tables after it."""
    path = folder / f"{name}.toml"
    values = {"model": model, "module": model.parent / "toyrewards.py", "training": training, "dtype": "float32"}
    path.write_text(f"[algorithm]\n{algorithm}\n" + TOML.format(**values))
    return path


def runs_of(out: Path) -> list[Path]:
    """The run directories of a campaign in the order of its plan."""
    return [out / run["path"] for run in read_json(out / "manifest.json")["runs"]]


def by_name(out: Path) -> dict[str, Path]:
    """The run directories of a campaign of ``ALL``."""
    return dict(zip(NAMES, runs_of(out), strict=True))


def rows_of(run: Path) -> list[str]:
    rows = read_jsonl(run / "metrics.jsonl")
    clocks = [key for key in rows[0] if is_timing_key(key)] + ["queue_depth"]
    return [json.dumps({key: row[key] for key in row if key not in clocks}) for row in rows]


def last_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").glob("step_*"))


def made(run: Path) -> dict[str, object]:
    """All that a run has made and that may not depend on how often it was interrupted."""
    files = [*(run / "final").glob("*.safetensors"), *last_checkpoint(run).glob("*.safetensors")]
    contents = {str(path.relative_to(run)): path.read_bytes() for path in files}
    answers = (run / "emergence/generations.jsonl").read_bytes()
    return {"rows": rows_of(run), "answers": answers, **contents}


def critic_files(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for name in (WEIGHTS, MOMENTS) for path in run.rglob(name))
