"""Records of runs and campaigns that were never trained."""

import json
import subprocess
import sys
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.campaign.planning.manifest import Manifest, declaration, has_begun
from retrain.campaign.planning.plan import plan
from retrain.campaign.running.interim import InterimMonitor
from retrain.config import Config, load, parse_dict
from retrain.config.runs import RunSpec
from retrain.files import append_jsonl, read_jsonl, write_json
from retrain.records.context import RunContext
from retrain.records.observer import NullObserver
from retrain.records.reader import read_manifest
from retrain.records.schema.campaign import RunEntry, Seal
from retrain.records.schema.layout import EVALS, EVALUATIONS
from retrain.records.seals import chained
from retrain.types import Action, CreditedGroup, EvalRecord, Problem, Prompt, RewardResult, StepRecord, single_turn
from retrain.verdicts.pooling import conclude
from retrain.verdicts.results import METRIC

from .models import campaign_head


def completion(length: int, text: str = "so \\boxed{4}", stop: bool = True, entropy: float | None = 0.5) -> Action:
    """``length`` tokens of logprob −1 each."""
    entropy_T = None if entropy is None else np.full(length, entropy, dtype=np.float32)
    return Action(list(range(length)), text, np.full(length, -1.0), entropy_T, "stop" if stop else "length")


def group(
    rewards: Sequence[float | RewardResult | None], lengths: list[int], prompt_length: int = 3,
    tags: tuple[str, ...] = (), stops: list[bool] | None = None, discarded: str | None = None, problem_id: str = "p0",
) -> CreditedGroup:  # fmt: skip
    """A group whose advantages are reward − mean, NaN where there is no reward."""
    results = [r if isinstance(r, RewardResult) else RewardResult(r, error=None if r is not None else "timed out")
               for r in rewards]  # fmt: skip
    totals_N = np.array([np.nan if r.total_reward is None else r.total_reward for r in results])
    known = totals_N[~np.isnan(totals_N)]
    problem = Problem(problem_id, f"What is {problem_id}?", "4", tags)
    sampled = single_turn(
        Prompt(problem, f"<user>{problem.prompt}", tuple(range(prompt_length))),
        [completion(n, stop=(stops or [True] * len(lengths))[i]) for i, n in enumerate(lengths)],
        results,
    )
    advantages_N = totals_N - (known.mean() if len(known) else 0.0)
    return updated(CreditedGroup.of(sampled, discarded=discarded), *({"advantage": float(a)} for a in advantages_N))


def updated(group: CreditedGroup, *changes: Mapping[str, Any]) -> CreditedGroup:
    """Return the group with fields of its rollouts replaced: one mapping for each of the first rollouts."""
    rollouts = [replace(rollout, **change) for rollout, change in zip(group.rollouts, changes, strict=False)]
    return replace(group, rollouts=(*rollouts, *group.rollouts[len(rollouts) :]))


def with_action(group: CreditedGroup, sample: int = 0, **changes: Any) -> CreditedGroup:
    """Return the group with fields of the first action of one rollout replaced."""
    first, *others = group.rollouts[sample].turns
    turns = (replace(first, action=replace(first.action, **changes)), *others)
    return updated(group, *[{}] * sample, {"turns": turns})


def step(
    groups: Sequence[CreditedGroup], number: int = 0, update: dict[str, Any] | None = None, **state: Any
) -> StepRecord:
    """A step of 4 seconds after the one before it: 2 rollout, 1 update, 1 that no span names."""
    start = 1000.0 + 4.0 * number
    spans = [("rollout", start, start + 2.0), ("update", start + 2.0, start + 3.0)]
    return StepRecord(number, groups, update or {}, state, spans, start, start + 4.0)


def evaluation(groups: Sequence[CreditedGroup], number: int = 0, name: str = "heldout") -> EvalRecord:
    return EvalRecord(name, number, list(groups), temperature=1.0, samples=1, seconds=0.5)


