"""Reinforcement learning with verifiable rewards in one screen: the loop that `retrain train` runs, without TOML.

    python examples/minimal_loop.py [steps] [directory]

Each step samples a group of answers to each of a few problems, scores them, compares every answer with the others of
its group (GRPO), and moves a LoRA adapter toward the better ones. The reward printed rises; every step is a line of
metrics.jsonl in the directory (logs/minimal_loop):

    pandas.read_json("logs/minimal_loop/metrics.jsonl", lines=True).plot(x="progress/batch", y="reward/total")
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from retrain.engines import LocalEngine, SampleRequest
from retrain.environments.arithmetic import problems
from retrain.environments.prompts import render
from retrain.maths.advantages import grpo
from retrain.policy import Denominators, Lanes, LossSettings, TrainSequence, load_base, new_optimizer, train_step
from retrain.rewards.rules import MatchReward

PROMPTS, SAMPLES, MAX_TOKENS, LR, SEED = 8, 8, 80, 2e-3, 0


def main(steps: int = 20, directory: str = "logs/minimal_loop") -> list[float]:
    record = Path(directory) / "metrics.jsonl"
    record.parent.mkdir(parents=True, exist_ok=True)
    if record.exists():
        sys.exit(f"{record} is there already: give another directory, python examples/minimal_loop.py {steps} DIR")
    base = load_base("tiny-reasoner", devices="cpu")
    lanes = Lanes(base)
    engine = LocalEngine(base, lanes)
    adapter = lanes.new_adapter(rank=16, alpha=32).initialise(SEED)
    optimizer = new_optimizer(adapter, LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    settings = LossSettings(loss="ppo", max_tokens=MAX_TOKENS)
    reward, history = MatchReward(), []
    data = problems("train", steps * PROMPTS, seed=SEED)

    for step in range(steps):
        begin = time.perf_counter()
        # Sample: every prompt once through the model, SAMPLES answers each, with their log-probabilities.
        batch = data[step * PROMPTS : (step + 1) * PROMPTS]
        prompts = [render(problem, base.tokenizer, None) for problem in batch]
        requests = [
            SampleRequest(0, prompt.token_ids, SAMPLES, MAX_TOKENS, 1.0, (SEED, "sample", step, i))
            for i, prompt in enumerate(prompts)
        ]
        groups = engine.sample(requests, [adapter])

        # Score each answer and compare it with its group; every token of an answer gets its answer's advantage.
        sequences, rewards = [], []
        for prompt, completions in zip(prompts, groups, strict=True):
            rewards_N = torch.tensor([reward.grade(prompt.problem, c.text).total_reward for c in completions])
            rewards.append(rewards_N.mean().item())
            for completion, advantage in zip(completions, grpo(rewards_N).tolist(), strict=True):
                length = len(completion)
                sequences.append(
                    TrainSequence(
                        prompt.token_ids,
                        completion.token_ids,
                        completion.logprobs_T,
                        np.full(length, advantage),
                        np.ones(length, dtype=bool),
                    )
                )

        # Update: one optimizer step over the whole batch.
        count = Denominators(tokens=sum(len(s.completion_ids) for s in sequences), sequences=len(sequences))
        metrics = train_step(base, lanes, adapter, optimizer, sequences, settings, count, LR)
        history.append(float(np.mean(rewards)))
        row = {
            "step": step, "progress/batch": step, "progress/done_frac": (step + 1) / steps, "optim/lr": LR,
            "reward/total": history[-1], "time/total": time.perf_counter() - begin,
        }  # fmt: skip
        with open(record, "a") as file:
            file.write(json.dumps(row | metrics) + "\n")
        print(f"step {step:3d}  reward {history[-1]:.3f}  ratio {metrics['val/ratio']:.6f}", flush=True)
    return history


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, *sys.argv[2:3])
