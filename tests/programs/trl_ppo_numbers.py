"""Write tests/data/trl_ppo.json, what TRL's PPOTrainer computed in one batch; test_trl_ppo.py compares with it.

It needs a virtual environment of its own: TRL 1.12.0 is the last release that has PPO, and retrain does not need TRL.

python3.11 -m venv build/trl-ppo
build/trl-ppo/bin/pip install trl==1.12.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0 torch==2.13.0
build/trl-ppo/bin/python tests/programs/trl_ppo_numbers.py tests/data/trl_ppo.json

``PPOTrainer.train`` runs unchanged on the CPU, in float32, on random models of two layers. Where it calls out (to
whiten, to accumulate gradients, to log) its local variables are copied; none is altered. Two batches: ``ragged``, whose
responses end at different places, and ``full``, whose responses all fill the room there is. Every float is written with
the digits that give the same float32 when it is read. Without ``eps``, episodes by the clock, the file depends on the
seeds alone (and on the last bits of the matrix products of the machine).
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import CodeType
from typing import Any

import numpy
import torch

VOCABULARY, EOS, PAD = 12, 1, 0
PROMPTS = [[5, 6, 7], [8, 9], [4, 3, 2, 5], [7, 7], [10, 2, 9], [3, 11], [6, 5, 4], [2, 8, 10, 11]]
RESPONSE = 6
"""Tokens of the longest response."""

BATCHES: dict[str, dict[str, Any]] = {
    "ragged": {
        "seed": 17,
        "stop_token": "eos",
        "missing_eos_penalty": 0.5,
        "kl_coef": 0.05,
        "kl_estimator": "k1",
        "gamma": 1.0,
        "lam": 0.95,
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "vf_coef": 0.1,
        "temperature": 0.7,
        "num_ppo_epochs": 2,
        "num_mini_batches": 2,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "learning_rate": 0.005,
    },
    "full": {
        "seed": 4,
        "stop_token": None,
        "missing_eos_penalty": None,
        "kl_coef": 0.1,
        "kl_estimator": "k3",
        "gamma": 0.9,
        "lam": 0.8,
        "cliprange": 0.1,
        "cliprange_value": 0.05,
        "vf_coef": 0.5,
        "temperature": 1.0,
        "num_ppo_epochs": 2,
        "num_mini_batches": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.005,
    },
}
"""Arguments of PPOConfig. In ``full`` TRL has room for two accumulations in each minibatch and makes one, so that half
of its table of statistics stays 0."""

BATCH_TENSORS = (
    "responses",
    "sequence_lengths",
    "padding_mask",
    "padding_mask_p1",
    "logprobs",
    "ref_logprobs",
    "values",
    "scores",
    "kl",
    "rewards",
    "advantages",
    "returns",
)
MICRO_TENSORS = ("micro_batch_inds", "new_logprobs", "vpred", "entropy")
MICRO_NUMBERS = ("pg_loss", "pg_clipfrac", "approxkl", "vf_loss", "vf_clipfrac", "loss")
"""Local variables of ``train``, by their names there."""


def plain(value: Any) -> Any:
    """Tensors and arrays as lists; floats with the fewest digits that are the same float32."""
    if isinstance(value, (torch.Tensor, numpy.ndarray)):
        return plain(value.tolist())
    if isinstance(value, list):
        return [plain(each) for each in value]
    return float(str(numpy.float32(value))) if isinstance(value, float) else value


def locals_of(code: CodeType) -> dict[str, Any]:
    """Local variables of the function with that code, which is running further down the stack."""
    frame = sys._getframe(1)
    while frame.f_code is not code:
        if frame.f_back is None:
            raise RuntimeError(f"{code.co_name} is not running: this TRL works otherwise than the one written for")
        frame = frame.f_back
    return frame.f_locals


def record(trainer: Any, module: Any) -> dict[str, Any]:
    """What will be known when ``trainer.train()`` has run its one batch; ``module`` is the one the trainer is from."""
    found: dict[str, Any] = {"updates": []}
    code = type(trainer).train.__code__
    whiten, accumulate, log = module.masked_whiten, trainer.accelerator.accumulate, trainer.log

    def whiten_and_record(values: torch.Tensor, mask: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        assert "advantages_before_whitening" not in found, "only advantages are whitened, once"
        found["advantages_before_whitening"] = plain(values)
        return whiten(values, mask, *args, **named)

    @contextmanager
    def accumulate_and_record(*models: Any) -> Iterator[None]:
        with accumulate(*models):
            yield
        now = locals_of(code)
        update = {name: plain(now[name].detach()) for name in MICRO_TENSORS[1:]}
        update |= {name: plain(now[name].item()) for name in MICRO_NUMBERS}
        update |= {"ratio": plain(now["ratio"].mean().item()), "micro_batch_inds": plain(now["micro_batch_inds"])}
        where = ("ppo_epoch_idx", "minibatch_idx", "gradient_accumulation_idx")
        found["updates"].append({name: now[name] for name in where} | update)

    def log_and_record(metrics: dict[str, float], *args: Any, **named: Any) -> None:
        now = locals_of(code)
        found.update({name: plain(now[name]) for name in BATCH_TENSORS})
        found["metrics"] = {name: plain(value) for name, value in metrics.items() if name != "eps"}
        assert len(metrics) == 17, sorted(metrics)
        found["slots"] = list(now["ratio_stats"].shape)
        log(metrics, *args, **named)

    module.masked_whiten = whiten_and_record
    trainer.accelerator.accumulate, trainer.log = accumulate_and_record, log_and_record
    return found


def tokenizer() -> Any:
    """One whose words are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token=str(PAD)))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=str(PAD), eos_token=str(EOS), padding_side="left", model_max_length=64
    )


