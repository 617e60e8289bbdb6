"""List the keys that retrain 0.3 or a later version had and that were removed, with what to type instead.

Keys of 0.3: https://github.com/teilomillet/retrain/blob/v0.3.2/retrain/config.py
"""

from collections.abc import Mapping
from typing import NamedTuple


class RemovedKey(NamedTuple):
    why: str
    instead: str
    default: object = None


_NO_GRAMS = ("files of mined phrases are no longer read", '[logging] strategic_grams = ["let me check"]')
NO_SEMANTIC = ("planning tokens are no longer found by sentence embeddings", '[planning] detector = "module:function"')

_ONE_RULE = ("one rule decides every verdict, without a choice of tests", "remove the line")
_NO_STOPPING_UNDECIDED = (
    "stopping conditions that are undecided raises the error of the others",
    'remove the line; sequential = "on" stops what is decided',
)
_NO_PRIOR = ("the rule assumes no spread", "remove the line")

REMOVED: dict[str, RemovedKey] = {
    "campaign.test": RemovedKey(*_ONE_RULE, "exact"),
    "campaign.futility": RemovedKey(*_NO_STOPPING_UNDECIDED, False),
    "campaign.race": RemovedKey(*_NO_STOPPING_UNDECIDED, False),
    "campaign.prior_spread": RemovedKey(*_NO_PRIOR, 0.0),
    "campaign.prior_freedom": RemovedKey(*_NO_PRIOR, 4),
    "planning.grams": RemovedKey(*_NO_GRAMS),
    "planning.model": RemovedKey(*NO_SEMANTIC, "all-MiniLM-L6-v2"),
    "planning.threshold": RemovedKey(*NO_SEMANTIC, 0.02),
    "planning.planning_anchors": RemovedKey(*NO_SEMANTIC),
    "planning.execution_anchors": RemovedKey(*NO_SEMANTIC),
}
"""Removed keys by dotted name; ``config.json`` and ``plan.json`` of earlier versions may contain them."""

_NO_TRAINER = ("there is one training loop", "remove the line")
_NO_TURNS = ("turn-level branching is not available", "remove the line")
_WARMUP = "the supervised warm-up has a section"
_NO_PARAMS = ("plug-in parameters are not available", "remove the table")
_NO_SCRIPT = ("the comparison is part of the output", "remove the line and read manifest.json")
_ONE_PAGE = ("every rollout is recorded", "[logging] rollouts_every and num_groups_to_log set what has a page")

