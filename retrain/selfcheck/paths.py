"""Which of the ways to compute are taken: dense decoder, packed update, split output layer, attention kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from retrain.models.targets import DENSE_FAMILIES
from retrain.policy.backbone import backbone_of
from retrain.policy.objective import Objective
from retrain.policy.threads import Workers
from retrain.selfcheck.results import Result, judged
from retrain.selfcheck.subject import LR, Subject, Work

KERNELS = ("cudnn", "flash", "efficient", "math")
"""Parts of the names of torch's attention operators."""
FEW = Work(prompts=2, samples=2, tokens=6)


def paths(subject: Subject) -> Result:
    """What this model takes; a dense decoder that does not take the fast ones is a fault."""
    backbone, config = backbone_of(subject.base), subject.base.model.config.get_text_config()
    taken = {
        "dense decoder": subject.engine.fast,
        "packed update": backbone.packs,
        "split head": backbone.head is not None,
    }
    missing = [name for name, there in taken.items() if not there]
    fault = ""
    if missing and is_plain(config):
        fault = (
            f"a {config.model_type} model should take the {' and the '.join(missing)}, and a probe of it gave other "
            "numbers than the model's own forward pass: report it with --json"
        )
    policy = subject.trained(0, clipped=False)
    policy.workers = Workers()
    requests = subject.requests(subject.publish([policy]), work=FEW)
    with subject.one_thread():
        sampling, groups = _kernels(lambda: subject.engine.sample(requests))
    batch = subject.batch(subject.samples(requests, groups))
    updating, _ = _kernels(lambda: policy.update(batch, Objective(), LR))
    if subject.on_gpu and "math" in {*sampling, *updating} and not fault:
        fix = "report it with --json" if subject.dtype == "bfloat16" else 'write [inference] dtype = "bfloat16"'
        fault = f"attention takes the plain formula, whose memory grows with the square of the length; {fix}"
    words = [f"{name} {'yes' if there else 'no'}" for name, there in taken.items()]
    kernels = f"attention {' '.join(sampling) or 'unseen'} in sampling, {' '.join(updating) or 'unseen'} in the update"
    facts = {name.replace(" ", "_"): there for name, there in taken.items()}
    return judged(
        subject.kinds, {}, ", ".join([*words, kernels]), fault=fault, attention=[sampling, updating], **facts,
        notes=list(backbone.notes),
    )  # fmt: skip


def is_plain(config: Any) -> bool:
    """Whether a text model's configuration is that of a decoder that takes every fast way: a known family, attention
    to all tokens, whole numbers as weights."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    rope = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or "")
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return (
        config.model_type in DENSE_FAMILIES
        and kinds == {"full_attention"}
        and not windowed
        and "dynamic" not in rope
        and "longrope" not in rope
        and not getattr(config, "quantization_config", None)
    )


def _kernels(work: Callable[[], Any]) -> tuple[list[str], Any]:
    """The attention kernels that are called in this thread while ``work`` is done, and what it gives."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        given = work()
    names = " ".join(event.key for event in profile.key_averages() if "scaled_dot_product" in event.key)
    return [kernel for kernel in KERNELS if f"_{kernel}" in names], given
