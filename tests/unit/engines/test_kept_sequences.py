"""Keys and values that stay between the turns of an episode, or the pieces of a completion: only what is new is
computed, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from lane_cases import fresh_logprobs, publish, trained
from lane_cases import ref as ref_of

from retrain.engines.dense import DenseDecoder
from retrain.engines.kept import Batch, KeptSequences
from retrain.engines.local import LocalEngine
from retrain.engines.protocol import PolicyRef, SampleRequest
from retrain.rng import uniforms
from retrain.types import Action

TURNS, TOKENS = 3, 6


class Counting:
    """What the decoder reads: (rows, tokens) of every whole prompt, and of every continuation."""

    def __init__(self, monkeypatch):
        self.whole, self.more = [], []
        prefill, extend = DenseDecoder.prefill, DenseDecoder.extend

        def counted_prefill(decoder, ids_RT, *rest):
            self.whole.append(tuple(ids_RT.shape))
            return prefill(decoder, ids_RT, *rest)

        def counted_extend(decoder, ids_RT, *rest):
            self.more.append(tuple(ids_RT.shape))
            return extend(decoder, ids_RT, *rest)

        monkeypatch.setattr(DenseDecoder, "prefill", counted_prefill)
        monkeypatch.setattr(DenseDecoder, "extend", counted_extend)


Turns = dict[tuple[int, int], list[tuple[list[int], Action]]]


def episodes(engine, refs, samples=5, max_rows=None, temperature=1.0, later: dict[int, int] | None = None) -> Turns:
    """Several turns of every policy's group: (lane, sample) → prompts and actions. What is read between the turns has a
    length of its own in every sequence. ``later`` has the number of samples with later turns by lane; default: all."""
    turns: Turns = {}
    for turn in range(TURNS):
        requests, owners = [], []
        for lane, ref in enumerate(refs):
            stream = ("kept", lane)
            if turn == 0:
                names = tuple((*stream, k) for k in range(samples))
                prompt = tuple(range(3, 9 + lane))
                requests.append(SampleRequest(ref, prompt, samples, TOKENS, temperature, stream, sequences=names))
                owners.append([(lane, k) for k in range(samples)])
                continue
            for k in range(samples if later is None else later[lane]):
                before, action = turns[lane, k][-1]
                prompt = (*before, *action.token_ids, *range(10, 11 + (k + turn) % 4))
                own = (*stream, "turn", turn, k)
                requests.append(
                    SampleRequest(ref, prompt, 1, TOKENS - k % 2, temperature, own, sequences=((*stream, k),))
                )
                owners.append([(lane, k)])
        for request, names, actions in zip(requests, owners, engine.sample(requests, max_rows=max_rows), strict=True):
            for name, action in zip(names, actions, strict=True):
                turns.setdefault(name, []).append((list(request.prompt_ids), action))
    return turns


@pytest.fixture
def adapters(lanes):
    return [trained(lanes, 3, rank=4), trained(lanes, 4, rank=2), trained(lanes, 5, rank=4)]


def engine_of(base, lanes, adapters) -> tuple[LocalEngine, list[PolicyRef]]:
    engine = LocalEngine(base, lanes)
    publish(engine, adapters)
    return engine, [ref_of(lane) for lane in range(len(adapters))]


@pytest.mark.parametrize("max_rows", [None, 4])
@pytest.mark.parametrize("count", [1, 3])
def test_what_is_drawn_is_what_a_fresh_pass_over_all_tokens_says(base, lanes, adapters, monkeypatch, max_rows, count):
    engine, refs = engine_of(base, lanes, adapters[:count])
    seen = Counting(monkeypatch)
    turns = episodes(engine, refs, max_rows=max_rows)
    for (lane, _), own in turns.items():
        for prompt, action in own:
            expected, entropy = fresh_logprobs(base, lanes, adapters[lane], prompt, action.token_ids, 1.0)
            assert action.logprobs_T == pytest.approx(expected, abs=2e-5)
            assert action.entropy_T == pytest.approx(entropy, abs=2e-4)
        for (before, action), (prompt, _) in pairwise(own):
            assert prompt[: len(before) + len(action)] == [*before, *action.token_ids]
    # No prompt of a later turn was read a second time: of those only what is new, the last token drawn among it.
    assert all(width <= 8 for _, width in seen.whole)
    assert seen.more
    assert all(width <= 5 for _, width in seen.more)


@pytest.mark.parametrize("later", [(4, 1), (1, 4), (0, 3, 1)])
def test_runs_with_different_numbers_of_episodes_do_not_disturb_each_other(base, lanes, adapters, later):
    """Rows that pad a run with few remaining episodes to the size of the others must draw nothing and write nothing:
    otherwise an episode gets a token that another run's weights drew."""
    engine, refs = engine_of(base, lanes, adapters[: len(later)])
    turns = episodes(engine, refs, later=dict(enumerate(later)))
    for (lane, _), own in turns.items():
        for prompt, action in own:
            expected, _ = fresh_logprobs(base, lanes, adapters[lane], prompt, action.token_ids, 1.0)
            assert action.logprobs_T == pytest.approx(expected, abs=2e-5)


