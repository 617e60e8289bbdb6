import math
from contextlib import closing
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from helpers.models import word_tokenizer
from helpers.records import config, context
from hypothesis import given
from hypothesis import strategies as st

from retrain.config.tasks import RewardComponent, RewardSection
from retrain.data.prompts import Renderer
from retrain.environments.build import SplitEnvironment
from retrain.files import read_jsonl
from retrain.maths.bounded import bounded_mean_interval
from retrain.maths.statistics import accuracy_interval, majority, majority_ks, pass_at_k, sensible_ks
from retrain.records.base_evaluations import BaseEvaluations
from retrain.records.recorder import RunRecorder
from retrain.records.rollouts import SHOWN, held_out_completions, shortened
from retrain.records.scores import eval_row
from retrain.rewards.base import MatchReward
from retrain.training.evaluation import Evaluator
from retrain.types import Action, EvalRecord, Group, Problem, Prompt, single_turn


def asked(name: str, answers: list[str], tags: tuple[str, ...] = ()) -> Group:
    """A held-out problem with these completions, graded as ``match`` does."""
    problem = Problem(name, f"What is {name}?", "4", tags)
    logprobs_T, entropy_T = np.array([-1.0, -0.5, -0.1]), np.array([0.5, 0.2, 0.1])
    actions = [Action([1, 2, 3], text, logprobs_T, entropy_T, "stop") for text in answers]
    rewards = [MatchReward().grade(problem, text) for text in answers]
    return single_turn(Prompt(problem, problem.prompt, (1, 2)), actions, rewards)


def record(groups: list[Group], number: int = 0) -> EvalRecord:
    return EvalRecord("heldout", number, groups, 0.7, len(groups[0].rollouts), 0.5, 64)


GROUPS = [
    asked("two", ["\\boxed{4}", "\\boxed{4.0}", "\\boxed{5}", "\\boxed{6}"], ("easy",)),
    asked("tie", ["\\boxed{4}", "\\boxed{4}", "\\boxed{5}", "\\boxed{5}"], ("easy",)),
    asked("none", ["\\boxed{5", "\\boxed{}", "\\boxed{7}", "\\boxed{7}"], ("hard",)),
]
PROBLEMS = [group.prompt.problem for group in GROUPS]


def test_the_scores_of_an_evaluation_by_hand():
    row = eval_row(record(GROUPS))
    at = {key.removeprefix("eval/heldout/"): value for key, value in row.items()}
    assert at["correct_rate"] == at["pass@1"] == at["avg@4"] == pytest.approx(4 / 12)
    assert at["pass@2"] == pytest.approx((5 / 6 + 5 / 6 + 0) / 3)  # 1 − C(2,2)/C(4,2)
    assert at["pass@4"] == pytest.approx(2 / 3)
    assert at["maj@4"] == pytest.approx((1 + 0.5 + 0) / 3)  # 4 and 4.0 are one answer; a tie is shared; no vote is 0
    assert at["easy/pass@4"] == 1.0
    assert at["easy/maj@4"] == pytest.approx(0.75)
    assert at["hard/correct_rate"] == at["hard/pass@4"] == 0.0
    expected = accuracy_interval(np.array([1.0, 1.0, 0.0]), range(3))
    assert (at["pass@4/ci_low"], at["pass@4/ci_high"]) == pytest.approx((expected.low, expected.high))
    of_problems = bounded_mean_interval([5 / 6, 5 / 6, 0.0], 0.0, 1.0, t=True)  # by their spread, not as if 0 or 1
    assert (at["pass@2/ci_low"], at["pass@2/ci_high"]) == pytest.approx((of_problems.low, of_problems.high))
    assert at["hard/ci_low"] is None  # one problem has no interval, however many samples


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_all_subsets_with_a_success(marks, data):
    k = data.draw(st.integers(1, len(marks)))
    subsets = list(combinations(marks, k))
    assert pass_at_k(len(marks), sum(marks), k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@given(st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.booleans()), min_size=1, max_size=12), st.data())
