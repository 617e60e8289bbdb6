import contextlib
import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from helpers.lanes import small_snapshot
from helpers.records import HOSTILE, MEGABYTE, context, evaluation, group, step, with_action

from retrain.campaign.planning.manifest import Manifest, read_plan
from retrain.errors import CheckpointError, StorageError, UsageError
from retrain.files import append_jsonl, aside_of, dumps, read_json, read_jsonl, sha256, truncate_jsonl, write_json
from retrain.ownership import claim
from retrain.policy.plugin import PluginSnapshot
from retrain.records.reader import read_manifest
from retrain.records.recorder import RunRecorder
from retrain.records.schema.layout import MANIFEST, PLAN
from retrain.training import checkpoints
from retrain.types import CreditedGroup


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may grow beyond ``size`` bytes: what a quota does, in a test."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_old_files_whole_and_no_remains(tmp_path):
    write_json(tmp_path / "manifest.json", {"runs": ["old"] * 10})
    with largest_file(64), pytest.raises(StorageError, match="too large"):
        write_json(tmp_path / "manifest.json", {"runs": ["new"] * 100})
    assert read_json(tmp_path / "manifest.json") == {"runs": ["old"] * 10}
    append_jsonl(tmp_path / "metrics.jsonl", [{"step": 0, "pad": "x" * 300}])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with largest_file(len(before) + 100), pytest.raises(OSError, match="too large"):  # the kernel writes a part
        append_jsonl(tmp_path / "metrics.jsonl", [{"step": 1, "pad": "x" * 300}])
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    checkpoints.write_checkpoint(checkpoints.checkpoint_directory(tmp_path, 2), small_snapshot(2))
    for size in (0, 10, 100, 400, 700):
        with largest_file(size), pytest.raises(StorageError, match=r"cannot be written: file too large") as error:
            checkpoints.write_checkpoint(checkpoints.checkpoint_directory(tmp_path, 4), small_snapshot(4, 60))
        assert error.value.shared
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000002"]
    assert checkpoints.newest_undamaged(tmp_path, []) == checkpoints.checkpoint_directory(tmp_path, 2)
    checkpoints.write_checkpoint(checkpoints.checkpoint_directory(tmp_path, 4), small_snapshot(4, 60))  # there is room
    with largest_file(700), pytest.raises(StorageError):  # written anew over the old one
        checkpoints.write_checkpoint(checkpoints.checkpoint_directory(tmp_path, 4), small_snapshot(4, 600))
    assert checkpoints.newest_undamaged(tmp_path, []) == checkpoints.checkpoint_directory(tmp_path, 4)


