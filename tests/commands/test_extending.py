"""The blocks of docs/extending.md, used as its reader does: code beside a TOML file, and built-in code in a copy of the
package. Its environment trains in test_episodes.py, its training backend in test_backends.py."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.campaigns import FENCE, ROOT
from helpers.models import campaign_head, qwen3_directory
from helpers.servers import TEXTS, StandIn

from retrain.config.describe import document
from retrain.files import read_jsonl

PAGE = FENCE.findall((ROOT / "docs" / "extending.md").read_text(encoding="utf-8"))
WORLD = {
    "campaign": {"seeds": [1], "max_steps": 2, "executor": "polite"}, "model": {"lora_rank": 4},
    "inference": {"engine": "my_server"}, "data": {"source": "digits.jsonl"},
    "training": {"batch_size": 2, "group_size": 4, "max_tokens": 8, "lr": 0.01}, "evaluation": {"problems": 0},
    "squeeze": {"enabled": False},
}  # fmt: skip


def blocks_of(language: str) -> list[str]:
    return [text for kind, text in PAGE if kind == language]


def apply_hunks(file: Path, hunks: list[str]) -> None:
    source = file.read_text(encoding="utf-8")
    for hunk in hunks:
        lines = hunk.splitlines()
        old, new = ("\n".join(line[1:] for line in lines if line[0] in marks) for marks in (" -", " +"))
        assert source.count(f"\n{old}\n") == 1, f"{file} has another text than this hunk of the page:\n{hunk}"
        source = source.replace(f"\n{old}\n", f"\n{new}\n")
    file.unlink()  # a link to the original
    file.write_text(source, encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's files, and the package with the page's changes."""
    folder = tmp_path_factory.mktemp("extending")
    shutil.copytree(ROOT / "retrain", folder / "retrain", copy_function=os.symlink)
    for text in blocks_of("python"):
        (folder / text.splitlines()[0].removeprefix("# ")).write_text(text, encoding="utf-8")
    for text in blocks_of("diff"):
        for change in re.split(r"^--- ", text, flags=re.MULTILINE)[1:]:
            name, *hunks = change.removesuffix("\n").split("\n@@\n")
            apply_hunks(folder / name, hunks)
    rows = [{"prompt": f"{n} + {8 - n}", "answer": "8"} for n in range(1, 8)]
    (folder / "digits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[StandIn]:
    running = StandIn(qwen3_directory(folder / "model", TEXTS))
    yield running
    running.close()


def retrain(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "retrain", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def test_one_campaign_trains_with_all_of_the_page(folder, server):
    tables = {section: dict(keys) for section, keys in WORLD.items()}
    for text in blocks_of("toml"):
        if text.startswith("[backend]"):
            continue
        for section, keys in tomllib.loads(text).items():
            tables.setdefault(section, {}).update(keys)
    del tables["environment"]
    tables["model"]["model"], tables["inference"]["url"] = str(folder / "model"), server.url
    plug_ins = (tables["algorithm"].pop("advantage_mode"), tables["algorithm"].pop("transform_mode"))
    head = campaign_head(plug_ins, ("softened", "gtpo"), **tables.pop("campaign")) + "softened_epsilon = 0.5\n"
    (folder / "run.toml").write_text(head + document(tables), encoding="utf-8")

    done = retrain(folder, "train", "run.toml", "--out", "out", "--plain")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "out" / "workers" / "worker_1.log").is_file()
    assert {"stop_token_ids" in asked for asked in server.asked} == {True}
    for label in ("my_credit-centred+my_credit-front_loaded", "softened+gtpo~softened_epsilon=0.5"):
        run = folder / "out" / "runs" / f"{label}_s1"
        rows = read_jsonl(run / "metrics.jsonl")
        assert any(row["num_datums"] and row["optim/grad_norm"] > 0 for row in rows)
        assert all(row["planning_fraction"] is not None for row in rows)
        assert all(row["rewards/short_and_right/mean"] == row["mean_reward"] for row in rows)
        assert [line.split()[0] for line in (run / "lines.txt").read_text().splitlines()] == ["0", "1"]


def test_a_parameter_of_a_built_in_advantage_is_checked(folder):
    softened = runpy.run_path(str(folder / "retrain/algorithms/credit/softened.py"))["softened"]
    assert softened(torch.tensor([0.0, 1.0]), epsilon=0.5).tolist() == [-0.5, 0.5]
    (folder / "wrong.toml").write_text('[algorithm]\nadvantage_mode = "softened"\nsoftened_epsilon = 0\n')
    wrong = retrain(folder, "check", "wrong.toml")
    assert wrong.returncode == 2
    assert "wrong.toml:3  algorithm.softened_epsilon  is 0, but must be a number > 0" in wrong.stderr
    (folder / "unused.toml").write_text('[algorithm]\nadvantage_mode = "grpo"\nsoftened_epsilon = 0.5\n')
    assert 'has no effect with advantage_mode = "grpo"' in retrain(folder, "check", "unused.toml").stderr
