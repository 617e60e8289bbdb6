"""Reads the examples of the supervised warm-up and renders them to tokens.

A prompt has exactly the tokens that the policy reads in training; an answer has those that the chat template adds for
it, and is trained on up to its end token. Some templates render an answer differently once more messages follow (they
drop its thinking). The next answer then begins a new sequence, as in episodes of several turns, so that every sequence
is one that the policy could read and write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from retrain.config import Config
from retrain.config.tasks import FILE_ENDINGS, Data
from retrain.data.dataset import SPARE_TOKENS
from retrain.data.prompts import Renderer, conversation
from retrain.data.sources import encodable, read_rows, value_and_type
from retrain.errors import DataError, ModelError
from retrain.files import read_json
from retrain.models.directory import find_file
from retrain.types import Message, Problem

ROLES = ("system", "user", "assistant")
FORMS = '{"prompt": "…", "completion": "…"} or {"messages": [{"role": "user", "content": "…"}, …]}'
TAIL = 20  # Characters at the end of an answer that must be rendered; a template may drop the thinking before them
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Example(NamedTuple):
    """Tokens, and a mask of equal length: true for the tokens whose prediction is in the loss."""

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]


@dataclass(frozen=True)
class Examples:
    """Examples to train on, and held-out ones. ``notes``: lines for the user."""

    train: list[Example]
    held_out: list[Example]
    notes: tuple[str, ...] = ()


class Dialogue(NamedTuple):
    """A row of a source. Assistant messages from the index ``first`` on are answers. ``where``: ``file:line``."""

    where: str
    messages: list[Message]
    first: int


def load_examples(config: Config, folder: Path, tokenizer: Any, context: int = 0) -> Examples:
    """Return the examples of ``[warmup]``. Held-out examples are removed from the training set.

    ``folder``: where relative paths are looked up first. ``tokenizer``: of transformers, or a LightTokenizer.
    ``context``: the model's context length in tokens; 0: unknown. Raises DataError for a faulty or over-long row, with
    ``long_prompts = "skip"`` only if all rows are over-long; MissingExtra or PluginError.
    """
    renderer, notes = ExampleRenderer(config, tokenizer, context), list[str]()
    parts = [
        renderer.examples(source, read_dialogues(config, source, split, folder), notes)
        for source, split in config.warmup.sources.values()
    ]
    train, held_out = parts[0], parts[1] if len(parts) > 1 else []
    common = {example.tokens for example in held_out}
    rest = [example for example in train if example.tokens not in common]
    if len(rest) < len(train):
        notes.append(f"{len(train) - len(rest)} of {len(train)} warm-up examples left out: they are held out")
    if not rest:
        raise DataError(f"data source {config.warmup.source!r}: every example is also held out; nothing is left")
    return Examples(rest, held_out, tuple(notes))


def read_dialogues(config: Config, source: str, split: str, folder: Path | None) -> list[Dialogue]:
    """Return all rows of ``source`` as messages. Raises DataError with location, key and fix for the first faulty
    row, MissingExtra or PluginError."""
    rows = read_rows(source, split, config.warmup.subset, folder, "warmup")
    is_file = source.endswith(FILE_ENDINGS)
    # The name of a file is the same on every machine.
    dialogues = [dialogue_of(Path(where).name if is_file else where, row, config.data) for where, row in rows]
    if not dialogues:
        raise DataError(f"data source {source!r} holds no examples: write {FORMS} on every line")
    return dialogues


def dialogue_of(where: str, row: Mapping[str, object], data: Data) -> Dialogue:
    """Return a row as messages. A ``prompt`` gets the system prompt and template of ``[data]``, as a problem does;
    ``messages`` get the system prompt if they have none. Raises DataError with ``where``, the key and the fix."""
    filled = {key: value for key, value in row.items() if value is not None}
    if "messages" in filled:
        if other := next((key for key in ("prompt", "completion") if key in filled), None):
            raise DataError(f'{where}  has "messages" and "{other}": keep one of the two forms')
        messages = _messages(where, "messages", filled["messages"])
        _check_order(where, "messages", messages)
        if data.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": data.system_prompt}, *messages]
        return Dialogue(where, messages, 0)
    for key in ("prompt", "completion"):
        if key not in filled:
            columns = ", ".join(f'"{name}"' for name in filled) or "nothing"
            raise DataError(f'{where}  has no "{key}", only {columns}: write {FORMS}')
    prompt, answer = _messages(where, "prompt", filled["prompt"]), _messages(where, "completion", filled["completion"])
    if prompt[-1]["role"] == "assistant":
        raise DataError(f'{where}  "prompt" ends with an assistant message: move it to "completion"')
    _check_order(where, "completion", answer)
    asked = conversation(Problem(where, tuple(prompt), ""), data)
    return Dialogue(where, [*asked, *answer], len(asked))


def _check_order(where: str, key: str, messages: list[Message]) -> None:
    first, last = messages[0]["role"], messages[-1]["role"]
    if last != "assistant":
        raise DataError(f'{where}  "{key}" ends with a {last} message: end with the assistant\'s, which is trained on')
    if key == "messages" and first == "assistant":
        raise DataError(f'{where}  "messages" begins with an assistant message: begin with what it answers')
    if key == "completion" and first != "assistant":
        raise DataError(f'{where}  "completion" begins with a {first} message: move it to "prompt"')


def _messages(where: str, key: str, value: object) -> list[Message]:
    if isinstance(value, str) and key != "messages":
        role = "user" if key == "prompt" else "assistant"
        return [{"role": role, "content": _text(f'{where}  "{key}"', value)}]
    if not isinstance(value, list) or not value:
        form = "a list of messages" if key == "messages" else "a text or a list of messages"
        raise DataError(f'{where}  "{key}" is {value_and_type(value)}, not {form}: write {FORMS}')
    return [_message(f'{where}  "{key}", message {number}', each) for number, each in enumerate(value, start=1)]


def _message(where: str, value: object) -> Message:
    if not isinstance(value, Mapping):
        raise DataError(f'{where} is {value_and_type(value)}, not a message: write {{"role": "user", "content": "…"}}')
    role = value.get("role")
    if role == "tool" or value.get("tool_calls"):
        raise DataError(
            f"{where} is a call or an answer of a tool, which the warm-up does not train on: remove the row"
        )
    if role not in ROLES:
        raise DataError(f"{where} has the role {value_and_type(role)}: write one of {', '.join(ROLES)}")
    return {"role": role, "content": _text(where, value.get("content"))}


def _text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where} is {value_and_type(value)}, not a text: write a text")
    if not value.strip():
        raise DataError(f"{where} is empty: write its text, or remove the row")
    return encodable(where, value)


@dataclass
class TokenSequence:
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)


class ExampleRenderer:
    """Renders the rows of a source with the model's chat template and the keys of ``[data]``."""

    def __init__(self, config: Config, tokenizer: Any, context: int):
        self.config, self.tokenizer = config, tokenizer
        self.renderer = Renderer(tokenizer, config.data)
        self.limit, self.why = config.warmup.max_tokens, f"[warmup] max_tokens = {config.warmup.max_tokens}"
        if 0 < context < self.limit:
            self.limit, self.why = context, f"{config.model.model} has a context of {context} tokens"
        template = getattr(tokenizer, "chat_template", None)
        self.marks_answers = isinstance(template, str) and GENERATION.search(template) is not None
        self.end_ids, self.end_text = _ends(config, self.renderer)
        self._numbers = dict[int, int]()  # Interned token ids: the examples take a fifth of the memory

    def check(self, source: str, dialogues: Sequence[Dialogue]) -> None:
        """Raise the DataErrors of ``examples``. Only rows with more bytes than ``limit`` are tokenised, because a token
        has at least one byte, and tokenising takes most of the time."""
        long = [dialogue for dialogue in dialogues if self._bytes(dialogue) + SPARE_TOKENS > self.limit]
        self.examples(source, long, [], len(dialogues))

    def examples(self, source: str, dialogues: Sequence[Dialogue], notes: list[str], total: int = 0) -> list[Example]:
        """Return the sequences of all rows. Over-long rows are left out and noted, or raise DataError; DataError too if
        none of ``total`` rows (default: all) remains, or if the chat template does not fit a row."""
        total = total or len(dialogues)
        examples, longer = list[Example](), dict[str, int]()
        for dialogue in dialogues:
            sequences = list(self._sequences(dialogue))
            if (length := max(len(each.tokens) for each in sequences)) > self.limit:
                longer[dialogue.where] = length
                continue
            for each in sequences:
                tokens = tuple(self._numbers.setdefault(token, token) for token in each.tokens)
                examples.append(Example(tokens, tuple(each.mask)))
        if longer:
            note = self._note(longer, total)
            if len(longer) == total:
                raise DataError(f"data source {source!r}: {note}; nothing is left")
            notes.append(note)
        return examples

    def _note(self, longer: Mapping[str, int], count: int) -> str:
        """Return a note that counts the over-long rows left out. Raises DataError, which names the first of them,
        unless ``[data] long_prompts`` is "skip"."""
        first, length = next(iter(longer.items()))
        if self.config.data.long_prompts != "skip":
            others = f"; {len(longer) - 1} more are too long" if len(longer) > 1 else ""
            raise DataError(
                f"{first}  the example has {length} tokens, more than {self.limit} ({self.why}){others}: shorten it, "
                'or leave such examples out with [data] long_prompts = "skip"'
            )
        return (
            f"{len(longer)} of {count} warm-up examples left out for more than {self.limit} tokens ({self.why}); the "
            f"first is {first} with {length}"
        )

    def _turns(self, dialogue: Dialogue) -> list[int]:
        """Return the indices of the messages that are trained on."""
        messages = dialogue.messages
        turns = [i for i in range(dialogue.first, len(messages)) if messages[i]["role"] == "assistant"]
        return turns if self.config.warmup.train_on == "all" else turns[-1:]

    def _bytes(self, dialogue: Dialogue) -> int:
        """Return an upper bound on the bytes of a sequence. Raises DataError if the chat template does not fit."""
        turns, longest = self._turns(dialogue), 0
        for index in turns:
            prompt = self._prompt(dialogue, index, None)
            text = prompt + "".join(part for part, _ in self._answer(dialogue, index, prompt))
            longest = max(longest, len(text.encode()))
        return longest + len(turns) * len(self.end_text.encode())

    def _sequences(self, dialogue: Dialogue) -> Iterator[TokenSequence]:
        sequence = None
        for index in self._turns(dialogue):
            prompt = self._prompt(dialogue, index, sequence)
            if sequence is not None and not prompt.startswith(sequence.text):
                yield sequence
                sequence = None
            sequence = sequence or TokenSequence()
            self._extend(sequence, prompt[len(sequence.text) :], False)
            begin = len(sequence.tokens)
            for text, trained in self._answer(dialogue, index, prompt):
                self._extend(sequence, text, trained)
            ends = [i for i in range(begin, len(sequence.tokens)) if sequence.tokens[i] in self.end_ids]
            if ends:
                sequence.mask[ends[-1] :] = [True] + [False] * (len(sequence.tokens) - ends[-1] - 1)
            else:  # without an end token, the policy would learn to write on after the answer
                self._extend(sequence, self.end_text, True)
        if sequence is not None:
            yield sequence

    def _prompt(self, dialogue: Dialogue, index: int, sequence: TokenSequence | None) -> str:
        """Return what the policy reads before the message ``index``, including an earlier part of ``sequence``."""
        before = dialogue.messages[:index]
        if self.renderer.has_template:
            return self._rendered(dialogue, before, True)
        if sequence is None:
            return "\n\n".join(message["content"] for message in before)
        answered = max(i for i, message in enumerate(before) if message["role"] == "assistant")
        return "\n\n".join([sequence.text, *(message["content"] for message in before[answered + 1 :]), ""])

    def _answer(self, dialogue: Dialogue, index: int, prompt: str) -> list[tuple[str, bool]]:
        """Return the text that follows ``prompt`` for the message ``index``, in parts that are trained on or not."""
        messages = dialogue.messages[: index + 1]
        if not self.renderer.has_template:
            return [(messages[-1]["content"], True)]
        text = self._rendered(dialogue, messages, False)
        if not text.startswith(prompt):
            common = next(i for i in range(len(prompt)) if not text.startswith(prompt[: i + 1]))
            raise DataError(
                f"{dialogue.where}  the chat template ends the prompt with {prompt[common:][:40]!r} and begins the "
                f"answer with {text[common:][:40]!r}, so that prompts in training would differ from those "
                "of the examples: write the thinking into the answer, set [data] chat_template_kwargs, or use a model "
                "with another template"
            )
        if messages[-1]["content"].strip()[-TAIL:] not in text[len(prompt) :]:
            raise DataError(
                f"{dialogue.where}  the chat template leaves out the text of the answer, and shows "
                f"{text[len(prompt) :][:40]!r}: use a model with another template"
            )
        parts, at = list[tuple[str, bool]](), len(prompt)
        for start, end in self._marks(messages) if self.marks_answers else [(at, len(text))]:
            start, end = max(start, at), max(end, at)
            parts += [(text[at:start], False), (text[start:end], True)]
            at = end
        return [(part, trained) for part, trained in [*parts, (text[at:], False)] if part]

    def _marks(self, messages: Sequence[Message]) -> list[tuple[int, int]]:
        """Return the character ranges that the template's ``{% generation %}`` blocks produce."""
        from transformers.utils.chat_template_utils import render_jinja_template

        special = self.tokenizer.special_tokens_map
        rendered: Any = render_jinja_template(
            [[dict(message) for message in messages]],
            chat_template=self.tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **{**special, **self.config.data.chat_template_kwargs},
        )
        return rendered[1][0]

    def _rendered(self, dialogue: Dialogue, messages: Sequence[Message], is_prompt: bool) -> str:
        try:
            return self.renderer.text(messages, is_prompt=is_prompt)
        except ModelError as error:
            hint = ": leave [data] system_prompt out" if self.config.data.system_prompt else ": remove the row"
            raise DataError(f"{dialogue.where}  {error}{hint}") from error.__cause__

    def _extend(self, sequence: TokenSequence, text: str, trained: bool) -> None:
        """Add ``text``, tokenised together with the text before it, or by itself if that would change earlier
        tokens."""
        sequence.text += text
        if self.renderer.has_template:
            token_ids = self.renderer.ids(sequence.text)
        else:  # as in ``Renderer.prompt``, with the tokenizer's beginning token
            token_ids = tuple(self.tokenizer(sequence.text)["input_ids"])
        begin = len(sequence.tokens)
        added = token_ids[begin:] if list(token_ids[:begin]) == sequence.tokens else self.renderer.ids(text)
        sequence.tokens += added
        sequence.mask += [trained] * len(added)


def _ends(config: Config, renderer: Renderer) -> tuple[frozenset[int], str]:
    """Return the tokens at which sampling stops, and the text of one of them. Raises ModelError without any."""
    ends = dict[int, None]()
    if renderer.end_text:
        ends |= dict.fromkeys(renderer.ids(renderer.end_text)[-1:])
    for name in ("generation_config.json", "config.json"):
        path = find_file(config.model.model, name, config.model.revision)
        ids = read_json(path).get("eos_token_id") if path is not None else None
        ends |= dict.fromkeys([ids] if isinstance(ids, int) else ids or [])
    if not ends:
        raise ModelError(f"model {config.model.model!r} names no end-of-sequence token")
    return frozenset(ends), renderer.end_text or str(renderer.tokenizer.decode([next(iter(ends))]))
