"""How much memory there is to use."""

from __future__ import annotations

import torch


def available_memory(device: torch.device | None = None) -> int:
    """Bytes that can still be allocated: on a GPU what is free or cached by torch, else the machine's own memory."""
    if device is not None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    return int(psutil.virtual_memory().available)
