"""Kill training again and again, at random and in the worst places, and compare with a run that nobody disturbed.

    python -m tests.soak --kills 100 --minutes 30
    python -m tests.soak --kills 100 --minutes 30 --executor processes
    python -m tests.soak --kills 100 --minutes 60 --executor ray

Every life of a run is a child of a process that has imported everything (``fork``), so that a kill costs about a
second. Critics beside policies, single runs, several updates per batch, campaigns and episodes with a tool take turns.
What is compared, time fields aside: every row of every record, the checkpoints' lines, the bytes of the tensors in the
last checkpoint and in ``final/``, the states in the manifest.
With ``--executor`` a campaign trains in several processes instead: see ``tests.soak_workers``,
and ``tests.soak_ray`` for a Ray cluster of three nodes.
Prints one JSON line; exit status 1 at the first difference, with the directories left as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

POINTS = (
    "time", "sampling", "turn", "update", "record", "torn record", "torn checkpoint", "before rename", "after rename",
    "before line", "final", "manifest", "pruning", "resuming", "any rename", "any sync", "terminate",
    "between updates", "scoring", "critic",
)  # fmt: skip
"""Where a life ends: ``time`` anywhere, ``any rename`` and ``any sync`` before or after that call for whatever file,
``terminate`` by SIGTERM and then SIGKILL, ``between updates`` of one batch, ``scoring`` while the policy says what it
is before them or the critic what it expects, ``critic`` when the policy has been updated and its critic has not, the
others as they say."""
ONLY_IN = {
    "between updates": ("critics", "updates"), "scoring": ("critics", "updates"), "critic": ("critics",),
}  # fmt: skip
"""The kinds of runs that come to these points; to the others all do."""
LIFE_SECONDS = 120.0
DEATHS = "RETRAIN_SOAK_DEATHS"
"""In the environment: the file that is to say which process has died in which place."""
TOML = """
{head}
[model]
model = "{model}"
lora_rank = 2
[training]
{steps}batch_size = 2
group_size = 3
max_tokens = 6
lr = 0.01
save_every = 2
eval_every = 3
keep_every = 4
[sepa]
steps = 4
[evaluation]
problems = 3
[data]
size = 50
[reward]
type = "custom"
custom_module = "{module}"
workers = 1
[squeeze]
enabled = false
"""
EPISODES = """
{head}
[model]
model = "tiny-tool-user"
lora_rank = 2
[environment]
tools = ["calculator"]
tools_prompt = ""
max_turns = 3
[data]
source = "{data}"
tags_column = "kind"
[training]
batch_size = 2
group_size = 4
max_tokens = 48
lr = 0.001
save_every = 2
eval_every = 3
keep_every = 4
[evaluation]
problems = 4
[squeeze]
enabled = false
"""
"""Episodes of several turns with a tool, with credit for episodes and for turns."""
KINDS = ("critics", "single", "updates", "campaign", "episodes")
SEVERAL = "num_iterations = 2\nminibatches = 2\n"
SINGLE = '[algorithm]\nadvantage_mode = "maxrl"\ntransform_mode = "gtpo_sepa"\n'
CONDITIONS = (("grpo", "none"), ("rloo", "gtpo_sepa"))
CRITICS = """
[campaign]
seeds = [1]
max_steps = 5
lanes = 2
[[campaign.conditions]]
advantage_mode = "gae"
transform_mode = "none"
kl_coef = 0.05
kl_in_reward = "k1"
critic = {warmup_steps = 2, lr = 0.02, lora_rank = 3}
[[campaign.conditions]]
advantage_mode = "gae"
transform_mode = "gtpo_sepa"
critic = {share_adapter = true}
"""
"""A critic of its own, which trains alone at first, and one that shares the policy's adapter, in one cohort."""
CONDITION = '[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "none"\nturn_credit = "{}"\n'
TURN_CREDIT = "".join(map(CONDITION.format, ("episode", "turn")))
REWARD = "def score(completion, answer):\n    return len(completion) % 5 / 4\n"


