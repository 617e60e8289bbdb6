"""Projects in the schema of trackio 0.43.0 (trackio/sqlite_storage.py, line 387), and written by it."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.pages import trackio_project
from helpers.trainers import train_line

from retrain.errors import UsageError
from retrain.records.foreign import ForeignRun
from retrain.records.foreign.table import ReadRequest, ResultRow
from retrain.records.foreign.trackio import FORMAT, TrackioReader

RUNS = [("grpo_s1", {"lr": 1e-5, "_Group": None}), ("b", {"_Group": "rloo", "seed": 7}), ("grpo_s2", {"seed": 3})]

WITH_TRACKIO = pytest.mark.skipif(find_spec("trackio") is None, reason="make test-environments")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Trackio's directory, which it reads from the environment once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(path := tmp_path_factory.mktemp("trackio")))
        yield path


def rows(path: Path, metric: str | None = None) -> list[ResultRow]:
    return list(FORMAT.rows(path, ReadRequest(metric=metric)))


def test_group_and_seed_of_the_settings_come_before_the_name_of_the_run(tmp_path):
    trackio_project(path := tmp_path / "lab.db", RUNS, 3).close()
    found = rows(path, "train/reward")
    assert {(row.run, row.condition, row.seed) for row in found} == {
        ("grpo_s1", "grpo", 1), ("b", "rloo", 7), ("grpo_s2", "grpo", 3),
    }  # fmt: skip
    assert [(row.step, row.value, row.set) for row in found if row.run == "b"] == [
        (0, 1.0, "heldout"), (1, 1.1, "heldout"), (2, 1.2, "heldout"),
    ]  # fmt: skip
    assert [row.value for row in rows(path, "train/loss")][:3] == [0.5, None, 0.5]  # NaN is a text in the file
    assert FORMAT.recognises(path)


def test_retrain_ui_reads_the_same_numbers(tmp_path):
    trackio_project(path := tmp_path / "lab.db", RUNS, 3).close()
    run = ForeignRun(tmp_path, "b", "rloo", 7, "done", 3)
    shown = TrackioReader().rows(run, lambda directory, name: directory / name)
    assert [row["train/reward"] for row in shown or ()] == [
        row.value for row in rows(path, "train/reward") if row.run == "b"
    ]


def test_a_project_that_is_being_written_is_read_with_its_log_and_left_unchanged(tmp_path):
    writer = trackio_project(path := tmp_path / "lab.db", RUNS, 3)
    row = (f"{1:032x}", "2026-01-01T00:01:00+00:00", "b", 2, b'{"train/reward":5.0}')
    writer.execute("INSERT INTO metrics VALUES (NULL, ?, ?, ?, ?, ?, NULL, NULL)", row)
    writer.commit()
    before = {file: file.read_bytes() for file in tmp_path.iterdir() if file.suffix != ".db-shm"}
    found = [(row.value, row.time) for row in rows(path, "train/reward") if (row.run, row.step) == ("b", 2)]
    assert found == [(5.0, 1767225660.0)]  # of a step that was logged again, the last call counts
    assert {file: file.read_bytes() for file in tmp_path.iterdir() if file.suffix != ".db-shm"} == before
    writer.close()


@pytest.mark.parametrize("metrics", ["[1]", "[" * 100_000])
def test_metrics_that_are_no_object_are_refused(tmp_path, metrics):
    writer = trackio_project(path := tmp_path / "lab.db", RUNS, 1)
    writer.execute("UPDATE metrics SET metrics = ?", (metrics,))
    writer.commit()
    writer.close()
    with pytest.raises(UsageError, match=r"lab\.db is no project of trackio"):
        rows(path)


def test_a_database_of_another_tool_is_refused(tmp_path):
    (path := tmp_path / "lab.db").write_bytes(b"no database")
    assert not FORMAT.recognises(path)
    with pytest.raises(UsageError, match=r"lab\.db is no project of trackio"):
        rows(path)


def test_the_trainer_s_number_of_updates_is_the_step_and_its_evaluation_sets_are_told_apart(tmp_path):
    """As ``TrackioCallback.on_log`` of transformers 5.17.0 writes it (integrations/integration_utils.py, line 1082)."""
    writer = trackio_project(path := tmp_path / "lab.db", RUNS[:1], 0)
    lines = ('{"train/reward":0.5,"train/global_step":10}',
             '{"eval/math_runtime":2.0,"eval/reward":0.25,"train/global_step":10}',
             '{"eval/code_easy_runtime":2.0,"eval/reward":0.75,"train/global_step":10}')  # fmt: skip
    for step, line in enumerate(lines):
        row = (f"{0:032x}", "2026-01-01T00:00:00+00:00", "grpo_s1", step, line.encode())
        writer.execute("INSERT INTO metrics VALUES (NULL, ?, ?, ?, ?, ?, NULL, NULL)", row)
    writer.commit()
    writer.close()
    assert [(row.set, row.step, row.value) for row in rows(path, "eval/reward")] == [
        ("math", 10, 0.25), ("code_easy", 10, 0.75),
    ]  # fmt: skip
    run = ForeignRun(tmp_path, "grpo_s1", "grpo", 1, "done", 3)
    (shown,) = TrackioReader().rows(run, lambda directory, name: directory / name) or ()
    assert (shown["step"], shown["eval/math_reward"], shown["eval/code_easy_reward"]) == (10, 0.25, 0.75)


@WITH_TRACKIO
@pytest.mark.filterwarnings("default:::(?!retrain)")
def test_a_project_that_trackio_wrote(home):
    import trackio

    for name, group, config in (("grpo_s1", None, {"lr": 1e-5}), ("b", "rloo", {"seed": 7})):
        trackio.init("lab", name=name, group=group, config=config, embed=False, auto_log_gpu=False, auto_log_cpu=False)
        for step, loss in ((0, 0.5), (10, float("nan"))):
            trackio.log({"eval/reward": step / 100, "train/loss": loss}, step=step)
        trackio.finish()
    found = rows(home / "lab.db")
    assert [(row.condition, row.seed, row.step, row.value) for row in found if row.metric == "eval/reward"] == [
        ("grpo", 1, 0, 0.0), ("grpo", 1, 10, 0.1), ("rloo", 7, 0, 0.0), ("rloo", 7, 10, 0.1),
    ]  # fmt: skip
    assert [row.value for row in found if row.metric == "train/loss"] == [0.5, None, 0.5, None]


@WITH_TRACKIO
@pytest.mark.filterwarnings("default:::(?!retrain)")
def test_a_project_that_a_trainer_wrote_with_two_evaluation_sets(home, tmp_path):
    train_line(
        tmp_path / "out", ["easy", "hard"], max_steps=20, eval_steps=10, logging_steps=10, save_strategy="no",
        report_to=["trackio"], seed=7, project="tuning", run_name="sft", trackio_space_id=None,
    )  # fmt: skip
    found = rows(home / "tuning.db", "eval/loss")
    assert [(row.set, row.step, row.value, row.condition, row.seed) for row in found] == [
        ("easy", 10, 0, "sft", 7), ("hard", 10, 9, "sft", 7), ("easy", 20, 0, "sft", 7), ("hard", 20, 9, "sft", 7),
    ]  # fmt: skip
