"""Property tests draw the same examples on every machine, without deadlines that a busy core would miss."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("retrain", deadline=None, database=None, derandomize=True)
settings.load_profile("retrain")
