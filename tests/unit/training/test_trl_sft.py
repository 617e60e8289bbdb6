"""The warm-up beside TRL's SFTTrainer: equal tokens and masks, and the same held-out loss."""

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.campaigns import run_cli
from helpers.models import campaign_head

pytest.importorskip("trl", reason="make test-environments")

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from retrain.config import parse_dict
from retrain.data.examples import load_examples
from retrain.files import read_json
from retrain.models.directory import local_directory

pytestmark = pytest.mark.filterwarnings("default:::(?!retrain)")
MODEL = str(local_directory("tiny-reasoner"))
RANK, ALPHA, LR, BATCH, EPOCHS, SEEDS = 8, 16, 2e-3, 16, 2, (1, 2, 3, 4)
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "<|end|>{% endgeneration %}{{ '\\n' }}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return sums, with answers in a form that the model has not learnt."""
    rng = np.random.default_rng(seed)
    pairs = rng.integers(10, 99, (count, 2)).tolist()
    return [{"prompt": f"{a}+{b}=?", "completion": f"({a}+{b}) is {a + b}."} for a, b in pairs]


def as_messages(row: dict[str, Any]) -> dict[str, Any]:
    user, assistant = ({"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]})
    return {"prompt": [user], "completion": [assistant]}


def trainer(folder: Path, train: list[Any], held_out: list[Any] | None = None, tokenizer: Any = None, **keys: Any):
    settings = SFTConfig(
        output_dir=str(folder), per_device_train_batch_size=BATCH, per_device_eval_batch_size=1000, learning_rate=LR,
        num_train_epochs=EPOCHS, lr_scheduler_type="constant", warmup_steps=0, optim="adamw_torch", weight_decay=0.0,
        max_grad_norm=1.0, gradient_checkpointing=False, bf16=False, use_cpu=True, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, max_length=256, dataset_num_proc=None, **keys,
    )  # fmt: skip
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    return SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL), args=settings, peft_config=lora,
        processing_class=tokenizer or AutoTokenizer.from_pretrained(MODEL),
        train_dataset=Dataset.from_list(train), eval_dataset=Dataset.from_list(held_out) if held_out else None,
    )  # fmt: skip


def test_tokens_and_masks_of_prompts_and_completions(tmp_path):
    data = rows(20, 0)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    config = parse_dict({"model": {"model": MODEL}, "warmup": {"source": "rows.jsonl"}})
    ours = load_examples(config, tmp_path, AutoTokenizer.from_pretrained(MODEL)).train
    theirs = trainer(tmp_path, list(map(as_messages, data)), completion_only_loss=True).train_dataset
    compare(ours, theirs)


def test_tokens_and_masks_of_conversations(tmp_path):
    turns = [[*row["prompt"], *row["completion"]] for row in map(as_messages, rows(40, 1))]
    talks = [{"messages": [*first, *second]} for first, second in zip(turns[::2], turns[1::2], strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = MARKED
    config = parse_dict({"model": {"model": MODEL}, "warmup": {"source": "rows.jsonl"}})
    ours = load_examples(config, tmp_path, tokenizer).train
    theirs = trainer(tmp_path, talks, tokenizer=tokenizer, assistant_only_loss=True).train_dataset
    compare(ours, theirs)


def compare(ours, theirs) -> None:
    assert [list(example.tokens) for example in ours] == theirs["input_ids"][:]
    labels = [
        [token if mask else -100 for token, mask in zip(example.tokens, example.loss_mask, strict=True)]
        for example in ours
    ]
    assert labels == theirs["labels"][:]
    assert {-100} < {label for row in labels for label in row}


def test_the_held_out_loss_is_that_of_trl_within_its_spread_over_seeds(tmp_path):
    train, held_out = rows(320, 2), rows(100, 3)
    for name, part in (("train", train), ("heldout", held_out)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (tmp_path / "sft.toml").write_text(
        campaign_head(("grpo", "none"), seeds=[1], max_steps=1)
        + f'[model]\nmodel = "tiny-reasoner"\nlora_rank = {RANK}\n[lora]\nalpha = {ALPHA}.0\n'
        f'[warmup]\nsource = "train.jsonl"\neval_source = "heldout.jsonl"\nlr = {LR}\nbatch_size = {BATCH}\n'
        f"epochs = {EPOCHS}\n[training]\nbatch_size = 2\ngroup_size = 2\n[evaluation]\nproblems = 0\n"
    )
    ours, theirs = list[dict[str, float]](), list[dict[str, float]]()
    for seed in SEEDS:
        out = tmp_path / f"out{seed}"
        result = run_cli("train", tmp_path / "sft.toml", "--out", out, "--plain", "--set", f"campaign.seed={seed}")
        assert result.exit_code == 0, result.output
        (facts,) = out.glob("warmup/*/warmup.json")
        ours.append(read_json(facts))
        parts = [list(map(as_messages, part)) for part in (train, held_out)]
        sft = trainer(tmp_path / "trl", *parts, completion_only_loss=True, seed=seed)
        before = sft.evaluate()["eval_loss"]
        sft.train()
        theirs.append({"heldout_loss_before": before, "heldout_loss_after": sft.evaluate()["eval_loss"]})
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["heldout_loss_before"] == pytest.approx(other["heldout_loss_before"], abs=1e-4)
    after = [[each["heldout_loss_after"] for each in losses] for losses in (ours, theirs)]
    spread = max(after[1]) - min(after[1])
    assert abs(statistics.mean(after[0]) - statistics.mean(after[1])) <= spread
    assert max(after[0]) - min(after[0]) <= 3 * spread
