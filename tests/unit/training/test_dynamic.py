"""Dynamic sampling: which prompts are drawn again and why, how far, that it is exact, and what is said of it."""

from __future__ import annotations

import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from record_cases import completion, context, group, step
from toycampaign import StopAfter, campaign, toy_world
from typer.testing import CliRunner

from retrain.campaign.planning.estimate import work_of
from retrain.campaign.running.controller import launch, resume
from retrain.cli import app
from retrain.config import load, parse_dict
from retrain.config.training import Sampling
from retrain.data.prompts import Renderer
from retrain.engines.local import LocalEngine
from retrain.engines.protocol import PolicyRef
from retrain.files import read_jsonl
from retrain.record.measure import Totals, step_row
from retrain.record.observer import NullObserver
from retrain.rollouts.collect import RolloutRequest
from retrain.rollouts.dynamic import REASONS, DynamicSampling, why_alike
from retrain.rollouts.queue import RolloutQueue
from retrain.types import Group, Problem, RewardResult

CLOCKS = ("time", "timing_", "perf/", "step_time", "tokens_per_second", "sample_time", "train_time")
QUIET = ("squeeze.enabled=false", "evaluation.problems=0", "training.eval_every=0")
REWARD = '''
def rare(completion, answer):
    """1 for one completion in four, whatever a toy model writes."""
    return float(sum(map(ord, completion)) % 4 == 0)

def never(completion, answer):
    return 0.0
'''

# -- the parts ------------------------------------------------------------------------------------------------------

MIXED, RIGHT, WRONG = [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]
PROBLEMS = [Problem(f"p{i}", f"{i}?", "") for i in range(6)]


def upcoming(start: int, count: int) -> list[Problem]:
    return [PROBLEMS[(start + i) % len(PROBLEMS)] for i in range(count)]


def request(problem: Problem, place: int, at: int = 0) -> RolloutRequest:
    environment: Any = None
    renderer: Renderer = None  # type: ignore[assignment]
    stream = (5, 1, "sample", at, place)
    return RolloutRequest(environment, renderer, problem, PolicyRef("run", 0), 2, Sampling(4, 1.0), stream)


def groups_of(*rewards: list[Any]) -> list[Group]:
    return [group(each, [3] * len(each), problem_id=f"p{i}") for i, each in enumerate(rewards)]


def asked(sampling: DynamicSampling, *rewards: list[Any], first: tuple[int, ...] = (0, 1), at: int = 0):
    """(problem, place in the step) of what is asked for after groups of these rewards."""
    requests = [request(PROBLEMS[i], place, at) for place, i in enumerate(first)]
    more = sampling.further(at, requests, groups_of(*rewards))
    assert all(each.stream[:4] == (5, 1, "sample", at) and each.samples == 2 for each in more)
    return [(each.problem.id, each.stream[-1]) for each in more]


def test_as_many_are_drawn_as_are_missing_and_none_twice_in_a_step():
    sampling = DynamicSampling(2, 3, upcoming, len(PROBLEMS))
    assert asked(sampling, MIXED, RIGHT) == [("p2", 2)]
    assert asked(sampling, WRONG, RIGHT) == [("p2", 2), ("p3", 3)]
    assert asked(sampling, MIXED, MIXED) == []
    assert asked(sampling, MIXED, RIGHT, WRONG, first=(0, 1, 2)) == [("p3", 3)]
    # The list of a step begins where its own is, whatever the steps before it took.
    assert asked(sampling, WRONG, RIGHT, at=1) == [("p2", 2), ("p3", 3)]  # place 6 of 6 problems is p0, which is seen
    assert asked(DynamicSampling(2, 2, upcoming, 6), WRONG, RIGHT, at=1) == [("p4", 2), ("p5", 3)]


def test_rounds_are_bounded_and_end_with_the_problems():
    sampling = DynamicSampling(2, 2, upcoming, len(PROBLEMS))
    assert asked(sampling, WRONG, WRONG, WRONG, WRONG, first=(0, 1, 2, 3)) == [("p4", 4), ("p5", 5)]
    assert asked(sampling, *[WRONG] * 6, first=(0, 1, 2, 3, 4, 5)) == []
    many = [Problem(f"q{i}", "?", "") for i in range(40)]
    once = DynamicSampling(2, 1, lambda start, count: many[start : start + count], 40)
    assert asked(once, WRONG, WRONG) == [("q0", 2), ("q1", 3)]
    assert asked(once, *[WRONG] * 4, first=(0, 1, 2, 3)) == []
    six = DynamicSampling(2, 9, upcoming, len(PROBLEMS))
    assert asked(six, *[WRONG] * 4, first=(0, 1, 2, 3)) == [("p4", 4), ("p5", 5)]
    assert asked(six, *[WRONG] * 6, first=(0, 1, 2, 3, 4, 5)) == []  # each was drawn
    assert DynamicSampling(2, 9, upcoming, 3).further(0, [request(PROBLEMS[0], 0), request(PROBLEMS[1], 1)],
                                                     groups_of(WRONG, WRONG))[0].problem.id == "p2"  # fmt: skip


