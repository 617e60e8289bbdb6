"""The log-probabilities of a trained adapter in a real vLLM, beside ours.

    python benchmarks/vllm_logprobs.py RUN --vllm ENVS/vllm/bin/python

vLLM samples answers to some held-out prompts of the run, with the base and with the run's adapter, at temperature 1 and
0.7, and tells the log-probability of every token. The trainer then computes those of the same tokens. Prints the
largest difference for each, in nats; exit status 1 when one exceeds 1e-4. In float32 (vLLM 0.31 for CPUs).
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from workload import VLLM_SETTINGS

MOST = 1e-4
PROMPTS, SAMPLES, TOKENS = 4, 3, 32
TEMPERATURES = (1.0, 0.7)


def sample(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """What vLLM samples, in the environment that has it."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    llm = LLM(
        asked["base"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=16,
        enable_lora=True,
        max_loras=1,
        max_lora_rank=asked["rank"],
        logprobs_mode="processed_logprobs",
    )
    prompts: Any = [{"prompt_token_ids": ids} for ids in asked["prompts"] for _ in range(SAMPLES)]
    rows = []
    for adapter in (None, LoRARequest("adapter", 1, asked["adapter"])):
        for temperature in TEMPERATURES:
            settings = SamplingParams(temperature=temperature, max_tokens=TOKENS, logprobs=0)
            for made in llm.generate(prompts, settings, lora_request=adapter, use_tqdm=False):
                (one,) = made.outputs
                logprobs = [of[token].logprob for of, token in zip(one.logprobs, one.token_ids, strict=True)]
                rows.append({
                    "adapter": adapter is not None, "temperature": temperature, "prompt": list(made.prompt_token_ids),
                    "tokens": list(one.token_ids), "logprobs": logprobs,
                })  # fmt: skip
    return rows


def differences(source: Any, rows: list[dict[str, Any]]) -> dict[str, float]:
    """The largest difference of a token's log-probability, by whether the adapter was on and by temperature."""
    import numpy as np
    import torch

    from retrain.adapters.talk import lane_adapter
    from retrain.policy.adapter_io import AdapterFile
    from retrain.policy.backbone import collate, token_logprobs
    from retrain.policy.base import load_base
    from retrain.policy.lora import Lanes
    from retrain.types import Sample

    base = load_base(source.base, devices="cpu", dtype="float32")
    with AdapterFile(source.adapter) as file:
        lanes = Lanes(base, list(file.modules))
        trained, none = lane_adapter(file, lanes), lanes.new_adapter(1, 1.0)
    found: dict[str, float] = {}
    for row in rows:
        theirs = np.array(row["logprobs"])
        batch = collate([Sample.single_turn(row["prompt"], row["tokens"], theirs, np.ones(len(theirs)))], base)
        with torch.no_grad(), lanes.single(trained if row["adapter"] else none):
            ours_BT, _ = token_logprobs(base, batch, row["temperature"])
        gap = float((ours_BT - batch.sampler_logprobs_BT)[batch.action_BT].abs().max())
        name = f"{'adapter' if row['adapter'] else 'base'} at temperature {row['temperature']}"
        found[name] = max(gap, found.get(name, 0.0))
    return found


def main() -> None:
    if "--sample" in sys.argv:
        print("@@" + json.dumps(sample(json.loads(sys.stdin.read()))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--vllm", type=Path, required=True, metavar="PYTHON", help="of an environment with vLLM")
    options = parser.parse_args()
    from retrain.adapters.provenance import provenance
    from retrain.files import read_jsonl

    source = provenance(options.run)
    rows = read_jsonl(options.run / "emergence" / "evaluations.jsonl")
    texts = list(dict.fromkeys(row["prompt"] for row in rows))[:PROMPTS]
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(source.base)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True)
        for text in texts
    ]
    asked = {
        "base": str(Path(source.base).resolve()),
        "adapter": str(source.adapter.resolve()),
        "rank": json.loads((source.adapter / "adapter_config.json").read_text())["r"],
        "prompts": [list(each["input_ids"]) for each in prompts],
    }
    done = subprocess.run(
        [options.vllm, __file__, "--sample"], input=json.dumps(asked), capture_output=True, text=True, check=False,
        env=os.environ | VLLM_SETTINGS,
    )  # fmt: skip
    told = [line[2:] for line in done.stdout.splitlines() if line.startswith("@@")]
    if not told:
        raise SystemExit(f"vLLM ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    found = differences(source, json.loads(told[-1]))
    for name, gap in found.items():
        print(f"{name}: {gap:.1e}")
    raise SystemExit(max(found.values()) > MOST)


if __name__ == "__main__":
    main()
