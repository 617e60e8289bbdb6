"""Sampling from HTTP servers that hold the base model and the runs' adapters; training stays in this process."""
