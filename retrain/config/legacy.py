"""Keys that other tools have and this one does not, with what to type here instead."""

from __future__ import annotations

NO_SFT = ("warming up on demonstrations is not available", "remove the line, or start from a model that was tuned")
NO_TURNS = ("turn-level branching is not available", "remove the line")
NO_TRAINER = ("there is one training loop", "remove the line")
NO_PARAMS = ("plug-in parameters are not available", "remove the table")
NO_PRIME = ("the prime_rl backend is not available", 'remove the line, and set backend = "local"')

REPLACED: dict[str, tuple[str, str]] = {
    "campaign.parallel": ("runs of a campaign always train together", 'lanes = "auto"'),
    "campaign.max_workers": ("runs are lanes of one process, not processes", 'lanes = "auto", or a number'),
    "campaign.stagger_seconds": ("runs are lanes of one process, which need no delay", "remove the line"),
    "campaign.summary_script": ("the comparison is part of the output", "remove the line and read manifest.json"),
    "campaign.summary_args": ("the comparison is part of the output", "remove the line and read manifest.json"),
    "model.base_url": ("the address of a server belongs to [inference]", "[inference] url"),
    "training.clip_ratio_c": ("dual clipping belongs to the loss", "[algorithm] dual_clip = 3.0"),
    "training.adv_clip_max": ("clipping advantages is not available", "remove the line"),
    "training.batch_advantage_norm": (
        "whitening over the batch is an advantage mode",
        '[algorithm] advantage_mode = "reinforce_pp"',
    ),
    "training.trainer": NO_TRAINER,
    "training.trainer_command": NO_TRAINER,
    "training.tl_grpo": NO_TURNS,
    "training.tl_grpo_branch_mode": NO_TURNS,
    "training.tl_grpo_branch_size": NO_TURNS,
    "training.tl_grpo_lookahead_steps": NO_TURNS,
    "training.tl_grpo_ema_decay": NO_TURNS,
    "training.tl_grpo_ema_init": NO_TURNS,
    "training.sft_warmup_steps": NO_SFT,
    "training.sft_data_path": NO_SFT,
    "training.sft_lr": NO_SFT,
    "training.sft_loss_fn": NO_SFT,
    "algorithm.algorithm_mode": (
        "an algorithm is an advantage and a transform",
        'advantage_mode = "maxrl" and transform_mode = "gtpo_sepa"',
    ),
    "algorithm.surprisal_mask_rho": ("the mask goes by entropy", "entropy_mask_rho = 0.2"),
    "algorithm.params": NO_PARAMS,
    "algorithm.advantage_params": NO_PARAMS,
    "algorithm.transform_params": NO_PARAMS,
    "backend.throttle_dir": ("nothing is called over a network", "remove the line"),
    "backend.max_concurrent": (
        "nothing is called over a network",
        "[campaign] lanes sets how many runs train together",
    ),
    "backend.prime_rl_transport": NO_PRIME,
    "backend.prime_rl_zmq_host": NO_PRIME,
    "backend.prime_rl_zmq_port": NO_PRIME,
    "backend.prime_rl_zmq_hwm": NO_PRIME,
    "backend.prime_rl_strict_advantages": NO_PRIME,
    "backend.prime_rl_sync_wait_s": NO_PRIME,
    "backend.prime_rl_sync_poll_s": NO_PRIME,
    "inference.attention_kernel": ("torch chooses the attention kernel", "remove the line"),
    "inference.kv_cache_dtype": ("the cache has the model's number format", 'dtype = "auto"'),
    "inference.prefix_caching": ("prompts are shared within a group by construction", "remove the line"),
    "backpressure.ema_decay": ("throughput is never averaged over different loads", "remove the line"),
    "squeeze.adapter_path": ("the adapter is that of the first run", "remove the line, or run: retrain squeeze DIR"),
    "squeeze.source_rank": ("the rank is read from the adapter", "remove the line"),
    "data.path": ("a file is a source", 'source = "problems.jsonl"'),
    "data.dataset": ("a data set is a source", 'source = "gsm8k"'),
}
"""Dotted key of another tool or version: why it is not here, and what to type."""

REPLACED_SECTIONS: dict[str, tuple[str, str]] = {
    "plugins": (
        "is not a section: nothing is searched for",
        'name your code where it is used: [reward] custom_module = "my_rewards", [algorithm] advantage_mode = "my:own"',
    ),
    "tree": ("is not a section: one file is one campaign", "run each campaign file by itself"),
}

SYNONYMS: dict[str, str] = {
    "learning_rate": "training.lr",
    "num_generations": "training.group_size",
    "num_samples": "training.group_size",
    "rollouts_per_prompt": "training.group_size",
    "per_device_train_batch_size": "training.batch_size",
    "groups_per_batch": "training.batch_size",
    "max_completion_length": "training.max_tokens",
    "max_new_tokens": "training.max_tokens",
    "epsilon": "training.clip_eps",
    "epsilon_high": "training.clip_eps_high",
    "save_steps": "training.save_every",
    "eval_steps": "training.eval_every",
    "num_steps": "training.max_steps",
    "total_steps": "training.max_steps",
    "rank": "model.lora_rank",
    "r": "model.lora_rank",
    "model_name": "model.model",
    "model_name_or_path": "model.model",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "max_grad_norm": "optimizer.grad_clip_norm",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "lr_scheduler_type": "optimizer.schedule",
    "lr_schedule": "optimizer.schedule",
    "loss_fn": "algorithm.loss",
    "kl_loss_coef": "algorithm.kl_coef",
    "entropy_coeff": "algorithm.entropy_coef",
    "vllm_importance_sampling_cap": "algorithm.tis_cap",
    "loss_type": "algorithm.loss",
    "dataset": "data.source",
    "dataset_name": "data.source",
    "reward_type": "reward.type",
    "log_path": "logging.log_dir",
    "output_dir": "logging.log_dir",
}
"""What other tools call our keys."""

FLAT_PREFIXES: dict[str, str] = {
    "optim": "optimizer",
    "bp": "backpressure",
}
"""Sections that a condition's key may name by a shorter prefix: ``optim_beta1`` is ``optimizer.beta1``."""
