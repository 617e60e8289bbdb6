import numpy as np
import pytest
import torch
from helpers.pages import adapter, campaign, client_of, get

from retrain.maths import squeeze
from retrain.ui.adapters import overlap, spectra


def read(path):
    return spectra(path / "adapter_model.safetensors", path / "adapter_config.json")


@pytest.mark.parametrize(("dtype", "settings", "scale"), [
    (torch.float32, {}, 2.0), (torch.bfloat16, {"use_rslora": True}, 4.0),
    (torch.float16, {"alpha_pattern": {"q_proj": 1}}, None),
])  # fmt: skip
def test_spectra_are_those_of_squeeze(tmp_path, dtype, settings, scale):
    factors = adapter(tmp_path / "a", dtype=dtype, **settings)
    found = read(tmp_path / "a")
    assert list(found) == list(factors)
    for name, (a, b) in factors.items():
        expected = squeeze.analyse(a, b, scale or (0.25 if "q_proj" in name else 2.0))
        assert found[name].values == pytest.approx(expected.numpy(), rel=1e-4)
        assert found[name].energy == pytest.approx(squeeze.energy(expected).numpy(), rel=1e-4)


def test_overlap_is_1_for_the_same_and_chance_for_others(tmp_path):
    def projection(name, **options):
        adapter(tmp_path / name, **options)
        return read(tmp_path / name)["layers.0.q_proj"]

    one, untrained = projection("a"), projection("untrained", zero=True)
    assert overlap(one, one) == pytest.approx(1.0, abs=1e-5)
    values = [overlap(one, projection(str(seed), seed=seed)) for seed in range(1, 31)]
    assert np.mean(values) == pytest.approx(4 / 30, abs=0.035)
    assert untrained.energy.tolist() == [0] * 4
    assert overlap(untrained, untrained) is None


def test_the_page_of_a_campaign_and_of_a_run_leaves_out_an_adapter_that_is_being_written(tmp_path):
    home = campaign(tmp_path / "one")
    for seed, run in enumerate(sorted((home / "runs").iterdir())):
        for step in (2, 4):
            adapter(run / f"checkpoints/step_{step:06d}", seed=10 * seed + step)
        adapter(run / "final", seed=seed)
    client = client_of(home)
    found = get(client, "/api/lora", at="one")
    assert [run["step"] for run in found["runs"]] == [6] * 4
    assert len(found["overlap"]) == 6
    assert sum(pair["same_condition"] for pair in found["overlap"]) == 2
    assert found["overlap"][0]["chance"] == pytest.approx((4 / 30 + 4 / 8) / 2)
    (run,) = get(client, "/api/lora", at="one/runs/grpo+none_s1")["runs"]
    assert [each["step"] for each in run["checkpoints"]] == [2, 4, 6]
    assert run["energy"][-1] == pytest.approx(1.0)
    path = home / "runs/grpo+none_s1/final/adapter_model.safetensors"
    data = path.read_bytes()
    for broken in (b"", b"\xff" * 100, b"\x05\0\0\0\0\0\0\0[1,2]", data[: len(data) // 2], data[:-4]):
        path.write_bytes(broken)
        assert get(client, "/api/lora", at="one")["runs"][0]["modules"] == []
