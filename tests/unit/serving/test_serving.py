import asyncio
import base64
import json
import os
import re
import shutil
import threading
import time
from http.client import HTTPConnection

import numpy as np
import pytest
import torch
from helpers.campaigns import eventually
from helpers.servers import NAMES, World, events
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from retrain.engines.local import LocalEngine
from retrain.policy.base import load_base
from retrain.policy.local import LocalSnapshot
from retrain.rng import stream_key
from retrain.serving.app import app_of
from retrain.serving.batching import GenerationState
from retrain.serving.listening import HttpServer, listening_socket
from retrain.serving.schema import SamplingBody
from retrain.serving.service import Service
from retrain.types import Action, PolicyRef, SampleRequest

PROMPTS = [[5, 9, 17, 30, 41], [7, 80, 3], [12, 13, 14, 15, 16, 17, 18, 19]]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("serving"))
    yield world
    world.service.close()


def ids_of(answer):
    return [choice["token_ids"] for choice in answer["choices"]]


def logprobs_of(logprobs_TV, token_ids):
    return logprobs_TV.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()


def asked(**more):
    return {"prompt": PROMPTS[0], "max_tokens": 40, "seed": 11, "return_token_ids": True, **more}


def complete_all(world, bodies):
    async def post_all(client):
        return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    return world.run(post_all)


def test_logprobs_are_those_of_a_forward_pass_with_all_adapters_in_one_batch(world, monkeypatch):
    bodies = [
        {"model": model, "prompt": prompt, "max_tokens": 30, "seed": 5, "temperature": temperature, "n": 2,
         "logprobs": 0, "return_token_ids": True}
        for model in NAMES for prompt in PROMPTS for temperature in (1.0, 0.7)
    ]  # fmt: skip
    lanes = set()
    make_batches = world.service.batcher._batches

    def observed():
        batches = make_batches()
        lanes.update(len({generation.served.ref for generation in batch}) for batch in batches)
        return batches

    monkeypatch.setattr(world.service.batcher, "_batches", observed)
    answers = complete_all(world, bodies)
    assert max(lanes) == 3
    for body, answer in zip(bodies, answers, strict=True):
        for choice in answer.json()["choices"]:
            token_ids = choice["token_ids"]
            logprobs = world.fresh(body["model"], body["prompt"], token_ids, body["temperature"])
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs_of(logprobs, token_ids), abs=1e-4)


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.6}], ids=str)
def test_the_likeliest_tokens_have_logprobs_over_what_is_kept(world, cut):
    body = asked(model="one", temperature=0.7, logprobs=4, return_tokens_as_token_ids=True, **cut)
    choice = world.complete(**body)["choices"][0]
    plain = world.fresh("one", PROMPTS[0], choice["token_ids"], 0.7).exp()
    for place, tops in enumerate(choice["logprobs"]["top_logprobs"]):
        kept = {int(token.removeprefix("token_id:")): value for token, value in tops.items() if value > -9999}
        best = plain[place].sort(descending=True)
        count = min(len(best.values), cut.get("top_k", len(best.values)))
        if "top_p" in cut:
            inside = best.values[:count] / best.values[:count].sum()
            count = int(((inside.cumsum(0) - inside) < cut["top_p"]).sum())
        if "min_p" in cut:
            count = int((best.values >= cut["min_p"] * best.values[0]).sum())
        total = best.values[:count].sum()
        assert set(kept) == set(best.indices[:count][:4].tolist()) | {choice["token_ids"][place]}
        for token, value in kept.items():
            assert value == pytest.approx(float((plain[place, token] / total).log()), abs=1e-4)
    greedy = world.complete(**body | {"temperature": 0})["choices"][0]
    assert greedy["token_ids"] == world.fresh("one", PROMPTS[0], greedy["token_ids"]).argmax(-1).tolist()


