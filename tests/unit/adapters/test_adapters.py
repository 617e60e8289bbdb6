import pytest
import torch
from helpers.lanes import save_adapter, trained

from retrain.adapters.provenance import provenance
from retrain.adapters.sources import sources
from retrain.adapters.squeeze import compress_adapter
from retrain.errors import ModelError
from retrain.files import read_json, write_json
from retrain.policy.adapter_io import read_adapter
from retrain.policy.base import load_base
from retrain.policy.lora import Lanes

IDS = torch.tensor([[5, 9, 17, 33, 8], [7, 7, 12, 80, 3]])


def lane_logits(base, lanes, adapter):
    with torch.no_grad(), lanes.single(adapter):
        return base.model(input_ids=IDS).logits


def test_peft_loads_what_is_saved_and_computes_the_same(base, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    lanes = Lanes(base)
    adapter = trained(lanes, 0)
    save_adapter(tmp_path / "adapter", adapter, base.name)
    expected = lane_logits(base, lanes, adapter)
    lanes.detach()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base.name), str(tmp_path / "adapter"))
    with torch.no_grad():
        assert torch.allclose(model(input_ids=IDS).logits, expected, atol=1e-5)


def test_a_new_adapter_is_the_base_and_a_function_of_the_seed(base, lanes):
    one, same, other = (lanes.new_adapter(4, 32).initialise(0, seed) for seed in (1, 1, 2))
    assert torch.equal(one.flat, same.flat)
    assert not torch.equal(one.flat, other.flat)
    with torch.no_grad():
        assert torch.equal(lane_logits(base, lanes, one), base.model(input_ids=IDS).logits)


@pytest.mark.parametrize(("targets", "told"), [
    (["query", "q_proj"], r'"query", which is no linear layer .*q_proj, up_proj.*: target_modules = \["q_proj"\]'),
    (["lm_head"], 'names "lm_head", the output layer, which gets no adapter: target_modules = "all-linear"'),
    (["embed_tokens"], 'names "embed_tokens", which is no linear layer'),
    (["q_proj", "norm", "roj"], '"norm", which is no linear layer(.|\n)*"roj"'),
])  # fmt: skip
def test_targets_that_mean_no_layer_are_refused(base, targets, told):
    with pytest.raises(ModelError, match=told):
        Lanes(base, targets)


def test_saved_and_read_back(base, lanes, tmp_path):
    adapter, other = trained(lanes, 0), lanes.new_adapter(4, 8.0)
    save_adapter(tmp_path / "a", adapter, base.name)
    assert len({path.stat().st_mode for path in (tmp_path / "a").iterdir()}) == 1  # who reads one file reads all
    read_adapter(tmp_path / "a").tensors["model.layers.0.self_attn.q_proj"][0].zero_()  # a copy
    stored = read_adapter(tmp_path / "a")
    other.load(stored.tensors)
    assert torch.equal(adapter.flat, other.flat)
    assert set(stored.scales.values()) == {2.0}
    with pytest.raises(ModelError, match="no PEFT adapter"):
        read_adapter(tmp_path)
    with pytest.raises(ModelError, match="does not fit"):
        lanes.new_adapter(5, 8.0).load(stored.tensors)


def test_the_base_that_is_recorded_is_found_by_peft_and_from_everywhere(tmp_path, monkeypatch):
    """The bundled model and a directory by their paths here, a name of the hub as it is."""
    from peft import AutoPeftModelForCausalLM

    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/mine").mkdir(parents=True)
    path, written = tmp_path / "adapter", tmp_path / "adapter/adapter_config.json"
    bundled = load_base("tiny-reasoner", devices="cpu")
    save_adapter(path, Lanes(bundled).new_adapter(2, 4).initialise("a"), "tiny-reasoner")
    model = AutoPeftModelForCausalLM.from_pretrained(path)
    assert model.get_base_model().config.hidden_size == bundled.model.config.hidden_size
    here = read_json(written)["base_model_name_or_path"]
    for recorded, expected in (
        ("tiny-reasoner", here),
        ("/another/site-packages/retrain/models/tiny_reasoner", here),
        ("models/mine", str(tmp_path / "models/mine")),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
    ):
        write_json(written, read_json(written) | {"base_model_name_or_path": recorded})
        if expected == here:
            assert provenance(path).base == here
            assert sources(str(path)).name == "tiny-reasoner"
            assert sources("tiny-reasoner", [f"one={path}"]).notes == ()
        compress_adapter(path, 1, tmp_path / recorded[-4:])
        again = read_json(tmp_path / recorded[-4:] / "adapter_config.json")
        assert again["base_model_name_or_path"] == expected