def test_nothing_more_is_drawn_for_a_run_that_will_fail():
    requests = [request(PROBLEMS[0], 0), request(PROBLEMS[1], 1)]
    drawn = [RuntimeError("no such grader"), *groups_of(WRONG)]
    assert DynamicSampling(2, 3, upcoming, 6).further(0, requests, drawn) == []


def test_why_a_group_teaches_nothing():
    half = RewardResult(0.4, correct=True), RewardResult(0.4, correct=False)
    cases = {
        None: [MIXED, [0.1, 0.2], [1.0, None, 0.0]],
        "all_right": [RIGHT, [1.0, None]],
        "all_wrong": [WRONG, [0.0, 0.0, None], [0.3, 0.3 + 1e-12]],
        "alike": [list(half)],
        "ungraded": [[None, None]],
    }
    assert {*cases} == {None, *REASONS}
    for reason, own in cases.items():
        assert [why_alike(each) for each in groups_of(*own)] == [reason] * len(own)


def test_a_batch_is_what_teaches_filled_up_with_what_was_drawn_first():
    sampling = DynamicSampling(3, 2, upcoming, 6)
    groups = groups_of(RIGHT, MIXED, RIGHT, WRONG, MIXED, WRONG)
    chosen = sampling.choose(groups)
    assert [groups.index(each) for each in chosen.groups] == [0, 1, 4]
    assert [groups.index(each) for each in chosen.dropped] == [2, 3, 5]
    tokens = 3 * 2 * (3 + 3)
    assert chosen.numbers == {
        "dynamic/rounds": 2, "dynamic/drawn": 6, "dynamic/unfilled": 1, "dynamic/dropped_all_right": 1,
        "dynamic/dropped_all_wrong": 2, "dynamic/dropped_alike": 0, "dynamic/dropped_ungraded": 0,
        "dynamic/dropped_tokens": tokens, "dynamic/correct_rate": 5 / 6,
    }  # fmt: skip
    enough = groups_of(RIGHT, MIXED, MIXED, MIXED)
    assert sampling.choose(enough).groups == enough[1:]
    assert sampling.choose(enough).numbers["dynamic/rounds"] == 1
    assert sampling.choose(enough).numbers["dynamic/unfilled"] == 0
    late = groups_of(WRONG, MIXED, *[WRONG] * 6, MIXED)
    assert DynamicSampling(2, 9, upcoming, 99).choose(late).groups == [late[1], late[8]]
    first = groups_of(WRONG, RIGHT, WRONG)
    assert sampling.choose(first).groups == first
    assert sampling.choose(first).numbers["dynamic/rounds"] == 0


def test_what_was_dropped_counts_in_what_the_run_has_sampled_and_in_no_mean():
    groups = groups_of(MIXED, [0.0, 0.0])
    record = step(groups[:1])
    record.dropped = groups[1:]
    kept, whole = (step_row(each, context(), Totals(10, 5, 100, 0.0)) for each in (step(groups[:1]), record))
    assert whole["num_tokens"] == 100 + 2 * 2 * 6
    assert kept["num_tokens"] == 100 + 2 * 6
    assert (whole["episode"], kept["episode"]) == (14, 12)
    assert whole["running_correct_rate"] == 6 / 14
    assert whole["perf/tokens_per_s"] == 2 * kept["perf/tokens_per_s"]
    assert whole["perf/episodes_per_s"] == 2 * kept["perf/episodes_per_s"]
    for key in ("mean_reward", "correct_rate", "batch_size", "completions/mean_length", "env/all/total_ac_tokens"):
        assert whole[key] == kept[key]
    assert len(completion(3)) == 3


# -- the queue ------------------------------------------------------------------------------------------------------


class Engine:
    beside = False

    def give_up(self):
        pass


def doubled(at, requests, groups):
    """What is sampled besides until there are three."""
    return [requests[-1] * 10] if len(groups) < 3 and at != 7 else []


