"""Models that cannot be loaded are refused for names, sizes and headers, in one line, before anything is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from toymodels import TINY_RUN
from typer.testing import CliRunner

from retrain.cli import app
from retrain.errors import ModelError
from retrain.models import bundled_model_path
from retrain.models.directory import directory_fault, model_fault, model_types
from retrain.policy.base import load_base

BUNDLED = bundled_model_path("tiny-reasoner")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def set_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def sharded(folder: Path, shards: tuple[str, ...], there: tuple[str, ...]) -> None:
    weights = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(shards)}}))
    for name in there:
        (folder / name).write_bytes(weights)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (shutil.rmtree, "there is no such directory"),
    "empty": (lambda folder: [path.unlink() for path in folder.iterdir()], "it is an empty directory"),
    "no_config": (lambda folder: (folder / "config.json").unlink(), "it has no config.json"),
    "unknown_kind": (
        lambda folder: set_config(folder, model_type="qwen33"),
        'its config.json has model_type "qwen33", of which this transformers has no language model; the nearest '
        'that it has is "qwen3"',
    ),
    "own_code": (
        lambda folder: set_config(folder, model_type="mine", auto_map={"AutoModelForCausalLM": "mine.Mine"}),
        "it comes with its own code: read it, then set trust_remote_code = true",
    ),
    "no_weights": (lambda folder: (folder / WEIGHTS).unlink(), "it has no weights: neither model.safetensors nor"),
    "weights_cut_off": (
        lambda folder: cut(folder / WEIGHTS, 200_000),
        "its model.safetensors is cut off: 200,000 of 2,569,056 bytes",
    ),
    "no_safetensors": (
        lambda folder: (folder / WEIGHTS).write_bytes(b"x" * 999),
        "its model.safetensors is not a safe",
    ),
    "lfs": (
        lambda folder: (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "it has only a Git LFS pointer in place of model.safetensors; type: git lfs pull",
    ),
    "shard_missing": (
        lambda folder: sharded(folder, ("a.safetensors", "b.safetensors"), ("a.safetensors",)),
        "it lacks 1 of the 2 files that model.safetensors.index.json names, such as b.safetensors",
    ),
    "no_tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "it has no tokenizer: none of tokenizer.js"),
    "tokenizer_cut_off": (lambda folder: cut(folder / "tokenizer.json", 99), "its tokenizer.json is not JSON"),
    "file": (lambda folder: (shutil.rmtree(folder), folder.write_text("hi")), "it is a file: a model is a directory"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_model_that_cannot_be_loaded_is_one_line_in_check_and_train_and_for_those_who_load_it(tmp_path, damage):
    model = shutil.copytree(str(BUNDLED), tmp_path / "model")
    work, fault = DAMAGE[damage]
    work(Path(model))
    file = tmp_path / "run.toml"
    file.write_text(TINY_RUN.format(model=model))
    for command in (["check"], ["train", "--out", str(tmp_path / "out")]):
        result = CliRunner().invoke(app, [command[0], str(file), *command[1:]])
        assert (result.exit_code, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        assert line.startswith(f'run.toml:2  model.model  is "{model}": {fault}')
    assert not (tmp_path / "out").exists()
    with pytest.raises(ModelError, match="cannot load model") as caught:  # resume and squeeze come this way
        load_base(str(model), devices="cpu")
    assert fault in str(caught.value)


def test_what_only_loading_finds_is_one_line_too(tmp_path):
    model = Path(shutil.copytree(str(BUNDLED), tmp_path / "model"))
    set_config(model, hidden_size="wide")
    with pytest.raises(ModelError, match="cannot load model") as caught:
        load_base(str(model), devices="cpu")
    assert len(str(caught.value).splitlines()) == 1
    weights = (model / WEIGHTS).read_bytes()
    set_config(model, hidden_size=json.loads((BUNDLED / "config.json").read_text())["hidden_size"])  # type: ignore[operator]
    (model / WEIGHTS).unlink()
    (model / "pytorch_model.bin").write_bytes(weights)  # no pickle: torch says so, in an error of its own
    with pytest.raises(ModelError, match=r"cannot load model .*Error"):
        load_base(str(model), devices="cpu")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen3-8B", ""),
        ("tiny-reasoner", ""),
        (str(BUNDLED), ""),
        ("tiny-resoner", 'did you mean "tiny-reasoner"'),
        ("Qwen/Qwen3 8B", "it is neither a directory nor a hub name"),
        ("a/b/c", "there is no such directory"),
        ("~/no/such/model", "there is no such directory"),
    ],
)
def test_names(name, expected):
    fault = model_fault(name)
    assert (expected in fault) if expected else fault == ""


def test_shards_and_code_of_their_own_are_fine_where_they_are_whole(tmp_path):
    model = Path(shutil.copytree(str(BUNDLED), tmp_path / "model"))
    sharded(model, ("a.safetensors", "b.safetensors"), ("a.safetensors", "b.safetensors"))
    set_config(model, model_type="mine", auto_map={"AutoModelForCausalLM": "mine.Mine"})
    assert directory_fault(model, trust_remote_code=True) == ""


def test_the_types_of_the_installed_transformers_are_all_known():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert model_types("CAUSAL_LM") == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
