"""Reinforcement learning with verifiable rewards in one screen: the loop that `retrain train` runs, without TOML.

    python docs/examples/minimal_loop.py [steps] [directory]

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

from retrain.algorithms import grpo
from retrain.algorithms.losses import PPO
from retrain.config import parse_dict
from retrain.data.arithmetic import arithmetic_problems
from retrain.data.prompts import render
from retrain.engines.local import LocalEngine
from retrain.policy.base import load_base
from retrain.policy.local import LocalPolicy
from retrain.policy.lora import Lanes
from retrain.policy.objective import Objective, PolicyTerm
from retrain.rewards.base import MatchReward
from retrain.types import Denominators, PolicyRef, Sample, SampleRequest, StepBatch

PROMPTS, SAMPLES, MAX_TOKENS, LR, SEED = 8, 8, 80, 2e-3, 0


def main(steps: int = 20, directory: str = "logs/minimal_loop") -> list[float]:
    record = Path(directory) / "metrics.jsonl"
    record.parent.mkdir(parents=True, exist_ok=True)
    if record.exists():
        sys.exit(f"{record} is there already: give another directory, python docs/examples/minimal_loop.py {steps} DIR")
    # One frozen model; the engine samples with it, the policy trains a LoRA adapter on its lanes.
    base = load_base("tiny-reasoner", devices="cpu")
    lanes = Lanes(base)
    engine = LocalEngine(base, lanes)
    config = parse_dict({"model": {"lora_rank": 16}, "lora": {"alpha": 32}, "training": {"weight_decay": 0.0}})
    policy = LocalPolicy(base, lanes, config, (SEED,))
    objective, reward, history = Objective((PolicyTerm(PPO()),)), MatchReward(), []
    data = arithmetic_problems("train", steps * PROMPTS, seed=SEED)

    for step in range(steps):
        begin = time.perf_counter()
        # Publish the weights as they are now and sample with them: SAMPLES answers to every prompt.
        weights = PolicyRef("minimal loop", policy.version)
        engine.publish(weights, policy.snapshot())
        batch = data[step * PROMPTS : (step + 1) * PROMPTS]
        prompts = [render(problem, base.tokenizer, config.data) for problem in batch]
        requests = [
            SampleRequest(weights, prompt.token_ids, SAMPLES, MAX_TOKENS, 1.0, (SEED, "sample", step, i))
            for i, prompt in enumerate(prompts)
        ]
        groups = engine.sample(requests)
        engine.retire(weights)

        # Score each answer and compare it with its group; every token of an answer gets its answer's advantage.
        samples, rewards = [], []
        for prompt, answers in zip(prompts, groups, strict=True):
            rewards_N = torch.tensor([reward.grade(prompt.problem, answer.text).total_reward for answer in answers])
            rewards.append(rewards_N.mean().item())
            for answer, advantage in zip(answers, grpo(rewards_N).tolist(), strict=True):
                advantages_T = np.full(len(answer), advantage)
                samples.append(Sample.single_turn(prompt.token_ids, answer.token_ids, answer.logprobs_T, advantages_T))

        # Update: one optimizer step over the whole batch, the loss a mean over all of its tokens.
        count = Denominators(tokens=sum(len(a) for group in groups for a in group), sequences=len(samples))
        metrics = policy.update(StepBatch(samples, count, step, (SEED,)), objective, LR).metrics
        history.append(float(np.mean(rewards)))
        row = {
            "step": step, "progress/batch": step, "progress/done_frac": (step + 1) / steps, "optim/lr": LR,
            "reward/total": history[-1], "time/total": time.perf_counter() - begin,
        }  # fmt: skip
        with open(record, "a") as file:
            file.write(json.dumps({**row, **metrics}) + "\n")
        print(f"step {step:3d}  reward {history[-1]:.3f}  ratio {metrics['val/ratio']:.6f}", flush=True)
    return history


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, *sys.argv[2:3])
