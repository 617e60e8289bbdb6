"""Sampling from servers: what is asked, what is checked, what is done about faults; against ``retrain serve``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
from served_cases import apart, engine_of, ids, publish, requests, served_world, weights
from standin import StandIn

from retrain.engines.protocol import PolicyRef, SampleRequest
from retrain.engines.server import engine as engine_module
from retrain.engines.server import pool as pool_module
from retrain.engines.server.client import Away, Refused, Server
from retrain.engines.server.dialects import DIALECTS, Ask, Faulty
from retrain.errors import ModelError, RunFailed, ServerFailed, UsageError
from retrain.files import read_json, write_json
from retrain.ownership import process_start, this_process

pytestmark = pytest.mark.filterwarnings("ignore:.*websockets.*:DeprecationWarning")


model, base, lanes, standin, server = served_world()


@pytest.fixture
def engine(base, server, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "PAUSE_S", 0.01)
    monkeypatch.setattr(engine_module, "START_PATIENCE_S", 1.0)
    made = engine_of(base, [server.url], tmp_path / "adapters")
    yield made
    made.close()


# -- what comes back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["vllm", "openai", "sglang"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_published_weights(base, lanes, server, tmp_path, dialect, temperature):
    engine = engine_of(base, [server.url], tmp_path / "adapters", dialect)
    for version, rank in enumerate((4, 8, 12)):
        own = weights(lanes, version, rank)
        ref = publish(engine, own, version)
        asked = requests(ref, temperature=temperature)
        groups = engine.sample(asked)
        assert apart(base, lanes, own, asked, groups) < 1e-5
        assert apart(base, lanes, None, asked, groups) > 0.1
        for group in groups:
            for action in group:
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
    together = engine.sample(asked, max_rows=2)
    assert ids(together) == ids(alone)
    with ThreadPoolExecutor(2) as threads:
        assert [ids(groups) for groups in threads.map(engine.sample, (asked, asked))] == [ids(alone)] * 2
    assert len({tuple(each) for group in ids(together) for each in group}) > 8


def test_the_next_piece_of_a_completion_draws_other_numbers(engine, lanes, server):
    """``drawn`` counts the numbers of its stream that a completion has used: with the seed of the first piece, a server
    would draw every piece with the same numbers. The same piece requested twice is the same."""
    ref = publish(engine, weights(lanes, 1))
    first = SampleRequest(ref, (5, 9), 2, 4, 1.0, ("pieces",))
    (begun,) = engine.sample([first])
    further = [
        SampleRequest(ref, (5, 9, *action.token_ids), 1, 4, 1.0, (), streams=(("pieces", k),), drawn=4)
        for k, action in enumerate(begun)
    ]
    pieces = engine.sample(further)
    seeds = [body["seed"] for body in server.asked]
    assert len(set(seeds)) == 4
    assert ids(engine.sample(further)) == ids(pieces)
    assert sorted(body["seed"] for body in server.asked[4:]) == sorted(seeds[2:])


@pytest.mark.parametrize("dialect", ["vllm", "openai", "sglang"])
def test_a_cut_and_greedy_evaluation(base, lanes, server, tmp_path, dialect):
    engine = engine_of(base, [server.url], tmp_path / "adapters", dialect)
    own = weights(lanes, 1)
    ref = publish(engine, own)
    (greedy,) = engine.sample([SampleRequest(ref, (5, 9), 2, 6, 0.0, ("greedy",))])
    assert greedy[0].token_ids == greedy[1].token_ids
    (cut,) = engine.sample([SampleRequest(ref, (5, 9), 4, 6, 1.0, ("cut",), top_k=1)])
    assert {tuple(action.token_ids) for action in cut} == {tuple(greedy[0].token_ids)}
    engine.close()


def test_groups_are_handed_out_as_soon_as_they_are_there(engine, lanes):
    ref, heard = publish(engine, weights(lanes, 1)), {}
    asked = requests(ref, count=5)
    assert engine.sync_seconds is None
    groups = engine.sample(asked, finished=lambda index, actions: heard.update({index: actions}))
    assert heard == dict(enumerate(groups))
    assert 0 < engine.sync_seconds < 5  # of loading the adapter
    engine.sample(asked)
    assert engine.sync_seconds == 0


# -- versions -------------------------------------------------------------------------------------------------------


def test_several_versions_at_once_until_they_are_retired(engine, lanes, server, tmp_path):
    own = [weights(lanes, seed) for seed in (1, 2)]
    refs = [publish(engine, each, version) for version, each in enumerate(own)]
    assert server.adapters == []  # nobody has asked for them yet
    asked = [request for ref in refs for request in requests(ref, 2)]
    groups = engine.sample(asked)
    for version in (0, 1):
        part = slice(2 * version, 2 * version + 2)
        assert apart(lanes.base, lanes, own[version], asked[part], groups[part]) < 1e-5
    first, second = sorted(server.adapters)
    assert first.startswith("run@0.")
    (own_directory,) = (tmp_path / "adapters").glob("retrain-*")
    config = read_json(own_directory / second / "adapter_config.json")
    assert (config["r"], config["lora_alpha"]) == (8, 16.0)  # padded, with ΔW as it was
    engine.retire(refs[0])
    engine.retire(PolicyRef("run", 7))  # never published
    until(lambda: server.adapters == [second] and not (own_directory / first).exists())
    with pytest.raises(RunFailed, match=r"no weights were published as version 0 of run; there are \[1\]"):
        engine.sample(requests(refs[0]))


def until(true) -> None:
    """Wait for what another thread does."""
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_adapters_are_sent_to_servers_that_do_not_see_them(base, lanes, server, tmp_path, monkeypatch):
    engine = engine_of(base, [server.url], tmp_path / "adapters", upload=True)
    monkeypatch.setattr(server.service, "_read", lambda path, files, read=server.service._read: read(None, files))
    own = weights(lanes, 3)
    asked = requests(publish(engine, own))
    assert apart(base, lanes, own, asked, engine.sample(asked)) < 1e-5
    engine.close()


def test_an_adapter_stays_while_a_request_in_flight_names_it(engine, lanes, server):
    ref, other = publish(engine, weights(lanes, 1)), publish(engine, weights(lanes, 2), run="other")
    held = threading.Event()

    async def slow(status, payload):
        while not held.is_set():
            await asyncio.sleep(0.01)
        return status, payload

    server.faults.append(slow)
    sampling = ThreadPoolExecutor(1).submit(engine.sample, requests(ref, 1, 1))
    until(lambda: server.adapters and not server.faults)
    engine.sample(requests(other, 1, 1))
    for each in (ref, other):
        engine.retire(each)
    until(lambda: len(server.adapters) < 2)
    time.sleep(0.1)
    assert [name.partition("@")[0] for name in server.adapters] == ["run"]  # the request in flight needs it
    held.set()
    assert sampling.result()
    until(lambda: not server.adapters)


def as_if_killed(engine) -> None:
    """Its process has ended, as far as its file says."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    start = process_start(ended.pid)
    ended.wait()
    owner = engine.store.directory / "owner.json"
    write_json(owner, read_json(owner) | {"pid": ended.pid, "process_start": start})


