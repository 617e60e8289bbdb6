"""Faults of the tools that people use today, each shown absent here: learning, lost work, misled people, lost time.

What a part's own tests show already (exact resume, loss scale, time limits of graders, …) is not repeated.
"""

from __future__ import annotations

import resource
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from lane_cases import adamw, fresh_logprobs, local_policy, requests, rollout, sample, trained, update
from torch.utils._python_dispatch import TorchDispatchMode
from toymodels import TWO_CONDITIONS, qwen3_directory
from typer.testing import CliRunner

from retrain.algorithms.standard import assign_credit, fill_advantages, mark_planning
from retrain.campaign.adapters.squeeze import squeeze
from retrain.campaign.judging.comparison import METRIC, compare
from retrain.campaign.running.controller import launch
from retrain.checkpoints import Snapshot, newest_whole, write_checkpoint
from retrain.cli import app
from retrain.config import load, parse_dict
from retrain.engines.dense import DenseDecoder
from retrain.engines.local import LocalEngine
from retrain.errors import ConfigError, StorageError
from retrain.files import append_jsonl, read_json, read_jsonl, write_json
from retrain.maths.planning import RegexDetector
from retrain.policy.adapter_io import read_adapter, write_peft
from retrain.policy.base import load_base
from retrain.policy.lora import Lanes
from retrain.policy.protocol import samples_of
from retrain.record.observer import NullObserver
from retrain.record.tables import squeeze_text
from retrain.types import Action, Group, Problem, Prompt, RewardResult, single_turn

