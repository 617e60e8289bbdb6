"""The commands of docs/compare.md, in a directory with the files that they name."""

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pyarrow
import pytest
from helpers.campaigns import FENCE, ROOT, run_cli
from helpers.pages import trackio_project
from helpers.records import BASE, campaign
from pyarrow.parquet import write_table
from torch.utils.tensorboard import SummaryWriter

from retrain.files import read_json, write_json

DATA = ROOT / "tests/data/foreign"
PAGE = (ROOT / "docs/compare.md").read_text(encoding="utf-8")
CONDITIONS, SEEDS = ("grpo", "rloo"), (1, 2, 3, 4)
RUNS = [(condition, seed) for condition in CONDITIONS for seed in SEEDS]
COPIES = {
    "verl/val": "verl/{}/seed{}/val",
    "verl/grpo_s1.jsonl": "verl_log/{}_s{}.jsonl",
    "verifiers/traces.jsonl": "prime/{}_s{}/rollouts/step_20/eval/all/traces.jsonl",
    "lm_eval": "lm_eval/{}_s{}",
    "skyrl": "skyrl/{}_s{}",
    "nemo_rl/exp_001": "nemo_rl/{}_s{}/exp_001",
    "nemo_gym": "nemo_gym/{}_s{}",
}
"""Files of the tools' tests, and where each run has them."""


@pytest.fixture
def results(tmp_path, monkeypatch, import_path):
    """The current directory, with the results that the page names, except those of compare.toml."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "docs/examples", "docs/examples")
    for condition, seed in RUNS:
        for source, target in COPIES.items():
            _copy(DATA / source, Path(target.format(condition, seed)))
        _trainer_state(Path(f"trl/{condition}_s{seed}"))
        _inspect_log(Path("inspect"), condition, seed)
        _events(Path(f"tb/{condition}_s{seed}"), seed)
    runs = [(f"{condition}_s{seed}", {}) for condition, seed in RUNS]
    Path("trackio").mkdir()
    with closing(trackio_project(Path("trackio/maths.db"), runs, 3)) as database, database:
        database.execute("UPDATE metrics SET metrics = replace(metrics, 'train/', 'eval/')")
    _tables()
    out = campaign(Path("logs/quickstart"), {"grpo+none": BASE, "rloo+none": BASE})
    write_json(out / "manifest.json", read_json(out / "manifest.json") | {"created": 1.7e9})
    for match in FENCE.finditer(PAGE):  # files of the page, which begin with their name
        if match[2].startswith("# ") and match[1] in ("toml", "python"):
            Path(match[2].split()[1]).write_text(match[2])
    return tmp_path


def test_every_command_of_the_page_succeeds(results):
    lines = [line for match in FENCE.finditer(PAGE) if match[1] == "bash" for line in match[2].splitlines()]
    for line in (line for line in lines if line.startswith("retrain ")):
        arguments = shlex.split(line, comments=True)[1:]
        result = run_cli(*arguments)
        assert result.exit_code == 0, f"{line}\n{result.output}"
        if "--declare" in arguments:  # and then the runs are trained
            for condition, seed in RUNS:
                _copy(DATA / "verl/val", results / f"outputs/{condition}/seed{seed}/val")


def test_the_page_shows_what_its_first_commands_print(results):
    shown = [match[2] for match in FENCE.finditer(PAGE) if match[1] == "text"]
    for arguments, text in zip((["docs/examples/results.csv"], ["docs/examples/results.toml"]), shown, strict=False):
        printed = run_cli("compare", *arguments).stdout
        assert [line for line in text.splitlines() if line not in printed] == []


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, copy_function=shutil.copyfile)
    else:
        shutil.copyfile(source, target)


def _trainer_state(run: Path) -> None:
    """Write the state of a Trainer with one evaluation set."""
    state = json.loads((DATA / "trl/trainer_state.json").read_text())
    lines = [line for line in state["log_history"] if "eval_code_easy_runtime" not in line]
    renamed = [{key.replace("eval_math_", "eval_"): value for key, value in line.items()} for line in lines]
    (run / "checkpoint-4").mkdir(parents=True)
    (run / "checkpoint-4/trainer_state.json").write_text(json.dumps(state | {"log_history": renamed}))


def _inspect_log(directory: Path, condition: str, seed: int) -> None:
    log = json.loads((DATA / "inspect_log/sums.json").read_text())
    log["metadata"] = {"condition": condition, "seed": seed}
    directory.mkdir(exist_ok=True)
    (directory / f"2026-11-28T11-07-18+00-00_sums_{condition}{seed}.json").write_text(json.dumps(log))


def _events(run: Path, seed: int) -> None:
    with SummaryWriter(str(run)) as writer:
        for step in (0, 20):
            writer.add_scalar("eval/reward", seed / 10 + step / 100, step)


def _tables() -> None:
    names = [f"{condition}_s{seed}" for condition, seed in RUNS]
    _csv("panel.csv", ["Step", *(f"{name} - eval/acc" for name in names)], [[step, *[0.3] * 8] for step in (0, 20)])
    rows = [[name, "finished", name[:-3], name[-1], 20, 0.3] for name in names]
    _csv("wandb_runs.csv", ["Name", "State", "Group", "seed", "_step", "eval/acc"], rows)
    sheet = [[condition, seed, split, 0.3] for condition, seed in RUNS for split in ("train", "test")]
    _csv("sheet.csv", ["method", "run", "split", "acc"], sheet)
    answers = [(*run, problem, problem % 2) for run in RUNS for problem in range(4)]
    columns: Mapping[str, Sequence[object]] = dict(
        zip(("condition", "seed", "problem", "correct"), zip(*answers, strict=True), strict=True)
    )
    write_table(pyarrow.table(columns), "answers.parquet")
    for condition, seed in RUNS:
        Path(f"{condition}_s{seed}.log").write_text("20 acc 0.3\n")


def _csv(name: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    Path(name).write_text("".join(",".join(map(str, row)) + "\n" for row in [header, *rows]))
