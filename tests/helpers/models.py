"""Toy models, tokenizers and configurations. Only ``toy_base`` imports retrain: the golden world is made without it."""

import json
from pathlib import Path
from typing import Any

import torch


def campaign_head(*conditions: tuple[str, str], **keys: Any) -> str:
    """[campaign] with these keys and a condition for each pair of modes; what follows overrides the last's keys."""
    lines = ["[campaign]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    for advantage, transform in conditions:
        lines += ["[[campaign.conditions]]", f'advantage_mode = "{advantage}"', f'transform_mode = "{transform}"']
    return "\n".join(lines) + "\n"


TWO_CONDITIONS = campaign_head(("grpo", "none"), ("maxrl", "gtpo"), seeds=[1, 2])
TINY_RUN = """\
[model]
model = "{model}"
lora_rank = 4
[training]
max_steps = 2
batch_size = 2
group_size = 4
lr = 0.01
"""
"""Two steps of a tiny adapter; what follows at once goes on with [training]."""


def word_tokenizer(texts: list[str], vocab_size: int = 300):
    """A byte-level BPE tokenizer trained on the given texts, with end and padding tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<pad>", "<end>", "<turn>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = "{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}<turn>"
    return fast


def qwen3_directory(
    path: Path, texts: list[str], *, seed: int = 0, hidden: int = 32, layers: int = 2, positions: int = 2048
) -> Path:
    """A Qwen3 with random weights and a trained tokenizer, saved as an ordinary model directory."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = word_tokenizer(texts)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=hidden // 4, max_position_embeddings=positions,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # a spread-out distribution, unlike that of a fresh initialisation
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def set_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def toy_base(path: Path, dtype: str = "float32"):
    from retrain.policy.base import load_base

    directory = qwen3_directory(path, ["12 + 34 = 46 so the answer is \\boxed{46}", "wait let me check the key is"])
    return load_base(str(directory), devices="cpu", dtype=dtype)