def test_a_majority_is_the_mean_over_blocks_and_drops_no_vote(samples, data):
    answers, marks = zip(*samples, strict=True)
    k = data.draw(st.integers(1, len(samples)))
    blocks = [majority(answers[i * k : (i + 1) * k], marks[i * k : (i + 1) * k], k) for i in range(len(samples) // k)]
    assert majority(answers, marks, k) == pytest.approx(math.fsum(blocks) / len(blocks))
    assert 0.0 <= majority(answers, marks, k) <= 1.0


def test_a_vote_counts_the_answers_that_the_reward_reads():
    groups = [asked("two", ["it is 4", "it is 4", "\\boxed{5}"])]
    assert [row["answer"] for row in held_out_completions(record(groups))] == [None, None, "5"]
    assert [row["answer"] for row in held_out_completions(record(groups), strict=False)] == ["4", "4", "5"]
    parts = [RewardComponent(type="format"), RewardComponent(type="match")]
    for reward, strict in (
        (RewardSection(type="match", strict=True), True),
        (RewardSection(type="match", strict=False), False),
        (RewardSection(type="judge"), False),
        (RewardSection(type="weighted", components=parts), True),
    ):
        assert reward.strict_answers == strict
    # A custom reward may grade equal answers differently: such an answer counts with its share.
    assert majority(["4", "4", "4", "5"], [True, False, False, True], 4) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="maj@k"):
        majority(["4"], [True], 2)
    assert (sensible_ks(6), majority_ks(6)) == ([1, 2, 4, 6], [4, 6])
    assert (sensible_ks(1), majority_ks(2), majority_ks(3)) == ([1], [], [3])


def test_every_answer_is_kept_with_what_it_votes_for(tmp_path):
    long = "x" * 5000 + "\\boxed{4}"
    groups = [asked("two", ["\\boxed{4.0}", "\\boxed{five"], ("easy",)), asked("long", [long, "\\boxed{<script>}"])]
    with closing(RunRecorder(tmp_path, context())) as recorder:
        recorder.record_eval(record(groups))
        recorder.record_eval(record(groups, 3))
    rows = read_jsonl(tmp_path / "emergence/evaluations.jsonl")
    assert [(row["step"], row["problem_id"], row["sample"]) for row in rows] == [
        (step, name, sample) for step in (0, 3) for name in ("two", "long") for sample in (0, 1)
    ]
    assert [row["answer"] for row in rows[:4]] == ["4", None, "4", "<script>"]
    assert [row["correct"] for row in rows[:4]] == [True, False, True, False]
    assert {row["reference"] for row in rows} == {"4"}
    assert rows[2]["completion"].endswith("\\boxed{4}")
    assert len(rows[2]["completion"]) <= SHOWN + 5
    assert shortened("short") == "short"
    facts = read_jsonl(tmp_path / "evals.jsonl")[1]
    sampling = {key: facts[key] for key in ("temperature", "samples", "max_tokens", "top_p", "top_k", "min_p")}
    assert list(sampling.values()) == [0.7, 2, 64, 1.0, 0, 0.0]


def test_the_kept_base_is_the_base(tmp_path):
    kept, base = BaseEvaluations(tmp_path, "weights and problems"), record(GROUPS)
    failed = record([asked("two", ["\\boxed{4}", "\\boxed{5}"])])
    failed.groups[0].rollouts[1].reward.error = "the judge did not answer"
    kept.put("how", failed)
    assert kept.get("how", [failed.groups[0].prompt.problem]) is None
    kept.put("how", base)
    again = kept.get("how", PROBLEMS)
    assert (eval_row(again), held_out_completions(again)) == (eval_row(base), held_out_completions(base))
    assert (again.temperature, again.samples, again.max_tokens, again.seconds) == (0.7, 4, 64, 0.5)
    for mine, theirs in zip(again.groups[1].rollouts, GROUPS[1].rollouts, strict=True):
        assert (mine.token_ids, mine.stop_reason) == (theirs.token_ids, theirs.stop_reason)
        assert mine.logprobs_T.tolist() == theirs.logprobs_T.tolist()
        assert mine.entropy_T.tolist() == theirs.entropy_T.tolist()
    assert kept.get("otherwise", PROBLEMS) is None
    assert BaseEvaluations(tmp_path, "other weights").get("how", PROBLEMS) is None
    assert kept.get("how", PROBLEMS[::-1]) is None


def test_the_kept_base_is_found_only_by_all_that_decides_about_it(tmp_path):
    """What is asked and what counts as right, how it is sampled, how that is graded: each of them asks anew."""
    settings = config(evaluation={"problems": 3, "samples": 4, "temperature": 0.7, "max_tokens": 64})
    (held_out,) = settings.held_out
    renderer = Renderer(word_tokenizer(["What is two?"]), settings.data)
    evaluator = Evaluator(None, renderer, [held_out], BaseEvaluations(tmp_path, "weights"))  # nothing is sampled

    def known(problems: list[Problem] = PROBLEMS, grading: str = "graded so", **changes) -> EvalRecord | None:
        environment = SplitEnvironment(problems, settings.data, MatchReward())
        return evaluator.known_base(replace(held_out, **changes), environment, grading)

    def keep(problems: list[Problem]) -> None:
        environment = SplitEnvironment(problems, settings.data, MatchReward())
        evaluator.keep_base(held_out, environment, "graded so", record(GROUPS))

    keep(PROBLEMS[:2])  # not all of the set
    assert known() is None
    keep(PROBLEMS)
    assert eval_row(known()) == eval_row(record(GROUPS))
    assert known(grading="graded otherwise") is None
    for change in ({"answer": "5"}, {"prompt": "What else is it?"}, {"id": "another"}):
        assert known([replace(PROBLEMS[0], **change), *PROBLEMS[1:]]) is None, change
    for change in ({"temperature": 0.5}, {"max_tokens": 32}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}):
        assert known(sampling=replace(held_out.sampling, **change)) is None, change
    assert known(data=settings.data.model_copy(update={"system_prompt": "Think."})) is None
