"""What tells which grams mean the same: the input embeddings of the run's own base, or a sentence model.

The first needs nothing that the run did not have, no forward pass, and of the weights the rows of the grams' tokens
alone: a gram is the mean of its tokens' rows, and the mean of all grams is taken away, because the rows of a trained
model share a direction that says nothing. It knows which words are alike, and nothing of their order. The paper embeds
grams with a sentence model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from retrain.algorithms.detectors import load_embedder
from retrain.errors import ModelError, UsageError
from retrain.maths.semantic import Embed
from retrain.models import find_file
from retrain.models.directory import INDEX, WHOLE
from retrain.models.tokenizer import light_tokenizer

BASE = "base"
TABLES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
"""How the names of input embeddings end in files of models."""
OTHERWISE = "name another with --embedder, such as all-MiniLM-L6-v2"


@dataclass(frozen=True)
class InputEmbeddings:
    """The input embeddings of a model in files on this machine, for grams: float64 [N, D], of mean 0."""

    tokenizer: Any
    path: Path
    table: str

    def __call__(self, texts: list[str]) -> np.ndarray:
        """Means of the rows of each text's tokens, less their mean. Raises ModelError where a text has no token."""
        from safetensors import safe_open

        # In the middle of a sentence a word begins with a blank.
        ids = [self.tokenizer(f" {text}", add_special_tokens=False)["input_ids"] for text in texts]
        if not all(ids):
            raise ModelError(f"the tokenizer of {self.path.parent} has no token for {texts[ids.index([])]!r}")
        with safe_open(str(self.path), framework="pt") as file:
            table = file.get_slice(self.table)
            rows = {
                token: table[token : token + 1].double().numpy()[0] for token in sorted({*chain.from_iterable(ids)})
            }
        means = np.stack([np.mean([rows[token] for token in own], axis=0) for own in ids])
        return means - means.mean(axis=0)


def embedder_of(name: str, facts: Mapping[str, Any]) -> tuple[str, Embed]:
    """What embeds, in words and as a function: ``base`` is that of the run with these ``facts``, anything else a model
    for sentence-transformers. Raises ModelError, MissingExtra or UsageError where it cannot be had."""
    if name != BASE:
        return name, load_embedder(name, "cpu")
    if facts.get("backend", {}).get("backend") != "local":
        raise UsageError(f"the run has a backend of its own, whose input embeddings are not known: {OTHERWISE}")
    model, revision = facts["model"]["model"], facts["model"].get("revision")
    path, table = _place_of_table(model, revision)
    return f"input embeddings of {model}", InputEmbeddings(light_tokenizer(model, revision), path, table)


def _place_of_table(model: str, revision: str | None) -> tuple[Path, str]:
    """The file and the name of a model's input embeddings. Raises ModelError where they are not found."""
    whole, index = find_file(model, WHOLE, revision), find_file(model, INDEX, revision)
    try:
        if whole is not None:
            names = dict.fromkeys(_names_in(whole), whole)
        elif index is not None:
            files = json.loads(index.read_bytes())["weight_map"]
            names = {name: index.parent / file for name, file in files.items()}
        else:
            raise ModelError(f"the weights of {model} are not on this machine as safetensors: {OTHERWISE}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the weights of {model} cannot be read ({error}): {OTHERWISE}") from error
    name = _table_among(list(names))
    if name is None:
        raise ModelError(f"the weights of {model} have no input embeddings of a known name: {OTHERWISE}")
    return names[name], name


def _names_in(path: Path) -> list[str]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return list(json.loads(file.read(length)))


def _table_among(names: Sequence[str]) -> str | None:
    """The shortest name that ends as those of input embeddings do: longer ones are of parts."""
    return min((name for name in names if name.endswith(TABLES)), key=lambda name: (len(name), name), default=None)
