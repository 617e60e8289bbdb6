"""First lines of JSON-lines files of several tools, which readers of another tool must not take for theirs."""

import json
from pathlib import Path

FILES = {
    "verl/20.jsonl": {"input": "2+3=", "output": "5", "gts": "5", "score": 1.0, "step": 20},
    "verifiers/traces.jsonl": {"traces": [{"rewards": []}], "task": {"key": "sum-1"}},
    "retrain/metrics.jsonl": {"step": 1, "loss": 0.5, "correct_rate": 0.25},
    "table/results.jsonl": {"condition": "grpo", "seed": 1, "metric": "reward", "value": 0.5},
    "empty/results.jsonl": {},
}


def write_other_tools(directory: Path) -> list[Path]:
    for name, row in FILES.items():
        (directory / name).parent.mkdir(parents=True)
        (directory / name).write_text(json.dumps(row) + "\n")
    return [directory / name for name in FILES]