def test_echo_repeats_the_prompt_with_the_model_s_own_logprobs(world):
    body = {"model": "two", "prompt": PROMPTS[2], "temperature": 0.7, "seed": 3}
    scored = world.complete(**body, echo=True, logprobs=2, max_tokens=0)["choices"][0]
    expected = world.fresh("two", PROMPTS[2][:1], PROMPTS[2][1:])
    assert scored["logprobs"]["token_logprobs"][0] is None
    assert scored["logprobs"]["token_logprobs"][1:] == pytest.approx(logprobs_of(expected, PROMPTS[2][1:]), abs=1e-4)
    tops = [max(tops.values()) for tops in scored["logprobs"]["top_logprobs"][1:]]
    assert tops == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)
    assert scored["text"] == world.service.base.tokenizer.decode(PROMPTS[2])
    longer = world.complete(**body, echo=True, logprobs=2, max_tokens=5, return_token_ids=True)["choices"][0]
    assert longer["text"] == scored["text"] + world.complete(**body, max_tokens=5)["choices"][0]["text"]
    assert len(longer["logprobs"]["tokens"]) == len(PROMPTS[2]) + len(longer["token_ids"])
    [chunk] = world.stream("/v1/completions", {**body, "echo": True, "max_tokens": 0})
    [part] = chunk["choices"]
    assert (part["text"], part["finish_reason"]) == (scored["text"], "length")


def test_a_seed_alone_decides_whatever_else_is_drawn(world):
    expected = {name: ids_of(world.complete(**asked(model=name, n=3))) for name in NAMES}
    for ids in expected.values():
        assert len({tuple(token_ids) for token_ids in ids}) == 3  # streams of their own
    others = [
        {"model": NAMES[k % 3], "prompt": PROMPTS[k % 3], "max_tokens": 3 + k % 50, "temperature": 0.5 + k / 50}
        for k in range(15)
    ]

    async def crowd(client):
        noise = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for body in others]
        await asyncio.sleep(0.05)  # some are under way
        answers = [await client.post("/v1/completions", json=asked(model=name, n=3)) for name in NAMES]
        assert all(answer.status_code == 200 for answer in await asyncio.gather(*noise))
        return [ids_of(answer.json()) for answer in answers]

    assert world.run(crowd) == list(expected.values())
    assert ids_of(world.complete(**asked(model="one"))) == expected["one"][:1]
    assert ids_of(world.complete(**asked(model="one", seed=12))) != expected["one"][:1]
    assert ids_of(world.complete(**asked(seed=None))) != ids_of(world.complete(**asked(seed=None)))


def test_one_seed_gives_every_prompt_its_own_noise(world):
    prompts = [[first, *PROMPTS[0]] for first in range(5, 35)]
    body = asked(prompt=prompts, max_tokens=1, temperature=1e6)  # all tokens are equally likely
    tokens = [token_ids[0] for token_ids in ids_of(world.complete(**body))]
    assert len(set(tokens)) > 15  # one for all prompts, if the seed alone decided
    assert ids_of(world.complete(**body | {"prompt": prompts[1]})) == [[tokens[1]]]


def test_pieces_draw_what_one_call_draws(world):
    """The engine asked for a whole completion says what the server says in pieces."""
    engine, ref = LocalEngine(world.service.base, world.service.lanes), PolicyRef("one", 0)
    engine.publish(ref, LocalSnapshot(world.adapters["one"].frozen()))
    request = SampleRequest(ref, tuple(PROMPTS[0]), 3, 90, 1.0, ("serve", 11, stream_key(*PROMPTS[0])))
    whole = [action.token_ids for action in engine.sample([request])[0]]
    assert ids_of(world.complete(**asked(model="one", n=3, max_tokens=90))) == whole


