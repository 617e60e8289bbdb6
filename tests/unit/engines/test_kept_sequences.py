"""Keys and values kept between turns or pieces: only new tokens are computed, and results stay the same."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from helpers.lanes import fresh_logprobs, publish, trained
from helpers.lanes import ref as ref_of

from retrain.engines.dense import CachedBatch, SequenceCache
from retrain.engines.local import LocalEngine
from retrain.errors import RunFailed
from retrain.types import Action, PolicyRef, SampleRequest

TURNS, TOKENS = 3, 6

Turns = dict[tuple[int, int], list[tuple[list[int], Action]]]


def episodes(engine, refs, samples=5, max_rows=None, later: tuple[int, ...] | None = None) -> Turns:
    """Sample several turns of every policy's group: (lane, sample) → prompts and actions. Sequences read different
    numbers of tokens between turns. ``later``: the number of samples with later turns of each lane; default: all."""
    turns: Turns = {}
    for turn in range(TURNS):
        requests, owners = [], []
        for lane, ref in enumerate(refs):
            stream = ("kept", lane)
            if turn == 0:
                names = tuple((*stream, k) for k in range(samples))
                prompt = tuple(range(3, 9 + lane))
                requests.append(SampleRequest(ref, prompt, samples, TOKENS, 1.0, stream, sequences=names))
                owners.append([(lane, k) for k in range(samples)])
                continue
            for k in range(samples if later is None else later[lane]):
                before, action = turns[lane, k][-1]
                prompt = (*before, *action.token_ids, *range(10, 11 + (k + turn) % 4))
                own = (*stream, "turn", turn, k)
                requests.append(SampleRequest(ref, prompt, 1, TOKENS - k % 2, 1.0, own, sequences=((*stream, k),)))
                owners.append([(lane, k)])
        for request, names, actions in zip(requests, owners, engine.sample(requests, max_rows=max_rows), strict=True):
            for name, action in zip(names, actions, strict=True):
                turns.setdefault(name, []).append((list(request.prompt_ids), action))
    return turns


def tokens(turns: Turns) -> dict:
    return {name: [(prompt, action.token_ids) for prompt, action in own] for name, own in turns.items()}


def assert_fresh(base, lanes, adapters, turns: Turns) -> None:
    """Check every turn against one forward pass over all of its tokens."""
    for (lane, _), own in turns.items():
        for prompt, action in own:
            expected, entropy = fresh_logprobs(base, lanes, adapters[lane], prompt, action.token_ids, 1.0)
            assert action.logprobs_T == pytest.approx(expected, abs=2e-5)
            assert action.entropy_T == pytest.approx(entropy, abs=2e-4)


@pytest.fixture
def adapters(lanes):
    return [trained(lanes, 3, rank=4), trained(lanes, 4, rank=2), trained(lanes, 5, rank=4)]


def engine_of(base, lanes, adapters) -> tuple[LocalEngine, list[PolicyRef]]:
    engine = LocalEngine(base, lanes)
    publish(engine, adapters)
    return engine, [ref_of(lane) for lane in range(len(adapters))]


@pytest.mark.parametrize("max_rows", [None, 4])
@pytest.mark.parametrize("count", [1, 3])
def test_what_is_drawn_is_what_a_fresh_pass_over_all_tokens_says(base, lanes, adapters, reads, max_rows, count):
    engine, refs = engine_of(base, lanes, adapters[:count])
    assert_fresh(base, lanes, adapters, episodes(engine, refs, max_rows=max_rows))
    # Of later turns only the last sampled token and what follows it is read.
    assert all(width <= 8 for _, width in reads["prefill"])
    assert reads["extend"]
    assert all(width <= 5 for _, width in reads["extend"])


@pytest.mark.parametrize("later", [(4, 1), (1, 4), (0, 3, 1)])
def test_runs_with_different_numbers_of_episodes_do_not_disturb_each_other(base, lanes, adapters, later):
    """Rows that pad a run must draw and write nothing, or an episode gets a token of another run's weights."""
    engine, refs = engine_of(base, lanes, adapters[: len(later)])
    assert_fresh(base, lanes, adapters, episodes(engine, refs, later=later))


@pytest.mark.parametrize("limit", [0, 40_000], ids=["none kept", "some kept"])
def test_a_sequence_that_is_not_kept_is_read_again_with_the_same_result(base, lanes, adapters, reads, limit):
    engine, refs = engine_of(base, lanes, adapters)
    kept = episodes(engine, refs)
    assert len(engine.sequence_cache) > 0
    engine.forget_sequences()
    assert len(engine.sequence_cache) == 0
    engine.sequence_cache.limit = limit
    reads["prefill"].clear()
    reads["extend"].clear()
    assert tokens(episodes(engine, refs)) == tokens(kept)
    assert bool(reads["extend"]) == (limit > 0)
    assert any(width > 8 for _, width in reads["prefill"])