REWARDS = '''
def score(completion, answer):
    """Right when there is a 2: most groups of a toy model are mixed, some have no signal."""
    return float("2" in completion)

def even(completion, answer):
    return sum(c in "02468" for c in completion) / max(1, len(completion))

def same(completion, answer):
    return 0.25

def broken(completion, answer):
    raise RuntimeError("this grader is broken")
'''
SETTINGS = """
[model]
model = "{home}/model"
lora_rank = 4
[training]
batch_size = 3
group_size = 4
max_tokens = 10
max_steps = 3
lr = 0.01
save_every = 2
keep_last = 1
[data]
source = "{home}/subjects.jsonl"
[evaluation]
problems = 0
[reward]
type = "custom"
custom_module = "{home}/rewards.py"
custom_function = "{reward}"
workers = 1
[inference]
dtype = "float64"
[squeeze]
enabled = false
"""
PAIR = TWO_CONDITIONS + "{other}\n"
OTHER = """
lr = 0.002
temperature = 0.7
max_tokens = 5
group_size = 6
batch_size = 2
"model.lora_rank" = 2
"""
BASE, CHANGED = 0, 1
"""Positions of the two conditions of a campaign in ``runs_of``."""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A model, rewards, and problems that are sorted by subject."""
    home = tmp_path_factory.mktemp("home")
    qwen3_directory(home / "model", ["12+34=? 7*46-58+23=? the answer is \\boxed{46}", "let me check 0 2 4 6 8"])
    (home / "rewards.py").write_text(REWARDS)
    subjects = [{"prompt": f"{'algebra' if i < 20 else 'counting'} {i}: 2 + {i} = ?", "answer": "x"} for i in range(40)]
    append_jsonl(home / "subjects.jsonl", subjects)
    return home


def toml(home: Path, path: Path, *, pair: str | None = None, reward: str = "score") -> Path:
    """A single run's file, or with ``pair`` (further keys of the second condition) a campaign's."""
    campaign = "" if pair is None else PAIR.format(other=pair)
    path.write_text(campaign + SETTINGS.format(home=home, reward=reward))
    return path


def train(path: Path, out: Path, *sets: str):
    return launch(load(path, sets), out, NullObserver())


def runs_of(out: Path) -> dict[tuple[int, int], Path]:
    """Run directories by (position of the condition, seed)."""
    runs = read_json(out / "manifest.json")["runs"]
    assert len(runs) == 4
    labels = list(dict.fromkeys(run["label"] for run in runs))
    return {(labels.index(run["label"]), run["seed"]): out / run["path"] for run in runs}


def rows_of(run: Path) -> list[dict]:
    return read_jsonl(run / "metrics.jsonl")


def completions_of(run: Path) -> list[dict]:
    return read_jsonl(run / "emergence" / "generations.jsonl")


def weights(directory: Path) -> bytes:
    return (directory / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def mixed(home, tmp_path_factory) -> Path:
    """A finished cohort whose two conditions differ in every key that has reached sampling and update."""
    folder = tmp_path_factory.mktemp("mixed")
    path = toml(home, folder / "mixed.toml", pair=OTHER)
    export, trackers = f'backend.adapter_path="{folder}/export"', 'logging.report_to=["tensorboard"]'
    assert train(path, folder / "out", "campaign.lanes=4", export, trackers).exit_status == 0
    return folder


@pytest.fixture(scope="module")
def silent(home, tmp_path_factory) -> Path:
    """A finished campaign in which every completion scores the same: no update, the adapters stay as initialised."""
    folder = tmp_path_factory.mktemp("silent")
    path = toml(home, folder / "silent.toml", pair="", reward="same")
    assert train(path, folder / "out", "training.save_every=1", "data.shuffle=false").exit_status == 0
    return folder


@pytest.fixture
def base(home):
    return load_base(str(home / "model"), devices="cpu", dtype="float32")


# -- learning is wrong ------------------------------------------------------------------------------------------


def test_ratio_is_one_in_a_campaign_at_temperature_07(mixed):
    """Sampler and trainer logprobs at different temperatures."""
    for (condition, _), run in runs_of(mixed / "out").items():
        config = read_json(run / "config.json")
        assert config["training"]["temperature"] == (0.7 if condition == CHANGED else 1.0)
        ratios = [row["val/ratio"] for row in rows_of(run) if row["val/ratio"] is not None]
        assert ratios
        assert max(abs(ratio - 1) for ratio in ratios) < 1e-5


def test_logprobs_are_fresh_after_every_update_and_free_of_dropout(home, tmp_path):
    """Prefix caches that outlive an update; rollouts sampled with dropout active, the base's or LoRA's."""
    directory = tmp_path / "dropping"
    qwen3_directory(directory, ["12+34=? the answer is \\boxed{46}"])
    config = read_json(directory / "config.json")
    write_json(directory / "config.json", config | {"attention_dropout": 0.5})
    dropping = load_base(str(directory), devices="cpu", dtype="float32")
    assert dropping.model.config.attention_dropout == 0.5
    write_json(directory / "config.json", config | {"attention_dropout": 0.0})
    plain = load_base(str(directory), devices="cpu", dtype="float32")
    lanes, reference_lanes = Lanes(dropping), Lanes(plain)
    adapter, engine = trained(lanes, 0), LocalEngine(dropping, lanes)
    optimizer, asked = adamw(adapter, 0.05), requests(samples=4)
    reference = reference_lanes.new_adapter(4, 8.0)
    for step in range(4):
        reference.load(adapter.tensors())
        for request, group in zip(asked, sample(engine, asked, [adapter]), strict=True):
            for completion in group:
                expected, _ = fresh_logprobs(
                    plain, reference_lanes, reference, request.prompt_ids, completion.token_ids, 1.0
                )
                np.testing.assert_allclose(completion.logprobs_T, expected, atol=1e-4)
        samples, before, dropout = rollout(dropping, lanes, adapter), adapter.flat.detach().clone(), 0.5 * (step % 2)
        metrics = update(
            lanes, adapter, samples, optimizer=optimizer, lr=0.05, step=step, dropout=dropout, grad_clip_norm=1.0
        )
        assert float((adapter.flat.detach() - before).abs().max()) > 0.01
        if not dropout:
            assert abs(metrics["val/ratio"] - 1) < 1e-5


def test_the_seed_and_nothing_else_decides_the_initial_adapter(home, silent, tmp_path):
    """Same seed, different LoRA initialisation: the model built before seeding."""
    torch.manual_seed(999)
    train(silent / "silent.toml", tmp_path / "again", "campaign.max_steps=1", "campaign.lanes=1")
    runs, again = runs_of(silent / "out"), runs_of(tmp_path / "again")
    for seed in (1, 2):
        assert weights(runs[0, seed] / "final") == weights(runs[1, seed] / "final")
        assert (
            weights(runs[0, seed] / "final") == weights(again[0, seed] / "final") == weights(again[1, seed] / "final")
        )
    assert weights(runs[0, 1] / "final") != weights(runs[0, 2] / "final")
    assert all(bool(a.any()) and not bool(b.any()) for a, b in read_adapter(runs[0, 1] / "final").tensors.values())


def test_seeds_reach_the_sampler(silent):
    """Seeds that do not reach the sampler; one seed for all samples of a group."""
    first, second = (completions_of(runs_of(silent / "out")[0, seed])[:12] for seed in (1, 2))
    assert [row["prompt"] for row in first] == [row["prompt"] for row in second]  # unshuffled: only sampling differs
    for group in range(3):
        one, other = ([row["completion"] for row in rows if row["group"] == group] for rows in (first, second))
        assert len(set(one)) == len(set(other)) == 4
        assert not set(one) & set(other)


def test_problems_are_shuffled_by_default_and_by_seed(home, mixed, silent):
    """Data never shuffled: the first batches are all of one subject."""
    assert read_json(mixed / "out/config.json")["data"]["shuffle"]
    orders = {}
    for seed in (1, 2):
        rows = completions_of(runs_of(mixed / "out")[BASE, seed])
        orders[seed] = [row["prompt"] for row in rows if row["sample"] == 0]
        assert len(orders[seed]) == len(set(orders[seed])) == 9  # no problem twice within an epoch
        assert {prompt.split()[0] for prompt in orders[seed]} == {"algebra", "counting"}
    assert orders[1] != orders[2]
    in_order = completions_of(runs_of(silent / "out")[0, 1])
    assert [row["prompt"].split(":")[0] for row in in_order if row["sample"] == 0] == [f"algebra {i}" for i in range(9)]


def test_two_problems_fill_a_batch_of_five(home, tmp_path):
    """Prompts that are fewer than a batch train zero steps and report success."""
    append_jsonl(tmp_path / "two.jsonl", [{"prompt": f"{i} + 2 = ?", "answer": "x"} for i in range(2)])
    path = toml(home, tmp_path / "two.toml", reward="even")
    outcome = train(path, tmp_path / "out", f'data.source="{tmp_path}/two.jsonl"', "training.batch_size=5")
    assert outcome.exit_status == 0
    rows = rows_of(tmp_path / "out")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["optim/grad_norm"] > 0 and row["num_datums"] > 0 for row in rows)
    assert len(completions_of(tmp_path / "out")) == 3 * 5 * 4
    assert any(bool(b.any()) for _, b in read_adapter(tmp_path / "out/final").tensors.values())


def graded(rewards: list[float], length: int = 6) -> Group:
    """A group with these rewards, its completions made up."""
    logprobs = -np.linspace(0.1, 2, length)
    made = [Action(list(range(10, 10 + length)), "so x", logprobs, -logprobs, "stop") for _ in rewards]
    prompt = Prompt(Problem("p", "1+1=?", "2"), "1+1=?", (5, 6, 7))
    group = single_turn(prompt, made, [RewardResult(reward) for reward in rewards])
    for one in group.rollouts:
        one.planning_T = np.zeros(length, dtype=bool)
    return group


@pytest.mark.parametrize("mode", ["none", "gtpo"])
def test_an_advantage_of_zero_is_trained_on(base, mode):
    """Zero advantage used as the mask for "not trained"."""
    groups = [graded([0.0, 0.5, 1.0])]
    fill_advantages(groups, "dr_grpo")
    assert groups[0].advantages_N[1] == 0
    credit = assign_credit(groups, parse_dict({"algorithm": {"transform_mode": mode}}), 0.0, ("placebo",))
    samples = samples_of(groups)
    assert [int(s.loss_mask.sum()) for s in samples] == [6, 6, 6]
    assert (credit.denominators.tokens, credit.denominators.sequences) == (18, 3)
    lanes = Lanes(base)
    adapter = trained(lanes, 0)
    job = {"optimizer": adamw(adapter), "denominators": credit.denominators}
    metrics = update(lanes, adapter, samples, log_kl=True, **job)
    assert metrics["num_datums"] == 3
    only_zero = [s for s in samples if not s.advantages.any()]
    assert len(only_zero) == 1
    alone = update(lanes, adapter, only_zero, **job)
    assert alone["val/ratio"] is not None  # its tokens are measured though they pull nowhere


def test_metrics_count_what_was_sampled(mixed, silent):
    """Metrics computed after filtering: correct 0.25 reported where it was 0.0."""
    skipped = 0
    for run in [*runs_of(mixed / "out").values(), *runs_of(silent / "out").values()]:
        for row in rows_of(run):
            own = [one for one in completions_of(run) if one["step"] == row["step"]]
            assert len(own) == 12
            assert row["mean_reward"] == pytest.approx(np.mean([one["reward"] for one in own]))
            assert row["correct_rate"] == pytest.approx(np.mean([one["correct"] for one in own]))
            by_group: dict[int, set[float]] = {}
            for one in own:
                by_group.setdefault(one["group"], set()).add(one["reward"])
            skipped += sum(len(rewards) == 1 for rewards in by_group.values()) if run.is_relative_to(mixed) else 0
    assert skipped  # some groups of the mixed campaign were without signal, or this shows nothing


def test_all_end_tokens_of_a_model_are_known(tmp_path):
    """Only one end-of-sequence id known: 97 % "clipped" on a model with several."""
    qwen3_directory(tmp_path, ["12+34=? the answer is \\boxed{46}"])
    config, generation = read_json(tmp_path / "config.json"), read_json(tmp_path / "generation_config.json")
    several = list(range(20, 120))
    write_json(tmp_path / "generation_config.json", generation | {"eos_token_id": several})
    write_json(tmp_path / "config.json", config | {"eos_token_id": 120})
    base = load_base(str(tmp_path), devices="cpu", dtype="float32")
    assert {*several, 120, base.tokenizer.eos_token_id} == set(base.eos_ids)
    lanes = Lanes(base)
    asked = requests(prompts=4, samples=8, max_tokens=30)
    sampled = [c for group in sample(LocalEngine(base, lanes), asked, [trained(lanes, 0)]) for c in group]
    stopped = [c for c in sampled if c.stop_reason == "stop"]
    assert len(stopped) > len(sampled) / 2
    assert len({c.token_ids[-1] for c in stopped}) > 1


# -- work is lost -----------------------------------------------------------------------------------------------


def test_resume_from_continues_and_refuses_what_is_not_there(home, tmp_path):
    """A resume flag that is accepted and ignored; a cold optimizer after it."""
    path = toml(home, tmp_path / "run.toml", reward="even")
    train(path, tmp_path / "first", "training.max_steps=2")
    train(path, tmp_path / "whole", "training.max_steps=4")
    train(path, tmp_path / "second", "training.max_steps=4", f'resume.from="{tmp_path}/first"')
    assert [row["step"] for row in rows_of(tmp_path / "second")] == [2, 3]
    losses = [[row["loss"] for row in rows_of(tmp_path / name)][-2:] for name in ("whole", "second")]
    assert losses[0] == losses[1]
    assert weights(tmp_path / "second/final") == weights(tmp_path / "whole/final")
    missing = ["train", str(path), "--out", str(tmp_path / "third"), "--set", f'resume.from="{tmp_path}/nothing"']
    result = CliRunner().invoke(app, missing)
    assert result.exit_code == 2
    assert "nothing" in result.stderr
    assert not (tmp_path / "third/metrics.jsonl").exists()


def test_runs_do_not_share_an_adapter_path(mixed):
    """All runs share one adapter path and overwrite each other."""
    runs = runs_of(mixed / "out").values()
    exported = {run.name: weights(mixed / "export" / run.name) for run in runs}
    assert exported == {run.name: weights(run / "final") for run in runs}
    assert len(set(exported.values())) == 4


def test_status_is_1_when_every_run_failed(home, tmp_path):
    """Exit status 0 when every run failed."""
    path = toml(home, tmp_path / "broken.toml", pair="", reward="broken")
    result = CliRunner().invoke(app, ["train", str(path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert {run["state"] for run in read_json(tmp_path / "out/manifest.json")["runs"]} == {"failed"}
    assert "this grader is broken" in result.output


def test_steps_without_signal_leave_rows_and_checkpoints(silent):
    """Steps without signal write no metrics row and skip the checkpoint."""
    for run in runs_of(silent / "out").values():
        rows = rows_of(run)
        assert [row["step"] for row in rows] == [0, 1, 2]
        assert {row["num_datums"] for row in rows} == {0}
        assert {row["mean_reward"] for row in rows} == {0.25}
        assert [row["name"] for row in read_jsonl(run / "checkpoints.jsonl")] == ["000001", "000002", "000003", "final"]
        assert [step["step"] for step in read_jsonl(run / "emergence/steps.jsonl")] == [0, 1, 2]


def test_final_is_recorded_last_and_stays(mixed):
    """A rolling checkpoint recorded after ``final``, then deleted."""
    for run in runs_of(mixed / "out").values():
        lines = read_jsonl(run / "checkpoints.jsonl")
        assert [line["name"] for line in lines] == ["000002", "000003", "final"]
        assert not (run / lines[0]["state_path"]).exists()  # keep_last = 1: pruning did happen
        for key in ("state_path", "sampler_path"):
            assert (run / lines[-1][key] / "adapter_model.safetensors").is_file()
        assert newest_whole(run, []) == run / lines[-1]["state_path"]


@contextmanager
def full_disk(bytes_left: int):
    """Files of this process cannot grow beyond so many bytes: a real failure in the middle of writing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_old_files_whole(base, tmp_path):
    """Manifests, adapters, state written in place, not atomically."""
    write_json(tmp_path / "manifest.json", {"runs": ["old"] * 10})
    with full_disk(64), pytest.raises(StorageError, match="too large"):
        write_json(tmp_path / "manifest.json", {"runs": ["new"] * 100})
    assert read_json(tmp_path / "manifest.json") == {"runs": ["old"] * 10}
    policy = local_policy(base, Lanes(base))
    policy.adapter.load(trained(policy.lanes, 0).tensors())

    def save(directory: Path, step: int) -> None:
        write_checkpoint(directory, Snapshot(step, policy.snapshot(resumable=True), f'{{"step": {step}}}'))

    for step in (1, 1, 2):  # the checkpoint of step 1 is also written anew over the old one
        directory = tmp_path / "checkpoints" / f"step_{step:06d}"
        if not directory.exists():
            save(directory, step)
            whole = {path.name: path.read_bytes() for path in directory.iterdir()}
            first = directory if step == 1 else None
        if first is not None:
            with full_disk(4096), pytest.raises(Exception, match=r"(?i)too large"):
                save(first, 99)
            assert {path.name: path.read_bytes() for path in first.iterdir()} == whole
            assert newest_whole(tmp_path, []) == first


