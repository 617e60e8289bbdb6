"""Campaigns of a toy model: its directory, its rewards, and the file that trains it."""

import os
import signal
from pathlib import Path

from toymodels import campaign_head, qwen3_directory

from retrain.record.observer import NullObserver

REWARDS = '''
def score(completion, answer):
    """Share of even digits among the characters: a toy model gets a spread of it."""
    return sum(c in "02468" for c in completion) / max(1, len(completion))

def fragile(completion, answer):
    raise RuntimeError("this grader is broken")
'''
CONDITIONS = (("grpo", "none"), ("rloo", "gtpo_hicra_placebo"))
WORLD = """
[model]
model = "{model}"
lora_rank = 4
[reward]
type = "custom"
custom_module = "{module}"
workers = 1
[inference]
dtype = "{dtype}"
"""
"""What every campaign of the toy model has."""
TRAINING = """[training]
batch_size = 3
group_size = 4
max_tokens = 10
lr = 0.01
save_every = 2
eval_every = 2
[evaluation]
problems = 5
"""
TOML = "\n{condition}" + WORLD + TRAINING


class StopAfter(NullObserver):
    """Asks to stop once runs have done so many steps together."""

    def __init__(self, steps: int):
        self.left = steps

    def step(self, spec, row):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


def toy_world(folder: Path) -> Path:
    """A model directory in ``folder``, with the rewards of its campaigns beside it."""
    (folder / "toyrewards.py").write_text(REWARDS)
    return qwen3_directory(
        folder / "model", ["12+34=? 7*46-58+23=? the answer is \\boxed{46}", "let me check 0 2 4 6 8"]
    )


def campaign(tmp_path: Path, model: Path, name: str = "toy", *, steps: int = 4, lanes: int | str = "auto",
             condition: str = "", dtype: str = "float32") -> Path:  # fmt: skip
    """A file of two conditions and two seeds; ``condition`` has further keys of the second."""
    head = campaign_head(*CONDITIONS, seeds=[1, 2], max_steps=steps, lanes=lanes)
    path = tmp_path / f"{name}.toml"
    rest = TOML.format(model=model, module=model.parent / "toyrewards.py", condition=condition, dtype=dtype)
    path.write_text(head + rest)
    return path
