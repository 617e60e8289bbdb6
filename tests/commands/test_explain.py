import re
from pathlib import Path
from statistics import median

import pytest
from helpers.campaigns import run_cli
from helpers.models import TINY_RUN, campaign_head, qwen3_directory

from retrain.config import load
from retrain.data import load_data
from retrain.data.prompts import render
from retrain.errors import ModelError
from retrain.files import append_jsonl, read_json, read_jsonl, write_json
from retrain.tokenizer import light_tokenizer

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "campaigns" / "quickstart.toml"

NO_VERDICT = ("--set", "campaign.primary_metric=final:loss")
"""Without an assumed spread of the metric, ``explain`` simulates no verdict, which takes seconds."""


def texts_of(*arguments: str | Path) -> dict[str, list[str]]:
    """Return every text that ``explain`` prints, by name."""
    result = run_cli("explain", *arguments)
    assert result.exit_code == 0, result.output
    texts: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        texts.setdefault(line[:14].strip(), []).append(line[14:])
    return texts


def explained(*arguments: str | Path) -> dict[str, str]:
    return {name: texts[0] for name, texts in texts_of(*arguments).items()}


def test_the_bundled_model_s_prompts():
    lines = explained(QUICKSTART, *NO_VERDICT)
    assert lines["data"] == "arithmetic: 20,000 problems to train on, 200 held out"
    measured = "measured on 708 prompts with the tokenizer of tiny-reasoner"
    assert lines["prompts"] == f"9 to 14 tokens, half of them at most 12, {measured}"
    assert lines["example"].startswith('"<|user|>')
    assert lines["reward"].startswith("match: 1 where the marked answer is the reference")
    assert "environment" not in lines
    assert lines["writes"] == "logs/quickstart/ (--files lists what)"


def test_an_environment_is_named_with_its_turns_and_what_they_cost():
    lines = explained(ROOT / "campaigns" / "turn_credit.toml", *NO_VERDICT)
    assert lines["environment"] == (
        "tools calculations:calculator; at most 5 turns of 48 sampled tokens; in 2 processes of its own"
    )
    assert "= 960 completions, at most 230,400 tokens" in lines["each run"]
    assert lines["reward"].startswith("match")


def test_every_condition_has_its_credit_loss_reward_and_differences(tmp_path):
    file = tmp_path / "terms.toml"
    head = '[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "my:own"\n'
    weighted = '{type = "weighted", components = [{type = "math"}, {type = "format", weight = 0.1, offset = -1.0}]}'
    file.write_text(
        f"[campaign]\nseeds = [3, 5]\nprimary_metric = 'final:loss'\n{head}kl_coef = 0.1\ndual_clip = 3.0\n"
        f"{head}entropy_coef = 0.01\ntis_cap = 2.0\n{head}icepop_band = [0.5, 5]\nloss_normalizer = 'constant'\n"
        '[[campaign.conditions]]\nadvantage_mode = "rloo"\ntransform_mode = "none"\n"training.lr" = 3e-4\n'
        f"reward = {weighted}\n"
        '[training]\nmax_steps = 10\nbatch_size = 4\ngroup_size = 8\nmax_tokens = 50\n[backend]\ndevices = "cpu"\n'
    )
    output = run_cli("explain", file).stdout
    loss = [line for line in output.splitlines() if line.startswith("loss ")]
    assert "a negative advantage counts 3 times at most, plus 0.1 × KL to the base  (grpo+my-own~dual" in loss[0]
    assert "π/π_sampler up to 2, divided by all tokens, minus 0.01 × entropy  (grpo+my-own~ent" in loss[1]
    assert "where that is 0.5 to 5, divided by max_tokens and the number of completions  (grpo" in loss[2]
    assert "4 conditions × 2 seeds = 8 runs" in output
    assert "10 steps × 4 prompts × 8 completions = 320 completions, at most 16,000 tokens" in output
    assert "training.lr = 0.0003" in output
    rewards = [line for line in output.splitlines() if line.startswith("reward ")]
    assert len(rewards) == 2
    assert "1 × math + 0.1 × (format − 1); math: 1 where" in rewards[1]


