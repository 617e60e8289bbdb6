"""A process writes only its own directory, a refused command changes nothing, missing records are named."""

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from helpers.campaigns import campaign, continue_training, eventually, files_of, toy_toml, train

from retrain.campaign.planning.changes import Approval
from retrain.errors import LeaseLost, RetrainError, UsageError
from retrain.files import read_json, read_jsonl
from retrain.records.observer import NullObserver

OWNER_FILES = {".lock", ".lease"}
contents = partial(files_of, without=OWNER_FILES)
NOBODY = 65534


class At(NullObserver):
    """Calls ``action`` once, after the step ``step`` of any run."""

    def __init__(self, step: int, action: Callable[[], None]):
        self.at, self.action = step, action

    def step(self, spec, row):
        if row["step"] == self.at:
            self.at = -1
            self.action()


def single(folder: Path, model: Path, steps: int = 4, rewards: str = "toyrewards.py") -> Path:
    path, training = folder / "single.toml", {"batch_size": 2, "max_steps": steps, "save_every": 2, "max_tokens": 6}
    path.write_text(toy_toml(model, rewards, training=training, evaluation={"problems": 3}))
    return path


def has_recorded(run: Path, step: int) -> bool:
    """Whether a step's index of pages, written last, and the checkpoint before it are on the disk."""
    pages = [row["iteration"] for row in read_jsonl(run / "iterations.jsonl") if row["split"] == "train"]
    return step in pages and step in [row["batch"] for row in read_jsonl(run / "checkpoints.jsonl")]


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def steps_of(run: Path) -> list[int]:
    return [row["step"] for row in read_jsonl(run / "metrics.jsonl")]


def refused(work: Callable[[], object], unchanged: Path | None = None) -> str:
    """The message of a command that is refused with exit status 2 and leaves a directory as it is."""
    before = contents(unchanged) if unchanged else {}
    with pytest.raises(RetrainError) as caught:
        work()
    assert caught.value.exit_status == 2
    assert not unchanged or contents(unchanged) == before
    return str(caught.value)


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    train(single(folder, model), folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def public() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def interrupted(model, public) -> Path:
    """A single run of eight steps, interrupted after its step 4: it has checkpoints of steps 2, 4 and 5."""
    shutil.copytree(model, public / "model")
    shutil.copy(model.parent / "toyrewards.py", public)
    path, observer = single(public, public / "model", 8), At(4, interrupt)
    train(path, public / "interrupted", "training.keep_last=5", observer=observer, status=130)
    assert steps_of(public / "interrupted") == [0, 1, 2, 3, 4]
    return public / "interrupted"


@pytest.fixture
def run(interrupted, tmp_path) -> Path:
    return Path(shutil.copytree(interrupted, tmp_path / "out"))


def test_a_suspended_process_whose_directory_was_taken_over_stops_without_writing(tmp_path, model):
    out, slow = tmp_path / "out", tmp_path / "slow.py"
    slow.write_text("import time\n\ndef score(completion, answer):\n    time.sleep(0.2)\n    return 0.5\n")
    path = single(tmp_path, model, 100_000, str(slow))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    retrain = [sys.executable, "-m", "retrain"]
    first = subprocess.Popen(
        [*retrain, "train", str(path), "--out", str(out)], env=environment, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        eventually(lambda: has_recorded(out, 2) or first.poll() is not None, 200)
        first.send_signal(signal.SIGSTOP)
        for name in OWNER_FILES:  # as on a file system without shared locks
            (out / name).unlink(missing_ok=True)
        fewer = ["--set", "training.max_steps=4", "--accept-changes"]
        second = subprocess.Popen([*retrain, "resume", str(out), *fewer], env=environment, stdout=subprocess.DEVNULL)
        assert second.wait(120) == 0
        before = contents(out)
        first.send_signal(signal.SIGCONT)
        _, errors = first.communicate(timeout=60)
    finally:
        first.kill()
    assert first.returncode == 1
    (line,) = errors.splitlines()
    assert f"process {second.pid} on " in line
    assert "has taken over" in line
    assert contents(out) == before


def test_another_directory_in_the_place_of_a_moved_one_stays_as_it_is(tmp_path, model, finished):
    out, moved = tmp_path / "out", tmp_path / "moved"

    def swap() -> None:
        eventually(lambda: has_recorded(out, 4))
        out.rename(moved)
        shutil.copytree(finished, out)

    with pytest.raises(LeaseLost, match="moved or replaced") as caught:
        train(single(tmp_path, model, 8), out, observer=At(4, swap))
    assert caught.value.exit_status == 1
    assert contents(out) == contents(finished)
    continue_training(moved)  # what was moved is whole
    assert steps_of(moved) == list(range(8))


def test_a_run_of_a_campaign_whose_directory_was_replaced_is_not_written(tmp_path, model):
    victim = tmp_path / "out/runs/grpo+none_s1"
    before: dict[str, bytes] = {}

    def swap() -> None:
        eventually(lambda: has_recorded(victim, 2))
        victim.rename(tmp_path / "moved")
        shutil.copytree(tmp_path / "moved", victim)
        before.update(contents(victim))

    path = campaign(tmp_path, model)
    with pytest.raises(LeaseLost, match=r"grpo\+none_s1 is another directory"):
        train(path, tmp_path / "out", "campaign.seeds=[1]", observer=At(2, swap))  # no checkpoint is due at this step
    assert contents(victim) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "evals.jsonl", "emergence/generations.jsonl"])
