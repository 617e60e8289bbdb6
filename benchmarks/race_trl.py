"""One run of TRL's GRPOTrainer for ``race.py``, in an environment with trl, peft, tomli and pydantic.

    python benchmarks/race_trl.py CAMPAIGN.toml --lr 2e-3 --seed 1

Model, problems, prompts, grader and settings are those of CAMPAIGN.toml as retrain reads it. The trainer has its best
local setting: no gradient checkpointing, no reference model, no saving. Prints held-out ``accuracy`` after the last
update as JSON.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from retrain.campaign.planning.plan import plan
from retrain.config import load
from retrain.data.prompts import render
from retrain.environments.build import data_of
from retrain.models.directory import local_directory
from retrain.rewards.build import build_grader
from retrain.types import Problem


def main() -> None:
    parser = argparse.ArgumentParser(prog="python benchmarks/race_trl.py")
    parser.add_argument("campaign", type=Path)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    printed, sys.stdout = sys.stdout, sys.stderr  # TRL prints too
    config = plan(load(options.campaign))[0].config
    training, rank = config.training, config.model.lora_rank
    directory = local_directory(config.model.model)
    if directory is None:
        parser.error(f"{config.model.model} is not on this machine")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    data, grader = data_of(config, options.campaign.parent), build_grader(config.reward)

    def text_of(problem: Problem) -> str:
        return tokenizer.decode(render(problem, tokenizer, config.data).token_ids)

    by_text = {text_of(problem): problem for problem in data.train}

    def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
        pairs = [(by_text[prompt], completion) for prompt, completion in zip(prompts, completions, strict=True)]
        return [result.total_reward or 0.0 for result in grader.grade(pairs)]

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
                r=rank, lora_alpha=int(config.lora.alpha), target_modules="all-linear", task_type="CAUSAL_LM"
            ),
        )
        trainer.train()
    torch.manual_seed(options.seed)
    tokenizer.padding_side = "left"
    texts = [text_of(problem) for problem in data.heldout]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        sampled = trainer.model.eval().generate(
            **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=training.max_tokens
        )
    answers = tokenizer.batch_decode(sampled[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    results = grader.grade(list(zip(data.heldout, answers, strict=True)))
    right = sum(result.total_reward == 1.0 for result in results)
    print(json.dumps({"accuracy": right / len(results)}), file=printed)


if __name__ == "__main__":
    main()
