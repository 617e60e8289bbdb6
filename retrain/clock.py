"""Time stamps whose differences are durations, whatever happens to the machine's clock."""

import time

_BEGIN = time.time() - time.monotonic()


def timestamp() -> float:
    """Return seconds since the epoch: the wall clock at the start of the process, continued by the monotonic clock."""
    return _BEGIN + time.monotonic()
