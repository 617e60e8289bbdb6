"""One of several processes that hold a model together: the bytes that it holds while it loads, samples and trains."""

import json
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from retrain.config import parse_dict
from retrain.engines.local import LocalEngine
from retrain.errors import ModelError, RunFailed
from retrain.policy.backbone import backbone_of, collate, token_logprobs
from retrain.policy.base import find_model_files, load_base, load_weights
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Lanes
from retrain.ranks import RankGroup
from retrain.training.bases import Bases
from retrain.types import PolicyRef, Sample, SampleRequest

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


def measure(ranks: RankGroup, model: str) -> dict:
    """Load the model as one of several ranks, sample a token, make passes forward and back, and return what was
    held."""
    files = files_of(model)
    with peak() as loading:
        base = load_weights(files, "cpu", "float32", ranks)
    assert base.sharded is not None
    between = storages(base)
    with peak() as working:
        with base.in_use():
            lanes = Lanes(base)
            backbone_of(base)
            engine = LocalEngine(base, lanes)
            adapter = lanes.new_adapter(2, 4.0).initialise(1)
            engine.publish(ref := PolicyRef("a", 0), LocalSnapshot(adapter.frozen()))
            (((action,),),) = [engine.sample([SampleRequest(ref, (3, 4, 5), 1, 2, 1.0, ("x",))])]
        tokens, zeros = list(action.token_ids), np.zeros(len(action.token_ids))
        sample = Sample.single_turn([3, 4, 5], tokens, zeros, zeros)
        with base.in_use(), lanes.single(adapter):
            logprobs, _ = token_logprobs(base, collate([sample], base), 1.0)
            logprobs.sum().backward()
    after = storages(base)
    assert adapter.flat.grad is not None
    outside = ""
    try:
        base.model(input_ids=torch.tensor([[3, 4, 5]]))
    except RunFailed as error:
        outside = str(error)
    return {
        "fast": engine.fast, "whole": base.weight_bytes, "between": between, "after": after, "held": base.held_bytes,
        "own": base.held_bytes - base.gathered_bytes,
        "layer": 4 * max(sum(w.numel() for w in layer.parameters()) for layer in base.model.model.layers),
        "loading": loading[0], "working": working[0], "logprobs": logprobs.sum().item(),
        "sampled": float(np.sum(action.logprobs_T)), "gradient": adapter.flat.grad.norm().item(), "outside": outside,
    }  # fmt: skip


def unequal(ranks: RankGroup, model: str) -> dict:
    """Rank 0 alone makes passes, then rank 1 alone; then rank 1 fails in the middle of a pass."""
    with Bases(ranks=ranks) as bases:
        config = config_of(model, "fsdp2", ranks.count)
        base = bases.load(config)
        ranks.agree("engine", lambda: bases.with_engine(config))
        ids = torch.tensor([[3, 4, 5]])

        def passes(rank: int, count: int) -> list[list[int]]:
            with torch.no_grad():
                times = count if ranks.rank == rank else 0
                return [base.model(input_ids=ids).logits[0, -1].topk(3).indices.tolist() for _ in range(times)]

        tokens = ranks.gather("first", lambda: passes(0, 5))[0] + ranks.gather("second", lambda: passes(1, 2))[1]

        def fail() -> None:
            if ranks.rank == 1:
                assert base.sharded is not None
                base.sharded.layer(1)
                raise RuntimeError("out of memory, says rank 1")
            passes(0, 3)

        error = ""
        try:
            ranks.agree("failing", fail)
        except RuntimeError as raised:
            error = str(raised)
        assert ranks.gather("after", lambda: passes(0, 1))[0] == tokens[:1]
    return {"tokens": tokens, "error": error}


def several_bases(ranks: RankGroup, folder: str) -> dict:
    """Take one base after another, and one that is refused."""
    found, ids = {}, torch.tensor([[3, 4, 5]])
    with Bases(ranks=ranks) as bases:
        for name in ("windows", "plain"):
            path = str(Path(folder) / name)
            config = config_of(path, "fsdp2", ranks.count, dtype="bfloat16")
            own = load_base(path, devices="cpu", dtype="bfloat16")
            base = bases.load(config)
            engine = ranks.agree("engine", lambda config=config: bases.with_engine(config)[2])
            with torch.no_grad():
                logits = ranks.agree("logits", lambda base=base: base.model(input_ids=ids).logits)
                equal = torch.equal(logits, own.model(input_ids=ids).logits)
            buffers = [{key: each.dtype for key, each in model.named_buffers()} for model in (base.model, own.model)]
            found[name] = {
                "fast": engine.fast, "equal": equal, "fingerprint": base.fingerprint == own.fingerprint,
                "buffers": buffers[0] == buffers[1],
            }  # fmt: skip
        try:
            bases.load(config_of(str(Path(folder) / "misnamed"), "fsdp2", ranks.count))
        except ModelError as error:
            found["refused"] = str(error)
        bases.load(config_of(str(Path(folder) / "plain"), "fsdp2", ranks.count))
    return found


def config_of(model: str, shard: str = "none", count: int = 1, dtype: str = "float32"):
    backend = {"devices": "cpu", "shard": shard} | ({"ranks": count} if count > 1 else {})
    return parse_dict({"model": {"model": model, "lora_rank": 4}, "inference": {"dtype": dtype}, "backend": backend})


def files_of(model: str):
    return find_model_files(config_of(model))


def main(rank: int, count: int, port: int, model: str, out: str, what: str = "measure") -> None:
    torch.set_num_threads(1)
    ranks = RankGroup(rank, count, dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False))
    found = {"measure": measure, "unequal": unequal, "bases": several_bases}[what](ranks, model)
    Path(out).write_text(json.dumps(found))
    ranks.leave()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *sys.argv[4:])
