"""A base is prepared once, kept for the next cohort, undone by one call, and gone from memory when nobody wants it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from lane_cases import publish, requests, rollout, sample, trained, update
from toymodels import qwen3_directory, toy_base

from retrain.campaign.running import models
from retrain.campaign.running.models import Bases
from retrain.config import parse_dict
from retrain.engines.local import LocalEngine
from retrain.errors import ModelError, RunFailed
from retrain.files import read_json, write_json
from retrain.policy.base import load_base, load_weights
from retrain.policy.lora import LaneLinear, Lanes


def _worked(lanes: Lanes, engine: LocalEngine | None = None) -> None:
    adapter = trained(lanes, 0)
    sample(engine or LocalEngine(lanes.base, lanes), requests(), [adapter])
    update(lanes, adapter, rollout(lanes.base, lanes, adapter), lr=0.01)


def _logits(base) -> torch.Tensor:
    with torch.no_grad():
        return base.model(input_ids=torch.arange(12).view(2, 6), use_cache=False).logits


def test_one_call_takes_everything_off_the_model_again(tmp_path):
    base = toy_base(tmp_path)
    before, attention = _logits(base), base.model.config._attn_implementation
    kinds = [type(module) for module in base.model.modules()]
    _worked(Lanes(base))
    assert any(isinstance(module, LaneLinear) for module in base.model.modules())
    assert base.model.config._attn_implementation != attention
    assert any("forward" in module.__dict__ for module in base.model.modules())
    base.release()
    assert [type(module) for module in base.model.modules()] == kinds
    assert base.model.config._attn_implementation == attention
    assert not any("forward" in module.__dict__ for module in base.model.modules())
    for weight in base.model.parameters():
        assert weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    assert torch.equal(_logits(base), before)
    base.release()  # nothing is left to take off
    _worked(Lanes(base))


# -- one base for one cohort after another ------------------------------------------------------------------------


@pytest.fixture
def loads(monkeypatch):
    """The names of the models that are loaded, in order."""
    loaded = []

    def noted(files, *how):
        loaded.append(files.name)
        return load_weights(files, *how)

    monkeypatch.setattr(models, "load_weights", noted)
    return loaded


def _config(directory, **sections):
    rest = {"backend": {"devices": "cpu"}, "model": {"model": str(directory)}}
    return parse_dict({key: {**rest.get(key, {}), **sections.get(key, {})} for key in {*rest, *sections}})


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [qwen3_directory(folder / name, ["12+34=? the answer is 46"], hidden=16) for name in ("a", "b")]


def test_the_next_cohort_finds_the_base_prepared(directories, loads):
    with Bases() as bases:
        first = bases.take(_config(directories[0]))
        _worked(first[1], first[2])
        modules = [id(module) for module in first[0].model.modules()]
        publish(first[2], [trained(first[1], 0)])
        again = bases.take(_config(directories[0], training={"lr": 0.5}, model={"lora_rank": 2}))
        assert all(one is other for one, other in zip(first, again, strict=True))
        assert [id(module) for module in again[0].model.modules()] == modules
        with pytest.raises(RunFailed, match="no weights were published"):  # those of another cohort's runs are gone
            again[2].sample(requests())
        _worked(again[1], again[2])
    assert loads == [str(directories[0])]


def test_other_target_layers_take_the_lanes_off_and_keep_the_weights(directories, loads):
    with Bases() as bases:
        base, lanes, engine = bases.take(_config(directories[0]))
        _worked(lanes, engine)
        same, fewer, other = bases.take(_config(directories[0], lora={"target_modules": ["q_proj", "v_proj"]}))
        assert same is base
        assert other is not engine
        assert sum(isinstance(module, LaneLinear) for module in base.model.modules()) == len(fewer.shapes) == 4
        assert all(m.lanes is fewer for m in base.model.modules() if isinstance(m, LaneLinear))
        _worked(fewer, other)
        with pytest.raises(ModelError, match="no linear layer"):  # which leaves no lanes behind
            bases.take(_config(directories[0], lora={"target_modules": ["nothing"]}))
        back = bases.take(_config(directories[0], lora={"target_modules": ["q_proj", "v_proj"]}))
        _worked(back[1], back[2])
    assert loads == [str(directories[0])]


def test_another_base_is_loaded_when_the_first_is_gone(directories, loads, monkeypatch):
    """Two in memory at once do not fit where one does."""
    alive, load_other = [], models.load_weights
    with Bases() as bases:
        base, lanes, engine = bases.take(_config(directories[0]))
        _worked(lanes, engine)
        weights = [weakref.ref(weight) for weight in base.model.parameters()]
        del base, lanes, engine

        def watched(*how):
            gc.collect()
            alive.append(sum(weight() is not None for weight in weights))
            return load_other(*how)

        monkeypatch.setattr(models, "load_weights", watched)
        base, lanes, engine = bases.take(_config(directories[1], inference={"dtype": "float64"}))
        _worked(lanes, engine)
        assert alive == [0]
        weights = [weakref.ref(weight) for weight in base.model.parameters()]
        del base, lanes, engine
    gc.collect()
    assert not any(weight() is not None for weight in weights)
    assert len(loads) == 2


def test_all_end_tokens_of_a_model_are_known(tmp_path):
    """Only one end-of-sequence id known: 97 % "clipped" on a model with several."""
    qwen3_directory(tmp_path, ["12+34=? the answer is \\boxed{46}"])
    config, generation = read_json(tmp_path / "config.json"), read_json(tmp_path / "generation_config.json")
    several = list(range(20, 120))
    write_json(tmp_path / "generation_config.json", generation | {"eos_token_id": several})
    write_json(tmp_path / "config.json", config | {"eos_token_id": 120})
    base = load_base(str(tmp_path), devices="cpu", dtype="float32")
    assert {*several, 120, base.tokenizer.eos_token_id} == set(base.eos_ids)
    lanes = Lanes(base)
    asked = requests(prompts=4, samples=8, max_tokens=30)
    sampled = [c for group in sample(LocalEngine(base, lanes), asked, [trained(lanes, 0)]) for c in group]
    stopped = [c for c in sampled if c.stop_reason == "stop"]
    assert len(stopped) > len(sampled) / 2
    assert len({c.token_ids[-1] for c in stopped}) > 1
