"""Files of a toy model to probe, and the probe of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toycampaign import WORLD
from toymodels import campaign_head

from retrain.campaign.planning.plan import Plan
from retrain.config import load
from retrain.probe.measure import Effort, probe
from retrain.probe.points import points_of

BINARY = '''
def score(completion, answer):
    """1 for a completion with more even than odd characters, about half of a toy model's."""
    return float(2 * sum(ord(c) % 2 == 0 for c in completion) > len(completion))

def always(completion, answer):
    return 1.0

def broken(completion, answer):
    raise RuntimeError("no such column")
'''
SHORT = """[training]
batch_size = 3
group_size = {group}
max_tokens = 8
lr = 0.01
save_every = 2
[evaluation]
problems = {problems}
"""


def toy(folder: Path, model: Path, *conditions: tuple[str, str], group: int = 4, problems: int = 4,
        function: str = "score", extra: str = "", **keys: Any) -> Path:  # fmt: skip
    world = WORLD.format(model=model, module=model.parent / "binary.py", dtype="float32")
    world = world.replace("workers = 1", f'custom_function = "{function}"\nworkers = 1')
    path = folder / "toy.toml"
    head = campaign_head(*conditions, seeds=[1, 2], **{"max_steps": 4, **keys})
    path.write_text(head + world + SHORT.format(group=group, problems=problems) + extra)
    return path


def probed(path: Path, *at: str, batches: int = 4, problems: int = 4) -> dict[str, Any]:
    return probe(Plan.of(load(path, ())), points_of(at), Effort(batches, problems, 4), lambda text: None)
