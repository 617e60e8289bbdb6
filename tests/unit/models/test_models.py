import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.campaigns import run_cli
from helpers.models import TINY_RUN, set_config

from retrain.errors import ModelError
from retrain.models.directory import bundled_model_path, directory_fault, model_fault
from retrain.policy.base import load_base

BUNDLED = bundled_model_path("tiny-reasoner")
WEIGHTS = "model.safetensors"


def sharded(folder: Path, *present: str) -> None:
    """Replace the weights by two shards, of which these are present."""
    weights = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).unlink()
    index = {"weight_map": {"w0": "a.safetensors", "w1": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in present:
        (folder / name).write_bytes(weights)


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
OWN_CODE = {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}
DAMAGE: list[tuple[str, Callable[[Path], object]]] = [
    ("there is no such directory", shutil.rmtree),
    ("it is an empty directory", lambda folder: [path.unlink() for path in folder.iterdir()]),
    ("it is a file: a model is a directory", lambda folder: (shutil.rmtree(folder), folder.write_text("hi"))),
    ("it has no config.json", lambda folder: (folder / "config.json").unlink()),
    ('its config.json has model_type "qwen33"', lambda folder: set_config(folder, model_type="qwen33")),
    ("it comes with its own code: read it, then set", lambda folder: set_config(folder, **OWN_CODE)),
    ("it has no weights: neither model.safetensors", lambda folder: (folder / WEIGHTS).unlink()),
    ("its model.safetensors of 200,000 bytes is cut off", lambda folder: truncate(folder / WEIGHTS, 200_000)),
    ("its model.safetensors of 999 bytes is cut", lambda folder: (folder / WEIGHTS).write_bytes(b"x" * 999)),
    ("it has only a Git LFS pointer in place", lambda folder: (folder / WEIGHTS).write_text(LFS_POINTER)),
    ("it lacks 1 of the 2 files that", lambda folder: sharded(folder, "a.safetensors")),
    ("it has no tokenizer: none of", lambda folder: (folder / "tokenizer.json").unlink()),
    ("its tokenizer.json is not JSON", lambda folder: truncate(folder / "tokenizer.json", 99)),
]


@pytest.mark.parametrize(("fault", "damage"), DAMAGE, ids=[fault for fault, _ in DAMAGE])
def test_a_model_that_cannot_be_loaded_is_refused_in_one_line(tmp_path, fault, damage):
    model = Path(shutil.copytree(str(BUNDLED), tmp_path / "model"))
    damage(model)
    file = tmp_path / "run.toml"
    file.write_text(TINY_RUN.format(model=model))
    result = run_cli("train", file, "--out", tmp_path / "out")
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f'run.toml:2  model.model  is "{model}": {fault}')
    assert not (tmp_path / "out").exists()
    with pytest.raises(ModelError, match="cannot load model") as caught:  # resume and squeeze come this way
        load_base(str(model), devices="cpu")
    assert fault in str(caught.value)


@pytest.mark.parametrize("work", [
    lambda folder: set_config(folder, hidden_size="wide"),
    lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),  # no pickle
])  # fmt: skip
def test_what_only_loading_finds_is_one_line_too(tmp_path, work):
    model = Path(shutil.copytree(str(BUNDLED), tmp_path / "model"))
    work(model)
    with pytest.raises(ModelError, match="cannot load model") as caught:
        load_base(str(model), devices="cpu")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("name", "expected"), [
    ("Qwen/Qwen3-8B", ""),
    ("tiny-reasoner", ""),
    (str(BUNDLED), ""),
    ("tiny-resoner", 'did you mean "tiny-reasoner"'),
    ("Qwen/Qwen3 8B", "it is neither a directory nor a hub name"),
    ("a/b/c", "there is no such directory"),
    ("~/no/such/model", "there is no such directory"),
])  # fmt: skip
def test_names(name, expected):
    fault = model_fault(name)
    assert (expected in fault) if expected else fault == ""


def test_shards_and_code_of_their_own_are_fine_where_they_are_whole(tmp_path):
    model = Path(shutil.copytree(str(BUNDLED), tmp_path / "model"))
    sharded(model, "a.safetensors", "b.safetensors")
    set_config(model, **OWN_CODE)
    assert directory_fault(model, trust_remote_code=True) == ""
