import asyncio
import json
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.campaigns import eventually
from helpers.lanes import tokens
from helpers.servers import IMPATIENT, apart, publish, requests, served_world, weights

from retrain.engines.server.adapters import AdapterStore
from retrain.engines.server.client import ServerClient
from retrain.engines.server.connection import ServerConnection, ServerUnavailable
from retrain.engines.server.dialects import DIALECTS, CompletionRequest, InvalidAnswer
from retrain.engines.server.fleet import RemoteFleet
from retrain.errors import ModelError, RunFailed, ServerFailed, UsageError
from retrain.files import read_json, write_json
from retrain.ownership import process_start, this_process
from retrain.policy.adapter_io import AdapterFile
from retrain.policy.local import LocalSnapshot
from retrain.types import PolicyRef, SampleRequest

pytestmark = pytest.mark.filterwarnings("ignore:.*websockets.*:DeprecationWarning")

model, base, lanes, standin, server = served_world()


@pytest.mark.parametrize("dialect", ["vllm", "openai", "sglang"])
def test_log_probabilities_are_those_of_the_published_weights(base, lanes, server, connect, dialect):
    engine = connect(dialect=dialect)
    for version, (rank, temperature) in enumerate(((4, 1.0), (8, 0.7), (12, 1.0))):
        own = weights(lanes, version, rank)
        ref = publish(engine, own, version)
        asked = requests(ref, temperature=temperature)
        groups = engine.sample(asked)
        assert apart(base, lanes, own, asked, groups) < 1e-5
        assert apart(base, lanes, None, asked, groups) > 0.1
        for action in [action for group in groups for action in group]:
            assert action.policy_version == version
            assert action.entropy_T is None
            assert action.text == base.text.decode(action.token_ids)
            assert (action.stop_reason == "stop") == (action.token_ids[-1] in base.eos_ids)
    engine.close()
    assert server.adapters == []


def test_what_is_sampled_depends_on_the_stream_alone(engine, lanes):
    ref = publish(engine, weights(lanes, 1))
    asked = requests(ref, count=4, samples=3)
    alone = [engine.sample([each])[0] for each in asked]
    assert tokens(engine.sample(asked, max_rows=2)) == tokens(alone)
    with ThreadPoolExecutor(2) as threads:
        assert [tokens(groups) for groups in threads.map(engine.sample, (asked, asked))] == [tokens(alone)] * 2
    assert len({tuple(each) for group in tokens(alone) for each in group}) > 8


def test_the_next_piece_of_a_completion_draws_other_numbers(engine, lanes, server):
    """``drawn`` counts the numbers of its stream that a completion has used: with the seed of the first piece, a server
    would draw every piece with the same numbers. The same piece requested twice is the same."""
    ref = publish(engine, weights(lanes, 1))
    (begun,) = engine.sample([SampleRequest(ref, (5, 9), 2, 4, 1.0, ("pieces",))])
    further = [
        SampleRequest(ref, (5, 9, *action.token_ids), 1, 4, 1.0, (), streams=(("pieces", k),), drawn=4)
        for k, action in enumerate(begun)
    ]
    pieces = engine.sample(further)
    seeds = [body["seed"] for body in server.asked]
    assert len(set(seeds)) == 4
    assert tokens(engine.sample(further)) == tokens(pieces)
    assert sorted(body["seed"] for body in server.asked[4:]) == sorted(seeds[2:])


@pytest.mark.parametrize("dialect", ["vllm", "openai", "sglang"])
def test_a_cut_and_greedy_evaluation(lanes, connect, dialect):
    engine = connect(dialect=dialect)
    ref = publish(engine, weights(lanes, 1))
    (greedy,) = engine.sample([SampleRequest(ref, (5, 9), 2, 6, 0.0, ("greedy",))])
    assert greedy[0].token_ids == greedy[1].token_ids
    (cut,) = engine.sample([SampleRequest(ref, (5, 9), 4, 6, 1.0, ("cut",), top_k=1)])
    assert {tuple(action.token_ids) for action in cut} == {tuple(greedy[0].token_ids)}


