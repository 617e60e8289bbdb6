"""``retrain serve``: what its answers say is what the model says, whoever else asks."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import shutil
import threading
import time

import pytest
import torch
from serving_cases import NAMES, World, events

from retrain.rng import stream_key
from retrain.serving.app import app_of
from retrain.serving.text import Writer

PROMPTS = [[5, 9, 17, 30, 41], [7, 80, 3], [12, 13, 14, 15, 16, 17, 18, 19]]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("serving"))
    yield world
    world.service.close()


def until_idle(world):
    """The engine's thread has seen that nothing is asked any more."""
    begin = time.monotonic()
    while world.service.batcher.load != (0, 0):
        time.sleep(0.001)
        assert time.monotonic() - begin < 30


def ids_of(answer):
    return [choice["token_ids"] for choice in answer["choices"]]


def asked(**more):
    return {"prompt": PROMPTS[0], "max_tokens": 40, "seed": 11, "return_token_ids": True, **more}


# -- what is said of the tokens ------------------------------------------------------------------------------------


def test_logprobs_are_those_of_a_forward_pass_with_all_adapters_in_one_batch(world):
    bodies = [
        {"model": model, "prompt": prompt, "max_tokens": 40, "seed": 5, "temperature": temperature, "n": 2,
         "logprobs": 0, "return_token_ids": True}
        for model in NAMES for prompt in PROMPTS for temperature in (1.0, 0.7)
    ]  # fmt: skip

    async def all_at_once(client):
        return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    lanes = set()
    whole = world.service.batcher._batches

    def watched():
        batches = whole()
        lanes.update(len({each.served.ref for each in batch}) for batch in batches)
        return batches

    world.service.batcher._batches = watched
    try:
        answers = world.run(all_at_once)
    finally:
        del world.service.batcher._batches
    assert max(lanes) == 3
    for body, answer in zip(bodies, answers, strict=True):
        for choice in answer.json()["choices"]:
            token_ids = choice["token_ids"]
            logprobs = world.fresh(body["model"], body["prompt"], token_ids, body["temperature"])
            expected = logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)


