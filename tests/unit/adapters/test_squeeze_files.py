import pytest
import torch
from safetensors.torch import save_file

from retrain.adapters.squeeze import analyse_adapter, compress_adapter
from retrain.config.evaluation import Squeeze
from retrain.errors import ModelError, UsageError
from retrain.files import read_json, write_json
from retrain.maths.squeeze import truncate
from retrain.policy.adapter_io import AdapterFile

PREFIX = "base_model.model."


def adapter(directory, tensors, **config):
    directory.mkdir(parents=True, exist_ok=True)
    save_file({f"{PREFIX}{key}": value for key, value in tensors.items()}, directory / "adapter_model.safetensors")
    write_json(directory / "adapter_config.json", {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0} | config)
    return directory


def pair(name, rank, inputs, outputs, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rank, inputs), (outputs, rank)))
    return {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}


@pytest.mark.parametrize("rslora", [False, True])
def test_compression_is_the_truncation_of_every_module(tmp_path, rslora):
    """Ranks and alphas by pattern (regular expressions, as in peft), an embedding, two number formats."""
    tensors = (
        pair("model.layers.0.q_proj", 4, 6, 8)
        | pair("model.layers.1.q_proj", 4, 6, 8, torch.bfloat16, seed=1)
        | pair("model.layers.1.v_proj", 2, 6, 5, seed=2)
    )
    generator = torch.Generator().manual_seed(5)
    tensors["model.embed.lora_embedding_A"] = torch.randn(4, 11, generator=generator)
    tensors["model.embed.lora_embedding_B"] = torch.randn(6, 4, generator=generator)
    source = adapter(
        tmp_path / "source", tensors, use_rslora=rslora, rank_pattern={"v_proj": 2},
        alpha_pattern={r"0\.[qv]_proj": 2.0},
    )  # fmt: skip
    compress_adapter(source, 3, tmp_path / "small")
    with AdapterFile(source) as before, AdapterFile(tmp_path / "small") as after:
        assert before.scales["model.layers.0.q_proj"] == pytest.approx(2.0 / (2 if rslora else 4))
        assert before.scales["model.layers.1.v_proj"] == pytest.approx(8.0 / (2**0.5 if rslora else 2))
        assert before.modules.keys() == after.modules.keys()
        for name in before.modules:
            a, b = before.factors(name)
            small_a, small_b = after.factors(name)
            assert small_a.shape[0] == small_b.shape[1] == 3
            assert small_a.dtype == a.dtype
            want_a, want_b = truncate(a, b, before.scales[name], min(3, a.shape[0]), after.scales[name])
            torch.testing.assert_close(small_b @ small_a, want_b @ want_a, atol=1e-5, rtol=1e-5)
        embedding = after.modules["model.embed"]
        assert embedding.a_key.endswith("embed.lora_embedding_A")  # the names that peft gives embeddings
    config = read_json(tmp_path / "small" / "adapter_config.json")
    assert (config["r"], config["rank_pattern"], config["use_rslora"]) == (3, {}, False)


def test_what_is_more_than_lora_is_not_dropped_and_wrong_ranks_and_files_are_told(tmp_path):
    for extra in ("q_proj.lora_magnitude_vector", "lm_head.weight", "k_proj.lora_A.weight"):
        more = adapter(tmp_path / extra, pair("q_proj", 4, 6, 8) | {extra: torch.ones(8, 4)})
        with pytest.raises(ModelError, match="more than a LoRA adapter"):
            compress_adapter(more, 2, tmp_path / "small")
        assert analyse_adapter(more, Squeeze())["num_layers"] == 1
    source = adapter(tmp_path / "source", pair("q_proj", 4, 6, 8))
    for rank in (0, 5):
        with pytest.raises(UsageError, match="its rank is 4; use --to 1 … 4"):
            compress_adapter(source, rank, tmp_path / "small")
    assert not (tmp_path / "small").exists()
    (source / "adapter_model.safetensors").write_bytes(b"not a header")
    with pytest.raises(ModelError, match="no safetensors file"):
        analyse_adapter(source, Squeeze())
