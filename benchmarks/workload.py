"""The work that every side of the speed benchmarks does: random-weight Qwen3 directories, prompts, rewards, clocks.

A step is: sample 8 completions for each of 8 prompts, then one LoRA update (rank 16 on all linear layers, α 32,
AdamW) on all of them. Work is equal by construction: the end token's id lies beyond the columns of the output layer,
so no side can sample it and every completion has exactly the asked number of tokens. Rewards alternate within a
group (0, 1, 0, 1, …), so every group has signal; they do not depend on the text.

Nothing heavy is imported at the top: peers load this file from their own environments.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RANK, ALPHA, LR = 16, 32, 1e-4
PAD = 0
VLLM_SETTINGS = {
    "TORCHDYNAMO_DISABLE": "1",  # the first request takes a minute else
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}
"""Environment variables with which vLLM runs on a CPU, in the process that imports it."""
MICRO_TOKENS = 1536
"""Tokens of a micro-batch on a CPU: the fastest of 192 to 1,536 measured at hidden 256, for the limit and for TRL."""


@dataclass(frozen=True)
class Shape:
    """A Qwen3; ``kv_heads`` are half the heads, every head 64 (128 in the large shapes) wide."""

    hidden: int
    layers: int
    vocab: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int


def small_shape(hidden: int, layers: int, vocab: int) -> Shape:
    """A Qwen3 of any width: heads of 64 where the width allows it, MLP three times as wide."""
    head_dim = 64 if hidden % 128 == 0 else hidden // 4
    heads = hidden // head_dim
    return Shape(hidden, layers, vocab, 3 * hidden, heads, max(1, heads // 2), head_dim)


SHAPES = {
    "tiny": small_shape(64, 2, 128),
    "128": small_shape(128, 3, 512),
    "256": small_shape(256, 4, 512),
    "512": small_shape(512, 8, 8192),
    "smollm2": Shape(576, 30, 49_152, 1536, 9, 3, 64),  # the numbers of SmolLM2-135M
    "1.7b": Shape(2048, 28, 151_936, 6144, 16, 8, 128),
    "8b": Shape(4096, 36, 151_936, 12_288, 32, 8, 128),
}


@dataclass(frozen=True)
class Setting:
    """One row of the table: a shape and how much is sampled per step."""

    shape: str
    new_tokens: int
    prompts: int = 8
    samples: int = 8
    prompt_tokens: int = 32

    @property
    def name(self) -> str:
        return f"{self.shape}x{self.new_tokens}"

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.new_tokens

    @classmethod
    def parse(cls, name: str) -> Setting:
        """``256x64``: shape 256, 64 new tokens."""
        shape, _, tokens = name.rpartition("x")
        if shape not in SHAPES or not tokens.isdigit():
            raise SystemExit(f"no such setting {name!r}: SHAPExTOKENS with a shape of {', '.join(SHAPES)}")
        return cls(shape, int(tokens))


def side_parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that every side of ``step.py`` is started with (``sides.Side``)."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--serve", metavar="SETTING", required=True)
    made.add_argument("--models", type=Path, required=True)
    made.add_argument("--threads", type=int, required=True)
    made.add_argument("--device", default="cpu")
    made.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    return made


def prompt_ids(setting: Setting, count: int | None = None) -> list[list[int]]:
    """Token ids of ``count`` (a step's worth) prompts: fixed, of one length, within every shape's vocabulary."""
    draw, vocab = random.Random(0), SHAPES[setting.shape].vocab
    return [[draw.randrange(1, vocab) for _ in range(setting.prompt_tokens)] for _ in range(count or setting.prompts)]


def prompt_texts(setting: Setting, count: int | None = None) -> list[str]:
    """The same prompts as text: the tokenizer's words are ``t<id>``."""
    return [" ".join(f"t{token}" for token in ids) for ids in prompt_ids(setting, count)]


def rewards(count: int) -> list[float]:
    """Rewards of so many completions: those of a group stand together and alternate."""
    return [float(k % 2) for k in range(count)]


def advantages(setting: Setting) -> list[float]:
    """GRPO's: reward minus the group's mean over its standard deviation (half of the rewards are 1)."""
    return [1.0 if reward else -1.0 for reward in rewards(setting.rows)]


def model_directory(root: Path, shape_name: str) -> Path:
    """The model directory of a shape under ``root``, made on first use (needs transformers)."""
    directory = root / f"qwen3-{shape_name}"
    if (directory / "tokenizer.json").is_file():
        return directory
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns of the end token beyond the vocabulary
    shape = SHAPES[shape_name]
    words = {"<pad>": PAD} | {f"t{i}": i for i in range(1, shape.vocab)} | {"<end>": shape.vocab}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=4096,
        eos_token_id=shape.vocab,
        bos_token_id=None,
        pad_token_id=PAD,
        tie_word_embeddings=False,
    )
    model: Any = Qwen3ForCausalLM(config)
    if shape.hidden >= 2048:
        model.to(torch.bfloat16)
    model.save_pretrained(directory)
    logging.set_verbosity(verbosity)
    fast.save_pretrained(directory)
    return directory


@dataclass
class Measured:
    """One step of one side: wall-clock and processor seconds, tokens really sampled and trained on, peak memory."""

    sampling_s: float
    update_s: float
    sampling_cpu_s: float
    update_cpu_s: float
    tokens: int
    peak_mib: float

    def json(self) -> str:
        return json.dumps(asdict(self))


def peak_mib() -> float:
    """Highest resident memory of this process so far, MiB; of its GPU allocator where that is in use."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


class Laps:
    """Wall-clock and processor seconds between laps; waits for the GPU where one is used."""

    def __init__(self) -> None:
        self.lap()

    def lap(self) -> tuple[float, float]:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter(), time.process_time()
        last = getattr(self, "last", now)
        self.last = now
        return now[0] - last[0], now[1] - last[1]


def measure(sample: Callable[[], Any], update: Callable[[Any], Any], count: Callable[[Any], int]) -> Measured:
    """One step of a side whose two halves are plain calls."""
    laps = Laps()
    sampled = sample()
    sampling = laps.lap()
    update(sampled)
    updating = laps.lap()
    return Measured(sampling[0], updating[0], sampling[1], updating[1], count(sampled), peak_mib())


def serve(step: Callable[[], Measured], **facts: float) -> None:
    """Say what is known beforehand, then answer each line of stdin with one measured step; JSON on the real stdout.

    A side waits between its steps, so that only one of them works at a time.
    """
    answer(json.dumps(facts))
    for _ in sys.stdin:
        answer(step().json())


REAL_STDOUT = sys.stdout


def answer(line: str) -> None:
    """Tell ``step.py``; everything else that a library prints belongs to stderr."""
    print(f"@@{line}", file=REAL_STDOUT, flush=True)


def faster_dtype(hidden: int, device: str) -> str:
    """``bfloat16`` or ``float32``, whichever multiplies this shape's matrices faster here (best of five)."""
    import torch

    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(1024, hidden, dtype=dtype, device=device)
        weight = torch.ones(3 * hidden, hidden, dtype=dtype, device=device)
        laps, times = Laps(), []
        for _ in range(6):
            torch.mm(x, weight.t())
            times.append(laps.lap()[0])
        seconds[str(dtype).removeprefix("torch.")] = min(times[1:])
    return min(seconds, key=seconds.__getitem__)


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