def test_the_likeliest_tokens_are_those_of_a_forward_pass(world):
    body = asked(model="two", temperature=0.7, logprobs=3, return_tokens_as_token_ids=True)
    choice = world.complete(**body)["choices"][0]
    best = world.fresh("two", PROMPTS[0], choice["token_ids"], 0.7).topk(3)
    for sampled, tops, ids, values in zip(
        choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], *best[::-1], strict=True
    ):
        expected = {f"token_id:{token}": value for token, value in zip(ids.tolist(), values.tolist(), strict=True)}
        assert {sampled, *expected} == set(tops)
        assert {token: tops[token] for token in expected} == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("cut", [{"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.6}])
def test_truncated_logprobs_are_over_what_is_kept(world, cut):
    choice = world.complete(**asked(model="one", logprobs=4, return_tokens_as_token_ids=True, **cut))["choices"][0]
    plain = world.fresh("one", PROMPTS[0], choice["token_ids"]).exp()
    for place, tops in enumerate(choice["logprobs"]["top_logprobs"]):
        kept = {int(token.removeprefix("token_id:")): value for token, value in tops.items() if value > -9999}
        best = plain[place].sort(descending=True)
        count = len(best.values)
        if "top_k" in cut:
            count = min(count, cut["top_k"])
        if "top_p" in cut:
            inside = best.values[:count] / best.values[:count].sum()
            count = int(((inside.cumsum(0) - inside) < cut["top_p"]).sum())
        if "min_p" in cut:
            count = int((best.values >= cut["min_p"] * best.values[0]).sum())
        total = best.values[:count].sum()
        assert set(kept) == set(best.indices[:count][:4].tolist()) | {choice["token_ids"][place]}
        for token, value in kept.items():
            assert value == pytest.approx(float((plain[place, token] / total).log()), abs=1e-4)


def test_greedy_takes_the_likeliest(world):
    choice = world.complete(**asked(model="one", temperature=0, logprobs=0))["choices"][0]
    assert choice["token_ids"] == world.fresh("one", PROMPTS[0], choice["token_ids"]).argmax(-1).tolist()


def test_echo_says_the_prompt_with_the_model_s_own_logprobs(world):
    body = {"model": "two", "prompt": PROMPTS[2], "temperature": 0.7, "echo": True, "logprobs": 2}
    alone = world.complete(**body, max_tokens=0)["choices"][0]
    expected = world.fresh("two", PROMPTS[2][:1], PROMPTS[2][1:])
    own = expected.gather(1, torch.tensor(PROMPTS[2][1:])[:, None])[:, 0].tolist()
    assert alone["logprobs"]["token_logprobs"][0] is None
    assert alone["logprobs"]["token_logprobs"][1:] == pytest.approx(own, abs=1e-4)
    assert [max(tops.values()) for tops in alone["logprobs"]["top_logprobs"][1:]] == pytest.approx(
        expected.max(-1).values.tolist(), abs=1e-4
    )
    assert alone["text"] == world.service.tokenizer.decode(PROMPTS[2])
    more = world.complete(**body, max_tokens=5, seed=3, return_token_ids=True)["choices"][0]
    said = world.complete(model="two", prompt=PROMPTS[2], temperature=0.7, max_tokens=5, seed=3)["choices"][0]
    assert more["text"] == alone["text"] + said["text"]
    assert len(more["logprobs"]["tokens"]) == len(PROMPTS[2]) + len(more["token_ids"])
    text = world.complete(prompt="key is 12", echo=True, max_tokens=0)["choices"][0]
    assert (text["text"], text["finish_reason"]) == ("key is 12", "length")


# -- seeds ---------------------------------------------------------------------------------------------------------


def test_a_seed_alone_decides_whatever_else_is_drawn(world):
    alone = {name: ids_of(world.complete(**asked(model=name, n=3))) for name in NAMES}
    for ids in alone.values():
        assert len({tuple(each) for each in ids}) == 3  # streams of their own
    others = [
        {"model": NAMES[k % 3], "prompt": PROMPTS[k % 3], "max_tokens": 3 + k % 50, "temperature": 0.5 + k / 50}
        for k in range(40)
    ]

    async def crowd(client):
        noise = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for body in others]
        await asyncio.sleep(0.05)  # some are under way
        answers = [await client.post("/v1/completions", json=asked(model=name, n=3)) for name in NAMES]
        assert all(answer.status_code == 200 for answer in await asyncio.gather(*noise))
        return [ids_of(answer.json()) for answer in answers]

    assert world.run(crowd) == list(alone.values())
    assert ids_of(world.complete(**asked(model="one"))) == alone["one"][:1]
    assert ids_of(world.complete(**asked(model="one", seed=12))) != alone["one"][:1]
    assert ids_of(world.complete(**asked(seed=None))) != ids_of(world.complete(**asked(seed=None)))


def test_one_seed_gives_every_prompt_its_own_noise(world):
    prompts = [[first, *PROMPTS[0]] for first in range(5, 35)]
    body = {"max_tokens": 1, "seed": 7, "temperature": 1e6, "return_token_ids": True}  # all tokens are equally likely

    def first_tokens(**more):
        return [token_ids[0] for token_ids in ids_of(world.complete(**{"prompt": prompts, **body, **more}))]

    tokens = first_tokens()
    assert len(set(tokens)) > 15  # one for all prompts, if the seed alone decided
    assert first_tokens() == tokens
    assert [first_tokens(prompt=prompt)[0] for prompt in prompts[:3]] == tokens[:3]
    assert first_tokens(seed=8) != tokens
    assert len(set(first_tokens(prompt=[prompts[0]] * 30, seed=None))) > 15
    several = first_tokens(n=20, prompt=prompts[:2])
    assert several[0] == tokens[0]
    assert several[20] == tokens[1]
    assert set(zip(several[:20], several[20:], strict=True)) != {(a, a) for a in several[:20]}


def test_pieces_draw_what_one_call_draws(world):
    """The engine asked for a whole completion says what the server says in pieces."""
    from retrain.engines.local import LocalEngine
    from retrain.engines.protocol import PolicyRef, SampleRequest
    from retrain.policy.local import LocalSnapshot

    engine = LocalEngine(world.service.base, world.service.lanes)
    ref = PolicyRef("one", 0)
    engine.publish(ref, LocalSnapshot(world.adapters["one"].frozen(), {}))
    request = SampleRequest(ref, tuple(PROMPTS[0]), 3, 90, 1.0, ("serve", 11, stream_key(*PROMPTS[0])))
    whole = [action.token_ids for action in engine.sample([request])[0]]
    assert ids_of(world.complete(**asked(model="one", n=3, max_tokens=90))) == whole


# -- streams -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [{}, {"stop": ["a", "12"]}, {"stop": "xyz"}, {"logprobs": 2, "n": 2}, {"echo": True, "logprobs": 0},
     {"stop": "w", "include_stop_str_in_output": True}, {"prompt": "12 + 34", "n": 3}],
    ids=str,
)  # fmt: skip
def test_a_streamed_completion_is_the_whole_one(world, more):
    body = asked(model="one", max_tokens=50, ignore_eos=True) | more
    whole, chunks = world.complete(**body), world.stream("/v1/completions", body)
    for choice in whole["choices"]:
        own = [each["choices"][0] for each in chunks if each["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in own) == choice["text"]
        assert [token for each in own for token in each["token_ids"]] == choice["token_ids"]
        assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        last = own[-1]
        assert (last["finish_reason"], last["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
        assert all(each["finish_reason"] is None for each in own[:-1])
        for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs") if "logprobs" in more else ():
            joined = [value for each in own for value in each["logprobs"][key]]
            if key == "top_logprobs":
                assert len(joined) == len(choice["logprobs"][key])
            else:
                assert joined == pytest.approx(choice["logprobs"][key], abs=1e-4) if key == "token_logprobs" else (
                    joined == choice["logprobs"][key]
                )  # fmt: skip
    assert len(chunks) > len(whole["choices"])


def test_a_streamed_chat_is_the_whole_one(world):
    body = {"messages": [{"role": "user", "content": "check the key"}], "model": "two", "seed": 4, "n": 2,
            "max_tokens": 40, "return_token_ids": True, "logprobs": True, "top_logprobs": 1,
            "stream_options": {"include_usage": True}}  # fmt: skip
    chunks = world.stream("/v1/chat/completions", body)
    whole = world.chat("check the key", **{key: body[key] for key in body if key not in ("messages", "stream_options")})
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for choice in whole["choices"]:
        own = [each["choices"][0] for each in chunks[2:-1] if each["choices"][0]["index"] == choice["index"]]
        assert "".join(each["delta"]["content"] for each in own) == choice["message"]["content"]
        assert [token for each in own for token in each["token_ids"]] == choice["token_ids"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        said = [token for each in own for token in each["logprobs"]["content"]]
        assert [each["logprob"] for each in said] == pytest.approx(
            [each["logprob"] for each in choice["logprobs"]["content"]], abs=1e-4
        )
        assert all(len(each["top_logprobs"]) == 1 for each in said)


def written(tokenizer, token_ids, **stops):
    """What a writer says of one token after the other, the last one included."""
    writer = Writer(tokenizer, **stops)
    return [writer.add([token], last=place == len(token_ids) - 1) for place, token in enumerate(token_ids)]


def test_text_that_may_be_a_stop_is_held_back(world):
    token_ids = [world.service.tokenizer(letter)["input_ids"][0] for letter in "abcd"]
    assert written(world.service.base.text, token_ids) == ["a", "b", "c", "d"]
    assert written(world.service.base.text, token_ids, stops=["xy", "bcz"]) == ["", "", "a", "bcd"]


def test_half_of_a_character_waits_for_the_other(world):
    token_ids = [token for letter in "é€" for token in world.service.tokenizer(letter)["input_ids"]]
    assert len(token_ids) == 5
    assert written(world.service.base.text, token_ids) == ["", "é", "", "", "€"]
    assert written(world.service.base.text, token_ids[:3]) == ["", "é", "�"]


def test_a_stream_says_things_while_they_are_drawn(world):
    """The first event is there before the last token is drawn."""
    seen = []

    async def read(client):
        body = asked(model="one", max_tokens=400, ignore_eos=True, stream=True)
        tell = world.service.batcher._piece

        def slowly(generation, action):
            time.sleep(0.01)
            seen.append("drawn")
            return tell(generation, action)

        world.service.batcher._piece = slowly
        drawing = app_of(world.service)

        async def send(message):
            if message.get("body"):
                seen.append("sent")

        sent = json.dumps(body).encode()
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/completions", "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")], "scheme": "http",
            "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "root_path": "",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
        }  # fmt: skip
        messages = [{"type": "http.request", "body": sent, "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            await asyncio.sleep(60)

        try:
            await drawing(scope, receive, send)
        finally:
            del world.service.batcher._piece

    world.run(read)
    assert seen.count("drawn") >= 25
    assert seen.index("sent") < 4
    assert "drawn" in seen[seen.index("sent") :]


# -- how completions end -------------------------------------------------------------------------------------------


def test_the_length_and_the_end_token(world):
    end = world.service.base.eos_ids[0]
    for model in NAMES:
        answer = world.complete(**asked(model=model, n=8, max_tokens=200))
        for choice in answer["choices"]:
            stopped = choice["token_ids"][-1] == end
            assert choice["finish_reason"] == ("stop" if stopped else "length")
            assert stopped or len(choice["token_ids"]) == 200
            assert end not in choice["token_ids"][:-1]
            assert "<end>" not in choice["text"]
        assert answer["usage"]["completion_tokens"] == sum(map(len, ids_of(answer)))
        assert answer["usage"]["prompt_tokens"] == len(PROMPTS[0])
        on = ids_of(world.complete(**asked(model=model, n=8, max_tokens=200, ignore_eos=True)))
        for one, longer in zip(ids_of(answer), on, strict=True):
            assert len(longer) == 200
            assert longer[: len(one)] == one


def test_stops_of_the_request(world):
    plain = world.complete(**asked(model="one", ignore_eos=True))["choices"][0]
    token = plain["token_ids"][20]
    cut = world.complete(**asked(model="one", ignore_eos=True, stop_token_ids=[token]))["choices"][0]
    first = plain["token_ids"].index(token)
    assert cut["token_ids"] == plain["token_ids"][: first + 1]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", token)
    assert plain["text"].startswith(cut["text"])
    stop = plain["text"][7:10]
    for keep in (False, True):
        cut = world.complete(**asked(model="one", ignore_eos=True, stop=[stop], include_stop_str_in_output=keep))[
            "choices"
        ][0]
        assert cut["text"] == plain["text"][: plain["text"].index(stop) + len(stop) * keep]
        assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
        assert plain["token_ids"][: len(cut["token_ids"])] == cut["token_ids"]


# -- chats ---------------------------------------------------------------------------------------------------------


def test_a_chat_reads_the_model_s_template(world):
    answer = world.chat("what is 12 + 34?", model="one", max_tokens=9, seed=2, return_token_ids=True)
    text = "<turn>what is 12 + 34?<turn>"
    assert answer["prompt_token_ids"] == world.service.tokenizer(text)["input_ids"]
    same = world.complete(prompt=text, model="one", max_tokens=9, seed=2, return_token_ids=True)
    assert ids_of(answer) == ids_of(same)
    assert answer["choices"][0]["message"]["content"] == same["choices"][0]["text"]
    parts = [{"type": "text", "text": "what is"}, {"type": "text", "text": "it?"}]
    tokens = world.post("/tokenize", {"messages": [{"role": "user", "content": parts}]}).json()["tokens"]
    assert world.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "<turn>what is\nit?<turn>"
    unbounded = world.chat("key", model="two", seed=1)["choices"][0]
    assert unbounded["finish_reason"] in ("stop", "length")


QUESTION = "38*47+29*6=?"


def test_tools_are_called():
    """The bundled tool user, which knows the calculator, calls it, and its answer can go back."""
    from retrain.policy.base import load_base
    from retrain.serving.service import Service

    world = World.__new__(World)
    world.service = Service(load_base("tiny-tool-user", devices="cpu", dtype="float32"))
    world.app = app_of(world.service)
    try:
        tool = {"type": "function", "function": {"name": "calculator", "parameters": {
            "type": "object", "properties": {"expression": {"type": "string"}}}}}  # fmt: skip
        body = {"tools": [tool], "seed": 1, "n": 4, "max_tokens": 60}
        choices, texts = world.chat(QUESTION, **body)["choices"], world.chat(QUESTION, **body, tool_choice="none")
        asked = {"messages": [{"role": "user", "content": QUESTION}], **body}
        deltas = [event["choices"][0] for event in world.stream("/v1/chat/completions", asked)]
        calls = 0
        for index, (choice, plain) in enumerate(zip(choices, texts["choices"], strict=True)):
            [last] = [each for each in deltas if each["index"] == index and each["finish_reason"]]
            assert last["finish_reason"] == choice["finish_reason"]
            text = plain["message"]["content"]
            assert "tool_calls" not in plain["message"]
            if not text.startswith("```tool"):
                assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
                assert last["delta"] == {"content": text}
                continue
            calls += 1
            assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
            [call] = choice["message"]["tool_calls"]
            expression = json.loads(call["function"]["arguments"])["expression"]
            assert text == f'```tool\ncalculator(expression="{expression}")\n```'
            assert last["delta"]["tool_calls"][0]["function"] == call["function"]
            back = [*asked["messages"], choice["message"],
                    {"role": "tool", "tool_call_id": call["id"], "content": "1786"}]  # fmt: skip
            answer = world.post("/v1/chat/completions", {"messages": back, "tools": [tool], "max_tokens": 9})
            assert answer.status_code == 200, answer.text
        assert 0 < calls < 4
    finally:
        world.service.close()


# -- what is refused -----------------------------------------------------------------------------------------------

SURROGATE = "\\ud800"
MALFORMED = [
    (b"", None), (b"{", None), (b"[]", None), (b"null", None), (b"\xff\xfe", None), (b'{"prompt": NaN}', None),
    (b"[" * 100_000, None), (b'{"a":' * 100_000, None), (b'{"seed": ' + b"9" * 5000 + b"}", None),
    ({}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"),
    ({"prompt": 3}, "prompt"), ({"prompt": [1, "a"]}, "prompt"), ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"), ({"prompt": [-1]}, "prompt"), ({"prompt": [10**30]}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"), ({"prompt": {"a": 1}}, "prompt"),
    (b'{"prompt": "' + SURROGATE.encode() + b'"}', "prompt"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": "9"}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"), ({"max_tokens": True}, "max_tokens"), ({"max_tokens": 10**9}, "max_tokens"),
    ({"n": 0}, "n"), ({"n": 10**9}, "n"), ({"n": 2, "temperature": 0}, "n"),
    ({"temperature": -0.1}, "temperature"), ({"temperature": "1"}, "temperature"), ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"), ({"top_k": -2}, "top_k"), ({"min_p": 2}, "min_p"), ({"seed": 2**63}, "seed"),
    ({"seed": "1"}, "seed"), ({"logprobs": -1}, "logprobs"), ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"), ({"stop": 3}, "stop"), ({"stop": [3]}, "stop"), ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 65}, "stop"), ({"stop_token_ids": ["a"]}, "stop_token_ids"), ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"), ({"echo": 1}, "echo"), ({"model": 3}, "model"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"), ({"presence_penalty": 1}, "presence_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"), ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"min_tokens": 2}, "min_tokens"), ({"best_of": 4}, "best_of"), ({"suffix": "x"}, "suffix"),
    ({"response_format": {"type": "json_object"}}, "response_format"), ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"use_beam_search": True}, "use_beam_search"), ({"bad_words": ["x"]}, "bad_words"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), MALFORMED, ids=lambda value: str(value)[:40])
def test_malformed_completions_are_refused_in_openai_s_words(world, body, param):
    if isinstance(body, dict) and body and "prompt" not in body:
        body = {"prompt": [5, 6], **body}
    answer = world.post("/v1/completions", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert (error["type"], error["code"], error["param"]) == ("BadRequestError", 400, param)


USER = {"role": "user", "content": "hello"}


def called(arguments):
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"), ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"),
        ({"messages": [3]}, "messages"), ({"messages": [{}]}, "messages"),
        ({"messages": [{"role": "king"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages"),
        ({"messages": [called("{")]}, "messages"), ({"messages": [called("[]")]}, "messages"),
        ({"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [USER], "logprobs": 1}, "logprobs"), ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
        ({"messages": [USER], "max_completion_tokens": 10**9}, "max_tokens"),
        ({"messages": [USER], "tools": [{}]}, "tools"), ({"messages": [USER], "tools": {}}, "tools"),
        ({"messages": [USER], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [USER], "tool_choice": {"a": 1}}, "tool_choice"),
        ({"messages": [USER], "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": [USER], "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        ({"messages": [USER], "add_generation_prompt": False}, "add_generation_prompt"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_malformed_chats_are_refused(world, body, param):
    answer = world.post("/v1/chat/completions", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_models_and_paths_that_are_not_there(world):
    for path, body in (
        ("/v1/completions", {"prompt": "a", "model": "three"}),
        ("/v1/chat/completions", {"messages": [USER], "model": "three"}),
        ("/tokenize", {"prompt": "a", "model": "three"}),
        ("/v1/unload_lora_adapter", {"lora_name": "three"}),
        ("/v1/nothing", {}),
    ):
        answer = world.post(path, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)
    assert world.run(lambda client: client.get("/v1/completions")).status_code == 405
    plain = world.run(lambda client: client.post("/v1/completions", content=b"{}"))
    assert plain.status_code == 415


def test_only_this_machine_or_who_has_the_key(world):
    elsewhere = {"Host": "evil.example"}
    assert world.run(lambda client: client.get("/v1/models", headers=elsewhere)).status_code == 403
    keyed = app_of(world.service, "se-cret")
    for headers, status in (
        ({}, 401), ({"Authorization": "Bearer se-creT"}, 401), ({"Authorization": "Basic se-cret"}, 401),
        ({"Authorization": "Bearer se-cret", **elsewhere}, 200), ({"Authorization": "bearer se-cret"}, 200),
    ):  # fmt: skip
        answer = world.run(lambda client, headers=headers: client.get("/v1/models", headers=headers), keyed)
        assert answer.status_code == status, headers
    for path in ("/v1/load_lora_adapter", "/v1/completions", "/tokenize"):
        assert world.post(path, {}, keyed).status_code == 401
    assert world.run(lambda client: client.get("/health", headers=elsewhere), keyed).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_body_longer_than_any_prompt_of_the_context_is_refused_with_the_limit(world, path):
    longest_token = max(map(len, world.service.tokenizer.get_vocab()))
    longest_prompt = world.service.base.context_length * longest_token * len("\\u0061")
    refused = world.post(path, {"prompt": "a" * (longest_prompt + (2 << 20))})
    assert refused.status_code == 413
    limit = int(re.search(r"more than (\d+) bytes", refused.json()["error"]["message"]).group(1))
    assert longest_prompt < limit < longest_prompt + (2 << 20)

    async def undeclared():
        for _ in range(limit // 50_000 + 1):
            yield b" " * 50_000

    headers = {"Content-Type": "application/json"}
    assert world.run(lambda client: client.post(path, content=undeclared(), headers=headers)).status_code == 413


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_health_answers_while_a_long_text_is_tokenised(world, path):
    text = "12 + 34 = " * 60_000
    body = {"prompt": text} if "chat" not in path else {"messages": [{"role": "user", "content": text}]}

    async def ask(client):
        asked, answers = asyncio.ensure_future(client.post(path, json=body)), 0
        while not asked.done():
            await asyncio.sleep(0.01)
            answers += (await client.get("/health")).status_code == 200
        return await asked, answers

    answer, answers = world.run(ask)
    if path == "/tokenize":
        assert answer.json()["tokens"] == world.service.base.tokenizer(text)["input_ids"]
    else:
        assert "maximum context length" in answer.json()["error"]["message"]
    assert answers >= 5


# -- adapters come and go ------------------------------------------------------------------------------------------


def test_adapters_are_loaded_and_unloaded_while_requests_run(world, tmp_path):
    """What runs ends with the weights that it began with; the name is gone at once, and comes back with others."""
    expected = {name: ids_of(world.complete(**asked(model=name, max_tokens=120, ignore_eos=True))) for name in NAMES}

    async def traffic(client):
        async def post(path, **body):
            return await client.post(path, json=body)

        for name in ("one", "two"):
            path = str(world.directories[name])
            assert (await post("/v1/load_lora_adapter", lora_name="new", lora_path=path)).status_code == 200
            body = asked(max_tokens=120, ignore_eos=True)
            running = [
                asyncio.ensure_future(post("/v1/completions", **{**body, "model": model}))
                for model in ("base", "one", "two", "new", "new")
            ]
            await asyncio.sleep(0.05)
            assert (await post("/v1/unload_lora_adapter", lora_name="new")).status_code == 200
            gone = await post("/v1/completions", **{**body, "model": "new"})
            assert (gone.status_code, gone.json()["error"]["param"]) == (404, "model")
            answers = [ids_of((await each).json()) for each in running]
            assert answers == [expected[each] for each in ("base", "one", "two", name, name)]

    world.run(traffic)
    world.post("/v1/completions", asked())  # the engine has looked at what is retired
    assert {ref.run_id.split("\x1f")[0] for ref in world.service.engine._published} == set(NAMES)


def test_loading_says_what_is_wrong(world, tmp_path):
    one = world.directories["one"]

    def load(**body):
        return world.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(one), **body})

    again = load(lora_name="one")
    assert again.status_code == 400
    assert "already been loaded" in again.json()["error"]["message"]
    assert load(lora_name="base").status_code == 400
    assert load(lora_name="").status_code == 400
    assert load(lora_path="/nowhere").status_code == 404
    assert load(lora_path="a\x00b").status_code == 404
    assert load(lora_path=str(tmp_path)).status_code == 400
    assert load(files={}).status_code == 400
    for damage in ("cut", "json", "rank", "alpha", "names", "shape", "nan"):
        broken = tmp_path / damage
        shutil.copytree(one, broken)
        weights = broken / "adapter_model.safetensors"
        if damage == "cut":
            weights.write_bytes(weights.read_bytes()[:-100])
        elif damage == "json":
            (broken / "adapter_config.json").write_text('{"lora_alpha": "much"}')
        elif damage in ("rank", "alpha"):
            config = json.loads((broken / "adapter_config.json").read_text())
            config |= {"r": 1_000_000_000} if damage == "rank" else {"lora_alpha": 1e308}
            (broken / "adapter_config.json").write_text(json.dumps(config))
        else:
            from safetensors.torch import load_file, save_file

            tensors = load_file(weights)
            key = next(iter(tensors))
            if damage == "names":
                tensors = {name.replace("q_proj", "r_proj"): tensor for name, tensor in tensors.items()}
            elif damage == "shape":
                tensors[key] = torch.zeros(tensors[key].shape[0], tensors[key].shape[1] + 1)
            else:
                tensors[key][0, 0] = float("nan")
            save_file(tensors, weights)
        answer = load(lora_path=str(broken))
        assert answer.status_code == 400, (damage, answer.text)
        assert answer.json()["error"]["message"]
    cards = world.run(lambda client: client.get("/v1/models")).json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("base", None), ("one", "base"), ("two", "base")]
    assert cards[0]["max_model_len"] == 2048


def test_adapters_in_place_and_uploaded(world):
    def files(name):
        return {
            path.name: base64.b64encode(path.read_bytes()).decode()
            for path in world.directories[name].iterdir()
            if path.name in ("adapter_config.json", "adapter_model.safetensors")
        }

    expected = {name: ids_of(world.complete(**asked(model=name))) for name in NAMES}
    for name, in_place in (("one", False), ("two", True)):
        body = {"lora_name": "up", "files": files(name), "load_inplace": in_place}
        assert world.post("/v1/load_lora_adapter", body).status_code == 200
        assert ids_of(world.complete(**asked(model="up"))) == expected[name]
    for wrong in ({"adapter_config.json": "e30="}, {**files("one"), "../x": "e30="},
                  {**files("one"), "adapter_config.json": "!"}):  # fmt: skip
        body = {"lora_name": "y", "files": wrong}
        assert world.post("/v1/load_lora_adapter", body).status_code == 400
    assert world.post("/v1/unload_lora_adapter", {"lora_name": "up"}).status_code == 200
    assert world.post("/v1/unload_lora_adapter", {"lora_name": "up"}).status_code == 404


def test_an_adapter_of_some_layers_leaves_the_others_alone(world, tmp_path):
    """As peft computes it."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    directory = world.service.base.name
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(directory)
    made = get_peft_model(
        model, LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], init_lora_weights=False,
                          use_rslora=True),
    )  # fmt: skip
    made.save_pretrained(tmp_path / "some")
    world.post("/v1/load_lora_adapter", {"lora_name": "some", "lora_path": str(tmp_path / "some")}).raise_for_status()
    choice = world.complete(**asked(model="some", logprobs=0))["choices"][0]
    world.post("/v1/unload_lora_adapter", {"lora_name": "some"}).raise_for_status()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(directory), tmp_path / "some")
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPTS[0], *choice["token_ids"]]])).logits[0, len(PROMPTS[0]) - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(choice["token_ids"])[:, None])[:, 0]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs.tolist(), abs=1e-4)


# -- bounds --------------------------------------------------------------------------------------------------------


def test_the_queue_is_bounded_and_time_too(tmp_path):
    world = World(tmp_path, max_queue=8, max_rows=4, timeout_s=0.4)
    try:
        assert world.post("/v1/completions", asked(n=9)).status_code == 400

        async def flood(client):
            bodies = [asked(n=2, max_tokens=1500, ignore_eos=True, seed=k) for k in range(20)]
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

        piece = world.service.batcher._piece
        world.service.batcher._piece = lambda *given: time.sleep(0.02) or piece(*given)
        begin = time.monotonic()
        answers = world.run(flood)
        assert time.monotonic() - begin < 60
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {503, 504}
        assert all(answer.headers["Retry-After"] for answer in answers if answer.status_code == 503)
        world.service.batcher._piece = piece
        assert world.post("/v1/completions", asked(max_tokens=4)).status_code == 200
        until_idle(world)
        assert len(world.service.engine.kept) == 0
    finally:
        world.service.close()


@pytest.mark.parametrize("stream", [False, True])
def test_who_has_left_is_drawn_for_no_longer(world, stream):
    async def leave(client):
        body = asked(n=4, max_tokens=1500, ignore_eos=True, stream=stream)
        asking = asyncio.ensure_future(client.post("/v1/completions", json=body))
        while world.service.batcher.load[0] < 4:
            await asyncio.sleep(0.001)
        drawn = list(world.service.batcher._active)
        asking.cancel()
        begin = time.monotonic()
        while world.service.batcher.load != (0, 0):
            await asyncio.sleep(0.001)
            assert time.monotonic() - begin < 30
        assert [len(each.token_ids) < 1500 for each in drawn] == [True] * 4

    world.run(leave)
    assert world.post("/v1/completions", asked(max_tokens=4)).status_code == 200


def test_a_batch_that_fails_ends_its_requests_and_no_others(world, monkeypatch, capsys):
    sample = world.service.engine.sample

    def failing(requests):
        monkeypatch.setattr(world.service.engine, "sample", sample)
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(world.service.engine, "sample", failing)
    answer = world.post("/v1/completions", asked())
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "InternalServerError")
    assert "broken on purpose" not in answer.text
    assert "broken on purpose" in capsys.readouterr().err
    monkeypatch.setattr(world.service.engine, "sample", failing)
    [event] = events(world.post("/v1/completions", asked(stream=True)).text)
    assert event["error"]["code"] == 500
    assert world.post("/v1/completions", asked()).status_code == 200


def test_a_client_that_leaves_while_its_text_waits_to_be_scored_ends_nothing(world):
    held, begun = threading.Event(), threading.Event()
    body = {"model": "one", "prompt": PROMPTS[0], "max_tokens": 0, "echo": True, "logprobs": 1}

    async def leave(client):
        for busy in (True, False):  # while the engine does something else, and in the midst of it
            held.clear()
            begun.clear()
            occupied = world.service.batcher.call(lambda: begun.set() or held.wait(30))
            await asyncio.to_thread(begun.wait, 30)
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            async with asyncio.timeout(30):
                while not world.service.batcher._tasks:
                    await asyncio.sleep(0.001)
            if not busy:
                held.set()
                await asyncio.wrap_future(occupied)
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
            held.set()
            await asyncio.wait_for(asyncio.wrap_future(world.service.batcher.call(lambda: None)), 10)
        return await client.post("/v1/completions", json=body)

    assert world.run(leave).status_code == 200
    assert world.service.batcher.failure == ""


def test_a_failing_task_and_an_unreadable_completion_end_nothing(world, capfd):
    piece = world.service.batcher._piece
    world.service.batcher._piece = lambda *given: 1 / 0
    try:
        assert world.post("/v1/completions", asked()).status_code == 500
    finally:
        world.service.batcher._piece = piece
    assert world.service.batcher.call(lambda: 7).result(30) == 7
    assert world.complete(**asked())["choices"]
    assert "ZeroDivisionError" in capfd.readouterr().err
