"""What ranks compute of an update, of scores and of a decode batch is what one process computes, to the last bit."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lane_cases import drawn, ref, requests, totals, trained
from rank_cases import CASES, config_of, facts_of, loaded, samples_of, updated

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
from retrain.errors import ModelError, NonFinite, RankLost, RunFailed
from retrain.policy import ranks as ranks_module
from retrain.policy import shares, update
from retrain.policy.local import LocalPolicy, LocalSnapshot
from retrain.policy.objective import objective_of
from retrain.policy.protocol import TrainBatch, Want
from retrain.policy.ranks import Answers, Ranks, follow
from retrain.policy.shares import dealt
from retrain.policy.threads import Workers


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
    assert torch.equal(together[0].adapter.flat, alone[0].adapter.flat)
    assert together[1] == alone[1]
    assert together[1][0]["optim/grad_norm"] > 0
    for mine, theirs in zip(together[2], alone[2], strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
    if alone[0].critic is not None:
        for own, other in zip(together[0].critic.weights, alone[0].critic.weights, strict=True):
            assert torch.equal(own, other)
    assert together[0].budget.state() == alone[0].budget.state()
    if "large" in config.algorithm.loss:
        assert together[0].budget.tokens < 60
        assert together[0].notes() == alone[0].notes()


def test_few_large_micro_batches_are_cut_so_that_every_rank_has_one(base_and_lanes, ranks, folder, monkeypatch):
    monkeypatch.setattr(update, "LEAST_SHARED_TOKENS", 40)
    config = config_of({"training": {"micro_batch_tokens": 4096}})
    _, rows, _ = updated(*base_and_lanes, config, folder, None)
    policy = LocalPolicy(*base_and_lanes, config, (0, 0), Workers(), ranks=loaded(ranks, config, folder))
    samples = samples_of(*base_and_lanes, False)
    objective = objective_of(config, "ppo")
    numbers = policy.update(TrainBatch(samples, totals(samples), 0, (0, 0)), objective, 0.01)
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
    base, lanes = base_and_lanes
    config = config_of({"algorithm": {"advantage_mode": "gae"}, "critic": {"lora_rank": 2}})
    samples = samples_of(base, lanes, True)
    want = frozenset(Want) - {Want.TEACHER}
    found = []
    for each in (None, loaded(ranks, config, folder)):
        policy = LocalPolicy(base, lanes, config, (0, 0), Workers(), ranks=each)
        with torch.no_grad():
            policy.adapter.flat += 0.01
            policy.critic.head.flat += 0.1
        found.append(vars(policy.score(samples, want)))
    for kind in want:
        for mine, theirs, sample in zip(*(each[kind] for each in found), samples, strict=True):
            assert np.array_equal(mine, theirs)
            assert len(mine) == len(drawn(sample))


def test_ranks_sample_what_as_many_workers_sample(base_and_lanes, ranks, folder):
    base, lanes = base_and_lanes
    loaded(ranks, config_of({}), folder)
    adapters = [trained(lanes, seed, size=0.05) for seed in (1, 2)]
    asked = [each for lane in (0, 1) for each in requests(lane, prompts=6, samples=8, max_tokens=6)]
    found = []
    for engine in (LocalEngine(base, lanes, Workers(3)), SharedEngine(base, lanes, ranks)):
        for lane, adapter in enumerate(adapters):
            engine.publish(PolicyRef(str(lane), 0), LocalSnapshot(adapter.frozen(), {}))
        heard = []
        actions = engine.sample(asked, finished=lambda index, own, heard=heard: heard.append((index, len(own))))
        assert sorted(heard) == [(index, 8) for index in range(len(asked))]
        found.append([[facts_of(each) for each in own] for own in actions])
    assert found[0] == found[1]
    assert engine.side_by_side == 3
    engine.retire(PolicyRef("0", 0))
    engine.publish(PolicyRef("0", 0), LocalSnapshot(adapters[0].frozen(), {}))
    engine.forget()
    with pytest.raises(RunFailed, match="no weights were published"):
        ranks.ask("decode", [(one_row(asked),), None], lambda: None).whole()


class Beside:
    """A second rank that lives in this process: its engine does what it is asked, and ``asked`` keeps it."""

    count, places = 2, ("cpu",)

    def __init__(self, base, lanes):
        self.engine, self.asked = LocalEngine(base, lanes), []

    def tell(self, name, *args):
        if name == "publish":
            self.engine.publish(args[0], LocalSnapshot(args[1].frozen(self.engine.lanes), {}))

    def ask(self, name, args, own):
        self.asked += [each[0] for each in args if each is not None]
        result = own()
        return Answers(result, [each and each[0].done(self.engine) for each in args])


def test_what_one_rank_has_sampled_is_kept_when_another_runs_out_of_memory(base_and_lanes):
    base, lanes = base_and_lanes
    beside = Beside(base, lanes)
    engine, adapter = SharedEngine(base, lanes, beside), trained(lanes, 1, size=0.05)
    engine.publish(ref(0), LocalSnapshot(adapter.frozen(), {}))
    asked, heard, whole = requests(prompts=6, samples=16, max_tokens=4), [], beside.ask

    def short(name, args, own):
        beside.ask = whole
        answers = whole(name, args, lambda: None)
        return Answers(None, answers.others, RuntimeError("not enough memory"))

    beside.ask = short
    groups = engine.sample(asked, finished=lambda index, actions: heard.append(index))
    assert sorted(heard) == list(range(6))
    assert heard[0] == 3  # the other rank's first
    assert [[each.token_ids for each in group] for group in groups] == [
        [each.token_ids for each in group] for group in sample_here(base, lanes, adapter, asked)
    ]
    assert engine.state()["fitting"] == 48


def sample_here(base, lanes, adapter, asked):
    engine = LocalEngine(base, lanes)
    engine.publish(ref(0), LocalSnapshot(adapter.frozen(), {}))
    return engine.sample(asked)


def one_row(asked):
    """The first sequence of these requests, as a rank is asked for it."""
    request = LaneRequest(**vars(asked[0]), lane=0)
    return DecodingAsked([request], [[Row(0, 0)]], [PolicyRef("0", 0)], [0], 1)


def test_dealing_is_even_and_complete():
    sizes = [7, 1, 5, 3, 3, 2, 9, 1]
    for count in (1, 2, 3, 5, 9):
        parts = dealt(sizes, count)
        assert sorted(place for part in parts for place in part) == list(range(len(sizes)))
        assert all(part == sorted(part) for part in parts)
        loads = [sum(sizes[place] for place in part) for part in parts]
        assert max(loads) <= sum(sizes) / count + max(sizes)
        assert parts[0]
    assert [sum(sizes[place] for place in part) for part in dealt(sizes, 2)] == [16, 15]
    assert dealt([4], 3) == [[0], [], []]


class Posts:
    """Messages between rank 0 and one other without processes: what rank 0 sends is done at once."""

    def __init__(self, monkeypatch, desk):
        self.desk, self.inbox, self.outbox = desk, [], []
        monkeypatch.setattr(ranks_module, "send", lambda item, to: self.outbox.append(item))
        monkeypatch.setattr(ranks_module, "receive", lambda of, seconds=0.0: self.inbox.pop(0))


class Told:
    def __init__(self):
        self.said = []
        self.work = nullcontext

    def note(self, word):
        if word == "bad":
            raise ValueError("a bad word")
        self.said.append(word)
        return word.upper()


def test_a_rank_does_what_it_is_asked_in_order_and_tells_of_faults_once(monkeypatch):
    posts, desk = Posts(monkeypatch, None), Told()
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


def test_all_answers_are_taken_whoever_raises_and_what_is_told_meanwhile_waits(monkeypatch):
    posts, ranks = Posts(monkeypatch, None), Ranks(["cpu", "cpu", "cpu"])
    posts.inbox = [(True, "one"), (False, KeyError("three"))]

    def own():
        ranks.tell("forget")
        assert len(posts.outbox) == 2
        raise ZeroDivisionError("mine")

    answers = ranks.ask("note", [(1,), None, (3,)], own)
    assert ranks.owing == set()
    assert posts.outbox == [("note", (1,), True), ("note", (3,), True), *[("forget", (), False)] * 3]
    assert answers.others == ["one", None, None]
    with pytest.raises(ZeroDivisionError, match="mine"):
        answers.whole()
    posts.inbox = [(True, "one"), (False, KeyError("three"))]
    with pytest.raises(KeyError, match="three"):
        ranks.ask("note", [(1,), None, (3,)], lambda: 0).whole()


def test_a_rank_that_is_gone_is_named(monkeypatch):
    def gone(*args):
        raise RankLost("rank 2 is gone (closed)")

    monkeypatch.setattr(ranks_module, "send", gone)
    with pytest.raises(RankLost, match=r"^rank 1 was eaten$"):
        Ranks(["cpu"], lambda rank: "was eaten").tell("forget")
    with pytest.raises(RankLost, match=r"^rank 2 is gone \(closed\)$"):
        Ranks(["cpu"]).tell("forget")


def test_a_rank_with_another_base_is_refused(bases, folder):
    config = config_of({})
    spec = RunSpec("run", "label", 1, 0, {}, False, config)
    base, _, _ = bases.take(config)
    assert Desk(Bases()).load([spec.to_json()], str(folder), "cpu") == base.fingerprint

    class Other(Ranks):
        def ask(self, name, args, own):
            assert name == "load"
            assert [place for _, _, place in args] == ["gpu:1", "gpu:2"]
            return Answers(own(), [base.fingerprint, "another"])

    model = SimpleNamespace(identity=base.fingerprint, name=base.name)
    with pytest.raises(ModelError, match=f"rank 2 has other weights of {base.name} than rank 0"):
        assemble._on_all_ranks([spec], folder, Bases(ranks=Other(["gpu:1", "gpu:2"])), lambda: model)
    assert assemble._on_all_ranks([spec], folder, Bases(), lambda: model) is model