@pytest.mark.parametrize("ahead", [False, True])
def test_rounds_of_all_owners_are_sampled_together(ahead, monkeypatch):
    from retrain.rollouts.collect import Collected

    order, threads = [], set()

    def collect(engine, requests, rows=None):
        order.append(list(requests))
        threads.add(threading.current_thread().name)
        return Collected([f"g{each}" for each in requests], [("rollout", 1.0, 2.0)], 0.5)

    monkeypatch.setattr("retrain.rollouts.dynamic.collect", collect)
    queue = RolloutQueue(Engine(), ahead=ahead)  # pyright: ignore[reportArgumentType]
    queue.offer("a", {1: [1, 2]}, doubled)  # pyright: ignore[reportArgumentType]
    queue.offer("b", {1: [3]}, doubled)  # pyright: ignore[reportArgumentType]
    queue.offer("c", {1: [4]})  # pyright: ignore[reportArgumentType]
    taken = queue.take({"a": 1, "b": 1, "c": 1})
    queue.close()
    if not ahead:  # a thread may begin before all have offered
        assert order == [[1, 2, 3, 4], [20, 30], [300]]
        assert taken.sync_seconds == 1.5
        assert len(taken.spans) == 3
    assert taken.groups == {"a": ["g1", "g2", "g20"], "b": ["g3", "g30", "g300"], "c": ["g4"]}
    assert (threading.current_thread().name in threads) != ahead


# -- runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("dynamic")
    found = toy_world(home)
    (home / "toyrewards.py").write_text((home / "toyrewards.py").read_text() + REWARD)
    return found


def sets_of(*more: str, rounds: int = 3, reward: str = "rare") -> list[str]:
    return [*QUIET, f"training.dynamic_sampling={rounds}", f"reward.custom_function='{reward}'",
            "training.group_size=3", *more]  # fmt: skip


def rows_of(out: Path) -> dict[str, list[dict]]:
    return {
        place.name: [{k: v for k, v in row.items() if not k.startswith(CLOCKS) and k not in ("eps", "queue_depth")}
                     for row in read_jsonl(place / "metrics.jsonl")]
        for place in sorted((out / "runs").iterdir())
    }  # fmt: skip


def trained(path: Path, out: Path, *sets: str, observer: NullObserver | None = None) -> dict[str, list[dict]]:
    launch(load(path, sets), out, observer or NullObserver())
    return rows_of(out)


@pytest.fixture
def drawn(monkeypatch) -> dict[tuple, list[tuple]]:
    """(place in the step, prompt) of all that was asked for, in order, by run and step."""
    found: dict[tuple, list[tuple]] = defaultdict(list)
    sample = LocalEngine.sample

    def noting(self, requests, **how):
        for each in requests:
            if "sample" in each.stream:
                found[each.policy.run_id, each.stream[-2]].append((each.stream[-1], each.prompt_ids))
        return sample(self, requests, **how)

    monkeypatch.setattr(LocalEngine, "sample", noting)
    return found


def adapters(out: Path) -> dict[str, bytes]:
    return {path.parent.parent.name: path.read_bytes() for path in out.glob("runs/*/final/adapter_model.safetensors")}


def test_a_cohort_draws_what_each_run_is_missing_and_pairs_stay_pairs(tmp_path, model, drawn):
    rows = trained(campaign(tmp_path, model), tmp_path / "out", *sets_of())
    every = [row for own in rows.values() for row in own]
    for row in every:
        dropped = sum(row[f"dynamic/dropped_{reason}"] for reason in REASONS)
        assert row["batch_size"] == 3
        assert row["dynamic/drawn"] == 3 + dropped
        assert row["env/all/by_group/frac_mixed"] == pytest.approx(1 - row["dynamic/unfilled"] / 3)
        assert row["dynamic/unfilled"] == 0 or row["dynamic/rounds"] == 3
        assert (row["dynamic/dropped_tokens"] > 0) == (dropped > 0)
    assert len({row["dynamic/rounds"] for row in every}) > 1  # runs of one cohort went on for different numbers
    for own in rows.values():
        assert own[-1]["episode"] == 3 * sum(row["dynamic/drawn"] for row in own)
        kept = sum(row["env/all/total_ac_tokens"] + row["env/all/total_ob_tokens"] for row in own)
        assert own[-1]["num_tokens"] == kept + sum(row["dynamic/dropped_tokens"] for row in own)
        assert own[-1]["epoch"] == pytest.approx(4 * own[0]["epoch"])  # the cursor counts first rounds
    labels = sorted({run.rpartition("_s")[0] for run, _ in drawn})
    differ = False
    for seed in (1, 2):
        for at in range(4):
            first, second = (drawn[f"{label}_s{seed}", at] for label in labels)
            shorter = min(len(first), len(second))
            differ = differ or len(first) != len(second)
            assert first[:shorter] == second[:shorter]
            assert [place for place, _ in first] == list(range(len(first)))
    assert differ  # and yet the same prompts with the same random numbers as far as both went
    assert drawn[f"{labels[0]}_s1", 0] != drawn[f"{labels[0]}_s2", 0]


