"""A model's tokenizer from its files alone, for measuring prompts without torch, weights or a network.

``tokenizer.json`` is read by the tokenizers library, the chat template rendered by transformers' own function, whose
module imports no torch. What training uses is transformers' tokenizer; tests compare the two.
"""

import json
from pathlib import Path
from typing import Any

from retrain.errors import ModelError
from retrain.models import find_file

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class LightTokenizer:
    """As much of a transformers tokenizer as ``data.prompts.render`` asks for."""

    def __init__(self, tokenizer: Any, chat_template: str | None, special: dict[str, str]):
        self.tokenizer, self.chat_template, self.special = tokenizer, chat_template, special

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """The token ids of a text, under ``input_ids``."""
        return {"input_ids": self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def apply_chat_template(
        self, messages: Any, tokenize: bool = False, add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """The conversation as text; ``tokenize`` must be false."""
        from transformers.utils.chat_template_utils import render_jinja_template

        assert not tokenize
        rendered, _ = render_jinja_template(
            [messages],
            chat_template=self.chat_template,
            add_generation_prompt=add_generation_prompt,
            **{**self.special, **extra},
        )
        return rendered[0]

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)


def light_tokenizer(model: str, revision: str | None = None) -> LightTokenizer:
    """The tokenizer of a model, from files on this machine. Raises ModelError where they are missing or damaged."""
    from tokenizers import Tokenizer

    path = find_file(model, "tokenizer.json", revision)
    if path is None:
        raise ModelError(f"the tokenizer.json of {model} is not on this machine")
    try:
        tokenizer = Tokenizer.from_file(str(path))
        settings = _json(find_file(model, "tokenizer_config.json", revision))
        special = _json(find_file(model, "special_tokens_map.json", revision)) | settings
        file = find_file(model, "chat_template.jinja", revision)
        template = file.read_text(encoding="utf-8") if file else settings.get("chat_template")
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise ModelError(f"the tokenizer of {model} cannot be read: {str(error).splitlines()[0][:200]}") from error
    if isinstance(template, list):  # several by name
        template = next((each["template"] for each in template if each.get("name") == "default"), None)
    named = {name: _text(special[name]) for name in SPECIAL if special.get(name)}
    return LightTokenizer(tokenizer, template, named)


def _json(path: Path | None) -> dict[str, Any]:
    return {} if path is None else json.loads(path.read_text(encoding="utf-8"))


def _text(token: Any) -> str:
    """A special token, which may be an object with flags."""
    return token["content"] if isinstance(token, dict) else str(token)
