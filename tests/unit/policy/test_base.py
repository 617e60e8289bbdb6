import gc
import weakref

import pytest
import torch
from helpers.lanes import publish, requests, rollout, sample, trained, update
from helpers.models import qwen3_directory, toy_base

from retrain.config import parse_dict
from retrain.engines.local import LocalEngine
from retrain.errors import ModelError, RunFailed
from retrain.files import read_json, write_json
from retrain.policy.base import load_base, load_weights
from retrain.policy.lora import LaneLinear, Lanes
from retrain.training import bases as models
from retrain.training.bases import Bases


def sample_and_update(lanes: Lanes, engine: LocalEngine | None = None) -> None:
    adapter = trained(lanes, 0)
    sample(engine or LocalEngine(lanes.base, lanes), requests(), [adapter])
    update(lanes, adapter, rollout(lanes.base, lanes, adapter), lr=0.01)


def logits_of(base) -> torch.Tensor:
    with torch.no_grad():
        return base.model(input_ids=torch.arange(12).view(2, 6), use_cache=False).logits


def test_one_call_takes_everything_off_the_model_again(tmp_path):
    base = toy_base(tmp_path)
    before, attention = logits_of(base), base.model.config._attn_implementation
    kinds = [type(module) for module in base.model.modules()]
    sample_and_update(Lanes(base))
    assert any(isinstance(module, LaneLinear) for module in base.model.modules())
    assert base.model.config._attn_implementation != attention
    assert any("forward" in module.__dict__ for module in base.model.modules())
    base.release()
    assert [type(module) for module in base.model.modules()] == kinds
    assert base.model.config._attn_implementation == attention
    assert not any("forward" in module.__dict__ for module in base.model.modules())
    for weight in base.model.parameters():
        assert weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    assert torch.equal(logits_of(base), before)
    base.release()  # nothing is left to take off
    sample_and_update(Lanes(base))


@pytest.fixture
def loads(monkeypatch):
    """The names of the models that are loaded, in order, and those of their weights that are still in memory."""
    names, weights = [], []

    def recorded(files, *options):
        gc.collect()
        names.append(files.name)
        assert not any(weight() is not None for weight in weights), "two bases in memory at once"
        loaded = load_weights(files, *options)
        weights.extend(weakref.ref(weight) for weight in loaded.model.parameters())
        return loaded

    monkeypatch.setattr(models, "load_weights", recorded)
    return names


def config_of(directory, **sections):
    return parse_dict({"backend": {"devices": "cpu"}, "model": {"model": str(directory)}} | sections)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [qwen3_directory(folder / name, ["12+34=? the answer is 46"], hidden=16) for name in ("a", "b")]


def test_the_next_cohort_finds_the_base_prepared(directories, loads):
    with Bases() as bases:
        base, lanes, engine = first = bases.with_engine(config_of(directories[0]))
        sample_and_update(lanes, engine)
        modules = [id(module) for module in base.model.modules()]
        publish(engine, [trained(lanes, 0)])
        again = bases.with_engine(config_of(directories[0], training={"lr": 0.5}))
        assert all(one is other for one, other in zip(first, again, strict=True))
        assert [id(module) for module in base.model.modules()] == modules
        with pytest.raises(RunFailed, match="no weights were published"):  # those of the other cohort's runs are gone
            engine.sample(requests())
        sample_and_update(lanes, engine)
    assert loads == [str(directories[0])]


def test_other_target_layers_remove_the_lanes_and_keep_the_weights(directories, loads):
    fewer = {"target_modules": ["q_proj", "v_proj"]}
    with Bases() as bases:
        base, lanes, engine = bases.with_engine(config_of(directories[0]))
        sample_and_update(lanes, engine)
        for _ in range(2):
            same, others, other_engine = bases.with_engine(config_of(directories[0], lora=fewer))
            assert same is base
            assert other_engine is not engine
            inserted = [module for module in base.model.modules() if isinstance(module, LaneLinear)]
            assert len(inserted) == len(others.shapes) == 4
            assert all(module.lanes is others for module in inserted)
            sample_and_update(others, other_engine)
            with pytest.raises(ModelError, match="no linear layer"):  # which leaves no lanes behind
                bases.with_engine(config_of(directories[0], lora={"target_modules": ["nothing"]}))
    assert loads == [str(directories[0])]


def test_another_base_is_loaded_when_the_first_is_gone(directories, loads):
    with Bases() as bases:
        for directory, dtype in zip(directories, ("float32", "float64"), strict=True):
            base, lanes, engine = bases.with_engine(config_of(directory, inference={"dtype": dtype}))
            sample_and_update(lanes, engine)
            weights = [weakref.ref(weight) for weight in base.model.parameters()]
            del base, lanes, engine
    gc.collect()
    assert not any(weight() is not None for weight in weights)
    assert loads == [str(directory) for directory in directories]


def test_all_end_tokens_of_a_model_are_known(tmp_path):
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
    for completion in sampled:
        assert not set(completion.token_ids[:-1]) & set(base.eos_ids)
        assert (completion.token_ids[-1] in base.eos_ids) == (completion.stop_reason == "stop")
        assert completion.stop_reason == "stop" or len(completion) == 30
    assert len({c.token_ids[-1] for c in sampled if c.stop_reason == "stop"}) > 1