def test_what_a_killed_process_left_behind_is_taken_away(base, lanes, server, tmp_path):
    killed = engine_of(base, [server.url], tmp_path / "adapters")
    killed.sample(requests(publish(killed, weights(lanes, 1), run="a/b")))
    assert len(server.adapters) == 1
    as_if_killed(killed)
    again = engine_of(base, [server.url], tmp_path / "adapters")
    assert server.adapters == []
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == [".made-by-retrain"]
    again.close()
    assert not (tmp_path / "adapters").exists()  # the killed one had made it
    killed.close()


def test_what_others_have_in_the_directory_of_adapters_is_left_alone(base, lanes, server, tmp_path):
    place = tmp_path / "adapters"
    for name in ("grpo@7.somebody", "retrain-backup@1", "retrain-elsewhere/a@1.1.elsewhere", "retrain-torn"):
        (place / name).mkdir(parents=True)
    elsewhere = {**this_process(), "host": "another", "pid": 2**22 + 1}
    write_json(place / "retrain-elsewhere/owner.json", elsewhere)
    (place / "retrain-torn/owner.json").write_text("{")
    first = engine_of(base, [server.url], place)
    asked = requests(publish(first, own := weights(lanes, 1)))
    sound = first.sample(asked)
    names, there = server.adapters, sorted(place.rglob("*"))
    second = engine_of(base, [server.url], place)  # retrain sample, or doctor, beside a campaign
    second.sample(requests(publish(second, weights(lanes, 2))))
    second.close()
    assert (server.adapters, sorted(place.rglob("*"))) == (names, there)
    assert ids(first.sample(asked)) == ids(sound)
    assert apart(base, lanes, own, asked, first.sample(asked)) < 1e-5
    killed = first.store.directory
    (killed / "notes.txt").write_text("somebody's")
    as_if_killed(first)
    third = engine_of(base, [server.url], place)
    assert server.adapters == []
    assert sorted(path.name for path in killed.iterdir()) == ["notes.txt", "owner.json"]
    third.close()
    first.close()
    assert len(list(place.iterdir())) == 5


