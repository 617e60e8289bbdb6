"""vLLM as one side of ``step.py``: it samples, without an adapter, and does not train.

Runs in an environment of its own with a build of vLLM for this device. The model's own prompts and number of tokens,
no end token; its prefix cache may keep what it wants.
"""

import os
import sys
from typing import Any

import workload

os.environ |= workload.VLLM_SETTINGS

import torch
from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
from workload import Measured, Setting


def main() -> None:
    options = workload.side_parser(__doc__).parse_args()
    sys.stdout = sys.stderr
    torch.set_num_threads(options.threads)
    setting = Setting.parse(options.serve)
    llm = LLM(
        str(workload.model_directory(options.models, setting.shape)),
        dtype=options.dtype,
        enforce_eager=options.device == "cpu",
        max_model_len=1024,
        max_num_seqs=setting.rows,
        skip_tokenizer_init=True,
    )
    prompts: Any = [{"prompt_token_ids": ids} for ids in workload.prompt_ids(setting) for _ in range(setting.samples)]
    asked = SamplingParams(
        temperature=1.0, max_tokens=setting.new_tokens, ignore_eos=True, logprobs=0, detokenize=False
    )

    def step() -> Measured:
        return workload.measure(
            lambda: llm.generate(prompts, asked, use_tqdm=False),
            lambda sampled: None,
            lambda sampled: sum(len(each.outputs[0].token_ids) for each in sampled),
        )

    workload.serve(step)


if __name__ == "__main__":
    main()