def test_a_sequence_that_is_not_kept_is_read_again_with_the_same_result(base, lanes, adapters, monkeypatch):
    engine, refs = engine_of(base, lanes, adapters)
    kept = episodes(engine, refs)
    assert len(engine.kept) > 0
    before = len(engine.kept)
    engine.kept.drop(refs[0], ("kept", 0, 1))
    engine.kept.drop(refs[0], ("nothing",))
    assert len(engine.kept) == before - 1
    engine.forget_sequences()
    assert len(engine.kept) == 0
    engine.kept.limit = 0
    seen = Counting(monkeypatch)
    again = episodes(engine, refs)
    assert not seen.more
    assert kept.keys() == again.keys()
    for name, own in kept.items():
        for (prompt, action), (same_prompt, same) in zip(own, again[name], strict=True):
            assert (prompt, action.token_ids) == (same_prompt, same.token_ids)
            assert action.logprobs_T == pytest.approx(same.logprobs_T, abs=2e-5)


def test_some_kept_and_some_not_are_one_batch(base, lanes, adapters, monkeypatch):
    engine, refs = engine_of(base, lanes, adapters)
    whole = episodes(engine, refs)
    engine.forget_sequences()
    engine.kept.limit = engine.kept.limit and 40_000
    seen = Counting(monkeypatch)
    part = episodes(engine, refs)
    assert seen.more
    assert any(width > 8 for _, width in seen.whole)
    assert {name: [a.token_ids for _, a in own] for name, own in whole.items()} == {
        name: [a.token_ids for _, a in own] for name, own in part.items()
    }


def test_new_weights_forget_what_the_old_ones_computed(base, lanes, adapters):
    engine, _ = engine_of(base, lanes, adapters[:1])
    episodes(engine, [ref_of(0)], samples=2)
    assert len(engine.kept)
    publish(engine, adapters[1:2])
    assert len(engine.kept) == 0


def test_the_oldest_leave_first_and_other_tokens_are_not_found():
    def batch(rows: int) -> Batch:
        return Batch([torch.zeros(rows, 1, 4, 2)], [torch.zeros(rows, 1, 4, 2)])  # 64 bytes a row

    ref, other = PolicyRef("run", 1), PolicyRef("run", 2)
    kept = KeptSequences(160)
    kept.put(ref, [(("a",), [1, 2]), (("b",), [1, 3])], batch(2))
    kept.put(ref, [(("c",), [1, 4])], batch(1))
    assert len(kept) == 2
    assert kept.take(ref, ("a",), [1, 2, 3]) is None
    assert kept.take(other, ("b",), [1, 3, 3]) is None
    found = kept.take(ref, ("b",), [1, 3, 3])
    assert found is not None
    assert (found.place, found.token_ids) == (1, (1, 3))
    assert kept.take(ref, ("b",), [1, 3, 3]) is None  # it is taken once
    assert kept.take(ref, ("c",), [1, 5, 6]) is None  # another sequence under its name
    kept.put(ref, [(("c",), [1, 4])], batch(1))
    assert kept.take(ref, ("c",), [1, 4]) is None  # nothing is new
    kept.put(ref, [(("d",), [1])], batch(1))
    kept.put(ref, [((f"{i}",), [1]) for i in range(3)], batch(3))
    assert len(kept) == 2
    kept.put(ref, [(("large",), [1])], Batch([torch.zeros(1, 1, 99, 2)], [torch.zeros(1, 1, 99, 2)]))
    assert len(kept) == 2  # what can never fit drives nothing out
    kept.clear()
    assert len(kept) == 0