def models(seed: int) -> tuple[Any, Any, Any, Any]:
    """Random policy, reference, reward and value model. The policies never say the padding, and often the end."""
    from transformers import PhiConfig, PhiForCausalLM, PhiForSequenceClassification

    config = PhiConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        num_labels=1,  # pyright: ignore[reportCallIssue]
    )
    torch.manual_seed(seed)
    policies = PhiForCausalLM(config), PhiForCausalLM(config)
    for policy in policies:
        with torch.no_grad():
            policy.lm_head.bias[PAD], policy.lm_head.bias[EOS] = -100.0, 1.0
    return *policies, PhiForSequenceClassification(config), PhiForSequenceClassification(config)


def one_batch(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments and every recorded tensor of one batch that TRL has trained on."""
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer  # pyright: ignore[reportMissingImports]

    policy, reference, reward_model, value_model = models(arguments["seed"])
    original = ppo_trainer.masked_whiten
    with tempfile.TemporaryDirectory() as folder:
        config = PPOConfig(
            output_dir=folder,
            total_episodes=len(PROMPTS),
            response_length=RESPONSE,
            num_sample_generations=0,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            disable_tqdm=True,
            **arguments,
        )
        numpy.random.seed(arguments["seed"])  # TRL draws its minibatches from here
        prompts = Dataset.from_dict({"input_ids": PROMPTS})
        trainer = PPOTrainer(
            args=config,
            processing_class=tokenizer(),
            model=policy,
            ref_model=reference,
            reward_model=reward_model,
            value_model=value_model,
            train_dataset=prompts,
            eval_dataset=prompts,
        )
        found = record(trainer, ppo_trainer)
        try:
            trainer.train()
        finally:
            ppo_trainer.masked_whiten = original
    return {"arguments": arguments, **found}


def lines(value: Any) -> str:
    """JSON with a line for each tensor."""
    if not isinstance(value, dict):
        return "[\n" + ",\n".join(map(lines, value)) + "\n]" if _has_dicts(value) else json.dumps(value)
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {lines(each)}" for key, each in value.items()) + "\n}"


def _has_dicts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def main(arguments: list[str] | None = None) -> None:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("json", type=Path, help="the file to write")
    target = parser.parse_args(arguments).json
    torch.set_num_threads(1)
    versions = {name: version(name).split("+")[0] for name in ("trl", "transformers", "torch")}
    document = {"versions": versions, **{name: one_batch(batch) for name, batch in BATCHES.items()}}
    lengths = [length + 1 for length in document["ragged"]["sequence_lengths"]]
    assert {RESPONSE - 1, RESPONSE} < set(lengths), f"choose a seed with responses of more lengths than {lengths}"
    assert {length + 1 for length in document["full"]["sequence_lengths"]} == {RESPONSE}
    target.write_text(lines(document) + "\n", encoding="utf-8")
    print(f"{target.stat().st_size} bytes; lengths {lengths}")


if __name__ == "__main__":
    main()