def config(**sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "logging": {"aliases": ["tinker", "trl", "telescope", "retrain"], "report_to": []},
        "algorithm": {"advantage_mode": "grpo", "transform_mode": "none", "uncertainty_kind": "surprisal"},
        "evaluation": {"problems": 4},
        "reward": {"type": "match"},
        "training": {"lr": 1e-4, "batch_size": 2, "group_size": 4, "max_tokens": 16, "temperature": 1.0},
        "model": {"model": "tiny-reasoner", "lora_rank": 8},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return parse_dict(base)


def context(**changes: Any) -> RunContext:
    values = {"condition": "grpo+none", "run_id": "grpo+none_s1", "seed": 1, "config": config(), "max_steps": 10}
    return RunContext(**{**values, **changes})


def find_conversations(node: Any) -> list[dict[str, Any]]:
    """Conversations of a logtree, as in the cookbook's documentation."""
    results: list[dict[str, Any]] = []
    if isinstance(node, dict):
        if node.get("data", {}).get("type") == "conversation":
            results.append(node["data"])
        for child in node.get("children", []):
            if isinstance(child, dict):
                results.extend(find_conversations(child))
    return results


def seal_of(run: Path, evaluations: int | None = None) -> dict[str, Any]:
    """The seal of the first evaluations of a run, None for all, with the completions of these steps."""
    rows, completions = read_jsonl(run / EVALS)[:evaluations], read_jsonl(run / EVALUATIONS)
    steps = {row["step"] for row in rows}
    completions = [row for row in completions if row["step"] in steps]
    digests = chained("", rows), chained("", completions)
    return Seal("data", len(rows), digests[0], len(completions), digests[1]).to_row()


BASE = [0.60, 0.64, 0.58, 0.66, 0.62, 0.59, 0.65, 0.61]


def campaign(
    folder: Path, results: Mapping[str, Sequence[float | None]], config: dict[str, Any] | None = None,
    states: dict[str, str] | None = None, heldout: str = "problems A", seeds: list[int] | None = None,
) -> Path:  # fmt: skip
    """A campaign's directory: held-out accuracy 0.5 before, half-way there, and the given values by seed."""
    runs = []
    for label, values in results.items():
        for seed, value in zip(seeds or range(1, len(values) + 1), values, strict=True):
            run_id = f"{label}_s{seed}"
            path = folder / "runs" / run_id
            state = (states or {}).get(run_id, "done")
            sections = {
                "training": {"seed": seed, "lr": 0.001, "max_steps": 20},
                "campaign": {"seed": 0},
                "evaluation": {"samples": 2, "temperature": 1.0, "max_tokens": 80},
            }
            for name, table in (config or {}).items():
                sections[name] = {**sections.get(name, {}), **table}
            write_json(path / "config.json", {**sections, "heldout_hash": heldout, "data_hash": "d", "git": None})
            timing = {"time/update": 2.0, "time/rollout": 4.0, "cohort_size": 4}
            rows = [
                {"step": step, "correct_rate": 0.4, "num_tokens": 100 * (step + 1), **timing}
                for step in range(20 if state == "done" else 7)
            ]
            append_jsonl(path / "metrics.jsonl", rows)
            facts = {"name": "heldout", "samples": 2, "eval/heldout/problems": 50}
            points = [(0, 0.5), (10, 0.5 if value is None else (0.5 + value) / 2), (20, value)]
            length = {"eval/heldout/mean_length": 30.0 + seed}
            evaluations = [
                {"step": step, **facts, METRIC: accuracy, "eval/heldout/hard/correct_rate": accuracy, **length}
                for step, accuracy in (points if state == "done" else points[:1])
            ]
            append_jsonl(path / "evals.jsonl", evaluations)
            reason = "CUDA out of memory" if state == "failed" else None
            runs.append({"run_id": run_id, "label": label, "seed": seed, "state": state, "reason": reason,
                         "step": len(rows), "path": f"runs/{run_id}"})  # fmt: skip
    write_json(folder / "manifest.json", {"format": 1, "runs": runs})
    return folder


def shifted(by: float, noise: float = 0.004) -> list[float | None]:
    """``BASE`` and a difference that alternates around ``by``."""
    return [value + by + noise * (-1) ** i for i, value in enumerate(BASE)]


EIGHT = list(range(1, 9))
GRPO, RLOO, DR_GRPO = ("grpo", "none"), ("rloo", "none"), ("dr_grpo", "none")


def configuration(
    tmp_path: Path, conditions=(GRPO, RLOO), rule="on", seeds: list[int] = EIGHT, rest="", **keys
) -> Path:
    path = tmp_path / "rule.toml"
    tmp_path.mkdir(exist_ok=True)
    path.write_text(campaign_head(*conditions, seeds=seeds, max_steps=1, sequential=rule, **keys) + rest)
    return path


class Played:
    """A campaign whose runs are put on the disk instead of trained: accuracy by condition and seed."""

    def __init__(self, tmp_path: Path, effect: float = 0.1, **settings):
        self.folder, self.effect = tmp_path, effect
        self._start([], **settings)

    def start_again(self, **settings) -> None:
        """With the file as it is now."""
        self.manifest.files.flush()
        self._start([RunEntry.from_row(row) for row in read_manifest(self.manifest.directory)["runs"]], **settings)

    def _start(self, before, **settings) -> None:
        self.loaded = load(configuration(self.folder, **settings))
        self.specs = plan(self.loaded)
        self.manifest = Manifest.open(self.folder / "out", "rule", self.specs)
        if not has_begun(before):
            self.manifest.content["declared"] = declaration(self.specs).to_row()
        self.manifest.write()

    def finish(self, seed: int, state: str = "done", only: str | None = None, sign: int = 1) -> None:
        for spec in self.specs:
            stopped = self.manifest.run(spec.run_id).state == "stopped"
            if spec.seed == seed and spec.label.startswith(only or "") and not stopped:
                folder = self.manifest.directory / "runs" / spec.run_id
                value = 0.5 + 0.01 * seed + (sign * self.effect if spec.label.startswith("rloo") else 0.0)
                row = {"step": 1, "name": "heldout", "eval/heldout/correct_rate": value}
                append_jsonl(folder / "evals.jsonl", [row])
                append_jsonl(folder / "metrics.jsonl", [{"step": 0, "num_tokens": 5, "correct_rate": value}])
                self._end(spec, state)

    def put(self, seed: int, label: str, value: float, **facts) -> None:
        """One finished run with this accuracy; further ``facts`` stand in the row of its evaluation."""
        spec = next(spec for spec in self.specs if spec.seed == seed and spec.label.startswith(label))
        row = {"step": 1, "name": "heldout", "eval/heldout/correct_rate": value, **facts}
        append_jsonl(self.manifest.directory / "runs" / spec.run_id / "evals.jsonl", [row])
        self._end(spec, "done")

    def _end(self, spec: RunSpec, state: str) -> None:
        self.manifest.seal(spec.run_id, spec.label, seal_of(self.manifest.directory / "runs" / spec.run_id))
        self.manifest.update(spec.run_id, state=state, step=1)

    def analyse(self, under_way: Container[str] = ()) -> dict[str, Any] | None:
        """Make the interim analysis if it is due; what it saw, None before."""
        if monitor := InterimMonitor.of(self.manifest, self.specs, NullObserver()):
            monitor.update(under_way)
        return self.manifest.content.get("interim")

    def states(self, label: str = "") -> list[str]:
        return [entry.state for entry in self.manifest.runs if entry.label.startswith(label)]

    def compare(self) -> dict:
        self.manifest.files.flush()
        return conclude(self.manifest.directory)


MARKER = "retrain_was_here"
"""A page in which a script of these texts ran has this name on ``window``."""

HOSTILE: dict[str, str] = {
    "script": f"<script>window.{MARKER}=1</script>",
    "script_end": f"</script><script>window.{MARKER}=1</script>",
    "comment_end": f"--><script>window.{MARKER}=1</script><!--",
    "image": f'<img src=x onerror="window.{MARKER}=1">',
    "attribute": f'" onmouseover="window.{MARKER}=1" x=\'',
    "svg": f"<svg/onload=window.{MARKER}=1>",
    "link": f"[click](javascript:window.{MARKER}=1)",
    "style_end": f"</style><script>window.{MARKER}=1</script>",
    "template": "${7*7} {{7*7}} {% raw %} `${7*7}`",
    "entities": "&lt;script&gt; &#60;b&#62; &amp;amp;",
    "terminal_clear": "\x1b[2J\x1b[H\x1b[31mred\x1b[0m",
    "terminal_title": "\x1b]0;owned\x07",
    "terminal_link": "\x1b]8;;https://example.org\x1b\\click\x1b]8;;\x1b\\",
    "terminal_paste": "\x1b[200~rm -rf ~\n\x1b[201~",
    "c1_controls": "\x9b31mred\x9b0m \x85next\x90q\x9c",
    "controls": "".join(map(chr, range(32))) + "\x7f",
    "carriage": "harmless\rHARMFUL",
    "backspaces": "no\x08\x08yes",
    "bidi": "abc\u202edcba\u2066x\u2069\u200b\u200f",
    "line_ends": "one\u2028two\u2029three\x85four\x0bfive\x0csix",
    "markup": "[bold red]rich[/bold red] [link=file:///etc/passwd]x[/link]",
    "formula": '=HYPERLINK("http://example.org","x")',
    "formula_plus": "+1+cmd|' /C calc'!A0",
    "formula_at": "@SUM(1+1)",
    "formula_tab": "\t=1+1",
    "high_surrogate": "a\ud800b",
    "low_surrogate": "a\udc00b",
    "swapped_surrogates": "\udc00\ud800",
    "escaped_bytes": b"\xff\xfe\xc3(".decode("utf-8", "surrogateescape"),
    "noncharacters": "\ufffe\uffff\U0010ffff\ufeff",
    "combining": "z" + "\u0301" * 2000,
    "json": '"}\n{"step": 99, "loss": 0}\n',
    "json_numbers": "NaN Infinity -Infinity 1e999",
    "toml": '"""\n[training]\nlr = 1\n',
    "path": "../../../../etc/passwd\x00.txt",
    "format": "%s %n {0} {x!r} {__class__}",
    "boxed": "\\boxed{" * 500,
    "power_tower": "\\boxed{9^{9^{9^{9^{9}}}}}",
    "code": "\\boxed{__import__('os').system('true')}",
    "empty": "",
    "spaces": " \t\n ",
}
"""By a name for the test that uses it."""

MEGABYTE = "a<b&\x1b[31m" * 125_000
"""One long line of a little over a million characters, with markup and escapes in it."""


class Reader(HTMLParser):
    """Elements, attributes and text of a page as a browser would see them."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.page = text
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.attributes.extend(attrs)

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def tags(self) -> list[str]:
        return [tag for tag, _ in self.elements]

    @property
    def text(self) -> str:
        return "".join(self.texts)


def wandb_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a wandb file by wandb's own reader."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    if "No such command" in done.stderr:
        pytest.skip("this release of wandb has no reader of its files")
    return [json.loads(line) for line in done.stdout.splitlines()]


def wandb_run(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Return the run record, the history rows and the last summary values of a wandb file."""
    deadline = time.monotonic() + 30
    records: list[dict[str, Any]] = []
    while not any(record["type"] == "exit" for record in records):  # it is written a moment after finish()
        assert time.monotonic() < deadline, "wandb never finished its file"
        records = wandb_records(path)
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    history = [record["history"]["item"] for record in records if record["type"] == "history"]
    summary: dict[str, Any] = {}
    for record in records:
        summary.update(record["summary"].get("update", {}) if record["type"] == "summary" else {})
    return run, history, summary