@pytest.mark.parametrize(
    "more", [{"stop": ["a", "12"]}, {"logprobs": 2, "n": 2}, {"echo": True, "logprobs": 0}], ids=str
)
def test_a_streamed_completion_is_the_whole_one(world, more):
    body = asked(model="one", max_tokens=50, ignore_eos=True) | more
    whole, chunks = world.complete(**body), world.stream("/v1/completions", body)
    for choice in whole["choices"]:
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        for key in ("finish_reason", "stop_reason"):
            assert [part[key] for part in parts] == [None] * (len(parts) - 1) + [choice[key]]
        for key, values in (choice["logprobs"] or {}).items():
            joined = [value for part in parts for value in part["logprobs"][key]]
            if key == "top_logprobs":  # these values differ by rounding
                assert len(joined) == len(values)
            else:
                assert joined == (pytest.approx(values, abs=1e-4) if key == "token_logprobs" else values)
    assert len(chunks) > len(whole["choices"])


def test_a_streamed_chat_is_the_whole_one(world):
    body = {"model": "two", "seed": 4, "n": 2, "max_tokens": 40, "return_token_ids": True, "logprobs": True,
            "top_logprobs": 1}  # fmt: skip
    whole = world.chat("check the key", **body)
    messages, options = [{"role": "user", "content": "check the key"}], {"include_usage": True}
    chunks = world.stream("/v1/chat/completions", {**body, "messages": messages, "stream_options": options})
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for choice in whole["choices"]:
        parts = [chunk["choices"][0] for chunk in chunks[2:-1] if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(part["delta"]["content"] for part in parts) == choice["message"]["content"]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        said = [token for part in parts for token in part["logprobs"]["content"]]
        expected = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert [token["logprob"] for token in said] == pytest.approx(expected, abs=1e-4)
        assert all(len(token["top_logprobs"]) == 1 for token in said)


def test_text_is_held_back_while_it_may_be_a_stop_or_is_half_a_character(world):
    tokenizer, model = world.service.tokenizer, world.service.find(None)

    def written(text, count=None, stop=()):
        """Return the text of one token after the other."""
        token_ids = [token for letter in text for token in tokenizer.source(letter)["input_ids"]][:count]
        body = SamplingBody(stop=list(stop), stream=True)
        generation = GenerationState(0, model, (1,), body, len(token_ids), (), tokenizer, asyncio.Queue())
        pieces = [generation.add(Action([token], "", np.zeros(1), None, "length"), tokenizer) for token in token_ids]
        return [generation.new_text(piece) for piece in pieces]

    assert written("abcd") == ["a", "b", "c", "d"]
    assert written("abcd", stop=["xy", "bcz"]) == ["", "", "a", "bcd"]
    assert written("é€") == ["", "é", "", "", "€"]
    assert written("é€", count=3) == ["", "é", "�"]


def test_the_length_the_end_token_and_stops(world):
    end = world.service.base.eos_ids[0]
    for model in ("base", "one"):
        answer = world.complete(**asked(model=model, n=6, max_tokens=100))
        longer = ids_of(world.complete(**asked(model=model, n=6, max_tokens=100, ignore_eos=True)))
        for choice, without_end in zip(answer["choices"], longer, strict=True):
            token_ids = choice["token_ids"]
            assert choice["finish_reason"] == ("stop" if token_ids[-1] == end else "length")
            assert token_ids[-1] == end or len(token_ids) == 100
            assert end not in token_ids[:-1]
            assert "<end>" not in choice["text"]
            assert len(without_end) == 100
            assert without_end[: len(token_ids)] == token_ids
        assert answer["usage"]["completion_tokens"] == sum(map(len, ids_of(answer)))
        assert answer["usage"]["prompt_tokens"] == len(PROMPTS[0])
    body = asked(model="one", ignore_eos=True)
    plain = world.complete(**body)["choices"][0]
    token, stop = plain["token_ids"][20], plain["text"][7:10]
    cut = world.complete(**body, stop_token_ids=[token])["choices"][0]
    assert cut["token_ids"] == plain["token_ids"][: plain["token_ids"].index(token) + 1]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", token)
    for keep in (False, True):
        cut = world.complete(**body, stop=[stop], include_stop_str_in_output=keep)["choices"][0]
        assert cut["text"] == plain["text"][: plain["text"].index(stop) + len(stop) * keep]
        assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)