def prepare(folder: Path) -> dict[str, Path]:
    """A model, a reward and two files to train; by kind."""
    from tests.toymodels import campaign_head, qwen3_directory

    qwen3_directory(folder / "model", ["What is 3 + 4? 7", "Compute 12 * 3."], hidden=16)
    (folder / "soakreward.py").write_text(REWARD)
    shutil.copy(Path(__file__).parents[1] / "campaigns" / "calculations.py", folder)
    values = {"model": folder / "model", "module": folder / "soakreward.py"}
    files = {kind: folder / f"{kind}.toml" for kind in KINDS}
    head = campaign_head(*CONDITIONS, seeds=[1, 2], max_steps=6, lanes=2)
    files["critics"].write_text(TOML.format(head=CRITICS, steps=SEVERAL, **values))
    files["single"].write_text(TOML.format(head=SINGLE, steps="max_steps = 7\nseed = 3\n", **values))
    updates = f'max_steps = 5\nseed = 5\n{SEVERAL}minibatch_by = "sequence"\ntarget_kl = 0.02\n'
    files["updates"].write_text(TOML.format(head=SINGLE, steps=updates, **values))
    turns = "[campaign]\nseeds = [1]\nmax_steps = 5\n" + TURN_CREDIT
    files["episodes"].write_text(EPISODES.format(head=turns, data="calculations:problems"))
    files["campaign"].write_text(TOML.format(head=head, steps="", **values))
    return files


def live(toml: Path, out: Path, point: str, moment: float) -> None:
    """One life, in this process: train until the end or until ``point`` has come ``1 + int(moment * …)`` times."""
    from retrain.campaign.running.controller import launch
    from retrain.config import load
    from retrain.record.observer import NullObserver

    set_trap(point, moment)
    outcome = launch(load(toml), out, NullObserver())
    os._exit(outcome.exit_status)


_trap = ""


