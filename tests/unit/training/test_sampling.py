import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.campaigns import StopAfter, campaign, continue_training, toy_world, train
from helpers.lanes import made, runs_of
from helpers.records import group

from retrain.config.training import Sampling
from retrain.engines.local import LocalEngine
from retrain.files import read_jsonl
from retrain.rollouts.collect import CollectResult, RolloutRequest
from retrain.rollouts.queue import RolloutQueue
from retrain.rollouts.resample import REASONS, Resampler, no_signal_reason
from retrain.types import Group, PolicyRef, Problem, RewardResult

QUIET = ("squeeze.enabled=false", "evaluation.problems=0", "training.eval_every=0", "campaign.seeds=[1]")
AHEAD = ("training.max_off_policy_steps=2", "algorithm.correction='tis'")
LABELS = ("grpo+none", "rloo+gtpo_hicra_placebo")
REWARD = '''
def rare(completion, answer):
    """1 for one completion in four, whatever a toy model writes."""
    return float(sum(map(ord, completion)) % 4 == 0)
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("home")
    model = toy_world(home)
    (home / "toyrewards.py").write_text((home / "toyrewards.py").read_text() + REWARD)
    return model


def trained(path: Path, out: Path, *sets: str, **options: Any) -> dict[str, list[dict]]:
    train(path, out, *QUIET, *sets, **options)
    return rows_of(out)


def rows_of(out: Path) -> dict[str, list[dict]]:
    return {run.name: read_jsonl(run / "metrics.jsonl") for run in runs_of(out)}


def results_of(out: Path) -> dict[str, dict]:
    return {run.name: made(run) for run in runs_of(out)}


class Requested:
    """The versions and the prompts (with their places in the step) that were sampled, by run and step."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.versions: dict[tuple, set[int]] = defaultdict(set)
        self.prompts: dict[tuple, list[tuple]] = defaultdict(list)
        sample = LocalEngine.sample

        def noting(engine, requests, **options):
            for request in requests:
                if "sample" in request.stream:
                    key = request.policy.run_id, request.stream[-2]
                    self.versions[key].add(request.policy.version)
                    self.prompts[key].append((request.stream[-1], request.prompt_ids))
            return sample(engine, requests, **options)

        patch.setattr(LocalEngine, "sample", noting)


class ConcurrentEngine(LocalEngine):
    """A local engine whose rollouts are sampled on another thread, as those of a server are."""

    is_concurrent = True


KILLED = (*AHEAD, "lora.anneal=[[3, 2]]", "training.save_every=1", "training.keep_last=0")


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """Return what five steps with rollouts two steps ahead requested, and their directory."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        requested = Requested(patch)
        trained(campaign(folder, model, steps=5), folder / "out", *KILLED)
    return requested, folder / "out"


def test_each_step_is_drawn_by_the_weights_of_two_steps_before(whole):
    requested, out = whole
    for run, rows in rows_of(out).items():
        assert [requested.versions[run, step] for step in range(5)] == [{max(0, step - 2)} for step in range(5)]
        for key in ("off_policy_steps_max", "off_policy_steps_mean"):
            assert [row[key] for row in rows] == [min(step, 2) for step in range(5)]
        assert all(row["discarded_max_async_pct"] == 0 for row in rows)
        assert rows[0]["val/ratio"] == pytest.approx(1.0, abs=1e-4)  # the first batch is on policy
        assert abs(rows[4]["val/ratio"] - 1.0) > 1e-4
        earlier = (out / "runs" / run / "checkpoints/step_000004/earlier").iterdir()
        assert sorted(path.name for path in earlier) == ["step_000002", "step_000003"]


@pytest.mark.parametrize("concurrent", [False, True])
def test_interrupted_equals_uninterrupted_also_beside_the_update(whole, tmp_path, model, monkeypatch, concurrent):
    """Stopped before there are as many older weights, and after a lower rank began; on the same thread and another."""
    out = tmp_path / "out"
    trained(campaign(tmp_path, model, steps=5), out, *KILLED, observer=StopAfter(2), status=130)
    assert {len(rows) for rows in rows_of(out).values()} == {1}
    if concurrent:
        monkeypatch.setattr("retrain.training.bases.LocalEngine", ConcurrentEngine)
    else:
        continue_training(out, observer=StopAfter(6), status=130)
    continue_training(out)
    assert results_of(out) == results_of(whole[1])
    if not concurrent:
        return
    rows = read_jsonl(out / "runs/grpo+none_s1/metrics.jsonl")
    assert all(row["queue_depth"] <= bound for row, bound in zip(rows, (0, 2, 2, 1, 0), strict=True))
    assert sum(row["time/overlap"] for row in rows) > 0
    assert all(row["perf/sampler_tokens_per_s"] > 0 and row["perf/trainer_tokens_per_s"] > 0 for row in rows)
    spans = [row["spans"] for row in read_jsonl(out / "runs/grpo+none_s1/timing_spans.jsonl")]
    assert {"ahead", "rollout", "update"} <= {span["name"] for row in spans for span in row}


def test_a_group_that_is_too_old_does_not_train_and_is_counted(tmp_path, model, monkeypatch):
    """An engine answers with weights that nobody keeps any more; a run with and one without a critic."""
    sample = LocalEngine.sample

    def late(self, requests, *, finished, **options):
        def finished_late(index, actions):
            if requests[index].stream[-3:] in (("sample", 2, 0), ("sample", 3, 0), ("sample", 3, 1), ("sample", 3, 2)):
                actions = [*actions[:-1], replace(actions[-1], policy_version=-7)]
            finished(index, actions)

        return sample(self, requests, finished=finished_late, **options)

    monkeypatch.setattr(LocalEngine, "sample", late)
    path = campaign(tmp_path, model, steps=5)
    path.write_text(path.read_text().replace('advantage_mode = "rloo"\ntransform_mode = "gtpo_hicra_placebo"',
                                             'advantage_mode = "gae"\ntransform_mode = "none"'))  # fmt: skip
    sets = (
        "training.max_off_policy_steps=1", "training.num_iterations=2", "algorithm.correction='tis'",
        "logging.rollouts_every=1",
    )  # fmt: skip
    found = trained(path, tmp_path / "out", *sets)
    for rows in found.values():
        assert [row["discarded_max_async_pct"] for row in rows] == pytest.approx([0, 0, 100 / 3, 100, 0])
        assert [row["off_policy_steps_max"] for row in rows] == [0, 1, 2, 2, 0]  # no update, no older weights
        assert rows[2]["num_datums"] <= 8
        assert rows[2]["discarded_count"] >= 1
        assert rows[2]["discarded_reward_mean"] is not None
        assert rows[2]["discarded_length_completion_max"] > 0
        assert (rows[3]["num_datums"], rows[3]["loss"]) == (0, None)
        assert rows[4]["loss"] is not None
    for row in found["gae+none_s1"]:
        assert row["objective/kl"] is not None
        assert row["objective/entropy"] > 0
    run = tmp_path / "out/runs/grpo+none_s1"
    lines = read_jsonl(run / "train_iteration_000003_rollout_summaries.jsonl")
    assert {(line["discarded"], line["advantage"]) for line in lines} == {("max_async", None)}
    assert {line["sampling_client_step"] for line in lines} <= {1, 2}
    page = (run / "train_iteration_000003.html").read_text()
    assert page.count("did not train: too many steps behind the policy") == 3


class Slow:
    """An engine whose ``cancel`` lets the steps in ``held`` go on."""

    is_concurrent = False

    def __init__(self, held: dict[int, threading.Event]):
        self.held = held

    def cancel(self):
        for event in self.held.values():
            event.set()


@pytest.fixture
def collecting():
    """Return what is collected in order, events for which steps wait, and a collector; requests are step numbers."""
    order, held = [], {}

    def collect(engine, requests, rows=None):
        order.append(list(requests))
        if requests[0] in held:
            assert held[requests[0]].wait(10)
        if "raise" in requests:
            raise RuntimeError("the server is gone")
        now = time.time()
        return CollectResult(list(requests), [("rollout", now - 1, now)], 0.5)

    return order, held, collect


def test_a_queue_samples_steps_in_order_and_raises_the_engines_error(collecting):
    order, held, collect = collecting
    queue = RolloutQueue(Slow(held), ahead=True, collect=collect)
    for owner in "ab":
        queue.offer(owner, {3: [3], 1: [1, 1], 2: [2]})
    taken = queue.take({"a": 1, "b": 1})
    assert taken.groups == {"a": [1, 1], "b": [1, 1]}
    assert taken.sync_seconds == 0.5
    assert [name for name, _, _ in taken.spans] == ["ahead", "rollout"]
    queue.withdraw("b")
    assert queue.take({"a": 2}).groups == {"a": [2]}
    assert queue.take({"a": 3}).depth == 0
    assert [step for requests in order for step in dict.fromkeys(requests)] == [1, 2, 3]
    queue.offer("a", {4: ["raise"]})
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the server is gone"):
            queue.take({"a": 4})


def test_nothing_is_sampled_ahead_while_paused_and_after_the_end(collecting):
    order, held, collect = collecting
    queue = RolloutQueue(Slow(held), ahead=True, collect=collect)
    queue.offer("a", {0: [0], 1: [1]})
    queue.take({"a": 0})
    with queue.paused():
        done = len(order)
        queue.offer("a", {2: [2]})
        time.sleep(0.1)
        assert len(order) == done
    queue.take({"a": 2})
    held[3] = threading.Event()
    queue.offer("a", {3: [3], 4: [4]})
    while order[-1] != [3]:
        time.sleep(0.01)
    queue.close()  # sampling is given up, and nothing follows
    assert order[-1] == [3]
    assert "rollouts ahead" not in [thread.name for thread in threading.enumerate()]


MIXED, RIGHT, WRONG = [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]
PROBLEMS = [Problem(f"p{i}", f"{i}?", "") for i in range(6)]


def groups_of(*rewards: list[Any]) -> list[Group]:
    return [group(each, [3] * len(each), problem_id=f"p{i}") for i, each in enumerate(rewards)]


def resampler(groups: int, rounds: int) -> Resampler:
    def upcoming(start: int, count: int) -> list[Problem]:
        return [PROBLEMS[(start + i) % len(PROBLEMS)] for i in range(count)]

    return Resampler(groups, rounds, upcoming, len(PROBLEMS))


def asked(sampler: Resampler, *rewards: list[Any], at: int = 0, groups: list[Any] | None = None):
    """(problem, place in the step) of what is asked for after groups of these rewards."""
    requests = [
        RolloutRequest(None, None, PROBLEMS[i], PolicyRef("run", 0), 2, Sampling(4, 1.0), (5, 1, "sample", at, i))
        for i in range(len(rewards))
    ]
    more = sampler.resample(at, requests, groups or groups_of(*rewards))
    assert all(each.stream[:4] == (5, 1, "sample", at) and each.samples == 2 for each in more)
    return [(each.problem.id, each.stream[-1]) for each in more]


def test_missing_groups_are_drawn_within_the_rounds_and_no_problem_twice():
    sampler = resampler(2, 3)
    assert asked(sampler, MIXED, MIXED) == []
    assert asked(sampler, WRONG, RIGHT) == [("p2", 2), ("p3", 3)]
    assert asked(sampler, MIXED, RIGHT, WRONG) == [("p3", 3)]
    # The list of a step begins where that step does; place 6 of 6 problems is p0, which was drawn.
    assert asked(sampler, WRONG, RIGHT, at=1) == [("p2", 2), ("p3", 3)]
    assert asked(resampler(2, 2), WRONG, RIGHT, at=1) == [("p4", 2), ("p5", 3)]
    assert asked(resampler(2, 1), *[WRONG] * 4) == []
    assert asked(resampler(2, 9), *[WRONG] * 6) == []
    failed = [RuntimeError("no such grader"), *groups_of(WRONG)]
    assert asked(sampler, WRONG, WRONG, groups=failed) == []  # the run will fail


def test_why_a_group_teaches_nothing():
    cases = {
        None: [MIXED, [0.1, 0.2], [1.0, None, 0.0]], "all_right": [RIGHT, [1.0, None]],
        "all_wrong": [WRONG, [0.0, 0.0, None], [0.3, 0.3 + 1e-12]],
        "alike": [[RewardResult(0.4, correct=True), RewardResult(0.4, correct=False)]], "ungraded": [[None, None]],
    }  # fmt: skip
    assert {*cases} == {None, *REASONS}
    for reason, own in cases.items():
        assert [no_signal_reason(each) for each in groups_of(*own)] == [reason] * len(own)


def test_a_batch_is_what_teaches_filled_up_with_what_was_drawn_first():
    sampler = resampler(3, 2)
    groups = groups_of(RIGHT, MIXED, RIGHT, WRONG, MIXED, WRONG)
    selected = sampler.select(groups)
    assert [groups.index(each) for each in selected.groups] == [0, 1, 4]
    assert [groups.index(each) for each in selected.dropped] == [2, 3, 5]
    assert selected.metrics == {
        "dynamic/rounds": 2, "dynamic/drawn": 6, "dynamic/unfilled": 1, "dynamic/dropped_all_right": 1,
        "dynamic/dropped_all_wrong": 2, "dynamic/dropped_alike": 0, "dynamic/dropped_ungraded": 0,
        "dynamic/dropped_tokens": 3 * 2 * (3 + 3), "dynamic/correct_rate": 5 / 6,
    }  # fmt: skip
    late = groups_of(WRONG, MIXED, *[WRONG] * 6, MIXED)
    assert resampler(2, 9).select(late).groups == [late[1], late[8]]
    first = groups_of(WRONG, RIGHT, WRONG)
    assert sampler.select(first).groups == first
    assert sampler.select(first).metrics["dynamic/rounds"] == 0


def dynamic(*more: str) -> list[str]:
    return ["training.dynamic_sampling=3", "reward.custom_function='rare'", "training.group_size=3", *more]


@pytest.fixture(scope="module")
def cohort(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cohort")
    with pytest.MonkeyPatch.context() as patch:
        requested = Requested(patch)
        trained(campaign(folder, model, steps=2), folder / "out", *dynamic("campaign.seeds=[1,2]"))
    return requested, folder / "out"


def test_a_cohort_draws_what_each_run_is_missing_and_pairs_stay_pairs(cohort):
    """Conditions have the same prompts and random numbers as far as both of a pair are sampled."""
    requested, out = cohort
    every = rows_of(out)
    for row in [row for rows in every.values() for row in rows]:
        dropped = sum(row[f"dynamic/dropped_{reason}"] for reason in REASONS)
        assert row["batch_size"] == 3
        assert row["dynamic/drawn"] == 3 + dropped
        assert row["env/all/by_group/frac_mixed"] == pytest.approx(1 - row["dynamic/unfilled"] / 3)
        assert row["dynamic/unfilled"] == 0 or row["dynamic/rounds"] == 3
        assert (row["dynamic/dropped_tokens"] > 0) == (dropped > 0)
    assert len({row["dynamic/rounds"] for rows in every.values() for row in rows}) > 1
    for rows in every.values():
        assert rows[-1]["episode"] == 3 * sum(row["dynamic/drawn"] for row in rows)
        kept = sum(row["env/all/total_ac_tokens"] + row["env/all/total_ob_tokens"] for row in rows)
        assert rows[-1]["num_tokens"] == kept + sum(row["dynamic/dropped_tokens"] for row in rows)
        assert rows[-1]["epoch"] == pytest.approx(2 * rows[0]["epoch"])  # the cursor counts first rounds
    lengths = []
    for seed in (1, 2):
        for at in range(2):
            first, second = (requested.prompts[f"{label}_s{seed}", at] for label in LABELS)
            shorter = min(len(first), len(second))
            assert first[:shorter] == second[:shorter]
            assert [place for place, _ in first] == list(range(len(first)))
            lengths.append((len(first), len(second)))
    assert any(first != second for first, second in lengths)
    assert requested.prompts[f"{LABELS[0]}_s1", 0] != requested.prompts[f"{LABELS[0]}_s2", 0]


def test_it_is_the_same_alone_and_interrupted(cohort, tmp_path, model):
    path, out = campaign(tmp_path, model, steps=2), tmp_path / "killed"
    expected = rows_of(cohort[1])
    for run, rows in trained(path, tmp_path / "alone", *dynamic("campaign.lanes=1")).items():
        keys = [key for key in rows[0] if key.startswith("dynamic/") or key in ("mean_reward", "num_tokens")]
        assert len(keys) == 11
        assert [[row[key] for key in keys] for row in rows] == [[row[key] for key in keys] for row in expected[run]]
    trained(path, out, *dynamic("campaign.seeds=[1,2]"), observer=StopAfter(4), status=130)
    assert {len(rows) for rows in rows_of(out).values()} == {1}
    continue_training(out)
    assert results_of(out) == results_of(cohort[1])
