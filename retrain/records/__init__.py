"""What a run leaves behind and shows: the metrics catalogue, the recorder, observers, trackers and consoles."""
