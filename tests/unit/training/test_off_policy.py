"""Rollouts behind the policy: which weights draw what, that it is exact, and what becomes of those that are too old."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
from toycampaign import StopAfter, campaign

from retrain.campaign.running import assemble
from retrain.campaign.running.controller import launch, resume
from retrain.config import load
from retrain.engines.local import LocalEngine
from retrain.engines.protocol import PolicyRef
from retrain.files import read_jsonl
from retrain.record.observer import NullObserver
from retrain.record.tokens import TokenFile
from retrain.rollouts.queue import RolloutQueue
from retrain.rollouts.versions import RecentWeights, Weights

QUIET = ("squeeze.enabled=false", "evaluation.problems=0", "training.eval_every=0")
CLOCKS = ("time", "timing_", "perf/", "step_time", "tokens_per_second", "sample_time", "train_time")


def trained(path: Path, out: Path, *sets: str, observer: NullObserver | None = None) -> dict[str, list[dict]]:
    """The rows of every run, without what a clock says."""
    launch(load(path, [*QUIET, *sets]), out, observer or NullObserver())
    return rows_of(out)


def rows_of(out: Path) -> dict[str, list[dict]]:
    found = {}
    for place in sorted((out / "runs").iterdir()):
        rows = read_jsonl(place / "metrics.jsonl")
        found[place.name] = [
            {k: v for k, v in row.items() if not k.startswith(CLOCKS) and k not in ("eps", "queue_depth")}
            for row in rows
        ]
    return found


def ahead(bound: int) -> tuple[str, str]:
    return f"training.max_off_policy_steps={bound}", "algorithm.correction='tis'"


def adapters(out: Path) -> dict[str, bytes]:
    return {path.parent.parent.name: path.read_bytes() for path in out.glob("runs/*/final/adapter_model.safetensors")}


@pytest.fixture
def drawn(monkeypatch) -> dict[tuple, set[int]]:
    """The versions that were asked for, by (run, step)."""
    versions: dict[tuple, set[int]] = defaultdict(set)
    sample = LocalEngine.sample

    def noting(self, requests, **how):
        for request in requests:
            if "sample" in request.stream:
                step = request.stream[request.stream.index("sample") + 1]
                versions[request.policy.run_id, step].add(request.policy.version)
        return sample(self, requests, **how)

    monkeypatch.setattr(LocalEngine, "sample", noting)
    return versions


# -- which weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [1, 2])
def test_each_step_is_drawn_by_the_weights_of_so_many_steps_before(tmp_path, model, drawn, bound):
    rows = trained(campaign(tmp_path, model, steps=5), tmp_path / "out", *ahead(bound))
    assert len(rows) == 4
    for run, own in rows.items():
        assert [drawn[run, step] for step in range(5)] == [{max(0, step - bound)} for step in range(5)]
        assert [row["off_policy_steps_max"] for row in own] == [min(step, bound) for step in range(5)]
        assert [row["off_policy_steps_mean"] for row in own] == [min(step, bound) for step in range(5)]
        assert all(row["discarded_max_async_pct"] == 0 for row in own)
        assert own[0]["val/ratio"] == pytest.approx(1.0, abs=1e-4)  # the first batch is drawn by its own weights
        assert abs(own[4]["val/ratio"] - 1.0) > 1e-4


def test_until_the_first_weights_are_old_enough_the_untrained_model_draws(tmp_path, model):
    """As many batches as may be behind are those that a run would draw whose updates change nothing."""
    path = campaign(tmp_path, model, steps=3)
    behind = trained(path, tmp_path / "behind", *ahead(4))
    still = trained(path, tmp_path / "still", "training.lr=1e-30")
    for run, rows in behind.items():
        assert [row["mean_reward"] for row in rows] == [row["mean_reward"] for row in still[run]]
        assert [row["entropy"] for row in rows] == pytest.approx([row["entropy"] for row in still[run]])


def test_a_killed_run_goes_on_exactly(tmp_path, model):
    """Also where a lower rank began in between, and from a checkpoint before there were as many older weights."""
    path = campaign(tmp_path, model, steps=6)
    sets = (*ahead(2), "lora.anneal=[[3, 2]]", "training.save_every=1", "training.keep_last=0")
    whole = trained(path, tmp_path / "whole", *sets)
    for steps in (1, 4):
        out = tmp_path / f"killed_{steps}"
        trained(path, out, *sets, observer=StopAfter(4 * steps))
        assert {len(rows) for rows in rows_of(out).values()} == {steps}
        assert resume(out, NullObserver()).exit_status == 0
        assert rows_of(out) == whole
        assert adapters(out) == adapters(tmp_path / "whole")
    kept = sorted(
        path.name for path in (tmp_path / "whole/runs/grpo+none_s1/checkpoints/step_000004/earlier").iterdir()
    )
    assert kept == ["step_000002", "step_000003"]


class Beside(LocalEngine):
    """Our own engine as one with processors of its own."""

    beside = True


def test_sampling_beside_the_update_draws_the_same(tmp_path, model, drawn, monkeypatch):
    """The thread changes when rollouts are drawn, and nothing else; also when it is stopped and goes on."""
    path, sets = campaign(tmp_path, model, steps=5), ahead(2)
    near = trained(path, tmp_path / "near", *sets)
    asked = dict(drawn)
    monkeypatch.setattr("retrain.campaign.running.models.LocalEngine", Beside)
    far = trained(path, tmp_path / "far", *sets)
    assert dict(drawn) == asked
    assert far == near
    assert adapters(tmp_path / "far") == adapters(tmp_path / "near")
    trained(path, tmp_path / "killed", *sets, observer=StopAfter(8))
    assert resume(tmp_path / "killed", NullObserver()).exit_status == 0
    assert rows_of(tmp_path / "killed") == near
    last = read_jsonl(tmp_path / "far/runs/grpo+none_s1/metrics.jsonl")
    assert all(row["queue_depth"] <= bound for row, bound in zip(last, (2, 2, 2, 1, 0), strict=True))
    assert all(row["time/overlap"] >= 0 for row in last)
    assert sum(row["time/overlap"] for row in last) > 0
    assert all(row["perf/sampler_tokens_per_s"] > 0 and row["perf/trainer_tokens_per_s"] > 0 for row in last)
    assert last[0]["timing_waiting_for_data"] > 0
    names = {
        span["name"]
        for row in read_jsonl(tmp_path / "far/runs/grpo+none_s1/timing_spans.jsonl")
        for span in row["spans"]
    }
    assert {"ahead", "rollout", "update"} <= names
    page = (tmp_path / "far/runs/grpo+none_s1/timeline.html").read_text()
    assert '"lanes":["ahead","rollout"' in page.replace(" ", "")


def test_a_run_that_fails_leaves_the_others_ahead(tmp_path, model, monkeypatch):
    monkeypatch.setattr("retrain.campaign.running.models.LocalEngine", Beside)
    path = campaign(tmp_path, model, steps=4)
    update = assemble.LocalPolicy.update

    def failing(self, batch, objective, lr):
        if self.config.training.seed == 2 and batch.step == 1 and self.config.algorithm.advantage_mode == "rloo":
            raise RuntimeError("this run alone")
        return update(self, batch, objective, lr)

    monkeypatch.setattr(assemble.LocalPolicy, "update", failing)
    rows = trained(path, tmp_path / "out", *ahead(1))
    assert sorted(len(own) for own in rows.values()) == [1, 4, 4, 4]


# -- too old --------------------------------------------------------------------------------------------------------


def test_a_group_that_is_too_old_does_not_train_and_is_counted(tmp_path, model, monkeypatch):
    """An engine that answered with weights that nobody keeps any more: its groups are recorded, and nothing else."""
    sample = LocalEngine.sample

    def late(self, requests, **how):
        groups = sample(self, requests, **how)
        for request, group in zip(requests, groups, strict=True):
            if request.stream[-3:] in (("sample", 2, 0), ("sample", 3, 0), ("sample", 3, 1), ("sample", 3, 2)):
                group[-1].policy_version = -7
        return groups

    monkeypatch.setattr(LocalEngine, "sample", late)
    path = campaign(tmp_path, model, steps=5)
    detector = "def half(texts, offsets):\n    return [[i % 2 for i in range(len(own))] for own in offsets]\n"
    (tmp_path / "marks.py").write_text(detector)
    how = (*ahead(1), "logging.rollouts_every=1", "planning.detector='marks:half'")
    for name, rows in trained(path, tmp_path / "out", *how).items():
        for row in rows:
            with TokenFile(tmp_path / f"out/runs/{name}/tokens_{row['step']:06d}.safetensors") as file:
                marks = [int(mark) for i in range(len(file)) for mark in file.rollout(i).arrays["planning"]]
            assert sum(marks) > 0
            assert row["planning_fraction"] == pytest.approx(sum(marks) / len(marks))  # of all, also of the old
        assert [row["discarded_max_async_pct"] for row in rows] == pytest.approx([0, 0, 100 / 3, 100, 0])
        assert [row["off_policy_steps_max"] for row in rows] == [0, 1, 2, 2, 0]  # no update, no older weights
        assert rows[2]["num_datums"] <= 8
        assert rows[2]["discarded_count"] >= 1
        assert rows[2]["discarded_reward_mean"] is not None
        assert rows[2]["discarded_length_completion_max"] > 0
        assert rows[3]["num_datums"] == 0
        assert rows[3]["loss"] is None
        assert rows[4]["loss"] is not None
    run = tmp_path / "out/runs/grpo+none_s1"
    lines = read_jsonl(run / "train_iteration_000003_rollout_summaries.jsonl")
    assert {line["discarded"] for line in lines} == {"max_async"}
    assert {line["advantage"] for line in lines} == {None}
    ages = {line["sampling_client_step"] for line in read_jsonl(run / "train_iteration_000004_rollout_summaries.jsonl")}
    assert ages == {4}
    assert {line["sampling_client_step"] for line in lines} <= {1, 2}
    page = (run / "train_iteration_000003.html").read_text()
    assert page.count("did not train: too many steps behind the policy") == 3


def test_a_critic_has_a_kl_where_all_groups_are_too_old(tmp_path, model, monkeypatch):
    sample = LocalEngine.sample

    def late(self, requests, **how):
        groups = sample(self, requests, **how)
        for request, group in zip(requests, groups, strict=True):
            if request.stream[-2] == 2:
                group[-1].policy_version = -7
        return groups

    monkeypatch.setattr(LocalEngine, "sample", late)
    path = campaign(tmp_path, model, steps=3, condition="")
    path.write_text(path.read_text().replace('advantage_mode = "rloo"\ntransform_mode = "gtpo_hicra_placebo"',
                                             'advantage_mode = "gae"\ntransform_mode = "none"'))  # fmt: skip
    rows = trained(path, tmp_path / "out", *ahead(1), "campaign.seeds=[1]")["gae+none_s1"]
    assert [row["num_datums"] > 0 for row in rows] == [True, True, False]
    assert all(row["objective/kl"] is not None and row["objective/entropy"] > 0 for row in rows)


# -- the parts ------------------------------------------------------------------------------------------------------


def noted(recent: RecentWeights, step: int, version: int) -> list[int]:
    return [ref.version for ref in recent.note(Weights(step, PolicyRef("a", version), object()))]  # pyright: ignore[reportArgumentType]


def test_recent_weights():
    recent = RecentWeights(2, remembers=True)
    assert noted(recent, 0, 0) == []
    assert [recent.drawing(step).version for step in range(3)] == [0, 0, 0]
    assert noted(recent, 1, 1) == []
    assert noted(recent, 2, 1) == []  # an update that was left out: the same weights
    assert [recent.drawing(step).version for step in range(2, 5)] == [0, 1, 1]
    assert [recent.age(version, 2) for version in (0, 1)] == [2, 0]
    assert noted(recent, 3, 2) == [0]
    assert noted(recent, 3, 3) == []  # a lower rank: other weights before the same step, and the first may be in use
    assert recent.drawing(5).version == 3
    assert recent.age(2, 3) == 0
    assert noted(recent, 4, 4) == [2]
    assert noted(recent, 5, 5) == [1]
    assert list(recent.snapshots()) == [1, 3, 4, 5]
    assert recent.age(1, 5) == 3  # older than any that is kept
    assert [each.step for each in recent] == [3, 4, 5]
    synchronous = RecentWeights(0)
    assert [noted(synchronous, step, step) for step in range(3)] == [[], [0], [1]]
    assert noted(synchronous, 2, 3) == [2]
    assert list(synchronous.snapshots()) == [3]
    assert synchronous.drawing(2).version == 3


class Slow:
    """An engine whose ``collect`` is replaced: it waits for its turn, or raises."""

    gates: dict

    def give_up(self):
        self.gates[3].set()


@pytest.fixture
def collecting(monkeypatch):
    """What is collected, in order, and when it may be done; a request is the number of a step."""
    order, gates = [], defaultdict(threading.Event)

    def collect(engine, requests, rows=None):
        from retrain.rollouts.collect import Collected

        order.append(list(requests))
        assert gates[requests[0]].wait(10)
        if "raise" in requests:
            raise RuntimeError("the server is gone")
        now = time.time()
        return Collected(list(requests), [("rollout", now - 1, now)], 0.5)

    monkeypatch.setattr("retrain.rollouts.dynamic.collect", collect)
    return order, gates


def test_steps_are_sampled_and_taken_in_their_order(collecting):
    order, gates = collecting
    for gate in (1, 2, 3):
        gates[gate].set()
    queue = RolloutQueue(Slow(), ahead=True)  # pyright: ignore[reportArgumentType]
    for owner in "ab":
        queue.offer(owner, {3: [3], 1: [1, 1], 2: [2]})
    taken = queue.take({"a": 1, "b": 1})
    assert taken.groups == {"a": [1, 1], "b": [1, 1]}
    assert taken.sync_seconds == 0.5
    assert [name for name, _, _ in taken.spans] == ["ahead", "rollout"]
    queue.withdraw("b")
    assert queue.take({"a": 2}).groups == {"a": [2]}
    assert queue.take({"a": 3}).depth == 0
    assert order[0] == [1, 1, 1, 1]
    assert [step for own in order for step in dict.fromkeys(own)] == [1, 2, 3]
    queue.close()


def test_the_depth_is_how_many_later_steps_wait_for_the_trainer(collecting):
    order, gates = collecting
    queue = RolloutQueue(Slow(), ahead=True)  # pyright: ignore[reportArgumentType]
    queue.offer("a", {1: [1], 2: [2], 3: [3]})
    gates[1].set()
    assert queue.take({"a": 1}).depth == 0  # the next one is being sampled
    gates[2].set()
    gates[3].set()
    deadline = time.time() + 10
    while len(order) < 3 or queue.overlap(0, time.time()) != queue.overlap(0, time.time() + 1):
        assert time.time() < deadline
        time.sleep(0.01)
    assert queue.take({"a": 2}).depth == 1  # the one after it is there
    queue.close()


def test_what_the_engine_raises_reaches_who_waits(collecting):
    _, gates = collecting
    gates["raise"].set()
    queue = RolloutQueue(Slow(), ahead=True)  # pyright: ignore[reportArgumentType]
    queue.offer("a", {0: ["raise"]})
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the server is gone"):
            queue.take({"a": 0})


def test_nothing_is_sampled_ahead_while_it_is_paused_and_nothing_after_its_end(collecting):
    order, gates = collecting
    gates[0].set()
    queue = RolloutQueue(Slow(), ahead=True)  # pyright: ignore[reportArgumentType]
    queue.offer("a", {0: [0], 1: [1]})
    queue.take({"a": 0})
    begin = time.time()
    gates[1].set()
    with queue.paused():
        done = len(order)
        queue.offer("a", {2: [2]})
        time.sleep(0.2)
        assert len(order) == done
    gates[2].set()
    queue.take({"a": 1})
    queue.take({"a": 2})
    assert 0 <= queue.overlap(begin, time.time()) <= time.time() - begin
    queue.offer("a", {3: [3], 4: [4]})
    queue.engine.gates = gates
    while order[-1] != [3]:
        time.sleep(0.01)
    queue.close()  # what is being sampled is given up, and nothing follows
    assert order[-1] == [3]
    assert queue._thread is not None
    assert not queue._thread.is_alive()