def test_a_name_never_belongs_to_two_sets_of_weights(base, lanes, server, tmp_path):
    engine = engine_of(base, [server.url], tmp_path / "adapters")
    names = set()
    for seed in range(3):  # ranks of several runs are verified under one reference, canaries of several kinds as well
        own = weights(lanes, seed)
        ref = publish(engine, own, run="rank 4")
        server.asked.clear()
        asked = requests(ref)
        assert apart(base, lanes, own, asked, engine.sample(asked)) < 1e-5
        names |= {body["model"] for body in server.asked}
        engine.forget()
    assert len(names) == 3
    engine.close()


# -- faults ---------------------------------------------------------------------------------------------------------


def changed(**values):
    """The true answer with these things changed in its choice."""

    def fault(status, payload):
        payload = json.loads(json.dumps(payload))
        choice = payload["choices"][0]
        for key, change in values.items():
            place = choice["logprobs"] if key == "token_logprobs" else payload if key == "model" else choice
            place[key] = change(place[key])
        return status, json.dumps(payload).encode()

    return fault


FAULTS = {
    "HTTP 500 out of order": lambda status, payload: (500, {"error": {"message": "out of order"}}),
    "HTTP 503 busy": lambda status, payload: (503, b"busy"),
    "no completion with log-probabilities": lambda status, payload: (200, {"choices": []}),
    "no JSON: <html>": lambda status, payload: (200, b"<html>"),
    "model 'base' answered, where 'run@0.": changed(model=lambda name: "base"),
    "the prompt came back as 4 other token ids": changed(prompt_token_ids=lambda own: [*own, 3]),
    "the prompt came back as 3 other token ids": changed(prompt_token_ids=lambda own: own[::-1]),
    "tokens, where 1 to 8 were asked for": changed(token_ids=lambda own: own * 9),
    "0 tokens, where": changed(token_ids=lambda own: []),
    "token id 99999, outside the vocabulary": changed(token_ids=lambda own: [99999, *own[1:]]),
    "token id '7', outside the vocabulary": changed(token_ids=lambda own: ["7", *own[1:]]),
    "log-probabilities for": changed(token_logprobs=lambda own: own[1:]),
    "log-probability nan": changed(token_logprobs=lambda own: [float("nan"), *own[1:]]),
    "log-probability None": changed(token_logprobs=lambda own: [None, *own[1:]]),
    "log-probability 0.1": changed(token_logprobs=lambda own: [0.1, *own[1:]]),
    'it ended by "abort"': changed(finish_reason=lambda own: "abort"),
    "of 8": changed(
        token_ids=lambda own: [5, 6], token_logprobs=lambda own: [-1.0, -1.0], finish_reason=lambda own: "length"
    ),
    "the server leaves the end token out": changed(
        token_ids=lambda own: [5, 6], token_logprobs=lambda own: [-1.0, -1.0], finish_reason=lambda own: "stop"
    ),
    "it went on after the end token": changed(
        token_ids=lambda own: [1, 6], token_logprobs=lambda own: [-1.0, -1.0], finish_reason=lambda own: "stop"
    ),
}


