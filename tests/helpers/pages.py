"""Directories, clients and conversations for tests of pages."""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from starlette.testclient import TestClient

from retrain.files import append_jsonl, write_json
from retrain.records.recorder import RunRecorder
from retrain.types import RewardResult
from retrain.ui.library import Library
from retrain.ui.places import Places
from retrain.ui.server import app_of

from . import records
from .records import context, group, updated

HOST = "http://127.0.0.1:8571"
LABELS = ("grpo+none", "maxrl+none")
RUN, OTHER = "one/runs/grpo+none_s1", "one/runs/maxrl+none_s2"


def row(step: int, **more: Any) -> dict[str, Any]:
    """A row of metrics.jsonl, in short."""
    return {"step": step, "condition": "grpo+none", "mean_reward": 0.1 * step, "correct_rate": step / 10,
            "num_tokens": 100 * (step + 1), "step_time_s": 2.0, "time/rollout": 1.0, "time/update": 0.5,
            "cohort_size": 2, "entropy": None if step == 1 else 0.5, "rewards/match/mean": 0.5,
            "rewards/match/std": 0.1, "rewards/match/min": 0.0, "rewards/match/max": 1.0,
            "env/easy/correct": 0.5} | more  # fmt: skip


def manifest(
    path: Path, runs: Sequence[tuple[str, str, int]], steps: int, state: str = "done", step: int | None = None
) -> Path:
    """Write the manifest of a campaign with these runs: name, condition and seed of each."""
    entries = [{"run_id": run_id, "label": label, "seed": seed, "state": state, "reason": None,
                "step": steps if step is None else step, "max_steps": steps, "path": f"runs/{run_id}"}
               for run_id, label, seed in runs]  # fmt: skip
    content = {"format": 1, "name": path.name, "created": 1.0, "updated": 2.0, "runs": entries}
    write_json(path / "manifest.json", content)
    return path


def campaign(path: Path, seeds: int = 2, steps: int = 6, state: str = "done", labels: Sequence[str] = LABELS) -> Path:
    """Conditions × seeds; the second condition is better by a fifth."""
    runs = [(f"{label}_s{seed}", label, seed) for seed in range(1, seeds + 1) for label in labels]
    for run_id, label, seed in runs:
        run = path / "runs" / run_id
        append_jsonl(run / "metrics.jsonl", [row(step, condition=label) for step in range(steps)])
        rates = {0: 0.25, steps: 0.5 + 0.2 * labels.index(label) + seed / 64}
        append_jsonl(run / "evals.jsonl", [evaluation(step, rate) for step, rate in rates.items()])
        settings = {"training": {"seed": seed, "max_steps": steps, "eval_every": steps}, "data_hash": "d1",
                    "algorithm": {"advantage_mode": label.partition("+")[0]}, "campaign": {"seed": 0},
                    "ranges": {"reward": {"min": 0, "max": 1}, "match": {"max": 1}}}  # fmt: skip
        write_json(run / "config.json", settings | {"run_id": run_id, "condition": label})
        append_jsonl(run / "notes.jsonl", [note(2, "nothing_clipped"), note(4, "truncated", "warning")])
        (run / "run.log").write_text("2026-01-01 00:00:00 info    start\nno date <script>\n")
    return manifest(path, runs, steps, state)


def evaluation(step: int, rate: float) -> dict[str, Any]:
    facts = {"correct_rate": rate, "problems": 64, "reward_mean": rate}
    values = {f"eval/heldout/{key}": value for key, value in facts.items()}
    return {"name": "heldout", "step": step, "samples": 1} | values


def note(step: int, key: str, level: str = "info") -> dict[str, Any]:
    return {"step": step, "key": key, "level": level, "text": f"about {key}", "remedy": "nothing to do"}


def record(
    folder: Path, solved: Sequence[float] = (0.0, 1.0), steps: int = 3, texts: Sequence[str] = ("so 4", "so five")
) -> Path:
    """Record steps with a mixed and a uniform group each, and an evaluation on two problems before and after them;
    ``solved`` is the reward on the second problem."""
    with closing(
        RunRecorder(folder, context(max_steps=20), {}, token_text=lambda ids: token_text(ids, texts))
    ) as recorder:
        for number in range(steps):
            if number in (0, steps - 1):
                answers = [
                    group([1.0], [3], problem_id="p0"),
                    group([solved[number > 0]], [4], problem_id="p1", tags=("hard",)),
                ]
                recorder.record_eval(records.evaluation(answers, number + (number > 0)))
            failed = RewardResult(None, error="timed out")
            calls = RewardResult(0.0, sample_metrics={"tools/tool_errors": 2.0})
            mixed = group([1.0, calls, failed], [3, 5, 2])
            second = mixed.rollouts[1]
            mixed = updated(mixed, {}, {"token_advantages_T": np.full(len(second), second.advantage + 1)})
            uniform = group([0.0, 0.0], [2, 7], discarded="zero_advantage")
            recorder.record_step(records.step([mixed, uniform], number))
    return folder


