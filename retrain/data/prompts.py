"""Renders problems and multi-turn conversations to tokens.

Sampled tokens are never tokenised again: after an action, only the template's text up to the next action is tokenised.
To find that text, the conversation is rendered with a unique mark in place of every action, so that actions may contain
any text. The text between marks must equal what the policy has read so far. If it does not (templates drop the thinking
of earlier turns, move a system prompt, omit an empty ``<think></think>``), the policy reads the full conversation as a
new sequence, so that every sample is one that the policy has really seen.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from retrain.config.tasks import Data
from retrain.errors import DataError, ModelError
from retrain.types import Action, Message, Problem, Prompt

SIMPLE_TYPES = {"string", "integer", "number", "boolean"}  # JSON types that need no further description
CALL_ID = "call00000"  # Nine letters and digits, as Mistral's templates want them
THINK_END = "</think>"

Tools = Sequence[Mapping[str, Any]]  # JSON schemas of functions, as chat templates take them


def conversation(problem: Problem, data: Data) -> list[Message]:
    """Return the chat messages: system prompt, if set, then the problem, the template applied to its last message."""
    messages: list[Message]
    if isinstance(problem.prompt, str):
        messages = [{"role": "user", "content": problem.prompt}]
    else:
        messages = [dict(message) for message in problem.prompt]
    # Not str.format: a template may contain other braces, such as \boxed{}.
    messages[-1] = {**messages[-1], "content": data.prompt_template.replace("{prompt}", messages[-1]["content"])}
    return [{"role": "system", "content": data.system_prompt}, *messages] if data.system_prompt else messages


def render(problem: Problem, tokenizer: Any, data: Data) -> Prompt:
    """Return the prompt of a problem, made with ``prompt_template``, ``system_prompt`` and the chat template.

    Raises ModelError and DataError as ``Renderer.prompt`` does.
    """
    return Renderer(tokenizer, data).prompt(problem, conversation(problem, data))


class Renderer:
    """Renders conversations with a tokenizer's chat template and the keys of ``[data]``.

    ``tools_prompt``: description of tools for templates that cannot show tools; None: made by ``tools_text``; "": none.
    """

    def __init__(self, tokenizer: Any, data: Data, tools_prompt: str | None = None):
        self.tokenizer, self.data, self.tools_prompt = tokenizer, data, tools_prompt
        self._shows_tools: bool | None = None

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def end_text(self) -> str:
        """Return the text of the token that ends an assistant message; "" if unknown."""
        return str(getattr(self.tokenizer, "eos_token", None) or "")

    def prompt(self, problem: Problem, messages: Sequence[Message], tools: Tools = ()) -> Prompt:
        """Return the first prompt of a conversation.

        Without a chat template, the messages are joined by blank lines and the tokenizer adds its beginning token.
        Raises ModelError if the template rejects the conversation (some have no system role), DataError for an empty
        prompt.
        """
        if tools:
            messages = self._with_tools(messages, tools)
        if self.has_template:
            try:
                text = self.text(messages, tools)
            except ModelError as error:
                hint = ": leave [data] system_prompt out" if self.data.system_prompt else ""
                cause = error.__cause__
                message = f"the tokenizer's chat template refuses problem {problem.id}: {cause}{hint}"
                raise ModelError(message) from cause
            token_ids = self.ids(text)
        else:
            text = "\n\n".join(message["content"] for message in messages)
            token_ids = self.tokenizer(text)["input_ids"]
        if not token_ids:
            raise DataError(f"problem {problem.id} has no tokens")
        return Prompt(problem, text, tuple(int(token) for token in token_ids), tuple(messages))

    def text(self, messages: Sequence[Mapping[str, object]], tools: Tools = (), is_prompt: bool = True) -> str:
        """Return the rendered conversation; with ``is_prompt``, also the text before the model's next answer. Raises
        ModelError if the template rejects it."""
        extra: dict[str, object] = dict(self.data.chat_template_kwargs)
        if tools:
            extra["tools"] = [dict(tool) for tool in tools]
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=is_prompt, **extra
            )
        except Exception as error:  # whatever the template's own code raises
            raise ModelError(f"the tokenizer's chat template refuses the conversation: {error}") from error

    def ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, without special tokens that the tokenizer would add."""
        return tuple(int(token) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _with_tools(self, messages: Sequence[Message], tools: Tools) -> Sequence[Message]:
        if self._shows_tools is None:
            self._shows_tools = self.has_template and self.text(messages, tools) != self.text(messages)
        about = tools_text(tools) if self.tools_prompt is None else self.tools_prompt
        if self._shows_tools or not about:
            return messages
        if messages and messages[0]["role"] == "system":
            first = messages[0]["content"]
            return [{"role": "system", "content": f"{first}\n\n{about}"}, *messages[1:]]
        return [{"role": "system", "content": about}, *messages]


def _type_of(about: object) -> str | None:
    kind = about.get("type") if isinstance(about, Mapping) else None
    return kind if isinstance(kind, str) else None


def tools_text(tools: Tools) -> str:
    """Return a description of the tools and of the form of a call. For a tool with arguments other than texts, numbers
    and booleans, the description contains the full JSON schema of its arguments."""
    lines = ["You can call these tools:"]
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters", {})
        types = {name: _type_of(about) for name, about in schema.get("properties", {}).items()}
        names = ", ".join(f"{name}: {kind or 'any'}" for name, kind in types.items())
        lines.append(f"{function['name']}({names}): {function.get('description', '')}".rstrip(": "))
        if not SIMPLE_TYPES.issuperset(types.values()):
            lines.append(f"JSON schema of its arguments: {json.dumps(schema, ensure_ascii=False)}")
    first = tools[0]["function"]
    example = {name: "…" for name in first.get("parameters", {}).get("properties", {})}
    call = json.dumps({"name": first["name"], "arguments": example}, ensure_ascii=False)
    return "\n".join([*lines, "To call one, write only:", "```tool", call, "```", "You will read what it returns."])


class Continuation(NamedTuple):
    token_ids: tuple[int, ...]
    fresh: bool  # ``token_ids`` are the full conversation, not only its new part


class Conversation:
    def __init__(self, renderer: Renderer, prompt: Prompt, tools: Tools = ()):
        self.renderer, self.tools = renderer, tools
        self.messages: list[Message] = list(prompt.messages)
        self._begin(prompt.text)

    def _begin(self, text: str) -> None:
        self._read = [text]  # text that the policy read before each action of the sequence
        self._action_indices: list[int] = []  # indices of the sequence's actions among the messages

    def reply(self, action: Action, messages: Sequence[Message]) -> Continuation:
        """Add ``action`` and the ``messages`` that reply to it; return the tokens that the policy reads next, without
        an end token that the action already has. Raises ModelError if the chat template rejects the conversation."""
        self._action_indices.append(len(self.messages))
        self.messages += [{"role": "assistant", "content": action.text}, *messages]
        if not self.renderer.has_template:
            text = "\n\n" + "\n\n".join(message["content"] for message in messages) + "\n\n"
            self._read.append(text)
            return Continuation(self.renderer.ids(text), False)
        rest = self._rest()
        if rest is None:
            return self._new_sequence()
        self._read.append(rest)
        end = self.renderer.end_text
        if end and rest.lstrip(" ").startswith(end):  # Mistral's templates put spaces around an action
            rest = rest.lstrip(" ")
        token_ids = self.renderer.ids(rest)
        if action.stop_reason == "stop" and token_ids[:1] == tuple(action.token_ids[-1:]):
            token_ids = token_ids[1:]
        return Continuation(token_ids, False)

    def replace(self, messages: Sequence[Message]) -> Continuation:
        self.messages = list(messages)
        return self._new_sequence()

    def _new_sequence(self) -> Continuation:
        text = self.renderer.text(self.messages, self.tools)
        self._begin(text)
        return Continuation(self.renderer.ids(text), True)

    def _rest(self) -> str | None:
        """Return the template's text after the last action; None if the text before is not what the policy has read."""
        # Random, so that no completion can contain a mark.
        salt = secrets.token_hex(6)
        marks = [f"@said{index}x{salt}@" for index in range(len(self._action_indices))]
        marked = list(self.messages)
        for index, mark in zip(self._action_indices, marks, strict=True):
            thinks = THINK_END in marked[index]["content"]
            content = f"<think>\n{_thought(mark)}\n{THINK_END}\n\n{mark}" if thinks else mark
            marked[index] = {"role": "assistant", "content": content}
        try:
            text, end = self.renderer.text(marked, self.tools), ""
        except ModelError:  # the template allows a tool's answer only after a structured call
            text, end = self.renderer.text(_as_calls(marked, self._action_indices), self.tools), self.renderer.end_text
        at = 0
        for read, index, mark in zip(self._read, self._action_indices, marks, strict=True):
            begin = text.find(mark, at)
            if begin < 0 or not text.startswith(read, at):
                return None
            # The template has dropped the thinking of this turn, which the policy has read.
            if THINK_END in self.messages[index]["content"] and _thought(mark) not in text[at:begin]:
                return None
            at = begin + len(mark)
            if end and text[at:].lstrip()[:1] == '"':  # the mark is a function name: skip the rest of its call
                at = text.find(end, at)
                if at < 0:
                    return None
        return None if any(mark in text[at:] for mark in marks) else text[at:]


def _thought(mark: str) -> str:
    return mark.replace("said", "thought")


def _as_calls(messages: Sequence[Message], action_indices: Sequence[int]) -> list[Mapping[str, object]]:
    """Return the messages, with structured calls in place of each action that tool messages answer: one call per
    answer, whose function name is the action's mark."""
    rewritten: list[Mapping[str, object]] = [dict(message) for message in messages]
    for index in action_indices:
        answers = index + 1
        while answers < len(rewritten) and rewritten[answers]["role"] == "tool":
            rewritten[answers] = {"tool_call_id": CALL_ID, **rewritten[answers]}
            answers += 1
        if answers > index + 1:
            name = messages[index]["content"].rpartition("\n")[2]
            calls = [{"id": CALL_ID, "type": "function", "function": {"name": name, "arguments": {}}}]
            rewritten[index] = {"role": "assistant", "content": "", "tool_calls": calls * (answers - index - 1)}
    return rewritten
