import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.models import TINY_RUN, qwen3_directory
from safetensors import numpy as their_numpy
from safetensors import torch as their_torch
from typer.testing import CliRunner

from retrain.cli import app
from retrain.tensor_file import to_bytes

TENSORS = {
    "b": torch.arange(6.0).reshape(2, 3).T, "a": torch.tensor(3.5), "wide": torch.ones(3, dtype=torch.float64),
    "half": torch.full((3,), 0.3, dtype=torch.bfloat16), "ids": torch.arange(5), "none": torch.zeros(0, 4),
    "mask": torch.tensor([True, False, True]), 'ü"': torch.tensor([1, 2], dtype=torch.int32),
}  # fmt: skip


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_a_file_is_as_safetensors_writes_it(metadata):
    """Metadata of more than one entry, which safetensors orders at random, aside."""
    assert to_bytes(TENSORS, metadata) == their_torch.save({k: v.contiguous() for k, v in TENSORS.items()}, metadata)
    arrays = {"x": np.arange(3, dtype=np.uint8), "y": np.eye(3, dtype=np.float32), "z": np.int64([7])}
    assert to_bytes(arrays, metadata) == their_numpy.save(arrays, metadata)
    assert their_torch.load(to_bytes({}, metadata)) == {}


def commands(folder: Path, name: str) -> list[list[str]]:
    """Commands that train, squeeze, and export."""
    out = str(folder / name)
    return [
        ["train", str(folder / "run.toml"), "--out", out],
        ["squeeze", out, "--to", "2"],
        ["export", out, "--rank-pad", "8", "--out", f"{out}/padded"],
        ["export", out, "--merge", "--out", f"{out}/merged"],
    ]


def test_runs_of_one_configuration_write_the_same_files(tmp_path):
    """Adapters, checkpoints, tokens, squeezed, padded and merged, in processes that hash texts differently."""
    model = qwen3_directory(tmp_path / "model", ["12 + 34 = 46 so the answer is \\boxed{46}"])
    toml = TINY_RUN.format(model=model) + "max_tokens = 8\n[squeeze]\nenabled = false\n[evaluation]\nproblems = 4\n"
    (tmp_path / "run.toml").write_text(toml)
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed}
    code = "import json, sys; from retrain.cli import app\n"
    code += "for words in json.loads(sys.argv[1]): app(words, standalone_mode=False)"
    second = [sys.executable, "-c", code, json.dumps(commands(tmp_path, "out2"))]
    other_process = subprocess.Popen(second, env=environment, stdout=subprocess.DEVNULL)
    for words in commands(tmp_path, "out1"):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
    assert other_process.wait(240) == 0
    one, other = (
        {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*"))
         if path.suffix == ".safetensors" or path.name in ("adapter_config.json", "tokenizer_config.json")
         or path.match("merged/*")} for out in (tmp_path / "out1", tmp_path / "out2")
    )  # fmt: skip
    assert set(one) == set(other)
    kinds = ("final/adapter_model", "optimizer", "tokens_0", "tokens_eval", "rank_2/adapter_model",
             "padded/adapter_model", "merged/model")  # fmt: skip
    assert all(any(kind in name for name in one) for kind in kinds), list(one)
    assert [name for name in one if one[name] != other[name]] == []
