"""Engines sample completions: in this process with the weights that are being trained, or with servers."""
