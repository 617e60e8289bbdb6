"""One of several processes that hold a model together: the bytes that it holds while it loads, samples and trains."""

import json
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

WATCH_SECONDS = 0.005


def anonymous() -> int:
    """Bytes of this process's memory that no file stands for."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@contextmanager
def peak():
    """The most that this process holds in the block beyond what it held before, in a list."""
    before, most, over = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(WATCH_SECONDS):
            most[0] = max(most[0], anonymous() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    yield most
    over.set()
    thread.join()


def storages(base) -> int:
    """Bytes of the memory behind the model's weights as they are now."""
    found = {}
    for weight in base.model.parameters():
        own = getattr(weight, "to_local", lambda weight=weight: weight)().untyped_storage()
        found[own.data_ptr()] = own.nbytes()
    return sum(found.values())


def measure(rank: int, count: int, port: int, model: str, out: str) -> None:
    """Load the model as one of ``count`` ranks, sample a token, make one pass forward and back, and write down what was
    held."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from retrain.config import parse_dict
    from retrain.engines.local import LocalEngine
    from retrain.policy.backbone import backbone_of
    from retrain.policy.base import load_weights, look_at
    from retrain.policy.company import Company
    from retrain.policy.local import LocalSnapshot
    from retrain.policy.logprobs import collate, token_logprobs
    from retrain.policy.lora import Lanes
    from retrain.policy.ranks import join, leave
    from retrain.types import PolicyRef, Sample, SampleRequest

    torch.set_num_threads(1)
    join(rank, count, dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False))
    company = Company.form("cpu", 120.0)
    files = look_at(parse_dict({"model": {"model": model}}))
    with peak() as loading, company.work():
        base = load_weights(files, "cpu", "float32", company)
    between = storages(base)
    with peak() as working:
        with company.work():
            lanes = Lanes(base)
            backbone_of(base)
            engine = LocalEngine(base, lanes)
            adapter = lanes.new_adapter(2, 4.0).initialise(1)
            engine.publish(ref := PolicyRef("a", 0), LocalSnapshot(adapter.frozen(), {}))
            (((action,),),) = [engine.sample([SampleRequest(ref, (3, 4, 5), 1, 2, 1.0, ("x",))])]
        tokens, zeros = list(action.token_ids), np.zeros(len(action.token_ids))
        with company.work(), lanes.single(adapter):
            sample = Sample.single_turn([3, 4, 5], tokens, zeros, zeros)
            logprobs, _ = token_logprobs(base, collate([sample], base), 1.0)
            logprobs.sum().backward()
    assert adapter.flat.grad is not None
    found = {
        "fast": engine.fast,
        "whole": base.weight_bytes,
        "between": between,
        "after": storages(base),
        "held": base.held_bytes,
        "own": base.held_bytes - base.presence.passing_bytes,
        "layer": 4 * max(sum(w.numel() for w in layer.parameters()) for layer in base.model.model.layers),
        "loading": loading[0],
        "working": working[0],
        "logprobs": logprobs.sum().item(),
        "sampled": float(np.sum(action.logprobs_T)),
        "gradient": adapter.flat.grad.norm().item(),
    }
    Path(out).write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    measure(*map(int, sys.argv[1:4]), *sys.argv[4:])
