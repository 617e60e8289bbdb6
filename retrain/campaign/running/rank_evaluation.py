"""Evaluate adapters on held-out problems as training does, for ``retrain eval`` and ``retrain squeeze``."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrain.adapters.talk import lane_adapter
from retrain.adapters.verify import RankMarks
from retrain.config import Config
from retrain.config.evaluation import HeldOut
from retrain.config.runs import RunSpec
from retrain.data import Dataset
from retrain.data.dataset import content_hash
from retrain.environments.build import CompletionLengths, askable, environments_of
from retrain.environments.protocol import Environment
from retrain.policy.adapter_io import AdapterFile
from retrain.policy.base import MemoryPlan, workers_for
from retrain.policy.local import LocalSnapshot, lane_bytes
from retrain.policy.lora import Lanes
from retrain.records.reader import evaluation_rows, held_out_completions, read_config
from retrain.records.schema.layout import FINAL
from retrain.rewards import Grader
from retrain.rollouts.collect import require_graded
from retrain.training.assemble import build_graders, evaluator_of, load_problems
from retrain.training.bases import Bases, CohortModel, local_model
from retrain.training.evaluation import EvaluatedPolicy, Evaluator
from retrain.training.inputs import CohortJob
from retrain.types import EvalRecord, PolicyRef, Problem


@dataclass(frozen=True)
class AdapterEvaluator:
    model: CohortModel
    lanes: Lanes
    environments: Mapping[str, Environment]  # By held-out set
    evaluator: Evaluator

    def evaluate(
        self, held_out: HeldOut, adapter: Path | None, stream: tuple[int | str, ...], step: int, rank: int = 1
    ) -> EvalRecord:
        """Sample and grade a held-out set with an adapter, or with the base if ``adapter`` is None.

        A training evaluation with equal weights, ``stream`` (prefix of the random streams) and ``step`` has the same
        answers. ``rank``: rank to which an adapter of a smaller one is padded with zeros. Raises RunFailed for
        an exception of an environment or grader.
        """
        if adapter is None:
            weights = self.lanes.new_adapter(rank, 1.0)  # zeros
        else:
            with AdapterFile(adapter) as file:
                weights = lane_adapter(file, self.lanes, rank)
        engine = self.model.engine
        engine.publish(ref := PolicyRef("evaluated", 0), LocalSnapshot(weights.frozen()))
        try:
            (record,) = self.evaluator.evaluate(held_out, [EvaluatedPolicy(ref, self.environments, stream, step)])
        finally:
            engine.retire(ref)
        if record.error is not None:
            require_graded([record.error])
        return record


@contextmanager
def adapter_evaluator(
    spec: RunSpec, job: CohortJob, grader: Grader, data: Dataset, bases: Bases,
    notify: Callable[[str, str], None] = lambda text, level: None,
) -> Iterator[AdapterEvaluator]:  # fmt: skip
    """Yield the evaluator of a run's base, which ``bases`` has in memory or loads. ``data``: problems that fit its
    context. Inference servers write their logs to the directory of ``job``. Raises RetrainError when the model cannot
    be used."""
    config = spec.config
    with ExitStack() as stack:
        if config.inference.served:
            base, lanes, engine = bases.with_servers(config, job.directory, notify)
        else:
            base, lanes, engine = bases.with_engine(config, lambda text: notify(text, "info"))
        workers = stack.enter_context(closing(workers_for(base)))
        model = local_model(base, lanes, engine, workers, MemoryPlan.of(base, lane_bytes(base, lanes, [spec])))
        environments = environments_of(config, data, grader, job.folder)
        yield AdapterEvaluator(model, lanes, environments, evaluator_of(spec, job.directory, model))


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
    correct, ranks = [], []
    with ExitStack() as stack:
        graders = build_graders([spec], folder, stack)
        files = bases.model_files(config)
        data = askable(load_problems([spec], folder, graders), config, longest, files.tokenizer, files.context)
        full = _final_marks(paths[0], config, held_out, data.sets[held_out.name])
        job = CohortJob(directory, folder, [spec], longest)
        evaluator = stack.enter_context(adapter_evaluator(spec, job, graders[config.reward.grading], data, bases))
        for path in paths:  # one after another, so that memory does not grow with their number
            with AdapterFile(path) as file:
                ranks.append(file.rank)
            if path == paths[0] and full is not None:
                correct.append(full)
                continue
            # The random streams of the run's final evaluation, so that all adapters have common random numbers.
            steps = config.training.max_steps
            record = evaluator.evaluate(held_out, path, config.evaluation_stream(steps), steps)
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
