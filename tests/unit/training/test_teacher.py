import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.campaigns import StopAfter, adapter_bytes, continue_training, run_cli, train
from helpers.lanes import (
    credit,
    critic_campaign,
    drawn,
    fresh_logits,
    in_turns,
    local_policy,
    made,
    requests,
    rollout,
    runs_of,
    save_adapter,
    totals,
    trained,
)
from helpers.models import qwen3_directory
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from retrain.algorithms import objective_of
from retrain.algorithms.distillation import (
    AdapterTeacher,
    BaseTeacher,
    ModelTeacher,
    PolicyTeacher,
    TeacherContext,
    teacher_logprobs,
)
from retrain.algorithms.teachers import teachers_of
from retrain.config import parse_dict
from retrain.config.runs import RunSpec
from retrain.data.prompts import Renderer
from retrain.errors import ModelError, RunFailed, UsageError
from retrain.files import read_json, read_jsonl, write_json
from retrain.maths.distillation import divergence, with_tail
from retrain.policy import head as head_module
from retrain.policy.base import load_base
from retrain.policy.head import Head, head_divergence
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Lanes
from retrain.policy.packing import with_prompt
from retrain.policy.teaching import teacher_source
from retrain.policy.update import without_advantages
from retrain.training.bases import Bases
from retrain.types import Action, Group, Problem, Prompt, RewardResult, Sample, Scores, StepBatch, Turn, single_turn

GRPO = {"advantage_mode": "grpo", "transform_mode": "none"}
PROMPT = Prompt(Problem("1", "a question", "3"), "a question", (1, 2))


def group(*rewards: float | None) -> Group:
    """Return answers to one prompt, of different lengths, with made-up log-probabilities."""
    actions = [
        Action(list(range(length)), "text", -np.linspace(0.1, 1.0 + i, length), None, "stop")
        for i, length in enumerate((3, 2, 1, 4)[: len(rewards)])
    ]
    return single_turn(PROMPT, actions, [RewardResult(reward) for reward in rewards])


def configured(**distillation):
    return parse_dict({"distillation": {"teacher": "base", **distillation}})


def opinions(groups: list[Group], seed: int = 0) -> list[np.ndarray]:
    noise = np.random.default_rng(seed)
    return [-noise.exponential(size=len(rollout_)) for group_ in groups for rollout_ in group_.rollouts]


def credited(groups: list[Group], opinions: list[np.ndarray], trainer: list[np.ndarray] | None = None, **distillation):
    sections = {"algorithm": GRPO, "distillation": {"teacher": "base", **distillation}}
    return credit(groups, sections, scores=Scores(logprobs=trainer, teacher=opinions))


@pytest.mark.parametrize("keys", [{"weight": 0.5}, {"weight": 2.0, "reward_weight": 0.25}, {"student": "trainer"}])
def test_the_teachers_difference_is_added_to_the_reward_and_groups_without_signal_train(keys):
    groups = [group(1.0, 0.0), group(1.0, 1.0)]
    teacher, trainer = opinions(groups), opinions(groups, seed=1)
    plain = credit(groups, {"algorithm": GRPO})
    assert plain.groups[1].discarded == "zero_advantage"
    assert ("logprobs" in configured(**keys).distillation.needs) == ("student" in keys)
    batch = credited(groups, teacher, trainer, **keys)
    for i, (mine, other) in enumerate(zip(batch.rollouts, plain.rollouts, strict=True)):
        student_T = trainer[i] if "student" in keys else mine.logprobs_T
        expected_T = keys.get("weight", 1.0) * (teacher[i] - student_T)
        expected_T = expected_T + keys.get("reward_weight", 0.0) * other.token_advantages_T
        np.testing.assert_allclose(mine.token_advantages_T, expected_T, rtol=1e-12)
        assert mine.advantage == pytest.approx(expected_T.mean())
    assert [group_.discarded for group_ in batch.groups] == [None, None]
    assert batch.denominators.tokens == sum(map(len, batch.rollouts))


