"""Data that flows through a run: Problem → Rollout → Group → CreditedBatch → Sample → metrics row.

Most types are frozen: each stage returns a new object that also has its own results. ``MicroBatch``, which holds
tensors, is in ``retrain.policy``.
"""

from retrain.types.rollouts import CORRECT_ABOVE as CORRECT_ABOVE
from retrain.types.rollouts import MAX_PROBLEMS as MAX_PROBLEMS
from retrain.types.rollouts import Action as Action
from retrain.types.rollouts import Completion as Completion
from retrain.types.rollouts import Ended as Ended
from retrain.types.rollouts import Group as Group
from retrain.types.rollouts import Message as Message
from retrain.types.rollouts import PolicyRef as PolicyRef
from retrain.types.rollouts import Problem as Problem
from retrain.types.rollouts import Prompt as Prompt
from retrain.types.rollouts import RewardResult as RewardResult
from retrain.types.rollouts import Rollout as Rollout
from retrain.types.rollouts import SampleRequest as SampleRequest
from retrain.types.rollouts import StopReason as StopReason
from retrain.types.rollouts import Support as Support
from retrain.types.rollouts import Turn as Turn
from retrain.types.rollouts import single_turn as single_turn
from retrain.types.rollouts import with_correctness as with_correctness
from retrain.types.samples import MAX_STALENESS as MAX_STALENESS
from retrain.types.samples import CreditedBatch as CreditedBatch
from retrain.types.samples import CreditedGroup as CreditedGroup
from retrain.types.samples import CreditedRollout as CreditedRollout
from retrain.types.samples import Denominators as Denominators
from retrain.types.samples import EvalRecord as EvalRecord
from retrain.types.samples import Sample as Sample
from retrain.types.samples import Scores as Scores
from retrain.types.samples import StepBatch as StepBatch
from retrain.types.samples import StepRecord as StepRecord
from retrain.types.samples import UpdateResult as UpdateResult
from retrain.types.samples import Want as Want
