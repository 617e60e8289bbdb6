from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from toymodels import train_quietly
from transformers import AutoModelForCausalLM

from retrain.record.tokens import TokenFile

TOML = """
[model]
model = "{model}"
lora_rank = 4
[reward]
type = "custom"
custom_module = "{rewards}"
workers = 1
[training]
max_steps = 2
batch_size = 3
group_size = 4
max_tokens = 10
lr = 0.02
{training}
[logging]
rollouts_every = 1
[algorithm]
{algorithm}
"""
PPO = 'advantage_mode = "gae"\nkl_coef = 0.05\nkl_in_reward = "k1"'


def sequence_sums(path: Path, model: Path) -> tuple[list[float], list[float]]:
    """Σ −ln p and Σ (ln π − ln base) of every recorded rollout, the base by a plain forward pass of transformers."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    surprisals, divergences = [], []
    with TokenFile(path) as file:
        for index in range(len(file)):
            arrays = file.rollout(index).arrays
            ids, action = torch.from_numpy(arrays["ids"].astype(np.int64)), arrays["action"].astype(bool)
            with torch.no_grad():
                logprobs = base(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            reference = logprobs.gather(-1, ids[1:, None])[:, 0].numpy()[action[1:]]
            surprisals.append(-float(arrays["logprobs"].sum()))
            divergences.append(float((arrays["trainer_logprobs"] - reference).sum()))
    return surprisals, divergences


@pytest.mark.parametrize(("algorithm", "training"), [("kl_coef = 0.05", ""), (PPO, "num_iterations = 2")])
def test_both_are_means_over_sequences(tmp_path, model, algorithm, training):
    """As in TRL's PPO, in every mode."""
    rewards = model.parent / "toyrewards.py"
    rows = train_quietly(tmp_path, TOML.format(model=model, rewards=rewards, algorithm=algorithm, training=training))
    for row in rows:
        path = tmp_path / "out" / f"tokens_{row['step']:06d}.safetensors"
        surprisals, divergences = sequence_sums(path, model)
        assert row["objective/entropy"] == pytest.approx(np.mean(surprisals), rel=1e-4)
        assert row["objective/kl"] == pytest.approx(np.nanmean(divergences), rel=1e-3, abs=1e-4)
        assert 0 < row["timing_compute_kl_total"] < row["step_time_s"]  # the base's passes, wherever they are made
    assert abs(rows[1]["objective/kl"]) > 1e-3
    assert rows[0]["objective/entropy"] > 2 * rows[0]["entropy_sampled"]  # which is per token
