import json
from pathlib import Path

import numpy as np
import pytest

from retrain.errors import StorageError
from retrain.files import append_jsonl, truncate_jsonl
from retrain.records.columns import BLOCK, Columns, ColumnWriter


def row(number: int) -> dict:
    """A row with every kind of value; some keys come late, one is a text at times."""
    values = {"step": number, "loss": 0.1 * number, "skipped": number % 3 == 0, "condition": "a+b"}
    values["kl"] = None if number % 5 else 1e-9 * number
    values["mixed"] = "x" if number == 70 else 1.5
    if number >= 30:
        values["late"] = -float(number)
    if number >= 2 * BLOCK + 5:
        values["later"] = 1e300
    return values


def written(folder: Path, count: int, each: int = 1) -> ColumnWriter:
    """Write rows as a run does, ``each`` at a time, and the columns beside them."""
    writer = ColumnWriter(folder / "metrics.jsonl", folder / "metrics.f32")
    for begin in range(0, count, each):
        append_jsonl(folder / "metrics.jsonl", [row(number) for number in range(begin, min(count, begin + each))])
        writer.follow()
    return writer


def read(folder: Path) -> Columns:
    columns = Columns(folder / "metrics.jsonl")
    columns.refresh()
    return columns


def assert_same(columns: Columns, folder: Path) -> None:
    """Compare with every number of the lines, as float32."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(columns) == len(rows)
    for key in {key for each in rows for key in each if key not in ("condition", "mixed")}:
        values = [np.nan if each.get(key) is None else float(each[key]) for each in rows]
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(columns.column(key), np.array(values).astype(np.float32), key)


@pytest.mark.parametrize(("count", "each"), [(1, 1), (BLOCK, 1), (3 * BLOCK + 17, 50)])
def test_columns_hold_what_the_lines_hold(tmp_path, count, each):
    written(tmp_path, count, each)
    columns = read(tmp_path)
    assert_same(columns, tmp_path)
    assert columns.uncovered == count % BLOCK  # the rest was read from the blocks
    assert "condition" not in columns.keys
    if len(columns) > 2 * BLOCK:  # row 70 has a text, which hides the numbers of its block alone
        mixed = columns.column("mixed")
        assert np.isnan(mixed[BLOCK : 2 * BLOCK]).all()
        assert (mixed[:BLOCK] == 1.5).all()
        assert (mixed[2 * BLOCK :] == 1.5).all()
    assert np.isnan(columns.column("condition")).all()
    assert np.isnan(columns.column("nowhere")).all()


@pytest.mark.parametrize("kept", [0, BLOCK, BLOCK + 30])
def test_a_resume_continues_the_file_as_if_it_had_never_stopped(tmp_path, kept):
    (whole := tmp_path / "whole").mkdir()
    (cut := tmp_path / "cut").mkdir()
    written(whole, 3 * BLOCK + 5)
    writer, reader = written(cut, 2 * BLOCK + 20), read(cut)
    truncate_jsonl(cut / "metrics.jsonl", kept)
    assert reader.refresh()  # rows were cut: what was read is told to be gone
    for _ in range(2):  # blocks of rows that were cut do not come back either
        assert_same(reader, cut)
        assert not reader.refresh()
    writer.forget()
    for number in range(kept, 3 * BLOCK + 5):
        append_jsonl(cut / "metrics.jsonl", [row(number)])
        writer.follow()
        assert not reader.refresh()
        assert (len(reader), reader.column("step")[-1]) == (number + 1, number)
    assert (cut / "metrics.f32").read_bytes() == (whole / "metrics.f32").read_bytes()
    assert_same(reader, cut)
    assert_same(read(cut), cut)


def test_a_torn_or_foreign_cache_is_not_believed_and_then_mended(tmp_path):
    written(tmp_path, 2 * BLOCK + 9)
    whole = (tmp_path / "metrics.f32").read_bytes()
    for size in [0, 31, len(whole) // 2, len(whole) - 1]:
        (tmp_path / "metrics.f32").write_bytes(whole[:size])
        assert_same(read(tmp_path), tmp_path)
    (tmp_path / "metrics.f32").write_bytes(whole + b"rubbish" * 100)
    assert_same(read(tmp_path), tmp_path)
    assert ColumnWriter(tmp_path / "metrics.jsonl", tmp_path / "metrics.f32").follow() == [], "all blocks are there"
    assert (tmp_path / "metrics.f32").read_bytes() == whole
    # A release that knows nothing of columns continued the lines after a cut:
    other = [row(number) | {"loss": -7.0} for number in range(2 * BLOCK + 3)]
    (tmp_path / "metrics.jsonl").unlink()
    append_jsonl(tmp_path / "metrics.jsonl", other)
    assert_same(read(tmp_path), tmp_path)
    writer = ColumnWriter(tmp_path / "metrics.jsonl", tmp_path / "metrics.f32")
    assert writer.follow() == [tmp_path / "metrics.f32"]
    assert read(tmp_path).uncovered == 3
    # The same while a writer is at it:
    truncate_jsonl(tmp_path / "metrics.jsonl", BLOCK + 3)
    append_jsonl(tmp_path / "metrics.jsonl", [row(number) for number in range(2 * BLOCK)])
    writer.follow()
    assert read(tmp_path).uncovered == 3
    assert_same(read(tmp_path), tmp_path)


def test_a_full_disk_is_told(tmp_path):
    append_jsonl(tmp_path / "metrics.jsonl", [row(number) for number in range(BLOCK)])
    with pytest.raises(StorageError, match="full"):
        ColumnWriter(tmp_path / "metrics.jsonl", Path("/dev/full")).follow()
