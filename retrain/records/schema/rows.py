"""The rows of a run's JSON-lines files, except those of ``metrics.jsonl``, which the catalogue describes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated

from retrain.records.schema.base import Record, Row


@dataclass(frozen=True)
class Evaluation(Record):
    """Sampling settings of one held-out evaluation; its numbers follow in the same row."""

    step: Annotated[int, "Updates done: 0 is the untrained model."]
    name: Annotated[str, "The held-out set; with `~part` at the end where only a part of its problems was sampled."]
    temperature: Annotated[float, "Sampling temperature."]
    top_p: Annotated[float, "Nucleus sampling: the share of probability that is sampled from."]
    top_k: Annotated[int, "Tokens that are sampled from; 0 is all."]
    min_p: Annotated[float, "Smallest probability that is sampled, relative to the largest."]
    max_tokens: Annotated[int, "Most tokens of an answer."]
    samples: Annotated[int, "Answers for each problem."]
    seconds: Annotated[float, "Wall-clock time of the evaluation (s)."]


@dataclass(frozen=True)
class StepSummary(Record):
    """Reward and correct count of one step; statistics of the tokens' uncertainty follow in the same row."""

    step: Annotated[int, "The step, from 0."]
    mean_reward: Annotated[float | None, "Mean total reward; null where nothing could be graded."]
    correct_count: Annotated[int, "Correct completions."]
    total_count: Annotated[int, "Completions."]
    condition: Annotated[str, "Label of the condition."]
    uncertainty_kind: Annotated[str, "Kind of uncertainty: `surprisal` or `entropy`."]


@dataclass(frozen=True, kw_only=True)
class Completion(Record):
    """One completion, its texts shortened."""

    step: Annotated[int, "The step; of an evaluation the updates done."]
    prompt: Annotated[
        str, "The last message with [data] `prompt_template`, without chat markup; its first 200 characters."
    ]
    completion: Annotated[
        str, "Text of all turns: the first 500 characters; of an evaluation the first 700 and the last 300."
    ]
    reward: Annotated[float | None, "Total reward; null where it could not be graded."]
    num_tokens: Annotated[int, "Tokens that the policy sampled."]
    stop_reason: Annotated[str, "Why sampling ended: `stop` or `length`."]
    correct: Annotated[bool, "True if it counts as correct."]
    problem_id: Annotated[str, "The problem; of a file its name and line, `problems.jsonl:17`."]
    error: Annotated[str, "Why grading failed; only in the rows where it did."] = ""
    omitted_if_empty = ("error",)


@dataclass(frozen=True, kw_only=True)
class Generation(Completion):
    """One completion of a step's batch. Completions that dynamic sampling dropped are not included."""

    reference: Annotated[str, "The right answer; its first 200 characters."]
    group: Annotated[int, "Group of completions of the same prompt, from 0."]
    sample: Annotated[int, "Place in the group, from 0."]
    advantage: Annotated[float | None, "Advantage of the completion; null where there is none."]


@dataclass(frozen=True, kw_only=True)
class HeldOutCompletion(Completion):
    """One completion of a held-out evaluation."""

    name: Annotated[str, "The held-out set."]
    sample: Annotated[int, "Place among the answers to the same problem, from 0."]
    tags: Annotated[list[str], "Tags of the problem."]
    reference: Annotated[str, "The right answer; its first 200 characters."]
    answer: Annotated[
        str | None,
        "Answer for a majority vote, as `match` or `math` finds it ([reward] `strict`; under another reward as with "
        "`strict = false`), in one spelling; null for none.",
    ]


