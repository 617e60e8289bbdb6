"""A campaign whose every text wants to be a script, markup, a line of a log, or more than a page can hold."""

import json
import math
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from helpers.records import context, evaluation, step

from retrain.files import append_jsonl, write_json
from retrain.records.recorder import RunRecorder
from retrain.types import Action, CreditedGroup, CreditedRollout, Problem, Prompt, RewardResult, Turn

SCRIPT = "<script>window.hacked=1;alert(1)</script>"
IMAGE = '<img src=x onerror="window.hacked=2">'
BREAKOUT = "\"'></title></style></textarea><svg/onload=window.hacked=3>"
LINK = "javascript:window.hacked=4"
TEMPLATE = "{{7*7}}${7*7}<%= 7*7 %>"
BIDI = "\u202eevil\u202c \u2066isolated\u2069 \u200fright\u200e"
NUL = "nul\x00bell\x07esc\x1b[31m"
LONE = "lone \ud800 and \udfff surrogates"
LONG = "w" * 30_000
COMMENT = "]]> --> <!-- */ \\u003cscript\\u003e"
TEXTS = (SCRIPT, IMAGE, BREAKOUT, LINK, TEMPLATE, BIDI, NUL, LONE, LONG, COMMENT)
KEYS = (
    "__proto__", "constructor", "toString", "hasOwnProperty", f"env/{IMAGE}/reward", "a" * 600, "../../etc/passwd",
    "%00", "a b&c=d#e?f",
)  # fmt: skip
LABELS = (f"grpo+{SCRIPT}", f"maxrl+{IMAGE}")
RUNS = ("__proto___s1", "constructor_s1")
ALONE = "x'\"><svg onload=window.hacked=5>%41&a=b#c"
"""The name of a directory that is a run of its own; names in a manifest have to be plain."""
STEPS = 4
VISIBLE = ("<script>window.hacked=1", "onerror=", "javascript:window.hacked", "<svg onload=window.hacked")
"""Parts of texts that a page which shows them shows as they are."""


def hostile_campaign(path: Path) -> Path:
    """Two conditions, a seed each, recorded by the recorder; then every file that others may write is made worse."""
    entries = []
    for number, (label, run_id) in enumerate(zip(LABELS, RUNS, strict=True)):
        run = path / "runs" / run_id
        _record(run, label, number)
        _worse(run, label)
        entries.append({"run_id": run_id, "label": label, "seed": 1, "state": ("done", "failed")[number],
                        "reason": SCRIPT + BIDI, "step": STEPS, "max_steps": STEPS,
                        "path": f"runs/{run_id}"})  # fmt: skip
    content = {"format": 1, "name": f"{IMAGE} {BIDI}", "created": 1.0, "updated": 2.0, "runs": entries}
    write_json(path / "manifest.json", content)
    (path / "code.diff").write_text(f"+{SCRIPT}\n-{IMAGE}\n+{BIDI}\n")
    shutil.copytree(path / "runs" / RUNS[0], path.parent / ALONE)
    return path


def _record(run: Path, label: str, number: int) -> None:
    facts = context(condition=label, run_id=run.name, max_steps=STEPS)
    with closing(RunRecorder(run, facts, {}, token_text=_pieces)) as recorder:
        for at in range(STEPS):
            groups = [_group(k, at + number) for k in range(4)]
            if at in (0, STEPS - 1):
                recorder.record_eval(evaluation(groups, at + (at > 0)))
            recorder.record_step(step(groups, at))


def _pieces(ids: Any) -> tuple[str, list[tuple[int, int]]]:
    """A text for every token, by its number."""
    pieces = [TEXTS[each % len(TEXTS)][:200] for each in ids]
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    return "".join(pieces), list(zip([0, *ends[:-1]], ends, strict=True))


def _action(length: int, text: str, stop: str = "stop") -> Action:
    logprobs, entropy = np.linspace(-3.0, -0.1, length), np.full(length, 0.5, dtype=np.float32)
    return Action(list(range(length)), text, logprobs, entropy, stop)  # type: ignore[arg-type]


def _group(k: int, salt: int) -> CreditedGroup:
    """Three answers of two turns, whose problem, tags, messages, tools and errors are hostile."""
    texts = [TEXTS[(k * 3 + i + salt) % len(TEXTS)] for i in range(len(TEXTS))]
    problem = Problem(TEXTS[k], texts[0], texts[1], (SCRIPT, BIDI, IMAGE)[:k])
    asked = ({"role": "system", "content": SCRIPT}, {"role": "user", "content": texts[0]})
    prompt = Prompt(problem, f"<user>{texts[0]}", (1, 2, 3), asked)
    rollouts = []
    for n in range(3):
        back = ({"role": "tool", "name": IMAGE, "content": texts[n + 4]},)
        turns = (Turn((1, 2, 3), _action(12, texts[n + 2]), asked),
                 Turn((4,), _action(9, texts[n + 3], "length"), back,
                      reward=0.5, metrics={IMAGE: 1.0}, logs={SCRIPT: IMAGE}))  # fmt: skip
        reward = RewardResult(float((n + salt) % 2), sample_metrics={IMAGE: 1.0})
        if n == 2:
            reward = RewardResult(None, error=SCRIPT + NUL)
        advantage = math.nan if reward.total_reward is None else reward.total_reward - 0.5
        rollouts.append(CreditedRollout(prompt, turns, reward, advantage=advantage))
    return CreditedGroup(prompt, tuple(rollouts), "zero_advantage" if k == 3 else None)


def _worse(run: Path, label: str) -> None:
    rows = [{"step": at, "condition": label, **{key: at + 0.5 for key in KEYS}, "mean_reward": 0.25 * at, SCRIPT: IMAGE}
            for at in range(STEPS)]  # fmt: skip
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").unlink()
    for name in run.glob("metrics.f32*"):
        name.unlink()
    append_jsonl(run / "metrics.jsonl", [{**row, **more} for row, more in zip(found, rows, strict=True)])
    append_jsonl(run / "notes.jsonl", [{"step": at, "key": KEYS[at % len(KEYS)],
                                        "level": ("warning", SCRIPT)[at % 2], "text": text, "remedy": IMAGE}
                                       for at, text in enumerate(TEXTS)])  # fmt: skip
    lines = [f"2026-01-01 00:00:00 warning {text}" for text in TEXTS]
    (run / "run.log").write_bytes("\n".join(lines).encode("utf-8", "surrogatepass") + b"\xff\xfe\n")
    settings = {"training": {"seed": 1, "max_steps": STEPS, "eval_every": 3}, "data_hash": SCRIPT,
                "algorithm": {"advantage_mode": LONG[:50]},
                IMAGE: {"__proto__": label, SCRIPT: BIDI}, "__proto__": {"polluted": 1}}  # fmt: skip
    write_json(run / "config.json", settings | {"run_id": run.name, "condition": label})
    (run / "code.diff").write_text(f"+{SCRIPT}{label}\n-{IMAGE}\n+{BIDI}\n")
    write_json(run / "environment.json", {"python": SCRIPT, "packages": {IMAGE: label, "__proto__": "1"}})
