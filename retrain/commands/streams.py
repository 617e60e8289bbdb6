"""Standard output and error of a command that outlives whoever reads them: a closed terminal, a pipe's dead end."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

GONE = (errno.EIO, errno.EPIPE)
"""What writing to a terminal that hung up gives, and to a pipe that nobody reads any more."""


class LastingStream:
    """A text stream whose reader may go away: what is written from then on goes nowhere, and the work goes on."""

    def __init__(self, stream: IO[str]):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As of a text stream; raises OSError when it fails for another reason than a reader that is gone."""
        with self._without_reader():
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._without_reader():
            self._stream.flush()

    @contextmanager
    def _without_reader(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in GONE:
                raise
            # The descriptor itself, so that what is still buffered has somewhere to go when the process ends.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            with suppress(OSError, ValueError):
                os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Inside, nothing that is written to standard output or error fails because its reader is gone."""
    before = sys.stdout, sys.stderr
    lasting = LastingStream(sys.stdout), LastingStream(sys.stderr)
    sys.stdout, sys.stderr = cast("IO[str]", lasting[0]), cast("IO[str]", lasting[1])
    try:
        yield
    finally:
        for stream in lasting:
            stream.flush()
        sys.stdout, sys.stderr = before