def token_text(ids: Sequence[int], texts: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """Three tokens are the first text, others the second, a word a token."""
    words = texts[len(ids) != 3].split(" ")
    pieces = [f"{word} " for word in words] + [""] * (len(ids) - len(words))
    spans, at = [], 0
    for piece in pieces[: len(ids)]:
        spans.append((at, at + len(piece)))
        at += len(piece)
    return "".join(pieces), spans


def adapter(path: Path, seed: int = 0, dtype: torch.dtype = torch.float32, zero: bool = False, **settings: Any) -> dict:
    """Write the rank-4 factors of two modules as PEFT names them; return them."""
    path.mkdir(parents=True)
    torch.manual_seed(seed)
    factors, tensors = {}, {}
    for name, wide, high in (("layers.0.q_proj", 20, 30), ("layers.1.v_proj", 12, 8)):
        a, b = torch.randn(4, wide).to(dtype), (torch.randn(high, 4) * (not zero)).to(dtype)
        factors[name] = (a, b)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8} | settings))
    return factors


def cookbook_run(path: Path, shift: float = 0.0) -> Path:
    """Files as ``tinker_cookbook.utils.ml_log.JsonLogger`` writes them: evaluations in lines of their own, bare NaN."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"learning_rate": 1e-4, "model_name": "m", "seed": 3}))
    (path / "code.diff").write_text("")
    rows = [
        {"step": step, "progress/batch": step, "progress/done_frac": (step + 1) / 4, "optim/lr": 1e-4,
         "env/all/reward/total": shift + step / 10, "optim/kl_sample_train_v2": float("nan"), "time/total": 2.0,
         "env/math/correct": 0.5} for step in range(4)
    ]  # fmt: skip
    rows.append({"step": 3, "test/env/all/correct": 0.25})
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trainer_state(path: Path, steps: int) -> None:
    """Write a state as transformers' own Trainer does."""
    from transformers.trainer_callback import TrainerState

    path.mkdir(parents=True, exist_ok=True)
    history = [
        {"step": step, "epoch": step / 10, "loss": 0.5, "grad_norm": 1.5, "learning_rate": 1e-5,
         "num_tokens": 50.0 * step, "reward": step / 10, "completions/mean_length": 20.0, "step_time": 3.0,
         "rewards/depth/mean": 0.25} for step in range(5, steps + 1, 5)
    ]  # fmt: skip
    history.append({"step": steps, "epoch": 1.0, "eval_reward": 0.75, "eval_runtime": 2.0})
    TrainerState(global_step=steps, max_steps=20, log_history=history).save_to_json(str(path / "trainer_state.json"))


def trackio_project(path: Path, runs: Sequence[tuple[str, dict[str, Any]]], steps: int) -> sqlite3.Connection:
    """Write a project as trackio 0.43.0 does. Return the open connection, which keeps its write-ahead log."""
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute(
        "CREATE TABLE metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, timestamp TEXT NOT NULL,"
        " run_name TEXT NOT NULL, step INTEGER NOT NULL, metrics TEXT NOT NULL, log_id TEXT, space_id TEXT)"
    )
    database.execute(
        "CREATE TABLE configs (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, run_name TEXT NOT NULL,"
        " config TEXT NOT NULL, created_at TEXT NOT NULL, UNIQUE(run_id))"
    )
    for number, (name, config) in enumerate(runs):
        about = f"{number:032x}", "2026-01-01T00:00:00.5+00:00", name
        text = json.dumps(config).encode()
        database.execute("INSERT INTO configs VALUES (NULL, ?, ?, ?, ?)", (about[0], name, text, about[1]))
        for step in range(steps):
            loss = '"NaN"' if step == 1 else "0.5"
            text = f'{{"train/reward":{number + step / 10},"train/loss":{loss}}}'.encode()
            database.execute("INSERT INTO metrics VALUES (NULL, ?, ?, ?, ?, ?, NULL, NULL)", (*about, step, text))
    database.commit()
    return database


def client_of(*directories: Path, cache: Path | None = None, **options: Any) -> TestClient:
    """A browser's side of a server over these directories, which looks at the files in every request."""
    library = Library(Places(directories), cache, fresh_s=-1.0)
    return TestClient(app_of(library, **options), base_url=HOST, raise_server_exceptions=True)


def get(client: TestClient, path: str, status: int = 200, **query: Any) -> Any:
    """The strict JSON of an answer with this status; an error is one line."""
    answer = client.get(path, params=query)
    assert answer.status_code == status, answer.text
    found = json.loads(answer.content, parse_constant=refuse_constant)
    if status >= 400:
        assert set(found) == {"error"}
        assert "\n" not in found["error"]
        assert "Traceback" not in found["error"]
    return found


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} in an answer")
