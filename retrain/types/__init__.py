"""Data that flows through a run: Problem → Rollout → Group → CreditedBatch → Sample → metrics row.

Each type is frozen: the next stage adds what it knows in a type of its own. ``MicroBatch``, which holds tensors, stands
in ``retrain.policy``.
"""

from retrain.types.credit import MAX_STALENESS, CreditedBatch, CreditedGroup, CreditedRollout, Denominators
from retrain.types.records import EvalRecord, StepRecord
from retrain.types.requests import PolicyRef, SampleRequest
from retrain.types.rollouts import (
    CORRECT_ABOVE,
    DIMENSIONS,
    MAX_PROBLEMS,
    Action,
    Completion,
    Ended,
    Group,
    Message,
    Problem,
    Prompt,
    RewardResult,
    Rollout,
    StopReason,
    Support,
    Turn,
    single_turn,
    with_correctness,
)
from retrain.types.samples import (
    Sample,
    samples_of,
    samples_of_rollout,
    sequence_slices,
    training_samples,
    with_prompt,
    without_advantages,
)
from retrain.types.scores import Scores, TrainBatch, UpdateResult, Want

__all__ = [
    "CORRECT_ABOVE",
    "DIMENSIONS",
    "MAX_PROBLEMS",
    "MAX_STALENESS",
    "Action",
    "Completion",
    "CreditedBatch",
    "CreditedGroup",
    "CreditedRollout",
    "Denominators",
    "Ended",
    "EvalRecord",
    "Group",
    "Message",
    "PolicyRef",
    "Problem",
    "Prompt",
    "RewardResult",
    "Rollout",
    "Sample",
    "SampleRequest",
    "Scores",
    "StepRecord",
    "StopReason",
    "Support",
    "TrainBatch",
    "Turn",
    "UpdateResult",
    "Want",
    "samples_of",
    "samples_of_rollout",
    "sequence_slices",
    "single_turn",
    "training_samples",
    "with_correctness",
    "with_prompt",
    "without_advantages",
]
