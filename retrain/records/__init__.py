"""Records of runs: the metrics catalogue, the recorder, observers, trackers and consoles."""
