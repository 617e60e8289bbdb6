"""Event files that torch's SummaryWriter and TensorBoard 2.21.0's own writer wrote."""

import struct
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch.utils.tensorboard import SummaryWriter

from retrain.errors import MissingExtra, UsageError
from retrain.records.foreign.table import ReadRequest, ResultRow
from retrain.records.foreign.tensorboard import FORMAT


def written(directory: Path, values: dict[int, float], tag: str = "eval/reward", time: float = 1.5) -> Path:
    with SummaryWriter(str(directory)) as writer:
        for step, value in values.items():
            writer.add_scalar(tag, value, step, walltime=time)
    return next(directory.glob("events.*"))


def rows(path: Path, metric: str | None = None) -> list[ResultRow]:
    return list(FORMAT.rows(path, ReadRequest(metric=metric)))


def test_values_are_the_shortest_decimals_of_their_float32(tmp_path):
    path = written(tmp_path, {0: 0.3, 10: float("nan"), 20: 1 / 3, 30: 12345678.0})
    found = rows(path)
    assert [(row.metric, row.set, row.step, row.value, row.time) for row in found] == [
        ("eval/reward", "heldout", 0, 0.3, 1.5), ("eval/reward", "heldout", 10, None, 1.5),
        ("eval/reward", "heldout", 20, 0.33333334, 1.5), ("eval/reward", "heldout", 30, 12345678.0, 1.5),
    ]  # fmt: skip
    assert struct.pack("f", 0.33333334) == struct.pack("f", 1 / 3)
    assert FORMAT.recognises(path)
    assert FORMAT.latest_counts


def test_scalars_are_read_among_texts_histograms_pictures_and_settings(tmp_path):
    import numpy as np

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("args", "lr = 1", 1)
        writer.add_histogram("weights", np.arange(9.0), 1)
        writer.add_image("picture", np.zeros((3, 4, 4)), 1)
        writer.add_hparams({"lr": 1.0}, {})
        writer.add_scalar("train/loss", 0.7, 1)
        writer.add_scalar("eval/reward", 0.1, 2, new_style=True)
    path = next(tmp_path.glob("events.*"))
    assert [(row.metric, row.value) for row in rows(path)] == [("train/loss", 0.7), ("eval/reward", 0.1)]
    assert [(row.metric, row.value) for row in rows(path, "eval/reward")] == [("eval/reward", 0.1)]


def test_a_scalar_of_tensorflow_2_is_a_tensor(tmp_path):
    writer = EventFileWriter(str(tmp_path))
    writer.add_event(Event(step=5, wall_time=2.0, summary=scalar_pb("accuracy", 0.3)))
    writer.close()
    (row,) = rows(next(tmp_path.glob("events.*")))
    assert (row.metric, row.step, row.value, row.time) == ("accuracy", 5, 0.3, 2.0)


def test_both_files_of_a_resumed_run_are_read_with_their_times(tmp_path):
    first = written(tmp_path / "runs/Jan01", {0: 0.1, 10: 0.2}, time=1.0)
    second = written(tmp_path / "runs/Jan02", {10: 0.25}, time=2.0)
    files = FORMAT.choose([first, second])
    assert [(row.step, row.value, row.time) for path in files for row in rows(path)] == [
        (0, 0.1, 1.0), (10, 0.2, 1.0), (10, 0.25, 2.0),
    ]  # fmt: skip
    own = written(tmp_path, {0: 0.5})
    assert list(FORMAT.choose([own, first, second])) == [own]


def test_two_evaluation_sets_that_share_a_tag_are_refused(tmp_path):
    """TRL with several evaluation sets writes ``eval/reward`` for each of them, and no name of the set."""
    with SummaryWriter(str(tmp_path)) as writer:
        for value in (0.1, 0.2):
            writer.add_scalar("train/epoch", 1.0, 10, walltime=2.0)
            writer.add_scalar("eval/reward", value, 10, walltime=1.0)
    with pytest.raises(UsageError, match=r"record 5: eval/reward has two values at step 10.*give its trainer_state"):
        rows(next(tmp_path.glob("events.*")))


@pytest.mark.parametrize("missing", [1, 5, 20, 40])
def test_an_incomplete_last_record_is_left_out(tmp_path, missing):
    path = written(tmp_path, {0: 0.1, 10: 0.2})
    path.write_bytes(path.read_bytes()[:-missing])
    assert [row.value for row in rows(path)] == [0.1]


def test_a_length_beyond_the_end_of_the_file_takes_no_memory(tmp_path):
    path = written(tmp_path, {0: 0.1})
    length = struct.pack("<Q", 1 << 60)
    with open(path, "ab") as file:
        file.write(length + struct.pack("<I", masked_crc32c(length)))
    assert [row.value for row in rows(path)] == [0.1]


def test_a_tensor_without_dimensions_that_has_two_values_is_refused(tmp_path):
    summary = scalar_pb("eval/reward", 0.25)
    summary.value[0].tensor.tensor_content = bytes(8)
    writer = EventFileWriter(str(tmp_path))
    writer.add_event(Event(step=10, summary=summary))
    writer.close()
    with pytest.raises(UsageError, match=r"tfevents.*, record 2 is damaged"):
        rows(next(tmp_path.glob("events.*")))


@pytest.mark.parametrize("place", [0, 8, 40])
def test_a_damaged_length_checksum_or_value_is_refused_with_the_record_s_number(tmp_path, place):
    path = written(tmp_path, {0: 0.1, 10: 0.2})
    content = bytearray(path.read_bytes())
    begin = 12 + content[0] + 4  # of the second record, after the length of the first, its checksum and those bytes
    content[begin + place] ^= 1
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"tfevents.*, record 2 is damaged"):
        rows(path)


def test_without_the_package_the_message_has_the_line_that_installs_it(tmp_path, monkeypatch):
    path = written(tmp_path, {0: 0.1})
    monkeypatch.setitem(__import__("sys").modules, "tensorboard", None)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[tensorboard\]'"):
        rows(path)
