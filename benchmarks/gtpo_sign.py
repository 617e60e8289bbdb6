"""How many tokens of wrong answers `gtpo_paper` rewards, because correct and wrong tokens are normalised together.

    python benchmarks/gtpo_sign.py [--groups 2000] [--seed 0]

Simulated groups of 16 answers, some of them correct: uncertainties are exponential, wrong answers have 200 to 400
tokens, correct ones the part of that in the first column. A cell is the share of wrong tokens whose advantage is
above 0 with the paper's normalisation (`[gtpo] centred = true`); with `centred = false` it is none, as is checked.
"""

import argparse

import torch
from shared import table

from retrain.algorithms.credit.gtpo_paper import gtpo_paper

RATES = (1 / 16, 2 / 16, 4 / 16, 8 / 16)
LENGTHS = (0.1, 0.25, 0.5, 1.0)
SIZE, SHORTEST, LONGEST = 16, 200, 400
AT_ONCE = 50


def positive_share(correct: int, length: float, groups: int, generator: torch.Generator) -> float:
    """The share of wrong tokens with a positive advantage, over ``groups`` groups with so many correct answers, which
    have ``length`` times as many tokens as others."""
    positive = total = 0
    for begin in range(0, groups, AT_ONCE):
        count = min(AT_ONCE, groups - begin)
        lengths_B = torch.randint(SHORTEST, LONGEST + 1, (count * SIZE,), generator=generator).double()
        correct_B = torch.arange(count * SIZE) % SIZE < correct
        lengths_B = torch.where(correct_B, (lengths_B * length).round().clamp(min=1), lengths_B)
        mask_BT = torch.arange(LONGEST)[None] < lengths_B[:, None]
        h_BT = torch.empty(mask_BT.shape, dtype=torch.float64).exponential_(1.0, generator=generator)
        group_B, rewards_B = torch.arange(count * SIZE) // SIZE, correct_B.double()
        wrong_BT = mask_BT & ~correct_B[:, None]
        advantages_BT = gtpo_paper(h_BT, rewards_B, correct_B, group_B, mask_BT)
        kept_BT = gtpo_paper(h_BT, rewards_B, correct_B, group_B, mask_BT, centred=False)
        if bool((kept_BT[wrong_BT] > 0).any()):
            raise SystemExit("a wrong token has a positive advantage without centring")
        positive += int((advantages_BT[wrong_BT] > 0).sum())
        total += int(wrong_BT.sum())
    return positive / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(args.seed)
    rows = []
    for length in LENGTHS:
        cells = [positive_share(round(rate * SIZE), length, args.groups, generator) for rate in RATES]
        rows.append([f"{length:g} of wrong ones", *(f"{100 * cell:.0f} %" for cell in cells)])
    print(table(["length of correct answers", *(f"{round(rate * SIZE)} of {SIZE} correct" for rate in RATES)], rows))


if __name__ == "__main__":
    main()
