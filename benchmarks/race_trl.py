"""One run of TRL's GRPOTrainer on the race's problems, in an environment with trl, peft, tomli and pydantic.

    python benchmarks/race_trl.py CAMPAIGN.toml --lr 2e-3 --seed 1

Model, problems, prompts, grader and settings are those that retrain reads from CAMPAIGN.toml; the trainer is TRL's, at
its best local setting (no gradient checkpointing, no reference model, no saving). Prints one JSON object: held-out
``accuracy`` after the last update, ``train_s`` and ``eval_s`` (imports and loading not counted), ``process_s``.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BEGIN = time.perf_counter()

import torch  # noqa: E402 - the clock of the process comes first
from datasets import Dataset  # noqa: E402  # pyright: ignore[reportMissingImports]
from peft import LoraConfig  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402  # pyright: ignore[reportMissingImports]

from retrain.campaign.planning.plan import plan  # noqa: E402
from retrain.config import load  # noqa: E402
from retrain.data.prompts import render  # noqa: E402
from retrain.environments.build import data_of  # noqa: E402
from retrain.models.directory import local_directory  # noqa: E402
from retrain.rewards.build import build_grader  # noqa: E402
from retrain.types import Problem  # noqa: E402


def accuracy(model: Any, tokenizer: Any, texts: list[str], problems: list[Problem], grader: Any, config: Any) -> float:
    """Share of right answers, one sampled for each problem."""
    tokenizer.padding_side = "left"
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    length = config.training.max_tokens
    with torch.no_grad():
        out = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=length)
    answers = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    results = grader.grade(list(zip(problems, answers, strict=True)))
    return sum(result.total_reward == 1.0 for result in results) / len(problems)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", type=Path)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--idle", action="store_true", help="load everything and train nothing: what a start costs")
    options = parser.parse_args()
    printed, sys.stdout = sys.stdout, sys.stderr
    config = plan(load(options.campaign))[0].config
    directory = local_directory(config.model.model)
    if directory is None:
        parser.error(f"{config.model.model} is not on this machine")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    problems = data_of(config, options.campaign.parent)
    grader = build_grader(config.reward)
    by_text = {tokenizer.decode(render(p, tokenizer, config.data).token_ids): p for p in problems.train}
    held_out = problems.heldout
    texts = [tokenizer.decode(render(p, tokenizer, config.data).token_ids) for p in held_out]

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        pairs = [(by_text[prompt], text) for prompt, text in zip(prompts, completions, strict=True)]
        return [result.total_reward or 0.0 for result in grader.grade(pairs)]

    training = config.training
    with tempfile.TemporaryDirectory() as out:
        settings = GRPOConfig(
            output_dir=out, use_cpu=True, bf16=False, gradient_checkpointing=False, seed=options.seed,
            per_device_train_batch_size=training.batch_size * training.group_size, num_generations=training.group_size,
            max_completion_length=training.max_tokens, temperature=1.0, beta=0.0, learning_rate=options.lr,
            lr_scheduler_type="constant", max_steps=training.max_steps, max_grad_norm=config.optimizer.grad_clip_norm,
            logging_steps=1_000_000, save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": list(by_text)}),
            peft_config=LoraConfig(
                r=config.model.lora_rank,
                lora_alpha=2 * config.model.lora_rank,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            ),
        )
        if options.idle:
            print("{}", file=printed)
            return
        began = time.perf_counter()
        trainer.train()
        trained = time.perf_counter()
        torch.manual_seed(options.seed)
        share = accuracy(trainer.model.eval(), tokenizer, texts, held_out, grader, config)
        ended = time.perf_counter()
    found = {"accuracy": share, "train_s": trained - began, "eval_s": ended - trained, "process_s": ended - BEGIN}
    print(json.dumps(found), file=printed)


if __name__ == "__main__":
    main()
