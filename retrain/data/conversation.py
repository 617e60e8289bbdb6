"""A conversation of several turns in the model's own chat template, token for token.

What the policy sampled is never tokenised again. Of what follows an action only that is tokenised which the template
writes behind it, up to where the next action begins. To find that part, the conversation is rendered with a mark in
place of every action; what stands between the marks must be what the policy has read so far. Where it is not (the
template drops the thinking of earlier turns, moves a system prompt, leaves out an empty ``<think></think>``), the
policy reads the whole conversation anew: a new sequence, so that every sample is one that the policy has really seen.

Between the marks nothing depends on what the policy said, which may hold any text at all.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from retrain.data.prompts import Renderer
from retrain.errors import ModelError
from retrain.types import Action, Message, Prompt

CALL_ID = "call00000"  # Nine letters and digits, as Mistral's templates want them
THINK_END = "</think>"


class Read(NamedTuple):
    """What the policy reads next; ``fresh``: the whole conversation, and not only what is new."""

    token_ids: tuple[int, ...]
    fresh: bool


class Conversation:
    """One rollout's conversation. ``messages`` is all that was said, as text."""

    def __init__(self, renderer: Renderer, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = ()):
        self.renderer, self.tools = renderer, tools
        self.messages: list[Message] = list(prompt.messages)
        self._begin(prompt.text)

    def _begin(self, text: str) -> None:
        """The policy has read the whole conversation as this text."""
        self._read = [text]  # what it has read before each action since then
        self._said: list[int] = []  # where its actions stand among the messages

    def reply(self, action: Action, messages: Sequence[Message]) -> Read:
        """What the policy reads after ``action``, which these messages answer. An end token that the action ends with
        is not repeated. Raises ModelError when the template refuses the conversation."""
        self._said.append(len(self.messages))
        self.messages += [{"role": "assistant", "content": action.text}, *messages]
        if not self.renderer.has_template:
            text = "\n\n" + "\n\n".join(message["content"] for message in messages) + "\n\n"
            self._read.append(text)
            return Read(self.renderer.ids(text), False)
        rest = self._rest()
        if rest is None:
            return self._anew()
        self._read.append(rest)
        end = self.renderer.end_text
        if end and rest.lstrip(" ").startswith(end):  # Mistral's templates set what was said in spaces
            rest = rest.lstrip(" ")
        token_ids = self.renderer.ids(rest)
        if action.stop_reason == "stop" and token_ids[:1] == tuple(action.token_ids[-1:]):
            token_ids = token_ids[1:]
        return Read(token_ids, False)

    def replace(self, messages: Sequence[Message]) -> Read:
        """What the policy reads after the environment has rewritten the conversation to these messages."""
        self.messages = list(messages)
        return self._anew()

    def _anew(self) -> Read:
        text = self.renderer.text(self.messages, self.tools)
        self._begin(text)
        return Read(self.renderer.ids(text), True)

    def _rest(self) -> str | None:
        """What the template writes behind the last action; None where it does not write what was read before it."""
        salt = secrets.token_hex(6)
        marks = [f"@said{index}x{salt}@" for index in range(len(self._said))]
        marked = list(self.messages)
        for place, mark in zip(self._said, marks, strict=True):
            thinks = THINK_END in marked[place]["content"]
            content = f"<think>\n{_thought(mark)}\n{THINK_END}\n\n{mark}" if thinks else mark
            marked[place] = {"role": "assistant", "content": content}
        try:
            text, end = self.renderer.text(marked, self.tools), ""
        except ModelError:  # a template that allows a tool's answer only to a call that it wrote itself
            text, end = self.renderer.text(_as_calls(marked, self._said), self.tools), self.renderer.end_text
        at = 0
        for read, place, mark in zip(self._read, self._said, marks, strict=True):
            begin = text.find(mark, at)
            if begin < 0 or not text.startswith(read, at):
                return None
            if THINK_END in self.messages[place]["content"] and _thought(mark) not in text[at:begin]:
                return None
            at = begin + len(mark)
            if end and text[at:].lstrip()[:1] == '"':  # the mark was a name in a call, which the end token ends
                at = text.find(end, at)
                if at < 0:
                    return None
        return None if any(mark in text[at:] for mark in marks) else text[at:]


def _thought(mark: str) -> str:
    return mark.replace("said", "thought")


def _as_calls(messages: Sequence[Message], said: Sequence[int]) -> list[Mapping[str, Any]]:
    """The messages with actions that a tool answers as calls of a tool whose name is what they say."""
    made: list[Mapping[str, Any]] = [dict(message) for message in messages]
    for place in said:
        answers = place + 1
        while answers < len(made) and made[answers]["role"] == "tool":
            made[answers] = {"tool_call_id": CALL_ID, **made[answers]}
            answers += 1
        if answers > place + 1:
            name = made[place]["content"].rpartition("\n")[2]
            calls = [{"id": CALL_ID, "type": "function", "function": {"name": name, "arguments": {}}}]
            made[place] = {"role": "assistant", "content": "", "tool_calls": calls * (answers - place - 1)}
    return made
