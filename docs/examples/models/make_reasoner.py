"""Make the bundled reasoner: a small causal LM trained from scratch on imperfect arithmetic demonstrations.

    python docs/examples/models/make_reasoner.py --out retrain/models/tiny_reasoner

writes an ordinary ``transformers`` directory (config, weights, tokenizer with chat template, model card). The same
seed, steps and package versions give the same bytes: one thread, deterministic algorithms, and every demonstration
from a named random stream. ``--measure`` only measures the accuracies of a directory.

The curriculum has three stages: written columns without slips (and some guesses) on the shortest problems, the same
on all, and then the pupil's real habits, which the model takes over while it keeps the skill. The matrices are
trained with Muon (Jordan et al. 2024), which learns this in fewer steps than AdamW; embeddings and norms with AdamW.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from demonstrations import PRACTICE, PUPIL, Pupil, demonstration
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from retrain.data.arithmetic import DEFAULT_LEVELS, arithmetic_problems
from retrain.rng import stream_key, torch_seed
from retrain.types import Problem

BUNDLE = Path(__file__).parents[3] / "retrain" / "models" / "tiny_reasoner"
STEPS = 1500
THREADS = 1
"""More would make the bytes depend on the machine, and gain little with matrices this small."""
PAD, EOS = "<|pad|>", "<|end|>"
SPECIAL = [PAD, EOS, "<|system|>", "<|user|>", "<|assistant|>"]
PAD_ID, EOS_ID = 0, 1
"""Special tokens take the first ids of the vocabulary, in the order of the list."""
WORDS = Regex(r"'[a-z]+| ?[A-Za-z]+|\d|[,:] ?|\\boxed\{|[^A-Za-z\d]")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TRAIN_PROBLEMS = 20_000
"""Problems of each level that demonstrations are drawn from."""
POOL_SIZE = 2048
"""Demonstrations made at a time and sorted into batches of similar length."""
MAX_TOKENS = 80
"""Completion budget of the measurements; nearly every demonstration is shorter."""


@dataclass(frozen=True)
class Stage:
    """A part of the training: until which share of the steps, on what, and tokens in a batch (padding included)."""

    until: float
    levels: tuple[str, ...]
    pupil: Pupil
    batch_tokens: int


CURRICULUM = (
    Stage(0.18, ("easy",), PRACTICE, 1024),
    Stage(0.55, (*DEFAULT_LEVELS, "hard"), PRACTICE, 2048),
    Stage(1.0, DEFAULT_LEVELS, PUPIL, 2560),
)


class Muon:
    """Momentum whose direction is made orthogonal by Newton-Schulz iterations, in float32, matrices of a shape at once.

    ``lr`` is the step's spectral size for square matrices; taller ones (out > in) take sqrt(out / in) times as much.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], momentum: float = 0.95, weight_decay: float = 0.01):
        self.momentum, self.weight_decay = momentum, weight_decay
        self.shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            self.shapes.setdefault(parameter.shape, []).append(parameter)
        self.buffers = {shape: torch.zeros(len(of_shape), *shape) for shape, of_shape in self.shapes.items()}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update from the gradients, which must be there."""
        for shape, parameters in self.shapes.items():
            gradient = torch.stack([p.grad for p in parameters if p.grad is not None])
            buffer = self.buffers[shape].lerp_(gradient, 1 - self.momentum)
            direction = gradient.lerp(buffer, self.momentum)
            tall = shape[0] > shape[1]
            x = direction.mT if tall else direction
            x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
            for _ in range(4):
                gram = x @ x.mT
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            x = x.mT if tall else x
            for parameter, update in zip(parameters, x, strict=True):
                parameter.mul_(1 - lr * self.weight_decay)
                parameter.add_(update, alpha=-lr * max(1.0, shape[0] / shape[1]) ** 0.5)


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over words, single digits and single signs, so that any text goes in and comes back."""
    rng = Random(stream_key(seed, "tokenizer"))
    texts = [demonstration(problem, rng) for problem in arithmetic_problems("train", 6000, seed=seed)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        min_frequency=2,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """An untrained Qwen3 of about 0.65 million parameters with tied embeddings."""
    torch.manual_seed(torch_seed(seed, "model"))
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def prompt_ids(tokenizer: PreTrainedTokenizerFast, chosen: list[Problem]) -> list[list[int]]:
    """Token ids of each problem in the chat template, up to where the answer begins."""
    chats = [[{"role": "user", "content": str(problem.prompt)}] for problem in chosen]
    texts = [str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)) for chat in chats]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def batches(
    tokenizer: PreTrainedTokenizerFast, pool: dict[str, list[Problem]], stage: Stage, rng: Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (input_ids, labels) [B, T] of fresh demonstrations; rows of similar length, prompts not trained."""
    while True:
        chosen = [rng.choice(pool[rng.choice(stage.levels)]) for _ in range(POOL_SIZE)]
        texts = [demonstration(problem, rng, stage.pupil) for problem in chosen]
        answers = [[*ids, EOS_ID] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
        rows = sorted(zip(prompt_ids(tokenizer, chosen), answers, strict=True), key=_length)
        groups: list[list[tuple[list[int], list[int]]]] = [[]]
        for row in rows:
            if groups[-1] and (len(groups[-1]) + 1) * _length(row) > stage.batch_tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        for group in groups:
            width = max(map(_length, group))
            input_ids = torch.full((len(group), width), PAD_ID)
            labels = torch.full((len(group), width), -100)
            for i, (prompt, answer) in enumerate(group):
                row = torch.tensor(prompt + answer)
                input_ids[i, : len(row)] = row
                labels[i, len(prompt) : len(row)] = row[len(prompt) :]
            yield input_ids, labels


def _length(row: tuple[list[int], list[int]]) -> int:
    return len(row[0]) + len(row[1])


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> None:
    """Imitate the demonstrations of the curriculum."""
    pool = {level: arithmetic_problems("train", TRAIN_PROBLEMS, [level], seed) for level in DEFAULT_LEVELS}
    sources = [
        batches(tokenizer, pool, stage, Random(stream_key(seed, "demonstrations", i)))
        for i, stage in enumerate(CURRICULUM)
    ]
    imitate(model, lambda step: next(sources[sum(step >= round(each.until * steps) for each in CURRICULUM)]), steps)


def imitate(
    model: Any,
    batch_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    adam_lr: float = 3e-3,
    muon_lr: float = 2e-2,
    warmup: int = 30,
    every: int = 100,
) -> None:
    """Next-token cross-entropy on (input_ids, labels) [B, T] of every step; the rates rise over ``warmup`` steps, are
    constant for half of all, then fall to zero. A line is printed after every so many steps."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon, adam = Muon(hidden), torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    started, losses = time.monotonic(), []
    for step in range(steps):
        input_ids, labels = batch_of(step)
        states = model.model(input_ids=input_ids).last_hidden_state[:, :-1]
        targets = labels[:, 1:]
        trained = targets != -100
        loss = F.cross_entropy(model.lm_head(states[trained]), targets[trained])
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = min((step + 1) / warmup, 2 * (steps - step) / steps, 1.0)
        adam.param_groups[0]["lr"] = adam_lr * rate
        adam.step()
        muon.step(muon_lr * rate)
        losses.append(loss.item())
        if (step + 1) % every == 0:
            mean = sum(losses[-every:]) / every
            print(f"step {step + 1}/{steps}  loss {mean:.4f}  {time.monotonic() - started:.0f} s", flush=True)
    model.eval()


@torch.no_grad()
def measure(model: Any, tokenizer: Any, count: int, sample: bool, seed: int = 0) -> dict[str, dict[str, float]]:
    """Accuracy and mean completion length (tokens) per level on held-out problems, ``count`` of each level."""
    torch.manual_seed(torch_seed(seed, "measure"))
    model.eval()
    results = {}
    for level in DEFAULT_LEVELS:
        chosen = arithmetic_problems("heldout", count, [level], seed=seed)
        rows = prompt_ids(tokenizer, chosen)
        width = max(map(len, rows))
        padded = torch.tensor([[PAD_ID] * (width - len(row)) + row for row in rows])
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
        output = model.generate(
            padded, attention_mask=(padded != PAD_ID).long(), max_new_tokens=MAX_TOKENS, **sampling
        )[:, width:]
        texts = tokenizer.batch_decode(output, skip_special_tokens=True)
        right = sum(boxed(text) == problem.answer for text, problem in zip(texts, chosen, strict=True))
        lengths = (output != PAD_ID).sum(1)
        results[level] = {
            "accuracy": round(right / count, 4),
            "mean_tokens": round(lengths.float().mean().item(), 1),
            "cut_off": round((output != EOS_ID).all(1).float().mean().item(), 4),
        }
    return results


def boxed(text: str) -> str | None:
    """What the last ``\\boxed{}`` holds, or None."""
    start = text.rfind("\\boxed{")
    return text[start + 7 :].split("}", 1)[0] if start >= 0 else None


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the ``transformers`` directory; the tokenizer under the class name that older releases know as well."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for path in directory.iterdir():
        path.chmod(0o644)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings.pop("backend", None)
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def model_card(model: Qwen3ForCausalLM, tables: dict[str, dict[str, dict[str, float]]], steps: int, seed: int) -> str:
    """The README of the model directory, with the measured accuracies if there are any."""
    parameters = sum(p.numel() for p in model.parameters())
    text = f"""---
license: apache-2.0
pipeline_tag: text-generation
library_name: transformers
---
# tiny-reasoner

A causal language model of {parameters:,} parameters that works short arithmetic problems step by step and answers in
`\\boxed{{}}`. It exists to be trained further by reinforcement learning, on a laptop and within minutes: it knows how
to write out the columns of an addition, a subtraction and a product, but guesses, slips and forgets to check, as the
demonstrations it learned from do (`docs/examples/models/demonstrations.py`).

Made from scratch, without other data, by `python docs/examples/models/make_reasoner.py --steps {steps} --seed {seed}`.
"""
    if not tables:
        return text
    text += """
## Accuracy on held-out problems

| level | sampled (temperature 1) | greedy | tokens, sampled |
|---|---|---|---|
"""
    for level in DEFAULT_LEVELS:
        sampled, greedy = tables["sampled"][level], tables["greedy"][level]
        text += f"| {level} | {sampled['accuracy']:.1%} | {greedy['accuracy']:.1%} | {sampled['mean_tokens']:.0f} |\n"
    overall = sum(tables["sampled"][level]["accuracy"] for level in DEFAULT_LEVELS) / len(DEFAULT_LEVELS)
    return text + (
        f"\nOverall sampled accuracy: {overall:.1%}. Measured by "
        "`python docs/examples/models/make_reasoner.py --measure retrain/models/tiny_reasoner`.\n"
    )


def measure_both(model: Any, tokenizer: Any, count: int) -> dict[str, dict[str, dict[str, float]]]:
    """Sampled and greedy tables of ``measure``."""
    return {"sampled": measure(model, tokenizer, count, True), "greedy": measure(model, tokenizer, count, False)}


def make(out: Path, steps: int, seed: int, count: int) -> dict[str, dict[str, dict[str, float]]]:
    """Train from nothing, measure on ``count`` problems of each level (0: not at all), write the directory."""
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    tokenizer = make_tokenizer(seed)
    model = make_model(tokenizer, seed)
    train(model, tokenizer, steps, seed)
    tables = measure_both(model, tokenizer, count) if count else {}
    save(model, tokenizer, out)
    (out / "README.md").write_text(model_card(model, tables, steps, seed), encoding="utf-8")
    return tables


def main() -> None:
    """Parse the command line, then measure a directory or make one."""
    parser = argparse.ArgumentParser(description="Make the bundled reasoner, or measure one.")
    parser.add_argument("--out", type=Path, default=BUNDLE, help="directory to write (default: the bundled one)")
    parser.add_argument("--measure", type=Path, metavar="DIR", help="measure this directory and write nothing")
    parser.add_argument("--problems", type=int, default=500, help="held-out problems of each level in a measurement")
    parser.add_argument("--steps", type=int, default=STEPS, help="fewer give a model that has not learned the skill")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.measure:
        torch.set_num_threads(THREADS)
        model = AutoModelForCausalLM.from_pretrained(options.measure, local_files_only=True, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(options.measure, local_files_only=True)
        tables = measure_both(model, tokenizer, options.problems)
    else:
        tables = make(options.out, options.steps, options.seed, options.problems)
    print(json.dumps(tables, indent=2))


if __name__ == "__main__":
    main()
