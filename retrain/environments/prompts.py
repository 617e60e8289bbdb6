"""From a problem to the tokens that the model sees."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from retrain.config.evaluation import HELDOUT
from retrain.config.tasks import Data
from retrain.environments.dataset import Dataset, content_hash
from retrain.errors import DataError, ModelError
from retrain.types import Action, Message, Problem, Prompt

LONGEST_BY_CHARACTERS = 8
"""Prompts among which the one of most tokens is looked for: a token has more characters in some texts than in others,
and rendering all of a large data set takes minutes."""

SPARE_TOKENS = 16
"""Beginning tokens and whatever else a tokenizer adds to a text."""


class Renderer:
    """Conversations through a tokenizer's chat template, as ``[data]`` says."""

    def __init__(self, tokenizer: Any, data: Data):
        self.tokenizer, self.data = tokenizer, data

    def prompt(self, problem: Problem, messages: Sequence[Message]) -> Prompt:
        """What the model reads first.

        Without a chat template the messages are joined by blank lines and the tokenizer adds its own beginning token.
        Raises ModelError when the template refuses the conversation (some know no system role), DataError when no
        token comes out.
        """
        if getattr(self.tokenizer, "chat_template", None):
            try:
                text = self._templated(messages)
            except Exception as error:  # a template is a program of its author's: any jinja error, told with its text
                hint = ": leave [data] system_prompt out" if self.data.system_prompt else ""
                raise ModelError(
                    f"the tokenizer's chat template refuses problem {problem.id}: {error}{hint}"
                ) from error
            token_ids = self._ids(text)
        else:
            text = "\n\n".join(message["content"] for message in messages)
            token_ids = self.tokenizer(text)["input_ids"]
        if not token_ids:
            raise DataError(f"problem {problem.id} has no tokens")
        return Prompt(problem, text, tuple(int(token) for token in token_ids), tuple(messages))

    def answer(self, before: Sequence[Message], action: Action, messages: Sequence[Message]) -> tuple[int, ...]:
        """What the model reads after ``action``: what the template writes behind the text of an assistant's turn for
        these messages, up to where the next one begins. An end token that the action drew itself is not repeated.
        Nothing of it depends on what the action says, which the model keeps reading as it was sampled.

        Raises ModelError when the template rewrites what stood there before.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            return self._ids("\n\n" + "\n\n".join(message["content"] for message in messages) + "\n\n")
        conversation = [*before, {"role": "assistant", "content": MARK}, *messages]
        head, found, text = self._templated(conversation).rpartition(MARK)
        if not found or MARK in head or not head.startswith(self._templated(before, begin_answer=False)):
            raise ModelError(
                "the tokenizer's chat template rewrites earlier turns: the model would go on from another conversation "
                "than the one that it has read"
            )
        token_ids = self._ids(text)
        if action.stop_reason == "stop" and token_ids[:1] == tuple(action.token_ids[-1:]):
            token_ids = token_ids[1:]
        return token_ids

    def _templated(self, messages: Sequence[Message], begin_answer: bool = True) -> str:
        extra = self.data.chat_template_kwargs
        return self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=begin_answer, **extra
        )

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(int(token) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"])


MARK = "⟪what the model said⟫"
"""Stands for an action while what the template writes behind it is looked for."""


def render(problem: Problem, tokenizer: Any, data: Data) -> Prompt:
    """The problem through ``prompt_template``, ``system_prompt`` and the tokenizer's chat template.

    Raises as ``Renderer.prompt``.
    """
    return Renderer(tokenizer, data).prompt(problem, conversation(problem, data))


class Room(NamedTuple):
    """How problems are asked: [data] with their prompt keys, the most tokens that a prompt may have (None: any number),
    and ``why``, where that limit comes from."""

    section: Data
    limit: int | None
    why: str


def fitting(data: Dataset, tokenizer: Any, training: Room, heldout: Mapping[str, Room]) -> Dataset:
    """``data`` with prompts that can be asked, in training and in each held-out set as its room says: one problem of
    every form is rendered, and none is longer than its limit.

    With ``[data] long_prompts = "skip"`` longer ones are left out, counted and noted. Raises DataError naming the first
    longer one otherwise, and when nothing is left of a part; else as ``render``.
    """
    parts = [
        _Part("training problems", "", data.train, training),
        *(
            _Part("held-out ones", "", problems, heldout[name])
            if name == HELDOUT
            else _Part(f"in the set {name}", f" in the set {name}", problems, heldout[name])
            for name, problems in data.sets.items()
        ),
    ]
    lengths = [_too_long(part.problems, tokenizer, part.room) for part in parts]
    if not any(lengths):
        return data
    if training.section.long_prompts != "skip":
        raise DataError(_first_too_long(parts, lengths))
    kept = []
    for part, longer in zip(parts, lengths, strict=True):
        kept.append([problem for problem in part.problems if id(problem) not in longer])
        if part.problems and not kept[-1]:
            use = "to train on" if part.problems is data.train else f"that is held out{part.place}"
            raise DataError(
                f"data source {data.name!r}: every prompt {use} is longer than {part.room.limit} tokens "
                f"({part.room.why})"
            )
    sets = dict(zip(data.sets, kept[1:], strict=True))
    return replace(
        data,
        train=kept[0],
        sets=sets,
        content_hash=content_hash(kept[0], *(sets.values() or [[]])),
        notes=(*data.notes, *_left_out(parts, lengths)),
        skipped=sum(map(len, lengths)),
    )


class _Part(NamedTuple):
    """Problems that are asked in one way: what they are called where they are counted, and what is added where one of
    them is named."""

    name: str
    place: str
    problems: Sequence[Problem]
    room: Room


def _too_long(problems: Sequence[Problem], tokenizer: Any, room: Room) -> dict[int, int]:
    """Tokens of the prompts that are longer than the limit, by the problem's ``id()``. Raises as ``render``."""
    forms = {tuple(message["role"] for message in conversation(p, room.section)): p for p in problems}
    markup = 0  # bytes that the chat template adds to a conversation
    for problem in forms.values():
        rendered = render(problem, tokenizer, room.section)
        markup = max(markup, len(rendered.text.encode()) - _bytes(problem, room.section))
    if room.limit is None:
        return {}
    return {
        id(problem): length
        for problem in problems
        if _bytes(problem, room.section) + markup + SPARE_TOKENS > room.limit  # a token is a byte or more
        and (length := len(render(problem, tokenizer, room.section).token_ids)) > room.limit
    }