def test_groups_are_handed_out_as_soon_as_they_are_there(engine, lanes):
    ref, heard = publish(engine, weights(lanes, 1)), {}
    asked = requests(ref, count=5)
    assert engine.sync_seconds is None
    groups = engine.sample(asked, finished=lambda index, actions: heard.update({index: actions}))
    assert heard == dict(enumerate(groups))
    assert 0 < engine.sync_seconds < 5  # of loading the adapter
    engine.sample(asked)
    assert engine.sync_seconds == 0


def test_several_versions_at_once_until_they_are_retired(engine, lanes, server, tmp_path):
    own = [weights(lanes, seed) for seed in (1, 2)]
    refs = [publish(engine, each, version) for version, each in enumerate(own)]
    assert server.adapters == []  # no request has named them yet
    asked = [request for ref in refs for request in requests(ref, 2)]
    groups = engine.sample(asked)
    for version in (0, 1):
        part = slice(2 * version, 2 * version + 2)
        assert apart(lanes.base, lanes, own[version], asked[part], groups[part]) < 1e-5
    first, second = sorted(server.adapters)
    (directory,) = (tmp_path / "adapters").glob("retrain-*")
    config = read_json(directory / second / "adapter_config.json")
    assert (config["r"], config["lora_alpha"]) == (8, 8)  # padded; B is scaled
    engine.retire(refs[0])
    engine.retire(PolicyRef("run", 7))  # never published
    eventually(lambda: server.adapters == [second] and not (directory / first).exists())
    with pytest.raises(RunFailed, match=r"no weights were published as version 0 of run; there are \[1\]"):
        engine.sample(requests(refs[0]))


def test_adapters_are_sent_to_servers_that_do_not_see_them(base, lanes, server, connect, monkeypatch):
    engine, own = connect(upload=True), weights(lanes, 3)
    load = server.service.load
    monkeypatch.setattr(server.service, "load", lambda name, path, files, in_place: load(name, None, files, in_place))
    asked = requests(publish(engine, own))
    assert apart(base, lanes, own, asked, engine.sample(asked)) < 1e-5


def test_an_adapter_stays_while_a_request_in_flight_names_it(engine, lanes, server):
    ref, other = publish(engine, weights(lanes, 1)), publish(engine, weights(lanes, 2), run="other")
    held = threading.Event()

    async def slow(status, payload):
        while not held.is_set():
            await asyncio.sleep(0.01)
        return status, payload

    server.faults.append(slow)
    sampling = ThreadPoolExecutor(1).submit(engine.sample, requests(ref, 1, 1))
    eventually(lambda: server.adapters and not server.faults)
    engine.sample(requests(other, 1, 1))
    for each in (ref, other):
        engine.retire(each)
    eventually(lambda: len(server.adapters) < 2)
    time.sleep(0.1)
    assert [name.partition("@")[0] for name in server.adapters] == ["run"]
    held.set()
    assert sampling.result()
    eventually(lambda: not server.adapters)


def as_if_killed(engine) -> None:
    """Record another process, which has ended, as the owner of the engine's adapters."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    owner = {"pid": ended.pid, "process_start": process_start(ended.pid)}
    ended.wait()
    path = engine.store.directory / "owner.json"
    write_json(path, read_json(path) | owner)


def test_what_a_killed_process_left_behind_is_taken_away(connect, lanes, server, tmp_path):
    killed = connect()
    killed.sample(requests(publish(killed, weights(lanes, 1), run="a/b")))
    assert len(server.adapters) == 1
    as_if_killed(killed)
    again = connect()
    assert server.adapters == []
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == [".made-by-retrain"]
    again.close()
    assert not (tmp_path / "adapters").exists()  # the killed one had made it


def test_what_others_have_in_the_directory_of_adapters_is_left_alone(base, lanes, server, connect, tmp_path):
    place = tmp_path / "adapters"
    for name in ("grpo@7.somebody", "retrain-backup@1", "retrain-elsewhere/a@1.1.elsewhere", "retrain-torn"):
        (place / name).mkdir(parents=True)
    write_json(place / "retrain-elsewhere/owner.json", {**this_process(), "host": "another", "pid": 2**22 + 1})
    (place / "retrain-torn/owner.json").write_text("{")
    first = connect()
    asked = requests(publish(first, own := weights(lanes, 1)))
    first.sample(asked)
    names, files = server.adapters, sorted(place.rglob("*"))
    second = connect()  # retrain sample, or doctor, beside a campaign
    second.sample(requests(publish(second, weights(lanes, 2))))
    second.close()
    assert (server.adapters, sorted(place.rglob("*"))) == (names, files)
    assert apart(base, lanes, own, asked, first.sample(asked)) < 1e-5
    (first.store.directory / "notes.txt").write_text("somebody's")
    as_if_killed(first)
    third = connect()
    assert server.adapters == []
    assert sorted(path.name for path in first.store.directory.iterdir()) == ["notes.txt", "owner.json"]
    third.close()


def test_a_name_never_belongs_to_two_sets_of_weights(base, lanes, server, engine):
    """The doctor publishes several ranks under one reference."""
    for seed in range(3):
        own = weights(lanes, seed)
        asked = requests(publish(engine, own, run="rank 4"))
        assert apart(base, lanes, own, asked, engine.sample(asked)) < 1e-5
        engine.forget()
    assert len({body["model"] for body in server.asked}) == 3


def changed(**values):
    """Return a fault that replaces these fields of the true answer's choice."""

    def fault(status, payload):
        payload = json.loads(json.dumps(payload))
        choice = payload["choices"][0]
        for key, value in values.items():
            place = choice["logprobs"] if key == "token_logprobs" else payload if key == "model" else choice
            place[key] = value(place[key]) if callable(value) else value
        return status, json.dumps(payload).encode()

    return fault


