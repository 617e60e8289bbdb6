"""Projects in the schema of trackio 0.43.0 (trackio/sqlite_storage.py, line 387), and written by it."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.pages import trackio_project

from retrain.errors import UsageError
from retrain.records.foreign import ForeignRun
from retrain.records.foreign.table import Request, ResultRow
from retrain.records.foreign.trackio import FORMAT, TrackioReader

RUNS = [("grpo_s1", {"lr": 1e-5, "_Group": None}), ("b", {"_Group": "rloo", "seed": 7}), ("grpo_s2", {"seed": 3})]


def rows(path: Path, metric: str | None = None) -> list[ResultRow]:
    return list(FORMAT.rows(path, Request(metric=metric)))


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
    assert found == [(1.2, 1767225600.5), (5.0, 1767225660.0)]  # of a step that was logged again, the latest counts
    assert FORMAT.latest_counts
    assert {file: file.read_bytes() for file in tmp_path.iterdir() if file.suffix != ".db-shm"} == before
    writer.close()


def test_a_database_of_another_tool_is_refused(tmp_path):
    (path := tmp_path / "lab.db").write_bytes(b"no database")
    assert not FORMAT.recognises(path)
    with pytest.raises(UsageError, match=r"lab\.db is no project of trackio"):
        rows(path)


@pytest.mark.skipif(find_spec("trackio") is None, reason="make test-environments")
@pytest.mark.filterwarnings("default:::(?!retrain)")
def test_a_project_that_trackio_wrote(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    import trackio

    for name, group, config in (("grpo_s1", None, {"lr": 1e-5}), ("b", "rloo", {"seed": 7})):
        trackio.init(
            "lab", name=name, group=group, config=config, embed=False, auto_log_gpu=False, auto_log_cpu=False
        )  # fmt: skip
        for step, loss in ((0, 0.5), (10, float("nan"))):
            trackio.log({"eval/reward": step / 100, "train/loss": loss}, step=step)
        trackio.finish()
    found = rows(tmp_path / "lab.db")
    assert [(row.condition, row.seed, row.step, row.value) for row in found if row.metric == "eval/reward"] == [
        ("grpo", 1, 0, 0.0), ("grpo", 1, 10, 0.1), ("rloo", 7, 0, 0.0), ("rloo", 7, 10, 0.1),
    ]  # fmt: skip
    assert [row.value for row in found if row.metric == "train/loss"] == [0.5, None, 0.5, None]
