"""Demonstrations that the bundled tool user was trained on."""

from __future__ import annotations

from pathlib import Path
from random import Random

from transformers import AutoTokenizer

from retrain.config.tasks import Data
from retrain.data.prompts import Renderer
from retrain.environments.tools.calls import parse
from retrain.models import bundled_model_path
from retrain.plugins import load_file

SCRIPTS = Path(__file__).parents[3] / "scripts"


ROW = {"prompt": "38*47+29*6=?", "answer": "1960", "steps": ["38*47", "29*6", "1786+174"]}


def test_a_demonstration_is_what_the_episode_will_be():
    """Calls are read as in an episode, answers are the calculator's, and only the model's own tokens are trained."""
    script = load_file(SCRIPTS / "make_tool_user.py", "make_tool_user")
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path("tiny-tool-user"), local_files_only=True)
    renderer = Renderer(tokenizer, Data(), tools_prompt="")
    ids, own = script.row_of(tokenizer, renderer, ROW, script.Habits(1.0, 0.0, 0.0, 0.0), Random(0))
    text = tokenizer.decode(ids)
    call = '```tool\ncalculator(expression="{}")\n```<|end|>'
    assert text == (
        "<|user|>38*47+29*6=?<|assistant|>" + call.format("38*47") + "<|tool|>1786<|assistant|>" + call.format("29*6")
        + "<|tool|>174<|assistant|>" + call.format("1786+174") + "<|tool|>1960<|assistant|>\\boxed{1960}<|end|>"
    )  # fmt: skip
    said = tokenizer.decode([token for token, mine in zip(ids, own, strict=True) if mine])
    assert said == call.format("38*47") + call.format("29*6") + call.format("1786+174") + "\\boxed{1960}<|end|>"
    assert [call.arguments for call in parse(said.split("<|end|>")[0]).calls] == [{"expression": "38*47"}]


def test_problems_are_held_out_by_their_text():
    calculations = load_file(SCRIPTS.parent / "campaigns" / "calculations.py", "calculations")
    train, test = (calculations.problems(split) for split in ("train", "test"))
    assert (len(train), len(test)) == (6000, 600)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    for row in (*train[:50], *test[:50]):
        expression = row["prompt"].removesuffix("=?")
        left, sign, right = expression.partition("+") if "+" in expression else expression.partition("-")
        values = [int(a) * int(b or 1) for a, _, b in (left.partition("*"), right.partition("*"))]
        value = values[0] + values[1] if sign == "+" else values[0] - values[1]
        assert (str(value), value >= 0) == (row["answer"], True)
