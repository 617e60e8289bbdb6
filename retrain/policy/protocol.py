"""The interface of a policy. LoRA adapters (``policy.local``) and plug-ins (``policy.plugin``) implement it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NotRequired, Protocol, TypedDict

from retrain.policy.objective import Objective
from retrain.policy.packing import BudgetState
from retrain.types import Sample, Scores, StepBatch, UpdateResult, Want


class PolicyState(TypedDict):
    version: int
    budget: NotRequired[BudgetState]  # Only of policies whose micro-batches retrain chooses


class PolicySnapshot(Protocol):
    """An immutable copy of a policy's weights."""

    def write(self, directory: Path) -> None:
        """Write all that ``Policy.load`` needs into the empty ``directory``. Only for resumable snapshots."""
        ...

    def export(self, directory: Path, checkpoint: Path) -> None:
        """Write the files for other tools into the empty ``directory``, after ``write`` has written ``checkpoint``."""
        ...

    def discard(self) -> None:
        """Delete temporary files; by default there are none."""
        return


class Policy(Protocol):
    """The trainable model of one run. ``version`` counts changes of its weights, a critic's included."""

    version: int
    starts_as_base: bool  # Whether an untrained run equals the base, so that one evaluation serves all runs

    @property
    def capabilities(self) -> Mapping[str, bool]:
        """Return the flags loss_is_placeholder, backend_reports_sync_loss and backend_preserves_token_advantages, which
        rows of metrics record."""
        ...

    def score(self, samples: Sequence[Sample], want: frozenset[Want], weights: PolicySnapshot | None = None) -> Scores:
        """Score the samples by a fresh forward pass with ``weights``, by default the current ones. Values always come
        from the current critic."""
        ...

    def update(self, batch: StepBatch, objective: Objective, lr: float) -> UpdateResult:
        """Take one optimizer step. Raises NonFinite, with nothing changed, if loss or gradient is not finite."""
        ...

    def fingerprint(self) -> str | None:
        """Return a digest of the trainable weights; None if they cannot be read."""
        return None

    def snapshot(self, resumable: bool = False) -> PolicySnapshot:
        """Return a copy of the weights; if ``resumable``, with all else that ``load`` needs, in host memory."""
        ...

    def load(self, directory: Path) -> None: ...

    def begin_with(self, directory: Path) -> None:
        """Load weights that another tool or run wrote."""
        ...

    def read(self, directory: Path) -> PolicySnapshot:
        """Read exported weights for an engine to sample with."""
        ...

    def begin_step(self, step: int) -> list[str]:
        """Apply changes that are due before ``step``, such as a lower rank, and return log lines about them."""
        return []

    def state(self) -> PolicyState:
        """Return the state that is not weights, as strict JSON."""
        ...

    def restore(self, state: PolicyState) -> None: ...

    def notes(self) -> list[str]:
        """Return the log lines that are new since the last call."""
        return []
