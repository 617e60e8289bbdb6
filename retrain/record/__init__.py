"""What a run leaves behind and shows: the metrics catalogue, the recorder, observers, trackers and consoles."""

from __future__ import annotations

from retrain.record.context import RunContext
from retrain.record.evaluation import eval_row
from retrain.record.measure import step_row
from retrain.record.observer import NullObserver, Observer
from retrain.record.recorder import RunRecorder

__all__ = ["NullObserver", "Observer", "RunContext", "RunRecorder", "eval_row", "step_row"]
