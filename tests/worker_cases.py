"""Campaigns that workers train: two conditions and four seeds of the toy model, and what they leave behind."""

import json
import time
from contextlib import suppress
from pathlib import Path

from timing_keys import is_timing_key
from toycampaign import campaign

from retrain.campaign.planning.plan import Plan
from retrain.campaign.planning.references import check
from retrain.campaign.running.controller import execute
from retrain.campaign.running.lease import LEASE
from retrain.config import load
from retrain.files import read_json, read_jsonl
from retrain.ownership import process_start
from retrain.record.observer import NullObserver


def planned(world: Path, out: Path, sets=(), **settings) -> Plan:
    """Two conditions and four seeds, three steps, in cohorts of one seed."""
    path = campaign(out.parent, world / "model", f"toy_{out.name}", **{"steps": 3, "lanes": 2} | settings)
    mine = ["campaign.seeds=[1,2,3,4]", "training.save_every=1", "squeeze.enabled=false", *sets]
    return check(Plan.of(load(path, mine), out))


def alone(world: Path, out: Path, sets=()) -> dict:
    """What one process leaves behind."""
    assert execute(planned(world, out, sets), NullObserver()).exit_status == 0
    return contents(out)


def contents(out: Path) -> dict:
    """All that a campaign leaves behind and no clock has part in."""
    found: dict = {}
    for run in sorted((out / "runs").iterdir()):
        for path in sorted(path for path in run.rglob("*") if path.is_file() and path.name not in (".lock", LEASE)):
            name = str(path.relative_to(out))
            found[name] = None
            if path.name in ("metrics.jsonl", "evals.jsonl"):
                rows = read_jsonl(path)
                found[name] = [
                    {k: v for k, v in row.items() if not is_timing_key(k) and k != "seconds"} for row in rows
                ]
            elif path.suffix == ".safetensors":
                data = path.read_bytes()
                end = 8 + int.from_bytes(data[:8], "little")
                found[name] = json.loads(data[8:end]), data[end:]  # the order of the header's keys is free
            elif path.name == "config.json":
                found[name] = {key: read_json(path)[key] for key in ("backend", "built", "seeds", "data_hash")}
    manifest = read_json(out / "manifest.json")
    found["runs"] = [{k: v for k, v in run.items() if k != "fingerprint"} for run in manifest["runs"]]
    found["cohorts"] = sorted(map(sorted, manifest["cohorts"]))
    return found


def differing(mine: dict, reference: dict, runs: int = 8) -> list[str]:
    assert len(reference) > 12 * runs  # files
    return sorted(name for name in {*mine, *reference} if mine.get(name, "absent") != reference.get(name, "absent"))


class Heard(NullObserver):
    """What was told; ``on_step`` is called after each step with the number of steps so far."""

    def __init__(self, on_step=lambda spec, count: None):
        self.on_step, self.steps, self.workers, self.messages = on_step, 0, {}, []

    def placed(self, spec, worker):
        self.workers.setdefault(spec.run_id, []).append(worker)

    def step(self, spec, row):
        self.steps += 1
        self.on_step(spec, self.steps)

    def message(self, text, level="info"):
        self.messages.append(text)


def writer(out: Path, run_id: str) -> int:
    """The process that trains a run."""
    return read_json(out / "runs" / run_id / LEASE)["pid"]


def who_writes(out: Path) -> int | None:
    """A process that trains some run now."""
    for lease in out.glob(f"runs/*/{LEASE}"):
        with suppress(OSError, ValueError):
            if process_start(pid := writer(out, lease.parent.name)) is not None:
                return pid
    return None


def a_writer(out: Path) -> int:
    """A process that trains some run, as soon as there is one; not for an observer, whom the controller waits for."""
    for _ in range(6000):
        if (pid := who_writes(out)) is not None:
            return pid
        time.sleep(0.01)
    raise TimeoutError(f"nobody trains in {out}")
