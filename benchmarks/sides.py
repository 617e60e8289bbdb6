"""The sides of a comparison: one process each, that works only when asked, and medians over their steps."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import workload
from workload import Measured, Setting

HERE = Path(__file__).resolve().parent


class Side:
    """One process that steps on request (see ``workload.serve``).

    Raises SystemExit, with the end of the process's log, when it ends early or did other work than the setting's.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        setting: Setting,
        *,
        models: Path,
        threads: int,
        device: str = "cpu",
        dtype: str = "auto",
        ours: bool = True,
        runs: int = 1,
    ):
        self.name, self.setting, self.runs, self.steps = name, setting, runs, list[Measured]()
        asked = {"serve": setting.name, "models": models, "threads": threads, "device": device, "dtype": dtype}
        where = [word for name, value in asked.items() for word in (f"--{name}", value)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(HERE.parent) if ours else ""}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        self.process = subprocess.Popen(
            [*map(str, command), *map(str, where)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
        )
        self.facts: dict[str, Any] = json.loads(self._answer())

    def _answer(self) -> str:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("@@"):
                return line[2:].strip()
        self.log.seek(0)
        raise SystemExit(f"{self.name} at {self.setting.name} ended early:\n" + "".join(self.log.readlines()[-30:]))

    def step(self, keep: bool) -> None:
        """Let it take one step and, if asked, keep what was measured."""
        assert self.process.stdin
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        measured = Measured(**json.loads(self._answer()))
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
    """Every side takes one step per turn, one after the other; those of the first ``warmup`` turns do not count."""
    for turn in range(warmup + repeats):
        for side in sides:
            side.step(keep=turn >= warmup)
            print(f"  {side.setting.name}, turn {turn}: {side.name}", file=sys.stderr)


def medians(steps: Sequence[Measured]) -> dict[str, float]:
    """Median of each figure over the steps, and of their sums; of the peak memory, which only grows, the last."""
    found = {key: workload.median([getattr(m, key) for m in steps]) for key in asdict(steps[0])}
    found["step_s"] = workload.median([m.sampling_s + m.update_s for m in steps])
    found["step_cpu_s"] = workload.median([m.sampling_cpu_s + m.update_cpu_s for m in steps])
    return found | {"peak_mib": steps[-1].peak_mib}