@pytest.mark.parametrize("words", list(FAULTS))
def test_a_fault_costs_a_retry_and_if_it_stays_the_step(engine, lanes, server, words):
    ref = publish(engine, weights(lanes, 1))
    asked = requests(ref, 2, 2)
    sound = ids(engine.sample(asked))
    server.asked.clear()
    server.faults.extend([FAULTS[words]] * 3)
    assert ids(engine.sample(asked)) == sound
    assert len(server.asked) == 4 + 3
    server.always = FAULTS[words]
    with pytest.raises(ServerFailed, match="asked for 5 times") as caught:
        engine.sample(requests(ref, 1, 1))
    assert words in str(caught.value)
    assert server.url in str(caught.value)
    assert caught.value.shared


def test_an_answer_that_never_comes_is_asked_for_again(base, lanes, server, tmp_path):
    engine = engine_of(base, [server.url], tmp_path / "adapters", timeout_s=2.0)
    ref = publish(engine, weights(lanes, 1))
    sound = ids(engine.sample(requests(ref)))
    server.faults.append(lambda status, payload: None)
    begin = time.monotonic()
    assert ids(engine.sample(requests(ref))) == sound
    assert time.monotonic() - begin > 2
    engine.close()


class ClosesIdle:
    """Passes connections on to a server, and closes each when a second request comes on it, as a server does whose
    keep-alive time is over at that moment. ``always``: also when the first comes."""

    def __init__(self, port: int):
        self.closed, self.always, self._target = 0, False, ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._pass_on, args=(self._listener.accept()[0],), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._target) as server:
            answered = False
            while True:
                for each in select.select([client, server], [], [])[0]:
                    data = each.recv(1 << 16)
                    if each is client and data and (answered or self.always):
                        self.closed += 1
                        return
                    if not data:
                        return
                    answered |= each is server
                    (server if each is client else client).sendall(data)

    def close(self) -> None:
        self._listener.close()


def test_a_connection_that_closes_as_a_request_comes_is_no_fault_of_the_server(
    base, lanes, server, tmp_path, monkeypatch
):
    """A fresh one that closes is not tried again at once."""
    monkeypatch.setattr(engine_module, "PAUSE_S", 0.01)
    messages: list[str] = []
    proxy = ClosesIdle(server.port)
    keys = {"patience_s": 0.2, "tell": lambda text, level: messages.append(text)}
    engine = engine_of(base, [proxy.url], tmp_path / "adapters", **keys)
    try:
        ref, asked = publish(engine, weights(lanes, 1)), len(server.asked)
        for _ in range(3):
            engine.sample(requests(ref, 1, 1))
        assert proxy.closed >= 3
        assert len(server.asked) == asked + 3
        assert messages == []
        proxy.always = True
        with pytest.raises(ServerFailed):
            engine.sample(requests(ref, 1, 1))
        assert "is left out" in messages[0]
    finally:
        proxy.always = False
        engine.close()
        proxy.close()


def test_a_server_that_has_forgotten_an_adapter_is_given_it_again(engine, lanes, server):
    ref = publish(engine, weights(lanes, 1))
    sound = ids(engine.sample(requests(ref)))
    server.forget()
    assert ids(engine.sample(requests(ref))) == sound


def test_a_refusal_is_not_repeated(engine, lanes, server):
    ref = publish(engine, weights(lanes, 1))
    server.always = lambda status, payload: (400, {"error": {"message": "LoRA is not enabled"}})
    with pytest.raises(ServerFailed, match=r"refuses: HTTP 400 LoRA is not enabled; start vLLM with --enable-lora"):
        engine.sample(requests(ref, 1, 1))
    assert len(server.asked) == 1
    with pytest.raises(ModelError, match=r"prompt has 2047 tokens, .* than the 2048 that .* holds: lower"):
        engine.sample([SampleRequest(ref, (5,) * 2047, 1, 8, 1.0, ("long",))])