TWO = {"token_ids": [5, 6], "token_logprobs": [-1.0, -1.0]}
FAULTS = {
    "HTTP 500 out of order": lambda status, payload: (500, {"error": {"message": "out of order"}}),
    "no completion with log-probabilities": lambda status, payload: (200, {"choices": []}),
    "no completion with log-probabilities: '<html>'": lambda status, payload: (200, b"<html>"),
    "model 'base' answered, where 'run@0.": changed(model="base"),
    "the prompt came back as 3 other token ids": changed(prompt_token_ids=lambda own: own[::-1]),
    "tokens, where 1 to 8 were asked for": changed(token_ids=lambda own: own * 9),
    "0 tokens, where": changed(token_ids=[]),
    "token id 99999, outside the vocabulary": changed(token_ids=lambda own: [99999, *own[1:]]),
    "log-probabilities for": changed(token_logprobs=lambda own: own[1:]),
    "log-probability nan": changed(token_logprobs=lambda own: [float("nan"), *own[1:]]),
    "log-probability None": changed(token_logprobs=lambda own: [None, *own[1:]]),
    "log-probability 0.1": changed(token_logprobs=lambda own: [0.1, *own[1:]]),
    'it ended by "abort"': changed(finish_reason="abort"),
    "of 8": changed(**TWO, finish_reason="length"),
    "the server leaves the end token out": changed(**TWO, finish_reason="stop"),
    "it went on after the end token": changed(**(TWO | {"token_ids": [1, 6]}), finish_reason="stop"),
}


@pytest.mark.parametrize("message", list(FAULTS))
def test_a_fault_costs_a_retry_and_if_it_stays_the_step(engine, lanes, server, message):
    ref = publish(engine, weights(lanes, 1))
    asked = requests(ref, 2, 2)
    sound = tokens(engine.sample(asked))
    server.asked.clear()
    server.faults.extend([FAULTS[message]] * 3)
    assert tokens(engine.sample(asked)) == sound
    assert len(server.asked) == 4 + 3
    server.always = FAULTS[message]
    with pytest.raises(ServerFailed, match="asked for 5 times") as caught:
        engine.sample(requests(ref, 1, 1))
    assert message in str(caught.value)
    assert server.url in str(caught.value)
    assert caught.value.shared


def test_an_answer_that_never_comes_is_asked_for_again(connect, lanes, server):
    engine = connect(timeout_s=2.0)
    ref = publish(engine, weights(lanes, 1))
    sound = tokens(engine.sample(requests(ref)))
    server.faults.append(lambda status, payload: None)
    assert tokens(engine.sample(requests(ref))) == sound
    assert not server.faults


