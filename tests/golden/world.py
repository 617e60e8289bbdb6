"""The models, problems and rewards of the golden campaigns, made without any code of retrain."""

import json
import sys
from pathlib import Path

TEXTS = ["12+34=? 7*46-58+23=? the answer is \\boxed{46}", "let me check 0 2 4 6 8", "wait, first I compute 9 - 5"]
REWARDS = '''
import hashlib

from retrain.types import RewardResult


def even(completion, answer):
    """Share of even digits among the characters."""
    return sum(c in "02468" for c in completion) / max(1, len(completion))


def zero_or_one(completion, answer):
    """Whether the number of characters is odd: groups with and without a difference."""
    return float(len(completion) % 2)


def graded(completion, answer):
    parts = {"evenness": even(completion, answer), "shortness": 1 / (1 + len(completion))}
    return RewardResult(sum(parts.values()), components=parts, sample_metrics={"letters": float(len(completion))})


def hopeless(completion, answer):
    raise RuntimeError("this grader is broken")
'''
PLUGINS = '''
import torch


def centred(rewards):
    """An advantage of the user's own."""
    return rewards - rewards.mean()


def problems(split):
    return [{"prompt": f"Count to {n}.", "answer": str(n)} for n in range(8 if split == "train" else 4)]
'''


def main(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "<end>", "<turn>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = "{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}<turn>"
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"eos_token_id": fast.eos_token_id, "pad_token_id": fast.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(fast), max_position_embeddings=256, tie_word_embeddings=False, **sizes, **heads, **ends
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # a spread-out distribution, unlike that of a fresh initialisation
    model.save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "plugins.py").write_text(PLUGINS)
    problems = [{"prompt": f"{n}+{n % 3}=?", "answer": str(n + n % 3), "kind": f"mod{n % 3}"} for n in range(40)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    harder = [{"prompt": f"{n}*{n}=?", "answer": str(n * n), "kind": "squares"} for n in range(6)]
    (folder / "harder.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in harder))
    long = [*problems[:12], {"prompt": "7" * 400, "answer": "7", "kind": "long"}]
    (folder / "long.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in long))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