def set_trap(point: str, moment: float) -> None:
    """Put SIGKILL where ``point`` says; ``moment`` in [0, 1) chooses the how-many-th time."""
    global _trap
    _trap = point
    import retrain.campaign.planning.manifest as manifest
    import retrain.campaign.running.scheduler as scheduler
    import retrain.checkpoints as checkpoints
    import retrain.files as files
    import retrain.policy.local as policy
    import retrain.policy.optimizer as optimizer
    import retrain.record.writer as writer
    import retrain.run as run
    from retrain.engines.local import LocalEngine
    from retrain.rollouts.collect import _Open

    def at(
        owner: Any, name: str, times: int, act: Callable[..., None] = die, after: bool = False,
        when: Callable[..., bool] = lambda *_, **__: True,
    ) -> None:  # fmt: skip
        original, left = getattr(owner, name), [1 + int(moment * times)]

        def trapped(*arguments: Any, **named: Any) -> Any:
            counts = when(*arguments, **named)
            left[0] -= counts
            due = counts and left[0] == 0
            if due and not after:
                act(*arguments, **named)
            result = original(*arguments, **named)
            if due and after:
                die()
            return result

        setattr(owner, name, trapped)

    def torn(path: Path, rows: Any) -> None:
        data = "".join(files.dumps(row) + "\n" for row in rows).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.write(data[: int(moment * 7919) % max(1, len(data))])
        die()

    def half(path: Path, data: bytes, *_: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data[: len(data) // 2])
        die()

    def soon(*_: Any, **__: Any) -> None:
        threading.Timer(0.04 * (moment * 1009 % 1), die).start()

    late = moment * 101 % 1 > 0.5
    traps: dict[str, Callable[[], None]] = {
        "sampling": lambda: at(LocalEngine, "sample", 8, soon),
        "turn": lambda: at(_Open, "step", 60, soon),
        "update": lambda: at(policy, "train_step", 12, soon),
        "record": lambda: at(writer, "append_jsonl", 60, after=True),
        "torn record": lambda: at(writer, "append_jsonl", 60, torn),
        "torn checkpoint": lambda: at(policy if late else checkpoints, "write_bytes", 4, half),
        "before rename": lambda: at(checkpoints, "publish", 6),
        "after rename": lambda: at(checkpoints, "publish", 6, after=True),
        "before line": lambda: at(run.Run, "_record_save", 6),
        "final": lambda: at(run, "publish", 2, after=late),
        "event": lambda: at(scheduler.Scheduler, "_take", 60, after=late),
        "manifest": lambda: at(manifest, "write_json", 8, after=late),
        "pruning": lambda: at(run, "prune", 4),
        "resuming": lambda: at(run, "forget_after", 2, after=late),
        "between updates": lambda: at(policy.LocalPolicy, "update", 12, when=lambda _, batch, *__: batch.update > 0),
        "scoring": lambda: at(policy.LocalPolicy, "score", 6, soon if late else die, after=late),
        "critic": lambda: at(optimizer.Step, "take", 12, when=lambda step, *_: step.name == "critic_"),
        "any rename": lambda: at(os, "replace", 80, after=late),
        "any sync": lambda: at(os, "fsync", 80, after=late),
    }
    if point in traps:
        traps[point]()


def die(*_: Any, **__: Any) -> None:
    """The end of this process, as a power cut or the OOM killer would make it."""
    if DEATHS in os.environ:
        with open(os.environ[DEATHS], "a") as file:
            file.write(f"{os.getpid()} {_trap}\n")
    os.kill(os.getpid(), signal.SIGKILL)


def child(work: Callable[[], None], log: Path) -> int:
    """Fork; the child does ``work`` with its output in ``log``. Returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.setsid()
        work()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def ended(pid: int, seconds: float) -> int | None:
    """The wait status of a child that ends within ``seconds``; None when it does not."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    return None


def one_life(toml: Path, out: Path, log: Path, point: str, moment: float, typical: float) -> str:
    """``finished``, ``killed``, ``stopped`` (by SIGTERM, saved), or what went wrong."""
    pid = child(lambda: live(toml, out, point, moment), log)
    if point in ("time", "terminate"):
        status = ended(pid, moment * typical)
        if status is None and point == "terminate":
            os.kill(pid, signal.SIGTERM)
            status = ended(pid, 0.05 + moment)
        if status is None:
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
    else:
        status = ended(pid, LIFE_SECONDS)
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"hung at {point}"
    if os.WIFSIGNALED(status):
        return "killed" if os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGTERM) else f"signal {os.WTERMSIG(status)}"
    return {0: "finished", 130: "stopped"}.get(os.WEXITSTATUS(status), f"exit status {os.WEXITSTATUS(status)}")


def records(out: Path, stopped: bool) -> dict[str, Any]:
    """Everything about a finished directory that may not depend on how often it was killed, by name.

    ``stopped``: a SIGTERM has left checkpoints between the scheduled ones; their lines are left out.
    """
    from retrain.files import ASIDE
    from tests.timing_keys import is_timing_key, without_clock

    found: dict[str, Any] = {}
    manifest = json.loads((out / "manifest.json").read_text())
    found["manifest"] = [(run["run_id"], run["state"], run["step"]) for run in manifest["runs"]]
    for entry in manifest["runs"]:
        run = out / entry["path"]
        for path in sorted([*run.glob("*.jsonl"), *(run / "emergence").glob("*.jsonl")]):
            name = f"{entry['run_id']}/{path.name}"
            rows = [without_clock(json.loads(line)) for line in path.read_text().splitlines()]
            if path.name == "timing_spans.jsonl":
                rows = [row["step"] for row in rows]
            elif path.name == "checkpoints.jsonl" and stopped:
                rows = [row for row in rows if row["batch"] % 2 == 0 or row["batch"] == entry["max_steps"]]
            elif path.name in ("metrics.jsonl", "evals.jsonl"):
                rows = [
                    {key: value for key, value in row.items() if not is_timing_key(key) and key != "seconds"}
                    for row in rows
                ]
            found[name] = [json.dumps(row) for row in rows]
        last = max((run / "checkpoints").glob("step_*"))
        for path in (*(run / "final").glob("*.safetensors"), *last.glob("*.safetensors")):
            found[f"{entry['run_id']}/{path.relative_to(run)}"] = path.read_bytes().hex()
        found[f"{entry['run_id']}/leftovers"] = [p.name for p in run.rglob(f".*{ASIDE}")]
    return found


def differences(mine: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """What is not equal, in words."""
    wrong = [f"{name} is only in one of them" for name in sorted(mine.keys() ^ reference.keys())]
    for name in sorted(mine.keys() & reference.keys()):
        if mine[name] != reference[name]:
            pairs = zip(mine[name], reference[name], strict=False)
            where = next((i for i, (a, b) in enumerate(pairs) if a != b), "the end")
            wrong.append(f"{name}: {len(mine[name])} and {len(reference[name])} entries, first different at {where}")
    return wrong


def soak(folder: Path, kills: int, minutes: float, seed: int, where: Sequence[str] = POINTS) -> dict[str, Any]:
    """Kill at ``where`` until there were ``kills`` or ``minutes`` are over; the figures: ``wrong`` should be empty."""
    chance, begin, log = random.Random(seed), time.monotonic(), folder / "lives.log"
    files: dict[str, Path] = {}
    builder = child(lambda: files.update(prepare(folder)), log)
    if ended(builder, LIFE_SECONDS) != 0:
        return {"wrong": [f"the model could not be made: {log}"]}
    files = {kind: folder / f"{kind}.toml" for kind in KINDS}
    typical: dict[str, float] = {}
    places = {kind: [point for point in where if kind in ONLY_IN.get(point, KINDS)] or ["none"] for kind in KINDS}
    points, tried, done, wrong, number = Counter[str](), Counter[str](), Counter[str](), [], 0
    while not wrong and sum(points.values()) < kills and time.monotonic() - begin < 60 * minutes:
        kind = KINDS[number % len(KINDS)]
        reference = folder / f"reference_{kind}"
        if kind not in typical:
            start = time.monotonic()
            result = one_life(files[kind], reference, log, "none", 0.0, 0.0)
            if result != "finished":
                wrong = [f"the undisturbed {kind} run ended with {result}: {log}"]
                break
            typical[kind] = time.monotonic() - start
        out, number, stopped, lives = folder / f"{kind}_{number}", number + 1, False, 0
        while True:
            lives += 1
            point = "none"
            if lives <= 12 and sum(points.values()) < kills:  # among those where fewest lives were to end
                fewest = min(tried[each] for each in places[kind])
                point = chance.choice([each for each in places[kind] if tried[each] == fewest])
                tried[point] += 1
            result = one_life(files[kind], out, log, point, chance.random(), typical[kind])
            if result in ("killed", "stopped"):
                points[point] += 1
                stopped |= point == "terminate"
            elif result == "finished":
                break
            else:
                wrong.append(f"{out} (life {lives}, {point}): {result}")
                break
        done[kind] += not wrong
        if not wrong:
            found = differences(records(out, stopped), records(reference, stopped))
            wrong = [f"{out}: {text}" for text in found]
        if not wrong:
            shutil.rmtree(out)
    return {
        "kills": sum(points.values()),
        "at": dict(sorted(points.items())),
        "finished": dict(done),
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "seed": seed,
        "wrong": wrong,
    }


def warm() -> None:
    """Import what a life needs, so that every child has it at once."""
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import retrain.campaign.judging.comparison
    import retrain.campaign.running.assemble
    import retrain.campaign.running.controller  # noqa: F401


def main() -> int:
    """Parse, soak, print one JSON line."""
    from tests import soak_ray, soak_workers

    executors = {"processes": soak_workers.processes, "ray": soak_ray.ray}

    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="stop after so many kills")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no further run after so many minutes")
    parser.add_argument("--seed", type=int, default=0, help="of where the kills fall")
    parser.add_argument("--points", nargs="+", choices=POINTS, default=POINTS, help="where to kill; all by default")
    parser.add_argument(
        "--executor",
        choices=("inprocess", *executors),
        default="inprocess",
        help="who trains: this process, or workers, which are killed as well as the controller",
    )
    parser.add_argument("--dir", type=Path, default=None, help="where to work; kept when something is wrong")
    options = parser.parse_args()
    for name, value in (("HF_HUB_OFFLINE", "1"), ("TOKENIZERS_PARALLELISM", "false"), ("OMP_NUM_THREADS", "1")):
        os.environ[name] = value
    folder = Path(tempfile.mkdtemp(prefix="soak_", dir=options.dir))
    warm()
    if options.executor == "inprocess":
        report = soak(folder, options.kills, options.minutes, options.seed, options.points)
    else:
        with executors[options.executor](folder) as executor:
            figures = soak_workers.soak_workers(folder, executor, options.kills, options.minutes, options.seed)
        report = {"executor": options.executor, **figures}
    print(json.dumps(report))
    if report["wrong"]:
        print(f"see {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