def test_new_weights_forget_what_the_old_ones_computed(base, lanes, adapters):
    engine, refs = engine_of(base, lanes, adapters[:1])
    episodes(engine, refs, samples=2)
    assert len(engine.sequence_cache) == 2
    engine.sequence_cache.drop(refs[0], ("kept", 0, 1))
    assert len(engine.sequence_cache) == 1
    publish(engine, adapters[1:2])
    assert len(engine.sequence_cache) == 0


def test_a_sequence_is_found_by_its_name_weights_and_tokens_and_the_oldest_leave_first():
    def put(*names: str, width: int = 4) -> None:
        rows = torch.zeros(len(names), 1, width, 2)  # 64 bytes a row
        kept.put(ref, [((name,), [1, place]) for place, name in enumerate(names)], CachedBatch([rows], [rows]))

    ref, kept = PolicyRef("run", 1), SequenceCache(160)
    put("a", "b")
    put("c")
    put("large", width=99)  # never fits, and drives nothing out
    assert len(kept) == 2
    assert kept.take(ref, ("a",), [1, 0, 9]) is None
    assert kept.take(PolicyRef("run", 2), ("b",), [1, 1, 9]) is None
    assert kept.take(ref, ("b",), [1, 1, 9]).row == 1
    assert kept.take(ref, ("b",), [1, 1, 9]) is None  # it is taken once
    assert kept.take(ref, ("c",), [1, 5, 9]) is None  # another sequence under its name


PROMPT = (5, 9, 17, 30)


def request(lane: int = 0) -> SampleRequest:
    return SampleRequest(ref_of(lane), PROMPT, 2, 24, 1.0, ("pieces",))


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_pieces_come_to_the_whole(base, lanes, dense, kept):
    adapters = [trained(lanes, 1), trained(lanes, 2)]
    engine = LocalEngine(base, lanes, dense=dense)
    engine.keeps_blocks = True
    publish(engine, adapters)
    whole = engine.sample([request(lane) for lane in (0, 1)])
    names = (("a", 0), ("a", 1)) if kept else ()
    begun = engine.sample([replace(request(lane), max_tokens=9, sequences=names) for lane in (0, 1)])
    assert (len(engine.sequence_cache) > 0) == (dense and kept)
    going_on, parts = [], []
    for lane, k in ((0, 0), (0, 1), (1, 0), (1, 1)):
        first = begun[lane][k]
        if first.stop_reason == "length":
            later = replace(request(lane), prompt_ids=(*PROMPT, *first.token_ids), samples=1, max_tokens=15, drawn=9)
            going_on.append(replace(later, streams=(("pieces", k),), sequences=names[k : k + 1]))
            parts.append((whole[lane][k], first))
    assert parts
    for (one, before), [after] in zip(parts, engine.sample(going_on), strict=True):
        assert one.token_ids == before.token_ids + after.token_ids
        assert one.logprobs_T == pytest.approx(np.concatenate([before.logprobs_T, after.logprobs_T]), abs=1e-5)
        assert one.stop_reason == after.stop_reason


def test_kept_products_are_those_of_the_requested_weights(base, lanes, monkeypatch):
    """The same lanes again, other lanes, the same lanes with new weights, and weights that are withdrawn."""
    adapters = [trained(lanes, 1), trained(lanes, 2)]
    plain, keeping = LocalEngine(base, lanes), LocalEngine(base, lanes)
    keeping.keeps_blocks = True
    made, make = [], keeping.decoder.blocks
    monkeypatch.setattr(keeping.decoder, "blocks", lambda weights: made.append(weights) or make(weights))

    def assert_equal(*asked: int) -> None:
        first, second = (engine.sample([request(lane) for lane in asked]) for engine in (plain, keeping))
        for a, b in zip(chain(*first), chain(*second), strict=True):
            assert (a.token_ids, a.logprobs_T.tolist()) == (b.token_ids, b.logprobs_T.tolist())

    for order in (adapters, adapters[::-1]):
        publish(plain, order)
        publish(keeping, order)
        made.clear()
        assert_equal(0, 1)
        assert_equal(0, 1)
        assert len(made) == 1
        assert_equal(1)
        assert_equal(1, 0)
    keeping.retire(ref_of(0))
    assert_equal(1)
    with pytest.raises(RunFailed, match="no weights were published"):
        keeping.sample([request(0)])
