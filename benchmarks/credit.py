"""Time of credit assignment for 128 completions: the credit steps of maxrl + gtpo_sepa, and planning detection.

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

from retrain.algorithms import GROUP_ADVANTAGES, TOKEN_CREDIT
from retrain.algorithms.algorithm import Algorithm
from retrain.algorithms.credit.group_advantage import GroupAdvantage, SpreadAdvantage
from retrain.algorithms.credit.planning_tokens import STRATEGIC_GRAMS, RegexDetector
from retrain.algorithms.credit.uncertainty import TokenUncertainty
from retrain.config import parse_dict
from retrain.config.modes import advantage_of
from retrain.types import Action, CreditedBatch, CreditedGroup, Problem, Prompt, RewardResult, Scores, single_turn

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


def batch_of(planning: list[np.ndarray], draw: np.random.Generator) -> CreditedBatch:
    """The completions with their planning tokens, from half to all of their length, and rewards of 0 and 1."""
    prompt = Prompt(Problem("0", "", ""), "", ())
    lengths = [int(draw.integers(len(mask_T) // 2, len(mask_T) + 1)) for mask_T in planning]
    actions = [Action([0] * length, "", -3.0 * draw.random(length), None, "stop") for length in lengths]
    rewards = [RewardResult(float(draw.integers(2))) for _ in actions]
    groups = [
        CreditedGroup.of(single_turn(prompt, actions[i : i + GROUP], rewards[i : i + GROUP]))
        for i in range(0, len(actions), GROUP)
    ]
    batch = CreditedBatch(tuple(groups))
    masks = zip(planning, lengths, strict=True)
    return batch.with_fields(batch.rollouts, [{"planning_T": mask_T[:length]} for mask_T, length in masks])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="file of real text")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = options.text.read_text(encoding="utf-8") if options.text else documents()
    detector = RegexDetector()
    config = parse_dict({"algorithm": {"advantage_mode": "maxrl", "transform_mode": "gtpo_sepa"}})
    advantage = GroupAdvantage("maxrl", advantage_of("maxrl"), GROUP_ADVANTAGES["maxrl"])
    token_credit = TOKEN_CREDIT["gtpo_sepa"](config, ())
    steps = [advantage, SpreadAdvantage(False), TokenUncertainty("surprisal"), *token_credit]
    algorithm = Algorithm(steps, mark_planning=lambda batch: batch)
    print(f"{'tokens':>6}  {'part':<9} {'ms':>7}  {'bar':>5}")
    for tokens, bars in BARS_MS.items():
        texts, offsets = completions(text, tokens)
        planning = detector.token_masks(texts, offsets)
        batch = batch_of(planning, np.random.default_rng(0))

        def credit(batch=batch) -> object:
            return algorithm.credit(batch, Scores(), step=250)

        def detect(texts=texts, offsets=offsets) -> object:
            return detector.token_masks(texts, offsets)

        for part, function in (("credit", credit), ("planning", detect)):
            print(f"{tokens:>6}  {part:<9} {best_ms(function, options.repeats):>7.1f}  {bars[part]:>5.0f}")
        characters = sum(map(len, texts)) / (ROWS * tokens)
        print(f"{'':>6}  {np.mean(planning):.1%} planning tokens, {characters:.1f} characters per token")


if __name__ == "__main__":
    main()
