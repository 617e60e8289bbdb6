"""retrain 0.3.0's local backend as one side of ``step.py``; runs in an environment of its own.

Driven as its trainer drives it: ``sample`` for all prompts, then one ``train_step`` on all completions, with the
log-probabilities and advantages padded by zeros over the prompt.
"""

import sys
import tempfile
from typing import Any

import torch
import workload
from workload import ALPHA, LR, RANK, Measured, Setting


def main() -> None:
    options = workload.side_parser(__doc__).parse_args()  # it has no choice of --dtype
    sys.stdout = sys.stderr
    from retrain.local_train_helper import LocalTrainHelper  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(options.threads)
    setting = Setting.parse(options.serve)
    prompts = workload.prompt_ids(setting)
    with tempfile.TemporaryDirectory() as out:
        device = "cpu" if options.device == "cpu" else "gpu:0"
        model = str(workload.model_directory(options.models, setting.shape))
        helper = LocalTrainHelper(model, out, device, RANK, lora_alpha=ALPHA)

        def sample() -> Any:
            return helper.sample(prompts, setting.samples, setting.new_tokens, 1.0, 1.0)

        def update(groups: Any) -> None:
            tokens, logprobs, advantages = [], [], []
            flat = [(prompt, *one) for prompt, group in zip(prompts, groups, strict=True) for one in group]
            for (prompt, ids, sampled), advantage in zip(flat, workload.advantages(setting), strict=True):
                tokens.append([*prompt, *ids])
                logprobs.append([0.0] * len(prompt) + list(sampled))
                advantages.append([0.0] * len(prompt) + [advantage] * len(ids))
            helper.train_step(tokens, logprobs, advantages, LR, 0.0)

        def step() -> Measured:
            return workload.measure(
                sample, update, lambda groups: sum(len(ids) for group in groups for ids, _ in group)
            )

        workload.serve(step)


if __name__ == "__main__":
    main()
