import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.campaigns import StopAfter, campaign, continue_training, train
from helpers.servers import StandIn

from retrain.files import read_jsonl
from retrain.records.observer import NullObserver
from tests.system.clusters import rows_of

pytestmark = pytest.mark.filterwarnings("ignore:.*websockets.*:DeprecationWarning")
QUIET = ("squeeze.enabled=false", "evaluation.problems=0", "training.eval_every=0")
AHEAD = ("training.max_off_policy_steps=1", "algorithm.correction='tis'")


class Stuck(StandIn):
    """Takes new adapters, and goes on with the last one before, once ``stuck``."""

    stuck = False
    folder: Path

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not scope["path"].endswith("/load_lora_adapter") or not self.folder:
            await super().__call__(scope, receive, send)
            return
        message = await receive()
        body = json.loads(message["body"])
        last = self.folder / body["lora_name"].partition("@")[0]
        if not (self.stuck and last.exists()):
            shutil.rmtree(last, ignore_errors=True)
            shutil.copytree(body["lora_path"], last)
        body["lora_path"] = str(last)
        sent = {**message, "body": json.dumps(body).encode()}
        length = str(len(sent["body"])).encode()
        headers = [(key, length if key == b"content-length" else value) for key, value in scope["headers"]]

        async def again() -> Any:
            return sent

        await super().__call__({**scope, "headers": headers}, again, send)


@pytest.fixture
def server(model, tmp_path):
    made = Stuck(model)
    made.folder = tmp_path / "last"
    yield made
    made.close()


def settings(server: StandIn, *more: str) -> list[str]:
    return [*QUIET, "inference.engine='vllm'", f"inference.url='{server.url}'", *more]


def logs_of(out: Path) -> list[str]:
    return [(place / "run.log").read_text() for place in sorted((out / "runs").iterdir())]


def with_logprobs(change: Callable[[float, random.Random], float]) -> Callable[[int, Any], tuple[int, Any]]:
    """An answer whose log-probabilities are changed, by the same noise for the same answer."""

    def changed(status: int, payload: Any) -> tuple[int, Any]:
        noise, logprobs = random.Random(json.dumps(payload)), payload["choices"][0]["logprobs"]
        logprobs["token_logprobs"] = [change(each, noise) for each in logprobs["token_logprobs"]]
        return status, payload

    return changed


class AfterStep(NullObserver):
    def __init__(self, act: Callable[[int], None]):
        self.act = act

    def step(self, spec, row):
        self.act(row["step"])


def test_sampling_goes_on_during_updates_and_a_stopped_run_goes_on(tmp_path, model, server):
    path, sets = campaign(tmp_path, model, steps=5), settings(server, *AHEAD)
    train(path, tmp_path / "whole", *sets)
    whole = rows_of(tmp_path / "whole")
    for own in whole.values():
        assert [row["off_policy_steps_max"] for row in own] == [0, 1, 1, 1, 1]
        assert all(row["queue_depth"] in (0, 1) for row in own)
        assert sum(row["time/overlap"] for row in own) > 0
    train(path, tmp_path / "parts", *sets, observer=StopAfter(8), status=130)
    assert {len(own) for own in rows_of(tmp_path / "parts").values()} == {2}
    continue_training(tmp_path / "parts")
    for run, own in rows_of(tmp_path / "parts").items():  # this server's draws do repeat
        assert [row["mean_reward"] for row in own] == [row["mean_reward"] for row in whole[run]]
        assert [row["loss"] for row in own] == pytest.approx([row["loss"] for row in whole[run]], abs=1e-6)
    assert all(
        "need not equal one that was not interrupted bit for bit" in text for text in logs_of(tmp_path / "parts")
    )
    assert not any("disagree" in text for text in logs_of(tmp_path / "parts"))


@pytest.mark.parametrize("ahead", [(), AHEAD])
def test_a_server_that_keeps_an_old_adapter_is_found_out(tmp_path, model, server, ahead):
    out, stick = tmp_path / "out", AfterStep(lambda step: setattr(server, "stuck", step >= 1))
    sets = settings(server, *ahead, "training.lr=0.05")
    train(campaign(tmp_path, model, steps=8), out, *sets, observer=stick, status=1)
    for own, text in zip(rows_of(out).values(), logs_of(out), strict=True):
        assert 2 < len(own) < 8
        assert text.count("sampler and trainer disagree about the same tokens") >= 2
        assert "it looks like a stale adapter: version" in text or "it looks like no adapter at all" in text
        assert "2 steps in a row" in text


def test_a_server_that_computes_otherwise_is_found_out(tmp_path, model, server):
    """One bad step is only told; what is saved of a run that fails is what it was before the second."""

    imprecise = with_logprobs(lambda logprob, noise: logprob - abs(noise.gauss(0, 0.1)))
    worsen = AfterStep(lambda step: setattr(server, "always", imprecise if step in (0, 2, 3) else None))
    out = tmp_path / "out"
    sets = settings(server, "campaign.seeds=[1]", "training.save_every=1", "training.keep_last=0")
    train(campaign(tmp_path, model, steps=8), out, *sets, observer=worsen, status=1)
    for place, text in zip(sorted((out / "runs").iterdir()), logs_of(out), strict=True):
        assert len(read_jsonl(place / "metrics.jsonl")) == 4
        assert "step 1: sampler and trainer disagree" in text
        assert "step 2: sampler" not in text
        assert "it looks like precision: the current version is nearest" in text
        assert "RunFailed: step 4: sampler and trainer disagree" in text
        assert (place / "checkpoints" / "step_000004").is_dir()
    server.always = None
    continue_training(out, status=1)
    assert {len(own) for own in rows_of(out).values()} == {4}  # failed runs stay failed unless they are asked for


def test_the_mismatch_of_sampler_and_trainer_is_half_the_mean_square(tmp_path, model, server):
    """0.01 nats per token are half of the limit in fp32 and not reported; 0.1 nats are reported as 0.005 nats²."""

    def lower(step: int) -> None:
        server.always = with_logprobs(lambda logprob, noise: logprob - (0.01, 0.1, 0.0)[step])

    out = tmp_path / "out"
    sets = settings(server, "campaign.seeds=[1]")
    train(campaign(tmp_path, model, steps=3), out, *sets, observer=AfterStep(lower))
    for text in logs_of(out):
        assert "nats² for version 1" not in text
        assert "step 2: sampler and trainer disagree about the same tokens: 0.005 nats² for version 2" in text
