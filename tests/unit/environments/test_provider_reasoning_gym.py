import contextlib
import json
import os
import random

import numpy as np
import pytest

from retrain.errors import DataError, UsageError
from retrain.types import Action, Problem

pytest.importorskip("reasoning_gym", reason="pip install '.[gym]'")

from retrain.config.tasks import EnvironmentSection
from retrain.environments.hosted import HostedEnvironment
from retrain.environments.providers.reasoning_gym import ReasoningGym, Task, check_tasks, data_sets, entry_of


def sums(**arguments):
    return ReasoningGym(**{"id": "chain_sum", "size": 40, "heldout": 10, "seed": 3, **arguments})


def graded(environment, problem, text):
    episode = environment.start(problem, seed=0)
    assert episode.observe().messages == ({"role": "user", "content": problem.prompt},)
    assert episode.step(Action([1], text, np.zeros(1), None, "stop")).done
    return episode.result()


def test_problems_are_drawn_held_out_and_scored():
    environment = sums(min_terms=3, max_terms=3)
    train, held = environment.problems("train"), environment.problems("test")
    assert len(held) == 10
    assert held == environment.problems("other")
    assert 0 < len(train) <= 40
    assert not {problem.prompt for problem in train} & {problem.prompt for problem in held}
    assert sums(min_terms=3, max_terms=3).problems("train") == train
    assert sums(min_terms=3, max_terms=3, seed=4).problems("test") != held
    assert json.loads(json.dumps(train[0].metadata)) == train[0].metadata
    assert entry_of(train[0].metadata["entry"])["metadata"]["difficulty"]["num_terms"] == (3, 3)
    problem = train[0]
    assert problem.tags == ("chain_sum",)
    right = graded(environment, problem, f" {problem.answer}\n")
    assert (right.total_reward, right.correct, right.sample_metrics) == (1.0, True, {"answer_tags": 0.0})
    tagged = graded(environment, problem, f"<answer>7</answer> no: <answer> {problem.answer} </answer>.")
    assert (tagged.total_reward, tagged.sample_metrics) == (1.0, {"answer_tags": 1.0})
    wrong = graded(environment, problem, "<answer>zzz</answer>" + problem.answer)
    assert wrong.total_reward is not None
    assert (wrong.total_reward < 0.5, wrong.correct) == (True, False)
    entry = "{'question': '12?', 'answer': '2 × 2 × 3', 'metadata': {'number': 12}}"
    facts = {"task": "prime_factorization", "index": 0, "entry": entry}
    broken = graded(sums(id="prime_factorization"), Problem("p", "12?", "2 × 2 × 3", (), facts), "zzz")
    assert broken.total_reward is None
    assert "prime_factorization: ValueError: invalid literal" in (broken.error or "")


def test_several_tasks_by_weight():
    spelling = {"name": "spell_backward", "weight": 3, "config": {"min_word_len": 3}}
    both = sums(id=["chain_sum", spelling], size=200, heldout=40)
    names = [problem.tags[0] for problem in both.problems("train")]
    assert 90 < names.count("spell_backward") < 180
    assert {problem.tags[0] for problem in both.problems("test")} == {"chain_sum", "spell_backward"}
    word = next(problem for problem in both.problems("train") if problem.tags == ("spell_backward",))
    assert graded(both, word, word.answer).total_reward == 1


@pytest.mark.parametrize(("id", "arguments", "message"), [
    ("chain_sun", {}, r"has no data set 'chain_sun' \(did you mean 'chain_sum'\?\)"),
    ("chain_sum", {"min_term": 3}, r"chain_sum has no argument 'min_term' \(did you mean 'min_terms'\?\)"),
    ("chain_sum", {"min_terms": 9}, "chain_sum does not take this config: max_terms must be >= min_terms"),
    ([], {}, r'id is \[\]: type the name of a data set, such as id = "chain_sum"'),
    (["chain_sum", "chain_sum"], {}, "id names chain_sum more than once"),
    ([{"name": "gcd", "weight": 0}], {}, "an item of id: weight is 0: Input should be greater than 0"),
    ([{"name": "gcd", "config": {"seed": 1}}], {}, "gcd has no argument 'seed'"),
])  # fmt: skip
def test_mistakes_are_told_in_one_line(id, arguments, message):
    with pytest.raises(UsageError, match=message) as raised:
        ReasoningGym(id, **arguments)
    assert "\n" not in str(raised.value)


def test_broken_tasks_are_refused_by_name():
    with pytest.raises(
        DataError, match=r"game_of_life_halting \('zzz' scores 1\).*prime_factorization \(scoring 'zzz' r"
    ):
        sums(id=["chain_sum", "game_of_life_halting", "prime_factorization"], size=9, heldout=1).problems("train")
    sound, broken = check_tasks([Task(name, 0, 100, {}) for name in ("chain_sum", "boxnet")], 60)
    assert sound.reason == ""
    assert broken.reason == "it has no reference answer to check its scorer with"
    assert 0 < broken.seconds < 60
    assert len(data_sets()) >= 100
    with pytest.raises(UsageError, match="did you mean 'chain_sum'"):
        sums(id="chain_sums")
    tiny = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(DataError, match="too few different questions for heldout = 1000"):
        sums(size=5, heldout=1000, **tiny).problems("train")


def test_tasks_repeat_in_another_process_and_a_slow_one_is_cut_off(monkeypatch):
    """ransom_note walks over a set, list_functions draws from the global generator."""
    section = {"provider": "reasoning_gym", "id": ["ransom_note", "list_functions"], "workers": 1}
    made = []
    for hash_seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        with contextlib.closing(
            HostedEnvironment(EnvironmentSection(**section, args={"size": 9, "heldout": 1}), None)
        ) as hosted:
            made.append(hosted.problems("train"))
        assert os.environ["PYTHONHASHSEED"] == hash_seed
    assert made[0] == made[1]
    random.seed(1)
    (slow,) = check_tasks([Task("knight_swap", 0, 100, {})], 0.05)
    (absent,) = check_tasks([Task("absent", 0, 100, {})], 60)
    assert slow.reason == "it takes longer than 0.05 s"
    assert "absent" in absent.reason
    assert random.random() == random.Random(1).random()
