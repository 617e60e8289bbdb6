"""[warmup]: supervised training before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from retrain.config.base import ConfigIssue, Count, OptionalText, Role, Section, Text, fault
from retrain.config.describe import toml
from retrain.config.tasks import FILE_ENDINGS, names_data


def _examples(value: str | None) -> str | None:
    if value is None or names_data(value):
        return value
    raise fault(
        f"is {toml(value)}, but must be a file ending in .jsonl, .csv or .parquet, a directory (./name) or hub name "
        "(owner/name), or a module:function",
        'source = "examples.jsonl", made with one {"prompt": "…", "completion": "…"} or {"messages": […]} per line',
    )


ExampleSource = Annotated[OptionalText, AfterValidator(_examples)]


class Warmup(Section, role=Role.LEARNS):
    """Supervised warm-up: train the adapter on examples before the first step, with the keys of [optimizer]. Prompts
    are rendered with the keys of [data], as in training; over-long examples follow `[data] long_prompts`."""

    source: ExampleSource = None
    """Examples: a local `.jsonl`, `.csv` or `.parquet` file or data set directory (paths are relative to the TOML file
    first), a data set's hub name (`owner/name`), or `module:function`. An example has `messages`, or `prompt` and
    `completion`. Unset switches the warm-up off."""
    subset: OptionalText = None
    """Configuration of a data set that has several."""
    split: Text = "train"
    """Split of a data set to train on."""
    eval_source: Annotated[ExampleSource, Role.EVALUATES] = None
    """Source of held-out examples, of which the loss is recorded; unset is none. May be `source` itself with another
    `eval_split`."""
    eval_split: Annotated[Text, Role.EVALUATES] = "test"
    """Split of a data set in `eval_source`."""
    steps: Count | None = None
    """Optimizer steps; unset follows `epochs`."""
    epochs: Count | None = None
    """Passes over the examples; unset is `steps`, or else 1."""
    batch_size: Count = 16
    """Examples per step."""
    lr: Annotated[float, Field(gt=0, le=1)] = 2e-4
    """Learning rate, with the schedule of [optimizer] over the steps of the warm-up."""
    max_tokens: Count = 1024
    """Longest example, prompt and completion, in tokens; at most the model's context."""
    train_on: Literal["all", "last"] = "all"
    """Assistant messages that are trained on: `all` of a conversation, or the `last`."""

    @property
    def active(self) -> bool:
        return self.source is not None

    @property
    def sources(self) -> dict[str, tuple[str, str]]:
        """Source and split of the examples, and of the held-out examples if there are any, by dotted key."""
        named = {"warmup.source": (self.source, self.split), "warmup.eval_source": (self.eval_source, self.eval_split)}
        return {key: (source, split) for key, (source, split) in named.items() if source is not None}

    def step_count(self, examples: int) -> int:
        """Return the number of optimizer steps. The last batch of an epoch may be smaller."""
        return self.steps or (self.epochs or 1) * -(-examples // self.batch_size)

    def issues(self) -> Iterator[ConfigIssue]:
        changed = [key for key, field in type(self).model_fields.items() if getattr(self, key) != field.default]
        if (source := self.source) is None:
            for key in changed:
                fix = 'source = "examples.jsonl", or remove the line'
                yield ConfigIssue((f"warmup.{key}", "warmup.source"), "has no effect without a source", fix)
            return
        if self.steps is not None and self.epochs is not None:
            message = f"is {self.epochs} beside steps = {self.steps}, and both set the length"
            yield ConfigIssue(("warmup.epochs", "warmup.steps"), message, "remove one of the two")
        if self.eval_source == source and (source.endswith(FILE_ENDINGS) or self.split == self.eval_split):
            message = f"is {toml(source)}, the examples that are trained on"
            yield ConfigIssue(("warmup.eval_source", "warmup.source"), message, "name other examples")
        if self.eval_source is None and "eval_split" in changed:
            fix = f"eval_source = {toml(source)}, or remove the line"
            yield ConfigIssue(("warmup.eval_split", "warmup.eval_source"), "has no effect without eval_source", fix)
