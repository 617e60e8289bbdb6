"""trl/trainer_state.json is what TRL 1.16.0's GRPOTrainer wrote with the evaluation sets math and code_easy, evaluated
twice at the last step, with fewer metrics. See ``GRPOTrainer.log`` (trl/trainer/grpo_trainer.py) and
``Trainer._evaluate`` (transformers 5.17.0, src/transformers/trainer.py)."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.trainers import train_line

from retrain.errors import UsageError
from retrain.records.foreign import ForeignRun
from retrain.records.foreign.table import ReadRequest
from retrain.records.foreign.trl import FORMAT, TrlReader

DATA = Path(__file__).parents[3] / "data/foreign"
STATE = DATA / "trl/trainer_state.json"


def values(path: Path, metric: str | None = None) -> dict[tuple[str, str, int | None], float | None]:
    rows = list(FORMAT.rows(path, ReadRequest(metric=metric)))
    found = {(row.set, row.metric, row.step): row.value for row in rows}
    assert len(found) == len(rows)
    return found


def write_state(directory: Path, steps: int, history: list[dict[str, object]], max_steps: int = 20) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    content = {"global_step": steps, "max_steps": max_steps, "log_history": history}
    (path := directory / "trainer_state.json").write_text(json.dumps(content))
    return path


def test_equal_keys_of_several_evaluation_sets_are_told_apart_and_the_last_evaluation_of_a_step_counts():
    assert values(STATE, "eval_reward") == {
        ("math", "eval_reward", 2): 0.48749999701976776, ("code_easy", "eval_reward", 2): 0.4937499985098839,
        ("math", "eval_reward", 4): 0.6124999970197678, ("code_easy", "eval_reward", 4): 0.5124999955296516,
    }  # fmt: skip
    found = values(STATE)
    assert found["code_easy", "eval_loss", 4] == 0.011774011887609959
    assert (found["train", "reward", 2], found["train", "train_loss", 4]) == (0.625, 2.086162567138672e-07)
    assert {metric for _, metric, _ in found}.isdisjoint({"step", "epoch"})
    assert FORMAT.recognises(STATE)


def test_retrain_ui_reads_the_same_numbers():
    run = ForeignRun(STATE.parent, "trl", "trl", None, "done", 4)
    rows = TrlReader().rows(run, lambda directory, name: path if (path := directory / name).is_file() else None)
    assert rows is not None
    shown = {
        (name, metric, row["step"]): row[f"eval_{name}_{metric.removeprefix('eval_')}"]
        for row in rows for name in ("math", "code_easy") for metric in ("eval_reward", "eval_completions/mean_length")
    }  # fmt: skip
    assert shown == {key: value for key, value in values(STATE).items() if key in shown}
    assert len(shown) == 8


def test_a_checkpoint_with_more_steps_than_the_state_of_the_directory_is_read_instead(tmp_path):
    own = write_state(tmp_path, 10, [])
    checkpoints = [write_state(tmp_path / f"checkpoint-{steps}", steps, []) for steps in (5, 9, 10)]
    assert list(FORMAT.choose([*checkpoints, own])) == [own]  # it was saved after the last evaluation, they before
    assert list(FORMAT.choose(checkpoints)) == [checkpoints[2]]
    newer = write_state(tmp_path / "checkpoint-100", 100, [])
    assert list(FORMAT.choose([newer, own, *checkpoints])) == [newer]
    assert list(FORMAT.choose([])) == []


@pytest.mark.parametrize(("max_steps", "state"), [(10, "done"), (20, "unfinished"), (0, "unfinished")])
def test_a_run_is_done_when_it_has_all_its_steps(tmp_path, max_steps, state):
    path = write_state(tmp_path, 10, [{"eval_reward": float("nan"), "step": 10}], max_steps)
    (row,) = FORMAT.rows(path, ReadRequest())
    assert (row.state, row.set, row.value) == (state, "heldout", None)


def test_a_metric_called_runtime_names_no_set_and_a_line_without_a_step_belongs_to_the_step_before(tmp_path):
    history = [{"eval_gpu_runtime": 1.0, "eval_reward": 0.5, "eval_runtime": 2.0, "step": 10}, {"train_runtime": 3.0}]
    path = write_state(tmp_path, 10, [dict(line) for line in history])
    found = values(path)
    assert (found["heldout", "eval_reward", 10], found["train", "train_runtime", 10]) == (0.5, 3.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"log_history": [', "is not JSON"),
        ("[]", "is no JSON object"),
        ("{}", "is no state of a Trainer"),
        ('{"log_history": [{"eval_reward": "high", "step": 1}]}', ":1: eval_reward is 'high'"),
    ],
)
def test_a_damaged_state_is_refused_with_its_name(tmp_path, text, message):
    (path := tmp_path / "trainer_state.json").write_text(text)
    with pytest.raises(UsageError, match=f"trainer_state.json.*{message}"):
        list(FORMAT.rows(path, ReadRequest(metric="eval_reward")))


@pytest.mark.filterwarnings("default:::(?!retrain)")
@pytest.mark.parametrize("means", [{"easy": 0, "easy_runtime": 9}, {"heldout": 4.5}])
def test_the_state_of_a_real_trainer(tmp_path, means):
    names = [*means] if len(means) > 1 else []
    train_line(tmp_path, names, max_steps=2, eval_steps=1, logging_steps=1, save_steps=1, report_to=[])
    (path,) = FORMAT.choose(sorted(tmp_path.glob("checkpoint-*/trainer_state.json")))
    assert values(path, "eval_loss") == {(name, "eval_loss", step): means[name] for name in means for step in (1, 2)}
    assert {row.state for row in FORMAT.rows(path, ReadRequest())} == {"done"}


@pytest.mark.skipif(find_spec("trl") is None, reason="make test-environments")
@pytest.mark.filterwarnings("default:::(?!retrain)")
def test_the_state_of_a_real_grpo_trainer_with_two_evaluation_sets(tmp_path):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from retrain.models.directory import local_directory

    model = str(local_directory("tiny-reasoner"))
    sets = {
        name: Dataset.from_list([{"prompt": f"{a}+1=?", "worth": worth} for a in (1, 2)])
        for name, worth in (("math", 0.25), ("code_easy", 0.75))
    }
    args = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=2, per_device_eval_batch_size=2, num_generations=2,
        max_completion_length=4, max_steps=2, logging_steps=1, eval_strategy="steps", eval_steps=1, save_strategy="no",
        use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model), processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=lambda worth, **_: worth, args=args, train_dataset=sets["math"], eval_dataset=sets,
    )  # fmt: skip
    trainer.train()
    trainer.save_state()
    path = tmp_path / "trainer_state.json"
    means = {"math": 0.25, "code_easy": 0.75}
    assert values(path, "eval_reward") == {
        (name, "eval_reward", step): means[name] for name in means for step in (1, 2)
    }
    assert values(path, "reward") == {("train", "reward", step): 0.25 for step in (1, 2)}
