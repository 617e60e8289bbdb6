"""GSM8K (Cobbe et al. 2021): the problems, and their written solutions as examples of a warm-up.

    [data]
    source = "grade_school:problems"

    [warmup]
    source = "grade_school:solutions"

Without a hub (`pip install '.[data]'`), set the environment variable ``GSM8K`` to a folder with ``train.jsonl`` and
``test.jsonl`` of github.com/openai/grade-school-math.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

CALCULATION = re.compile(r"<<.*?>>")
"""The data set's annotation of a calculation, as <<48/2=24>> in "48/2 = <<48/2=24>>24 clips"."""


def problems(split: str) -> list[Mapping[str, str]]:
    """Return the rows of ``split`` (``train`` or ``test``): ``question``, and ``answer``, which ends with #### and the
    number."""
    return list(_rows(split))


def solutions(split: str) -> list[dict[str, str]]:
    """Return the rows of ``split`` as prompts and completions, without annotations of calculations."""
    return [{"prompt": row["question"], "completion": CALCULATION.sub("", row["answer"])} for row in _rows(split)]


def _rows(split: str) -> Iterable[Mapping[str, str]]:
    folder = os.environ.get("GSM8K")
    if folder is None:
        from datasets import load_dataset

        return load_dataset("openai/gsm8k", "main", split=split)
    return map(json.loads, (Path(folder) / f"{split}.jsonl").read_text(encoding="utf-8").splitlines())
