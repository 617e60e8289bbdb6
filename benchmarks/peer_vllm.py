"""vLLM as one side of ``step.py``: it samples, without an adapter, and does not train.

Runs in an environment of its own with a build of vLLM for this device. The model's own prompts and number of tokens,
no end token; its prefix cache may keep what it wants.
"""

import os
import sys
from typing import Any

import shared

os.environ |= {
    "TORCHDYNAMO_DISABLE": "1",  # the first request takes a minute else
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}

import torch
from shared import Measured, Setting
from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]


def main() -> None:
    options = shared.side_parser(__doc__).parse_args()
    sys.stdout = sys.stderr
    torch.set_num_threads(options.threads)
    setting = Setting.parse(options.serve)
    llm = LLM(
        str(shared.model_directory(options.models, setting.shape)),
        dtype=options.dtype,
        enforce_eager=options.device == "cpu",
        max_model_len=1024,
        max_num_seqs=setting.rows,
        skip_tokenizer_init=True,
    )
    prompts: Any = [{"prompt_token_ids": ids} for ids in shared.prompt_ids(setting) for _ in range(setting.samples)]
    asked = SamplingParams(
        temperature=1.0, max_tokens=setting.new_tokens, ignore_eos=True, logprobs=0, detokenize=False
    )

    def step() -> Measured:
        return shared.measure(
            lambda: llm.generate(prompts, asked, use_tqdm=False),
            lambda sampled: None,
            lambda sampled: sum(len(each.outputs[0].token_ids) for each in sampled),
        )

    shared.serve(step)


if __name__ == "__main__":
    main()
