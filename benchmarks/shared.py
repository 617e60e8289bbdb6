"""What the benchmarks share: random-weight models and their work, sides in processes of their own, clocks, tables.

A step is: sample 8 completions for each of 8 prompts, then one LoRA update (rank 16 on all linear layers, α 32,
AdamW) on all of them. Work is equal by construction: the end token's id lies beyond the columns of the output layer,
so no side can sample it and every completion has exactly the stated number of tokens. Rewards alternate within a
group (0, 1, 0, 1, …), so every group has signal; they do not depend on the text.

Nothing heavy is imported at the top, because TRL and vLLM load this file in environments of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
RANK, ALPHA, LR = 16, 32, 1e-4
PAD = 0
MICRO_TOKENS = 1536
"""Tokens of a micro-batch on a CPU: the fastest of 192 to 1,536 measured at hidden 256, for the limit and for TRL."""


# -- work -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3."""

    hidden: int
    layers: int
    vocab: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int


def small_shape(hidden: int, layers: int, vocab: int) -> Shape:
    """Return a Qwen3 with heads of 64 where the width allows it and an MLP three times as wide."""
    head_dim = 64 if hidden % 128 == 0 else hidden // 4
    heads = hidden // head_dim
    return Shape(hidden, layers, vocab, 3 * hidden, heads, max(1, heads // 2), head_dim)


SHAPES = {
    "tiny": small_shape(64, 2, 128),
    "128": small_shape(128, 3, 512),
    "256": small_shape(256, 4, 512),
    "512": small_shape(512, 8, 8192),
    "smollm2": Shape(576, 30, 49_152, 1536, 9, 3, 64),  # the sizes of SmolLM2-135M
    "1.7b": Shape(2048, 28, 151_936, 6144, 16, 8, 128),
    "8b": Shape(4096, 36, 151_936, 12_288, 32, 8, 128),
}


@dataclass(frozen=True)
class Setting:
    """One row of a table: a shape and how much is sampled per step."""

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
        """Read ``256x64``: shape 256, 64 new tokens."""
        shape, _, tokens = name.rpartition("x")
        if shape not in SHAPES or not tokens.isdigit():
            raise SystemExit(f"{name} is no setting: SHAPExTOKENS with a shape of {', '.join(SHAPES)}")
        return cls(shape, int(tokens))


def prompt_ids(setting: Setting, count: int | None = None) -> list[list[int]]:
    """Return the token ids of ``count`` (a step's worth) prompts: fixed, of one length, within the vocabulary."""
    draw, vocab = random.Random(0), SHAPES[setting.shape].vocab
    return [[draw.randrange(1, vocab) for _ in range(setting.prompt_tokens)] for _ in range(count or setting.prompts)]


def prompt_texts(setting: Setting, count: int | None = None) -> list[str]:
    """Return the same prompts as text: the tokenizer's words are ``t<id>``."""
    return [" ".join(f"t{token}" for token in ids) for ids in prompt_ids(setting, count)]


def rewards(count: int) -> list[float]:
    """Return alternating rewards; those of a group are adjacent."""
    return [float(k % 2) for k in range(count)]


def advantages(setting: Setting) -> list[float]:
    """Return GRPO's: reward minus the group's mean over its standard deviation (half of the rewards are 1)."""
    return [1.0 if reward else -1.0 for reward in rewards(setting.rows)]


def model_directory(root: Path, shape_name: str) -> Path:
    """Return the model directory of a shape under ``root``, which is written at the first call (by transformers)."""
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


# -- clocks -----------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """One step of one side: wall-clock and processor seconds, sampled tokens, peak memory."""

    sampling_s: float
    update_s: float
    sampling_cpu_s: float
    update_cpu_s: float
    tokens: int
    peak_mib: float


def peak_mib() -> float:
    """Return the highest resident memory of this process in MiB, or of its GPU allocator where that is in use."""
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
    """Measure one step of a side whose two halves are plain calls."""
    laps = Laps()
    sampled = sample()
    sampling = laps.lap()
    update(sampled)
    updating = laps.lap()
    return Measured(sampling[0], updating[0], sampling[1], updating[1], count(sampled), peak_mib())


# -- sides: one process each, so that one works at a time -------------------------------------------------------------


def side_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the options that ``Side`` starts every side with."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", metavar="SETTING", required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    return parser


REAL_STDOUT = sys.stdout


def answer(content: dict[str, Any]) -> None:
    """Write one JSON line to the real stdout; everything else that a library prints belongs to stderr."""
    print(f"@@{json.dumps(content)}", file=REAL_STDOUT, flush=True)


def serve(step: Callable[[], Measured], **facts: float) -> None:
    """Answer with the facts, then each line of stdin with one measured step."""
    answer(facts)
    for _ in sys.stdin:
        answer(asdict(step()))


class Side:
    """One process that steps on request (see ``serve``).

    Raises SystemExit, with the end of the process's log, when it ends early or sampled another number of tokens.
    """

    def __init__(self, name: str, command: Sequence[str | Path], setting: Setting, *, ours: bool = True, runs: int = 1,
                 **options: Any):  # fmt: skip
        self.name, self.setting, self.runs, self.steps = name, setting, runs, list[Measured]()
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"OMP_NUM_THREADS": str(options["threads"]), "PYTHONPATH": str(HERE.parent) if ours else ""}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        self.process = subprocess.Popen(
            [*map(str, (*command, "--serve", setting.name, *words))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment,
        )  # fmt: skip
        self.facts: dict[str, Any] = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("@@"):
                return json.loads(line[2:])
        self.log.seek(0)
        raise SystemExit(f"{self.name} at {self.setting.name} ended early:\n" + "".join(self.log.readlines()[-30:]))

    def step(self, keep: bool) -> None:
        """Let it take one step and, if asked, keep what was measured."""
        assert self.process.stdin
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        measured = Measured(**self._answer())
        expected = self.runs * self.setting.rows * self.setting.new_tokens
        if measured.tokens != expected:
            raise SystemExit(f"{self.name} sampled {measured.tokens} tokens at {self.setting.name}, not {expected}")
        if keep:
            self.steps.append(measured)

    def close(self) -> None:
        """Let it end."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.log.close()


def take_turns(sides: Sequence[Side], warmup: int, repeats: int) -> None:
    """Let every side take one step per turn, one after the other; the first ``warmup`` turns do not count."""
    for turn in range(warmup + repeats):
        for side in sides:
            side.step(keep=turn >= warmup)
            print(f"  {side.setting.name}, turn {turn}: {side.name}", file=sys.stderr)


def medians(steps: Sequence[Measured]) -> dict[str, float]:
    """Return the median of each figure over the steps, and of their sums; of the peak memory, which grows, the last."""
    values = {key: median([getattr(m, key) for m in steps]) for key in asdict(steps[0])}
    values["step_s"] = median([m.sampling_s + m.update_s for m in steps])
    values["step_cpu_s"] = median([m.sampling_cpu_s + m.update_cpu_s for m in steps])
    return values | {"peak_mib": steps[-1].peak_mib}


# -- options and tables -----------------------------------------------------------------------------------------------


def parser_of(doc: str | None, on_gpu: str = "") -> argparse.ArgumentParser:
    """Return the options of every speed benchmark; ``on_gpu`` is the help of --gpu, where a benchmark runs on one."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--models", type=Path, help="keep the random-weight models here")
    parser.add_argument("--quick", action="store_true", help="a toy shape, few repeats: does everything work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measured step here")
    parser.add_argument("--record", action="store_true", help="write the output into docs/records/performance.md")
    if on_gpu:
        parser.add_argument("--gpu", action="store_true", help=on_gpu)
    return parser


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Yield the options with their ``device`` and a directory of models, temporary unless one was named."""
    if options.quick and options.record:
        raise SystemExit("--quick shows that everything works; its figures are not worth recording")
    options.device = "cuda" if getattr(options, "gpu", False) else "cpu"
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("--gpu: torch sees no GPU here")
    with tempfile.TemporaryDirectory() as temporary:
        options.models = options.models or Path(temporary)
        yield options


def publish(options: argparse.Namespace, mark: str, text: str, content: Any) -> None:
    """Print the text; with --record write it between its marks in docs/records/performance.md, with the machine; with
    --json write what was measured."""
    print(text)
    if options.record:
        mark = f"{mark} on a GPU" if options.device == "cuda" else mark
        page = HERE.parent / "docs" / "records" / "performance.md"
        before, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n")
        _, end, after = rest.partition(f"<!-- end of {mark} -->\n")
        if not (begin and end):
            raise SystemExit(f"{page.name} has no marks for {mark}")
        page.write_text(f"{before}{begin}{text}\n\n{machine()}\n{end}{after}", encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps({"threads": options.threads, **content}, indent=1) + "\n")


def machine() -> str:
    """Return one line: processor (or GPU), cores, torch, date."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = f"{len(os.sched_getaffinity(0))} cores of {models[0] if models else platform.machine()}"
    if torch.cuda.is_available():
        name = f"{torch.cuda.get_device_name()}, {name}"
    return f"*{name}; torch {torch.__version__.partition('+')[0]}, {time.strftime('%Y-%m-%d')}.*"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table; the first ``left`` columns are aligned left, the others right."""
    rule = "|".join("---" if i < left else "--:" for i in range(len(head)))
    above, *below = (f"| {' | '.join(line)} |" for line in (head, *rows))
    return "\n".join([above, f"|{rule}|", *below])


def with_verdicts(above: str, lines: Sequence[str]) -> str:
    """Return a table with a list of verdicts below it."""
    return "\n".join([above, "", *(f"- {line}" for line in lines)])


def bar(label: str, met: bool) -> str:
    """Return a line that states whether a bar was met."""
    return f"{label}: {'met' if met else 'missed'}"
