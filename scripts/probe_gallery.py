"""Draw the matrix of all advantage and credit modes on the bundled model: what their updates have in common.

    python scripts/probe_gallery.py [docs/images] [--batches 16]

Writes probe.svg, and prints the table of a probe: one condition for each mode, on the same rollouts of the base.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from retrain.campaign.planning.plan import Plan
from retrain.commands.probe import print_probe
from retrain.config import load
from retrain.config.modes import MODES
from retrain.files import write_text
from retrain.probe.measure import Effort, probe
from retrain.probe.picture import point_matrix
from retrain.probe.points import points_of
from retrain.probe.words import lines_of

ROOT = Path(__file__).parents[1]
BASE = """
[model]
model = "tiny-reasoner"
lora_rank = 16
[data]
source = "arithmetic"
[reward]
type = "match"
[training]
batch_size = 8
group_size = 16
max_tokens = 80
lr = 2e-3
[sepa]
steps = 80
delay_steps = 10
correct_rate_gate = 0.1
[evaluation]
problems = 64
"""


def conditions() -> list[tuple[str, str]]:
    """Every advantage with plain credit, then every credit under GRPO. A critic's is left out: untrained, it knows
    nothing."""
    advantages = [name for name in MODES["advantage_mode"] if name != "gae"]
    credits = [name for name in MODES["transform_mode"] if name != "none"]
    return [*((name, "none") for name in advantages), *(("grpo", name) for name in credits)]


def main(folder: Path, batches: int, problems: int) -> None:
    """Probe all modes at the base and draw the matrix."""
    lines = ["[campaign]", "seeds = [1]", "max_steps = 100"]
    ordered = sorted(conditions(), key=lambda pair: pair != ("grpo", "none"))  # the baseline first
    for advantage, credit in ordered:
        lines += ["[[campaign.conditions]]", f'advantage_mode = "{advantage}"', f'transform_mode = "{credit}"']
    with tempfile.TemporaryDirectory() as aside:
        path = Path(aside) / "modes.toml"
        path.write_text("\n".join(lines) + BASE)
        found = probe(Plan.of(load(path, ())), points_of([]), Effort(batches, problems, 16), print)
    report = {"lines": [], **found}
    report["lines"] = [vars(line) for line in lines_of(report)]
    print_probe(report)
    write_text(folder / "probe.svg", point_matrix(report["points"][0], alone=True) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "docs" / "images")
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--problems", type=int, default=64)
    given = parser.parse_args()
    main(given.folder, given.batches, given.problems)
