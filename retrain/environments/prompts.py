"""From a problem to the tokens that the model sees."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from retrain.environments.dataset import Dataset, content_hash
from retrain.errors import DataError, ModelError
from retrain.types import Message, Problem, Prompt

LONGEST_BY_CHARACTERS = 8
"""Prompts among which the one of most tokens is looked for: a token has more characters in some texts than in others,
and rendering all of a large data set takes minutes."""


SPARE_TOKENS = 16
"""Beginning tokens and whatever else a tokenizer adds to a text."""


def render(problem: Problem, tokenizer: Any, data: Any) -> Prompt:
    """The problem through ``prompt_template``, ``system_prompt`` and the tokenizer's chat template.

    Without a chat template the messages are joined by blank lines and the tokenizer adds its own beginning token.
    Raises ModelError when the template refuses the conversation (some know no system role), DataError when no token
    comes out.
    """
    messages = conversation(problem, data)
    if getattr(tokenizer, "chat_template", None):
        extra = getattr(data, "chat_template_kwargs", None) or {}
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **extra)
        except Exception as error:  # a template is a program of its author's: any jinja error, told with its text
            hint = ": leave [data] system_prompt out" if getattr(data, "system_prompt", None) else ""
            raise ModelError(f"the tokenizer's chat template refuses problem {problem.id}: {error}{hint}") from error
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        text = "\n\n".join(message["content"] for message in messages)
        token_ids = tokenizer(text)["input_ids"]
    if not token_ids:
        raise DataError(f"problem {problem.id} has no tokens")
    return Prompt(problem, text, tuple(int(token) for token in token_ids), tuple(messages))


def fitting(data: Dataset, tokenizer: Any, section: Any, limit: int | None, why: str) -> Dataset:
    """``data`` with prompts that can be asked: one problem of every form is rendered, and none has more than ``limit``
    tokens; ``why`` says where the limit comes from, and how to move it.

    With ``[data] long_prompts = "skip"`` longer ones are left out, counted and noted. Raises DataError naming the first
    longer one otherwise, and when nothing is left; else as ``render``.
    """
    forms = {tuple(message["role"] for message in conversation(p, section)): p for p in (*data.train, *data.heldout)}
    markup = 0  # bytes that the chat template adds to a conversation
    for problem in forms.values():
        rendered = render(problem, tokenizer, section)
        markup = max(markup, len(rendered.text.encode()) - _bytes(problem, section))
    if limit is None:
        return data
    lengths = {
        id(problem): length
        for problem in (*data.train, *data.heldout)
        if _bytes(problem, section) + markup + SPARE_TOKENS > limit  # a token is a byte or more
        and (length := len(render(problem, tokenizer, section).token_ids)) > limit
    }
    if not lengths:
        return data
    longer = [problem for problem in (*data.train, *data.heldout) if id(problem) in lengths]
    if getattr(section, "long_prompts", "error") != "skip":
        first = longer[0]
        others = f"; {len(longer) - 1} more are too long" if len(longer) > 1 else ""
        raise DataError(
            f"{first.id}  the prompt has {lengths[id(first)]} tokens, more than {limit} ({why}){others}: shorten it, "
            'or leave such problems out with [data] long_prompts = "skip"'
        )
    train = [problem for problem in data.train if id(problem) not in lengths]
    heldout = [problem for problem in data.heldout if id(problem) not in lengths]
    if not train:
        raise DataError(f"data source {data.name!r}: every prompt to train on is longer than {limit} tokens ({why})")
    left_out = len(data.train) - len(train), len(data.heldout) - len(heldout)
    note = (
        f"left out for prompts of more than {limit} tokens: {left_out[0]} of {len(data.train)} training problems, "
        f"{left_out[1]} of {len(data.heldout)} held-out ones; the first is {longer[0].id} "
        f"with {lengths[id(longer[0])]} tokens"
    )
    return replace(
        data,
        train=train,
        heldout=heldout,
        content_hash=content_hash(train, heldout),
        notes=(*data.notes, note),
        skipped=sum(left_out),
    )


def _bytes(problem: Problem, section: Any) -> int:
    """Bytes of what the model is asked, without chat markup."""
    return sum(len(message["content"].encode()) for message in conversation(problem, section))


def longest_prompt(problems: Iterable[Problem], tokenizer: Any, data: Any) -> int:
    """Tokens of the longest prompt, as far as characters tell it: only those with the most of them are rendered.

    0 when there are no problems. Raises as ``render``.
    """

    def characters(problem: Problem) -> int:
        return sum(len(message["content"]) for message in conversation(problem, data))

    longest = heapq.nlargest(LONGEST_BY_CHARACTERS, problems, key=characters)
    return max((len(render(problem, tokenizer, data).token_ids) for problem in longest), default=0)


def conversation(problem: Problem, data: Any) -> list[Message]:
    """The chat messages: the system prompt, if one is set, then the problem with the template in its last message."""
    template = getattr(data, "prompt_template", None) or "{prompt}"
    messages: list[Message]
    if isinstance(problem.prompt, str):
        messages = [{"role": "user", "content": problem.prompt}]
    else:
        messages = [dict(message) for message in problem.prompt]
    # Not str.format: a template asks for \boxed{} in so many words.
    messages[-1] = {**messages[-1], "content": template.replace("{prompt}", messages[-1]["content"])}
    system = getattr(data, "system_prompt", None)
    return [{"role": "system", "content": system}, *messages] if system else messages