def test_parameters_of_a_condition_reach_its_runs_in_a_cohort(home, mixed, tmp_path):
    """Per-condition parameters silently dropped when a campaign runs in parallel."""
    train(mixed / "mixed.toml", tmp_path / "alone", "campaign.lanes=1")
    together, alone = runs_of(mixed / "out"), runs_of(tmp_path / "alone")
    assert {row["cohort_size"] for row in rows_of(together[BASE, 1])} == {4}
    assert {row["cohort_size"] for row in rows_of(alone[BASE, 1])} == {1}
    for key, run in together.items():
        changed = key[0] == CHANGED
        rows, completions = rows_of(run), completions_of(run)
        assert {row["optim/lr"] for row in rows} == {0.002 if changed else 0.01}
        assert len(completions) == 3 * (2 * 6 if changed else 3 * 4)
        assert max(one["num_tokens"] for one in completions) == (5 if changed else 10)
        assert read_json(run / "final/adapter_config.json")["r"] == (2 if changed else 4)
        assert [one["completion"] for one in completions] == [one["completion"] for one in completions_of(alone[key])]
        assert any(row["loss"] for row in rows)
        for name in ("loss", "optim/grad_norm"):
            values = ([row[name] or 0.0 for row in one] for one in (rows, rows_of(alone[key])))
            np.testing.assert_allclose(*values, rtol=1e-6, atol=1e-9)