REPLACED: dict[str, tuple[str, str]] = {
    "campaign.parallel": ("runs of a campaign always train together", 'lanes = "auto"'),
    "campaign.max_workers": ("runs are lanes of one process, not processes", 'lanes = "auto", or a number'),
    "campaign.stagger_seconds": ("runs are lanes of one process, which need no delay", "remove the line"),
    "campaign.summary_script": _NO_SCRIPT,
    "campaign.summary_args": _NO_SCRIPT,
    "model.base_url": ("the address of a server belongs to [inference]", "[inference] url"),
    "training.clip_ratio_c": ("dual clipping belongs to the loss", "[algorithm] dual_clip = 3.0"),
    "training.adv_clip_max": ("clipping advantages is not available", "remove the line"),
    "training.batch_advantage_norm": (
        "whitening over the batch is an advantage mode",
        '[algorithm] advantage_mode = "reinforce_pp"',
    ),
    "training.trainer": _NO_TRAINER,
    "training.trainer_command": _NO_TRAINER,
    "training.tl_grpo": _NO_TURNS,
    "training.tl_grpo_branch_mode": _NO_TURNS,
    "training.tl_grpo_branch_size": _NO_TURNS,
    "training.tl_grpo_lookahead_steps": _NO_TURNS,
    "training.tl_grpo_ema_decay": _NO_TURNS,
    "training.tl_grpo_ema_init": _NO_TURNS,
    "training.sft_warmup_steps": (_WARMUP, "[warmup] steps = 100"),
    "training.sft_data_path": (_WARMUP, '[warmup] source = "examples.jsonl"'),
    "training.sft_lr": (_WARMUP, "[warmup] lr = 2e-4"),
    "training.sft_loss_fn": ("the supervised warm-up has one loss, the cross-entropy", "remove the line"),
    "algorithm.algorithm_mode": (
        "an algorithm is an advantage and a transform",
        'advantage_mode = "maxrl" and transform_mode = "gtpo_sepa"',
    ),
    "algorithm.surprisal_mask_rho": ("the mask goes by entropy", "entropy_mask_rho = 0.2"),
    "algorithm.params": _NO_PARAMS,
    "algorithm.advantage_params": _NO_PARAMS,
    "algorithm.transform_params": _NO_PARAMS,
    "backend.throttle_dir": ("nothing is called over a network", "remove the line"),
    "backend.max_concurrent": (
        "nothing is called over a network",
        "[campaign] lanes sets how many runs train together",
    ),
    "inference.attention_kernel": ("torch chooses the attention kernel", "remove the line"),
    "inference.kv_cache_dtype": ("the cache has the model's number format", 'dtype = "auto"'),
    "inference.prefix_caching": ("prompts are shared within a group by construction", "remove the line"),
    "backpressure.ema_decay": ("throughput is never averaged over different loads", "remove the line"),
    "squeeze.adapter_path": ("the adapter is that of the first run", "remove the line, or run: retrain squeeze DIR"),
    "squeeze.source_rank": ("the rank is read from the adapter", "remove the line"),
    "logging.log_generations": _ONE_PAGE,
    "logging.generation_log_samples_per_prompt": _ONE_PAGE,
    "logging.generation_top_surprisal_limit": _ONE_PAGE,
    **{dotted: (removed.why, removed.instead) for dotted, removed in REMOVED.items()},
}
"""(reason, fix) of keys that retrain does not have, by dotted name."""

REPLACED_SECTIONS: dict[str, tuple[str, str]] = {
    "plugins": (
        "is not a section: nothing is searched for",
        'name your code where it is used: [reward] custom_module = "my_rewards", [algorithm] advantage_mode = "my:own"',
    ),
    "tree": ("is not a section: one file is one campaign", "run each campaign file by itself"),
}

FLAT_PREFIXES: dict[str, str] = {"optim": "optimizer", "bp": "backpressure"}
"""Short prefixes of sections in flat keys of a condition: ``optim_beta1`` is ``optimizer.beta1``."""


def without_removed(config: Mapping[str, object]) -> dict[str, object]:
    """Return a recorded configuration or condition without removed keys; any former stopping rule becomes "on"."""
    cleaned = dict(config)
    for section, key in (dotted.split(".") for dotted in REMOVED):
        table = cleaned.get(section)
        if isinstance(table, dict) and key in table:
            cleaned[section] = {name: value for name, value in table.items() if name != key}
            if not cleaned[section]:  # an empty table in a condition is a mistake
                del cleaned[section]
    campaign = cleaned.get("campaign")
    if isinstance(campaign, dict):
        campaign = {**campaign}
        if "sequential" in campaign and campaign["sequential"] != "off":
            campaign["sequential"] = "on"  # any stopping rule of earlier versions
        if isinstance(rows := campaign.get("conditions"), list):
            campaign["conditions"] = [without_removed(row) if isinstance(row, dict) else row for row in rows]
        cleaned["campaign"] = campaign
    return cleaned


def removed_note(config: Mapping[str, object]) -> str:
    """Return a sentence that names removed keys of a recorded configuration whose values differ from the former
    defaults; "" without any."""
    campaign = config.get("campaign")
    rows = campaign.get("conditions") if isinstance(campaign, dict) else None
    tables = [config, *(row for row in rows if isinstance(row, dict))] if isinstance(rows, list) else [config]
    names = [
        dotted
        for dotted, removed in REMOVED.items()
        if any(_value(table, dotted, removed.default) != removed.default for table in tables)
    ]
    return f"settings that this version of retrain no longer has are ignored: {', '.join(names)}" if names else ""


def _value(config: Mapping[str, object], dotted: str, default: object) -> object:
    section, key = dotted.split(".")
    table = config.get(section)
    return table.get(key, default) if isinstance(table, dict) else default
