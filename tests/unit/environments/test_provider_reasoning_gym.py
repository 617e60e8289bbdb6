"""reasoning-gym behind the environment protocol: problems are drawn, held out and scored; broken tasks are refused."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from retrain.errors import DataError, UsageError
from retrain.types import Action, Problem

pytest.importorskip("reasoning_gym", reason="pip install '.[gym]'")

from retrain.environments.providers.reasoning_gym import ReasoningGym, check, data_sets
from retrain.environments.providers.reasoning_gym_tasks import Task, TaskWorker, entry_of


def action(text):
    return Action([1], text, np.zeros(1), None, "stop")


def graded(environment, problem, text):
    episode = environment.start(problem, seed=0)
    assert episode.observe().messages == ({"role": "user", "content": problem.prompt},)
    assert episode.step(action(text)).done
    return episode.result()


@pytest.fixture(scope="module")
def sums():
    return ReasoningGym("chain_sum", size=40, heldout=10, seed=3, min_terms=3, max_terms=3)


def test_an_answer_is_scored_by_the_task_whether_it_has_tags_or_not(sums):
    problem = sums.problems("train")[0]
    assert problem.tags == ("chain_sum",)
    assert problem.prompt.count("+") + problem.prompt.count("-") >= 2
    right = graded(sums, problem, f" {problem.answer}\n")
    assert (right.total_reward, right.correct, right.sample_metrics) == (1.0, True, {"answer_tags": 0.0})
    tagged = graded(sums, problem, f"<answer>7</answer> no: <answer> {problem.answer} </answer>.")
    assert (tagged.total_reward, tagged.sample_metrics) == (1.0, {"answer_tags": 1.0})
    wrong = graded(sums, problem, "<answer>zzz</answer>" + problem.answer)
    assert wrong.total_reward is not None
    assert wrong.total_reward < 0.5
    assert not wrong.correct


def test_held_out_problems_are_the_same_everywhere_and_none_trains(sums):
    train, held = sums.problems("train"), sums.problems("test")
    assert len(held) == 10
    assert held == sums.problems("other")
    assert 0 < len(train) <= 40
    assert not {problem.prompt for problem in train} & {problem.prompt for problem in held}
    again = ReasoningGym("chain_sum", size=40, heldout=10, seed=3, min_terms=3, max_terms=3)
    assert again.problems("train") == train
    other = ReasoningGym("chain_sum", size=40, heldout=10, seed=4, min_terms=3, max_terms=3)
    assert other.problems("test") != held
    assert json.loads(json.dumps(train[0].metadata)) == train[0].metadata
    assert entry_of(train[0].metadata["entry"])["metadata"]["difficulty"]["num_terms"] == (3, 3)
    broken = ReasoningGym("prime_factorization", size=1, heldout=1)
    entry = "{'question': '12?', 'answer': '2 × 2 × 3', 'metadata': {'number': 12}}"
    facts = {"task": "prime_factorization", "index": 0, "entry": entry}
    result = graded(broken, Problem("p", "12?", "2 × 2 × 3", (), facts), "zzz")
    assert result.total_reward is None
    assert "prime_factorization: ValueError: invalid literal" in (result.error or "")


def test_several_tasks_by_weight_and_too_few_questions():
    tiny = ReasoningGym("chain_sum", size=5, heldout=1000, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    assert len({problem.prompt for problem in tiny.problems("test")}) <= 200  # two digits, plus or minus
    with pytest.raises(DataError, match="too few different questions for heldout = 1000"):
        tiny.problems("train")
    both = ReasoningGym(
        ["chain_sum", {"name": "spell_backward", "weight": 3, "config": {"min_word_len": 3}}], size=200, heldout=40
    )
    names = [problem.tags[0] for problem in both.problems("train")]
    assert 90 < names.count("spell_backward") < 180
    assert {problem.tags[0] for problem in both.problems("test")} == {"chain_sum", "spell_backward"}
    word = next(problem for problem in both.problems("train") if problem.tags == ("spell_backward",))
    assert graded(both, word, word.answer).total_reward == 1


@pytest.mark.parametrize(
    ("id", "arguments", "message"),
    [
        ("chain_sun", {}, "has no data set 'chain_sun'; did you mean 'chain_sum'"),
        ("chain_sum", {"min_term": 3}, "chain_sum has no argument 'min_term'; did you mean 'min_terms'"),
        ("chain_sum", {"min_terms": 9}, "chain_sum does not take this config: max_terms must be >= min_terms"),
        ("chain_sum", {"size": 0}, "size is 0: Input should be greater than 0"),
        ([], {}, r'id is \[\]: type the name of a data set, such as id = "chain_sum"'),
        (["chain_sum", "chain_sum"], {}, "id names chain_sum more than once"),
        (["chain_sum", "gcd"], {"sise": 3}, "with several data sets has no argument 'sise'; did you mean 'size'"),
        ([{"name": "gcd", "wait": 2}], {}, "an item of id has no argument 'wait'; did you mean 'weight'"),
        ([{"name": "gcd", "weight": 0}], {}, "an item of id: weight is 0: Input should be greater than 0"),
        ([{"name": "gcd", "config": {"seed": 1}}], {}, "gcd has no argument 'seed'"),
    ],
)
def test_mistakes_are_told_in_one_line(id, arguments, message):
    with pytest.raises(UsageError, match=message) as raised:
        ReasoningGym(id, **arguments)
    assert "\n" not in str(raised.value)


BROKEN = ("boxnet", "prime_factorization")


def test_broken_tasks_are_refused_by_name():
    with pytest.raises(
        DataError, match=r"game_of_life_halting \('zzz' scores 1\).*prime_factorization \(scoring 'zzz' r"
    ):
        ReasoningGym(["chain_sum", "game_of_life_halting", "prime_factorization"], size=9, heldout=1).problems("train")
    outcome = check(["chain_sum", *BROKEN])
    assert [item.ok for item in outcome] == [True, False, False]
    assert outcome[1].reason == "it has no reference answer to check its scorer with"
    assert all(0 < item.seconds < 60 for item in outcome)
    assert len(data_sets()) >= 100
    with pytest.raises(UsageError, match="did you mean 'chain_sum'"):
        check(["chain_sums"])


@pytest.mark.parametrize("name", ["ransom_note", "list_functions", "knight_swap"])
def test_tasks_that_depend_on_hash_seed_or_global_generators_repeat(name):
    """The first walks over a set, the second draws from the global generator, the third answers by the hash seed."""
    code = (
        "import random, sys, json; random.seed(int(sys.argv[1]))\n"
        "from retrain.environments.providers.reasoning_gym_tasks import Task, TaskWorker\n"
        f"with TaskWorker() as worker: print(json.dumps(worker.entries(Task({name!r}, 5, 30, {{}}), [0, 1])))"
    )
    texts = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code, seed], env=environment, capture_output=True, text=True)
        texts.append(done.stdout)
    assert texts[0] == texts[1] != ""
    random.seed(9)
    with TaskWorker() as worker:
        backwards = worker.entries(Task(name, 5, 30, {}), [1, 0])
    assert json.loads(texts[0]) == [list(entry) for entry in reversed(backwards)]
    assert random.random() == random.Random(9).random()


def test_a_slow_task_is_cut_off_and_the_next_one_is_checked():
    with TaskWorker() as worker:
        assert worker.check(Task("knight_swap", 0, 100, {}), 0.05) == "it takes longer than 0.05 s"
        assert worker.check(Task("chain_sum", 0, 100, {}), 60) == ""
        assert "chain_sum" not in worker.check(Task("absent", 0, 100, {}), 60)
