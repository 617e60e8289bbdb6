"""Readers on files that the installed lm-eval, inspect-ai and verifiers write (make test-environments)."""

import json
from pathlib import Path

import pytest

from retrain.records.foreign import inspect_log, lm_eval, verifiers
from retrain.records.foreign.table import ReadRequest, ResultRow

pytestmark = pytest.mark.filterwarnings("ignore")  # of these packages and their dependencies
QUESTIONS = {"2+3=?": "5", "4+4=?": "8", "1+1=?": "2"}
ANSWERS = ["the answer is 5", "8", "2 and 3"]


def read(format, path: Path, metric: str | None = None) -> list[ResultRow]:
    assert format.recognises(path), path
    return list(format.rows(path, ReadRequest(metric)))


def grades(rows: list[ResultRow], metric: str) -> list[float | None]:
    return [row.value for row in rows if row.metric == metric and row.problem is not None]


def number(rows: list[ResultRow], metric: str) -> float | None:
    (row,) = [row for row in rows if row.metric == metric and row.problem is None]
    return row.value


def write_lm_eval(folder: Path) -> Path:
    """Evaluate a model with scripted answers under two filters; return the directory of its files."""
    evaluator = pytest.importorskip("lm_eval.evaluator", reason="make test-environments")
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.models.dummy import DummyLM

    class Scripted(DummyLM):
        def generate_until(self, requests, disable_tqdm=False):
            return ANSWERS[: len(requests)]

    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in QUESTIONS.items()))
    task = {
        "task": "sums", "dataset_path": "json", "test_split": "test", "output_type": "generate_until",
        "dataset_kwargs": {"data_files": {"test": str(questions)}, "cache_dir": str(folder / "cache")},
        "doc_to_text": "{{q}}", "doc_to_target": "{{a}}", "generation_kwargs": {"until": ["\n"]},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "filter_list": [
            {"name": "strict", "filter": [{"function": "take_first"}]},
            {"name": "flexible", "filter": [
                {"function": "regex", "regex_pattern": "(\\d+)"}, {"function": "take_first"},
            ]},
        ],
    }  # fmt: skip
    tracker = EvaluationTracker(output_path=str(folder / "out"))
    arguments = {"pretrained": "org/grpo_s1"}
    results = evaluator.simple_evaluate(Scripted(), arguments, [task], evaluation_tracker=tracker, random_seed=7)
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    tracker.save_results_samples(task_name="sums", samples=samples["sums"])
    return folder / "out" / "org__grpo_s1"


def test_lm_eval(tmp_path):
    directory = write_lm_eval(tmp_path)

    (of_run,), (of_answers,) = directory.glob("results_*.json"), directory.glob("samples_*.jsonl")
    run, answers = read(lm_eval.FORMAT, of_run), read(lm_eval.FORMAT, of_answers)
    assert grades(answers, "exact_match,strict") == [0, 1, 0]
    assert grades(answers, "exact_match,flexible") == [1, 1, 1]
    assert number(run, "exact_match,strict") == pytest.approx(1 / 3)
    assert {(row.condition, row.set, row.seed) for row in run + answers} == {
        ("org/grpo", "sums", 1)
    }  # the model is named by its run


def write_inspect(folder: Path, monkeypatch, log_format: str, fails: bool = False) -> Path:
    """Evaluate inspect's mock model on three problems, twice each; return the log. With ``fails``, the second problem
    ends the evaluation with an error."""
    inspect_ai = pytest.importorskip("inspect_ai", reason="make test-environments")
    import tiktoken
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.model import ModelOutput, get_model
    from inspect_ai.scorer import Score, mean, scorer
    from inspect_ai.scorer import match as match_end
    from inspect_ai.solver import generate, solver

    bytes_alone = tiktoken.Encoding("bytes", pat_str="(?s:.)", mergeable_ranks={bytes([i]): i for i in range(256)},
                                    special_tokens={})  # fmt: skip
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: bytes_alone)  # it would be downloaded

    @scorer(metrics={"length": [mean()], "digits": [mean()]})
    def parts():
        async def score(state, target):
            text = state.output.completion
            return Score(value={"length": len(text), "digits": sum(letter.isdigit() for letter in text)})

        return score

    @solver
    def failing():
        async def solve(state, generate):
            if state.sample_id == 2:
                raise RuntimeError("no answer")
            return state

        return solve

    samples = [Sample(id=number, input=q, target=a) for number, (q, a) in enumerate(QUESTIONS.items(), start=1)]
    task = inspect_ai.Task(
        MemoryDataset(samples), name="sums", solver=[failing(), generate()] if fails else generate(), epochs=2,
        scorer=[match_end(), parts()], metadata={"condition": "grpo", "seed": 3},
    )  # fmt: skip
    outputs = [ModelOutput.from_content("mockllm/model", text) for text in [*ANSWERS, "5", "7", "2"]]
    inspect_ai.eval(
        task, get_model("mockllm/model", custom_outputs=iter(outputs)), log_dir=str(folder), display="none",
        log_format=log_format, max_samples=1,
    )  # fmt: skip
    (log,) = folder.glob(f"*.{log_format}")
    return log


