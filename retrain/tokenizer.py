"""Tokenizers without a model: decoding, the position of each token in the text, and chat templates."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from retrain.errors import ModelError
from retrain.maths.arrays import OffsetArray
from retrain.models.directory import find_file
from retrain.util.jsonl import Row

Offsets = np.ndarray | list[tuple[int, int]]  # Character range [start, end) of each token

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(eq=False)
class Tokenizer:
    """Decodes tokens for training, algorithms and pages. ``source``: a callable tokenizer of transformers or another
    library, with ``decode`` and possibly a chat template."""

    source: Any

    @cached_property
    def token_bytes(self) -> list[bytes] | None:
        """Return the bytes of every token id, b"" for special tokens; None if the tokenizer is not byte-level."""
        return byte_table(self.source)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens."""
        return self.source.decode(token_ids, skip_special_tokens=True)

    def offsets(self, token_ids: Sequence[int]) -> tuple[str, Offsets]:
        """Return the text of sampled tokens and each token's character range [start, end).

        Encoding the text again may split it differently, so the sampled tokens themselves are decoded: by their bytes
        if the tokenizer is byte-level, else as a stream, in which a character of several tokens belongs to the last of
        them. Special tokens have empty ranges.
        """
        table = self.token_bytes
        if table is not None:
            return text_and_offsets([table[i] if i < len(table) else b"" for i in token_ids])
        backend = getattr(self.source, "backend_tokenizer", None)
        if backend is None:  # without a fast backend: use the lengths of decoded prefixes
            ends = [len(self.decode(token_ids[: i + 1])) for i in range(len(token_ids))]
            text = self.decode(token_ids)
        else:
            from tokenizers.decoders import DecodeStream

            stream = DecodeStream(skip_special_tokens=True)
            pieces = [stream.step(backend, token_id) or "" for token_id in token_ids]
            ends, text = list(accumulate(map(len, pieces))), "".join(pieces)
        return text, [(start, max(start, end)) for start, end in pairwise([0, *ends])]


class ByteTokenizer:
    """Tokenizer whose tokens are UTF-8 bytes, for backends without a tokenizer of their own."""

    chat_template = None

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode("utf-8", errors="surrogateescape"))}

    def decode(self, token_ids: Sequence[int], **_: object) -> str:
        return bytes(token for token in token_ids if 0 <= token < 256).decode("utf-8", errors="surrogateescape")


class LightTokenizer:
    """The part of a transformers tokenizer that ``retrain.data`` uses, to measure prompts and examples without torch.

    ``tokenizer.json`` is read by the tokenizers library, the chat template rendered by transformers' own function,
    whose module imports no torch. Training uses transformers' tokenizer; tests compare the two.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None, special_tokens_map: dict[str, str]):
        self.tokenizer, self.chat_template, self.special_tokens_map = tokenizer, chat_template, special_tokens_map

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def apply_chat_template(
        self, messages: Any, tokenize: bool = False, add_generation_prompt: bool = True, **extra: object
    ) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        assert not tokenize
        rendered, _ = render_jinja_template(
            [messages],
            chat_template=self.chat_template,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens_map, **extra},
        )
        return rendered[0]

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)


def light_tokenizer(model: str, revision: str | None = None) -> LightTokenizer:
    """Return the tokenizer of a model from local files. Raises ModelError when they are missing or damaged."""
    from tokenizers import Tokenizer

    path = find_file(model, "tokenizer.json", revision)
    if path is None:
        raise ModelError(f"the tokenizer.json of {model} is not on this machine")
    try:
        tokenizer = Tokenizer.from_file(str(path))
        settings = _settings(find_file(model, "tokenizer_config.json", revision))
        special = _settings(find_file(model, "special_tokens_map.json", revision)) | settings
        file = find_file(model, "chat_template.jinja", revision)
        template = file.read_text(encoding="utf-8") if file else settings.get("chat_template")
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise ModelError(f"the tokenizer of {model} cannot be read: {str(error).splitlines()[0][:200]}") from error
    if isinstance(template, list):  # several templates with names
        template = next((each["template"] for each in template if each.get("name") == "default"), None)
    tokens = {name: special[name] for name in SPECIAL if special.get(name)}
    named = {name: token["content"] if isinstance(token, dict) else str(token) for name, token in tokens.items()}
    return LightTokenizer(tokenizer, template, named)


def _settings(path: Path | None) -> Row:
    return {} if path is None else json.loads(path.read_text(encoding="utf-8"))


def byte_table(tokenizer: Any) -> list[bytes] | None:
    """Return the bytes of each token of a byte-level tokenizer; None for other tokenizers.

    Byte-level BPE writes each byte as one printable character (GPT-2's table); this inverts that table.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or '"type":"ByteLevel"' not in json.dumps(
        json.loads(backend.to_str()).get("decoder"), separators=(",", ":")
    ):
        return None
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    byte_of = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
    special = set(tokenizer.all_special_ids)
    added = tokenizer.added_tokens_decoder
    table = []
    for token_id in range(len(tokenizer)):
        token = backend.id_to_token(token_id) or ""
        if token_id in special or (token_id in added and added[token_id].special):
            table.append(b"")
        elif token_id in added:
            table.append(token.encode())
        else:
            table.append(bytes(byte_of[char] for char in token if char in byte_of))
    return table


def text_and_offsets(pieces: Sequence[bytes]) -> tuple[str, OffsetArray]:
    """Return the text of tokens, given as bytes, and each token's character range, int64 [T, 2].

    Exact for the sampled tokens; encoding the decoded text again may split it differently. A character split over
    several tokens belongs to all of them; a byte that is not UTF-8 becomes one lone surrogate.
    """
    text = b"".join(pieces).decode("utf-8", errors="surrogateescape")
    lengths_T = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
    ends_T = np.cumsum(lengths_T)
    starts_T = ends_T - lengths_T
    if not text.isascii():
        codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
        widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
        widths[(codes >= 0xDC80) & (codes <= 0xDCFF)] = 1
        char_of_byte = np.append(np.repeat(np.arange(len(codes)), widths), len(codes))
        last_T = char_of_byte[np.maximum(ends_T - 1, starts_T)] + 1
        starts_T = char_of_byte[starts_T]
        ends_T = np.where(lengths_T > 0, last_T, starts_T)
    return text, np.stack([starts_T, ends_T], axis=1)