def test_a_server_with_a_shorter_context_than_the_model_is_reported(base, lanes, model, tmp_path):
    """As with vLLM's --max-model-len: no request is sent, and the message names the server's context."""
    short = shutil.copytree(model, tmp_path / "short")
    write_json(short / "config.json", read_json(short / "config.json") | {"max_position_embeddings": 64})
    small = StandIn(short)
    engine = engine_of(base, [small.url], tmp_path / "adapters")
    ref = publish(engine, weights(lanes, 1))
    assert engine.sample([SampleRequest(ref, (5,) * 56, 1, 8, 1.0, ("fits",))])
    small.asked.clear()
    with pytest.raises(ModelError, match=r"has 57 tokens, .* max_tokens = 8 .* the 64 that the server holds: lower"):
        engine.sample([SampleRequest(ref, (5,) * 57, 1, 8, 1.0, ("long",))])
    assert not small.asked
    engine.close()
    small.close()


def test_a_server_that_is_not_there(base, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "START_PATIENCE_S", 1.0)
    with pytest.raises(
        UsageError, match=r"no server answers after 1 s:\n\[inference\] url http://127.0.0.1:9: Connect"
    ):
        engine_of(base, ["http://127.0.0.1:9"], tmp_path / "adapters")


def test_a_key_is_sent_and_repeated_nowhere(base, lanes, model, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "START_PATIENCE_S", 1.0)
    locked = StandIn(model, key="a-key-of-ours")
    with pytest.raises(UsageError, match=r"/v1/models: HTTP 401 .*the key is missing or wrong"):
        engine_of(base, [locked.url], tmp_path / "adapters", key="wrong-key")
    engine = engine_of(base, [locked.url], tmp_path / "adapters", key="a-key-of-ours")
    assert engine.sample(requests(publish(engine, weights(lanes, 1))))
    engine.close()
    locked.close()


# -- several addresses ----------------------------------------------------------------------------------------------


def test_several_servers_share_the_load_and_one_that_dies_comes_back(base, lanes, server, model, tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "PROBE_S", (0.05, 0.1))
    other, told = StandIn(model), []
    engine = engine_of(
        base, [server.url, other.url], tmp_path / "adapters", tell=lambda text, level: told.append((level, text))
    )
    ref = publish(engine, weights(lanes, 1))
    asked = requests(ref, 6, 4)
    sound = ids(engine.sample(asked))
    first, second = ([tuple(body["prompt"]) for body in each.asked] for each in (server, other))
    assert len(first) == len(second) == 12
    assert not set(first) & set(second)  # the rollouts of a prompt stay together
    other.stop()
    assert ids(engine.sample(asked)) == sound
    assert told[0][0] == "warning"
    assert told[0][1].startswith(f"{other.url} is left out: ")
    other.start()
    until(lambda: (("info", f"{other.url} is back")) in told)
    other.asked.clear()
    engine.forget_sequences()
    assert ids(engine.sample(asked)) == sound
    assert len(other.asked) == 12
    other.stop()
    server.stop()
    engine.pool.patience_s = 0.5
    with pytest.raises(ServerFailed, match=r"no server answers, for 0.5 s now .*patience_s.*ConnectError") as caught:
        engine.sample(asked)
    assert caught.value.shared
    server.start()
    until(lambda: engine.pool.servers[0].alive)
    assert ids(engine.sample(asked)) == sound  # nothing stays broken
    engine.close()
    other.service.close()


def test_adapters_of_a_server_that_was_briefly_away_are_taken_away(base, lanes, server, tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "PROBE_S", (0.05, 0.1))
    engine = engine_of(base, [server.url], tmp_path / "adapters")
    gone, kept = (publish(engine, weights(lanes, seed), run=f"run{seed}") for seed in (1, 2))
    asked = requests(kept)
    sound = ids(engine.sample([*asked, *requests(gone)]))[: len(asked)]
    (address,) = engine.pool.servers
    checks = []

    async def away_at_first():
        checks.append(sorted(server.adapters))
        return len(checks) > 2 and not engine._published.get(gone)

    monkeypatch.setattr(address, "check", away_at_first)
    on_loop(engine, engine.pool.doubt(address, "for a test"))
    engine.retire(gone)
    until(lambda: address.alive)
    assert [name.partition("@")[0] for name in server.adapters] == ["run2"]  # it stays: it is wanted
    assert len(checks[0]) == 2
    assert ids(engine.sample(asked)) == sound
    on_loop(engine, lost_and_found(address))
    engine.retire(kept)
    until(lambda: server.adapters == [])
    engine.close()


