"""The models, problems and rewards of the golden campaigns, made without any code of retrain."""

import json
import sys
from pathlib import Path

TEXTS = ["12+34=? 7*46-58+23=? the answer is \\boxed{46}", "let me check 0 2 4 6 8", "wait, first I compute 9 - 5"]
REWARDS = '''
import hashlib

from retrain.types import RewardResult


def even(completion, answer):
    """Share of even digits among the characters."""
    return sum(c in "02468" for c in completion) / max(1, len(completion))


def zero_or_one(completion, answer):
    """Whether the number of characters is odd: groups with and without a difference."""
    return float(len(completion) % 2)


def graded(completion, answer):
    parts = {"evenness": even(completion, answer), "shortness": 1 / (1 + len(completion))}
    return RewardResult(sum(parts.values()), components=parts, sample_metrics={"letters": float(len(completion))})


def hopeless(completion, answer):
    raise RuntimeError("this grader is broken")
'''
PLUGINS = '''
import torch


def centred(rewards):
    """An advantage of the user's own."""
    return rewards - rewards.mean()


def problems(split):
    return [{"prompt": f"Count to {n}.", "answer": str(n)} for n in range(8 if split == "train" else 4)]
'''


def main(folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from helpers.models import qwen3_directory

    qwen3_directory(folder / "model", TEXTS, positions=256)
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "plugins.py").write_text(PLUGINS)
    problems = [{"prompt": f"{n}+{n % 3}=?", "answer": str(n + n % 3), "kind": f"mod{n % 3}"} for n in range(40)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    harder = [{"prompt": f"{n}*{n}=?", "answer": str(n * n), "kind": "squares"} for n in range(6)]
    (folder / "harder.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in harder))
    long = [*problems[:12], {"prompt": "7" * 400, "answer": "7", "kind": "long"}]
    (folder / "long.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in long))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
