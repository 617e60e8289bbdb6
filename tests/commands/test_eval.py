"""``retrain eval``: the evaluations of training again, models side by side, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.campaigns import run_cli, timeless, toy_toml, toy_world, train
from helpers.models import campaign_head, qwen3_directory
from helpers.servers import StandIn

from retrain.campaign.planning.plan import Plan
from retrain.config import load
from retrain.errors import RunFailed
from retrain.files import read_json, read_jsonl
from retrain.maths.bounded import bounded_mean_interval
from retrain.probe.evaluation import check_subjects, compare_models, evaluate
from retrain.probe.subjects import subjects_of

COMPLETION_KEYS = ("step", "name", "problem_id", "sample", "completion", "correct", "reward", "num_tokens", "answer")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A campaign of two conditions in one cohort, evaluated and saved after 0, 2 and 4 steps; its rank falls to 3."""
    folder = tmp_path_factory.mktemp("eval")
    model = toy_world(folder)
    rows = [{"prompt": f"say {n}", "answer": "2", "kind": "odd" if n % 2 else "even"} for n in range(6)]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = campaign_head(("grpo", "none"), ("maxrl", "none"), seeds=[3], max_steps=4, seed=7, lanes=2)
    own = {"samples": 3, "temperature": 0.5, "max_tokens": 6, "tags_column": "kind"}
    sets = [{"name": "heldout"}, {"name": "own", "source": str(folder / "own.jsonl")} | own]
    sections = {
        "training": {"save_every": 2, "eval_every": 2, "keep_last": 0, "lr": 0.05},
        "evaluation": {"problems": 9, "sets": sets}, "lora": {"anneal": [[1, 3]]}, "reward": {"correct_above": 0.2},
    }  # fmt: skip
    (folder / "toy.toml").write_text(head + toy_toml(model, **sections))
    train(folder / "toy.toml", folder / "out")
    return folder


def run_of(home: Path) -> Path:
    return home / "out/runs/maxrl+none_s3"


