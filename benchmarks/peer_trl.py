"""TRL's GRPOTrainer as one side of ``step.py``; runs in an environment of its own with trl and peft.

Its best local setting: no gradient checkpointing, no logging or saving within the measured steps, reference model off
(β = 0), one update per batch, micro-batches that fit a processor's caches (faster than one batch, in less memory) or
the whole batch on a GPU, autocast to bf16 with ``--dtype bfloat16``. Sampling is the time inside
``_generate_and_score_completions``; the rest of the step counts as update.
"""

import sys
import tempfile
from dataclasses import asdict
from typing import Any

import shared
import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from peft import LoraConfig
from shared import ALPHA, LR, RANK, Measured, Setting
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Alternating, as on every side."""
    return shared.rewards(len(completions))


class Timed(GRPOTrainer):
    """The trainer with a stopwatch around its sampling."""

    sampling = (0.0, 0.0)
    tokens = 0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        laps = shared.Laps()
        batch = super()._generate_and_score_completions(inputs)
        self.sampling = laps.lap()
        self.tokens = int(batch["completion_mask"].sum())
        return batch


class OneStepAtATime(TrainerCallback):
    """Waits before every step until it is asked for, and answers with what the step took."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.laps = shared.Laps()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        shared.answer({})
        self._wait(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        wall, cpu = self.laps.lap()
        sampling, sampling_cpu = self.trainer.sampling
        times = (sampling, wall - sampling, sampling_cpu, cpu - sampling_cpu)
        measured = Measured(*times, self.trainer.tokens, shared.peak_mib())
        shared.answer(asdict(measured))
        self._wait(control)

    def _wait(self, control: Any) -> None:
        if not sys.stdin.readline():
            control.should_training_stop = True
        self.laps.lap()


def main() -> None:
    options = shared.side_parser(__doc__).parse_args()
    sys.stdout = sys.stderr
    torch.set_num_threads(options.threads)
    setting = Setting.parse(options.serve)
    micro = setting.rows
    while options.device == "cpu" and micro * setting.length > shared.MICRO_TOKENS:
        micro //= 2
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            use_cpu=options.device == "cpu",
            bf16=options.dtype == "bfloat16",
            gradient_checkpointing=False,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=setting.rows // micro,
            num_generations=setting.samples,
            max_completion_length=setting.new_tokens,
            temperature=1.0,
            beta=0.0,
            learning_rate=LR,
            lr_scheduler_type="constant",
            max_steps=1_000_000,
            logging_steps=1_000_000,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "bfloat16" if options.device == "cuda" else "float32"},
        )
        callback = OneStepAtATime()
        trainer = Timed(
            model=str(shared.model_directory(options.models, setting.shape)),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": shared.prompt_texts(setting, 8 * setting.prompts)}),
            peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[callback],
        )
        callback.trainer = trainer
        trainer.train()


if __name__ == "__main__":
    main()