def test_a_chat_reads_the_model_s_template(world):
    body = {"model": "one", "max_tokens": 9, "seed": 2, "return_token_ids": True}
    answer = world.chat("what is 12 + 34?", **body)
    text = "<turn>what is 12 + 34?<turn>"
    assert answer["prompt_token_ids"] == world.service.base.tokenizer(text)["input_ids"]
    same = world.complete(prompt=text, **body)
    assert ids_of(answer) == ids_of(same)
    assert answer["choices"][0]["message"]["content"] == same["choices"][0]["text"]
    parts = [{"type": "text", "text": "what is"}, {"type": "text", "text": "it?"}]
    tokens = world.post("/tokenize", {"messages": [{"role": "user", "content": parts}]}).json()["tokens"]
    assert world.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "<turn>what is\nit?<turn>"


def test_tools_are_called():
    """The bundled tool user, which knows the calculator, calls it, and its answer can go back."""
    world = World.of(Service(load_base("tiny-tool-user", devices="cpu", dtype="float32")))
    question = "38*47+29*6=?"
    tool = {"type": "function", "function": {"name": "calculator", "parameters": {
        "type": "object", "properties": {"expression": {"type": "string"}}}}}  # fmt: skip
    body = {"tools": [tool], "seed": 1, "n": 4, "max_tokens": 60}
    try:
        choices, texts = world.chat(question, **body)["choices"], world.chat(question, **body, tool_choice="none")
        messages, calls = [{"role": "user", "content": question}], 0
        chunks = [event["choices"][0] for event in world.stream("/v1/chat/completions", {"messages": messages, **body})]
        last = {chunk["index"]: chunk for chunk in chunks if chunk["finish_reason"]}
        for index, (choice, plain) in enumerate(zip(choices, texts["choices"], strict=True)):
            message, text = choice["message"], plain["message"]["content"]
            assert last[index]["finish_reason"] == choice["finish_reason"]
            assert "tool_calls" not in plain["message"]
            if not text.startswith("```tool"):
                assert (message["content"], choice["finish_reason"]) == (text, "stop")
                assert last[index]["delta"] == {"content": text}
                continue
            calls += 1
            assert (message["content"], choice["finish_reason"]) == (None, "tool_calls")
            [call] = message["tool_calls"]
            expression = json.loads(call["function"]["arguments"])["expression"]
            assert text == f'```tool\ncalculator(expression="{expression}")\n```'
            assert last[index]["delta"]["tool_calls"][0]["function"] == call["function"]
            back = [*messages, message, {"role": "tool", "tool_call_id": call["id"], "content": "1786"}]
            answer = world.post("/v1/chat/completions", {"messages": back, "tools": [tool], "max_tokens": 9})
            assert answer.status_code == 200, answer.text
        assert 0 < calls < 4
    finally:
        world.service.close()


MALFORMED = {
    None: [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}", b'{"prompt": "\\ud800"}',
    ],
    "prompt": [b"{}", b'{"prompt": NaN}', "", [], [[]], 3, [1, "a"], [1.5], [True], [-1],
               [10**30], ["a", [1]], {"a": 1}],
    "max_tokens": [0, -1, "9", 2.5, True, 10**9],
    "n": [0, 10**9],
    "temperature": [-0.1, "1"],
    "top_p": [0, 1.1],
    "top_k": [-2],
    "min_p": [2],
    "seed": [2**63, "1"],
    "logprobs": [-1, 21, True],
    "stop": [3, [3], [""], ["a"] * 65],
    "stop_token_ids": [["a"]],
    "stream": ["yes"],
    "stream_options": [{"include_usage": True}],
    "echo": [1],
    "model": [3],
    **{key: [value] for key, value in {
        "frequency_penalty": 0.5, "logit_bias": {"5": 1}, "best_of": 4, "response_format": {"type": "json_object"},
    }.items()},
}  # fmt: skip
USER = {"role": "user", "content": "hello"}


