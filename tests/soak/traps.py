"""``retrain`` as a soak starts it: with a trap, which is SIGKILL in a chosen place of the code."""

import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = "RETRAIN_SOAK"
"""In the environment of controllers, workers and their children: the soak's folder."""
TRAINING, CONTROLLER = "trap_training", "trap_controller"
"""The files that hold the trap for the next process that trains, and for the next controller."""
IN_TRAINING = (
    "sampling", "scoring", "update", "between updates", "critic", "record", "torn record", "torn checkpoint",
    "before rename", "after rename", "before line", "final", "pruning", "resuming", "any rename", "any sync",
)  # fmt: skip
"""``critic`` is when the policy has been updated and its critic has not, ``any`` before or after the call."""
IN_CONTROLLERS = ("event", "manifest", "any rename", "any sync")
_place = ""


def take_trap(name: str) -> None:
    """Set the trap that lies ready, unless another process has just taken it."""
    folder = Path(os.environ[FOLDER])
    taken = folder / f"taken_{os.getpid()}"
    with suppress(FileNotFoundError):
        (folder / name).rename(taken)
        set_trap(*json.loads(taken.read_text()))


def die(*_: Any, **__: Any) -> None:
    """End this process as a power cut or the OOM killer would, and note the place."""
    with open(Path(os.environ[FOLDER]) / "deaths", "a") as file:
        file.write(f"{os.getpid()} {_place}\n")
    os.kill(os.getpid(), signal.SIGKILL)


def _is_step(aside: Path, target: Path, *_: Any) -> bool:
    """Return whether a directory that is published is the checkpoint of a step, not ``final``."""
    return target.name.startswith("step_")


def set_trap(place: str, moment: float) -> None:
    """Die at ``place``; ``moment`` in [0, 1) chooses the how-many-th time."""
    global _place
    _place = place

    import retrain.campaign.planning.manifest as manifest
    import retrain.campaign.running.jobs as jobs
    import retrain.files as files
    import retrain.policy.local as policy
    import retrain.policy.lora as lora
    import retrain.records.writer as writer
    import retrain.training.checkpoints as checkpoints
    from retrain.engines.local import LocalEngine

    late = moment * 101 % 1 > 0.5

    def at(owner: Any, name: str, times: int, act: Any = die, after: bool = False, when: Any = None) -> None:
        original, left = getattr(owner, name), [1 + int(moment * times)]

        def trapped(*arguments: Any, **named: Any) -> Any:
            counts = when is None or when(*arguments, **named)
            left[0] -= counts
            due = counts and left[0] == 0
            if due and not after:
                act(*arguments, **named)
            result = original(*arguments, **named)
            if due and after:
                die()
            return result

        setattr(owner, name, trapped)

    def cut(path: Path, data: bytes, size: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.write(data[:size])
        die()

    def torn(path: Path, rows: Any) -> None:
        data = "".join(files.dumps(row) + "\n" for row in rows).encode()
        cut(path, data, int(moment * 7919) % max(1, len(data)))

    def half(path: Path, data: bytes, *_: Any) -> None:
        cut(path, data, len(data) // 2)

    def soon(*_: Any, **__: Any) -> None:
        threading.Timer(0.04 * (moment * 1009 % 1), die).start()

    traps: dict[str, Callable[[], None]] = {
        "sampling": lambda: at(LocalEngine, "sample", 8, soon),
        "update": lambda: at(policy, "policy_step", 12, soon),
        "record": lambda: at(writer, "append_jsonl", 60, after=True),
        "torn record": lambda: at(writer, "append_jsonl", 60, torn),
        "torn checkpoint": lambda: at(policy if late else checkpoints, "write_bytes", 4, half),
        "before rename": lambda: at(checkpoints, "publish", 6, when=_is_step),
        "after rename": lambda: at(checkpoints, "publish", 6, after=True, when=_is_step),
        "before line": lambda: at(checkpoints.Checkpoints, "_record_save", 6),
        "final": lambda: at(checkpoints, "publish", 2, after=late, when=lambda *paths: not _is_step(*paths)),
        "event": lambda: at(jobs.Scheduler, "_take", 60, after=late),
        "manifest": lambda: at(manifest, "write_json", 8, after=late),
        "pruning": lambda: at(checkpoints, "prune", 4),
        "resuming": lambda: at(checkpoints, "delete_checkpoints_after", 2, after=late),
        "between updates": lambda: at(policy.LocalPolicy, "update", 12, when=lambda _, batch, *__: batch.update > 0),
        "scoring": lambda: at(policy.LocalPolicy, "score", 6, soon if late else die, after=late),
        "critic": lambda: at(lora.OptimizerStep, "take", 12, when=lambda step, *_: step.name == "critic_"),
        "any rename": lambda: at(os, "replace", 80, after=late),
        "any sync": lambda: at(os, "fsync", 80, after=late),
    }
    traps[place]()


if __name__ == "__main__":
    from retrain.cli.app import main
    from tests.soak import traps

    traps.take_trap(CONTROLLER)
    main()