class ClosesIdle:
    """A proxy that closes each connection as its second request comes: a keep-alive time that ends just then."""

    def __init__(self, port: int):
        self.closed, self.target = 0, ("127.0.0.1", port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with suppress(OSError):  # the listener is closed at the end
            while True:
                threading.Thread(target=self.forward, args=(self.listener.accept()[0],), daemon=True).start()

    def forward(self, client: socket.socket) -> None:
        with client, socket.create_connection(self.target) as server:
            answered = False
            while True:
                for each in select.select([client, server], [], [])[0]:
                    data = each.recv(1 << 16)
                    if each is client and data and answered:
                        self.closed += 1
                        return
                    if not data:
                        return
                    answered |= each is server
                    (server if each is client else client).sendall(data)


def test_a_connection_that_closes_as_a_request_comes_is_no_fault_of_the_server(connect, lanes, server):
    messages: list[str] = []
    proxy = ClosesIdle(server.port)
    engine = connect(proxy.url, notify=lambda text, level: messages.append(text))
    ref, asked = publish(engine, weights(lanes, 1)), len(server.asked)
    for _ in range(3):
        engine.sample(requests(ref, 1, 1))
    assert proxy.closed >= 3
    assert len(server.asked) == asked + 3
    assert messages == []
    engine.close()
    proxy.listener.close()


def test_a_server_that_has_forgotten_an_adapter_is_given_it_again(engine, lanes, server):
    ref = publish(engine, weights(lanes, 1))
    sound = tokens(engine.sample(requests(ref)))
    server.forget()
    assert tokens(engine.sample(requests(ref))) == sound


def test_a_refusal_is_not_repeated(engine, lanes, server):
    ref = publish(engine, weights(lanes, 1))
    server.always = lambda status, payload: (400, {"error": {"message": "LoRA is not enabled"}})
    with pytest.raises(ServerFailed, match=r"refuses: HTTP 400 LoRA is not enabled; start vLLM with --enable-lora"):
        engine.sample(requests(ref, 1, 1))
    assert len(server.asked) == 1


def test_a_server_with_a_shorter_context_than_the_model_is_reported(connect, start, lanes, model, tmp_path):
    """As with vLLM's --max-model-len: no request is sent, and the message names the server's context."""
    short = shutil.copytree(model, tmp_path / "short")
    write_json(short / "config.json", read_json(short / "config.json") | {"max_position_embeddings": 64})
    small = start(short)
    engine = connect(small.url)
    ref = publish(engine, weights(lanes, 1))
    assert engine.sample([SampleRequest(ref, (5,) * 56, 1, 8, 1.0, ("fits",))])
    small.asked.clear()
    with pytest.raises(ModelError, match=r"has 57 tokens, .* max_tokens = 8 .* the 64 that the server holds: lower"):
        engine.sample([SampleRequest(ref, (5,) * 57, 1, 8, 1.0, ("long",))])
    assert not small.asked


def test_a_server_that_is_not_there(connect):
    message = r"no server answers after 1 s:\n\[inference\] url http://127.0.0.1:9: Connect"
    with pytest.raises(UsageError, match=message):
        connect("http://127.0.0.1:9")


def test_a_key_is_sent(connect, start, lanes, model):
    locked = start(model, key="a-key-of-ours")
    with pytest.raises(UsageError, match=r"/v1/models: HTTP 401 .*the key is missing or wrong"):
        connect(locked.url, key="wrong-key")
    engine = connect(locked.url, key="a-key-of-ours")
    assert engine.sample(requests(publish(engine, weights(lanes, 1))))


@pytest.mark.parametrize(("listed", "message"), [
    ({"data": ["x"]}, "no server of the kind .* or this is not its url"), ({"data": [{"id": 3}]}, "lists no model"),
])  # fmt: skip
def test_what_is_no_server_of_that_kind(connect, server, listed, message):
    server.listed = listed
    with pytest.raises(UsageError, match=rf"\[inference\] url {server.url}: /v1/models: .*{message}"):
        connect()


def test_several_servers_share_the_load_and_one_that_dies_comes_back(connect, start, lanes, server, model):
    other, messages = start(model), []
    engine = connect(server.url, other.url, notify=lambda text, level: messages.append((level, text)))
    ref = publish(engine, weights(lanes, 1))
    asked = requests(ref, 6, 4)
    sound = tokens(engine.sample(asked))
    first, second = ([tuple(body["prompt"]) for body in each.asked] for each in (server, other))
    assert len(first) == len(second) == 12
    assert not set(first) & set(second)  # the rollouts of a prompt stay together
    other.stop()
    assert tokens(engine.sample(asked)) == sound
    level, text = messages[0]
    assert (level, text.partition(": ")[0]) == ("warning", f"{other.url} is left out")
    other.start()
    eventually(lambda: ("info", f"{other.url} is back") in messages)
    other.asked.clear()
    engine.forget_sequences()
    assert tokens(engine.sample(asked)) == sound
    assert len(other.asked) == 12
    other.stop()
    server.stop()
    engine.pool.waits = replace(engine.pool.waits, patience_s=0.5)
    with pytest.raises(ServerFailed, match=r"no server answers, for 0.5 s now .*patience_s.*ConnectError") as caught:
        engine.sample(asked)
    assert caught.value.shared
    server.start()
    other.start()
    eventually(lambda: engine.pool.servers[0].alive)
    assert tokens(engine.sample(asked)) == sound  # nothing stays broken


def client_with(connection: type[ServerConnection]) -> type[ServerClient]:
    class Client(ServerClient):
        def __init__(self, url, dialect, key, timeout_s, max_in_flight):
            super().__init__(url, dialect, key, timeout_s, max_in_flight)
            self.connection = connection(url, key, timeout_s, max_in_flight)

    return Client


def test_a_server_that_is_lost_during_a_load_is_asked_to_unload_when_it_is_back(tmp_path):
    async def requested():
        posted, released = [], asyncio.Event()

        class Held(ServerConnection):
            async def post(self, path, *rest):
                posted.append(path)
                await released.wait()

        server = client_with(Held)("http://server", DIALECTS["vllm"], "", 60.0, 4)
        load = asyncio.create_task(server.adapters.require(SimpleNamespace(name="a", write=lambda: tmp_path)))
        while not posted:
            await asyncio.sleep(0.001)
        unload = asyncio.create_task(server.adapters.unload("a"))
        await asyncio.sleep(0)
        server.mark_lost()
        released.set()
        await asyncio.gather(load, unload)
        at_once = posted.copy()
        await server.adapters.unload_unused()
        return at_once, posted

    paths = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
    assert asyncio.run(requested()) == (paths[:1], paths)


def test_closing_does_not_wait_for_a_server_that_never_answers(connect, lanes, server, tmp_path):
    unloads = []

    class Unanswered(ServerConnection):
        async def post(self, path, *rest):
            if path.endswith("/unload_lora_adapter"):
                unloads.append(path)
                await asyncio.sleep(60)
            return await super().post(path, *rest)

    engine = connect(client=client_with(Unanswered), waits=replace(IMPATIENT, closing_s=0.3))
    ref = publish(engine, weights(lanes, 1))
    engine.sample(requests(ref))
    held = threading.Event()
    server.faults.append(lambda status, payload: held.wait(10) and (status, payload))
    server.asked.clear()
    with ThreadPoolExecutor(1) as pool:
        sampling = pool.submit(engine.sample, requests(ref, 1, 1))
        eventually(lambda: server.asked)
        begin = time.monotonic()
        engine.close()
        assert time.monotonic() - begin < 5
        assert unloads
        held.set()
        with pytest.raises(CancelledError):
            sampling.result(30)
    engine.retire(ref)  # the loop has ended
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.sample(requests(publish(engine, weights(lanes, 1))))
    assert not (tmp_path / "adapters").exists()


def test_a_completion_that_ends_servers_is_not_asked_for_without_end(connect, lanes):
    deaths = []

    class Dying(ServerClient):
        async def ask(self, ask):
            deaths.append(ask)
            assert len(deaths) < 10, "asked for without end"
            raise ServerUnavailable("ReadError")

        async def check(self):
            return (not deaths or self.alive is False) and await super().check()

    engine = connect(client=Dying, waits=replace(IMPATIENT, losses=3))
    ref = publish(engine, weights(lanes, 1))
    with pytest.raises(ServerFailed, match=r"was under way 3 times at a server that then went away, last http.*Read"):
        engine.sample(requests(ref, 1, 1))
    assert len(deaths) == 3


def test_turns_of_a_rollout_stay_at_one_address_and_go_as_tokens(connect, start, lanes, server, model):
    other = start(model)
    engine = connect(server.url, other.url)
    ref = publish(engine, weights(lanes, 1))
    addresses = []
    for turn, prompt in enumerate(((5,), (5, 6))):
        engine.sample([
            SampleRequest(ref, (*prompt, i), 1, 4, 1.0, ("t", i, "turn", turn), sequences=((("t", i), 0),))
            for i in range(4)
        ])  # fmt: skip
        addresses.append({body["prompt"][-1]: each for each in (server, other) for body in each.asked})
        for each in (server, other):
            each.asked.clear()
    assert addresses[0] == addresses[1]
    assert set(addresses[0].values()) == {server, other}


def test_requests_in_the_dialect_of_every_server():
    request = SampleRequest(PolicyRef("r", 3), (5, 6), 8, 10, 0.7, ("s",), top_p=0.9)
    ask = CompletionRequest(request, "r@3.x", "base", 2**63 + 5, (1, 2))
    vllm, openai, sglang = (DIALECTS[name].body(ask) for name in ("vllm", "openai", "sglang"))
    sent = {"model": "r@3.x", "prompt": [5, 6], "n": 1, "seed": 5, "temperature": 0.7, "top_p": 0.9, "logprobs": 0}
    assert openai.items() >= sent.items()
    assert not {"top_k", "min_p", "stop_token_ids", "skip_special_tokens"} & set(openai)
    extended = {"top_k": 0, "min_p": 0.0, "stop_token_ids": [1, 2], "skip_special_tokens": False}
    assert vllm.items() >= (sent | extended | {"return_token_ids": True}).items()
    assert sglang["lora_path"] == "r@3.x"
    assert sglang["sampling_params"]["sampling_seed"] < 2**31
    assert sglang["sampling_params"]["no_stop_trim"] is True
    assert "lora_path" not in DIALECTS["sglang"].body(CompletionRequest(request, "base", "base", 1, ()))


def test_token_ids_by_their_names():
    choice = {"logprobs": {"tokens": ["token_id:7", "token_id:1"], "token_logprobs": [-1.0, -2.0]}}
    answer = DIALECTS["openai"].read({"model": "m", "choices": [choice | {"finish_reason": "stop"}]})
    assert (answer.token_ids, answer.prompt_ids) == ([7, 1], None)
    choice["logprobs"]["tokens"] = [" the", "token_id:1"]
    with pytest.raises(InvalidAnswer, match="texts of tokens and not their ids"):
        DIALECTS["openai"].read({"choices": [choice]})
    with pytest.raises(InvalidAnswer, match="no completion with log-probabilities"):
        DIALECTS["sglang"].read({"text": "hello"})


def test_an_adapter_is_rounded_as_in_training(lanes, tmp_path):
    own = weights(lanes, 1, rank=8, alpha=12.0)
    store = AdapterStore(tmp_path, "base", torch.bfloat16)
    folder = store.write("name", LocalSnapshot(own))
    with AdapterFile(folder) as file:
        assert set(file.scales.values()) == {1.0}
        for name, (a, b) in own.tensors().items():
            written_a, written_b = file.factors(name)
            assert written_a.dtype == torch.bfloat16
            assert torch.equal(written_a, a.bfloat16())
            assert torch.equal(written_b, (b * 1.5).bfloat16())


class WatchedFleet(RemoteFleet):
    def __init__(self, held):
        super().__init__()
        self.hold_restarts = held.append


def test_a_server_sleeps_while_nobody_samples(connect, lanes, server):
    server.naps, held = [], []
    fleet = WatchedFleet(held)
    fleet.update([server.url])
    engine = connect(released="weights", fleet=fleet)
    ref = publish(engine, weights(lanes, 1))
    engine.sample(requests(ref))
    engine.sample(requests(ref, 1, 1))
    assert server.naps == []  # between the turns of an episode it stays awake
    engine.forget_sequences()
    engine.forget_sequences()
    assert (server.naps, held) == (["/sleep?level=1"], [True])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: engine.sample(requests(ref)), range(2)))
    assert (server.naps, held) == (["/sleep?level=1", "/wake_up"], [True, False])
    engine.forget_sequences()
    engine.close()  # awake, as it was found
    assert server.naps == ["/sleep?level=1", "/wake_up"] * 2
    server.naps, held[:] = None, []
    other = connect(released="weights", fleet=fleet)
    other.sample(requests(publish(other, weights(lanes, 1))))
    with pytest.raises(ServerFailed, match=r"cannot sleep: .* start vLLM with --enable-sleep-mode"):
        other.forget_sequences()
    assert held == [True]
    other.close()
    assert held == [True, False]  # a server that dies later is started again