def test_measured_lengths_are_those_of_training(tmp_path):
    """Every prompt of a file, through system prompt, template and transformers' own tokenizer."""
    from transformers import AutoTokenizer

    model = qwen3_directory(tmp_path / "model", ["What is 3 + 4? 7", "Compute 12 * 3."])
    rows = [{"prompt": f"{i} " + "What is 3 + 4? " * (1 + i % 7), "answer": str(i)} for i in range(40)]
    append_jsonl(tmp_path / "problems.jsonl", rows)
    file = tmp_path / "run.toml"
    file.write_text(
        f'[model]\nmodel = "{model}"\n[data]\nsource = "problems.jsonl"\nsystem_prompt = "Think."\n'
        'prompt_template = "{prompt} Box it."\nshuffle = false\n[evaluation]\nproblems = 4\n'
    )
    config = load(file).config
    data = load_data(config.data, config.held_out, base_dir=tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    lengths = [len(render(each, tokenizer, config.data).token_ids) for each in (*data.train, *data.heldout)]
    lines = explained(file)
    told = f"{min(lengths)} to {max(lengths)} tokens, half of them at most {round(median(lengths))}"
    assert lines["prompts"] == f"{told}, measured on all prompts with the tokenizer of {model}"
    assert lines["example"].startswith('"<turn>Think.<turn>')


def test_what_is_missing_is_named(tmp_path):
    """No tokenizer, a damaged one, no data, a source that raises: lines, and the rest stands."""
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        light_tokenizer(str(tmp_path))
    (tmp_path / "mine.py").write_text("def fails(split):\n    raise RuntimeError('no \\x1b[31mserver')\n")
    file = tmp_path / "run.toml"
    file.write_text('[data]\nsource = "mine:fails"\n')
    assert explained(file)["data"] == "mine:fails: not read: RuntimeError: no \\x1b[31mserver (mine.py:2)"
    lines = explained(file, "--set", 'data.source="nowhere.jsonl"')
    assert "not read" in lines["data"]
    assert lines["prompts"] == "not measured, 128 tokens are assumed"
    lines = explained(file, "--set", "data.source=arithmetic", "--set", 'model.model="someone/else"')
    missing = "the tokenizer.json of someone/else is not on this machine"
    assert lines["prompts"] == f"not measured, 128 tokens are assumed: {missing}"
    assert lines["data"].startswith("arithmetic: ")


@pytest.fixture(scope="module")
def campaign(tmp_path_factory) -> tuple[Path, str, Path]:
    """Arguments for a campaign of two conditions, evaluated at different steps on two sets, one with few problems."""
    home = tmp_path_factory.mktemp("explained")
    model = qwen3_directory(home / "toy", ["12+34=46", "7+5=12", "90-1=89"])
    append_jsonl(home / "few.jsonl", [{"prompt": f"{i}+{i}=?", "answer": str(2 * i)} for i in range(3)])
    file = home / "camp.toml"
    file.write_text(
        campaign_head(("grpo", "none"), ("gae", "none"), seeds=[1, 2], primary_metric="final:loss")
        + '"training.eval_every" = 1\n'
        + TINY_RUN.format(model=model)
        + 'max_tokens = 4\n[squeeze]\nenabled = false\n[backend]\ndevices = "cpu"\n[evaluation]\nproblems = 5\n'
        '[[evaluation.sets]]\nname = "few"\nsource = "few.jsonl"\n[[evaluation.sets]]\nname = "more"\nsamples = 2\n'
    )
    return file, "--out", home / "logs" / "camp"


def test_evaluations_and_time_are_those_of_the_campaign(campaign):
    """Counted before it is trained, as its records have it; the time only after it, from what they say."""
    file, _, out = campaign
    before, few = texts_of(*campaign), "3 problems × 1 + 5 problems × 2"
    assert before["evaluated"] == [
        f"2 times (after 0, 2 steps) {few} = 26 completions, at most 104 tokens  (grpo)",
        f"3 times (after 0, 1, 2 steps) {few} = 39 completions, at most 156 tokens  (gae~eval_every=1)",
    ]
    assert "and 91 completions for evaluation" in before["altogether"][0]  # of the base once for all four runs
    assert before["time"][0].startswith("not known: no finished run of ")
    trained = run_cli("train", file, "--out", out, "--plain")
    assert trained.exit_code == 0, trained.output
    counts = {run.name: len(read_jsonl(run / "emergence" / "evaluations.jsonl")) for run in (out / "runs").iterdir()}
    by_condition = {"grpo+none": 26, "gae+none~eval_every=1": 39}
    assert counts == {f"{name}_s{seed}": count for name, count in by_condition.items() for seed in (1, 2)}
    assert len(list((out / "base").glob("evaluation_*"))) == 2  # one for each set

    again = texts_of(*campaign, "--set", "training.lr=0.02")["time"][0]
    facts = r"4 runs, 194 completions in \d+ s; differs in training\.lr"
    assert re.fullmatch(rf"about \d+ s at the speed of {re.escape(str(out))} \({facts}\)", again), again
    settings = read_json(out / "runs" / "grpo+none_s1" / "config.json")
    settings["training"]["max_tokens"] = 5
    write_json(out / "runs" / "grpo+none_s1" / "config.json", settings)
    assert "(3 runs, " in texts_of(*campaign)["time"][0]
    write_json(out / "environment.json", read_json(out / "environment.json") | {"processor": "of another machine"})
    assert texts_of(*campaign)["time"][0].startswith("not known: no finished run of ")


def test_memory_is_that_of_the_cohort_that_takes_most(campaign):
    """A critic is part of it; fewer runs at a time take less."""
    four, one = texts_of(*campaign), texts_of(*campaign, "--set", "campaign.lanes=1")
    assert "trained adapters of 4 runs" in four["memory"][0]
    assert "trained adapter " in one["memory"][0]
    gpu = texts_of(*campaign, "--set", "backend.devices=gpu:0")["memory"][0]
    assert "on a GPU, by calculation: model in bfloat16" in gpu


def test_idle_workers_have_a_remedy(campaign):
    executor = ("--executor", "processes", "--workers", "3")
    assert texts_of(*campaign, *executor)["idle"] == ["1 of 3 workers: 4 runs are 2 cohorts; set [campaign] lanes = 1"]
    assert "idle" not in texts_of(*campaign, *executor, "--set", "campaign.lanes=1")
