"""A completion drawn in pieces, as a server draws it: the same tokens as in one call."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from lane_cases import publish, ref, trained

from retrain.engines.local import LocalEngine
from retrain.engines.protocol import SampleRequest
from retrain.rng import uniforms

PROMPT = (5, 9, 17, 30)


def request(lane: int = 0, **more) -> SampleRequest:
    return SampleRequest(ref(lane), PROMPT, 2, 24, 1.0, ("pieces",), **more)


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
        assert [[a.token_ids for a in group] for group in answers[0]] == [
            [a.token_ids for a in group] for group in answers[1]
        ]
        assert [[a.logprobs_T.tolist() for a in group] for group in answers[0]] == [
            [a.logprobs_T.tolist() for a in group] for group in answers[1]
        ]

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
    keeping.retire(ref(0))
    both(1)
    with pytest.raises(Exception, match="no weights were published"):
        keeping.sample([request(0)])


def test_one_sequence_is_kept_no_longer(base, lanes):
    engine = LocalEngine(base, lanes)
    publish(engine, [trained(lanes, 1)])
    engine.sample([request(sequences=(("x",), ("y",)))])
    assert len(engine.kept) == 2
    engine.kept.drop(ref(0), ("x",))
    engine.kept.drop(ref(0), ("nothing",))
    assert len(engine.kept) == 1