@pytest.mark.parametrize("reward_weight", [0.0, 1.0])
def test_ungraded_answers_do_not_train(reward_weight):
    groups = [group(1.0, None, 0.0), group(None, None)]
    batch = credited(groups, opinions(groups), reward_weight=reward_weight)
    kept, lost, other = batch.groups[0].rollouts
    assert lost.token_advantages_T is None
    assert math.isnan(lost.advantage)
    assert [group_.discarded for group_ in batch.groups] == [None, "no_reward"]
    assert batch.denominators.tokens == len(kept) + len(other)


@pytest.mark.parametrize("reward_weight", [0.0, 1.0])
def test_answers_without_a_teacher_are_counted_and_train_on_their_reward(reward_weight):
    """A sibling context exists only where another answer was right."""
    groups = [group(1.0, 0.0, 0.0), group(1.0, 1.0)]
    teacher = opinions(groups)
    teacher[0] = teacher[3] = teacher[4] = np.zeros(0)
    keys = {"teacher": "policy", "context": "sibling", "reward_weight": reward_weight}
    batch = credited(groups, teacher, **keys)
    untaught, with_teacher, _ = batch.groups[0].rollouts
    assert batch.metrics["distillation/taught_frac"] == pytest.approx(2 / 5)
    assert bool(untaught.token_advantages_T.any()) == bool(reward_weight)
    assert with_teacher.token_advantages_T.any()
    assert [group_.discarded for group_ in batch.groups] == [None, "zero_advantage"]
    assert batch.denominators.tokens == sum(map(len, batch.rollouts))
    nothing = credited(groups, [np.zeros(0)] * 5, **keys)
    assert nothing.metrics["distillation/taught_frac"] == 0.0
    assert "distillation/reverse_kl" not in nothing.metrics


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
def test_a_teacher_logprob_that_is_not_finite_ends_the_run(wrong):
    groups = [group(1.0, 0.0)]
    teacher = opinions(groups)
    teacher[1][0] = wrong
    with pytest.raises(RunFailed, match="teacher base gives a sampled token a log-probability that is not finite"):
        credited(groups, teacher)


def test_the_metrics_are_their_definitions():
    groups = [group(1.0, None, 0.0), group(1.0, 1.0)]
    teacher = opinions(groups)
    batch = credited(groups, teacher, weight=0.5, clamp=0.6)
    numbers = batch.metrics
    graded = [i for i in range(5) if i != 1]
    student_T = np.concatenate([batch.rollouts[i].logprobs_T for i in graded])
    teacher_T = np.concatenate([teacher[i] for i in graded])
    ratio_T = np.exp(teacher_T - student_T)
    clipped_T = 0.5 * np.clip(teacher_T - student_T, -0.6, 0.6)
    clamped = (abs(teacher_T - student_T) > 0.6).mean()
    assert 0 < clamped < 1
    expected = {
        "distillation/reverse_kl": (student_T - teacher_T).mean(),
        "distillation/reverse_kl_k3": (ratio_T - 1 - np.log(ratio_T)).mean(),
        "distillation/teacher_logprob": teacher_T.mean(), "distillation/clamped_frac": clamped,
        "distillation/advantage_std": clipped_T.std(), "distillation/taught_frac": 1.0,
    }  # fmt: skip
    assert {key: numbers[key] for key in numbers if key.startswith("distillation/")} == pytest.approx(expected)


