"""Time and memory of the squeeze analysis of an adapter shaped like Qwen3-8B's at rank 128 (36 layers x 7 modules).

    python benchmarks/squeeze.py [--layers 36] [--rank 128] [--threads 2]

A random bf16 adapter is written to a temporary file, streamed from it module by module and analysed. Beside the time
stands that of the QR and small SVD calls alone on the same matrices, and of a full SVD of one layer's largest ΔW
(scaled to all modules); peak memory is that of a fresh process above its own start, after the imports.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from retrain.maths.squeeze import analyse, recommend

HIDDEN, KEYS, INNER = 4096, 1024, 12288
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KEYS),
    "self_attn.v_proj": (HIDDEN, KEYS),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}


def write_adapter(path: Path, layers: int, rank: int) -> None:
    tensors = {}
    for layer in range(layers):
        for name, (inputs, outputs) in SHAPES.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, inputs, dtype=torch.bfloat16)
            tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, rank, dtype=torch.bfloat16)
    save_file(tensors, path)


def modules(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return sorted(key.removesuffix(".lora_A.weight") for key in file.keys() if key.endswith(".lora_A.weight"))  # noqa: SIM118


def streamed(path: Path) -> None:
    """The analysis under test: one module in memory at a time."""
    spectra = {}
    with safe_open(path, "pt") as file:
        for name in modules(path):
            factors = (file.get_tensor(f"{name}.lora_{side}.weight") for side in "AB")
            spectra[name] = analyse(*factors, scale=0.25)
    recommend(spectra)


def measure(path: Path) -> None:
    """In a fresh process: seconds and peak memory of the analysis, seconds of the factorisations alone."""
    torch.linalg.svdvals(torch.eye(8))
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    streamed(path)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base
    alone = 0.0
    with safe_open(path, "pt") as file:
        for name in modules(path):
            a = file.get_tensor(f"{name}.lora_A.weight").float().T
            b = file.get_tensor(f"{name}.lora_B.weight").float()
            start = time.perf_counter()
            r_b, r_a = torch.linalg.qr(b, mode="r").R, torch.linalg.qr(a, mode="r").R
            torch.linalg.svdvals(r_b @ r_a.T)
            alone += time.perf_counter() - start
    print(seconds, alone, peak * 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--full", type=int, default=1024, help="side of the full SVD that is timed and scaled up; 0: none"
    )
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.measure:
        measure(options.measure)
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "adapter_model.safetensors"
        write_adapter(path, options.layers, options.rank)
        size = path.stat().st_size
        command = [sys.executable, __file__, "--measure", str(path), "--threads", str(options.threads)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, alone, peak = (float(word) for word in out.split())
    print(f"analysis              {seconds:8.2f} s")
    print(f"QR + small SVD alone  {alone:8.2f} s   ratio {seconds / alone:.2f} (bar 1.3)")
    print(f"adapter               {size / 2**20:8.0f} MiB")
    print(f"peak above start      {peak / 2**20:8.0f} MiB (bar {1.1 * size / 2**20:.0f})")
    if options.full:
        start = time.perf_counter()
        torch.linalg.svdvals(torch.randn(options.full, options.full))
        side = time.perf_counter() - start
        # A full SVD of m x n costs about min²·max operations.
        cost = sum(min(shape) ** 2 * max(shape) for shape in SHAPES.values()) / options.full**3
        print(f"full SVD of one layer {side * cost:8.0f} s   (from {options.full} x {options.full}: {side:.2f} s)")


if __name__ == "__main__":
    main()
