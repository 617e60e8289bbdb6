"""Time of credit assignment for 128 completions: maxrl + gtpo_sepa on the padded batch, and planning detection.

    python benchmarks/credit.py [--text FILE] [--repeats 7]

One thread. The text is real prose (by default this repository's own documents) cut into tokens as byte-level
tokenizers cut, about four characters each, with planning phrases every few hundred tokens. The best of the repeats is
shown beside the bar that it must stay below.
"""

import argparse
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from retrain.maths.advantages import maxrl
from retrain.maths.credit import token_advantages
from retrain.maths.planning import STRATEGIC_GRAMS, RegexDetector

ROWS, GROUP = 128, 16
BARS_MS = {2048: {"credit": 30.0, "planning": 60.0}, 8192: {"credit": 120.0, "planning": 250.0}}
PIECE = re.compile(r" ?\w{1,6}|\s+|[^\w\s]")


def documents() -> str:
    root = Path(__file__).resolve().parent.parent
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted([*root.glob("*.md"), *root.glob("docs/*.md")]))


def completions(text: str, tokens: int) -> tuple[list[str], list[list[tuple[int, int]]]]:
    """128 texts of ``tokens`` tokens each with their offsets, as a tokenizer returns them."""
    words, texts, offsets = text.split(" "), [], []
    draw = np.random.default_rng(0)
    while len(words) < 16 * tokens:
        words = words + words
    for _ in range(ROWS):
        start = int(draw.integers(len(words) - 8 * tokens))
        chosen = words[start : start + 8 * tokens]
        for at in range(0, len(chosen), 300):
            chosen[at] = str(draw.choice(STRATEGIC_GRAMS))
        whole = " ".join(chosen)
        spans = [match.span() for match in PIECE.finditer(whole)][:tokens]
        texts.append(whole[: spans[-1][1]])
        offsets.append(spans)
    return texts, offsets


def best_ms(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="file of real text")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = options.text.read_text(encoding="utf-8") if options.text else documents()
    detector = RegexDetector()
    print(f"{'tokens':>6}  {'part':<9} {'ms':>7}  {'bar':>5}")
    for tokens, bars in BARS_MS.items():
        texts, offsets = completions(text, tokens)
        planning = torch.from_numpy(np.stack(detector.token_masks(texts, offsets)))
        draw = torch.Generator().manual_seed(0)
        logprobs = -3.0 * torch.rand(ROWS, tokens, generator=draw)
        mask = torch.arange(tokens)[None] < torch.randint(tokens // 2, tokens + 1, (ROWS, 1), generator=draw)
        rewards = torch.randint(0, 2, (ROWS // GROUP, GROUP), generator=draw).double()

        def credit(logprobs=logprobs, planning=planning, mask=mask, rewards=rewards) -> object:
            advantages = maxrl(rewards).flatten()
            return token_advantages("gtpo_sepa", advantages, logprobs, None, planning, mask, sepa_lambda=0.5)

        def detect(texts=texts, offsets=offsets) -> object:
            return detector.token_masks(texts, offsets)

        for part, function in (("credit", credit), ("planning", detect)):
            print(f"{tokens:>6}  {part:<9} {best_ms(function, options.repeats):>7.1f}  {bars[part]:>5.0f}")
        characters = sum(map(len, texts)) / (ROWS * tokens)
        print(f"{'':>6}  {float(planning.float().mean()):.1%} planning tokens, {characters:.1f} characters per token")


if __name__ == "__main__":
    main()
