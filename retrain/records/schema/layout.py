"""Names of the files of run and campaign directories, their contents and the types of their rows.

``metrics.jsonl`` has no type: its keys are those of the catalogue. Every other module imports the names from here.
"""

from dataclasses import dataclass
from typing import Annotated

from retrain.ownership import MARK
from retrain.records.schema import rows
from retrain.records.schema.base import Record
from retrain.records.schema.campaign import CampaignManifest
from retrain.records.schema.comparison import Comparison

MANIFEST, PLAN, LOCK = "manifest.json", "plan.json", ".lock"
CONFIG, ENVIRONMENT, CODE_DIFF = "config.json", "environment.json", "code.diff"
COMPARISON, REPORT = "comparison.json", "report.html"
EVALUATION = "evaluation.json"  # Of a directory of ``retrain eval``
SQUEEZE, ANALYSIS, VERIFICATION = "squeeze", "analysis.json", "verification.json"  # The files are in the folder
METRICS, COLUMNS, EVALS = "metrics.jsonl", "metrics.f32", "evals.jsonl"
EMERGENCE = "emergence"
STEPS, GENERATIONS = f"{EMERGENCE}/steps.jsonl", f"{EMERGENCE}/generations.jsonl"
EVALUATIONS = f"{EMERGENCE}/evaluations.jsonl"
EVALUATION_FILES = (EVALS, EVALUATIONS)  # Records with the rows of evaluations
ITERATIONS = "iterations.jsonl"
TRAIN = "train"  # The split of training steps; an evaluation has the split "eval/<name>"
SUMMARIES, LOGTREE, PAGE = "_rollout_summaries.jsonl", "_logtree.json", ".html"  # Endings, after an iteration's name
SPANS, TIMELINE = "timing_spans.jsonl", "timeline.html"
NOTES, LOG, CHECKPOINTS = "notes.jsonl", "run.log", "checkpoints.jsonl"
FINAL, SAVED = "final", "checkpoints"
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
STATE = "state.json"  # Of a checkpoint
WARMUP, WARMUP_FACTS = "warmup", "warmup.json"  # The facts are in ``warmup/<hash>/``
REGISTRY = "registry.jsonl"  # Beside the directories of campaigns
SERVER_NEWS = "servers.jsonl"  # In ``workers/`` of a campaign's directory while it trains


@dataclass(frozen=True)
class RecordFile:
    """A file of a directory: ``name`` is its path there, ``content`` its description in ``retrain explain --files``."""

    name: str
    content: str
    row: Annotated[type[Record] | None, "Type of its rows, or of the object that it holds."] = None


MACHINE_FILES = (
    RecordFile(ENVIRONMENT, "machine, GPUs, Python, all installed packages"),
    RecordFile(CODE_DIFF, "uncommitted changes of the repositories that the code comes from"),
)

CAMPAIGN_FILES = (
    RecordFile(MANIFEST, "every run and its state, the comparison, the recommended rank", CampaignManifest),
    RecordFile(PLAN, "the file as it was given, every run as it was resolved"),
    RecordFile(MARK, "which campaign owns this directory"),
    RecordFile(COMPARISON, "conditions against the first, paired by seed", Comparison),
    RecordFile(REPORT, "verdict, curves, distributions, the same prompt under two conditions: one file, no network"),
    RecordFile("base/evaluation_<how>.npz", "the untrained model's held-out answers, sampled once for all runs"),
    RecordFile(f"../{REGISTRY}", "beside the directory: every declaration and finished run of all campaigns there"),
    RecordFile(f"squeeze/{ANALYSIS}", "energy by LoRA rank, from the first run"),
    RecordFile(f"squeeze/{VERIFICATION}", "held-out accuracy at every rank beside the full adapter, paired by problem"),
    RecordFile("squeeze/rank_<r>/", "an adapter compressed to the recommended rank, if that is known"),
    RecordFile(CONFIG, "every key as it was resolved, package versions, git revision"),
    *MACHINE_FILES,
)

WARMUP_FILES = (
    RecordFile(f"{WARMUP}/<hash>/{METRICS}", "one row per step of the supervised warm-up; row 0 is the base"),
    RecordFile(f"{WARMUP}/<hash>/{EVALS}", "held-out evaluations of the base and after the warm-up", rows.Evaluation),
    RecordFile(f"{WARMUP}/<hash>/{WARMUP_FACTS}", "steps, examples, losses, fingerprint; written last"),
    RecordFile(f"{WARMUP}/<hash>/adapter/", "the PEFT adapter that runs start from"),
)

ONLY_OF_CAMPAIGNS = (COMPARISON, REPORT, "base/evaluation_<how>.npz", f"../{REGISTRY}")

RUN_FILES = (
    RecordFile(MARK, "which run owns this directory; also in every checkpoint and adapter"),
    RecordFile(CONFIG, "every key resolved for this run, seeds, data hash, base model"),
    *MACHINE_FILES,
    RecordFile(METRICS, "one row per step"),
    RecordFile(COLUMNS, "the same numbers as columns, from 64 steps on"),
    RecordFile(EVALS, "one row per held-out evaluation", rows.Evaluation),
    RecordFile(STEPS, "reward and correct count per step", rows.StepSummary),
    RecordFile(GENERATIONS, "every completion", rows.Generation),
    RecordFile(EVALUATIONS, "every completion of the held-out evaluations", rows.HeldOutCompletion),
    RecordFile(f"train_iteration_<n>{SUMMARIES}", "one line per trajectory, every step", rows.TrajectorySummary),
    RecordFile(f"train_iteration_<n>{PAGE}, {LOGTREE}", "prompts and samples to read, every rollouts_every steps"),
    RecordFile("tokens_<n>.safetensors", "every token of those steps with its numbers, texts uncut"),
    RecordFile("eval_<name>_iteration_<n>…", "the same of every held-out evaluation"),
    RecordFile(ITERATIONS, "the index of these files, and where the step's completions lie", rows.IterationFiles),
    RecordFile(SPANS, "what each step spent its time on", rows.StepSpans),
    RecordFile(TIMELINE, "the same as a picture"),
    RecordFile(NOTES, "explanations of unusual metrics", rows.Note),
    RecordFile(LOG, "what happened when, tracebacks included"),
    RecordFile(CHECKPOINTS, "one line per saved checkpoint", rows.Checkpoint),
    RecordFile("checkpoints/step_<n>/", "adapter, optimizer and all other state"),
    RecordFile(f"{FINAL}/", "the trained PEFT adapter"),
)
