"""The device that a campaign would train on, and how fast that is at best: no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from retrain.gpus import KNOWN_GPUS, Peaks, peaks_of, usable_gpu


@dataclass(frozen=True)
class Device:
    """Where the campaign would run and how fast that is at best. ``memory`` in bytes is a GPU's own (0: not known), or
    that of a CPU's machine, which decides what is copied."""

    kind: str
    name: str
    flops: float
    bandwidth: float
    memory: int = 0


UNKNOWN_GPU = Peaks(0, 150, 900)
"""Assumed of a GPU that is not in the table."""


def find_device(devices: str, peak_gflops: float = 0, peak_bandwidth_gb_s: float = 0) -> Device:
    """The device that ``[backend] devices`` would use here; peaks given in ``[backpressure]`` win over the table."""
    gpu = "" if devices == "cpu" else usable_gpu()
    if gpu:
        peaks = peaks_of(gpu) or UNKNOWN_GPU
        kind, name, flops, bandwidth, memory = "gpu", gpu, peaks.tflops * 1e12, peaks.gb_s * 1e9, 0
    else:
        import psutil

        cores, memory = os.cpu_count() or 1, int(psutil.virtual_memory().total)
        kind, name, flops, bandwidth = "cpu", f"{cores} CPU cores", cores * 60e9, 20e9
    return Device(kind, name, peak_gflops * 1e9 or flops, peak_bandwidth_gb_s * 1e9 or bandwidth, memory)


def reference_gpu() -> Device:
    """An H100, to say what a file would take there when this machine has no GPU."""
    peaks = KNOWN_GPUS["H100"][0]
    return Device("gpu", "one H100", peaks.tflops * 1e12, peaks.gb_s * 1e9)
