import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from helpers.campaigns import run_cli
from helpers.models import TINY_RUN, qwen3_directory, set_config
from safetensors.torch import load_file, save_file

from retrain.campaign.planning.changes import version_changes
from retrain.campaign.planning.plan import Plan
from retrain.config import load, tasks
from retrain.errors import ModelError
from retrain.files import read_json, read_jsonl
from retrain.models.directory import bundled_model_path, files_digest, reward_model_fault
from retrain.records.environment import module_hashes
from retrain.rewards import Grader, build_grader
from retrain.rewards.base import Item
from retrain.rewards.reward_model import conversation
from retrain.types import Problem

BUNDLED = str(bundled_model_path("tiny-reasoner"))
ADD = Problem("add", "What is 3 + 4?", "7")
TALK = Problem("talk", ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 * 3?"}), "6")
ANSWERS = ["7", "3 + 4 = 7, so the answer is \\boxed{7}", "", "I do not know. " * 6, "<|end|><|user|>8?", "<|pad|>"]


def classifier(path: Path, *, pad: int | None = 0, labels: int = 1, seed: int = 0, llama: bool = False) -> Path:
    """A classifier of random weights with the tokenizer of the bundled model, as ``save_pretrained`` writes it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED)
    torch.manual_seed(seed)
    config = (transformers.LlamaConfig if llama else transformers.Qwen2Config)(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=160, num_labels=labels, pad_token_id=pad,
    )  # fmt: skip
    family = "Llama" if llama else "Qwen2"
    model = getattr(transformers, f"{family}ForSequenceClassification")(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)  # scores that differ by far more than rounding
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def scorer(tmp_path_factory) -> Path:
    return classifier(tmp_path_factory.mktemp("scorer") / "model")


def grader(path: Path, **keys) -> Grader:
    return build_grader(tasks.RewardSection.model_validate({"type": "reward_model", "reward_model": str(path), **keys}))


def graded(path: Path, items: list[Item], **keys) -> list[float | None]:
    with grader(path, **keys) as made:
        return [result.total_reward for result in made.grade(items)]


def by_hand(path: Path, *texts: str) -> list[float]:
    """Scores by transformers alone: one row at a time, nothing padded."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    with torch.no_grad():
        rows = [tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"] for text in texts]
        return [float(model(input_ids=row).logits[0, 0]) for row in rows]


@pytest.mark.parametrize(("pad", "llama", "problem"), [(0, False, ADD), (None, True, TALK), (1, False, TALK)])
def test_a_batch_scores_what_transformers_scores_row_by_row(tmp_path, pad, llama, problem):
    path = classifier(tmp_path / "model", pad=pad, llama=llama)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    prompt = [{"role": "user", "content": problem.prompt}] if isinstance(problem.prompt, str) else list(problem.prompt)
    talks = [[*prompt, {"role": "assistant", "content": answer}] for answer in ANSWERS]
    expected = by_hand(path, *(tokenizer.apply_chat_template(talk, tokenize=False) for talk in talks))
    items = [(problem, answer) for answer in ANSWERS]
    assert len({round(score, 3) for score in expected}) == len(ANSWERS)
    for batch in (1, 4):
        assert graded(path, items, reward_batch=batch) == pytest.approx(expected, abs=1e-5)


def test_scores_do_not_depend_on_what_arrives_together_and_change_with_the_files(tmp_path):
    path = classifier(tmp_path / "model")
    mine = [(ADD, answer) for answer in ANSWERS]
    others = [(TALK, answer * 2 + "!") for answer in ANSWERS]
    alone = graded(path, mine)
    assert graded(path, others + mine)[len(others) :] == alone  # bit by bit
    assert graded(path, mine) == alone
    classifier(path, seed=1)
    assert graded(path, mine) != alone


def test_without_a_template_the_problem_stands_above_the_answer(tmp_path):
    path = classifier(tmp_path / "model")
    (path / "chat_template.jinja").unlink()
    expected = by_hand(path, "Be brief.\n\n2 * 3?\n\nIt is 6.")
    assert graded(path, [(TALK, "It is 6.")]) == pytest.approx(expected, abs=1e-5)


def test_a_row_may_end_with_any_token(tmp_path):
    """Also with the one that would have padded the others, where the model names no padding token itself."""
    path = classifier(tmp_path / "model", pad=None)
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    answers = ["<|pad|>", "<|end|><|pad|>", "<|end|>", "7" * 20, ""]
    expected = by_hand(path, *(f"{ADD.prompt}{answer}" for answer in answers))
    assert graded(path, [(ADD, answer) for answer in answers]) == pytest.approx(expected, abs=1e-5)
    assert expected[0] != pytest.approx(expected[-1], abs=1e-3)


def test_a_conversation_that_is_too_long_has_no_grade_and_the_others_have(scorer):
    with grader(scorer) as made:
        short, long = made.grade([(ADD, "7"), (ADD, "7 " * 400)])
    assert (long.total_reward, long.correct) == (None, False)
    assert "tokens, more than the 160 of the reward model's context" in str(long.error)
    assert short.total_reward is not None


def test_any_text_is_scored(scorer):
    odd = ["\ud800 half a pair", "\udfff", "\U0001f600", "\0\x1b[31m", "<|pad|><|pad|>", "<|assistant|>", "{{ 7 * 7 }}"]
    scores = graded(scorer, [(ADD, text) for text in odd])
    assert all(score is not None and math.isfinite(score) for score in scores)
    half = Problem("half", "\ud83d?", "")
    assert graded(scorer, [(half, "")])[0] is not None
    assert conversation(half, "a\ud83d\ude00b")[1]["content"] == "a\U0001f600b"


def test_beside_match_the_answer_decides_what_is_correct(scorer):
    components = [
        {"type": "match", "name": "right"},
        {"type": "reward_model", "reward_model": str(scorer), "name": "taste", "weight": 0.1},
    ]
    section = tasks.RewardSection.model_validate({"type": "weighted", "components": components, "reward_batch": 2})
    items = [(ADD, answer) for answer in ("\\boxed{7}", "\\boxed{8}", "7 " * 400)]
    with build_grader(section) as made:
        assert made.names == ("right", "taste")
        *results, long = made.grade(items)
    for result, value, taste in zip(results, (1.0, 0.0), graded(scorer, items), strict=False):
        assert result.components == {"right": value, "taste": pytest.approx(taste, abs=1e-5)}
        assert result.total_reward == pytest.approx(value + 0.1 * float(str(taste)), abs=1e-6)
        assert result.is_correct == bool(value)
    assert long.total_reward is None
    assert str(long.error).startswith("taste: the conversation has")


BROKEN = {
    "labels": (lambda path: classifier(path, labels=2), "it has 2 labels, and a reward model has one, its score"),
    "language": (lambda path: qwen3_directory(path, ["3 + 4"]), "it is a Qwen3ForCausalLM"),
    "weights": (lambda path: (path / "model.safetensors").unlink(), "it has no weights"),
    "tokenizer": (lambda path: (path / "tokenizer.json").unlink(), "it has no tokenizer"),
    "code": (lambda path: set_config(path, model_type="mine", auto_map={"A": "b.C"}), "comes with its own code"),
    "gone": (shutil.rmtree, "there is no such directory"),
    "damaged": (lambda path: (path / "tokenizer.json").write_text("{}"), "it cannot be read"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_mistakes_are_found_before_anything_is_sampled(name, scorer, tmp_path):
    path = tmp_path / "broken"
    shutil.copytree(scorer, path)
    breaks, words = BROKEN[name]
    breaks(path)
    with pytest.raises(ModelError) as caught:
        grader(path)
    message = str(caught.value)
    assert words in message
    assert repr(str(path)) in message
    assert "\n" not in message
    assert caught.value.exit_status == 2
    if name != "damaged":  # only the tokenizer's own reader sees that
        assert words in reward_model_fault(str(path))


def test_broken_weights_give_no_grades(tmp_path):
    path = classifier(tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    weights["score.weight"].fill_(torch.nan)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with grader(path) as made:
        results = made.grade([(ADD, "7"), (ADD, "8")])
    assert [result.total_reward for result in results] == [None, None]
    assert {result.error for result in results} == {"the reward returned nan, not a number within ±1e30"}


def test_a_model_of_the_hub_comes_from_its_cache_or_not_at_all(scorer):
    from huggingface_hub import constants

    with pytest.raises(ModelError, match=r"'owner/scorer': .*download it elsewhere and give the directory's path"):
        grader(Path("owner/scorer"))
    repository = Path(constants.HF_HUB_CACHE) / "models--owner--scorer"
    shutil.copytree(scorer, repository / "snapshots" / "c0ffee")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    assert graded(Path("owner/scorer"), [(ADD, "7")]) == graded(scorer, [(ADD, "7")])


RUN = TINY_RUN + 'max_tokens = 8\n[evaluation]\nproblems = 4\n[squeeze]\nenabled = false\n[reward]\ntype = "{type}"\n'


@pytest.fixture
def home(tmp_path, scorer) -> Path:
    """A directory with a policy, a reward model beside the file, and a run that uses it in a sum."""
    qwen3_directory(tmp_path / "policy", ["What is 3 + 4? 7", "Compute 12 * 3."])
    shutil.copytree(scorer, tmp_path / "taste")
    text = RUN.replace("{model}", str(tmp_path / "policy")).format(type="weighted")
    parts = '[[reward.components]]\ntype = "match"\n[[reward.components]]\ntype = "reward_model"\nname = "taste"\n'
    (tmp_path / "sum.toml").write_text(text + parts + 'reward_model = "./taste"\nweight = 0.5\n')
    return tmp_path


def test_a_run_trains_on_the_scores(home):
    words = run_cli("explain", home / "sum.toml")
    assert words.exit_code == 0
    assert "score that the reward model" in words.output
    result = run_cli("train", home / "sum.toml", "--out", home / "out")
    assert result.exit_code == 0, result.output
    rows = read_jsonl(home / "out/metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert row["reward_failed"] == 0
        assert row["reward_std"] > 0
        assert math.isfinite(row["rewards/match/mean"])
        assert math.isfinite(row["rewards/taste/mean"])
    assert list(read_json(home / "out/config.json")["modules"]) == [str(home / "taste")]


def test_other_files_of_a_reward_model_are_another_run(home, tmp_path):
    (spec,) = Plan.of(load(home / "sum.toml")).specs
    taste = home / "taste"
    before = module_hashes(spec.config, tmp_path)
    assert before == {str(taste): files_digest(taste)}
    (tmp_path / "config.json").write_text(json.dumps({"modules": before}))
    assert not any("reward model" in line for line in version_changes(tmp_path, spec, tmp_path))
    classifier(taste, seed=1)
    (line,) = [line for line in version_changes(tmp_path, spec, tmp_path) if "reward model" in line]
    assert line.startswith(f"files of the reward model {taste}: {before[str(taste)][:12]} → ")


def test_commands_refuse_a_reward_model_that_cannot_be_used(home):
    breaks, words = BROKEN["labels"]
    breaks(home / "taste")
    file = home / "sum.toml"
    checked = run_cli("check", file)
    assert checked.exit_code == 2
    assert re.search(r"sum\.toml:\d+ +reward\.components\[2\]\.reward_model +is ", checked.stderr)
    assert words in checked.stderr
    trained = run_cli("train", file, "--out", home / "out")
    assert (trained.exit_code, words in trained.stderr, "Traceback" in trained.output) == (2, True, False)
    assert not list((home / "out").rglob("metrics.jsonl"))
