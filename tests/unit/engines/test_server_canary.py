import time
from dataclasses import replace
from itertools import count, repeat

import numpy as np
import pytest
from helpers.models import qwen3_directory
from helpers.servers import TEXTS, publish, requests, served_world, weights

from retrain.engines.server import adapters, canary, hypotheses
from retrain.engines.server.dialects import VLLM, Answer, CompletionRequest
from retrain.errors import ModelError

model, base, lanes, standin, server = served_world()


def result(engine, base, lanes, *settings):
    return canary.Canary(base, lanes, canary.CanarySettings(*settings)).test(engine, engine.pool.servers[0])


@pytest.mark.parametrize(("rank", "alpha", "temperature"), [(4, 8.0, 1.0), (16, 32.0, 0.7), (12, 6.0, 1.3)])
def test_a_sound_server_passes(engine, base, lanes, server, rank, alpha, temperature):
    found = result(engine, base, lanes, rank, alpha, temperature, 1e-4)
    assert max(found.base, found.adapter) < 1e-5
    assert found.effect > 0.3
    assert "seeds repeat" in found.summary
    engine.close()
    assert server.adapters == []


@pytest.mark.parametrize(("cause", "lost", "config"), [
    ("the adapter never reached the model", "", {}),
    ("only the adapters of attention count", "mlp", {}),
    ("only the adapters of MLP count", "self_attn", {}),
    ("alpha is not divided by the rank", None, {"lora_alpha": 16 * 16}),
    ("the square root of the rank", None, {"use_rslora": True}),
])  # fmt: skip
def test_an_adapter_that_is_read_differently_is_refused_by_its_cause(
    engine, base, lanes, monkeypatch, cause, lost, config
):
    """Layers whose name contains ``lost`` do nothing; ``config`` overrides the saved configuration."""
    write = adapters.write_peft

    def write_otherwise(directory, tensors, saved):
        kept = {name: (a, 0 * b if lost is not None and lost in name else b) for name, (a, b) in tensors.items()}
        return write(directory, kept, saved | config)

    monkeypatch.setattr(adapters, "write_peft", write_otherwise)
    with pytest.raises(ModelError, match=r"0.002 is the limit \(\[inference\] tolerance\)") as caught:
        result(engine, base, lanes, 16, 32.0, 1.0, 2e-3)
    assert cause in str(caught.value).partition("Likely cause: ")[2]


class Asking(VLLM):
    """A server that gets further keys in every request."""

    def __init__(self, **keys):
        self.keys = keys

    def body(self, ask: CompletionRequest):
        return super().body(ask) | {key: next(value) for key, value in self.keys.items()}


class AtTemperatureOne(VLLM):
    """A server whose log-probabilities are those before the temperature."""

    def __init__(self, base, lanes):
        self.base, self.lanes = base, lanes

    def read(self, payload) -> Answer:
        answer = super().read(payload)
        said = hypotheses.ServedTokens(answer.prompt_ids, answer.token_ids, np.zeros(len(answer.token_ids)))
        raw = hypotheses.trainer_logprobs(self.base, self.lanes, [said], hypotheses.Hypothesis("", None, 1.0))
        return replace(answer, logprobs=raw.tolist())


DIALECTS = {
    r"Likely cause: the server samples with top_p = 0.9 of its own .*generation": lambda *_: Asking(top_p=repeat(0.9)),
    r"Likely cause: log-probabilities are those of temperature 1, not 0.7 .*process": AtTemperatureOne,
    "seeds do not repeat": lambda *_: Asking(seed=count()),
    "it does not use its seeds": lambda *_: Asking(seed=repeat(7)),
    r"tried before training, and failed.*cannot load the adapter.*--enable-lora": (
        lambda *_: type("Elsewhere", (VLLM,), {"adapter_prefix": "/elsewhere"})()
    ),
}


@pytest.mark.parametrize("words", DIALECTS)
def test_a_server_that_answers_otherwise_is_refused_before_training(engine, base, lanes, words):
    server = engine.pool.servers[0]
    server.dialect = DIALECTS[words](base, lanes)
    with pytest.raises(ModelError, match=words):
        result(engine, base, lanes, 4, 8.0, 0.7, 2e-3)


def test_every_server_is_tried_also_one_that_comes_later(base, lanes, server, connect, start, tmp_path):
    sound, other = start(server.service.base.name), start(qwen3_directory(tmp_path / "other", TEXTS, seed=1))
    urls, messages, kinds = [server.url, sound.url, other.url], [], [
        canary.CanarySettings(4, 8.0, 1.0, 2e-3), canary.CanarySettings(16, 8.0, 0.7, 2e-3),
    ]  # fmt: skip
    engine = connect(*urls)
    fault = rf"{other.url} does not compute what is trained here.*Likely cause: another base model, or other weights"
    with pytest.raises(ModelError, match=f"(?s){fault}"):
        list(canary.run_canaries(engine, base, lanes, kinds))
    engine.close()
    for each in (sound, other):
        each.stop()  # away when the others are tried
    engine = connect(*urls, notify=lambda text, level: messages.append(text))
    words = [found.summary for found in canary.run_canaries(engine, base, lanes, kinds)]
    assert [each.partition(":")[0] for each in words] == ["canary at http"] * 2
    assert all(each.startswith(f"canary at {server.url}: base within") for each in words)
    for each in (sound, other):
        each.asked.clear()
        each.start()
    ref = publish(engine, weights(lanes, 1))
    deadline = time.monotonic() + 30
    while sum(text.endswith("is back") or "stays left out" in text for text in messages) < 2:
        assert time.monotonic() < deadline
        engine.sample(requests(ref, 3, 1))
        time.sleep(0.02)
    assert f"{sound.url} is back" in messages
    (refused,) = [text for text in messages if "stays left out" in text]
    assert refused.startswith(f"{other.url} answers, and stays left out: {other.url} does not compute what is trained")
    assert len([body for body in sound.asked if body["max_tokens"] == 1]) == 4 * canary.RETURN_TOKENS
    engine.forget_sequences()
    engine.sample(requests(ref, 6, 2))
    assert [body for body in sound.asked if body["max_tokens"] == 8]
    assert not [body for body in other.asked if body["max_tokens"] == 8]
    assert [name.partition("@")[0] for name in sound.adapters] == ["run"]
