"""Evaluations by verifiers 0.4 and prime-rl 0.8: episodes in ``traces.jsonl``, numbers in prime-rl's ``metrics.jsonl``.

prime-rl writes the episodes of an evaluation twice: ``all``, and ``effective``, which lacks those with an error. Only
``all`` is read, because the condition that fails more often would look better in the other.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from retrain.errors import UsageError
from retrain.records.foreign.json_files import first_bytes, json_rows, number, step_of
from retrain.records.foreign.table import HELDOUT_SET, Format, MetricFacts, ReadRequest, ResultRow
from retrain.records.reader import read_object
from retrain.records.schema.base import Row

REWARD = "reward"
EPISODE = re.compile(rb'\s*\{"id": ?"[^"]*", ?"env": ?\{')
METRICS_ROW = re.compile(rb'\s*\{"step": \d+, "time": \d+(\.\d+)?, "')
STEP = re.compile(r"step_(\d+)")
AVERAGE = re.compile(r"eval/(?P<env>.+)/all/(?P<agent>[^/]+)/(?P<metric>avg@\d+)")
CONFIGS = ("rl.json", "orchestrator.json", "trainer.json", "resolved/eval.json", "eval.json")
EPISODES = "rollouts/step_*/eval/all/traces.jsonl"


def _recognises(path: Path) -> bool:
    start = METRICS_ROW if _has_numbers(path) else EPISODE
    return path.suffix == ".jsonl" and start.match(first_bytes(path)) is not None


def _choose(files: Sequence[Path]) -> Sequence[Path]:
    """Leave out episodes of training, and ``effective``, which lacks episodes with an error."""
    chosen = [path for path in files if _step_of(path) is None or path.parts[-3:-1] == ("eval", "all")]
    if files and not chosen:
        raise UsageError(f"{files[0]} is not read: name the episodes of an evaluation, {EPISODES}")
    return chosen


def _rows(path: Path, request: ReadRequest) -> Iterator[ResultRow]:
    step = _step_of(path)
    configs = (path.parent if step is None else path.parents[4]) / "configs"
    # Seeds of parts, such as that of the inference, are not the run's
    seeds = (seed for name in CONFIGS if isinstance(seed := read_object(configs / name).get("seed"), int))
    seed = next(seeds, None)
    for row in _numbers(path) if _has_numbers(path) else _answers(path, step):
        yield row._replace(seed=seed)


def _has_numbers(path: Path) -> bool:
    return path.name.endswith("metrics.jsonl")


def _step_of(path: Path) -> int | None:
    """Return N of ``rollouts/step_N/<kind>/<subset>/traces.jsonl``, None for other paths."""
    match = STEP.fullmatch(path.parts[-4]) if len(path.parts) > 3 else None
    return int(match[1]) if match else None


def _numbers(path: Path) -> Iterator[ResultRow]:
    """Yield prime-rl's averages. If several agents play an environment, the metric is named with the agent."""
    for line, row in json_rows(path):
        found = [(match, value) for name, value in row.items() if (match := AVERAGE.fullmatch(name))]
        agents, where = Counter(match["env"] for match, _ in found), f"{path}:{line}"
        step, time = step_of(row, where), number(row.get("time"), f"{where}: time")
        for match, value in found:
            metric = match["metric"] if agents[match["env"]] == 1 else f"{match['agent']}/{match['metric']}"
            yield ResultRow(metric, number(value, f"{where}: {match[0]}"), step, match["env"], time=time, line=line)


def _answers(path: Path, step: int | None) -> Iterator[ResultRow]:
    for line, episode in json_rows(path):
        try:
            task, env, value = episode["task"], episode["env"], _reward(episode)
            name, problem = str(env.get("name") or env["id"] or HELDOUT_SET), f"{task['key']}:{task['hash']}"
            time = min((trace["timing"]["start"] for trace in episode["traces"]), default=None)
        except (KeyError, TypeError, AttributeError, OverflowError):
            raise UsageError(f"{path}:{line} is not an episode of verifiers 0.4, with task, env and traces") from None
        reward, time = number(value, f"{path}:{line}: {REWARD}"), number(time, f"{path}:{line}: start")
        yield ResultRow(REWARD, reward, step, name, problem, sample=None, time=time, line=line)


def _reward(episode: Row) -> float | None:
    """Return the sum of the weighted rewards; None for an episode with an error or without rewards."""
    if not episode["ok"] or not all(trace["ok"] for trace in episode["traces"]):
        return None
    rewards = [reward for trace in episode["traces"] for reward in trace["rewards"].values() if reward]
    return sum(reward["score"] * reward["weight"] for reward in rewards) if rewards else None


FORMAT = Format(
    tool="verifiers and prime-rl",
    patterns=(EPISODES, "traces.jsonl", "metrics.jsonl", f"**/{EPISODES}", "**/traces.jsonl", "**/metrics.jsonl"),
    recognises=_recognises,
    rows=_rows,
    choose=_choose,
    facts=lambda path: {"avg@*": MetricFacts(True), REWARD: MetricFacts(True, "number")},
)
