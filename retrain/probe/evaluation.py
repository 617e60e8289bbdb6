"""Evaluate models, adapters and checkpoints on a file's held-out sets without training, and compare them by problem.

Models are evaluated one after another, so that a model's answers do not depend on which others are evaluated with it;
those over the same base share it in memory. The directory has a campaign's layout, with one run for each model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count, groupby
from pathlib import Path

from retrain.campaign.planning.engine import with_engine
from retrain.campaign.planning.manifest import Manifest, fingerprint
from retrain.campaign.planning.plan import Plan
from retrain.campaign.planning.references import check
from retrain.campaign.running.rank_evaluation import AdapterEvaluator, adapter_evaluator
from retrain.config.runs import run_directory
from retrain.data import Dataset
from retrain.data.dataset import content_hash
from retrain.environments.build import askable
from retrain.errors import DataError, UsageError, plural
from retrain.files import read_json_if_present, sha256, write_json
from retrain.maths.bounded import bounded_mean_interval
from retrain.policy.base import find_model_files
from retrain.probe.subjects import Subject
from retrain.records.environment import module_hashes, run_facts, system_files
from retrain.records.observer import Messages
from retrain.records.reader import held_out_completions, read_manifest
from retrain.records.schema.base import Row, Values
from retrain.records.schema.campaign import CampaignManifest, RunEntry
from retrain.records.schema.layout import ADAPTER_WEIGHTS, EVALUATION, MANIFEST
from retrain.rewards import Grader
from retrain.training.assemble import ServerEvents, build_graders, check_servers, load_problems, use_deterministic
from retrain.training.bases import Bases
from retrain.training.inputs import CohortJob, allow_all
from retrain.training.run_builder import RunBuilder, shared_facts
from retrain.util.session import DirectoryLock
from retrain.util.text import points
from retrain.verdicts.problem_scores import problem_scores
from retrain.verdicts.results import Measure, read_run

Notify = Callable[[str], None]
SCOPE = "These models, on problems like these: another training run may give another result."


def check_subjects(plan: Plan, subjects: Sequence[Subject], notify: Notify) -> list[Subject]:
    """Return the models with their engines settled, after checking what their settings refer to. Raises ConfigError or
    UsageError."""
    first = plan.specs[0]
    if not first.config.held_out:
        raise UsageError(f"{plan.name} has no held-out problems: type --set evaluation.problems=128")
    if first.config.backend.backend != "local":
        raise UsageError(f"{first.config.backend.backend} evaluates in training only: retrain eval is for local models")
    settings = (first.config.held_out, first.config.reward.grading, first.config.environment.measured)
    for spec in {spec.label: spec for spec in plan.specs}.values():
        if (spec.config.held_out, spec.config.reward.grading, spec.config.environment.measured) != settings:
            notify(f"{spec.label} has other problems, sampling or reward: evaluated as {first.label}")
    plans = [check(with_engine(replace(plan, specs=[each.spec])), places=False) for each in subjects]
    for line in dict.fromkeys(note for each in plans for note in each.notes):
        notify(line)
    return [replace(subject, spec=each.specs[0]) for subject, each in zip(subjects, plans, strict=True)]


def evaluate(plan: Plan, subjects: Sequence[Subject], out: Path | None, notify: Notify) -> Row:
    """Evaluate the models that the directory ``out`` (None: a new one) does not have yet; return ``out``, ``models``
    (name, model, adapter, step and ``sets``, the rows of evals.jsonl with ``tokens``, by held-out set) and
    ``comparisons`` with the first model.

    The same is written to ``evaluation.json``. Raises UsageError for a directory that holds anything else, RunFailed
    when an environment or grader fails.
    """
    template = plan.specs[0]
    use_deterministic(template.config.training.deterministic)
    with ExitStack() as stack:
        graders = build_graders([template], plan.folder, stack)
        data = _problems(plan, subjects, load_problems([template], plan.folder, graders))
        request = _request(subjects, data)
        out = out or _new_directory(plan.directory)
        _require_same(out, request)
        lock = stack.enter_context(DirectoryLock(out, notify))
        manifest = stack.enter_context(Manifest(out, _manifest(out, subjects), lock.check))
        write_json(out / EVALUATION, request)
        manifest.write()
        job = CohortJob(out, plan.folder, [subject.spec for subject in subjects], plan.longest)
        evaluation = _Evaluation(job, manifest, graders[template.config.reward.grading], data, notify)
        try:
            evaluation.run(subjects, stack.enter_context(Bases()))
        except BaseException:
            if any(entry.state == "done" for entry in manifest.runs):
                notify(f"what is finished is in {out}; to evaluate the rest, type the same command with --out {out}")
            raise
        report = request | _results(out, subjects)
        write_json(out / EVALUATION, report)
    return {"out": str(out)} | report


def _problems(plan: Plan, subjects: Sequence[Subject], data: Dataset) -> dict[str, Dataset]:
    """Return the problems that fit the context of each model, by the model's name. Only tokenizers are loaded."""
    by_base: dict[str, Dataset] = {}
    for subject in subjects:
        if subject.base_key in by_base:
            continue
        files = find_model_files(subject.spec.config)
        fitting = askable(data, subject.spec.config, plan.longest, files.tokenizer, files.context)
        if empty := next((name for name, problems in fitting.sets.items() if not problems), None):
            raise DataError(f"the held-out set {empty} has no problem that fits the context of {subject.target}")
        by_base[subject.base_key] = fitting
    return {subject.name: by_base[subject.base_key] for subject in subjects}


