"""From a problem to the tokens that the model sees."""

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from retrain.config.evaluation import HELDOUT
from retrain.config.tasks import Data
from retrain.data.dataset import Dataset, content_hash
from retrain.errors import DataError, ModelError
from retrain.types import Message, Problem, Prompt

LONGEST_BY_CHARACTERS = 8
"""Prompts of most characters that are rendered to find the one of most tokens; rendering all of a large data set takes
minutes."""

SPARE_TOKENS = 16  # Room for beginning tokens and whatever else a tokenizer adds to a text

SIMPLE_TYPES = {"string", "integer", "number", "boolean"}  # Types of JSON schemas whose name says what a value is

Tools = Sequence[Mapping[str, Any]]  # JSON schemas of functions, as chat templates take them


class Renderer:
    """Conversations through a tokenizer's chat template, as ``[data]`` says.

    ``tools_prompt`` tells the model of its tools where its template knows none: None is the list of them with the way
    to call one, "" is nothing.
    """

    def __init__(self, tokenizer: Any, data: Data, tools_prompt: str | None = None):
        self.tokenizer, self.data, self.tools_prompt = tokenizer, data, tools_prompt
        self._shows_tools: bool | None = None

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def end_text(self) -> str:
        """The token that ends what the assistant says, as text; "" where it is not known."""
        return str(getattr(self.tokenizer, "eos_token", None) or "")

    def prompt(self, problem: Problem, messages: Sequence[Message], tools: Tools = ()) -> Prompt:
        """What the model reads first.

        Without a chat template the messages are joined by blank lines and the tokenizer adds its own beginning token.
        Raises ModelError when the template refuses the conversation (some know no system role), DataError when no
        token comes out.
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

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Tools = ()) -> str:
        """The conversation as the template writes it, up to where the model's answer begins. Raises ModelError when the
        template refuses it."""
        extra: dict[str, Any] = dict(self.data.chat_template_kwargs)
        if tools:
            extra["tools"] = [dict(tool) for tool in tools]
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True, **extra
            )
        except Exception as error:  # whatever the template's own code raises
            raise ModelError(f"the tokenizer's chat template refuses the conversation: {error}") from error

    def ids(self, text: str) -> tuple[int, ...]:
        """The tokens of a part of the conversation, and none that a tokenizer adds."""
        return tuple(int(token) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _with_tools(self, messages: Sequence[Message], tools: Tools) -> Sequence[Message]:
        """With a system message about the tools, where the template does not show them itself."""
        if self._shows_tools is None:
            self._shows_tools = self.has_template and self.text(messages, tools) != self.text(messages)
        about = tools_text(tools) if self.tools_prompt is None else self.tools_prompt
        if self._shows_tools or not about:
            return messages
        if messages and messages[0]["role"] == "system":
            first = messages[0]["content"]
            return [{"role": "system", "content": f"{first}\n\n{about}"}, *messages[1:]]
        return [{"role": "system", "content": about}, *messages]


def _type_of(about: Any) -> str | None:
    """Return the type that a property's JSON schema names; None where it says it otherwise."""
    kind = about.get("type") if isinstance(about, Mapping) else None
    return kind if isinstance(kind, str) else None


def tools_text(tools: Tools) -> str:
    """Describe the tools, and how one is called. Of a tool with arguments that are more than a text, number or boolean
    the whole JSON schema is given, with its definitions."""
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
    """``data`` with prompts that can be asked: one problem of every form is rendered, and no prompt is longer than the
    limit of its room, in training and in each held-out set.

    With ``[data] long_prompts = "skip"`` longer ones are left out, counted and noted; otherwise DataError names the
    first. Raises DataError too when all of a part are left out; else as ``render``.
    """
    too_long = _too_long(data.train, tokenizer, training)
    parts = [_Part("training problems", "", data.train, training, too_long)]
    for name, problems in data.sets.items():
        words = ("held-out ones", "") if name == HELDOUT else (f"in the set {name}", f" in the set {name}")
        parts.append(_Part(*words, problems, heldout[name], _too_long(problems, tokenizer, heldout[name])))
    if not any(part.longer for part in parts):
        return data
    if training.section.long_prompts != "skip":
        raise DataError(_first_too_long(parts))
    kept = [[problem for problem in part.problems if id(problem) not in part.longer] for part in parts]
    for part, left in zip(parts, kept, strict=True):
        if part.problems and not left:
            use = "to train on" if part.problems is data.train else f"that is held out{part.place}"
            raise DataError(
                f"data source {data.name!r}: every prompt {use} is longer than {part.room.limit} tokens "
                f"({part.room.why}); the shortest has {min(part.longer.values())}"
            )
    sets = dict(zip(data.sets, kept[1:], strict=True))
    return replace(
        data,
        train=kept[0],
        sets=sets,
        content_hash=content_hash(kept[0], *(sets.values() or [[]])),
        notes=(*data.notes, *_left_out(parts)),
        skipped=sum(len(part.longer) for part in parts),
    )


class _Part(NamedTuple):
    """Problems that are asked in one way: their name in counts, what follows the name of one of them, and the lengths
    of prompts over the limit by the problem's ``id()``."""

    name: str
    place: str
    problems: Sequence[Problem]
    room: Room
    longer: Mapping[int, int]

    @property
    def first(self) -> Problem:
        """The first problem whose prompt is too long."""
        return next(problem for problem in self.problems if id(problem) in self.longer)


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


def _first_too_long(parts: Sequence[_Part]) -> str:
    """The first prompt that is too long, and what to type."""
    part = next(part for part in parts if part.longer)
    more = sum(len(part.longer) for part in parts) - 1
    others = f"; {more} more are too long" if more else ""
    return (
        f"{part.first.id}  the prompt{part.place} has {part.longer[id(part.first)]} tokens, more than "
        f"{part.room.limit} ({part.room.why}){others}: shorten it, or leave such problems out with "
        '[data] long_prompts = "skip"'
    )


def _left_out(parts: Sequence[_Part]) -> Iterator[str]:
    """How many problems of each part are left out: a sentence for every limit."""
    long = [part for part in parts if part.longer]
    for limit in dict.fromkeys(part.room.limit for part in long):
        here = [part for part in long if part.room.limit == limit]
        counts = ", ".join(f"{len(part.longer)} of {len(part.problems)} {part.name}" for part in here)
        first = here[0].first
        yield (
            f"left out for prompts of more than {limit} tokens: {counts}; the first is {first.id} "
            f"with {here[0].longer[id(first)]} tokens"
        )


def _bytes(problem: Problem, section: Data) -> int:
    """Bytes of what the model is asked, without chat markup."""
    return sum(len(message["content"].encode()) for message in conversation(problem, section))


def longest_prompt(problems: Iterable[Problem], tokenizer: Any, data: Data) -> int:
    """Tokens of the longest prompt among the ``LONGEST_BY_CHARACTERS``; 0 when there are no problems. Raises as
    ``render``."""

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
