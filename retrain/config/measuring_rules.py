"""Rules about what is measured and compared: held-out sets, the metric that decides, looks and seeds.

A rule is as in ``retrain.config.rules``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from itertools import count

from retrain.config.base import Finding, Section
from retrain.config.campaign import NORMAL_FEWEST, Campaign, seeds_for_verdict, seeds_suggested
from retrain.config.describe import no_effect
from retrain.config.evaluation import CUTS, DECIDING, EvaluationSet, too_early, whole_evaluations
from retrain.config.root import Config
from retrain.config.tasks import FILE_ENDINGS, has_configurations


def evaluation_rules(config: Config) -> Iterator[Finding]:
    """Sets are sampled so that it tells something, and no key is without effect."""
    evaluation = config.evaluation
    if evaluation.sets and config.data.eval_source is not None and all(each.source for each in evaluation.sets):
        yield Finding(
            ("data.eval_source", "evaluation.sets"),
            "has no effect: every one of [[evaluation.sets]] has its own source",
            "remove the line",
        )
    for index, each in enumerate(evaluation.sets):
        yield from _data_findings(config, each, f"evaluation.sets.{index}")
    yield from _cut_findings(config)
    for index, held_out in enumerate(config.held_out):
        if held_out.samples > 1 and held_out.sampling.temperature == 0:
            own = evaluation.sets[index] if evaluation.sets else None
            path = "evaluation" if own is None or own.samples is None else f"evaluation.sets.{index}"
            greedy = "evaluation" if own is None or own.temperature is None else f"evaluation.sets.{index}"
            yield Finding(
                (f"{path}.samples", f"{greedy}.temperature"),
                f"is {held_out.samples} at temperature 0: all samples of a problem are the same",
                "samples = 1",
            )


def _cut_findings(config: Config) -> Iterator[Finding]:
    evaluation, sets = config.evaluation, config.held_out
    tables: list[tuple[str, Section]] = []
    if sets and all(each.sampling.temperature == 0 for each in sets):
        tables.append(("evaluation", evaluation))
    tables += [
        (f"evaluation.sets.{index}", own)
        for index, (own, held_out) in enumerate(zip(evaluation.sets, sets, strict=False))  # no sets, or one unnamed
        if held_out.sampling.temperature == 0
    ]
    for path, table in tables:
        for key in CUTS:
            if getattr(table, key) is not None:
                message = "has no effect at temperature 0, which is greedy"
                yield Finding((f"{path}.{key}", f"{path}.temperature"), message, "remove the line")


def _data_findings(config: Config, each: EvaluationSet, path: str) -> Iterator[Finding]:
    source = each.source or config.data.eval_source or config.data.source
    if each.split is not None and (source == "arithmetic" or source.endswith(FILE_ENDINGS)):
        yield no_effect(f"{path}.split", f"{path}.source", source)
    if each.levels is not None and source != "arithmetic":
        fix = 'remove the line, or source = "arithmetic"'
        yield no_effect(f"{path}.levels", f"{path}.source", source, fix)
    if each.subset is not None and each.source is not None and not has_configurations(source):
        yield no_effect(f"{path}.subset", f"{path}.source", source)
    for key in ("subset", "prompt_column", "answer_column", "tags_column"):
        if getattr(each, key) is not None and each.source is None:
            yield Finding(
                (f"{path}.{key}", path),
                "has no effect without a source of the set's own: the problems are those of [data]",
                f"remove the line, or set {key} in [data]",
            )


def declared_rules(config: Config) -> Iterator[Finding]:
    """What is declared as deciding can be measured with the evaluation that is asked for."""
    if not config.is_campaign:
        return
    metric, evaluation = config.campaign.primary_metric, config.evaluation
    summary, _, key = ("final", ":", metric) if metric.startswith("eval/") else metric.partition(":")
    at_k = re.search(r"(?:pass|avg|maj)@(\d+)$", key)
    measured = metric in ("auc", "last3") or key.startswith("eval/") or at_k is not None
    if measured and evaluation.problems == 0:
        yield Finding(
            ("campaign.primary_metric", "evaluation.problems"),
            f'is "{metric}", which needs held-out problems',
            "problems = 128",
        )
    elif (
        summary == "auc"
        and (measured or "/" not in key)
        and config.training.eval_every == 0
        and evaluation.problems
        and evaluation.schedule == "every"
    ):
        yield Finding(
            ("campaign.primary_metric", "training.eval_every"),
            f'is "{metric}": the area under a curve needs evaluations while training, not only before and after',
            f"eval_every = {max(1, config.training.max_steps // 5)}",
        )
    if not evaluation.names:
        return
    name = key.split("/")[1] if key.startswith("eval/") else evaluation.names[0]
    if name not in evaluation.names:
        meant = difflib.get_close_matches(name, evaluation.names, n=1, cutoff=0.0)[0]
        yield Finding(
            ("campaign.primary_metric", "evaluation.sets"),
            f'is "{metric}", and the held-out sets are {", ".join(evaluation.names)}',
            f'primary_metric = "{metric.replace(f"eval/{name}", f"eval/{meant}", 1)}"',
        )
        return
    samples = next(each.samples for each in config.held_out if each.name == name)
    if at_k is not None and int(at_k[1]) > samples:
        own = next((f".sets.{i}" for i, each in enumerate(evaluation.sets) if each.name == name and each.samples), "")
        yield Finding(
            ("campaign.primary_metric", f"evaluation{own}.samples"),
            f'is "{metric}", which needs {at_k[1]} samples of each held-out problem and has {samples}',
            f"samples = {at_k[1]}",
        )


SHORT = r"(correct_rate|reward_mean|mean_length|(pass|avg|maj)@\d+|[^/]+/correct_rate)?"
"""Metrics of held-out problems that are named without their set."""


def deciding_rules(config: Config) -> Iterator[Finding]:
    """A schedule of evaluations has something to evaluate, and what is declared as deciding is among it."""
    schedule, training = config.evaluation.schedule, config.training
    if schedule == "verdict" and not config.evaluation.problems:
        keys = ("evaluation.schedule", "evaluation.problems")
        yield Finding(keys, "has no effect with problems = 0", "remove the line, or problems = 128")
        return
    if not config.is_campaign:
        return
    metric = config.campaign.primary_metric
    summary, _, key = metric.partition(":")
    held_out = key.startswith("eval/") or re.fullmatch(SHORT, key) is not None
    if summary == "auc" and held_out and schedule == "verdict":
        yield Finding(
            ("campaign.primary_metric", "evaluation.schedule"),
            f'is "{metric}", the area under a curve for which schedule = "verdict" asks only a part of the problems',
            f'primary_metric = "{metric.replace("auc", "last3", 1)}", or schedule = "every"',
        )
    if summary != "last3":
        return
    if not held_out:
        yield Finding(
            ("campaign.primary_metric",),
            f'is "{metric}", the mean of three held-out evaluations, and {key} is a number of training, whose final '
            "value is its mean over the last tenth of the steps",
            f'primary_metric = "final:{key}"',
        )
    elif config.evaluation.problems:
        yield from _last3_findings(metric, schedule, training.max_steps, training.eval_every)


def _last3_findings(metric: str, schedule: str, max_steps: int, eval_every: int) -> Iterator[Finding]:
    """There are three evaluations to take the mean of, and they are about the end of training."""
    steps = whole_evaluations(schedule, max_steps, eval_every)[-DECIDING:]
    if max_steps < DECIDING:
        what = f'is "{metric}", the mean of three evaluations, and there are fewer steps: max_steps = {max_steps}'
        yield Finding(("campaign.primary_metric", "training.max_steps"), what, 'primary_metric = "final"')
        return
    keys, fix = ("campaign.primary_metric", "training.eval_every"), f"eval_every = {max(1, max_steps // 10)}"
    fix = f'[evaluation] schedule = "verdict", or {fix}'
    if len(steps) < DECIDING:
        done = " and ".join(map(str, steps))
        what = f'is "{metric}", the mean of three evaluations, and after the start there'
        what += f" {'is that' if len(steps) == 1 else 'are those'} after {done} of {max_steps} steps"
        yield Finding(keys, what, fix)
    elif too_early(steps[0], max_steps):
        first, second, last = steps
        what = f'is "{metric}", here the mean of those after {first}, {second} and {last} of {max_steps} steps: '
        yield Finding(keys, f"{what}not of the end of training alone; for that type", fix, warning=True)


def campaign_rules(campaign: Campaign, is_run: bool) -> Iterator[Finding]:
    """What a comparison needs. ``is_run``: this is one resolved run of a campaign, which compares nothing itself."""
    if not is_run:
        yield from sequential_rules(campaign)
        yield from test_rules(campaign)
        executor, fix = campaign.executor, 'remove the line, or executor = "processes"'
        if executor == "inprocess" and campaign.workers != "auto":
            yield Finding(("campaign.workers", "campaign.executor"), f'has no effect with executor = "{executor}"', fix)
        keys = ("campaign.gpus_per_cohort", "campaign.executor")
        if executor == "inprocess" and campaign.gpus_per_cohort != 1:
            yield Finding(keys, f'has no effect with executor = "{executor}"', fix)
        if executor == "slurm" and campaign.gpus_per_cohort < 1:
            words = f"is {campaign.gpus_per_cohort:g}, and a job of Slurm's has whole GPUs"
            yield Finding(keys, words, "gpus_per_cohort = 1")
    others, seeds = len(campaign.conditions) - 1, len(campaign.seeds)
    needed = seeds_for_verdict(others, campaign.test) if others else 0
    if seeds < needed:
        suggested = seeds_suggested(others, campaign.test)
        room = f", or {suggested} if one pair may disagree" if suggested > needed else ""
        yield Finding(
            ("campaign.seeds",),
            f"has {seeds}: too few for a verdict between {'two' if others == 1 else others + 1} conditions, "
            f"which takes at least {needed}{room}; type",
            f"seeds = {list(range(1, suggested + 1))}",
            warning=True,
        )
    elif campaign.test == "normal" and others > 0 and seeds < (exact := seeds_for_verdict(others)):
        yield Finding(
            ("campaign.seeds", "campaign.test"),
            f"has {seeds}: should a run collapse, the exact test decides, which takes {exact} for "
            f"{'one comparison' if others == 1 else f'{others} comparisons'}; to be able to tell then too, type",
            f"seeds = {list(range(1, exact + 1))}",
            warning=True,
        )


PERMUTED_MOST = 6
"""Comparisons of which a closed permutation test goes through all sets."""


def test_rules(campaign: Campaign) -> Iterator[Finding]:
    others = len(campaign.conditions) - 1
    if campaign.test == "permutation" and others > PERMUTED_MOST:
        yield Finding(
            ("campaign.test", "campaign.conditions"),
            f'is "permutation" with {others + 1} conditions: it goes through all sets of up to {PERMUTED_MOST} beside '
            "the baseline",
            'test = "exact"',
        )
    if campaign.prior_spread and (campaign.test != "normal" or others != 1 or campaign.sequential != "off"):
        yield Finding(
            ("campaign.prior_spread", "campaign.test"),
            'is set: an earlier spread counts for test = "normal" with two conditions and sequential = "off" only',
            "prior_spread = 0.0",
        )
    looks = campaign.sequential not in ("off", "always_valid")
    for key in ("futility", "race"):
        if getattr(campaign, key) and not looks:
            yield Finding(
                (f"campaign.{key}", "campaign.sequential"),
                f'is on with sequential = "{campaign.sequential}": it stops conditions at looks at a planned number '
                "of seeds",
                'sequential = "obrien_fleming"',
            )
    if campaign.race and others < 2:
        yield Finding(
            ("campaign.race", "campaign.conditions"),
            f"is on with {others + 1} condition{'s' if others else ''}: a race is among several beside the baseline; "
            "futility ends a comparison of two",
            "race = false",
        )


SEQUENTIAL_MOST = 20
"""Seeds that the exact sequential test goes through all sign patterns of."""


def sequential_rules(campaign: Campaign) -> Iterator[Finding]:
    """A stopping rule needs something to decide and enough seeds to decide it with."""
    others, seeds = len(campaign.conditions) - 1, len(campaign.seeds)
    if campaign.sequential == "off":
        return
    if others < 1:
        yield Finding(
            ("campaign.sequential", "campaign.conditions"),
            "is on, and there is one condition: nothing is compared that could be decided",
            'sequential = "off"',
        )
        return
    if campaign.test == "permutation" or (campaign.test == "normal" and campaign.sequential == "always_valid"):
        what = "signs" if campaign.sequential == "always_valid" else "the exact or the normal test"
        yield Finding(
            ("campaign.sequential", "campaign.test"),
            f'is "{campaign.sequential}" with test = "{campaign.test}": it looks by {what} only',
            'test = "exact"',
        )
        return
    if campaign.sequential == "always_valid":
        return
    # With n of n + 1 seeds the even rule may have spent n/(n + 1) of the error; the other rules need as many.
    first = next(n for n in count(1) if others * 2.0 ** -(n - 1) <= 0.05 * n / (n + 1))
    if campaign.test == "normal":
        first = NORMAL_FEWEST
    if not first < seeds <= SEQUENTIAL_MOST:
        yield Finding(
            ("campaign.sequential", "campaign.seeds"),
            f"is on with {seeds} seeds: it can decide after {first} at the earliest, so that it takes {first + 1} to "
            f"{SEQUENTIAL_MOST} to stop early",
            f"seeds = {list(range(1, first + 3))}",
        )
    if campaign.lanes != "auto" and campaign.lanes >= (others + 1) * seeds:
        yield Finding(
            ("campaign.sequential", "campaign.lanes"),
            f"is on and lanes = {campaign.lanes} trains all {(others + 1) * seeds} runs at once: nothing could be "
            "stopped",
            'lanes = "auto"',
        )
