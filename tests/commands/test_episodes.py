import re
import shutil
from pathlib import Path

import pytest
from helpers.campaigns import blocks, run_cli, timeless, without_clock

from retrain.config.describe import document
from retrain.files import read_jsonl

ROOT = Path(__file__).parents[2]
TOOL_USER = {
    "model": {"model": "tiny-tool-user", "lora_rank": 2},
    "environment": {"tools": ["calculator"], "tools_prompt": "", "max_turns": 3}, "algorithm": {"turn_credit": "turn"},
    "data": {"source": "calculations:problems"},
    "training": {"max_steps": 2, "batch_size": 3, "group_size": 6, "max_tokens": 48, "lr": 0.001},
    "evaluation": {"problems": 6}, "squeeze": {"enabled": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("episodes")
    shutil.copy(ROOT / "campaigns" / "calculations.py", folder)
    (folder / "run.toml").write_text(document(TOOL_USER))
    done = run_cli("train", folder / "run.toml", "--out", folder / "out", "--plain")
    assert done.exit_code == 0, done.output
    return folder / "out"


def test_every_row_says_how_the_episodes_went(run):
    rows = read_jsonl(run / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert row["env/all/total_episodes"] == 18
        assert 1 <= row["env/all/turns_per_episode"] <= 3
        ended = {key.rpartition("/")[2]: value for key, value in row.items() if "/ended_by/" in key}
        assert sum(ended.values()) == pytest.approx(1)
        assert set(ended) == {"done", "max_turns", "max_tokens", "raised", "timeout", "died", "flooded"}
        assert row["val/ratio"] is None or row["val/ratio"] == pytest.approx(1, abs=1e-5)
        assert row["kl_sample_train_v2"] < 1e-6
        calls, rate = row["tools/total_tool_calls"], row["tools/tool_success_rate"]
        assert calls == 0 or rate == pytest.approx(1 - row["tools/tool_errors"] / calls)
    assert sum(row["tools/total_tool_calls"] for row in rows) > 0
    assert [row["step"] for row in read_jsonl(run / "evals.jsonl")] == [0, 2]
    evaluated = read_jsonl(run / "eval_heldout_iteration_000000_rollout_summaries.jsonl")
    assert any(len(each["steps"]) > 1 for each in evaluated)
    page = (run / "train_iteration_000000.html").read_text(encoding="utf-8")
    assert '<details class="observation"><summary>tool calculator' in page


def test_try_shows_episodes(run):
    shown = run_cli("try", run.parent / "run.toml", "--problems", "1", "--samples", "6")
    assert shown.exit_code == 0, shown.output
    assert "[tool calculator]" in shown.stdout


def test_eval_plays_the_same_episodes(run, tmp_path):
    """With a run's own settings, `retrain eval` repeats its last evaluation, tools included."""
    done = run_cli("eval", run, "--out", tmp_path / "e")
    assert done.exit_code == 0, done.output
    (evaluated,) = (tmp_path / "e/runs").iterdir()
    name = "eval_heldout_iteration_000002_rollout_summaries.jsonl"
    played, trained = ([each["steps"] for each in read_jsonl(folder / name)] for folder in (evaluated, run))
    assert without_clock(played) == without_clock(trained)
    assert timeless(evaluated / "evals.jsonl") == [row for row in timeless(run / "evals.jsonl") if row["step"] == 2]


def test_the_environment_in_the_documents_trains(tmp_path):
    """The class of 20-odd lines, as docs/extending.md and docs/examples/guess.py have it."""
    (shown,) = [param.values[0] for param in blocks("python") if "class Guess" in param.values[0]]
    code = (ROOT / "docs" / "examples" / "guess.py").read_text(encoding="utf-8")
    assert shown.removeprefix("# guess.py\n").strip() == code.partition('"""\n\n')[2].strip()
    (tmp_path / "guess.py").write_text(f"{shown}\nclass Loose(Guess): exact = False\n", encoding="utf-8")
    (toml,) = [param.values[0] for param in blocks("toml") if 'provider = "guess:Guess"' in param.values[0]]
    (tmp_path / "run.toml").write_text(
        '[model]\nmodel = "tiny-reasoner"\nlora_rank = 2\n[training]\nmax_steps = 1\nbatch_size = 2\ngroup_size = 2\n'
        "max_tokens = 6\n[evaluation]\nproblems = 2\n[squeeze]\nenabled = false\n"
        + toml.replace("guess:Guess", "guess:Loose").rstrip()
        + "\nmax_episode_tokens = 120\n",
        encoding="utf-8",
    )
    done = run_cli("train", tmp_path / "run.toml", "--out", tmp_path / "out", "--plain")
    assert done.exit_code == 0, done.output
    assert "need not equal one that is not" in done.output
    for each in read_jsonl(tmp_path / "out" / "train_iteration_000000_rollout_summaries.jsonl"):
        assert each["steps"][-1]["ob_len"] + each["steps"][-1]["ac_len"] <= 120
    (row,) = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert row["env/all/guesses"] == pytest.approx(row["env/all/turns_per_episode"])


@pytest.mark.parametrize(("section", "message"), [
    ('provider = "toys:Missing"', r'run\.toml:\d+  environment\.provider  is "toys:Missing": .*no function'),
    ('provider = "toys:Rich"', r"the reward is 2, outside the declared range \[0, 1\]"),
    ('tools = ["calculater"]', r"environment\.tools .*calculator"),
    ('provider = "reasoning_gym"\nid = "chain_summ"', "did you mean 'chain_sum'"),
])  # fmt: skip
def test_mistakes_are_one_line_before_anything_is_loaded(section, message, tmp_path):
    (tmp_path / "toys.py").write_text(
        "from toy_environments import Echo\nclass Rich(Echo):\n    reward_range = (0.0, 1.0)\n"
    )
    (tmp_path / "run.toml").write_text(f'[model]\nmodel = "tiny-reasoner"\n[environment]\n{section}\n')
    result = run_cli("train", tmp_path / "run.toml", "--out", tmp_path / "out")
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.strip().splitlines()
    assert re.search(message, line), line
    assert not (tmp_path / "out").exists()
