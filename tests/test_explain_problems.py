"""What ``explain`` says of problems and rewards: counted, measured, shown, without torch and without weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from toymodels import qwen3_directory
from typer.testing import CliRunner

from retrain.cli import app
from retrain.commands.formulas import REWARDS, reward_words
from retrain.config import load, parse_dict
from retrain.config.tasks import RewardComponent
from retrain.data import load_data
from retrain.data.prompts import render
from retrain.errors import ModelError
from retrain.models import bundled_model_path
from retrain.models.tokenizer import light_tokenizer

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "campaigns" / "quickstart.toml"


def explained(*arguments: str | Path) -> dict[str, str]:
    """The first line of every name that ``explain`` prints."""
    result = CliRunner().invoke(app, ["explain", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    lines = {}
    for line in result.stdout.splitlines():
        lines.setdefault(line[:14].strip(), line[14:])
    return lines


@pytest.mark.parametrize("command", ["check", "explain"])
def test_no_torch_and_no_weights(command):
    code = f"import sys, retrain.cli as c\ntry: c.app(['{command}', sys.argv[1]])\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(QUICKSTART)], capture_output=True, text=True, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert "retrain.cli" in modules
    assert not {"torch", "peft", "safetensors.torch"} & modules
    assert "half of them at most" in done.stdout or command == "check"


def test_the_bundled_model_s_prompts():
    lines = explained(QUICKSTART)
    assert lines["data"] == "arithmetic: 20,000 problems to train on, 200 held out"
    assert lines["prompts"] == "9 to 14 tokens, half of them at most 12 as tiny-reasoner counts (701 measured)"
    assert lines["example"].startswith('"<|user|>')
    assert lines["reward"].startswith("match: 1 where the marked answer is the reference")


def test_measured_lengths_are_those_of_training(tmp_path):
    """Every prompt of a file, through system prompt, template and transformers' own tokenizer."""
    from transformers import AutoTokenizer

    model = qwen3_directory(tmp_path / "model", ["What is 3 + 4? 7", "Compute 12 * 3."])
    rows = [{"prompt": "What is 3 + 4? " * (1 + i % 7), "answer": str(i)} for i in range(40)]
    rows = [{**row, "prompt": f"{i} {row['prompt']}"} for i, row in enumerate(rows)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "run.toml"
    file.write_text(
        f'[model]\nmodel = "{model}"\n[data]\nsource = "problems.jsonl"\nsystem_prompt = "Think."\n'
        'prompt_template = "{prompt} Box it."\nshuffle = false\n[evaluation]\nproblems = 4\n'
    )
    config = load(file).config
    data = load_data(config.data, 4, None, 0, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    every = [*data.train, *data.heldout]
    lengths = [len(render(problem, tokenizer, config.data).token_ids) for problem in every]
    lines = explained(file)
    assert lines["data"].endswith(f": {len(data.train)} problems to train on, 4 held out")
    usual = sorted([*lengths, max(lengths)])
    half = {round((usual[len(usual) // 2] + usual[(len(usual) - 1) // 2]) / 2)}
    assert (
        lines["prompts"]
        == f"{min(lengths)} to {max(lengths)} tokens, half of them at most {half.pop()} as {model} counts"
    )
    assert lines["example"].startswith('"<turn>Think.<turn>')
    assert f"prompts of {usual[len(usual) // 2]} tokens" in lines["assuming"]


@pytest.mark.parametrize("template", [True, False])
def test_the_light_tokenizer_is_the_real_one(tmp_path, template):
    """Ids with and without special tokens, the template with special tokens and further arguments."""
    from transformers import AutoTokenizer

    directory = qwen3_directory(tmp_path / "model", ["What is 3 + 4? 7"])
    real = AutoTokenizer.from_pretrained(directory)
    text = (
        "{{ bos_token or '' }}{{ eos_token }}{% if think is defined %}{{ think }}{% endif %}{{ messages[0].content }}"
    )
    real.chat_template = text if template else None
    real.save_pretrained(directory)
    if not template:
        (directory / "chat_template.jinja").unlink(missing_ok=True)
    for path in (str(directory), str(bundled_model_path("tiny-reasoner"))):
        real, light = AutoTokenizer.from_pretrained(path), light_tokenizer(path)
        messages = [{"role": "user", "content": "3 + 4 é 数学\n<end>"}]
        if real.chat_template:
            for extra in ({}, {"think": "yes"}):
                both = [
                    each.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **extra)
                    for each in (real, light)
                ]
                assert both[0] == both[1]
        assert bool(light.chat_template) == bool(real.chat_template)
        for special in (True, False):
            texts = [each("3 + 4 é 数学 <end>", add_special_tokens=special)["input_ids"] for each in (real, light)]
            assert texts[0] == texts[1]


def test_what_is_missing_is_named(tmp_path):
    """No tokenizer, a damaged one, no data, a source that raises: lines, and the rest stands."""
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tokenizer.json").write_text("{")
    (tmp_path / "mine.py").write_text("def fails(split):\n    raise RuntimeError('no \\x1b[31mserver')\n")
    lines = explained(QUICKSTART, "--set", 'model.model="someone/else"')
    assert lines["prompts"] == "not measured: the tokenizer.json of someone/else is not on this machine"
    assert lines["data"].startswith("arithmetic: 20,000 problems")
    with pytest.raises(ModelError, match="cannot be read"):
        light_tokenizer(str(tmp_path / "bad"))
    file = tmp_path / "run.toml"
    file.write_text('[data]\nsource = "mine:fails"\n')
    assert explained(file)["data"] == "mine:fails: not read: RuntimeError: no \\x1b[31mserver (mine.py:2)"
    assert "not read" in explained(QUICKSTART, "--set", 'data.source="nowhere.jsonl"')["data"]


def test_rewards_that_differ_are_named_by_condition(tmp_path):
    condition = '[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "none"\n'
    file = tmp_path / "camp.toml"
    file.write_text(f'[campaign]\nseeds = [1]\n{condition}{condition}"reward.type" = "format"\n')
    result = CliRunner().invoke(app, ["explain", str(file)])
    rewards = [line for line in result.stdout.splitlines() if line.startswith("reward ")]
    assert [line.endswith("  (grpo+none)") for line in rewards] == [True, False]
    assert "closed box" in rewards[1]


def test_rewards_in_words():
    """Every kind of reward has its words; a sum names parts, weights and offsets."""
    kinds = set(RewardComponent.model_fields["type"].annotation.__args__)
    assert kinds == {*REWARDS, "judge", "rubric", "custom", "reward_model"}
    reward = {
        "type": "weighted",
        "components": [{"type": "math"}, {"type": "format", "weight": 0.1, "offset": -1.0, "name": "form"}],
    }
    words = reward_words(parse_dict({"reward": reward}))
    assert words.startswith("1 × math + 0.1 × (form − 1); math: 1 where")
    assert words.endswith("; at most 10 s for an answer, 2 at once")
    own = parse_dict({"reward": {"type": "custom", "custom_module": "mine.py"}})
    assert reward_words(own).startswith("custom: your own score of mine.py")
    judge = parse_dict({"reward": {"type": "judge", "judge_model": "m", "judge_url": "http://h/v1"}})
    assert "the model m at http://h/v1 says" in reward_words(judge)
    scored = parse_dict({"reward": {"type": "reward_model", "reward_model": "own/scorer"}})
    assert (
        reward_words(scored) == "reward_model: the score that the reward model own/scorer gives to problem and answer"
    )


def test_an_environment_is_named_with_its_turns_and_what_they_cost():
    lines = explained(ROOT / "campaigns" / "calculator.toml")
    assert lines["environment"] == "tools calculator; at most 4 turns of 48 sampled tokens; in 2 processes of its own"
    assert "= 3,840 completions, at most 737,280 tokens" in lines["each run"]
    assert lines["reward"].startswith("match")
    assert "environment" not in explained(QUICKSTART)


def test_a_provider_brings_problems_and_rewards(tmp_path):
    (tmp_path / "toys.py").write_text("from toy_environments import Echo\n", encoding="utf-8")
    (tmp_path / "toy_environments.py").write_text(
        (Path(__file__).parent / "toy_environments.py").read_text(encoding="utf-8"), encoding="utf-8"
    )
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\nmodel = "tiny-reasoner"\n[environment]\nprovider = "toys:Echo"\nargs = { turns = 2 }\n'
        "max_turns = 3\nworkers = 1\n[training]\nmax_tokens = 5\n[evaluation]\nproblems = 2\n",
        encoding="utf-8",
    )
    lines = explained(file)
    assert lines["reward"] == "that of toys:Echo"
    assert lines["environment"] == "toys:Echo; at most 3 turns of 5 sampled tokens; in 1 process of its own"
    assert lines["data"] == "toys:Echo: 6 problems to train on, 2 held out"
