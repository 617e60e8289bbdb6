"""Four training steps against two, a checkpoint, a new process and two more: bit for bit.

The new process makes the subject again from its source, loads the checkpoints of both lanes and trains on; what it
finds is compared with what the process that never stopped has.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import retrain
from retrain.checkpoints import Snapshot, checkpoint_directory, load_checkpoint, write_checkpoint
from retrain.files import dumps, read_json, write_json
from retrain.policy.local import LocalPolicy, optimizer_tensors
from retrain.policy.memory import available_memory
from retrain.selfcheck.results import Result, Status, judged, skipped
from retrain.selfcheck.source import Source
from retrain.selfcheck.subject import Subject
from retrain.types import Action

LANES, STEPS, SAVED = 2, 4, 2
ROOM = 0.8
"""Share of the available memory that the model may take in the new process."""
SECONDS = 300.0
"""After which the new process is given up."""
JOB, FOUND = "job.json", "found.json"
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from retrain.selfcheck.resuming import go_on; go_on(sys.argv[1])"
)


def resumed_equals_undisturbed(subject: Subject) -> Result:
    """Whether a checkpoint holds all that matters."""
    needed, room = subject.base.weight_bytes, available_memory(subject.base.device)
    if needed > ROOM * room:
        return skipped(f"a second copy of the model takes {needed / 2**30:.1f} GiB, which are not free")
    with TemporaryDirectory(prefix="retrain-doctor-") as place:
        folder = Path(place)
        policies = [subject.policy(lane) for lane in range(LANES)]
        with subject.deterministic():
            train(subject, policies, range(SAVED))
            for lane, policy in enumerate(policies):
                save(folder, lane, policy)
            ours = train(subject, policies, range(SAVED, STEPS))
        write_json(folder / JOB, subject.source.to_json())
        places = [str(Path(retrain.__file__).parents[1]), *sys.path]
        if subject.on_gpu:
            import torch

            torch.cuda.empty_cache()  # the other process needs room of its own
        done = subprocess.run(
            [sys.executable, "-c", _BOOT, str(folder), json.dumps(places)],
            capture_output=True, encoding="utf-8", errors="replace", timeout=SECONDS, check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        if done.returncode != 0 or not (folder / FOUND).is_file():
            last = (done.stderr.strip().splitlines() or ["no word of it"])[-1]
            return Result(Status.FAIL, f"the new process ended with status {done.returncode}: {last}", todo="see there")
        theirs = read_json(folder / FOUND)
    differing = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
    words = f"{LANES} lanes, {STEPS} steps against {SAVED} + a new process + {STEPS - SAVED}"
    return judged(subject.kinds, {"resume_differs": len(differing)}, words, compared=len(ours), differing=differing)


def train(subject: Subject, policies: Sequence[LocalPolicy], steps: range) -> dict[str, str]:
    """Train these steps; digests of all that came of it, by name."""
    digests = {}
    for number in steps:
        groups, losses = subject.step(policies, number)
        digests |= {f"sampled in step {number}": _digest_of(groups), f"losses of step {number}": repr(losses)}
    for lane, policy in enumerate(policies):
        digests[f"lane {lane} adapter"] = _digest(policy.adapter.flat.detach().cpu().numpy().tobytes())
        digests[f"lane {lane} version"] = str(policy.version)
        for name, tensor in optimizer_tensors(policy.optimizer).items():
            digests[f"lane {lane} {name}"] = _digest(tensor.numpy().tobytes())
    return digests


def save(folder: Path, lane: int, policy: LocalPolicy) -> None:
    """The lane's checkpoint, as a run writes it."""
    state = dumps({"policy": policy.state()}) + "\n"
    write_checkpoint(_place(folder, lane), Snapshot(SAVED, policy.snapshot(resumable=True), state))


def go_on(place: str) -> None:
    """In the new process: load, train on, and write what came of it."""
    folder = Path(place)
    with Subject.open(Source.from_json(read_json(folder / JOB))) as subject, subject.deterministic():
        policies = [subject.policy(lane) for lane in range(LANES)]
        for lane, policy in enumerate(policies):
            policy.restore(load_checkpoint(_place(folder, lane), policy)["policy"])
        write_json(folder / FOUND, train(subject, policies, range(SAVED, STEPS)))


def _place(folder: Path, lane: int) -> Path:
    return checkpoint_directory(folder / f"lane_{lane}", SAVED)


def _digest_of(groups: Sequence[Sequence[Action]]) -> str:
    parts: list[Any] = [[action.token_ids, action.logprobs_T.tolist()] for group in groups for action in group]
    return _digest(repr(parts).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
