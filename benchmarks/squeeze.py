"""Time and memory of the squeeze analysis of an adapter shaped like Qwen3-8B's at rank 128 (36 layers x 7 modules).

    python benchmarks/squeeze.py [--layers 36] [--rank 128] [--threads 2]

A random bf16 adapter is written to a temporary file and analysed as ``retrain squeeze`` does, module by module. Beside
the time stands that of the QR and small SVD calls alone on the same matrices, and of a full SVD of the seven ΔW of
one layer (scaled from a smaller square). Each part runs in a process of its own; peak memory (``ru_maxrss``, pages of
the mapped file included) is that above the process's start, after the imports.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from retrain.adapters.squeeze import analyse_adapter, compress_adapter
from retrain.config.evaluation import Squeeze
from retrain.files import write_json
from retrain.policy.adapter_io import AdapterFile

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


def write_adapter(directory: Path, layers: int, rank: int) -> None:
    directory.mkdir()
    tensors = {}
    for layer in range(layers):
        for name, (inputs, outputs) in SHAPES.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, inputs, dtype=torch.bfloat16)
            tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, rank, dtype=torch.bfloat16)
    save_file(tensors, directory / "adapter_model.safetensors")
    write_json(directory / "adapter_config.json", {"peft_type": "LORA", "r": rank, "lora_alpha": 32.0})


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def clocks() -> tuple[float, float]:
    """Wall-clock and processor seconds."""
    return time.perf_counter(), time.process_time()


def warm_up() -> None:
    """Load LAPACK and start its threads, which the first call pays for."""
    torch.linalg.svdvals(torch.linalg.qr(torch.randn(256, 64), mode="r").R)


def measure(directory: Path, compress_to: int) -> None:
    """In a fresh process: time and peak memory of the analysis as ``retrain squeeze`` makes it, or of compression."""
    warm_up()
    base, begin = peak_rss(), clocks()
    if compress_to:
        compress_adapter(directory, compress_to, directory.parent / "compressed")
    else:
        analyse_adapter(directory, Squeeze())
    end = clocks()
    print(json.dumps({"wall": end[0] - begin[0], "cpu": end[1] - begin[1], "peak": peak_rss() - base}))


def factorise_alone(directory: Path) -> dict[str, float]:
    """Time of the QR and small SVD calls on the same matrices, everything else left out of the clock."""
    warm_up()
    total = [0.0, 0.0]
    with AdapterFile(directory) as file:
        for name in file.modules:
            a, b = (tensor.float() for tensor in file.factors(name))
            begin = clocks()
            r_b, r_a = torch.linalg.qr(b, mode="r").R, torch.linalg.qr(a.T, mode="r").R
            torch.linalg.svdvals(r_b @ r_a.T)
            total = [spent + now - then for spent, now, then in zip(total, clocks(), begin, strict=True)]
    return {"wall": total[0], "cpu": total[1]}


def in_fresh_process(*arguments: str) -> dict[str, float]:
    out = subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True).stdout
    return json.loads(out.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--full", type=int, default=1024, help="side of the full SVD that is timed and scaled up; 0: none"
    )
    parser.add_argument("--compress-to", type=int, default=16, help="rank of the compression that is timed; 0: none")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.measure:
        measure(options.measure, options.compress_to)
        return
    if options.alone:
        print(json.dumps(factorise_alone(options.alone)))
        return
    threads = ("--threads", str(options.threads))
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "adapter"
        write_adapter(directory, options.layers, options.rank)
        size = (directory / "adapter_model.safetensors").stat().st_size
        ours = in_fresh_process("--measure", str(directory), "--compress-to", "0", *threads)
        alone = in_fresh_process("--alone", str(directory), *threads)
        small = None
        if options.compress_to:
            small = in_fresh_process("--measure", str(directory), "--compress-to", str(options.compress_to), *threads)
    bar = f"(bar {1.1 * size / 2**20:.0f} MiB, the adapter and a tenth)"
    print(
        f"adapter               {size / 2**20:8.0f} MiB, {options.layers * len(SHAPES)} modules of rank {options.rank}"
    )
    print(f"analysis              {ours['wall']:8.2f} s   {ours['cpu']:8.2f} s of processor time")
    print(f"QR + small SVD alone  {alone['wall']:8.2f} s   {alone['cpu']:8.2f} s of processor time")
    print(
        f"ratio                 {ours['wall'] / alone['wall']:8.2f}     {ours['cpu'] / alone['cpu']:8.2f}   (bar 1.3)"
    )
    print(f"peak above start      {ours['peak'] / 2**20:8.0f} MiB {bar}")
    if small:
        told = f"{small['cpu']:8.2f} s of processor time, peak {small['peak'] / 2**20:.0f} MiB {bar}"
        print(f"compression to {options.compress_to:<7}{small['wall']:8.2f} s   {told}")
    if options.full:
        begin = time.perf_counter()
        torch.linalg.svdvals(torch.randn(options.full, options.full))
        side = time.perf_counter() - begin
        # A full SVD of m x n costs about min²·max operations.
        cost = sum(min(shape) ** 2 * max(shape) for shape in SHAPES.values()) / options.full**3
        print(f"full SVD of one layer {side * cost:8.0f} s   (from {options.full} x {options.full}: {side:.2f} s)")


if __name__ == "__main__":
    main()
