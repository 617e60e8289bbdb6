"""Plan a vLLM that retrain starts: whether it fits, how it shares a GPU with the trainer, and its command.

The campaign's planning calls it for ``[inference] engine = "auto"`` and ``launch = "auto"``. Everything follows from
the GPUs' total memory and the sizes of the runs, so that a plan repeats. Neither torch nor vLLM is imported.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from retrain.config import Config
from retrain.device import Gpu, cpu_build, nvidia_gpus
from retrain.errors import RunFailed
from retrain.extras import install_line
from retrain.models.layers import LEAST_ROWS

GIB = 2**30
USABLE = 0.95  # Share of a GPU's memory that is planned; CUDA's own and fragmentation take the rest
OWN_CARD = 0.9  # Share of the memory that a vLLM on a GPU of its own may use
# Memory of a vLLM beside weights, adapters and KV cache: buffers and CUDA graphs, and the CUDA context, which both stay
# while it sleeps; and activations. Assumed; vLLM 0.26 took 3.1 GiB in all at the shapes of Qwen3-1.7B on an H200
RESERVE, CONTEXT, ACTIVATIONS = 2 * GIB, int(0.7 * GIB), int(1.2 * GIB)
HOST_SHARE = 0.5  # Largest share of the machine's memory for the weights of a sleeping vLLM
UPDATE_SEQUENCES = 2  # Sequences whose update must fit while the weights of vLLM stay on the GPU
MOST_ADAPTERS = 16  # Adapters in one batch of vLLM; more make its kernels slow
VERSIONS = ((0, 31), (0, 34))  # First version of vLLM that was tried, and the first that was not
ASK_VERSION = "import importlib.metadata as m; print(m.version('vllm'))"
ASK_SECONDS = 30.0
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # Ranks that vLLM takes; SGLang takes any
VARIABLES = "HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1"


@dataclass(frozen=True)
class Machine:
    """The GPUs, memory and vLLM of this machine."""

    gpus: dict[str, int]  # Bytes of each GPU that this process sees, by its name in CUDA_VISIBLE_DEVICES, in order
    host: int  # Bytes of the machine's main memory
    vllm: str  # Version of the installed vLLM, or ""


@dataclass(frozen=True)
class MemoryNeeds:
    """Memory that a cohort needs in the trainer and in vLLM."""

    base: int  # Bytes of the base's weights, of which the trainer and vLLM have one copy each
    lanes: int  # Bytes of the trainer's adapters and optimizers
    slots: int  # Bytes of the adapters in vLLM
    cache: int  # Bytes of the KV cache per token
    kept: int  # Bytes per token that a forward pass keeps for its backward pass
    tokens: int  # Tokens of the longest sequence, prompt included
    rows: int  # Most sequences at once


@dataclass(frozen=True)
class Division:
    """Share of one GPU for vLLM. ``sleep``: what it releases during updates, "kv" or "weights". ``share``: of the
    GPU's memory, while it is awake. ``rows``: sequences of ``tokens`` tokens whose KV cache fits."""

    sleep: str
    kv_bytes: int
    share: float
    rows: int
    tokens: int


class NoVllm(Exception):
    """Why vLLM does not sample here: it does not fit beside the trainer, or is slower. The message has the numbers."""


def server_rank(rank: int) -> int:
    """Return the smallest rank from ``rank`` on that servers accept. Raises RunFailed above the largest."""
    for accepted in RANKS:
        if accepted >= rank:
            return accepted
    raise RunFailed(f"servers take adapters of rank {RANKS[-1]} at most, and this one has rank {rank}")


def machine_of(config: Config) -> Machine:
    """Return what this machine offers to the first process of a configuration; no GPU with a CPU-only torch."""
    import psutil

    gpus = {} if config.backend.devices == "cpu" or cpu_build() else visible_memory(nvidia_gpus())
    version = vllm_version(config.inference.python) if gpus else ""
    return Machine(gpus, int(psutil.virtual_memory().total), version)


def visible_memory(gpus: Sequence[Gpu]) -> dict[str, int]:
    """Return the memory, in bytes, of each GPU that this process sees, by its name in CUDA_VISIBLE_DEVICES; without
    parts of a GPU (MIG), whose size is not listed."""
    given = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = given or [str(index) for index in range(len(gpus))]
    # A name that is no index (GPU-6ba7b8…) is the next of the list: GPUs of one machine are mostly alike.
    indices = [int(name) if name.isdigit() else position for position, name in enumerate(names)]
    amounts = [re.fullmatch(r"(\d+) MiB", gpu.memory) for gpu in gpus]
    pairs = [(name, index) for name, index in zip(names, indices, strict=True) if not name.startswith("MIG-")]
    shown = {name: amounts[index] for name, index in pairs if index < len(amounts)}
    return {name: int(amount[1]) << 20 for name, amount in shown.items() if amount}


