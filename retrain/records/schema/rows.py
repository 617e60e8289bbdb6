"""The rows of a run's JSON-lines files, except those of ``metrics.jsonl``, which the catalogue describes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from retrain.records.schema.base import Record, Row


@dataclass(frozen=True)
class Evaluation(Record):
    """Sampling settings of one held-out evaluation; its numbers follow in the same row."""

    step: int
    """Updates done: 0 is the untrained model."""
    name: str
    """The held-out set; with `~part` at the end where only a part of its problems was sampled."""
    temperature: float
    """Sampling temperature."""
    top_p: float
    """Nucleus sampling: the share of probability that is sampled from."""
    top_k: int
    """Tokens that are sampled from; 0 is all."""
    min_p: float
    """Smallest probability that is sampled, relative to the largest."""
    max_tokens: int
    """Most tokens of an answer."""
    samples: int
    """Answers for each problem."""
    seconds: float
    """Wall-clock time of the evaluation (s)."""


@dataclass(frozen=True)
class StepSummary(Record):
    """Reward and correct count of one step; statistics of the tokens' uncertainty follow in the same row."""

    step: int
    """The step, from 0."""
    mean_reward: float | None
    """Mean total reward; null where nothing could be graded."""
    correct_count: int
    """Correct completions."""
    total_count: int
    """Completions."""
    condition: str
    """Label of the condition."""
    uncertainty_kind: str
    """Kind of uncertainty: `surprisal` or `entropy`."""


@dataclass(frozen=True, kw_only=True)
class Completion(Record):
    """One completion, its texts shortened."""

    step: int
    """The step; of an evaluation the updates done."""
    prompt: str
    """The last message with [data] `prompt_template`, without chat markup; its first 200 characters."""
    completion: str
    """Text of all turns: the first 500 characters; of an evaluation the first 700 and the last 300."""
    reward: float | None
    """Total reward; null where it could not be graded."""
    num_tokens: int
    """Tokens that the policy sampled."""
    stop_reason: str
    """Why sampling ended: `stop` or `length`."""
    correct: bool
    """True if it counts as correct."""
    problem_id: str
    """The problem; of a file its name and line, `problems.jsonl:17`."""
    error: str = ""
    """Why grading failed; only in the rows where it did."""
    omitted_if_empty = ("error",)


@dataclass(frozen=True, kw_only=True)
class Generation(Completion):
    """One completion of a step's batch. What dynamic sampling dropped is not there."""

    reference: str
    """The right answer; its first 200 characters."""
    group: int
    """Group of completions of the same prompt, from 0."""
    sample: int
    """Place in the group, from 0."""
    advantage: float | None
    """Advantage of the completion; null where there is none."""


@dataclass(frozen=True, kw_only=True)
class HeldOutCompletion(Completion):
    """One completion of a held-out evaluation."""

    name: str
    """The held-out set."""
    sample: int
    """Place among the answers to the same problem, from 0."""
    tags: list[str]
    """Tags of the problem."""
    reference: str
    """The right answer; its first 200 characters."""
    answer: str | None
    """Answer for a majority vote, as `match` or `math` finds it ([reward] `strict`; under another reward as
    with `strict = false`), in one spelling; null for none."""