# -- people are misled ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[training]\nleraning_rate = 0.1\n", "lr"),
        ('[squeeze]\nenabled = "false"\n', "enabled = false"),
        ("[gtpo]\nbeta = -1\n", "beta"),
    ],
)
def test_a_mistake_is_one_line_and_trains_nothing(tmp_path, text, said):
    """Unknown keys ignored, "false" read as true, beta = -1 trained to the end, a typo told in 116 lines."""
    path = tmp_path / "typo.toml"
    path.write_text(text)
    result = CliRunner().invoke(app, ["train", str(path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert "typo.toml:2" in line
    assert said in line
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError):
        load(path)


@pytest.mark.parametrize("arguments", [["train", "a.toml", "--sed", "training.lr=1"], ["trian", "a.toml"]])
def test_a_mistyped_option_is_told_in_a_few_lines(arguments):
    """A typo prints 116 lines of usage."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) <= 8


def test_every_completion_is_logged_once_under_its_own_step(mixed):
    """Logs that keep the last 8 of 32, or only the best, and repeat them under new steps."""
    for (condition, _), run in runs_of(mixed / "out").items():
        prompts, samples = (2, 6) if condition == CHANGED else (3, 4)
        rows = completions_of(run)
        places = [(row["step"], row["group"], row["sample"]) for row in rows]
        assert places == [(s, g, n) for s in range(3) for g in range(prompts) for n in range(samples)]
        for row in rows_of(run):
            own = [one for one in rows if one["step"] == row["step"]]
            assert row["completions/mean_length"] == pytest.approx(np.mean([one["num_tokens"] for one in own]))
            assert row["mean_reward"] == pytest.approx(np.mean([one["reward"] for one in own]))


def campaign_files(folder: Path, results: dict[str, list[float]], problems: int) -> list[dict]:
    """Finished runs on disk: held-out accuracies by condition and seed; training rewards that say the opposite."""
    runs = []
    for label, values in results.items():
        for seed, value in enumerate(values, 1):
            path = f"runs/{label}_s{seed}"
            row = {"step": 0, "mean_reward": 1 - value, "correct_rate": 1 - value, "num_tokens": 1}
            append_jsonl(folder / path / "metrics.jsonl", [row])
            points = [(0, 0.5), (1, value)]
            evals = [{"name": "heldout", "step": s, METRIC: v, "eval/heldout/problems": problems} for s, v in points]
            append_jsonl(folder / path / "evals.jsonl", evals)
            runs.append({"run_id": f"{label}_s{seed}", "label": label, "seed": seed, "state": "done", "path": path})
    return runs


def test_conditions_are_compared_by_seed(tmp_path):
    """Conditions compared on training reward, without spread, completions pooled over seeds as if independent."""
    base = [0.30, 0.50, 0.40, 0.60, 0.35, 0.55, 0.45, 0.65]
    results = {"base": base, "better": [v + 0.02 + 0.01 * (i % 2) for i, v in enumerate(base)]}
    small, large = (
        compare(tmp_path / str(n), campaign_files(tmp_path / str(n), results, n), list(results)) for n in (100, 10_000)
    )
    assert small["conditions"] == large["conditions"]  # more completions per seed are not more seeds
    first, second = small["conditions"]
    assert first["after_values"] == base
    low, high = first["interval"]
    assert high - low > 0.1  # eight seeds of this spread; 80,000 pooled completions would give 0.007
    assert second["difference"] == pytest.approx(0.025)
    assert second["difference_interval"][0] > 0
    assert second["p_value"] == pytest.approx(2 / 2**8)  # exact over the signs of eight pairs
    assert second["verdict"] == "better"  # though its training reward is lower
    one = {label: values[:1] for label, values in results.items()}
    single = compare(tmp_path / "one", campaign_files(tmp_path / "one", one, 10_000), list(one))
    assert single["conditions"][1]["difference_interval"] is None
    assert "cannot tell" in single["conditions"][1]["verdict"]


def test_the_recommended_rank_is_not_from_the_mean_alone(tmp_path):
    """A recommended rank from energy averaged over layers."""
    sharp, flat = torch.diag(torch.tensor([1.0, 0, 0, 0])), torch.eye(4)
    tensors = {f"layer{i}": (torch.eye(4), sharp.clone()) for i in range(30)} | {"last": (torch.eye(4), flat)}
    config = {"r": 4, "lora_alpha": 4, "peft_type": "LORA", "target_modules": list(tensors)}
    write_peft(tmp_path / "adapter", tensors, config)
    analysis = squeeze(tmp_path / "adapter")
    row = analysis["rows"][0]
    assert row["rank"] == 1
    assert row["mean_variance"] > 0.95 > 0.5 > row["min_variance"]
    assert row["relative_error"] == pytest.approx((1 - row["mean_variance"]) ** 0.5)
    assert (analysis["recommended_rank"], analysis["worst_module"]) == (4, "last")
    assert "Not verified" in squeeze_text(analysis)  # energy is no accuracy
    # A run that says how little its worst layer may keep is taken at its word.
    write_json(tmp_path / "config.json", {"squeeze": {"min_layer_retention": 0.4}})
    assert squeeze(tmp_path / "adapter")["recommended_rank"] == 2


def test_a_tracker_has_our_steps(mixed):
    """A tracker's step counter running to 53 for 3 optimizer steps."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    for run in runs_of(mixed / "out").values():
        (file,) = (run / "tensorboard").iterdir()
        events = [event for event in EventFileLoader(str(file)).Load() if event.summary.value]
        assert [event.step for event in events] == [0, 1, 2]
        tracked = [{v.tag: v for v in event.summary.value} for event in events]
        assert all(tracked)


# -- time is wasted ---------------------------------------------------------------------------------------------


@contextmanager
def decodes():
    """(rows, tokens) of every pass that the dense decoder makes while inside."""
    seen, prefill, burst = [], DenseDecoder.prefill, DenseDecoder.burst

    def noted_prefill(self, ids_RT, *rest):
        seen.append(tuple(ids_RT.shape))
        return prefill(self, ids_RT, *rest)

    def noted_burst(self, blocks, rows, *rest):
        steps = burst(self, blocks, rows, *rest)
        seen.extend([(len(rows.token_R), 1)] * steps)
        return steps

    DenseDecoder.prefill, DenseDecoder.burst = noted_prefill, noted_burst
    try:
        yield seen
    finally:
        DenseDecoder.prefill, DenseDecoder.burst = prefill, burst


def test_all_prompts_decode_together_and_finished_rows_leave(base):
    """One prompt at a time; prompts prefilled once per sample; finished rows still decoded."""
    lanes = Lanes(base)
    base.eos_ids = tuple(range(20, 120))
    asked = requests(prompts=4, samples=8, max_tokens=40)
    engine = LocalEngine(base, lanes)
    with decodes() as seen:
        sampled = [c for group in sample(engine, asked, [trained(lanes, 0)]) for c in group]
    lengths = [len(c) for c in sampled]
    (rows, width), decoded = seen[0], seen[1:]
    assert (rows, width) == (4, max(len(request.prompt_ids) for request in asked))
    assert len(decoded) == max(lengths) - 1
    assert all(tokens == 1 for _, tokens in decoded)
    computed = sum(rows for rows, _ in decoded)
    assert computed <= sum(lengths) / 0.75
    assert computed < 0.6 * len(sampled) * len(decoded)


class VocabularySorts(TorchDispatchMode):
    """Notes sorts and top-k selections over the whole vocabulary."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.vocabulary, self.found, self.operations = vocabulary, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        name = func.name().split("::")[1].split(".")[0]
        if name in ("sort", "argsort", "topk", "msort", "kthvalue") and args[0].shape[-1] == self.vocabulary:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_no_token_costs_a_sort_of_the_vocabulary(base):
    """A full sort of the vocabulary per token."""
    lanes = Lanes(base)
    adapter = trained(lanes, 0)
    with VocabularySorts(base.vocab_size) as watch:
        torch.randn(2, base.vocab_size).sort(-1)
        assert watch.found == ["sort"]  # the watch sees one
        sample(LocalEngine(base, lanes), requests(temperature=0.7), [adapter])
    assert watch.operations > 100
    assert watch.found == ["sort"]


def test_credit_and_planning_of_a_large_step_are_quick(home, base):
    """Python loops per token: 0.7 s of credit and 0.35 s of planning per 128 × 2,048 tokens."""
    config = parse_dict({"algorithm": {"transform_mode": "gtpo_hicra"}})
    words = base.tokenizer("let me check 12+34=? the answer is 46 ")["input_ids"]
    ids = (words * 2048)[:2048]
    logprobs = -np.random.default_rng(0).random((16, 8, 2048))
    text, prompt = base.text.decode(ids), Prompt(Problem("p", "?", "2"), "?", (5, 6, 7))
    groups = [
        single_turn(
            prompt,
            [Action(ids, text, logprobs[g, n], -logprobs[g, n], "length") for n in range(8)],
            [RewardResult(float(n % 2)) for n in range(8)],
        )
        for g in range(16)
    ]
    taken = []
    for _ in range(3):
        start = time.process_time()
        fill_advantages(groups, "grpo")
        mark_planning(groups, RegexDetector(), base.text)
        credit = assign_credit(groups, config, 0.0, ("placebo",))
        taken.append(time.process_time() - start)
    assert sum(one.token_advantages_T is not None for group in groups for one in group.rollouts) == 128
    assert credit.stats["planning_fraction"] > 0.05
    assert min(taken) < 0.5


def test_runs_share_one_base_and_decode_together(home, base, mixed, tmp_path):
    """Every run loads its own copy of the frozen base and decodes alone."""
    from contextlib import ExitStack

    from retrain.campaign.planning.plan import plan
    from retrain.campaign.running.assemble import assemble

    specs = plan(load(mixed / "mixed.toml"))
    with ExitStack() as stack:
        cohort = assemble(tmp_path / "out", specs, tmp_path, NullObserver(), lambda: False, stack)
        assert len(cohort.runs) == 4
        shared, their_lanes = cohort.engine.base, cohort.engine.lanes
        assert all(run.policy.base is shared and run.policy.lanes is their_lanes for run in cohort.runs)
        assert len({id(run.policy.adapter) for run in cohort.runs}) == 4
        assert not any(parameter.requires_grad for parameter in shared.model.parameters())
        for run in cohort.runs:
            run.recorder.close()
    lanes = Lanes(base)
    adapters = [trained(lanes, seed) for seed in range(3)]
    asked = [request for lane in range(3) for request in requests(lane)]
    engine = LocalEngine(base, lanes)
    with decodes() as together:
        sample(engine, asked, adapters)
    assert len(together) <= 12  # a prefill and a pass per further token, for three runs as for one
    assert together[0][0] == 9
