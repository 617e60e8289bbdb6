from __future__ import annotations

import re
from pathlib import Path

import pytest

from retrain.config import load
from retrain.data.sources import read_problems

CAMPAIGNS = Path(__file__).parents[3] / "campaigns"
STEPS = {
    "sum": "{0} + {1}", "difference": "{0} - {1}", "product": "{0} * {1}", "gain": "{0} + {1}", "loss": "{0} - {1}",
    "boxes": "{0} * {1}", "change": "{0} + {1} - {2}", "bags": "{0} * {1} + {2}", "formula": "{0} * {1} + {2}",
}  # fmt: skip
"""How the numbers of a question of each kind make its answer."""


@pytest.mark.parametrize(
    ("file", "kinds"),
    [
        ("smollm2.toml", {"sum", "difference", "product", "gain", "loss", "boxes"}),
        ("smollm2_rare.toml", {"change", "bags", "formula"}),
    ],
)
def test_every_question_has_its_answer_and_stays_on_its_side(file, kinds):
    data = load(CAMPAIGNS / file).config.data
    train, test = (read_problems(data.source, split, data, CAMPAIGNS) for split in ("train", "test"))
    assert (len(train), len(test)) == (6000, 600)
    assert not {problem.prompt for problem in train} & {problem.prompt for problem in test}
    for problems in (train, test):
        assert len({problem.prompt for problem in problems}) == len(problems)
        assert {tag for problem in problems for tag in problem.tags} == kinds
    for problem in (*train[:600], *test):
        (kind,) = problem.tags
        numbers = re.findall(r"\d+", str(problem.prompt))
        assert eval(STEPS[kind].format(*numbers)) == int(problem.answer) >= 0
