"""Toy campaigns: their files, their training, and what they leave."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from click.testing import Result
from typer.testing import CliRunner

from retrain.campaign.controller import execute, launch, resume
from retrain.campaign.planning.manifest import CampaignOutcome
from retrain.campaign.planning.plan import Plan
from retrain.campaign.planning.references import check
from retrain.cli.app import app
from retrain.config import load
from retrain.config.describe import document
from retrain.files import read_json, read_jsonl
from retrain.ownership import process_start
from retrain.records.catalogue import METRICS
from retrain.records.observer import NullObserver, Observer
from retrain.util.session import LEASE

from .models import TWO_CONDITIONS, campaign_head, qwen3_directory

REWARDS = '''
def score(completion, answer):
    """Share of even digits among the characters: a toy model gets a spread of it."""
    return sum(c in "02468" for c in completion) / max(1, len(completion))

def fragile(completion, answer):
    raise RuntimeError("this grader is broken")
'''
Value = TypeVar("Value")
CONDITIONS = (("grpo", "none"), ("rloo", "gtpo_hicra_placebo"))


def toy_toml(model: Path, rewards: str = "toyrewards.py", **sections: dict[str, Any]) -> str:
    """Return the configuration of a toy model and of rewards beside it, with few problems, which are made at once.
    ``sections`` adds keys or replaces them; a key that is None is left out, and so is a section without keys."""
    toy = {
        "model": {"model": str(model), "lora_rank": 4},
        "reward": {"type": "custom", "custom_module": str(model.parent / rewards), "workers": 1},
        "inference": {"dtype": "float32"},
        "training": {"batch_size": 3, "group_size": 4, "max_tokens": 10, "lr": 0.01, "max_examples": 500},
        "evaluation": {"problems": 0}, "squeeze": {"enabled": False},
    }  # fmt: skip
    tables = {name: toy.get(name, {}) | sections.get(name, {}) for name in {**toy, **sections}}
    return document({name: keys for name, keys in tables.items() if any(key is not None for key in keys.values())})


def eventually(happens: Callable[[], Value], seconds: float = 60.0) -> Value:
    """Wait for something that another thread or process does: call until the value is true, and return it."""
    end = time.monotonic() + seconds
    while not (value := happens()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
    return value


def run_cli(*arguments: object, **options: Any) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], **options)


class StopAfter(NullObserver):
    """Asks to stop once runs have done so many steps together."""

    def __init__(self, steps: int):
        self.left = steps

    def step(self, spec, row):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


def toy_world(folder: Path) -> Path:
    """A model directory in ``folder``, with the rewards of its campaigns beside it."""
    (folder / "toyrewards.py").write_text(REWARDS)
    texts = ["12+34=? 7*46-58+23=? the answer is \\boxed{46}", "let me check 0 2 4 6 8"]
    return qwen3_directory(folder / "model", texts)


def campaign(tmp_path: Path, model: Path, name: str = "toy", *, steps: int = 4, lanes: int | str = "auto",
             condition: str = "", dtype: str = "float32") -> Path:  # fmt: skip
    """A file of two conditions and two seeds; ``condition`` has further keys of the second."""
    head = campaign_head(*CONDITIONS, seeds=[1, 2], max_steps=steps, lanes=lanes)
    path = tmp_path / f"{name}.toml"
    sections = {"training": {"save_every": 2, "eval_every": 2}, "evaluation": {"problems": 5}}
    rest = toy_toml(model, inference={"dtype": dtype}, squeeze={"enabled": None}, **sections)
    path.write_text(f"{head}\n{condition}\n{rest}")
    return path


UNITS = {"s", "tokens/s", "completions/s", "GiB", "share of peak"}
FITTED = {"bp_action", "bp_regime", "bp_p_star", "bp_sigma", "bp_kappa"}
TIMED = [metric for metric in METRICS if metric.unit in UNITS or metric.key in FITTED]
TIMING_KEYS = {metric.key for metric in TIMED}
TIMING_KEYS |= {alias for metric in TIMED for names in metric.aliases.values() for alias in names}


def is_timing_key(key: str) -> bool:
    """Whether the value under ``key`` may differ between two otherwise identical runs."""
    return key in TIMING_KEYS or key.startswith(("time/", "timing_", "perf/")) or "tools/tool_time" in key


def timeless(path: Path) -> list[dict]:
    """Return the rows of a file without what depends on the clock."""
    return [{k: v for k, v in row.items() if not is_timing_key(k) and k != "seconds"} for row in read_jsonl(path)]


def without_clock(value: Any) -> Any:
    """Nested data without the seconds that tools took."""
    if isinstance(value, dict):
        return {key: without_clock(inner) for key, inner in value.items() if "tools/tool_time" not in key}
    return [without_clock(inner) for inner in value] if isinstance(value, list) else value


SUBJECT_REWARDS = '''
def score(completion, answer):
    """Right when there is a 2: most groups of a toy model are mixed, some have no signal."""
    return float("2" in completion)

def even(completion, answer):
    return sum(c in "02468" for c in completion) / max(1, len(completion))

def same(completion, answer):
    return 0.25
'''
OTHER = """
lr = 0.002
temperature = 0.7
max_tokens = 5
group_size = 6
batch_size = 2
"model.lora_rank" = 2
"""
BASE = 0
"""Position of the first condition of a campaign in ``runs_of``."""


def toy_file(home: Path, path: Path, *, pair: str | None = None, reward: str = "score") -> Path:
    """A single run's file, or with ``pair`` (further keys of the second condition) a campaign's."""
    campaign = "" if pair is None else TWO_CONDITIONS + pair + "\n"
    sections = {"reward": {"custom_function": reward}, "inference": {"dtype": "float64"}}
    sections |= {"training": {"max_steps": 3, "save_every": 2, "keep_last": 1}}
    sections |= {"data": {"source": f"{home}/subjects.jsonl"}}
    path.write_text(campaign + toy_toml(home / "model", "rewards.py", **sections))
    return path


def train(
    path: Path, out: Path, *sets: str, observer: Observer | None = None, status: int = 0, **options: Any
) -> CampaignOutcome:
    """Train a file with these settings, or continue it; it must end with this status."""
    outcome = launch(load(path, sets), out, observer or NullObserver(), **options)
    assert outcome.exit_status == status, outcome.summary
    return outcome


def train_quietly(folder: Path, toml: str) -> list[dict]:
    """Train without evaluation and squeeze to ``folder``/out; the rows of a single run's steps, none of a campaign."""
    (folder / "run.toml").write_text(toml + "\n[evaluation]\nproblems = 0\n[squeeze]\nenabled = false\n")
    train(folder / "run.toml", folder / "out")
    return rows_of(folder / "out")