@dataclass(frozen=True)
class TrajectorySummary(Record):
    """One trajectory, before anything is left out. The format is that of the Tinker cookbook."""

    schema_version: Annotated[int, "Version of the format: 1."]
    split: Annotated[str, "`train` or `eval/<name>`."]
    iteration: Annotated[int, "The step; of an evaluation the updates done."]
    group_idx: Annotated[int, "Group of trajectories of the same prompt, from 0."]
    traj_idx: Annotated[int, "Place in the group, from 0."]
    tags: Annotated[list[str], "Tags of the problem and of the reward."]
    sampling_client_step: Annotated[int, "Updates that the weights had when they sampled it."]
    total_reward: Annotated[float | None, "Sum of all rewards; null where it could not be graded."]
    final_reward: Annotated[float, "Reward of the whole beyond its turns: 0, since that stands in the last turn."]
    trajectory_metrics: Annotated[dict[str, float | None], "Numbers that the reward gave, by name."]
    steps: Annotated[
        list[Row],
        "One object for each turn: `step_idx`, `ob_len` (tokens of the whole observation, which is everything that "
        "the model saw before it acted), `ac_len` (tokens of the action), `reward` (null where it could not be "
        'graded), `episode_done`, `stop_reason`, `metrics`, `logs`; with `turn_credit = "turn"` its `advantage`; with '
        "a critic `value_mean`, the mean of the values before its tokens, and in training `value_target_mean`, that "
        "of their targets.",
    ]
    final_ob_len: Annotated[int, "Always 0: no observation follows the last action."]
    problem_id: Annotated[str, "The problem."]
    stop_reason: Annotated[str, "Why sampling of the last turn ended: `stop` or `length`."]
    ended: Annotated[
        str, "Why the episode is over: `done`, `max_turns`, `max_tokens`, `raised`, `timeout`, `died` or `flooded`."
    ]
    advantage: Annotated[float | None, "Advantage of the trajectory; null where there is none."]
    discarded: Annotated[str | None, "Why its group was left out of training; null where it was not."]


@dataclass(frozen=True)
class IterationFiles(Record):
    """One step or evaluation in the index of the rollouts' files."""

    split: Annotated[str, "`train` or `eval/<name>`."]
    iteration: Annotated[int, "The step; of an evaluation the updates done."]
    groups: Annotated[int, "Groups that were sampled."]
    rollouts: Annotated[int, "Trajectories that were sampled."]
    correct: Annotated[int, "Correct ones among them."]
    reward: Annotated[float | None, "Mean total reward; null where nothing could be graded."]
    lines: Annotated[
        tuple[int, int],
        "First byte and end of its completions in `emergence/generations.jsonl`, of an evaluation in "
        "`emergence/evaluations.jsonl`.",
    ]
    name: Annotated[str, "Beginning of the names of its files."]
    tokens: Annotated[str | None, "Its file of tokens; null where they were not recorded."]


@dataclass(frozen=True)
class StepSpans(Record):
    """Wall-clock time of the parts of one step."""

    step: Annotated[int, "The step."]
    spans: Annotated[
        list[Row],
        "One object for each span: `name` of the phase, `duration` (s), `wall_start` and `wall_end` (seconds since "
        "the epoch).",
    ]


@dataclass(frozen=True)
class Note(Record):
    """A note about unusual numbers, made the first time that they occur."""

    step: Annotated[int, "The step whose row it is about."]
    key: Annotated[str, "Its subject; faults of servers are noted each time, under `server`."]
    level: Annotated[str, "`info` where the number is harmless, `warning` where something should be done."]
    text: Annotated[str, "Meaning of the number."]
    remedy: Annotated[str, "Remedy."]


@dataclass(frozen=True)
class Checkpoint(Record):
    """One checkpoint that is complete on the disk."""

    name: Annotated[str, "Its number as six digits, or `final`."]
    batch: Annotated[int, "The next step to run."]
    step: Annotated[int, "The last step that it contains."]
    state_path: Annotated[str, "Directory of the whole state, below the run's directory."]
    sampler_path: Annotated[str, "Directory of the adapter, below the run's directory."]
    epoch: Annotated[int, "Passes over the training problems that were completed."]


@dataclass
class Totals:
    """Running sums of a run; part of its saved state."""

    episodes: int = 0
    correct: int = 0
    tokens: int = 0
    began: float | None = None  # Unix time at which the first step began
    ended: float | None = None  # Unix time at which the last step ended


@dataclass(frozen=True)
class RecorderState(Record):
    """State of the records in a checkpoint, so that a resumed run continues its files exactly."""

    totals: Annotated[Row, "Sums over the steps so far (`Totals`)."]
    known_keys: Annotated[list[str], "Keys that rows of metrics have had, in their order."]
    known_tags: Annotated[list[str], "Tags that problems have had."]
    evaluations: Annotated[Row, "Numbers of the evaluations that join the next row of metrics."]
    rows: Annotated[dict[str, int], "Rows of each file that belong to the finished steps."] = field(
        default_factory=dict
    )
    sha256: Annotated[
        dict[str, str],
        "Hash of the rows of each file of evaluations; none where an earlier version has recorded some of them.",
    ] = field(default_factory=dict)
    trackers: Annotated[dict[str, Row | None], "Return value of the last start of each tracker."] = field(
        default_factory=dict
    )
    sent: Annotated[dict[str, int], "First step that each tracker has not taken."] = field(default_factory=dict)


# State of the records before the first step
START = RecorderState(totals=asdict(Totals()), known_keys=[], known_tags=[], evaluations={})