def test_a_directory_that_vanishes_is_not_begun_anew(tmp_path):
    recorder = RunRecorder(tmp_path / "run", context())
    recorder.start({"any": "facts"})
    recorder.record_step(step([group([1.0, 0.0], [3, 3])]))
    recorder.flush()
    shutil.rmtree(tmp_path / "run")
    recorder.record_step(step([group([1.0, 0.0], [3, 3])], 1))
    with pytest.raises(StorageError, match="vanished"):
        recorder.flush()
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_manifest_that_cannot_be_written_stops_the_campaign_and_is_made_good_when_it_can(tmp_path):
    path = tmp_path / MANIFEST
    path.mkdir()
    manifest = Manifest(tmp_path, {"runs": []})
    with contextlib.suppress(StorageError):  # the thread may be faster than the event that starts it
        manifest.note(lanes=1)
    with pytest.raises(StorageError, match=r"manifest\.json cannot be written"):
        manifest.files.flush()
    path.rmdir()
    with pytest.raises(StorageError), manifest:
        manifest.note(lanes=2)
    assert read_json(path)["lanes"] == 2


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_each_file_is_synced_once(tmp_path, monkeypatch):
    """What a power cut may take is what was not synced: contents and names come before the rename, which comes last."""
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(number: int) -> None:
        events.append(Path(f"/proc/self/fd/{number}").readlink().name)
        fsync(number)

    def renamed(source: Path, target: Path) -> None:
        events.append(f"-> {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    (tmp_path / "own/parts").mkdir(parents=True)
    (tmp_path / "own/parts/table").write_text("of a backend of the user's")
    for snapshot in (small_snapshot(2), checkpoints.Snapshot(4, PluginSnapshot(None, tmp_path / "own"), '{"step": 4}')):
        events.clear()
        directory = checkpoints.checkpoint_directory(tmp_path, snapshot.step)
        checkpoints.write_checkpoint(directory, snapshot)
        end = events.index(f"-> {directory.name}")
        there = [*(path.name for path in directory.rglob("*")), aside_of(directory).name]
        assert sorted(event for event in events[:end] if "->" not in event) == sorted(there)
        assert events[end + 1 :] == ["checkpoints"]


def test_a_power_cut_at_every_byte_of_a_checkpoint(tmp_path):
    checkpoints.write_checkpoint(checkpoints.checkpoint_directory(tmp_path, 2), small_snapshot(2))
    torn = checkpoints.checkpoint_directory(tmp_path, 4)
    checkpoints.write_checkpoint(torn, small_snapshot(4))
    cuts = 0
    for path in sorted(torn.iterdir()):
        data = path.read_bytes()
        without_line_break = path.name == "manifest.json"
        for length in range(len(data) - without_line_break):
            path.write_bytes(data[:length])
            with pytest.raises(CheckpointError):
                checkpoints.verify_checkpoint(torn)
            cuts += 1
        path.write_bytes(data)
    checkpoints.verify_checkpoint(torn)
    assert cuts > 500
    (torn / "state.json").unlink()
    report: list[str] = []
    assert checkpoints.newest_undamaged(tmp_path, report) == checkpoints.checkpoint_directory(tmp_path, 2)
    assert "skipped a damaged checkpoint" in report[0]


def test_a_power_cut_at_every_byte_of_the_last_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": number, "text": HOSTILE["line_ends"], "loss": 0.5} for number in range(3)]
    append_jsonl(path, rows[:2])
    before = path.stat().st_size
    append_jsonl(path, rows[2:])
    data = path.read_bytes()
    for length in range(before, len(data)):
        path.write_bytes(data[:length])
        assert read_jsonl(path) == rows[:2]
        truncate_jsonl(path, 2)
        append_jsonl(path, rows[2:])
        assert path.read_bytes() == data


@pytest.mark.parametrize(("name", "read"), [(MANIFEST, read_manifest), (PLAN, read_plan)])
def test_a_torn_manifest_or_plan_is_an_error_of_one_line(tmp_path, name, read):
    run = {"run_id": "a_s1", "label": "a", "seed": 1, "state": "done", "step": 1, "path": ".", "config": {},
           "overrides": {}, "condition_index": 0, "is_campaign": False}  # fmt: skip
    claim(tmp_path)
    whole = dumps({"format": 1, "folder": ".", "runs": [run]})
    wrong = ('{"format": 1, "runs": [3]}', '{"format": 1, "runs": {"a": 1}}')
    for content in (*wrong, *(whole[:length] for length in range(len(whole)))):
        (tmp_path / name).write_text(content)
        with pytest.raises(UsageError, match="is damaged") as error:
            read(tmp_path)
        assert "\n" not in str(error.value)


def hostile_group(text: str) -> CreditedGroup:
    made = group([1.0, None], [3, 3], problem_id=text)
    return with_action(with_action(made, 0, text=text), 1, text=text)


def test_hostile_texts_leave_every_record_strict_json(tmp_path):
    with closing(RunRecorder(tmp_path, context())) as recorder:
        for number, text in enumerate([*HOSTILE.values(), MEGABYTE]):
            recorder.record_eval(evaluation([hostile_group(text)], number))
            recorder.record_step(step([hostile_group(text)], number))
            recorder.log(text)
    obeyed = {*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), *"\u2028\u2029\u202d"}
    assert len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) == len(HOSTILE) + 1
    for path in [*tmp_path.glob("*.jsonl"), *(tmp_path / "emergence").glob("*.jsonl")]:
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            assert not set(line) & obeyed, path
            json.loads(line, parse_constant=pytest.fail)


def test_a_checkpoint_manifest_names_only_its_own_files(tmp_path):
    directory = checkpoints.checkpoint_directory(tmp_path, 2)
    checkpoints.write_checkpoint(directory, small_snapshot(2))
    good = read_json(directory / "manifest.json")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/file").write_bytes(b"x")
    (directory / "linked").symlink_to(tmp_path / "elsewhere")
    for name in ("../../secret", "../step_000002/state.json", "/etc/passwd", "linked/file"):
        named = good["sha256"] | {name: sha256(tmp_path / "elsewhere/file")}
        write_json(directory / "manifest.json", good | {"sha256": named})
        with pytest.raises(CheckpointError, match="not a file of this checkpoint"):
            checkpoints.verify_checkpoint(directory)
    (directory / "linked").unlink()
    write_json(directory / "manifest.json", good)
    (directory / "state.json").rename(tmp_path / "copy")
    (directory / "state.json").symlink_to(tmp_path / "copy")
    with pytest.raises(CheckpointError, match="not a file of this checkpoint"):
        checkpoints.verify_checkpoint(directory)


def test_what_was_changed_is_in_the_manifest_whoever_writes_meanwhile(tmp_path):
    reasons = (None, 'a "b"\n\tc', "new\nline \u2028 ä", float("nan"))
    runs = [{"run_id": f"a_s{i}", "seed": i, "state": "pending", "reason": None, "step": 0} for i in range(40)]
    with Manifest(tmp_path, {"runs": runs, "cohorts": []}) as manifest:
        for number in range(200):
            name = f"a_s{number % 40}"
            manifest.step(name, number)
            if number % 3 == 0:
                manifest.update(name, state="running", worker=f"{number} cpu", reason=reasons[number % 4])
            if number % 5 == 0:
                manifest.note(cohorts=[[name]], lanes=number)
            if number % 7 == 0:
                manifest.update(name, without=["worker"], state="done")
                assert "worker" not in manifest.content["runs"][number % 40]
        manifest.files.flush()
        assert (tmp_path / MANIFEST).read_text() == dumps(manifest.content, indent=2) + "\n"
