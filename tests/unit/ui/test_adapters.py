"""Spectra of adapters on the page are those of ``retrain squeeze``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adapter_cases import adapter
from ui_cases import campaign, client_of, get

from retrain.files import append_jsonl
from retrain.maths import squeeze
from retrain.ui.adapters import overlap, spectra


def read(path):
    return spectra(path / "adapter_model.safetensors", path / "adapter_config.json")


@pytest.mark.parametrize(
    ("dtype", "settings", "scale"),
    [
        (torch.float32, {}, 2.0),
        (torch.bfloat16, {"use_rslora": True}, 4.0),
        (torch.float16, {"alpha_pattern": {"q_proj": 1}}, None),
        (torch.float64, {}, 2.0),
    ],
)
def test_spectra_are_those_of_squeeze(tmp_path, dtype, settings, scale):
    factors = adapter(tmp_path / "a", dtype=dtype, **settings)
    found = read(tmp_path / "a")
    assert list(found) == list(factors)
    for name, (a, b) in factors.items():
        expected = squeeze.analyse(a, b, scale or (0.25 if "q_proj" in name else 2.0))
        assert found[name].values == pytest.approx(expected.numpy(), rel=1e-4)
        energy = squeeze.energy(expected)
        assert energy is not None
        assert found[name].energy == pytest.approx(energy.numpy(), rel=1e-4)


def test_overlap_is_1_for_the_same_and_chance_for_others(tmp_path):
    adapter(tmp_path / "a", seed=0)
    one = read(tmp_path / "a")["layers.0.q_proj"]
    assert overlap(one, one) == pytest.approx(1.0, abs=1e-5)
    values = []
    for seed in range(1, 31):
        adapter(tmp_path / str(seed), seed=seed)
        values.append(overlap(one, read(tmp_path / str(seed))["layers.0.q_proj"]))
    assert np.mean(values) == pytest.approx(4 / 30, abs=0.035)
    adapter(tmp_path / "untrained", zero=True)
    untrained = read(tmp_path / "untrained")["layers.0.q_proj"]
    assert untrained.energy.tolist() == [0] * 4
    assert untrained.directions.shape[1] == 0
    assert overlap(untrained, untrained) is None


def test_the_page_of_a_campaign_and_of_a_run(tmp_path):
    home = campaign(tmp_path / "one")
    for seed, run in enumerate(sorted((home / "runs").iterdir())):
        for step in (2, 4):
            adapter(run / f"checkpoints/step_{step:06d}", seed=10 * seed + step)
        adapter(run / "final", seed=seed)
    append_jsonl(home / "runs/grpo+none_s1/checkpoints.jsonl", [])
    client = client_of(home)
    found = get(client, "/api/lora", at="one")
    assert [run["step"] for run in found["runs"]] == [6] * 4
    assert len(found["overlap"]) == 6
    assert sum(pair["same_condition"] for pair in found["overlap"]) == 2
    assert found["overlap"][0]["chance"] == pytest.approx((4 / 30 + 4 / 8) / 2)
    (run,) = get(client, "/api/lora", at="one/runs/grpo+none_s1")["runs"]
    assert [each["step"] for each in run["checkpoints"]] == [2, 4, 6]
    assert run["energy"][-1] == pytest.approx(1.0)


def test_an_adapter_that_is_being_written_is_left_out(tmp_path):
    home = campaign(tmp_path / "one", seeds=1)
    final = home / "runs/grpo+none_s1/final"
    adapter(final)
    path, client = final / "adapter_model.safetensors", client_of(home)
    whole = path.read_bytes()
    broken = (b"", b"\0" * 8, b"\xff" * 100, b"\x02\0\0\0\0\0\0\0{}", b"\x05\0\0\0\0\0\0\0[1,2]")
    for data in (*broken, whole[: len(whole) // 2], whole[:-4]):
        path.write_bytes(data)
        assert get(client, "/api/lora", at="one")["runs"][0]["modules"] == []