def vllm_version(python: str | None) -> str:
    """Return the version of vLLM in the environment of this interpreter, or of ``python``; "" if it is not there."""
    if python is None:
        try:
            return metadata.version("vllm")
        except metadata.PackageNotFoundError:
            return ""
    try:
        asked = subprocess.run(
            [python, "-c", ASK_VERSION], capture_output=True, timeout=ASK_SECONDS, check=True, text=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout.strip()


def absence(config: Config) -> str:
    """Return the message for a missing vLLM, with what to type."""
    if python := config.inference.python:
        return f"vLLM is not installed for [inference] python = {python!r} ({python} -m pip install vllm)"
    return f"vLLM is not installed ({install_line('vllm')})"


def version_note(version: str) -> str:
    """Return a warning for a version of vLLM that was not tried with this release; "" for others."""
    numbers = [int(part) if part.isdigit() else 0 for part in version.split(".")[:2]]
    first, end = VERSIONS
    if first <= tuple(numbers) < end:
        return ""
    return f"vLLM {version} was not tried with this retrain: versions from {_text(first)} to before {_text(end)} were"


def _text(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def divide(total: int, host: int, sizes: MemoryNeeds, sleep: str | bool = False) -> Division:
    """Divide a GPU of ``total`` bytes between the trainer and vLLM, in a machine with ``host`` bytes of memory.

    With ``sleep`` False, both bases stay on the GPU and only the KV cache is released during updates, if that leaves
    an update of UPDATE_SEQUENCES sequences; else the weights of vLLM go to the host's memory too. Other values fix what
    is released. Raises NoVllm.
    """
    trainer = sizes.base + sizes.lanes
    awake = sizes.base + sizes.slots + RESERVE + CONTEXT
    usable, row = int(USABLE * total), sizes.cache * sizes.tokens
    rows = min(max(0, usable - trainer - awake - ACTIVATIONS) // row, sizes.rows)
    if rows < min(LEAST_ROWS, sizes.rows):
        raise NoVllm(
            f"{rows} sequences of {sizes.tokens:,} tokens would fit beside two copies of the model on a GPU of "
            f"{total / GIB:.0f} GiB (each {sizes.base / GIB:.1f} GiB; trained adapters {sizes.lanes / GIB:.1f} GiB), "
            f"fewer than {LEAST_ROWS}"
        )
    share = (awake + ACTIVATIONS + rows * row) / total
    update = UPDATE_SEQUENCES * sizes.tokens * sizes.kept
    room = usable - trainer
    if room - awake >= update and sleep in (False, "kv"):
        return Division("kv", rows * row, share, rows, sizes.tokens)
    if room - asleep_bytes("weights", 0) >= update and sizes.base <= HOST_SHARE * host and sleep != "kv":
        return Division("weights", rows * row, share, rows, sizes.tokens)
    left = room - (awake if sleep == "kv" else asleep_bytes("weights", 0))
    raise NoVllm(
        f"an update of {UPDATE_SEQUENCES} sequences of {sizes.tokens:,} tokens takes {update / GIB:.1f} GiB, and "
        f"{max(0, left) / GIB:.1f} GiB of {total / GIB:.0f} GiB are left beside a sleeping vLLM, whose weights take "
        f"{sizes.base / GIB:.1f} GiB"
    )


def asleep_bytes(sleep: str, weights: int) -> int:
    """Return the bytes of the GPU that a vLLM keeps during updates, by its ``sleep`` and the bytes of its weights."""
    return RESERVE + CONTEXT + (weights if sleep == "kv" else 0)


def adapter_slots(launch: str | None) -> int:
    """Return how many adapters a command of vLLM keeps on the GPU."""
    given = re.findall(r"--max-loras[ =](\d+)", launch or "")
    return int(given[-1]) if given else 1


def cards_needed(total: int, base: int, others: int) -> int:
    """Return how many of ``others`` GPUs of ``total`` bytes vLLM takes for itself: the smallest power of two that holds
    the base and a KV cache of half its size. Raises NoVllm."""
    count = 1
    while count <= others:
        if 1.5 * base / count + RESERVE + CONTEXT + ACTIVATIONS <= OWN_CARD * total:
            return count
        count *= 2
    raise NoVllm(f"the model takes {base / GIB:.1f} GiB, and vLLM would have {others} × {total / GIB:.0f} GiB")


def is_composed(launch: str | None) -> bool:
    """Return whether ``command`` wrote this command."""
    return launch is not None and launch.startswith(f"env {VARIABLES}")


def command(config: Config, rank: int, lanes: int, versions: int, division: Division | None, cards: int = 1) -> str:
    """Return the command of a vLLM for ``lanes`` runs with adapters of ``rank``, each with ``versions`` live versions.
    ``division``: its part of the trainer's GPU; None if it has ``cards`` GPUs of its own. The command contains the
    placeholder ``{model}``."""
    settings, bfloat16 = config.inference, config.inference.dtype in ("auto", "bfloat16")
    batch_invariant = " VLLM_BATCH_INVARIANT=1" if config.training.deterministic else ""
    parts = [
        f"env {VARIABLES}{batch_invariant} {shlex.quote(settings.python or sys.executable)}",
        "-m vllm.entrypoints.cli.main serve {model}",
        f"--served-model-name {shlex.quote(config.model.model)} --dtype {'bfloat16' if bfloat16 else 'float32'}",
        # The longest that its KV cache can hold, at most the model's own
        f"--max-model-len auto --max-num-seqs {settings.max_in_flight}",
        f"--enable-lora --max-loras {min(lanes, MOST_ADAPTERS)} --max-lora-rank {rank}",
        # An adapter that is pushed out of this cache is read from its files again, which ends vLLM if they are gone.
        f"--max-cpu-loras {lanes * versions + 2}",
        "--logprobs-mode processed_logprobs --generation-config vllm",
    ]
    if bfloat16:
        parts.append("""--hf-overrides '{"head_dtype": "float32"}'""")  # the trainer's logits are in float32, too
    if division is not None:
        parts.append(f"--enable-sleep-mode --kv-cache-memory-bytes {division.kv_bytes}")
        parts.append(f"--gpu-memory-utilization {division.share:.3f}")
    elif cards > 1:
        parts.append(f"--tensor-parallel-size {cards}")
    if config.model.trust_remote_code:
        parts.append("--trust-remote-code")
    return " ".join([*parts, *([settings.launch_options] if settings.launch_options else [])])