def test_servers_that_slept_before_another_failed_to_are_awake_again(connect, lanes, model, server, start):
    server.naps = []
    fleet = WatchedFleet([])
    fleet.update([server.url, start(model).url])
    engine = connect(released="weights", fleet=fleet)
    engine.sample(requests(publish(engine, weights(lanes, 1))))
    with pytest.raises(ServerFailed, match="cannot sleep"):
        engine.forget_sequences()
    engine.close()
    assert server.naps == ["/sleep?level=1", "/wake_up"]


RELEASE, WAKE = ["/pause?mode=wait", "/release_kv_cache_memory"], "/wake_up"
TAGGED = "/sleep?level=1&tags=kv_cache"


def test_a_server_frees_its_cache_alone(connect, lanes, model, start):
    server, heard = start(model), []
    server.naps = []
    engine = connect(server.url, released="kv", notify=lambda text, level: heard.append(text))
    engine.sample(requests(publish(engine, weights(lanes, 1))))
    engine.forget_sequences()
    assert server.naps == RELEASE
    engine.sample(requests(publish(engine, weights(lanes, 2), 1)))
    assert server.naps == [*RELEASE, WAKE]  # awake before the adapter was loaded and the first request was sent
    engine.forget_sequences()
    assert heard == [f"{server.url} frees its KV cache by /release_kv_cache_memory"]


