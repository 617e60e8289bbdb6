"""What ranks compute of an update, of scores and of a decode batch is what one process computes, to the last bit."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from lane_cases import drawn, requests, totals, trained

from retrain.campaign.planning.plan import RunSpec
from retrain.campaign.running import assemble
from retrain.campaign.running.following import Desk
from retrain.campaign.running.models import Bases
from retrain.campaign.running.team import Team
from retrain.config import parse_dict
from retrain.engines.local import LocalEngine
from retrain.engines.protocol import PolicyRef
from retrain.engines.rows import LaneRequest, Row
from retrain.engines.shared import DecodingAsked, SharedEngine
from retrain.errors import ModelError, NonFinite, RunFailed
from retrain.policy import ranks as ranks_module
from retrain.policy import shares, update
from retrain.policy.local import LocalPolicy, LocalSnapshot
from retrain.policy.objective import objective_of
from retrain.policy.protocol import TrainBatch
from retrain.policy.ranks import Answers, Ranks, follow
from retrain.policy.shares import dealt
from retrain.policy.threads import Workers
from tests.system.rank_updates import (
    CASES,
    check_equal,
    config_of,
    facts_of,
    loaded,
    samples_of,
    scores_of,
    updated,
)


@pytest.fixture(scope="module")
def bases():
    with Bases() as bases:
        yield bases


@pytest.fixture(scope="module")
def base_and_lanes(bases):
    base, lanes, _ = bases.take(config_of({}))
    return base, lanes


@pytest.fixture(scope="module")
def ranks():
    """Two other ranks, which have nothing loaded yet."""
    team = Team(parse_dict({"backend": {"shard": "dp", "ranks": 3, "devices": "cpu"}}))
    try:
        yield team.ranks()
    finally:
        team.close()


@pytest.mark.parametrize("sections", CASES.values(), ids=CASES)
def test_an_update_of_ranks_is_that_of_one_process(base_and_lanes, ranks, folder, sections):
    config = config_of(sections)
    alone = updated(*base_and_lanes, config, folder, None)
    together = updated(*base_and_lanes, config, folder, loaded(ranks, config, folder))
    check_equal(together, alone)
    if "large" in config.algorithm.loss:
        assert together[0].budget.tokens < 60
        assert together[0].notes() == alone[0].notes()


def test_few_large_micro_batches_are_cut_so_that_every_rank_has_one(base_and_lanes, ranks, folder, monkeypatch):
    monkeypatch.setattr(update, "LEAST_SHARED_TOKENS", 40)
    config = config_of({"training": {"micro_batch_tokens": 4096}})
    _, rows, _ = updated(*base_and_lanes, config, folder, None)
    policy = LocalPolicy(*base_and_lanes, config, (0, 0), Workers(), ranks=loaded(ranks, config, folder))
    samples = samples_of(*base_and_lanes, False)
    numbers = policy.update(TrainBatch(samples, totals(samples), 0, (0, 0)), objective_of(config, "ppo"), 0.01)
    assert numbers["timing_microbatches"] >= 3
    assert policy.budget.tokens == 4096
    assert numbers["optim/grad_norm"] == pytest.approx(rows[0]["optim/grad_norm"], rel=2e-6)


def test_sums_of_shares_differ_by_rounding_alone(base_and_lanes, ranks, folder, monkeypatch):
    monkeypatch.setattr(shares, "APART_BYTES", 0)
    config = config_of({})
    alone, mine, _ = updated(*base_and_lanes, config, folder, None)
    together, theirs, _ = updated(*base_and_lanes, config, folder, loaded(ranks, config, folder))
    assert theirs[0] == pytest.approx(mine[0], rel=2e-7)
    start = LocalPolicy(*base_and_lanes, config, (0, 0)).adapter.flat
    change = (alone.adapter.flat - start).norm()
    assert (together.adapter.flat - alone.adapter.flat).norm() < 1e-4 * change  # AdamW: rounding near 0 shows


def test_what_a_loss_raises_on_another_rank_is_raised_here(base_and_lanes, ranks, folder):
    def failure(name, kind, each):
        config = config_of({"algorithm": {"loss": f"ranklosses:{name}"}})
        with pytest.raises(kind) as raised:
            updated(*base_and_lanes, config, folder, each and loaded(ranks, config, folder))
        return raised.value

    alone, together = (failure("broken", ZeroDivisionError, each) for each in (None, ranks))
    assert str(alone) == str(together) == "no loss today"
    other = failure("elsewhere", ZeroDivisionError, ranks)
    assert str(other) == "no loss on this rank"
    assert "on another rank:" in other.__notes__[0]
    assert "in elsewhere" in other.__notes__[0]
    assert "the update was not applied" in str(failure("steep", NonFinite, ranks))
    config = config_of({})
    assert updated(*base_and_lanes, config, folder, loaded(ranks, config, folder))[1]  # they are still in step


def test_scores_are_those_of_one_process(base_and_lanes, ranks, folder):
    config = config_of({"algorithm": {"advantage_mode": "gae"}, "critic": {"lora_rank": 2}})
    samples = samples_of(*base_and_lanes, True)
    alone = scores_of(*base_and_lanes, config, None, samples)[1]
    together = scores_of(*base_and_lanes, config, loaded(ranks, config, folder), samples)[1]
    for kind in together:
        for mine, theirs, sample in zip(together[kind] or (), alone[kind] or (), samples, strict=False):
            assert np.array_equal(mine, theirs)
            assert len(mine) == len(drawn(sample))


def published(engine, *adapters):
    for lane, adapter in enumerate(adapters):
        engine.publish(PolicyRef(str(lane), 0), LocalSnapshot(adapter.frozen(), {}))
    return engine


def test_ranks_sample_what_as_many_workers_sample(base_and_lanes, ranks, folder):
    base, lanes = base_and_lanes
    loaded(ranks, config_of({}), folder)
    adapters = [trained(lanes, seed, size=0.05) for seed in (1, 2)]
    asked = [each for lane in (0, 1) for each in requests(lane, prompts=6, samples=8, max_tokens=6)]
    sampled = []
    for engine in (LocalEngine(base, lanes, Workers(3)), SharedEngine(base, lanes, ranks)):
        published(engine, *adapters)
        heard = []
        groups = engine.sample(asked, finished=lambda index, group, heard=heard: heard.append((index, len(group))))
        assert sorted(heard) == [(index, 8) for index in range(len(asked))]
        sampled.append([[facts_of(action) for action in group] for group in groups])
    assert sampled[0] == sampled[1]
    assert engine.side_by_side == 3
    engine.forget()
    one_row = DecodingAsked([LaneRequest(**vars(asked[0]), lane=0)], [[Row(0, 0)]], [PolicyRef("0", 0)], [0], 1)
    with pytest.raises(RunFailed, match="no weights were published"):
        ranks.ask("decode", [(one_row,), None], lambda: None).whole()


class Beside:
    """A second rank that lives in this process: its engine does what it is asked."""

    count, places = 2, ("cpu",)

    def __init__(self, base, lanes):
        self.engine = LocalEngine(base, lanes)

    def tell(self, name, *args):
        if name == "publish":
            self.engine.publish(args[0], LocalSnapshot(args[1].frozen(self.engine.lanes), {}))

    def ask(self, name, args, own):
        result = own()
        return Answers(result, [each and each[0].done(self.engine) for each in args])


def test_what_one_rank_has_sampled_is_kept_when_another_runs_out_of_memory(base_and_lanes):
    base, lanes = base_and_lanes
    beside, adapter = Beside(base, lanes), trained(lanes, 1, size=0.05)
    engine = published(SharedEngine(base, lanes, beside), adapter)
    asked, heard, ask = requests(prompts=6, samples=16, max_tokens=4), [], beside.ask

    def short(name, args, own):
        beside.ask = ask
        answers = ask(name, args, lambda: None)
        return Answers(None, answers.others, RuntimeError("not enough memory"))

    beside.ask = short
    groups = engine.sample(asked, finished=lambda index, actions: heard.append(index))
    assert sorted(heard) == list(range(6))
    assert heard[0] == 3  # the other rank's first
    expected = published(LocalEngine(base, lanes), adapter).sample(asked)
    assert [[a.token_ids for a in group] for group in groups] == [[a.token_ids for a in group] for group in expected]
    assert engine.state()["fitting"] == 48


def test_dealing_is_even_and_complete():
    sizes = [7, 1, 5, 3, 3, 2, 9, 1]
    for count in (1, 2, 3, 5, 9):
        parts = dealt(sizes, count)
        assert sorted(place for part in parts for place in part) == list(range(len(sizes)))
        assert all(part == sorted(part) for part in parts)
        assert max(sum(sizes[place] for place in part) for part in parts) <= sum(sizes) / count + max(sizes)
    assert dealt([4], 3) == [[0], [], []]


# -- messages between ranks -------------------------------------------------------------------------------------------


@pytest.fixture
def posts(monkeypatch):
    """Messages between rank 0 and others without processes."""
    made = SimpleNamespace(inbox=[], outbox=[])
    monkeypatch.setattr(ranks_module, "send", lambda item, to: made.outbox.append(item))
    monkeypatch.setattr(ranks_module, "receive", lambda of, seconds=0.0: made.inbox.pop(0))
    return made


class NoteDesk:
    work = nullcontext

    def __init__(self):
        self.said = []

    def note(self, word):
        if word == "bad":
            raise ValueError("a bad word")
        self.said.append(word)
        return word.upper()


def test_a_rank_does_what_it_is_asked_in_order_and_tells_of_faults_once(posts):
    desk = NoteDesk()
    posts.inbox = [
        ("note", ("a",), False), ("note", ("b",), True), ("note", ("bad",), False), ("note", ("c",), False),
        ("note", ("d",), True), ("note", ("e",), True), ("end", (), False),
    ]  # fmt: skip
    follow(desk)
    assert desk.said == ["a", "b", "e"]  # after a fault nothing is done until it has been told
    assert [done for done, _ in posts.outbox] == [True, False, True]
    assert (posts.outbox[0][1], posts.outbox[2][1]) == ("B", "E")
    assert str(posts.outbox[1][1]) == "a bad word"
    assert "in note" in posts.outbox[1][1].__notes__[0]


def test_a_rank_with_another_base_is_refused(bases, folder):
    config = config_of({})
    spec = RunSpec("run", "label", 1, 0, {}, False, config)
    base, _, _ = bases.take(config)
    assert Desk(Bases()).load([spec.to_json()], str(folder), "cpu") == base.fingerprint

    class Other(Ranks):
        def ask(self, name, args, own):
            assert [name, *(place for _, _, place in args)] == ["load", "gpu:1", "gpu:2"]
            return Answers(own(), [base.fingerprint, "another"])

    model = SimpleNamespace(identity=base.fingerprint, name=base.name)
    with pytest.raises(ModelError, match=f"rank 2 has other weights of {base.name} than rank 0"):
        assemble._on_all_ranks([spec], folder, Bases(ranks=Other(["gpu:1", "gpu:2"])), lambda: model)
    assert assemble._on_all_ranks([spec], folder, Bases(), lambda: model) is model