def on_loop(engine, work):
    """Have the engine's loop do this."""
    return asyncio.run_coroutine_threadsafe(work, engine._loop).result(30)


async def lost_and_found(address):
    address.lost()
    await address.found()
    address.alive = True


def test_closing_does_not_wait_for_a_server_that_never_answers(base, lanes, server, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "CLOSING_S", 0.3)
    engine = engine_of(base, [server.url], tmp_path / "adapters")
    ref = publish(engine, weights(lanes, 1))
    engine.sample(requests(ref))
    for seed in range(4):
        engine.sample(requests(publish(engine, weights(lanes, seed), 1 + seed), 1, 1))
    (address,) = engine.pool.servers

    async def never(*given):
        await asyncio.sleep(60)

    held = threading.Event()
    server.faults.append(lambda status, payload: held.wait(10) and (status, payload))
    server.asked.clear()
    with ThreadPoolExecutor(1) as pool:
        sampling = pool.submit(engine.sample, requests(ref, 1, 1))
        until(lambda: server.asked)
        engine.retire(ref)
        monkeypatch.setattr(address, "post", never)
        begin = time.monotonic()
        engine.close()
        assert time.monotonic() - begin < 5
        held.set()
        with pytest.raises(CancelledError):
            sampling.result(30)
    engine.retire(PolicyRef("run", 1))  # nothing is given to a loop that has ended
    engine.forget()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.sample(requests(publish(engine, weights(lanes, 1))))
    assert not (tmp_path / "adapters").exists()


def test_a_completion_that_ends_servers_is_not_asked_for_without_end(base, lanes, server, tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "PROBE_S", (0.01, 0.01))
    monkeypatch.setattr(engine_module, "LOSSES", 3)
    engine = engine_of(base, [server.url], tmp_path / "adapters")
    ref = publish(engine, weights(lanes, 1))
    (address,) = engine.pool.servers
    check, post, deaths = address.check, address.post, []

    async def dies(path, body, timeout_s=None):
        if path == "/v1/completions":
            deaths.append(path)
            assert len(deaths) < 10, "asked for without end"
            raise Away("ReadError")
        return await post(path, body, timeout_s)

    async def back_after_a_while():
        return address.alive is False and await check()

    monkeypatch.setattr(address, "post", dies)
    monkeypatch.setattr(address, "check", back_after_a_while)
    with pytest.raises(ServerFailed, match=r"was under way 3 times at a server that then went away, last http.*Read"):
        engine.sample(requests(ref, 1, 1))
    assert len(deaths) == 3
    engine.close()


@pytest.mark.parametrize("listed", [["a"], "<html>", None, {"data": "x"}, {"data": ["x"]}, {"data": [{"id": 3}]}])
def test_what_is_no_server_of_that_kind(base, server, tmp_path, monkeypatch, listed):
    get = Server.get

    async def other(self, path, timeout_s=None):
        return listed if path == "/v1/models" else await get(self, path, timeout_s)

    monkeypatch.setattr(Server, "get", other)
    words = "lists no model" if listed == {"data": [{"id": 3}]} else "no server of the kind .* or this is not its url"
    with pytest.raises(UsageError, match=rf"\[inference\] url {server.url}: /v1/models: .*{words}"):
        engine_of(base, [server.url], tmp_path / "adapters")


def test_nothing_ends_the_looking_for_a_server(base, lanes, server, tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "PROBE_S", (0.01, 0.01))
    told = []
    engine = engine_of(base, [server.url], tmp_path / "adapters", tell=lambda text, level: told.append(text))
    (address,) = engine.pool.servers
    look, surprises = address.look, [AttributeError("'list' object has no attribute 'get'"), Refused("no"), Away("x")]

    async def surprising():
        if surprises:
            raise surprises.pop(0)
        await look()

    monkeypatch.setattr(address, "look", surprising)
    engine._loop.call_soon_threadsafe(engine.pool.leave_out, address, "for a test")
    until(lambda: f"{server.url} is back" in told)
    assert f"{server.url} answers, and stays left out: no" in told
    assert engine.sample(requests(publish(engine, weights(lanes, 1))))
    engine.close()


