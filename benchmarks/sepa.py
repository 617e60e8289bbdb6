"""What SEPA did in a run, from its metrics.jsonl alone: λ, the gate, variances, weights, and what pooling changed.

python benchmarks/sepa.py logs/five_conditions/runs/maxrl+gtpo_sepa_s1
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLUMNS = {
    "step": "step",
    "λ": "sepa_lambda",
    "gate": "sepa_gate_open",
    "var h exec": "exec_surprisal_var",
    "var h plan": "plan_surprisal_var",
    "var w exec unpooled": "exec_weight_var_unpooled",
    "var w exec": "exec_weight_var",
    "mean w plan": "plan_weight_mean",
    "largest change of w plan": "plan_weight_change",
}
"""Heading → key of the row."""


def read(run: Path) -> list[dict[str, Any]]:
    """The rows of a run directory."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table, one line per step."""

    def cell(value: Any) -> str:
        return "" if value is None else str(value).lower() if isinstance(value, bool) else f"{value:.3g}"

    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return "\n".join([*lines, *("| " + " | ".join(cell(row[key]) for key in COLUMNS.values()) + " |" for row in rows)])


def main() -> None:
    """Print the table of the run directory that is named."""
    rows = read(Path(sys.argv[1]))
    print(markdown(rows))
    changes = [row["plan_weight_change"] for row in rows if row["plan_weight_change"] is not None]
    print(f"\nlargest change of a planning token's weight by pooling, over all steps: {max(changes, default=0.0):.2g}")


if __name__ == "__main__":
    main()
