"""GSM8K (Cobbe et al. 2021): the problems, and their written solutions as examples of a warm-up.

    [data]
    source = "grade_school:problems"

    [warmup]
    source = "grade_school:solutions"

The rows come from the hub (`pip install '.[data]'`), or from `train.jsonl` and `test.jsonl` in the folder that the
environment variable ``GSM8K`` names, which are those of github.com/openai/grade-school-math.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

CALCULATION = re.compile(r"<<.*?>>")
"""A calculation for a calculator's use in the middle of a solution, such as <<48/2=24>>."""


def problems(split: str) -> list[dict[str, str]]:
    """Return the problems of ``split``, ``train`` or ``test``; the answer is the number after ``####``."""
    return [{"prompt": row["question"], "answer": row["answer"].split("####")[1].strip()} for row in _rows(split)]


def solutions(split: str) -> list[dict[str, str]]:
    """Return the problems of ``split`` with the solutions that people wrote; each ends with ``#### number``."""
    return [{"prompt": row["question"], "completion": CALCULATION.sub("", row["answer"])} for row in _rows(split)]


def _rows(split: str) -> Iterable[Mapping[str, str]]:
    folder = os.environ.get("GSM8K")
    if folder is None:
        from datasets import load_dataset

        return load_dataset("openai/gsm8k", "main", split=split)
    return map(json.loads, (Path(folder) / f"{split}.jsonl").read_text(encoding="utf-8").splitlines())
