"""Convert chat messages of other libraries to role and text."""

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from retrain.errors import PluginError
from retrain.types import Message


def text_of(content: object, placeholders: bool = False, separator: str = "\n") -> str:
    """Return the text of a message's content, its parts joined by ``separator``.

    Raises PluginError for images, audio and files; with ``placeholders``, returns their types in brackets instead.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in cast("Iterable[object]", content):
        fields = part if isinstance(part, Mapping) else getattr(part, "__dict__", {})
        kind = fields.get("type", type(part).__name__)
        text = fields.get("text") or fields.get("refusal")
        if text is None and kind not in ("text", "refusal"):
            if not placeholders:
                raise PluginError(f'it shows the model something of type "{kind}"; only text is supported')
            text = f"[{kind}]"
        texts.append(str(text or ""))
    return separator.join(texts)


def chat_messages(
    messages: Iterable[object], keys: Sequence[str] = (), placeholders: bool = False, separator: str = "\n"
) -> list[Message]:
    """Return messages with role, text and the fields in ``keys``. Raises PluginError for anything that is not a
    message. ``placeholders`` and ``separator`` are passed to ``text_of``."""
    chat: list[Message] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PluginError(f"a message is {message!r:.80}, not a role with a text")
        text = text_of(content, placeholders, separator)
        kept = {key: message[key] for key in keys if message.get(key)}
        chat.append(cast("Message", {"role": message["role"], "content": text, **kept}))
    return chat
