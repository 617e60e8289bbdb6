"""Campaigns of a toy model: its directory, its rewards, and the file that trains it."""

from __future__ import annotations

from pathlib import Path

from toymodels import qwen3_directory

REWARDS = '''
def score(completion, answer):
    """Share of even digits among the characters: a toy model gets a spread of it."""
    return sum(c in "02468" for c in completion) / max(1, len(completion))

def fragile(completion, answer):
    raise RuntimeError("this grader is broken")
'''
TOML = """
[campaign]
seeds = [1, 2]
max_steps = {steps}
lanes = {lanes}
[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"
[[campaign.conditions]]
advantage_mode = "rloo"
transform_mode = "gtpo_hicra_placebo"
{condition}
[model]
model = "{model}"
lora_rank = 4
[training]
batch_size = 3
group_size = 4
max_tokens = 10
lr = 0.01
save_every = 2
eval_every = 2
[evaluation]
problems = 5
[reward]
type = "custom"
custom_module = "{module}"
workers = 1
[inference]
dtype = "{dtype}"
"""


def toy_world(folder: Path) -> Path:
    """A model directory in ``folder``, with the rewards of its campaigns beside it."""
    (folder / "toyrewards.py").write_text(REWARDS)
    return qwen3_directory(
        folder / "model", ["12+34=? 7*46-58+23=? the answer is \\boxed{46}", "let me check 0 2 4 6 8"]
    )


def campaign(tmp_path: Path, model: Path, name: str = "toy", **changes) -> Path:
    """A file of two conditions and two seeds; ``changes`` fill its places."""
    settings = {"steps": 4, "lanes": '"auto"', "condition": "", "dtype": "float32"} | changes
    path = tmp_path / f"{name}.toml"
    path.write_text(TOML.format(model=model, module=model.parent / "toyrewards.py", **settings))
    return path
