"""The device that a campaign would train on, and how fast that is at best: no torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from retrain.errors import UsageError
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


@dataclass(frozen=True)
class Fleet:
    """So many devices of one kind."""

    count: int
    device: Device

    @property
    def words(self) -> str:
        """As in "64 × H100-80G"."""
        return f"{self.count:,} × {self.device.name}" if self.count > 1 else f"one {self.device.name}"


FLEET = re.compile(r"(?:(?P<count>\d+)\s*[x×]\s*)?(?P<kind>\S+)", re.IGNORECASE)
NAMED = re.compile(r"(?P<name>[a-z0-9]+)(?:-(?P<memory>\d+)GB?)?", re.IGNORECASE)
FIGURES = re.compile(
    r"(?P<memory>\d+(?:\.\d+)?)GB?@(?P<tflops>\d+(?:\.\d+)?)TF,(?P<speed>\d+(?:\.\d+)?)(?P<unit>[TG])B/s", re.IGNORECASE
)
FIGURES_EXAMPLE = "8x80G@990TF,3.35TB/s"


def parse_fleet(text: str) -> Fleet:
    """The devices that ``--devices`` names: 64xH100-80G, 2xL4, A100, or with figures of one's own (memory, dense bf16
    products, bandwidth) 8x80G@990TF,3.35TB/s. Raises UsageError."""
    said = FLEET.fullmatch(text.strip())
    count = int(said["count"] or 1) if said else 0
    if said is None or count < 1:
        raise UsageError(
            f"--devices {text}: not a number of GPUs and their name; type --devices 64xH100-80G, or give figures: "
            f"--devices {FIGURES_EXAMPLE}"
        )
    kind = said["kind"]
    figures = FIGURES.fullmatch(kind)
    if figures is not None:
        speed = float(figures["speed"]) * (1000 if figures["unit"].upper() == "T" else 1)
        name, peaks = kind, Peaks(float(figures["memory"]), float(figures["tflops"]), speed)
        if not min(peaks.memory_gb, peaks.tflops, peaks.gb_s):
            raise UsageError(f"--devices {text}: none of the figures may be 0; type --devices {FIGURES_EXAMPLE}")
    else:
        name, peaks = _named(text, kind, said["count"])
    return Fleet(count, Device("gpu", name, peaks.tflops * 1e12, peaks.gb_s * 1e9, memory=int(peaks.memory_gb * 10**9)))


def _named(text: str, kind: str, count: str | None) -> tuple[str, Peaks]:
    """Name and figures of a GPU of the table. Raises UsageError."""
    named = NAMED.fullmatch(kind)
    variants = KNOWN_GPUS.get(named["name"].upper()) if named else None
    if named is None or variants is None:
        raise UsageError(
            f"--devices {text}: {kind} is none of the GPUs whose figures are known ({', '.join(KNOWN_GPUS)}); give its "
            f"memory, dense bf16 products and bandwidth, as in --devices {FIGURES_EXAMPLE}"
        )
    name = named["name"].upper()
    memories = {f"{each.memory_gb:g}": each for each in variants}
    asked = named["memory"] or next(iter(memories))
    if asked not in memories:
        first = f"{count}x" if count else ""
        raise UsageError(
            f"--devices {text}: an {name} has {' or '.join(memories)} GB; type --devices {first}{name}-"
            f"{next(iter(memories))}G"
        )
    return f"{name}-{asked}G", memories[asked]