def _request(subjects: Sequence[Subject], data: Mapping[str, Dataset]) -> Row:
    """Return what decides the results, as it is compared when an evaluation is continued."""
    return {
        "models": [
            {
                "name": subject.name,
                "model": subject.spec.config.model.model,
                "adapter": None if subject.adapter is None else str(subject.adapter),
                "adapter_sha256": None if subject.adapter is None else sha256(subject.adapter / ADAPTER_WEIGHTS),
                "step": subject.step,
                "settings": fingerprint(subject.spec),
                "problems": {name: content_hash((), sets) for name, sets in data[subject.name].sets.items()},
            }
            for subject in subjects
        ]
    }


def _new_directory(directory: Path) -> Path:
    names = (f"eval-{directory.name}" + (f"-{n}" if n > 1 else "") for n in count(1))
    return next(path for name in names if not (path := directory.parent / name).exists())


def _require_same(out: Path, request: Values) -> None:
    """Raise UsageError unless the directory is empty or holds this evaluation."""
    if not out.is_dir() or not any(out.iterdir()):
        return
    recorded = read_json_if_present(out / EVALUATION)
    models = recorded.get("models") if isinstance(recorded, dict) else None
    keys = request["models"][0].keys()
    if models is None or [{key: model.get(key) for key in keys} for model in models] != request["models"]:
        what = "something else" if models is None else "an evaluation of other models, settings or problems"
        raise UsageError(f"{out} holds {what}, and stays as it is: give another directory with --out")


def _manifest(out: Path, subjects: Sequence[Subject]) -> Row:
    if (out / MANIFEST).is_file():
        return read_manifest(out)
    runs = [
        RunEntry(
            run_id=subject.name, label=subject.name, seed=subject.spec.seed, step=subject.step, max_steps=subject.step,
            path=f"runs/{subject.name}", fingerprint=fingerprint(subject.spec),
        ).to_row()
        for subject in subjects
    ]  # fmt: skip
    return CampaignManifest(format=1, name=out.name, created=time.time(), runs=runs).to_row()


@dataclass(frozen=True)
class _Evaluation:
    job: CohortJob
    manifest: Manifest
    grader: Grader
    data: Mapping[str, Dataset]  # By the model's name
    notify: Notify

    def run(self, subjects: Sequence[Subject], bases: Bases) -> None:
        remaining = [subject for subject in subjects if self.manifest.run(subject.name).state != "done"]
        keys = [key for subject in remaining for key in (subject.base_key, subject.lanes_key)]
        # Stable: in the order of the user, but each base is loaded once.
        remaining.sort(key=lambda subject: (keys.index(subject.base_key), keys.index(subject.lanes_key)))
        loaded = ""
        for _, same in groupby(remaining, lambda subject: subject.lanes_key):
            group = list(same)
            spec, events = group[0].spec, ServerEvents(Messages(self.notify))
            if group[0].base_key != loaded:
                self.notify(f"loading {spec.config.model.model}")
                loaded = group[0].base_key
            data = self.data[group[0].name]
            with adapter_evaluator(spec, self.job, self.grader, data, bases, events.message) as evaluator:
                check_servers(evaluator.model.engine, bases, [spec], events)
                for note in (*data.notes, *evaluator.model.notes):
                    self.notify(note)
                for subject in group:
                    base = evaluator.lanes.base
                    if subject.source is not None and (warning := subject.source.other_weights(base)):
                        self.notify(warning)
                    self._evaluate(subject, evaluator)

    def _evaluate(self, subject: Subject, evaluator: AdapterEvaluator) -> None:
        try:
            with ExitStack() as stack:
                self.manifest.update(subject.name, state="running", reason=None)
                seal = self._record(subject, evaluator, stack)
        except BaseException as error:
            state = "failed" if isinstance(error, Exception) else "interrupted"
            self.manifest.update(subject.name, state=state, reason=str(error) or None)
            raise
        self.manifest.update(subject.name, state="done", reason=None, seal=seal)

    def _record(self, subject: Subject, evaluator: AdapterEvaluator, stack: ExitStack) -> Row:
        spec, data, model = subject.spec, self.data[subject.name], evaluator.model
        config, environment = spec.config, evaluator.environments["train"]
        builder = RunBuilder(self.job, model, data, {}, Messages(self.notify), stack, allow_all)
        recorder = builder.recorder(spec, self.grader, environment)
        stack.callback(recorder.close)
        recorder.truncate(0)  # what an earlier process has not finished
        seeds = {"campaign": config.campaign.seed, "run": config.training.seed}
        facts = shared_facts(model, data) | {"modules": module_hashes(config, self.job.folder)}
        facts |= {"run_id": spec.run_id, "condition": spec.label, "seeds": seeds}
        recorder.start(run_facts(config, **facts), system_files(self.job.folder))
        for held_out in config.held_out:
            rank = config.model.lora_rank
            record = evaluator.evaluate(held_out, subject.adapter, subject.stream, subject.step, rank)
            row = recorder.record_eval(record)
            answers = plural(sum(len(group.rollouts) for group in record.groups), "answer")
            rate = row[f"eval/{held_out.name}/correct_rate"]
            score = "not graded" if rate is None else f"{100 * rate:.1f}% correct"
            self.notify(f"{subject.name} on {held_out.name}: {score}, {answers} in {record.seconds:.1f} s")
        recorder.flush()
        return recorder.seal()


