"""Directories of the Tinker cookbook and of TRL, as those write them."""

from __future__ import annotations

import json
from pathlib import Path


def cookbook_run(path: Path, rows: int = 4, shift: float = 0.0) -> Path:
    """Files as ``tinker_cookbook.utils.ml_log.JsonLogger`` writes them: evaluations in lines of their own, bare NaN."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(
        json.dumps({"learning_rate": 1e-4, "model_name": "m", "seed": 3, "log_path": "x"})
    )
    (path / "code.diff").write_text("")
    with open(path / "metrics.jsonl", "w") as file:
        for step in range(rows):
            row = {
                "step": step,
                "progress/batch": step,
                "progress/done_frac": (step + 1) / 4,
                "optim/lr": 1e-4,
                "env/all/reward/total": shift + step / 10,
                "optim/kl_sample_train_v2": float("nan"),
                "time/total": 2.0,
                "env/math/correct": 0.5,
            }
            file.write(json.dumps(row) + "\n")
        file.write(json.dumps({"step": rows - 1, "test/env/all/correct": 0.25}) + "\n")
    return path


def trainer_state(path: Path, steps: int, shift: float = 0.0) -> None:
    """A state as transformers' own Trainer writes it."""
    from transformers.trainer_callback import TrainerState

    path.mkdir(parents=True, exist_ok=True)
    history = [
        {
            "step": step,
            "epoch": step / 10,
            "loss": 0.5,
            "grad_norm": 1.5,
            "learning_rate": 1e-5,
            "num_tokens": 50.0 * step,
            "reward": shift + step / 10,
            "completions/mean_length": 20.0,
            "step_time": 3.0,
            "rewards/depth/mean": 0.25,
        }
        for step in range(5, steps + 1, 5)
    ]
    history.append({"step": steps, "epoch": 1.0, "eval_reward": 0.75, "eval_runtime": 2.0})
    TrainerState(global_step=steps, max_steps=20, log_history=history).save_to_json(str(path / "trainer_state.json"))