def continue_training(
    out: Path, *sets: str, observer: Observer | None = None, status: int = 0, **options: Any
) -> CampaignOutcome:
    """Continue a directory with these settings; it must end with this status."""
    outcome = resume(out, observer or NullObserver(), sets=sets, **options)
    assert outcome.exit_status == status, outcome.summary
    return outcome


def runs_of(out: Path) -> dict[tuple[int, int], Path]:
    """Run directories by (position of the condition, seed)."""
    runs = read_json(out / "manifest.json")["runs"]
    assert len(runs) == 4
    labels = list(dict.fromkeys(run["label"] for run in runs))
    return {(labels.index(run["label"]), run["seed"]): out / run["path"] for run in runs}


def rows_of(run: Path) -> list[dict]:
    return read_jsonl(run / "metrics.jsonl")


def completions_of(run: Path) -> list[dict]:
    return read_jsonl(run / "emergence" / "generations.jsonl")


def adapter_bytes(directory: Path) -> bytes:
    return (directory / "adapter_model.safetensors").read_bytes()


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
                found[name] = timeless(path)
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


def files_of(directory: Path, without: Collection[str] = ()) -> dict[str, bytes | str]:
    """Return the content of every file and the target of every link below a directory, except those of these names."""
    return {
        str(path.relative_to(directory)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.name not in without and (path.is_symlink() or path.is_file())
    }


def differing(mine: dict, reference: dict, runs: int = 8) -> list[str]:
    assert len(reference) > 12 * runs  # files
    return sorted(name for name in {*mine, *reference} if mine.get(name, "absent") != reference.get(name, "absent"))


class Heard(NullObserver):
    """Records what is told; ``on_step`` gets the count of steps; the evaluation ``stop`` (name, step) interrupts."""

    def __init__(self, on_step=lambda spec, count: None, stop: tuple[str, int] | None = None):
        self.on_step, self.stop, self.steps, self.workers = on_step, stop, 0, {}
        self.messages: list[str] = []

    def placed(self, spec, worker):
        self.workers.setdefault(spec.run_id, []).append(worker)

    def step(self, spec, row):
        self.steps += 1
        self.on_step(spec, self.steps)

    def evaluated(self, spec, name, row):
        if (name, row[f"eval/{name}/step"]) == self.stop:
            raise KeyboardInterrupt

    def message(self, text, level="info"):
        self.messages.append(text)


def writer(out: Path, run_id: str) -> int:
    return read_json(out / "runs" / run_id / LEASE)["pid"]


def who_writes(out: Path) -> int | None:
    for lease in out.glob(f"runs/*/{LEASE}"):
        with suppress(OSError, ValueError):
            if process_start(pid := writer(out, lease.parent.name)) is not None:
                return pid
    return None


def suspended_writer(out: Path) -> tuple[int, Path] | None:
    """Suspend a process that trains some run now, so that it still does; return it and the run's directory."""
    for lease in out.glob(f"runs/*/{LEASE}"):
        with suppress(OSError, ValueError):
            pid = writer(out, lease.parent.name)
            os.kill(pid, signal.SIGSTOP)
            if lease.exists():
                return pid, lease.parent
            os.kill(pid, signal.SIGCONT)
    return None


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> Iterator[Any]:
    """Every fenced block whose info string begins with ``language``, named by page and line."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match[1].split()[:1] == [language]:
                line = text.count("\n", 0, match.start()) + 1
                yield pytest.param(match[2], id=f"{page.name}:{line}")