def test_a_server_without_that_route_sleeps_by_tags(connect, lanes, model, start):
    server, heard = start(model), []
    server.naps, server.frees_cache = [], False
    engine = connect(server.url, released="kv", notify=lambda text, level: heard.append(text))
    ref = publish(engine, weights(lanes, 1))
    for _ in range(2):
        engine.sample(requests(ref))
        engine.forget_sequences()
    assert server.naps == ["/pause?mode=wait", TAGGED, WAKE, TAGGED]
    assert heard == [
        f"{server.url} has no route /release_kv_cache_memory: it sleeps by {TAGGED}, and if it does not know tags, "
        "frees its weights too"
    ]


@pytest.mark.parametrize("released", ["kv", "weights"])
@pytest.mark.parametrize("phase", ["/pause", "/release_kv_cache_memory", "/sleep", "asleep", "/wake_up"])
def test_a_server_that_dies_in_any_phase_samples_the_same_afterwards(released, phase, connect, lanes, model, start):
    """A server that dies while the trainer uses the GPU is started again when sampling begins, not before."""
    server = start(model)
    server.naps, server.is_awake = [], True

    class Restarting(RemoteFleet):
        held = False

        def hold_restarts(self, held: bool) -> None:
            self.held = held

        def watch(self) -> None:
            while not ended.wait(0.02):
                if not self.held and not server.thread.is_alive():
                    server.is_awake = True
                    server.start()

    ended = threading.Event()
    fleet = Restarting()
    fleet.update([server.url])
    watcher = threading.Thread(target=fleet.watch)
    watcher.start()
    engine = connect(server.url, released=released, fleet=fleet)
    ref = publish(engine, weights(lanes, 1))
    before = engine.sample(requests(ref))
    if phase == "asleep":
        engine.forget_sequences()
        server.stop()
    else:
        server.dies_at = phase
        engine.forget_sequences()
        server.thread.join(5 if phase not in ("/wake_up", *OTHER[released]) else 0)
    assert server.thread.is_alive() == (phase in ("/wake_up", *OTHER[released]))
    after = engine.sample(requests(ref))
    ended.set()
    watcher.join()
    assert [[action.token_ids for action in group] for group in after] == [
        [action.token_ids for action in group] for group in before
    ]
    assert not [nap for nap in server.naps if nap.startswith("refused")]


OTHER = {"kv": ["/sleep"], "weights": ["/pause", "/release_kv_cache_memory"]}
"""Routes that are not called where a server releases this."""
