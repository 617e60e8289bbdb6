"""What ``explain`` says of the problems: source, number, measured lengths of prompts, an example. No weights, no torch,
no network: what is not on this machine is not measured, and it says why."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from retrain.commands.output import visible
from retrain.errors import RetrainError
from retrain.wording import plural

if TYPE_CHECKING:
    from retrain.config import Config
    from retrain.data import Dataset
    from retrain.data.prompts import Room

MEASURED = 500
"""Prompts that are rendered and counted, evenly over the data; more of a large data set would take minutes."""
EXAMPLE_CHARACTERS = 300


def problem_lines(configs: Sequence[Config], folder: Path) -> tuple[list[tuple[str, str]], list[int] | None]:
    """(name, text) of every line about the problems of a plan's runs, which are the same for all; and prompt lengths in
    tokens: none where they cannot be measured here, None where the problems cannot be read."""
    from retrain.plugins import described

    # Read once, when the hub's client is first imported; explain contacts nobody.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    from retrain.campaign.planning.asked import (
        askable,
        context_length,
        data_of,
        longest_completions,
        rooms,
        tokenizer_of,
    )

    config = configs[0]
    source, model = visible(config.environment.provider or config.data.source), visible(config.model.model)
    try:
        data = data_of(config, folder)
    except Exception as error:  # RetrainError, or what a function of the user's that makes problems raises
        reason = str(error).partition(". Without a hub")[0] if isinstance(error, RetrainError) else described(error)
        hint = "; explain asks no hub, retrain try does" if "OfflineMode" in reason else ""
        return [("data", f"{source}: not read: {visible(reason + hint)}")], None
    limits, refused, unmeasured, lengths, example = [], "", "", [], ""
    longest, context = longest_completions(configs), context_length(config)
    try:
        limits = _limits(config, *rooms(config, longest, context))
    except RetrainError as error:
        refused = str(error)
    try:
        tokenizer = tokenizer_of(config)
        try:
            data = data if refused else askable(data, config, longest, tokenizer, context)
        except RetrainError as error:
            refused = str(error)
        lengths, example = _measure(tokenizer, config, data)
    except RetrainError as error:
        unmeasured = str(error)
    if refused and refused != unmeasured:
        limits.append(f"training would end at once: {refused}")

    heldout = f"{len(data.heldout):,} held out" if data.heldout else "none held out"
    lines = [("data", f"{source}: {plural(len(data.train), 'problem')} to train on, {heldout}")]
    lines += [("", visible(note)) for note in data.notes]
    if unmeasured:
        lines.append(("prompts", f"not measured: {visible(unmeasured)}"))
    else:
        low, high = min(lengths), max(lengths)
        counted = f"{low} tokens" if low == high else f"{low} to {high} tokens, half of them at most {typical(lengths)}"
        some = "" if len(lengths) > len(data.train) + len(data.heldout) else f" ({len(lengths):,} measured)"
        lines.append(("prompts", f"{counted} as {model} counts{some}"))
    lines += [("", visible(limit)) for limit in limits]
    if not unmeasured:
        answer = data.train[0].answer
        lines.append(("example", _quoted(example) + (f"  answer {_quoted(answer)}" if answer else "")))
    return lines, lengths


def typical(lengths: Sequence[int] | None) -> int | None:
    """Median length of the measured prompts, in tokens; None where none was measured."""
    return round(median(lengths)) if lengths else None


def _limits(config: Config, training: Room, heldout: Mapping[str, Room]) -> list[str]:
    """How long prompts may be: in training, and in held-out sets where that differs."""
    longer = "are left out" if config.data.long_prompts == "skip" else "are an error"
    places = {(training.limit, training.why): ""}
    for name, room in heldout.items():
        places.setdefault((room.limit, room.why), f" in the set {name}")
    return [
        f"at most {limit} tokens{where} ({why}): longer ones {longer}"
        for (limit, why), where in places.items()
        if limit is not None
    ]


def _measure(tokenizer: Any, config: Config, data: Dataset) -> tuple[list[int], str]:
    """Tokens of prompts spread over the data, the longest in characters among them; and the first as text.

    Raises ModelError when the template refuses a problem.
    """
    from retrain.campaign.planning.asked import parts_of
    from retrain.data.prompts import longest_prompt, render

    parts, lengths = parts_of(data, config), []
    for problems, section in parts:
        chosen = range(0, len(problems), max(1, -(-len(problems) // MEASURED)))
        lengths += [len(render(problems[i], tokenizer, section).token_ids) for i in chosen]
    lengths.append(max(longest_prompt(problems, tokenizer, section) for problems, section in parts))
    return lengths, tokenizer.decode(list(render(data.train[0], tokenizer, config.data).token_ids))


def _quoted(text: str) -> str:
    """A text in quotes on one line, without its middle when it is long."""
    if len(text) > EXAMPLE_CHARACTERS:
        half = EXAMPLE_CHARACTERS // 2
        text = f"{text[:half]} … {text[-half:]}"
    return '"' + visible(text) + '"'
