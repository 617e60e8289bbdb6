import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.campaigns import run_cli, timeless
from helpers.models import campaign_head

from retrain.algorithms.algorithm import training_samples
from retrain.config.describe import document
from retrain.files import read_json, read_jsonl
from retrain.policy.plugin import TrainSequence
from retrain.types import Action, CreditedRollout, Problem, Prompt, RewardResult, Support, Turn

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
CODE = re.search(r"```python\n(# my_backend\.py\n.*?)```", PAGE, re.DOTALL)[1]
TOML = re.search(r"```toml\n(\[backend\].*?)```", PAGE, re.DOTALL)[1]
REST = document({
    "data": {"source": "digits.jsonl", "eval_source": "heldout.jsonl"}, "evaluation": {"problems": 4, "samples": 4},
    "training": {"max_steps": 12, "batch_size": 4, "group_size": 8, "max_tokens": 16, "save_every": 4},
})  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch, import_path) -> Path:
    """A folder with the documents' backend, four problems and a TOML; the interpreter is left as it was."""
    (tmp_path / "my_backend.py").write_text(CODE)
    for name, sign in (("digits", "+"), ("heldout", "plus")):
        rows = [{"prompt": f"{n} {sign} 2", "answer": str(n + 2)} for n in (1, 3, 5, 7)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(TOML + REST)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("my_backend", "slow_backend"):
        sys.modules.pop(name, None)


SLOW = """
class Slow(Table):
    '''Dies by SIGKILL in the middle of a step after two checkpoints, once.'''

    def train_step(self, batch):
        import os, pathlib, signal

        mark = pathlib.Path("died")
        if batch.step == 9 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(batch)
"""


def test_the_example_of_the_documents_learns_and_killed_and_resumed_it_is_the_same_run(folder):
    """kill -9 in the middle of a step, then ``retrain resume``: rows and table are those of a run left alone."""
    assert run_cli("train", "run.toml", "--out", "alone", "--plain").exit_code == 0
    rows = read_jsonl(folder / "alone" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(12))
    assert rows[0]["table/rows"] == 4  # a number of the backend's own
    assert all((row["loss"] is None) == (row["num_datums"] == 0) for row in rows)
    evaluations = read_jsonl(folder / "alone" / "evals.jsonl")
    assert evaluations[0]["eval/heldout/correct_rate"] < 0.5 < evaluations[-1]["eval/heldout/correct_rate"]
    checkpoint = folder / "alone" / "checkpoints" / "step_000012"
    assert "backend/table.json" in read_json(checkpoint / "manifest.json")["sha256"]

    (folder / "slow_backend.py").write_text(CODE + SLOW)
    (folder / "slow.toml").write_text((TOML + REST).replace("my_backend:Table", "slow_backend:Slow"))
    command = [sys.executable, "-m", "retrain", "train", "slow.toml", "--out", "killed", "--plain"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    killed = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    assert (folder / "killed" / "checkpoints" / "step_000004").is_dir()  # that of step 8 may still be on its way
    assert run_cli("resume", "killed", "--plain").exit_code == 0
    for name in ("metrics.jsonl", "evals.jsonl"):
        resumed, alone = (timeless(folder / out / name) for out in ("killed", "alone"))
        assert resumed == alone, name
    assert read_json(folder / "killed/final/table.json") == read_json(folder / "alone/final/table.json")


def test_a_campaign_of_a_backend_with_a_placeholder_loss(folder):
    (folder / "my_backend.py").write_text(CODE.replace("reports_sync_loss = True", "reports_sync_loss = False"))
    campaign = campaign_head(("rloo", "none"), ("maxrl", "gtpo"), seeds=[1, 2])
    text = TOML.replace('[algorithm]\nadvantage_mode = "rloo"\n', "") + REST.replace("max_steps = 12", "max_steps = 2")
    (folder / "camp.toml").write_text(f"{text}\n{campaign}")
    result = run_cli("train", "camp.toml", "--out", "camp", "--plain", "--verbose")
    assert result.exit_code == 0, result.output
    assert "loss=placeholder" in result.output
    runs = list((folder / "camp/runs").iterdir())
    recorded = [read_jsonl(run / "emergence/evaluations.jsonl") for run in runs]
    first, last = ([[row["completion"] for row in rows if row["step"] == step] for rows in recorded] for step in (0, 2))
    assert all(answers == first[0] for answers in first)  # untrained, whatever the seed
    assert not all(answers == last[0] for answers in last)
    row = read_jsonl(runs[0] / "metrics.jsonl")[0]
    assert (row["loss_is_placeholder"], row["loss"] == row["reported_loss"] != 0) == (True, True)


def test_token_credit_on_a_backend_that_flattens_it_is_a_configuration_error(folder):
    flattening = CODE.replace("preserves_token_advantages = True", "preserves_token_advantages = False")
    (folder / "my_backend.py").write_text(flattening)
    (folder / "run.toml").write_text(TOML.replace('advantage_mode = "rloo"', 'transform_mode = "gtpo"'))
    for command in ("check", "train"):
        result = run_cli(command, "run.toml")
        assert result.exit_code == 2
        assert 'algorithm.transform_mode  is "gtpo", which gives tokens' in result.output
        assert 'flattens them: transform_mode = "none"' in result.output
    assert not (folder / "logs").exists()


OURS = '[backend]\nbackend = "my_backend:Table"\n'


@pytest.mark.parametrize(("text", "line"), [
    ('[backend]\nbackend = "my_backend:Tabel"', 'run.toml:2  backend.backend  is "my_backend:Tabel": the module'),
    ('[backend]\nbackend = "absent:Table"', "run.toml:2  backend.backend  is \"absent:Table\": no module 'absent'"),
    ('[backend]\nbackend = "json:JSONDecoder"', 'is "json:JSONDecoder": has no sample(): a backend has'),
    ('[algorithm]\nloss = "my_backend:nothing"', 'run.toml:2  algorithm.loss  is "my_backend:nothing": the module'),
    ('[planning]\ndetector = "nowhere:f"', "run.toml:2  planning.detector  is \"nowhere:f\": no module 'nowhere'"),
    (OURS + '[algorithm]\ntransform_mode = "entropy_mask"', 'is "entropy_mask", which needs the entropy'),
    (OURS + "[backpressure]\nenabled = true", 'has no effect with backend = "my_backend:Table"'),
    ("[backend]\noptions = { a = 1 }", 'has no effect with backend = "local"'),
])  # fmt: skip
def test_check_finds_wrong_names_before_training(folder, text, line):
    (folder / "run.toml").write_text(text)
    result = run_cli("check", "run.toml")
    assert result.exit_code == 2
    assert line in result.output, result.output
    assert len(result.output.strip().splitlines()) == 1


@pytest.mark.parametrize(("old", "new", "reason"), [
    ('"table/rows": len(self.logits)', '"mean_reward": 1.0', "returned 'mean_reward', which is measured here"),
    ('{"loss": loss,', '{"loss": float("nan"),', "the loss of step 0 is nan"),
    ("range(request.samples)]", "range(1)]", "1 completions of a prompt where 8 were asked for"),
    ("np.zeros(len(text))  #", "np.zeros(len(text) + 1)  #", "9 tokens with (10,) log-probabilities"),
    ('(directory / "table.json").write_text(json.dumps(self.logits))', "pass", "saved no file"),
])  # fmt: skip
def test_what_a_backend_does_wrong_is_named(folder, old, new, reason):
    assert old in CODE
    (folder / "my_backend.py").write_text(CODE.replace(old, new))
    sets = ("--set", "training.max_steps=1", "--set", "evaluation.problems=0")
    result = run_cli("train", "run.toml", "--out", "out", "--plain", *sets)
    assert result.exit_code == 1, result.output
    assert "backend my_backend:Table" in result.output
    assert reason in result.output


def test_prompts_are_measured_with_the_backends_own_tokenizer(folder):
    """A byte is a token here: "1 + 2" fits, "1 plus 2" does not."""
    result = run_cli("train", "run.toml", "--out", "long", "--plain", "--set", "data.max_prompt_tokens=5")
    assert result.exit_code == 2
    assert "the prompt has 8 tokens, more than 5 ([data] max_prompt_tokens = 5); 3 more are too long" in result.stderr


def test_what_tokens_were_drawn_among_reaches_the_update(folder):
    """As docs/extending.md says: `Completion.support` comes back with its sequence."""
    support = "Support(np.repeat(np.array([*text.encode()], dtype=np.int32), 2), 2 * np.arange(len(text.encode()) + 1))"
    expected = "one.support.ids.tolist() == [token for token in one.completion_ids for _ in range(2)]"
    code = CODE.replace("import Completion", "import Completion, Support")
    code = code.replace('logprobs_T, None, "stop")', f'logprobs_T, None, "stop", {support})')
    code = code.replace("loss = 0.0\n", f"loss = 0.0\n        assert all({expected} for one in batch.sequences)\n")
    assert support in code
    assert expected in code
    (folder / "my_backend.py").write_text(code)
    result = run_cli("train", "run.toml", "--out", "out", "--plain", "--set", "training.max_steps=2")
    assert result.exit_code == 0, result.output
    assert any(row["num_datums"] for row in read_jsonl(folder / "out" / "metrics.jsonl"))


def test_a_sequence_of_several_turns_is_a_completion_in_which_what_was_read_does_not_train():
    turns = tuple(
        Turn(read, Action(drawn, "", np.full(len(drawn), -1.0), None, "stop", support))
        for read, drawn, support in (
            ((1, 2), [3, 4], Support(np.array([3, 9, 4]), np.array([0, 2, 3]))),
            ((5, 6), [7], Support(np.array([8, 7]), np.array([0, 2]))),
        )
    )
    prompt = Prompt(Problem("p", "q", "a"), "q", (1, 2))
    rollout = CreditedRollout(prompt, turns, RewardResult(1.0), advantage=0.5, token_advantages_T=np.full(3, 0.5))
    sequence = TrainSequence.of(training_samples(rollout)[0])
    assert (sequence.prompt_ids, sequence.completion_ids) == ((1, 2), [3, 4, 5, 6, 7])
    assert sequence.loss_mask_T.tolist() == [True, True, False, False, True]
    assert sequence.advantages_T.tolist() == [0.5, 0.5, 0.0, 0.0, 0.5]
    assert sequence.sampler_logprobs_T.tolist() == [-1.0, -1.0, 0.0, 0.0, -1.0]
    assert sequence.support is not None
    assert sequence.support.ids.tolist() == [3, 9, 4, 8, 7]
    assert sequence.support.offsets.tolist() == [0, 2, 3, 3, 3, 5]
