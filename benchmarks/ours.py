"""retrain as one side of the speed benchmarks: the cohort that ``retrain train`` builds, stepped by hand.

Everything that a step of ``retrain train`` does is in it (credit, records, metrics files). Only the grader is replaced:
rewards alternate within each group, as on every side. Sampling is the time inside the engine's ``sample``; all the
rest of the step counts as update.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import shared
from shared import ALPHA, LR, RANK, Measured, Setting

from retrain.campaign.planning.plan import Plan
from retrain.config import load
from retrain.records.observer import NullObserver
from retrain.training.assemble import assemble
from retrain.types import RewardResult

FIVE = (("grpo", "none"), ("maxrl", "none"), ("maxrl", "gtpo"), ("maxrl", "gtpo_hicra"), ("maxrl", "gtpo_sepa"))
"""The five standard conditions."""


class Alternating:
    """A grader by position: 0, 1, 0, 1, … within every group."""

    names = ("fixed",)

    def grade(self, items: Sequence[Any]) -> list[RewardResult]:
        return [RewardResult(reward, components={"fixed": reward}) for reward in shared.rewards(len(items))]


class TimedEngine:
    """The cohort's engine with a stopwatch; counts the tokens that it returned."""

    def __init__(self, engine: Any):
        self.__dict__.update(engine=engine, wall=0.0, cpu=0.0, tokens=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self.engine, name, value)

    def sample(self, *arguments: Any, **options: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        groups = self.engine.sample(*arguments, **options)
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu
        self.tokens += sum(len(completion) for group in groups for completion in group)
        return groups


def toml(
    setting: Setting, model: Path, data: Path, conditions: Sequence[tuple[str, str]], device: str, dtype: str = "auto"
) -> str:
    """The campaign (or, with one condition, the single run) of this setting."""
    lines = []
    if len(conditions) > 1:
        lines += ["[campaign]", "seeds = [1]", f"lanes = {len(conditions)}"]
        for advantage, transform in conditions:
            lines += ["[[campaign.conditions]]", f'advantage_mode = "{advantage}"', f'transform_mode = "{transform}"']
    else:
        lines += ["[algorithm]", f'advantage_mode = "{conditions[0][0]}"', f'transform_mode = "{conditions[0][1]}"']
    lines += [
        f"[model]\nmodel = {json.dumps(str(model))}\nlora_rank = {RANK}\n[lora]\nalpha = {float(ALPHA)}",
        f"[data]\nsource = {json.dumps(str(data))}\n[evaluation]\nproblems = 0",
        f"[backend]\ndevices = {json.dumps(device)}\n[inference]\ndtype = {json.dumps(dtype)}",
        f"[training]\nbatch_size = {setting.prompts}\ngroup_size = {setting.samples}\nlr = {LR}\nsave_every = 0",
        f"max_tokens = {setting.new_tokens}\nmax_steps = 1000000",
    ]
    return "\n".join(lines) + "\n"


@contextmanager
def cohort(
    setting: Setting,
    models: Path,
    conditions: Sequence[tuple[str, str]] = FIVE[:1],
    device: str = "cpu",
    dtype: str = "auto",
) -> Iterator[Any]:
    """A cohort of one run per condition, ready to step; its run directories go with it."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        rows = [{"prompt": text, "answer": "1"} for text in shared.prompt_texts(setting, 8 * setting.prompts)]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        model = shared.model_directory(models, setting.shape)
        (folder / "bench.toml").write_text(toml(setting, model, folder / "data.jsonl", conditions, device, dtype))
        plan = Plan.of(load(folder / "bench.toml"), folder / "out")
        made = assemble(plan.job(plan.specs), NullObserver(), lambda: False, stack)
        for run in made.runs:
            run.environments["train"].grader = Alternating()  # pyright: ignore[reportAttributeAccessIssue]
            run.publish_to(made.engine)
        timed: Any = TimedEngine(made.engine)
        made.engine = made.queue.engine = timed
        yield made
        for run in made.runs:
            run.recorder.close(failed=False)


def step(made: Any) -> Measured:
    """One step of every run of the cohort. Raises RuntimeError when a run fails or a completion ends early."""
    engine = made.engine
    engine.wall, engine.cpu, engine.tokens = 0.0, 0.0, 0
    laps = shared.Laps()
    made.step(made.runs)
    wall, cpu = laps.lap()
    for run in made.runs:
        if run.error is not None:
            raise RuntimeError(run.error)
    return Measured(engine.wall, wall - engine.wall, engine.cpu, cpu - engine.cpu, engine.tokens, shared.peak_mib())


def run_mib(made: Any, setting: Setting) -> float:
    """What each run must hold beside the base: adapter, gradient and Adam's moments (fp32), its keys and values."""
    shape = shared.SHAPES[setting.shape]
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * setting.rows * setting.length
    adapter = sum(a.numel() + b.numel() for a, b in made.runs[0].policy.adapter.tensors().values())
    return (16 * adapter + cache * made.engine.base.dtype.itemsize) / 2**20


def main() -> None:
    parser = shared.side_parser(__doc__)
    parser.add_argument("--first", type=int, default=0, help="number of the first of the five standard conditions")
    parser.add_argument("--runs", type=int, default=1, help="how many of them step together")
    options = parser.parse_args()
    import torch

    sys.stdout = sys.stderr
    torch.set_num_threads(options.threads)
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401 - what every run imports is not memory of the run

    imported = 0.0 if options.device == "cuda" else shared.peak_mib()  # of a GPU only what torch allocates counts
    setting, conditions = Setting.parse(options.serve), FIVE[options.first : options.first + options.runs]
    with cohort(setting, options.models, conditions, options.device, options.dtype) as made:
        base = sum(p.numel() * p.element_size() for p in made.engine.base.model.parameters())
        shared.serve(lambda: step(made), imported_mib=imported, base_mib=base / 2**20, run_mib=run_mib(made, setting))


if __name__ == "__main__":
    main()