@pytest.mark.parametrize("log_format", ["eval", "json"])
def test_inspect(tmp_path, monkeypatch, log_format):
    path = write_inspect(tmp_path, monkeypatch, log_format)

    rows = read(inspect_log.FORMAT, path)
    from inspect_ai.log import read_eval_log

    scores = {score.name: score.metrics for score in read_eval_log(str(path)).results.scores}
    assert sorted(grades(rows, "match/accuracy")) == [0, 0, 1, 1, 1, 1]
    for name, metric in (("match", "accuracy"), ("length", "mean"), ("digits", "mean")):
        answers = grades(rows, f"{name}/{metric}")
        assert number(rows, f"{name}/{metric}") == pytest.approx(sum(answers) / 6)
        assert number(rows, f"{name}/{metric}") == scores[name][metric].value
    assert {(row.condition, row.seed, row.state, row.set) for row in rows} == {("grpo", 3, "done", "sums")}


def test_inspect_has_the_same_problems_in_both_kinds_of_log(tmp_path, monkeypatch):
    archive = read(inspect_log.FORMAT, write_inspect(tmp_path / "eval", monkeypatch, "eval"), "match/accuracy")
    document = read(inspect_log.FORMAT, write_inspect(tmp_path / "json", monkeypatch, "json"), "match/accuracy")
    assert [row[:-2] for row in archive] == [row[:-2] for row in document]


@pytest.mark.parametrize("log_format", ["eval", "json"])
def test_inspect_that_failed(tmp_path, monkeypatch, log_format):
    path = write_inspect(tmp_path, monkeypatch, log_format, fails=True)
    assert {row.state for row in read(inspect_log.FORMAT, path)} <= {"failed"}


def write_verifiers(path: Path) -> list[float | None]:
    """Write episodes of one problem, the last three with errors; return their rewards."""
    pytest.importorskip("verifiers.v1.episode", reason="make test-environments")
    from verifiers.v1.configs.agent import WireAgentConfig
    from verifiers.v1.episode import EnvInfo, Episode
    from verifiers.v1.task import WireTaskData
    from verifiers.v1.trace import AgentInfo, Error, Reward, Trace, TraceTask
    from verifiers.v1.utils.trace_store import write_episode

    task = TraceTask(type="Sum", data=WireTaskData(prompt="1+1=?"), key="sum-1", hash="7f3a")

    def episode(rewards, ok=True, errors=()):
        agent = AgentInfo(config=WireAgentConfig())
        trace = Trace(task=task, agent=agent, rewards=rewards, ok=ok, errors=list(errors), is_completed=True)
        return Episode(env=EnvInfo(id="sums"), task=task, ok=ok, traces=[trace])

    right, form = Reward(score=1, weight=0.5), Reward(score=0.4, weight=0.25)
    error = Error(type="RuntimeError", message="no answer")
    graded = [episode({"right": right, "form": form}), episode({"right": Reward(score=0.0), "form": form})]
    failed = [
        episode({"right": right, "form": None}, ok=False, errors=[error]),
        episode({"right": None}),
        Episode(env=EnvInfo(id="sums"), task=task, errors=[error]),
    ]
    path.mkdir(parents=True)
    for each in [*graded, *failed]:
        write_episode(path, each)
    return [each.traces[0].reward for each in graded] + [None] * 3


def test_verifiers(tmp_path):
    rewards = write_verifiers(tmp_path / "run")

    rows = read(verifiers.FORMAT, tmp_path / "run" / "traces.jsonl")
    assert grades(rows, "reward") == rewards == [0.6, 0.1, None, None, None]
    assert {(row.set, row.problem, row.sample) for row in rows} == {("sums", "sum-1:7f3a", None)}
