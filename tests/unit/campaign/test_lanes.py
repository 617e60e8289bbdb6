import re

import pytest
import torch
from helpers.campaigns import campaign, train
from helpers.lanes import ref, sample, tokens
from helpers.models import toy_base

from retrain.campaign.planning.plan import plan, smaller_cohorts
from retrain.config import load
from retrain.engines.local import LocalEngine
from retrain.errors import UsageError
from retrain.files import read_json, read_jsonl
from retrain.policy import local
from retrain.policy.local import DoesNotFit, check_memory
from retrain.policy.lora import Lanes
from retrain.types import SampleRequest


def trained(path, out):
    train(path, out, "training.eval_every=0", "evaluation.problems=0")
    return {row.parent.name: read_jsonl(row) for row in sorted(out.glob("runs/*/metrics.jsonl"))}


def test_memory_for_several_adapters_holds_so_many_runs(tmp_path, host_memory):
    """Beside its adapter (master, gradient, two moments, as published and as decoded with) a run of 17 tokens takes a
    cache of 34,816 bytes, and an update 67,456 bytes once."""
    base = toy_base(tmp_path / "toy")
    lanes = Lanes(base)
    specs = plan(load(campaign(tmp_path, tmp_path / "toy")))
    own = lanes.new_adapter(4, 8.0).flat.numel() * 24

    def fits(usable: int) -> int:
        """Return how many of the runs fit into so many bytes."""
        host_memory.available = int(usable / local.USABLE_SHARE)
        try:
            check_memory(base, lanes, specs, 7)
        except DoesNotFit as short:
            return short.lanes
        return len(specs)

    assert own == 98_304
    assert [fits(number * own) for number in range(1, 7)] == [0, 1, 2, 2, 3, 4]


def test_smaller_cohorts_keep_seeds_together_and_say_what_to_type(tmp_path):
    specs = plan(load(campaign(tmp_path, tmp_path / "toy")))
    parts = smaller_cohorts(specs, 3, "4 runs need more")
    assert [[spec.seed for spec in part] for part in parts] == [[1, 1], [2, 2]]
    assert [len(part) for part in smaller_cohorts(specs, 1, "…")] == [1, 1, 1, 1]
    with pytest.raises(UsageError, match="lower \\[model\\] lora_rank"):
        smaller_cohorts(specs, 0, "4 runs need more")
    fixed = plan(load(campaign(tmp_path, tmp_path / "toy", "fixed", lanes=4)))
    with pytest.raises(UsageError, match='type lanes = 3 or lanes = "auto"'):
        smaller_cohorts(fixed, 3, "4 runs need more")


def allow_runs(monkeypatch, most: int) -> None:
    """Let sampling of more runs than ``most`` at once run out of memory."""
    sample = LocalEngine.sample

    def short(self, requests, **options):
        if len({request.policy for request in requests}) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return sample(self, requests, **options)

    monkeypatch.setattr(LocalEngine, "sample", short)


def test_a_campaign_that_does_not_fit_trains_in_smaller_cohorts(model, tmp_path, monkeypatch):
    path = campaign(tmp_path, model, steps=2, dtype="float64")
    whole = trained(path, tmp_path / "whole")
    allow_runs(monkeypatch, 2)
    parts = trained(path, tmp_path / "cut")
    assert [len(cohort) for cohort in read_json(tmp_path / "cut/manifest.json")["cohorts"]] == [2, 2]
    for run, rows in whole.items():
        assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in parts[run]], abs=1e-9)


def test_runs_that_do_not_even_fit_alone_fail(model, tmp_path, monkeypatch):
    allow_runs(monkeypatch, 0)
    train(campaign(tmp_path, model, steps=1), tmp_path / "out", "campaign.seeds=[1]", status=1)
    for run in read_json(tmp_path / "out/manifest.json")["runs"]:
        assert run["state"] == "failed"
        assert re.fullmatch(r".*out of memory in retrain\..*", run["reason"])


def test_a_batch_of_the_models_own_forward_pass_that_does_not_fit_goes_on_with_half_the_rows(tmp_path):
    base = toy_base(tmp_path / "toy")
    lanes = Lanes(base)
    adapters = [lanes.new_adapter(4, 8.0).initialise(seed) for seed in (1, 2)]
    asked = [SampleRequest(ref(lane), (5, 6, 7 + p), 4, 6, 1.0, ("m", lane, p)) for lane in (0, 1) for p in range(4)]
    free = sample(LocalEngine(base, lanes, dense=False), asked, adapters)
    told: list[str] = []
    engine = LocalEngine(base, lanes, dense=False, notify=told.append)

    def narrow(model, args, options):
        rows, columns = options["input_ids"].shape
        if columns == 1 and rows > 8:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: tried 9 bytes")

    base.model.register_forward_pre_hook(narrow, with_kwargs=True)
    for _ in range(2):
        tight = sample(engine, asked, adapters)
        assert tokens(tight) == tokens(free)
    assert engine.fitting == 8
    assert told.count("out of memory while decoding: continuing with 8 sequences at once") == 1  # then remembered