# -- what is sent ---------------------------------------------------------------------------------------------------


def test_turns_of_a_rollout_stay_at_one_address_and_go_as_tokens(base, lanes, server, model, tmp_path):
    other = StandIn(model)
    engine = engine_of(base, [server.url, other.url], tmp_path / "adapters")
    ref = publish(engine, weights(lanes, 1))

    def turn(prompt, number):
        return [
            SampleRequest(ref, (*prompt, i), 1, 4, 1.0, ("t", i, "turn", number), sequences=((("t", i), 0),))
            for i in range(4)
        ]

    engine.sample(turn((5,), 0))
    homes = {body["prompt"][1]: each for each in (server, other) for body in each.asked}
    for each in (server, other):
        each.asked.clear()
    engine.sample(turn((5, 6), 1))
    assert {body["prompt"][2]: each for each in (server, other) for body in each.asked} == homes
    assert set(homes.values()) == {server, other}
    engine.close()
    other.close()


def test_bodies_say_everything_that_shapes_a_distribution():
    request = SampleRequest(PolicyRef("r", 3), (5, 6), 8, 10, 0.7, ("s",), top_p=0.9)
    ask = Ask(request, "r@3.x", "base", 2**63 + 5, (1, 2))
    body = DIALECTS["vllm"].body(ask)
    assert {**body, "logprobs": 0, "return_token_ids": True} == body
    sent = {key: body[key] for key in ("model", "prompt", "n", "seed", "temperature", "top_p", "top_k", "min_p")}
    assert sent == {
        "model": "r@3.x", "prompt": [5, 6], "n": 1, "seed": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 0,
        "min_p": 0.0,
    }  # fmt: skip
    assert (body["stop_token_ids"], body["skip_special_tokens"]) == ([1, 2], False)
    plain = DIALECTS["openai"].body(ask)
    assert not {"top_k", "min_p", "stop_token_ids", "skip_special_tokens"} & set(plain)
    assert plain["logprobs"] == 0
    other = DIALECTS["sglang"].body(ask)
    assert other["lora_path"] == "r@3.x"
    assert other["sampling_params"]["sampling_seed"] < 2**31
    assert other["sampling_params"]["no_stop_trim"] is True
    assert "lora_path" not in DIALECTS["sglang"].body(Ask(request, "base", "base", 1, ()))


def test_token_ids_by_their_names():
    choice = {"logprobs": {"tokens": ["token_id:7", "token_id:1"], "token_logprobs": [-1.0, -2.0]}}
    answer = DIALECTS["openai"].read({"model": "m", "choices": [choice | {"finish_reason": "stop"}]})
    assert (answer.token_ids, answer.prompt_ids) == ([7, 1], None)
    choice["logprobs"]["tokens"] = [" the", "token_id:1"]
    with pytest.raises(Faulty, match="texts of tokens and not their ids"):
        DIALECTS["openai"].read({"choices": [choice]})
    with pytest.raises(Faulty, match="no completion with log-probabilities"):
        DIALECTS["sglang"].read({"text": "hello"})


def test_a_server_sleeps_while_nobody_samples(base, lanes, server, tmp_path):
    server.naps = []
    engine = engine_of(base, [server.url], tmp_path / "adapters", sleeps=True)
    ref = publish(engine, weights(lanes, 1))
    engine.sample(requests(ref))
    engine.sample(requests(ref, 1, 1))
    assert server.naps == []  # between the turns of an episode it stays awake
    engine.forget_sequences()
    engine.forget_sequences()
    assert server.naps == ["/sleep?level=1"]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: engine.sample(requests(ref)), range(2)))
    assert server.naps == ["/sleep?level=1", "/wake_up"]
    engine.forget_sequences()
    engine.close()  # awake, as it was found
    assert server.naps == ["/sleep?level=1", "/wake_up"] * 2
    server.naps = None
    other = engine_of(base, [server.url], tmp_path / "adapters", sleeps=True)
    other.sample(requests(publish(other, weights(lanes, 1))))
    with pytest.raises(ServerFailed, match=r"cannot sleep: .* start vLLM with --enable-sleep-mode"):
        other.forget_sequences()
    other.close()
