"""Evaluate adapters of several LoRA ranks on a run's held-out problems."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from retrain.adapters.verify import RankMarks
from retrain.config import Config
from retrain.config.evaluation import HeldOut
from retrain.config.runs import RunSpec
from retrain.data.dataset import content_hash
from retrain.data.prompts import Renderer
from retrain.environments.build import CompletionLengths, askable, data_of, environments_of, episode_limits
from retrain.policy.adapter_io import read_adapter
from retrain.policy.base import workers_for
from retrain.policy.local import LocalSnapshot
from retrain.records.reader import evaluation_rows, held_out_completions, read_config
from retrain.records.schema.layout import FINAL
from retrain.rewards import build_grader
from retrain.training.bases import Bases
from retrain.training.evaluation import EvaluatedPolicy, Evaluator
from retrain.types import PolicyRef, Problem


def evaluate_ranks(
    spec: RunSpec, folder: Path, longest: CompletionLengths, bases: Bases, directory: Path, paths: Sequence[Path]
) -> RankMarks:
    """Evaluate the adapters in ``paths``, the run's own first, on the run's decisive held-out set.

    ``longest`` are the longest completions of the plan's runs, which decide which prompts fit the context. ``bases``
    has the base in memory, or loads it. Inference servers write their logs to ``directory``. Raises RetrainError when
    model, data or grader cannot be used.
    """
    held_out = spec.config.decisive
    assert held_out is not None  # checked by `verify_ranks`
    config = spec.config
    files = bases.model_files(config)
    data = askable(data_of(config, folder), config, longest, files.tokenizer, files.context)
    full = _final_marks(paths[0], config, held_out, data.sets[held_out.name])
    correct, ranks = [], []
    with ExitStack() as stack:
        if config.inference.served:
            base, lanes, engine = bases.with_servers(config, directory)
        else:
            base, lanes, engine = bases.with_engine(config)
            engine.workers = workers_for(base)
            stack.callback(engine.workers.close)
        grader = stack.enter_context(build_grader(config.reward, folder, lambda: base.device))
        environment = environments_of(config, data, grader, folder)[held_out.name]
        renderer = Renderer(base.tokenizer, held_out.data, config.environment.tools_prompt)
        evaluator = Evaluator(engine, renderer, [held_out], limits=episode_limits(config, base.context_length))
        stream = config.stream("sampling")
        for path in paths:  # one after another, so that memory does not grow with their number
            stored = read_adapter(path)
            ranks.append(stored.config["r"])
            if path == paths[0] and full is not None:
                correct.append(full)
                continue
            adapter = lanes.new_adapter(ranks[-1], next(iter(stored.scales.values())) * ranks[-1])
            adapter.load(stored.tensors)
            engine.publish(ref := PolicyRef(f"rank {ranks[-1]}", 0), LocalSnapshot(adapter.frozen()))
            # The random streams of the run's final evaluation, so that all adapters have common random numbers.
            subject = EvaluatedPolicy(ref, {held_out.name: environment}, stream, config.training.max_steps)
            (record,) = evaluator.evaluate(held_out, [subject])
            engine.forget()
            if record.error is not None:
                raise record.error
            marks = [[float(rollout.reward.is_correct) for rollout in group.rollouts] for group in record.groups]
            correct.append(np.array(marks))
    return RankMarks(np.stack(correct), ranks, full is None)


def _final_marks(adapter: Path, config: Config, held_out: HeldOut, problems: Sequence[Problem]) -> np.ndarray | None:
    """Return correctness (0 or 1) [problems, samples] in the run's final evaluation; None if that evaluation had
    another adapter, other problems or other sampling settings."""
    steps = config.training.max_steps
    facts = read_config(adapter.parent) if adapter.name == FINAL else {}
    if facts.get("heldout_hashes", {}).get(held_out.name) != content_hash((), problems):
        return None
    rows = evaluation_rows(adapter.parent, held_out.name)
    sampling = {"samples": held_out.samples, **vars(held_out.sampling.requested)}
    if not rows or rows[-1]["step"] != steps or any(rows[-1].get(key) != value for key, value in sampling.items()):
        return None
    completions = held_out_completions(adapter.parent, held_out.name)
    rows = [row for row in completions if row["step"] == steps]
    asked = [(problem.id, sample) for problem in problems for sample in range(held_out.samples)]
    if [(row["problem_id"], row["sample"]) for row in rows] != asked:
        return None
    return np.reshape([float(row["correct"]) for row in rows], (len(problems), held_out.samples))