def called(arguments):
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


MALFORMED_CHATS = {
    "messages": [[], "hi", [3], [{}], [{"role": "king"}], [{"role": "user", "content": 3}],
                 [{"role": "user", "content": [{"type": "image_url"}]}],
                 [{"role": "user", "content": "a", "tool_calls": [{}]}],
                 [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}],
                 [{"role": "assistant", "tool_calls": 3}], [called("{")], [called("[]")], [called([])]],
    "top_logprobs": [2],
    "logprobs": [1],
    "max_tokens": [0],
    "tools": [[{}], {}],
    "tool_choice": ["required", {"a": 1}],
    "chat_template": ["{{ 1 }}"],
    "chat_template_kwargs": [{"tokenize": True}],
    "continue_final_message": [True],
    "add_generation_prompt": [False],
}  # fmt: skip


@pytest.mark.parametrize(("path", "sound", "malformed"), [
    ("/v1/completions", {"prompt": [5, 6]}, MALFORMED),
    ("/v1/chat/completions", {"messages": [USER]}, MALFORMED_CHATS),
], ids=["completions", "chats"])  # fmt: skip
def test_malformed_requests_are_refused_in_openai_s_words(world, path, sound, malformed):
    for param, values in malformed.items():
        for value in values:
            answer = world.post(path, value if isinstance(value, bytes) else {**sound, param: value})
            case = f"{param}: {str(value)[:60]}"
            assert answer.status_code == 400, (case, answer.text)
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, case
            assert error["message"], case
            assert (error["type"], error["code"], error["param"]) == ("BadRequestError", 400, param), case
    assert world.post("/v1/completions", {"prompt": "a", "n": 2, "temperature": 0}).json()["error"]["param"] == "n"


def test_nulls_and_values_without_effect_are_accepted(world):
    neutral = {
        "frequency_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}, "response_format": {"type": "text"},
        "best_of": 1, "suffix": "", "top_k": -1, "user": "somebody",
    }  # fmt: skip
    nulls = dict.fromkeys(("n", "temperature", "top_p", "stop", "stream", "logprobs", "echo", "prompt_logprobs"))
    assert ids_of(world.complete(**asked(), **neutral, **nulls)) == ids_of(world.complete(**asked()))
    chat = {"seed": 3, "max_tokens": 9, "return_token_ids": True}
    nulls = dict.fromkeys(("tools", "tool_choice", "top_logprobs", "max_completion_tokens", "chat_template_kwargs"))
    assert ids_of(world.chat(**chat, **nulls)) == ids_of(world.chat(**chat))


def test_models_paths_and_methods_that_are_not_there(world):
    bodies = {
        "/v1/completions": {"prompt": "a", "model": "three"},
        "/v1/chat/completions": {"messages": [USER], "model": "three"}, "/tokenize": {"prompt": "a", "model": "three"},
        "/v1/unload_lora_adapter": {"lora_name": "three"}, "/v1/nothing": {},
    }  # fmt: skip
    for path, body in bodies.items():
        answer = world.post(path, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)
    assert world.run(lambda client: client.get("/v1/completions")).status_code == 405
    assert world.run(lambda client: client.post("/v1/completions", content=b"{}")).status_code == 415


def test_only_this_machine_or_who_has_the_key(world):
    keyed, elsewhere = app_of(world.service, "se-cret"), {"Host": "evil.example"}

    def status(app=None, path="/v1/models", **headers):
        return world.run(lambda client: client.get(path, headers=headers), app).status_code

    assert status(**elsewhere) == 403
    assert [status(keyed, Authorization=key) for key in ("", "Bearer se-creT", "Basic se-cret")] == [401] * 3
    assert status(keyed, Authorization="bearer se-cret") == 200
    assert status(keyed, Authorization="Bearer se-cret", **elsewhere) == 200
    assert status(keyed, "/health", **elsewhere) == 200
    for path in ("/v1/load_lora_adapter", "/v1/completions", "/tokenize"):
        assert world.post(path, {}, keyed).status_code == 401


