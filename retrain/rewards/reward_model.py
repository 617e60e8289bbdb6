"""``reward_model``: the score that a sequence-classification model with one label gives to a whole conversation.

The conversation is the problem's messages and the completion, in the reward model's own chat template (without a
template: the problem, a blank line, the completion). The score is read at the last token of the conversation, as in
transformers.

The last bits of a score depend on the other rows of the batch. So that scores do not depend on which groups arrive
together, a batch holds answers to one problem only.
"""

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from retrain.errors import ModelError, first_line
from retrain.files import search_folders
from retrain.models.directory import files_digest, local_directory, reward_model_fault
from retrain.plugins import described
from retrain.rewards.base import Item, Reward, checked, failed, prompt_text
from retrain.types import Problem, RewardResult

# Files to download from the hub: no code and no pickles
HUB_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]


class RewardModelReward(Reward):
    """Scores with ``model``: a directory, looked up in ``base_dir`` (the TOML's folder), then in the current directory,
    or a hub name.

    ``batch`` rows are scored at once on the torch ``device``. Files, number of labels and tokenizer are checked at
    construction; the weights are loaded when the first completion is graded. Raises ModelError.
    """

    name = "reward_model"

    def __init__(self, model: str, batch: int = 8, device: str = "cpu", base_dir: Path | None = None):
        from transformers import AutoConfig, AutoTokenizer

        self.batch, self.device = batch, device
        self.directory = find_reward_model(model, base_dir)
        self._weights: RewardModelWeights | None = None
        try:
            config = AutoConfig.from_pretrained(self.directory, local_files_only=True)
            self.tokenizer = AutoTokenizer.from_pretrained(self.directory, local_files_only=True)
        except Exception as error:  # files from elsewhere can cause any kind of error
            raise _refused(model, f"it cannot be read: {first_line(error)}") from error
        text = config.get_text_config()
        limits = [getattr(text, "max_position_embeddings", None), getattr(self.tokenizer, "model_max_length", None)]
        self.context = min((int(limit) for limit in limits if limit and limit > 0), default=sys.maxsize)
        self.vocabulary = int(text.vocab_size)

    def grade_all(self, items: Sequence[Item]) -> list[RewardResult]:
        results: dict[int, RewardResult] = {}
        rows: dict[int, list[int]] = {}
        for index, (problem, completion) in enumerate(items):
            try:
                rows[index] = self.token_ids(problem, completion)
            except Exception as error:  # the template's own code can raise anything
                results[index] = failed(str(error) if isinstance(error, ModelError) else described(error))
        # Rows to score together are answers to one problem that follow each other, ordered by length.
        for _, same in groupby(rows, key=lambda index: items[index][0].id):
            ordered = sorted(same, key=lambda index: len(rows[index]))
            for start in range(0, len(ordered), self.batch):
                indices = ordered[start : start + self.batch]
                results |= zip(indices, self._scored([rows[index] for index in indices]), strict=True)
        return [results[index] for index in range(len(items))]

    def close(self) -> None:
        """Release the weights. They stay cached until another model is loaded: the next cohort may need them."""
        self._weights = None

    def token_ids(self, problem: Problem, completion: str) -> list[int]:
        """Return the conversation's tokens for the reward model. Raises ModelError if there are none, or they exceed
        its context or its vocabulary; errors of the chat template pass through."""
        text, has_template = _encodable(f"{prompt_text(problem)}\n\n{completion}"), bool(self.tokenizer.chat_template)
        if has_template:
            messages = conversation(problem, completion)
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        ids = self.tokenizer(text, add_special_tokens=not has_template, verbose=False)["input_ids"]
        if not ids:
            raise ModelError("the conversation has no tokens")
        if len(ids) > self.context:
            raise ModelError(
                f"the conversation has {len(ids)} tokens, more than the {self.context} of the reward model's context"
            )
        if max(ids) >= self.vocabulary:
            raise ModelError(f"token {max(ids)} is not among the {self.vocabulary} of the reward model")
        return list(ids)

    def _scored(self, rows: Sequence[list[int]]) -> list[RewardResult]:
        try:
            if self._weights is None:
                self._weights = cached_weights(self.directory, self.device)
            return [checked(score) for score in self._weights.scores(rows)]
        except Exception as error:  # out of memory, files that are gone: never the run
            if len(rows) > 1 and self._weights is not None:
                # One row may be faulty, or memory too small for all: score each row separately.
                return [result for row in rows for result in self._scored([row])]
            reason = first_line(error) if isinstance(error, ModelError | OSError) else described(error)
            return [failed(f"the reward model failed: {reason}") for _ in rows]