def groups_of(samples) -> list[Group]:
    """Return one group for each sample, with its turns as they were read and sampled."""
    groups = []
    for sample in samples:
        edges = np.flatnonzero(np.diff(sample.action_mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
        turns, at = [], 0
        for begin, end in edges.tolist():
            action = Action(sample.token_ids[begin:end].tolist(), "", sample.logprobs[begin:end], None, "stop")
            turns.append(Turn(tuple(sample.token_ids[at:begin].tolist()), action))
            at = end
        one = group(1.0)
        groups.append(replace(one, rollouts=(replace(one.rollouts[0], turns=tuple(turns)),)))
    return groups


def plain_logprobs(model, sample, temperature: float = 0.7) -> np.ndarray:
    """Return log-probabilities [T] by one unpadded forward pass of the whole model."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(sample.token_ids)[None], use_cache=False).logits[0, :-1]
    logprobs = torch.log_softmax(logits.float() / temperature, -1)
    rows = torch.from_numpy(sample.action_mask[1:])
    return logprobs[rows, torch.from_numpy(drawn(sample))].numpy()


def made_for(base, lanes, folder: Path, sections=None, **keys):
    """Yield the teacher of one run, the bytes of a second model, and what the user is told."""
    config = parse_dict({"model": {"model": "unused"}, "distillation": keys, **(sections or {})})
    spec = RunSpec("run", "label", 1, 0, {}, False, config)
    messages: list[str] = []
    with Bases() as bases:
        teachers, copies = teachers_of([spec], folder, base, lanes, bases.second_model, None, messages.append)
        yield teachers["run"]
        yield copies
        yield messages


@pytest.fixture
def samples(base, lanes):
    asked = requests(prompts=3, samples=2, temperature=0.7)
    sampled = rollout(base, lanes, trained(lanes, 3), temperature=0.7, asked=asked)
    return [*sampled, in_turns(sampled[0])]


@pytest.fixture
def policy(base, lanes):
    policy = local_policy(base, lanes, training={"temperature": 0.7})
    with torch.no_grad():
        policy.adapter.flat.copy_(trained(lanes, 2).flat)
    return policy


def assert_equal_logprobs(teacher, policy, samples, expected) -> None:
    for teacher_T, expected_T in zip(teacher_logprobs(teacher, policy, groups_of(samples)), expected, strict=True):
        np.testing.assert_allclose(teacher_T, expected_T, atol=2e-5)


def twin(base, directory: Path) -> Path:
    texts = ["12 + 34 = 46 so the answer is \\boxed{46}", "wait let me check the key is"]
    qwen3_directory(directory, texts, seed=5, hidden=48)
    base.tokenizer.save_pretrained(directory)
    return directory


def test_an_adapter_teaches_with_its_rank_and_scale(base, lanes, samples, policy, tmp_path):
    other = trained(lanes, 9, rank=3)
    (tmp_path / "teacher").mkdir()
    save_adapter(tmp_path / "teacher", other, base.name)
    teacher, copies, messages = made_for(base, lanes, tmp_path, teacher="teacher")
    assert isinstance(teacher, AdapterTeacher)
    assert (copies, messages) == (0, [])
    with lanes.single(other):
        expected = [plain_logprobs(base.model, sample) for sample in samples]
    assert max(abs(expected[0] - plain_logprobs(base.model, samples[0]))) > 0.1
    assert_equal_logprobs(teacher, policy, samples, expected)


def test_another_model_teaches_in_any_micro_batches_within_its_context(base, lanes, samples, policy, tmp_path):
    path = twin(base, tmp_path / "larger")
    sections = {"training": {"temperature": 0.7}, "backend": {"devices": "cpu"}}
    teacher, copies, messages = made_for(base, lanes, tmp_path, sections, teacher="larger")
    assert isinstance(teacher, ModelTeacher)
    assert copies == teacher.base.weight_bytes > 0
    assert re.search(r"teacher .*larger: a second model of \d+ MiB beside", messages[0])
    model = AutoModelForCausalLM.from_pretrained(path)
    expected = [plain_logprobs(model, sample) for sample in samples]
    assert_equal_logprobs(teacher, policy, samples, expected)
    sizes = []

    def short_of_memory(module, args, options):
        sizes.append(options["input_ids"].numel())
        if sizes[-1] > sizes[0] / 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    teacher.base.model.model.register_forward_pre_hook(short_of_memory, with_kwargs=True)
    assert_equal_logprobs(teacher, policy, samples, expected)
    assert 0 < sizes[-1] <= sizes[0] / 2
    config = read_json(path / "config.json")
    write_json(path / "config.json", config | {"max_position_embeddings": 8})
    short = next(made_for(base, lanes, tmp_path, sections, teacher="larger"))
    with pytest.raises(RunFailed, match="reads 8 tokens at most, and a sample has"):
        teacher_logprobs(short, policy, groups_of(samples))


def test_an_adapter_of_other_layers_is_refused_and_missing_layers_are_zero(base, tmp_path):
    (tmp_path / "teacher").mkdir()
    (tmp_path / "few").mkdir()
    save_adapter(tmp_path / "teacher", trained(Lanes(base), 1), base.name)
    base.release()
    few = Lanes(base, ["q_proj", "v_proj"])
    with pytest.raises(UsageError, match=r"it changes the layer .*, which has no adapter here: set \[lora\] target"):
        next(made_for(base, few, tmp_path, teacher="teacher"))
    save_adapter(tmp_path / "few", trained(few, 1), base.name)
    base.release()
    teacher = next(made_for(base, Lanes(base), tmp_path, teacher="few"))
    assert isinstance(teacher, AdapterTeacher)
    named = {name for name, (_, b) in teacher.snapshot.weights.tensors().items() if bool(b.any())}
    assert named == {shape.name for shape in few.shapes}
    base.release()


def test_an_adapter_of_another_base_is_refused_by_its_record_or_its_shapes(base, lanes, tmp_path):
    run = tmp_path / "run"
    (run / "final").mkdir(parents=True)
    save_adapter(run / "final", trained(lanes, 1), base.name)
    facts = {"base": {"fingerprint": "another"}, "built": {"dtype": "float32"}}
    write_json(run / "config.json", facts)
    with pytest.raises(UsageError, match="it was trained on other weights than those of"):
        next(made_for(base, lanes, tmp_path, teacher="run"))
    write_json(run / "config.json", facts | {"base": {"fingerprint": base.fingerprint}})
    next(made_for(base, lanes, tmp_path, teacher="run"))
    (run / "config.json").unlink()
    larger = load_base(str(twin(base, tmp_path / "larger")), devices="cpu")
    with pytest.raises(UsageError, match=r"is not one of .*larger: it is an adapter of another model"):
        next(made_for(larger, Lanes(larger), tmp_path, teacher=str(run / "final")))


def test_a_model_with_other_tokens_is_refused_before_any_weights_are_loaded(tmp_path):
    for name, text in (("student", "12+34=? the answer is"), ("teacher", "let me check the key 0 2 4 6 8")):
        qwen3_directory(tmp_path / name, [text])
    file = tmp_path / "f.toml"
    file.write_text(f'[model]\nmodel = "{tmp_path / "student"}"\n[distillation]\nteacher = "teacher"\n')
    result = run_cli("train", file, "--out", tmp_path / "out")
    assert result.exit_code == 2
    message = re.sub(r"\s+", " ", result.stderr)
    assert re.search(r"its tokens are not those of .*student: \d+ of \d+ differ, such as '.*', token \d+", message)
    assert "loading" not in result.stdout


def test_check_names_the_line_of_a_teacher_that_is_not_there(tmp_path, model):
    def refusal(teacher: Path | str, rest: str = "") -> str:
        file = tmp_path / "f.toml"
        file.write_text(f'[model]\nmodel = "{model}"\n[distillation]\nteacher = "{teacher}"\n{rest}')
        result = run_cli("check", file)
        assert result.exit_code == 2, result.output
        return re.sub(r"\s+", " ", result.stdout + result.stderr)

    message = refusal("./nowhere")
    assert "f.toml:4" in message
    assert 'distillation.teacher is "./nowhere": there is no such directory' in message
    (tmp_path / "empty").mkdir()
    assert "it is an empty directory, nor an adapter" in refusal(tmp_path / "empty")
    final = tmp_path / "campaign/runs/grpo+none_s1/final"
    final.mkdir(parents=True)
    (final / "adapter_model.safetensors").touch()
    assert f"it is a campaign: give one of its runs, such as {final.parent}" in refusal(tmp_path / "campaign")
    message = refusal(model, '[backend]\nshard = "dp"')
    assert re.search("it is a second model.*give an adapter of the same base", message)


def test_a_run_is_found_by_its_directory_its_final_adapter_or_its_newest_checkpoint(tmp_path):
    for folder in ("run/checkpoints/step_000002", "run/checkpoints/step_000010", "run/final", "run"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "adapter_model.safetensors").touch()
        assert teacher_source(configured(teacher="run"), tmp_path).name.endswith(folder)
    with pytest.raises(ModelError):
        teacher_source(configured(teacher="./gone"), tmp_path)
    assert teacher_source(configured(), tmp_path).kind == "base"
    assert teacher_source(configured(teacher="base", url="http://a:1"), tmp_path).kind == "server"
    assert teacher_source(configured(teacher="tiny-reasoner"), tmp_path).kind == "model"


def states(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("alpha", "top", "softcap"), [(0.0, 0, None), (1.0, 5, None), (0.3, 5, 3.0)])
def test_in_chunks_a_divergence_has_the_value_and_gradient_that_it_has_at_once(monkeypatch, alpha, top, softcap):
    monkeypatch.setitem(head_module.CHUNK_BYTES, "cpu", 1)
    head = Head(states(31, 6), states(31, seed=1), softcap=softcap, multiplier=0.7)
    other = Head(states(33, 4, seed=2))  # of another width, and padded to another size
    hidden, theirs = states(37, 6, seed=3).requires_grad_(), states(37, 4, seed=4)
    weights = states(37, seed=5)
    found = head_divergence(head, hidden, other, theirs, alpha=alpha, top=top, temperature=0.6)
    (found * weights).sum().backward()
    again = hidden.detach().clone().requires_grad_()
    z = 0.7 * (again @ head.weight_VH.T + head.bias_V)
    z = z if softcap is None else torch.tanh(z / softcap) * softcap
    mine = torch.log_softmax(z / 0.6, -1)
    teacher = torch.log_softmax((theirs @ other.weight_VH.T)[:, :31] / 0.6, -1)
    if top:
        ids = mine.detach().topk(top, -1).indices
        mine, teacher = with_tail(mine, ids), with_tail(teacher, ids)
    wanted = divergence(mine, teacher, alpha)
    (wanted * weights).sum().backward()
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(hidden.grad, again.grad, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(head_divergence(head, hidden, other, theirs, alpha=alpha, top=top, temperature=0.6), found)


def student(base, lanes, teacher, **keys):
    distillation = {"teacher": "base", "estimate": "vocabulary", **keys}
    policy = local_policy(base, lanes, distillation=distillation, optimizer={"grad_clip_norm": 0.0})
    with torch.no_grad():
        policy.adapter.flat.copy_(trained(lanes, 2).flat)
    policy.teacher = teacher
    return policy, objective_of(policy.config, "ppo")


@pytest.mark.parametrize(("who", "alpha", "top"), [("base", 0.5, 0), ("policy", 1.0, 0), ("adapter", 0.0, 7)])
def test_the_gradient_over_the_vocabulary_is_the_plain_losses(base, lanes, who, alpha, top):
    other = trained(lanes, 9, rank=3)
    teachers = {
        "base": BaseTeacher(""),
        "policy": PolicyTeacher(),
        "adapter": AdapterTeacher(LocalSnapshot(other.frozen()), ""),
    }
    policy, objective = student(base, lanes, teachers[who], alpha=alpha, top_tokens=top, weight=0.7)
    samples = rollout(base, lanes, policy.adapter)[:5]
    prompts = [(5, 6, 7, 8), None, (), (9, 3), (4, 4, 4)]
    pairs = zip(samples, prompts, strict=True)
    views = [replace(without_advantages(sample), teacher_prompt=prompt) for sample, prompt in pairs]
    batch = StepBatch(views, totals(views), 0, ("whole",))
    gradient = policy.gradient(batch, objective)
    adapter = {"base": None, "policy": policy.adapter, "adapter": other}[who]
    policy.adapter.flat.grad.zero_()
    total, tokens = torch.zeros(()), 0
    for sample, prompt in zip(samples, prompts, strict=True):
        if prompt is None:
            continue
        tokens += int(sample.action_mask.sum())
        mine = torch.log_softmax(fresh_logits(lanes, policy.adapter, sample).float(), -1)
        with torch.no_grad():
            logits = fresh_logits(lanes, adapter, with_prompt(sample, prompt) if prompt else sample)
        theirs = torch.log_softmax(logits.float(), -1)
        if top:
            ids = mine.detach().topk(top, -1).indices
            mine, theirs = with_tail(mine, ids), with_tail(theirs, ids)
        total = total + divergence(mine, theirs, alpha).sum()
    with lanes.single(policy.adapter):
        (0.7 * total / totals(samples).tokens).backward()
    expected = policy.adapter.flat.grad.clone()
    assert float(expected.norm()) > 1e-4
    torch.testing.assert_close(gradient, expected, rtol=2e-3, atol=2e-6)
    numbers = policy.update(batch, objective, 1e-6).metrics
    assert numbers["distillation/divergence"] == pytest.approx(float(total.detach()) / tokens, rel=1e-4)
    assert numbers["num_datums"] == 5


def teacher_context(base, longest: int = 1000, **keys) -> TeacherContext:
    return TeacherContext(Renderer(base.text.source, parse_dict({}).data), configured(**keys).distillation, longest)


def answered(base, samples, rights: list[bool], answer: str = "46") -> Group:
    """Return a group of these samples' tokens as answers to one rendered prompt."""
    problem = Problem("1", "12 + 34", answer)
    prompt = Renderer(base.text.source, parse_dict({}).data).prompt(problem, [{"role": "user", "content": "12 + 34"}])
    actions = []
    for sample in samples:
        ids = drawn(sample).tolist()
        actions.append(Action(ids, base.text.decode(ids), sample.logprobs[sample.action_mask], None, "stop"))
    return single_turn(prompt, actions, [RewardResult(float(right)) for right in rights])


def test_the_reference_answer_stands_at_the_end_of_the_last_message(base, samples):
    keys = {"teacher": "policy", "context": "answer", "context_text": "Hint: {context}!"}
    group_ = answered(base, samples[:3], [True, False, False])
    first, *others = teacher_context(base, **keys).prompts(group_)
    assert others == [first, first]
    text = base.text.source.decode(list(first))
    assert "12 + 34\n\nHint: 46!" in text
    assert text.replace("\n\nHint: 46!", "") == group_.prompt.text
    no_room = len(first) + len(group_.rollouts[0]) - 1
    assert teacher_context(base, no_room, **keys).prompts(group_)[0] is None
    prompt = replace(group_.prompt, problem=Problem("1", "12 + 34", ""))
    assert teacher_context(base, **keys).prompts(replace(group_, prompt=prompt)) == [None, None, None]


def test_a_sibling_is_the_first_other_answer_that_was_right(base, samples):
    group_ = answered(base, samples[:4], [False, True, True, False])
    context = teacher_context(base, teacher="policy", context="sibling", context_text="<{context}>")
    texts = [base.text.source.decode(list(prompt or ())) for prompt in context.prompts(group_)]
    solutions = [rollout_.text for rollout_ in group_.rollouts]
    for text, source in zip(texts, [1, 2, 1, 1], strict=True):
        assert f"<{solutions[source]}>" in text
    one_right = answered(base, samples[:3], [False, True, False])
    assert [prompt is None for prompt in context.prompts(one_right)] == [False, True, False]
    assert context.prompts(answered(base, samples[:3], [False] * 3)) == [None, None, None]


@pytest.mark.parametrize("teacher", ["policy", "base"])
def test_it_scores_the_same_tokens_after_its_prompt(base, lanes, samples, policy, tmp_path, teacher):
    keys = {"teacher": teacher, "context": "sibling"}
    group_ = answered(base, samples[:3], [True, False, False])
    scorer, _, _ = made_for(base, lanes, tmp_path, **keys)
    context = teacher_context(base, **keys)
    first_T, *scores = teacher_logprobs(scorer, policy, [group_], context)
    assert len(first_T) == 0 < len(group_.rollouts[0])
    for rollout_, prompt, teacher_T in zip(group_.rollouts[1:], context.prompts(group_)[1:], scores, strict=True):
        whole = Sample.single_turn(prompt, rollout_.token_ids, rollout_.logprobs_T, rollout_.logprobs_T)
        with lanes.single(policy.adapter if teacher == "policy" else None):
            expected_T = plain_logprobs(base.model, whole)
        np.testing.assert_allclose(teacher_T, expected_T, atol=2e-5)
        assert abs(teacher_T - rollout_.logprobs_T).max() > 1e-3


ALONE, MIXED = ("distillation = {weight = 1.0}\n", "distillation = {weight = 0.5, reward_weight = 1.0, clamp = 2.0}\n")
TRAINER = 'distillation = {weight = 1.0, student = "trainer"}\n'
SELF = 'distillation = {weight = 0.5, teacher = "policy", context = "sibling", reward_weight = 1.0}\n'
ANSWER = 'distillation = {weight = 1.0, teacher = "base", context = "answer"}\n'
WHOLE = (
    'distillation = {weight = 1.0, teacher = "base", context = "answer", estimate = "vocabulary"}\n',
    'distillation = {weight = 1.0, estimate = "vocabulary", alpha = 1.0, top_tokens = 20, reward_weight = 0.5}\n',
)
ALL = ("", ALONE, MIXED, TRAINER, SELF, ANSWER, *WHOLE)


def campaign(folder: Path, model: Path, teacher: Path | str, *conditions: str) -> Path:
    sections = {
        "training": {"num_iterations": 2, "max_off_policy_steps": 1, "save_every": None},
        "algorithm": {"correction": "tis"},
        "distillation": {"teacher": str(teacher), "weight": 0} if teacher else {},
    }
    return critic_campaign(folder, model, *(("grpo", keys) for keys in conditions), steps=2, lanes=8, **sections)


def finish(path: Path, out: Path) -> list[Path]:
    train(path, out)
    return runs_of(out)


@pytest.fixture(scope="module")
def teacher(model, tmp_path_factory) -> Path:
    """Return a finished run, of a cohort of two as an only run is computed in another order."""
    folder = tmp_path_factory.mktemp("teacher")
    run, _ = finish(campaign(folder, model, "", "", "lora = {alpha = 4.0}\n"), folder / "out")
    return run


@pytest.fixture(scope="module")
def finished(model, teacher, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    finish(campaign(folder, model, teacher, *ALL), folder / "out")
    return folder / "out"


def test_what_a_campaign_with_every_kind_of_teacher_records(finished, teacher):
    plain, *students = runs_of(finished)
    assert adapter_bytes(plain / "final") == adapter_bytes(teacher / "final")  # weight 0 is as no teacher
    identities = {read_json(run / "config.json").get("taught_by") for run in (plain, *students)}
    assert len(identities) == 4
    assert {None, "policy"} < identities
    alone, _, trainer, sibling, answer, *vocabulary = (read_jsonl(run / "metrics.jsonl") for run in students)
    assert alone[0]["distillation/reverse_kl"] > 0.05
    assert alone[0]["num_datums"] == 12  # groups with equal rewards train, too
    for key in ("distillation/reverse_kl", "loss", "optim/grad_norm", "distillation/teacher_logprob"):
        assert alone[0][key] == pytest.approx(trainer[0][key], rel=1e-3, abs=1e-6), key  # equal up to rounding
    assert all(0.0 <= row["distillation/taught_frac"] <= 1.0 for row in sibling)
    assert all(row["distillation/taught_frac"] == 1.0 for row in answer)
    assert all(row["distillation/reverse_kl_k3"] > 0.0 for row in answer)
    for row in [row for rows in vocabulary for row in rows]:
        assert row["distillation/divergence"] > 0.0
        assert row["distillation/reverse_kl"] is None
        assert (row["distillation/taught_frac"], row["num_datums"]) == (1.0, 12)


def test_interrupted_equals_uninterrupted(finished, model, teacher, tmp_path):
    path, out = campaign(tmp_path, model, teacher, *ALL), tmp_path / "out"
    train(path, out, observer=StopAfter(1), status=130)
    continue_training(out)
    for mine, theirs in zip(runs_of(out), runs_of(finished), strict=True):
        assert mine.name == theirs.name
        assert made(mine) == made(theirs)


def test_other_weights_of_the_teacher_are_named_before_a_run_continues(model, teacher, tmp_path):
    adapter = shutil.copytree(teacher / "final", tmp_path / "adapter")
    out = tmp_path / "out"
    path = campaign(tmp_path, model, adapter, ALONE)
    train(path, out, observer=StopAfter(1), status=130)
    changed = {name: 1.5 * tensor for name, tensor in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(changed, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    result = run_cli("resume", out, "--plain")
    assert result.exit_code == 2, result.output
    assert "weights of the teacher: adapter" in re.sub(r"\s+", " ", result.stdout + result.stderr)