def evaluated(out: Path, *arguments: object) -> dict:
    result = run_cli("eval", *arguments, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == {"out": str(out)} | read_json(out / "evaluation.json")
    return report


@pytest.mark.parametrize("with_file", [False, True])
def test_a_run_gets_the_numbers_of_its_training(home, tmp_path, with_file):
    """Last step, middle checkpoint and untrained model: equal rows and equal answers on both sets."""
    run, out = run_of(home), tmp_path / "evaluated"
    how = ["--file", home / "toy.toml"] if with_file else []
    report = evaluated(out, run, run / "checkpoints/step_000002", home / "model", *how)
    names = {4: "maxrl+none_s3", 2: "maxrl+none_s3-step2", 0: "model"}
    assert [model["name"] for model in report["models"]] == list(names.values())
    for step, name in names.items():
        mine, trained = out / "runs" / name, [row for row in timeless(run / "evals.jsonl") if row["step"] == step]
        assert len(trained) == 2
        assert timeless(mine / "evals.jsonl") == trained
        answers = [
            [{key: row[key] for key in COMPLETION_KEYS} for row in read_jsonl(folder / "emergence/evaluations.jsonl")]
            for folder in (mine, run)
        ]
        assert answers[0] == [row for row in answers[1] if row["step"] == step]
        assert len(answers[0]) == 9 + 3 * 6
        sets = next(model["sets"] for model in report["models"] if model["name"] == name)
        for held_out, found in sets.items():
            assert found["tokens"] == sum(row["num_tokens"] for row in answers[0] if row["name"] == held_out)
            assert found["correct_rate"] == next(
                row[f"eval/{held_out}/correct_rate"] for row in trained if row["name"] == held_out
            )
        assert {"pass@3", "pass@3/ci_low", "even/correct_rate"} < sets["own"].keys()
    rates = {row["eval/heldout/correct_rate"] for row in read_jsonl(run / "evals.jsonl") if row["name"] == "heldout"}
    assert len(rates) > 1  # the weights matter


def test_the_directory_is_read_like_a_campaign(home, tmp_path):
    out = tmp_path / "evaluated"
    evaluated(out, run_of(home), home / "model")
    shown = json.loads(run_cli("status", out, "--json").stdout)
    assert [(run["run_id"], run["state"], run["step"]) for run in shown[0]["runs"]] == [
        ("maxrl+none_s3", "done", 4), ("model", "done", 0),
    ]  # fmt: skip
    run, base = shown[0]["runs"]
    assert run["heldout_before"] is None is base["heldout_now"]  # the run is evaluated after its training
    assert run["heldout_now"] is not None is not base["heldout_before"]
    found = run_cli("compare", out)
    assert found.exit_code == 0
    assert "model − maxrl+none_s3" in found.stdout
    assert "cannot tell" in found.stdout
    assert run_cli("report", out).exit_code == 0
    again = run_cli("train", home / "toy.toml", "--out", out)
    assert (again.exit_code, "holds the results of retrain eval" in again.output) == (2, True)


def test_models_side_by_side(home, tmp_path):
    """A merged model, a plain adapter and a model with another tokenizer, with a table and bounds by problem."""
    run, merged, adapter = run_of(home), tmp_path / "merged", tmp_path / "adapter"
    assert run_cli("export", run, "--merge", "--out", merged).exit_code == 0
    assert run_cli("export", run, "--rank-pad", 8, "--out", adapter).exit_code == 0
    other = qwen3_directory(tmp_path / "other", ["say 2 and what is 40 + 2"], seed=1, hidden=16)
    result = run_cli(
        "eval", home / "model", merged, adapter, other, "--file", home / "toy.toml", "--out", tmp_path / "e"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.split("\n", 1)[0].split() == [
        "model", "set", "problems", "pass@1", "pass@3", "truncated", "tokens", "seconds",
    ]  # fmt: skip
    assert result.stderr.count("note: loading ") == 3  # the adapter shares the first model's weights
    report = read_json(tmp_path / "e/evaluation.json")
    assert [(row["model"], row["set"]) for row in report["comparisons"]] == [
        (name, held_out) for name in ("merged", "adapter", "other") for held_out in ("heldout", "own")
    ]
    by_name = {model["name"]: model["sets"]["own"] for model in report["models"]}
    without_clock = [{k: v for k, v in by_name[name].items() if k != "seconds"} for name in ("merged", "adapter")]
    assert without_clock[0] == without_clock[1]  # equal weights and random streams
    for row in report["comparisons"]:
        assert row["sentence"] in result.stdout
        difference = (
            next(m for m in report["models"] if m["name"] == row["model"])["sets"][row["set"]]["correct_rate"]
            - report["models"][0]["sets"][row["set"]]["correct_rate"]
        )
        assert row["difference"] == pytest.approx(difference)
    assert "another training run may give another result" in result.stdout


def test_several_comparisons_hold_together():
    """Each interval has the level 1 − 0.05/n; a single one is that of squeeze."""
    base = {"heldout": {str(n): float(n % 2) for n in range(40)}}
    better = {"heldout": {str(n): 1.0 for n in range(40)}}
    less = {"heldout": {str(n): 0.0 for n in range(5, 50)}}
    (single,) = compare_models(["a", "b"], [base, better])
    gains = [1.0 - n % 2 for n in range(40)]
    one, both = (bounded_mean_interval(gains, -1, 1, level=level) for level in (0.95, 0.975))
    assert (single["difference"], single["low"], single["high"]) == (0.5, one.low, one.high)
    assert single["sentence"].startswith("b − a on heldout: +50.0 points [")
    assert single["sentence"].endswith(": higher")
    rows = compare_models(["a", "b", "c"], [base, better, less])
    assert (rows[0]["low"], rows[0]["high"]) == (both.low, both.high)
    assert rows[0]["low"] < single["low"]
    assert (rows[1]["problems"], rows[1]["left_out"]) == (35, 15)
    assert "35 problems (15 that not both have are left out): lower" in rows[1]["sentence"]
    (alike,) = compare_models(["a", "b"], [base, base])
    assert alike["sentence"].endswith("no difference shown; up to 8.8 points stay open")
    (few,) = compare_models(["a", "b"], [{"heldout": {"x": 1.0}}] * 2)
    assert few["sentence"].endswith("1 problem: cannot tell")


@pytest.mark.parametrize("end", [KeyboardInterrupt(), RunFailed("no room")])
def test_what_was_finished_before_the_end_is_kept(home, tmp_path, end):
    """The same command with --out evaluates the rest; another one, or another directory's content, is refused."""
    out, other = tmp_path / "e", shutil.copytree(home / "model", tmp_path / "second")
    targets = [str(home / "model"), str(other)]
    plan, messages = Plan.of(load(home / "toy.toml")), list[str]()

    def stop(text: str) -> None:
        messages.append(text)
        if text.startswith("second on heldout"):  # its second set is missing
            raise end

    with pytest.raises(type(end)):
        evaluate(plan, check_subjects(plan, subjects_of(targets, None, plan.specs[0]), stop), out, stop)
    assert messages[-1].endswith(f"type the same command with --out {out}")
    entries = read_json(out / "manifest.json")["runs"]
    assert [run["state"] for run in entries] == ["done", "failed" if isinstance(end, RunFailed) else "interrupted"]
    assert entries[1]["reason"] == (str(end) or None)
    first = (out / "runs/model/evals.jsonl").read_bytes()
    result = run_cli("eval", *targets, "--file", home / "toy.toml", "--out", out)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("note: loading ") == 1
    assert (out / "runs/model/evals.jsonl").read_bytes() == first
    assert timeless(out / "runs/second/evals.jsonl") == timeless(out / "runs/model/evals.jsonl")
    for arguments in ([*targets[:1]], [*targets, "--set", "evaluation.problems=8"]):
        refused = run_cli("eval", *arguments, "--file", home / "toy.toml", "--out", out)
        assert (refused.exit_code, "other models, settings or problems" in refused.output) == (2, True)
    refused = run_cli("eval", *targets, "--file", home / "toy.toml", "--out", home / "out")
    assert (refused.exit_code, "holds something else" in refused.output) == (2, True)


def test_an_inference_server_samples_for_runs_and_models(home, tmp_path):
    server = StandIn(home / "model")
    try:
        sets = [f"inference.url={server.url}", "inference.engine=vllm", "inference.dtype=float32"]
        report = evaluated(tmp_path / "e", run_of(home), home / "model", *(x for each in sets for x in ("--set", each)))
    finally:
        server.close()
    assert {len(model["sets"]) for model in report["models"]} == {2}
    for name in ("maxrl+none_s3", "model"):
        assert read_json(tmp_path / "e/runs" / name / "config.json")["built"]["engine"] == "ServerEngine"


REFUSED = [
    (["nothing/here/x", "--file", "{home}/toy.toml"], "nothing/here/x cannot be evaluated: there is no such directory"),
    (
        ["{home}/ou", "--file", "{home}/toy.toml"],
        "ou cannot be evaluated: there is no such directory (did you mean 'out'?)",
    ),
    (["{home}/ou"], "ou cannot be evaluated: there is no such directory (did you mean 'out'?)"),
    (["{home}/toy.toml", "--file", "{home}/toy.toml"], "toy.toml cannot be evaluated: it is a file"),
    (["{home}/out"], "is a campaign: give one of its runs"),
    (["tiny-reasoner"], "name the held-out problems with --file FILE"),
    (["{home}/model", "{home}/model", "--file", "{home}/toy.toml"], "a model is named twice"),
    (["{home}/model", "--file", "{home}/none.toml"], "none has no held-out problems"),
    (["{home}/out/runs/maxrl+none_s3", "--base", "tiny-reasoner"], "not a linear layer of that size in "),
]


@pytest.mark.parametrize(("arguments", "fault"), REFUSED, ids=[fault[:24] for _, fault in REFUSED])
def test_refused_before_weights_are_loaded(home, tmp_path, monkeypatch, arguments, fault):
    text = (home / "toy.toml").read_text()
    head = text[: text.index("[evaluation]")].replace("eval_every = 2", "")
    (home / "none.toml").write_text(f"{head}[evaluation]\nproblems = 0\n")
    monkeypatch.chdir(tmp_path)
    result = run_cli("eval", *(argument.format(home=home) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert fault.format(home=home) in result.output
    assert "loading" not in result.output
    assert list(tmp_path.iterdir()) == []