def test_a_body_longer_than_any_prompt_of_the_context_is_refused_with_the_limit(world):
    path = "/v1/completions"
    longest_token = max(map(len, world.service.base.tokenizer.get_vocab()))
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


def test_adapters_are_loaded_and_unloaded_while_requests_run(world):
    """Running requests end with the weights that they began with; the name is gone at once, and returns with others."""
    body = asked(max_tokens=60, ignore_eos=True)
    expected = {name: ids_of(world.complete(**body, model=name)) for name in NAMES}

    async def traffic(client):
        async def post(path, **body):
            return await client.post(path, json=body)

        for name in ("one", "two"):
            path = str(world.directories[name])
            assert (await post("/v1/load_lora_adapter", lora_name="new", lora_path=path)).status_code == 200
            models = ("base", "one", "new", "new")
            running = [asyncio.ensure_future(post("/v1/completions", **body, model=model)) for model in models]
            await asyncio.sleep(0.05)
            assert (await post("/v1/unload_lora_adapter", lora_name="new")).status_code == 200
            gone = await post("/v1/completions", **body, model="new")
            assert (gone.status_code, gone.json()["error"]["param"]) == (404, "model")
            answers = [ids_of((await request).json()) for request in running]
            assert answers == [expected[model] for model in ("base", "one", name, name)]

    world.run(traffic)
    world.post("/v1/completions", asked())  # the engine has dropped retired adapters
    assert {ref.run_id.split("\x1f")[0] for ref in world.service.engine._published} == set(NAMES)


def damage_weights(directory, change):
    tensors = load_file(directory / "adapter_model.safetensors")
    save_file(change(tensors), directory / "adapter_model.safetensors")


def damage_config(directory, **changes):
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


DAMAGES = {
    "cut": lambda folder: os.truncate(folder / "adapter_model.safetensors", 1000),
    "rank": lambda folder: damage_config(folder, r=1_000_000_000),
    "alpha": lambda folder: damage_config(folder, lora_alpha=1e308),
    "names": lambda folder: damage_weights(
        folder, lambda tensors: {name.replace("q_proj", "r_proj"): tensor for name, tensor in tensors.items()}
    ),
    "nan": lambda folder: damage_weights(folder, lambda tensors: {name: t * torch.nan for name, t in tensors.items()}),
}


def test_adapters_that_cannot_be_loaded_are_refused(world, tmp_path):
    one = world.directories["one"]

    def load(**body):
        return world.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(one), **body})

    again = load(lora_name="one")
    assert (again.status_code, "already been loaded" in again.json()["error"]["message"]) == (400, True)
    for body, status in (
        ({"lora_name": "base"}, 400), ({"lora_name": ""}, 400), ({"lora_path": "/nowhere"}, 404),
        ({"lora_path": "a\x00b"}, 404), ({"lora_path": str(tmp_path)}, 400), ({"files": {}}, 400),
    ):  # fmt: skip
        assert load(**body).status_code == status, body
    for name, damage in DAMAGES.items():
        damage(shutil.copytree(one, tmp_path / name))
        answer = load(lora_path=str(tmp_path / name))
        assert answer.status_code == 400, (name, answer.text)
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
    torch.manual_seed(1)
    modules = ["q_proj", "down_proj"]
    config = LoraConfig(r=3, lora_alpha=5, target_modules=modules, init_lora_weights=False, use_rslora=True)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(world.service.base.name), config).eval()
    model.save_pretrained(tmp_path / "some")
    world.post("/v1/load_lora_adapter", {"lora_name": "some", "lora_path": str(tmp_path / "some")}).raise_for_status()
    choice = world.complete(**asked(model="some", logprobs=0))["choices"][0]
    world.post("/v1/unload_lora_adapter", {"lora_name": "some"}).raise_for_status()
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPTS[0], *choice["token_ids"]]])).logits[0, len(PROMPTS[0]) - 1 : -1]
    logprobs = logprobs_of(logits.log_softmax(-1), choice["token_ids"])
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)