def test_an_interrupted_run_whose_records_were_emptied_is_refused(run, name):
    (run / name).write_text("")
    message = refused(lambda: continue_training(run), run)
    assert f"{name} has 0 of its " in message
    assert "cannot be restored" in message


def test_an_earlier_checkpoint_restores_what_a_shortened_record_lacks(run, interrupted, tmp_path):
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(rows[1:]))
    assert "metrics.jsonl has 4 of its 5 rows" in refused(lambda: continue_training(run))
    (run / "metrics.jsonl").write_text("".join(rows[:3]))
    continue_training(run)
    log = (run / "run.log").read_text()
    assert "went back to step 2, the newest with all rows: metrics.jsonl has 3 of its 5 rows" in log
    assert "continues at step 2" in log
    assert steps_of(run) == list(range(8))
    whole = Path(shutil.copytree(interrupted, tmp_path / "whole"))
    continue_training(whole)
    final = "final/adapter_model.safetensors"
    assert (run / final).read_bytes() == (whole / final).read_bytes()


def test_missing_rows_that_were_accepted_are_asked_about_once(run):
    (run / "metrics.jsonl").write_text("")
    continue_training(run, observer=At(6, interrupt), approval=Approval(accept=True), status=130)
    continue_training(run)
    assert steps_of(run) == [5, 6, 7]


def test_a_refused_resume_leaves_a_finished_run_finished(finished, tmp_path):
    """The data have changed since, which is found once they are loaded."""
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    facts = read_json(out / "config.json")
    (out / "config.json").write_text(json.dumps(facts | {"data_hash": "another"}))
    message = refused(lambda: continue_training(out, "training.max_steps=6"), out)
    assert "data: another → " in message
    assert read_json(out / "manifest.json")["runs"][0]["state"] == "done"


@pytest.fixture(scope="module")
def two_runs(model, tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("two")
    path = campaign(folder, model, steps=2)
    path.write_text(path.read_text().replace("seeds = [1, 2]", "seeds = [1]"))
    train(path, folder / "out")
    return path, folder / "out"


def test_a_command_that_is_refused_late_changes_no_record_and_leaves_no_new_directory(two_runs, tmp_path, model):
    path, finished = two_runs
    out = Path(shutil.copytree(finished, tmp_path / "finished"))
    weights = model / "model.safetensors"
    weights_before = weights.read_bytes()
    weights.write_bytes(weights_before[:-64])
    try:
        more = ["campaign.seeds=[1, 2]", "training.max_steps=4"]
        assert refused(lambda: train(path, out, *more), out)
        for file in (single(tmp_path, model), path):
            assert refused(lambda file=file: train(file, tmp_path / "out"))
            assert not (tmp_path / "out").exists()
    finally:
        weights.write_bytes(weights_before)


def test_a_campaign_without_its_plan_continues_with_the_same_settings_only(two_runs, tmp_path):
    path, whole = two_runs
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    (out / "plan.json").unlink()
    message = refused(lambda: train(path, out, "training.max_steps=3", "training.lr=0.5"))
    assert "plan.json is missing, and grpo+none_s1 did not begin with these settings" in message
    train(path, out)
    shutil.rmtree(out / "runs/grpo+none_s1")
    with pytest.raises(UsageError, match=r"runs/grpo\+none_s1/metrics.jsonl is missing, and the run counts as done"):
        continue_training(out)


def as_other_user(work: Callable[[], object]) -> str:
    """The message with which ``work`` is refused where it runs as a user who may not read everything."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setegid(NOBODY)
                os.seteuid(NOBODY)
            work()
            answer = ("nothing was refused", None)
        except BaseException as error:
            answer = (f"{type(error).__name__}: {error}", getattr(error, "exit_status", None))
        os.write(theirs, pickle.dumps(answer))
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        message, status = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    assert status == 2, message
    return message


@pytest.mark.parametrize(
    "name", ["manifest.json", "plan.json", "retrain.json", "config.json", ".lease", "checkpoints",
             "checkpoints/step_000005/manifest.json", "checkpoints/step_000005/optimizer.safetensors"]
)  # fmt: skip
def test_a_file_that_may_not_be_read_is_not_called_damaged(interrupted, public, name):
    out = Path(shutil.copytree(interrupted, public / name.replace("/", "_")))
    if name == ".lease":
        (out / name).write_text("{}")
    if os.getuid() == 0:
        for path in (out, *out.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        os.chown(out / name, 0, 0)
    (out / name).chmod(0)
    before = contents(out) if os.getuid() == 0 else None
    message = as_other_user(lambda: continue_training(out))
    assert re.search(f"{re.escape(str(out / name))}[^ ]* cannot be read: permission denied", message)
    assert "damaged" not in message
    assert before is None or contents(out) == before