def test_it_is_the_same_alone_in_lanes_stopped_and_ahead(tmp_path, model, monkeypatch):
    path = campaign(tmp_path, model)
    lanes = trained(path, tmp_path / "lanes", *sets_of())
    alone = trained(path, tmp_path / "alone", *sets_of("campaign.lanes=1"))
    for run, own in lanes.items():
        keys = [key for key in own[0] if key.startswith("dynamic/") or key in ("mean_reward", "num_tokens")]
        assert len(keys) == 11
        assert [[row[key] for key in keys] for row in own] == [[row[key] for key in keys] for row in alone[run]]
    trained(path, tmp_path / "killed", *sets_of(), observer=StopAfter(8))
    assert {len(own) for own in rows_of(tmp_path / "killed").values()} == {2}
    assert resume(tmp_path / "killed", NullObserver()).exit_status == 0
    assert rows_of(tmp_path / "killed") == lanes
    assert adapters(tmp_path / "killed") == adapters(tmp_path / "lanes")


class Beside(LocalEngine):
    """Our own engine as one with processors of its own."""

    beside = True


def test_sampling_ahead_draws_the_same(tmp_path, model, drawn, monkeypatch):
    path, sets = campaign(tmp_path, model), sets_of("training.max_off_policy_steps=2", "algorithm.correction='tis'")
    near = trained(path, tmp_path / "near", *sets)
    asked_near = {key: list(own) for key, own in drawn.items()}
    drawn.clear()
    monkeypatch.setattr("retrain.campaign.running.models.LocalEngine", Beside)
    assert trained(path, tmp_path / "far", *sets) == near
    assert drawn == asked_near
    assert max(row["dynamic/rounds"] for own in near.values() for row in own) > 0
    assert {row["off_policy_steps_max"] for own in near.values() for row in own} == {0, 1, 2}


def test_where_nothing_can_teach_the_first_draw_is_the_batch(tmp_path, model):
    """The step is as without, and it says what was tried; the data may be fewer problems than the rounds would take."""
    path = campaign(tmp_path, model, steps=1)
    sets = sets_of("training.max_examples=5", rounds=4, reward="never")
    rows = trained(path, tmp_path / "out", *sets)
    for own in rows.values():
        for row in own:
            assert (row["dynamic/drawn"], row["dynamic/dropped_all_wrong"], row["dynamic/unfilled"]) == (5, 2, 3)
            assert row["dynamic/rounds"] == 1
            assert row["loss"] is None
            assert row["dynamic/correct_rate"] == 0
    without = trained(path, tmp_path / "without", *sets, "training.dynamic_sampling=0")
    for run, own in without.items():
        assert not any(key.startswith("dynamic/") for key in own[0])
        assert [row["mean_reward"] for row in own] == [row["mean_reward"] for row in rows[run]]
        first = read_jsonl(tmp_path / "without/runs" / run / "emergence/generations.jsonl")
        assert first == read_jsonl(tmp_path / "out/runs" / run / "emergence/generations.jsonl")


# -- what is said ---------------------------------------------------------------------------------------------------


def test_explain_counts_the_rounds_in_what_it_says_is_most(tmp_path, model):
    config = parse_dict({"training": {"dynamic_sampling": 3}})
    assert work_of(config).draws == 4
    assert work_of(parse_dict({})).draws == 1
    path = campaign(tmp_path, model)
    texts = [CliRunner().invoke(app, ["explain", str(path), *more]).output
             for more in ([], ["--set", "training.dynamic_sampling=3"])]  # fmt: skip
    most = [next(line for line in text.splitlines() if line.startswith("altogether")).split() for text in texts]
    assert [int(line[3].replace(",", "")) for line in most] == [4 * 3 * 4 * 10 * 4, 4 * 3 * 4 * 10 * 4 * 4]
    assert "drawn again, 3 rounds at most" in texts[1]
    assert "up to 3 times as many more in place of prompts that teach nothing (dynamic_sampling)" in texts[1]
    assert "drawn again" not in texts[0]