@dataclass(frozen=True)
class TrajectorySummary(Record):
    """One trajectory, before anything is left out. The format is that of the Tinker cookbook."""

    schema_version: int
    """Version of the format: 1."""
    split: str
    """`train` or `eval/<name>`."""
    iteration: int
    """The step; of an evaluation the updates done."""
    group_idx: int
    """Group of trajectories of the same prompt, from 0."""
    traj_idx: int
    """Place in the group, from 0."""
    tags: list[str]
    """Tags of the problem and of the reward."""
    sampling_client_step: int
    """Updates that the weights had when they sampled it."""
    total_reward: float | None
    """Sum of all rewards; null where it could not be graded."""
    final_reward: float
    """Reward of the whole beyond its turns: 0, since that stands in the last turn."""
    trajectory_metrics: dict[str, float | None]
    """Numbers that the reward gave, by name."""
    steps: list[Row]
    """One object for each turn: `step_idx`, `ob_len` (tokens of the whole observation, which is everything that the
    model saw before it acted), `ac_len` (tokens of the action), `reward` (null where it could not be graded),
    `episode_done`, `stop_reason`, `metrics`, `logs`; with `turn_credit = "turn"` its `advantage`; with a critic
    `value_mean`, the mean of the values before its tokens, and in training `value_target_mean`, that of their
    targets."""
    final_ob_len: int
    """Always 0: no observation follows the last action."""
    problem_id: str
    """The problem."""
    stop_reason: str
    """Why sampling of the last turn ended: `stop` or `length`."""
    ended: str
    """Why the episode is over: `done`, `max_turns`, `max_tokens`, `raised`, `timeout`, `died` or `flooded`."""
    advantage: float | None
    """Advantage of the trajectory; null where there is none."""
    discarded: str | None
    """Why its group was left out of training; null where it was not."""


@dataclass(frozen=True)
class IterationFiles(Record):
    """One step or evaluation in the index of the rollouts' files."""

    split: str
    """`train` or `eval/<name>`."""
    iteration: int
    """The step; of an evaluation the updates done."""
    groups: int
    """Groups that were sampled."""
    rollouts: int
    """Trajectories that were sampled."""
    correct: int
    """Correct ones among them."""
    reward: float | None
    """Mean total reward; null where nothing could be graded."""
    lines: tuple[int, int]
    """First byte and end of its completions in `emergence/generations.jsonl`, of an evaluation in
    `emergence/evaluations.jsonl`."""
    name: str
    """Beginning of the names of its files."""
    tokens: str | None
    """Its file of tokens; null where they were not recorded."""


@dataclass(frozen=True)
class StepSpans(Record):
    """Wall-clock time of the parts of one step."""

    step: int
    """The step."""
    spans: list[Row]
    """One object for each span: `name` of the phase, `duration` (s), `wall_start` and `wall_end` (seconds since the
    epoch)."""


@dataclass(frozen=True)
class Note(Record):
    """One remark about odd numbers, made the first time that they occur."""

    step: int
    """The step whose row it is about."""
    key: str
    """Its subject; faults of servers are noted each time, under `server`."""
    level: str
    """`info` where the number is harmless, `warning` where something should be done."""
    text: str
    """Meaning of the number."""
    remedy: str
    """Remedy."""


@dataclass(frozen=True)
class Checkpoint(Record):
    """One checkpoint that is complete on the disk."""

    name: str
    """Its number as six digits, or `final`."""
    batch: int
    """The next step to run."""
    step: int
    """The last step that it contains."""
    state_path: str
    """Directory of the whole state, below the run's directory."""
    sampler_path: str
    """Directory of the adapter, below the run's directory."""
    epoch: int
    """Passes over the training problems that were completed."""


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

    totals: Row
    """Sums over the steps so far (`Totals`)."""
    known_keys: list[str]
    """Keys that rows of metrics have had, in their order."""
    known_tags: list[str]
    """Tags that problems have had."""
    evaluations: Row
    """Numbers of the evaluations that join the next row of metrics."""
    rows: dict[str, int] = field(default_factory=dict)
    """Rows of each file that belong to the finished steps."""
    sha256: dict[str, str] = field(default_factory=dict)
    """Hash of the rows of each file of evaluations; none where an earlier version has recorded some of them."""
    trackers: dict[str, Row | None] = field(default_factory=dict)
    """Return value of the last start of each tracker."""
    sent: dict[str, int] = field(default_factory=dict)
    """First step that each tracker has not taken."""


START = RecorderState(totals=asdict(Totals()), known_keys=[], known_tags=[], evaluations={})
"""State of the records before the first step."""
