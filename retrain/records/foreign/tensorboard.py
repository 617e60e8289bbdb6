"""Event files of TensorBoard: the scalars that torch, tensorboardX and TensorFlow write.

A file is a sequence of records: the length (uint64) and its checksum, an ``Event`` as protocol buffer and its checksum.
TensorBoard's own loader ends without an error at a damaged record, so the records are divided here. A scalar is a
float32 or, from TensorFlow 2, a tensor without dimensions. A resumed run writes a further file, and some of its steps
may be in the older file too.
"""

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from retrain.errors import UsageError
from retrain.extras import is_installed, missing
from retrain.records.foreign.json_files import numbers
from retrain.records.foreign.table import Format, ReadRequest, ResultRow

FILES = "events.out.tfevents.*"
HEADER, CHECKSUM = struct.Struct("<QI"), struct.Struct("<I")


class _NoScalar(Exception):
    """A tensor without dimensions that does not hold one value of its type."""


def _rows(path: Path, request: ReadRequest) -> Iterator[ResultRow]:
    """Yield one row per scalar. Raises UsageError for two values of one step in the same file: a Trainer with several
    evaluation sets writes ``eval/reward`` of each, and the last must not replace them."""
    if not is_installed("tensorboard"):
        raise missing(f"reading {path}", "tensorboard")
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto import event_pb2
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    written = dict[tuple[str, int], float | None]()
    with open(path, "rb") as file:
        for number, content, checksum in _records(file, path, masked_crc32c):
            try:
                event = event_pb2.Event.FromString(content)  # pyright: ignore[reportAttributeAccessIssue] (made at import)
                scalars = list(_scalars(event, request))
            except (DecodeError, _NoScalar) as error:
                raise _damaged(path, number) from error
            if scalars and checksum != masked_crc32c(content):  # the checksum of a picture would take seconds
                raise _damaged(path, number)
            for metric, value in numbers(scalars, request, str(path)):
                if written.setdefault((metric, event.step), value) != value:
                    raise UsageError(
                        f"{path}, record {number}: {metric} has two values at step {event.step}. If a Trainer with "
                        "several evaluation sets wrote them, give its trainer_state.json instead"
                    )
                yield ResultRow(metric, value, event.step, time=event.wall_time, line=number)


def _records(file: BinaryIO, path: Path, crc: Callable[[bytes], int]) -> Iterator[tuple[int, bytes, int]]:
    """Yield (number, content, checksum). An incomplete last record is left out: the file is being written, or its
    writer was killed."""
    number, size = 0, os.fstat(file.fileno()).st_size
    while len(header := file.read(HEADER.size)) == HEADER.size:
        number += 1
        length, checksum = HEADER.unpack(header)
        if checksum != crc(header[:8]):
            raise _damaged(path, number)
        if length + CHECKSUM.size > size - file.tell():
            return
        yield number, file.read(length), CHECKSUM.unpack(file.read(CHECKSUM.size))[0]


def _scalars(event: Any, request: ReadRequest) -> Iterator[tuple[str, float]]:
    """Yield (tag, value). The value of a float32 is the shortest decimal that rounds to it: 0.3, not 0.30000001."""
    from tensorboard.util.tensor_util import make_ndarray

    for value in event.summary.value:
        kind = value.WhichOneof("value")
        if not request.needs(value.tag):
            continue
        if kind == "simple_value":
            yield value.tag, float(str(np.float32(value.simple_value)))
        elif kind == "tensor" and not value.tensor.tensor_shape.dim:
            try:
                content = make_ndarray(value.tensor)
            except (TypeError, ValueError, OverflowError) as error:  # unknown type, or not one value of that type
                raise _NoScalar from error
            if content.dtype.kind in "fiu":
                yield value.tag, float(str(content))


def _damaged(path: Path, number: int) -> UsageError:
    return UsageError(f"{path}, record {number} is damaged: restore the file, or give a path that excludes it")


def _choose(files: Sequence[Path]) -> Sequence[Path]:
    """Return the files of the directory itself; if it has none, those of the Trainer's folders below ``runs``."""
    depth = min((len(path.parts) for path in files), default=0)
    return [path for path in files if len(path.parts) == depth]


FORMAT = Format(
    tool="TensorBoard",
    patterns=(FILES, f"runs/*/{FILES}"),
    recognises=lambda path: path.match(FILES),
    rows=_rows,
    choose=_choose,
    latest_counts=True,
)
