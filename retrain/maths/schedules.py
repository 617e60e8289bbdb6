"""Learning rate as a function of the step."""

import math

LR_SCHEDULES = ("constant", "linear", "cosine")


def learning_rate(schedule: str, step: int, max_steps: int, warmup_steps: int, base: float) -> float:
    """Learning rate of 0-based ``step``.

    Warm-up rises linearly and reaches ``base`` at step ``warmup_steps - 1``; its first step is base/warmup_steps,
    not 0. After it ``linear`` and ``cosine`` fall so that they would reach 0 at ``max_steps``: the last step still
    trains. Raises ValueError for an unknown schedule or a step outside [0, max_steps].
    """
    if schedule not in LR_SCHEDULES:
        raise ValueError(f"unknown learning-rate schedule {schedule!r}: one of {', '.join(LR_SCHEDULES)}")
    if not 0 <= step <= max_steps:
        raise ValueError(f"step {step} is outside [0, max_steps = {max_steps}]")
    if step < warmup_steps:
        return base * ((step + 1) / warmup_steps)
    if schedule == "constant":
        return base
    progress = (step - warmup_steps) / max(max_steps - warmup_steps, 1)
    return base * (1.0 - progress) if schedule == "linear" else base * 0.5 * (1.0 + math.cos(math.pi * progress))