def conversation(problem: Problem, completion: str) -> list[dict[str, str]]:
    prompt = [{"role": "user", "content": problem.prompt}] if isinstance(problem.prompt, str) else problem.prompt
    messages = [{key: _encodable(value) for key, value in message.items()} for message in prompt]
    return [*messages, {"role": "assistant", "content": _encodable(completion)}]


def find_reward_model(model: str, base_dir: Path | None) -> Path:
    """Return the directory of a reward model with all its files, downloaded from the hub if it is not in the cache.
    Raises ModelError with the fix."""
    folders = search_folders(base_dir)
    if fault := reward_model_fault(model, *folders):
        raise _refused(model, fault)
    directory = local_directory(model, *folders)
    if directory is not None:
        return directory.resolve()
    from huggingface_hub import snapshot_download

    try:
        directory = Path(snapshot_download(model, allow_patterns=HUB_FILES, ignore_patterns=["*/*"]))
    except Exception as error:  # any kind of network error
        hint = "with no network, download it elsewhere and give the directory's path"
        raise _refused(model, f"{first_line(error).rstrip('.')}; {hint}") from error
    if fault := reward_model_fault(str(directory)):
        raise _refused(model, fault)
    return directory


@dataclass(eq=False)
class RewardModelWeights:
    """A model in memory, shared by all graders of this process that use it. ``pad``: id of the model's padding token,
    None if it has none."""

    model: Any
    pad: int | None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def scores(self, rows: Sequence[list[int]]) -> list[float]:
        """Return the scores of rows of token ids, from one forward pass; shorter rows are padded on the right."""
        import torch

        with self.lock, torch.no_grad():
            # transformers reads a score at the last token that is not padding. A model without a padding token gets one
            # here with which no row ends; it would read the score of such a row too early.
            ends = {row[-1] for row in rows}
            pad = self.pad if self.pad is not None else next(i for i in range(len(ends) + 1) if i not in ends)
            for config in (self.model.config, self.model.config.get_text_config()):
                config.pad_token_id = pad
            width = max(map(len, rows))
            ids_BL = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
            mask_BL = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
            device = self.model.device
            logits_B1 = self.model(input_ids=ids_BL.to(device), attention_mask=mask_BL.to(device)).logits
            return logits_B1[:, 0].float().tolist()


_LOADED: WeakValueDictionary[tuple[str, str, str], RewardModelWeights] = WeakValueDictionary()
_LATEST: list[RewardModelWeights] = []
_LOCK = threading.Lock()


def cached_weights(directory: Path, device: str) -> RewardModelWeights:
    """Return the weights in ``directory``, cached in this process. Raises ModelError and errors of transformers."""
    with _LOCK:
        key = (str(directory), device, files_digest(directory))
        weights = _LOADED.get(key)
        if weights is None:
            _LATEST.clear()  # frees the memory of a model that no grader uses any more
            weights = _LOADED[key] = _load(directory, device)
        _LATEST[:] = [weights]
        return weights


def _load(directory: Path, device: str) -> RewardModelWeights:
    import torch
    from transformers import AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()
    with torch.random.fork_rng(devices=[]):  # making a model draws random numbers
        model, info = AutoModelForSequenceClassification.from_pretrained(
            directory,
            # On a CPU half precision is slow, or lacks kernels.
            dtype=torch.float32 if device == "cpu" else "auto",
            local_files_only=True,
            trust_remote_code=False,
            weights_only=True,
            output_loading_info=True,
        )
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"its files lack {len(missing)} of its weights, such as {missing[0]}")
    model.to(device).eval().requires_grad_(False)
    model.config.use_cache = False
    text = model.config.get_text_config()
    pad = text.pad_token_id
    return RewardModelWeights(model, pad if pad is not None and 0 <= pad < text.vocab_size else None)


def _refused(model: str, fault: str) -> ModelError:
    fix = "type the directory or hub name of a sequence-classification model with one label and its tokenizer"
    return ModelError(f"reward_model = {model!r}: {fault}: {fix}")


def _encodable(text: str) -> str:
    """Return ``text`` with lone surrogates, which tokenizers reject, replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