def test_the_queue_is_bounded_and_time_too(tmp_path):
    world = World(tmp_path, max_queue=8, max_rows=4, timeout_s=0.4)
    bodies = [asked(n=2, max_tokens=1500, ignore_eos=True, seed=k) for k in range(20)]
    try:
        assert world.post("/v1/completions", asked(n=9)).status_code == 400
        sample = world.service.engine.sample
        world.service.engine.sample = lambda *given: time.sleep(0.1) or sample(*given)
        answers = complete_all(world, bodies)
        assert {answer.status_code for answer in answers} == {503, 504}
        assert all(answer.headers["Retry-After"] for answer in answers if answer.status_code == 503)
        world.service.engine.sample = sample
        assert world.post("/v1/completions", asked(max_tokens=4)).status_code == 200
        eventually(lambda: world.service.batcher.load == (0, 0))
        assert len(world.service.engine.sequence_cache) == 0
    finally:
        world.service.close()


@pytest.fixture
def address(world):
    """The application as ``retrain serve`` runs it, for requests that arrive within 0.4 seconds."""
    ready, bound = threading.Event(), listening_socket("127.0.0.1", 0)
    server = HttpServer(world.app, ready.set, arrival_s=0.4)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    ready.wait(20)
    yield bound.getsockname()
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize("stream", [False, True])
def test_who_has_left_is_drawn_for_no_longer(world, address, stream):
    client, body = HTTPConnection(*address, timeout=20), asked(n=4, max_tokens=1500, ignore_eos=True, stream=stream)
    client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    eventually(lambda: world.service.batcher.load == (4, 0))
    drawn = list(world.service.batcher._active)
    client.close()
    eventually(lambda: world.service.batcher.load == (0, 0))
    assert [len(each.total.token_ids) < 1500 for each in drawn] == [True] * 4


def test_a_request_that_is_refused_before_it_has_arrived_keeps_its_connection(address):
    client = HTTPConnection(*address, timeout=20)
    client.putrequest("POST", "/nothing")
    client.putheader("Content-Length", "2")
    client.endheaders()
    assert client.getresponse().read()
    client.send(b"{}")
    time.sleep(1)  # longer than a request may take
    connection = client.sock
    client.request("GET", "/health")
    assert (client.getresponse().status, client.sock) == (200, connection)
    client.close()


def test_failures_end_their_own_requests_only(world, monkeypatch, capfd):
    sample, failures = world.service.engine.sample, [RuntimeError("broken on purpose")]

    def sample_or_fail(*arguments):
        if failures:
            raise failures.pop()
        return sample(*arguments)

    monkeypatch.setattr(world.service.engine, "sample", sample_or_fail)
    answer = world.post("/v1/completions", asked())
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "InternalServerError")
    assert "broken on purpose" not in answer.text
    assert "broken on purpose" in capfd.readouterr().err
    failures.append(RuntimeError("again"))
    [event] = events(world.post("/v1/completions", asked(stream=True)).text)
    assert event["error"]["code"] == 500
    assert world.post("/v1/completions", asked()).status_code == 200


@pytest.mark.parametrize("arguments", ["null", "", "{}", None, {}])
def test_calls_without_arguments_have_none(world, arguments):
    answer = world.post("/v1/chat/completions", {"messages": [USER, called(arguments), USER], "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def test_content_that_is_no_text_is_refused_with_what_is_supported(world):
    picture = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}
    answer = world.post("/v1/chat/completions", {"messages": [picture]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert answer.json()["error"]["message"].startswith("messages.0.content: only text is supported")