def _results(out: Path, subjects: Sequence[Subject]) -> Row:
    """Return the results in the directory's files: ``models`` and ``comparisons``."""
    models, scores = [], list[dict[str, dict[str, float]]]()
    requested = read_json_if_present(out / EVALUATION)["models"]
    for subject, facts in zip(subjects, requested, strict=True):
        run = read_run(out, RunEntry(run_id=subject.name, state="done", path=f"runs/{subject.name}"), [])
        sets = {}
        for name, row in run.last_evaluations.items():
            tokens = sum(each["num_tokens"] for each in held_out_completions(run.path, name))
            prefix = f"eval/{name}/"
            sets[name] = {key.removeprefix(prefix): value for key, value in row.items()} | {"tokens": tokens}
        by_set = {name: problem_scores(run, Measure.parse("correct_rate", name)) for name in sets}
        scores.append({name: by_problem for name, by_problem in by_set.items() if by_problem})
        models.append({**facts, "path": str(run_directory(out, subject.spec)), "sets": sets})
    comparisons = compare_models([subject.name for subject in subjects], scores)
    return {"models": models, "comparisons": comparisons, "scope": SCOPE}


def compare_models(names: Sequence[str], scores: Sequence[Mapping[str, Mapping[str, float]]]) -> list[Row]:
    """Compare models with the first by problem. ``scores``: share of correct answers of each model, by held-out set and
    problem.

    The score intervals (``maths.bounded``) hold together at 95 % (Bonferroni): each has the level 1 − 0.05/n for n
    comparisons. Problems that one of the two models lacks are left out.
    """
    pairs = []
    for name, mine in zip(names[1:], scores[1:], strict=True):
        for held_out, baseline in scores[0].items():
            if common := [problem for problem in baseline if problem in mine.get(held_out, {})]:
                differences = [mine[held_out][problem] - baseline[problem] for problem in common]
                pairs.append((name, held_out, differences, len(baseline.keys() | mine[held_out].keys()) - len(common)))
    rows = []
    for name, held_out, differences, left_out in pairs:
        gain = bounded_mean_interval(differences, -1.0, 1.0, level=1.0 - 0.05 / len(pairs))
        row = {"model": name, "baseline": names[0], "set": held_out, "problems": len(differences)}
        row |= {"left_out": left_out, "difference": gain.estimate, "low": gain.low, "high": gain.high}
        rows.append(row | {"sentence": _sentence(row)})
    return rows


def _sentence(row: Values) -> str:
    low, high = row["low"], row["high"]
    text = f"{row['model']} − {row['baseline']} on {row['set']}: {points(row['difference'])} points"
    left_out = f" ({row['left_out']} that not both have are left out)" if row["left_out"] else ""
    if low is None or high is None:
        return f"{text}, {plural(row['problems'], 'problem')}{left_out}: cannot tell"
    text += f" [{points(low)}, {points(high)}], {plural(row['problems'], 'problem')}{left_out}"
    if low > 0 or high < 0:
        return f"{text}: {'higher' if low > 0 else 'lower'}"
    return f"{text}: no difference shown; up to {points(max(-low, high), sign=False)} points stay open"
