"""Sample and grade some problems of a run's first batch before training.

The run is built as for training (``assemble``), in a temporary directory and without trackers: prompts, answers and
grader are those of its first step.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, count, islice
from pathlib import Path
from tempfile import TemporaryDirectory

from retrain.adapters.talk import trial_report
from retrain.campaign.planning.plan import Plan
from retrain.config.campaign import condition_name, find_label
from retrain.config.runs import RunSpec
from retrain.errors import UsageError
from retrain.policy.local import DoesNotFit
from retrain.probe.conditions import temporary, without_warm_up
from retrain.records.observer import Messages
from retrain.records.schema.base import Row
from retrain.training.assemble import assemble

ANSWERS = 4  # Answers for each problem, or the group size where that is smaller


def trial(plan: Plan, problems: int, samples: int | None, condition: str | None, notify: Callable[[str], None]) -> Row:
    """Sample and grade ``samples`` answers to each of the first ``problems`` problems of one planned run.

    The run has the first seed and the condition with the label ``condition``, by default the first one, without its
    warm-up. Returns ``run``, ``seed``, ``model`` and the fields of ``trial_report``. Raises the errors of training.
    """
    spec = temporary(chosen(plan, condition))
    if spec.config.warmup.active:
        notify("[warmup] is left out: these are answers of the base")
        spec = without_warm_up(spec)
    samples = samples or min(ANSWERS, spec.config.training.group_size)
    with ExitStack() as stack:
        aside = Path(stack.enter_context(TemporaryDirectory(prefix="retrain-try-")))
        try:
            job = replace(plan, directory=aside).job([spec])
            cohort = assemble(job, Messages(notify), lambda: False, stack)
        except DoesNotFit as short:
            raise UsageError(str(short)) from short
        run = cohort.runs[0]
        run.publish_to(cohort.engine)
        upcoming = chain.from_iterable(run.requests.of_step(run.step, step) for step in count())
        asked = [replace(request, samples=samples) for request in islice(upcoming, problems)]
        facts = {"run": spec.run_id, "seed": spec.seed, "model": spec.config.model.model}
        return facts | trial_report(cohort.engine, asked, run.environments["train"], run.requests.renderer, run.config)


def chosen(plan: Plan, condition: str | None) -> RunSpec:
    labels = list(dict.fromkeys(spec.label for spec in plan.specs))
    label = labels[0] if condition is None else find_label(condition, labels)
    if label is None:
        raise UsageError(f"--condition {condition!r} is not one of {', '.join(map(condition_name, labels))}")
    return next(spec for spec in plan.specs if spec.label == label)


def others(plan: Plan, condition: str | None) -> list[str]:
    """Return the labels of the conditions whose reward or sampling differs from ``condition``. Raises UsageError if
    there is no such condition."""
    tried = chosen(plan, condition)

    def seen(spec: RunSpec) -> tuple[object, ...]:
        return spec.config.reward.grading, spec.config.training.sampling.requested

    return list(
        dict.fromkeys(spec.label for spec in plan.specs if spec.seed == tried.seed and seen(spec) != seen(tried))
    )
