import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from retrain.data.arithmetic import DEFAULT_LEVELS, arithmetic_problems
from retrain.models.directory import bundled_model_path
from retrain.plugins import load_file

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "models" / "make_reasoner.py"
DIRECTORY = bundled_model_path("tiny-reasoner") or Path()


@pytest.fixture(scope="module")
def script():
    return load_file(SCRIPT, "make_reasoner")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DIRECTORY, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(DIRECTORY, local_files_only=True, dtype="float32").eval()


def test_the_directory_is_complete_small_and_licensed(model):
    names = {path.name for path in DIRECTORY.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) <= 4_000_000
    assert "license: apache-2.0" in (DIRECTORY / "README.md").read_text(encoding="utf-8")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert 500_000 <= sum(p.numel() for p in model.parameters()) <= 2_000_000
    assert bundled_model_path("Qwen/Qwen3-8B") is None
    assert bundled_model_path("../models") is None


def test_prompts_are_short_and_end_where_the_answer_begins(script, tokenizer):
    question = [{"role": "user", "content": "47+38-19=?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>47+38-19=?<|assistant|>"
    assert len(tokenizer(text)["input_ids"]) == 12
    assert max(map(len, script.prompt_ids(tokenizer, arithmetic_problems("train", 300)))) <= 20
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert tokenizer.tokenize("1234567890") == list("1234567890")


def test_accuracy_at_the_start_leaves_room_to_learn(script, model, tokenizer):
    sampled = script.measure(model, tokenizer, 100, sample=True)
    overall = sum(sampled[level]["accuracy"] for level in DEFAULT_LEVELS) / len(DEFAULT_LEVELS)
    assert 0.31 <= overall <= 0.64, sampled  # 35 to 60 %, give or take the noise of 300 samples
    assert all(sampled[level]["cut_off"] <= 0.1 for level in DEFAULT_LEVELS), sampled
    greedy = script.measure(model, tokenizer, 40, sample=False)
    assert greedy["hard"]["accuracy"] <= 0.85


def test_two_short_makings_in_different_processes_give_the_same_bytes(tmp_path):
    made = []
    for seed in ("1", "7"):
        environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[3]), "PYTHONHASHSEED": seed}
        words = [sys.executable, str(SCRIPT), "--out", str(tmp_path / seed), "--steps", "3", "--problems", "0"]
        subprocess.run(words, env=environment, check=True, capture_output=True)
        made.append({path.name: path.read_bytes() for path in (tmp_path / seed).iterdir()})
    assert made[0] == made[1]
    assert set(made[0]) == {path.name for path in DIRECTORY.iterdir()}
    assert made[0]["tokenizer.json"] == (DIRECTORY / "tokenizer.json").read_bytes()
