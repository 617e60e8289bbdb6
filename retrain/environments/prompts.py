"""From a problem to the tokens that the model sees."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

from retrain.config.tasks import Data
from retrain.errors import DataError, ModelError
from retrain.types import Action, Message, Problem, Prompt

LONGEST_BY_CHARACTERS = 8
"""Prompts among which the one of most tokens is looked for: a token has more characters in some texts than in others,
and rendering all of a large data set takes minutes."""


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

        Raises ModelError when the template rewrites what stood there before.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            return self._ids("\n\n" + "\n\n".join(message["content"] for message in messages) + "\n\n")
        conversation = [*before, {"role": "assistant", "content": MARK}, *messages]
        head, found, text = self._templated(conversation).rpartition(MARK)
        if not found or MARK in head:
            raise ModelError("the tokenizer's chat template rewrites earlier turns, which several turns cannot have")
        token_ids = self._ids(text)
        if action.stop_reason == "stop" and token_ids[:1] == tuple(action.token_ids[-1:]):
            token_ids = token_ids[1:]
        return token_ids

    def _templated(self, messages: Sequence[Message]) -> str:
        extra = self.data.chat_template_kwargs
        return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **extra)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(int(token) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"])


MARK = "⟪what the model said⟫"
"""Stands for an action while what the template writes behind it is looked for."""


def render(problem: Problem, tokenizer: Any, data: Data) -> Prompt:
    """The problem through ``prompt_template``, ``system_prompt`` and the tokenizer's chat template.

    Raises as ``Renderer.prompt``.
    """
    return Renderer(tokenizer, data).prompt(problem, conversation(problem, data))


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