# -- a completion drawn in pieces, as a server draws it ------------------------------------------------------------

PROMPT = (5, 9, 17, 30)


def request(lane: int = 0, **more) -> SampleRequest:
    return SampleRequest(ref_of(lane), PROMPT, 2, 24, 1.0, ("pieces",), **more)


def test_a_stream_goes_on_where_it_was():
    asked = request()
    assert asked.uniforms_T(1).tolist() == uniforms(24, "pieces", 1).tolist()
    later = replace(asked, drawn=10, max_tokens=14, streams=(("pieces", 1),))
    assert later.uniforms_T(0).tolist() == uniforms(24, "pieces", 1)[10:].tolist()


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_pieces_come_to_the_whole(base, lanes, dense, kept):
    adapters = [trained(lanes, 1), trained(lanes, 2)]
    engine = LocalEngine(base, lanes, dense=dense)
    engine.keeps_blocks = True
    publish(engine, adapters)
    whole = engine.sample([request(lane) for lane in (0, 1)])
    named = {"sequences": (("a", 0), ("a", 1))} if kept else {}
    begun = engine.sample([replace(request(lane), max_tokens=9, **named) for lane in (0, 1)])
    assert (len(engine.kept) > 0) == (dense and kept)
    going_on, expected, first = [], [], []
    for lane in (0, 1):
        for k in (0, 1):
            if begun[lane][k].stop_reason == "length":
                ids = (*PROMPT, *begun[lane][k].token_ids)
                names = {"sequences": (("a", k),)} if kept else {}
                streams = (("pieces", k),)
                going_on.append(replace(request(lane), prompt_ids=ids, samples=1, max_tokens=15, drawn=9,
                                        streams=streams, **names))  # fmt: skip
                expected.append(whole[lane][k])
                first.append(begun[lane][k])
    assert expected
    for one, before, [after] in zip(expected, first, engine.sample(going_on), strict=True):
        assert one.token_ids == before.token_ids + after.token_ids
        logprobs = np.concatenate([before.logprobs_T, after.logprobs_T])
        assert one.logprobs_T == pytest.approx(logprobs, abs=1e-5)
        assert one.stop_reason == after.stop_reason


def test_kept_products_are_those_of_the_weights_that_are_asked_for(base, lanes, monkeypatch):
    """The same lanes again, other lanes, the same lanes with new weights, and weights that are withdrawn."""
    adapters = [trained(lanes, 1), trained(lanes, 2)]
    plain, keeping = LocalEngine(base, lanes), LocalEngine(base, lanes)
    keeping.keeps_blocks = True
    for engine in (plain, keeping):
        publish(engine, adapters)

    def both(*asked: int) -> None:
        answers = [engine.sample([request(lane) for lane in asked]) for engine in (plain, keeping)]
        first, second = (
            [(action.token_ids, action.logprobs_T.tolist()) for group in groups for action in group]
            for groups in answers
        )
        assert first == second

    made, make = [], keeping.decoder.blocks
    monkeypatch.setattr(keeping.decoder, "blocks", lambda given: made.append(given) or make(given))
    both(0, 1)
    both(0, 1)
    assert len(made) == 1
    both(1)
    both(1, 0)
    for engine in (plain, keeping):
        publish(engine, adapters[::-1])
    both(1, 0)
    keeping.retire(ref_of(0))
    both(1)
    with pytest.raises(Exception, match="no weights were published"):
        keeping.sample([request(0)])