def _first_too_long(parts: Sequence[_Part], lengths: Sequence[Mapping[int, int]]) -> str:
    """The first prompt that is too long, and what to type."""
    part, longer = next((part, longer) for part, longer in zip(parts, lengths, strict=True) if longer)
    first = next(problem for problem in part.problems if id(problem) in longer)
    more = sum(map(len, lengths)) - 1
    others = f"; {more} more are too long" if more else ""
    return (
        f"{first.id}  the prompt{part.place} has {longer[id(first)]} tokens, more than {part.room.limit} "
        f'({part.room.why}){others}: shorten it, or leave such problems out with [data] long_prompts = "skip"'
    )


def _left_out(parts: Sequence[_Part], lengths: Sequence[Mapping[int, int]]) -> Iterator[str]:
    """How many problems of each part are left out: a sentence for every limit."""
    pairs = list(zip(parts, lengths, strict=True))
    for limit in dict.fromkeys(part.room.limit for part, longer in pairs if longer):
        here = [(part, longer) for part, longer in pairs if part.room.limit == limit]
        counts = ", ".join(f"{len(longer)} of {len(part.problems)} {part.name}" for part, longer in here)
        part, longer = next((part, longer) for part, longer in here if longer)
        first = next(problem for problem in part.problems if id(problem) in longer)
        yield (
            f"left out for prompts of more than {limit} tokens: {counts}; the first is {first.id} "
            f"with {longer[id(first)]} tokens"
        )


def _bytes(problem: Problem, section: Data) -> int:
    """Bytes of what the model is asked, without chat markup."""
    return sum(len(message["content"].encode()) for message in conversation(problem, section))


def longest_prompt(problems: Iterable[Problem], tokenizer: Any, data: Data) -> int:
    """Tokens of the longest prompt, as far as characters tell it: only those with the most of them are rendered.

    0 when there are no problems. Raises as ``render``.
    """

    def characters(problem: Problem) -> int:
        return sum(len(message["content"]) for message in conversation(problem, data))

    longest = heapq.nlargest(LONGEST_BY_CHARACTERS, problems, key=characters)
    return max((len(render(problem, tokenizer, data).token_ids) for problem in longest), default=0)


def conversation(problem: Problem, data: Data) -> list[Message]:
    """The chat messages: the system prompt, if one is set, then the problem with the template in its last message."""
    messages: list[Message]
    if isinstance(problem.prompt, str):
        messages = [{"role": "user", "content": problem.prompt}]
    else:
        messages = [dict(message) for message in problem.prompt]
    # Not str.format: a template asks for \boxed{} in so many words.
    messages[-1] = {**messages[-1], "content": data.prompt_template.replace("{prompt}", messages[-1]["content"])}
    return [{"role": "system", "content": data.system_prompt}, *messages] if data.system_prompt else messages
