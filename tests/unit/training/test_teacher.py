"""A teacher in the loop: who it may be, what it says, what its students learn, and that nothing else changes.

The formulas have their oracles in ``maths/test_distillation.py``.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from lane_cases import drawn, in_turns, local_policy, requests, rollout, trained
from timing_keys import is_timing_key
from toycampaign import WORLD, StopAfter
from toymodels import campaign_head, qwen3_directory
from typer.testing import CliRunner

from retrain.algorithms.distillation import distil, no_comparison
from retrain.algorithms.standard import Standard, assign_credit, fill_advantages
from retrain.campaign.planning.plan import RunSpec
from retrain.campaign.planning.teaching import place_of, teacher_fault
from retrain.campaign.running.controller import launch, resume
from retrain.campaign.running.models import Bases
from retrain.campaign.running.teachers import teachers_of
from retrain.cli import app
from retrain.config import load, parse_dict
from retrain.data.prompts import Renderer
from retrain.errors import ConfigError, ModelError, RunFailed, UsageError
from retrain.files import read_json, read_jsonl, write_json
from retrain.maths.losses import kl_terms
from retrain.policy.adapter_io import save_adapter
from retrain.policy.base import load_base
from retrain.policy.context import Context, read_after
from retrain.policy.lora import Lanes
from retrain.policy.protocol import Scores, Want
from retrain.policy.teacher import AdapterTeacher, BaseTeacher, ModelTeacher, PolicyTeacher, taught
from retrain.record.catalogue import row_metrics
from retrain.record.context import RunContext
from retrain.record.observer import NullObserver
from retrain.types import Action, Group, Problem, Prompt, RewardResult, Rollout, Sample, Turn, single_turn

PROMPT = Prompt(Problem("1", "a question", "3"), "a question", (1, 2))


def group(*rewards: float | None, lengths: tuple[int, ...] = (3, 2, 1, 4)) -> Group:
    """Answers to one prompt, with log-probabilities of their own."""
    actions = [
        Action(list(range(length)), "text", -np.linspace(0.1, 1.0 + i, length), None, "stop")
        for i, (_, length) in enumerate(zip(rewards, lengths, strict=False))
    ]
    return single_turn(PROMPT, actions, [RewardResult(reward) for reward in rewards])


def configured(**distillation):
    return parse_dict({"distillation": {"teacher": "base", **distillation}})


def opinions(groups: list[Group], seed: int = 0) -> list[np.ndarray]:
    """What a teacher might say."""
    noise = np.random.default_rng(seed)
    return [-noise.exponential(size=len(one)) for group in groups for one in group.rollouts]


def credited(groups: list[Group], config, scores: Scores):
    if config.distillation.alone:
        no_comparison(groups)
    else:
        fill_advantages(groups, "grpo")
    credit = assign_credit(groups, config, 0.0, ("placebo",))
    return distil(groups, credit, config.distillation, scores)


# -- the advantage of a token ---------------------------------------------------------------------------------------


def test_alone_every_token_has_the_teachers_advantage_whatever_the_reward():
    groups = [group(1.0, 0.0), group(1.0, 1.0, 1.0)]
    theirs = opinions(groups)
    credit = credited(groups, configured(weight=0.5), Scores(teacher=theirs))
    rollouts = [one for group in groups for one in group.rollouts]
    for rollout_, said_T in zip(rollouts, theirs, strict=True):
        wanted_T = 0.5 * (said_T - rollout_.logprobs_T)
        np.testing.assert_allclose(rollout_.token_advantages_T, wanted_T, rtol=1e-12)
        assert rollout_.advantage == pytest.approx(wanted_T.mean())
    assert [each.discarded for each in groups] == [None, None]
    assert credit.denominators.tokens == sum(map(len, rollouts))


def test_mixed_it_stands_beside_the_rewards_and_groups_without_signal_train():
    groups, plain = ([group(1.0, 0.0), group(1.0, 1.0)] for _ in range(2))
    theirs = opinions(groups)
    fill_advantages(plain, "grpo")
    assign_credit(plain, parse_dict({}), 0.0, ("placebo",))
    assert plain[1].discarded == "zero_advantage"
    config = configured(weight=2.0, reward_weight=0.25)
    credited(groups, config, Scores(teacher=theirs))
    mine = [one for group in groups for one in group.rollouts]
    others = [one for group in plain for one in group.rollouts]
    for one, other, said_T in zip(mine, others, theirs, strict=True):
        wanted_T = 0.25 * other.token_advantages_T + 2.0 * (said_T - one.logprobs_T)
        np.testing.assert_allclose(one.token_advantages_T, wanted_T, rtol=1e-12)
    assert abs(others[0].token_advantages_T).max() > 0.5
    assert [each.discarded for each in groups] == [None, None]


def test_the_trainers_own_logprobs_are_taken_where_asked():
    groups = [group(1.0, 0.0)]
    theirs, trainers = opinions(groups), opinions(groups, seed=1)
    config = configured(student="trainer")
    assert {str(need) for need in config.distillation.needs} == {"teacher", "logprobs"}
    credited(groups, config, Scores(logprobs=trainers, teacher=theirs))
    for one, said_T, mine_T in zip(groups[0].rollouts, theirs, trainers, strict=True):
        np.testing.assert_allclose(one.token_advantages_T, said_T - mine_T, rtol=1e-12)


@pytest.mark.parametrize("reward_weight", [0.0, 1.0])
def test_answers_whose_reward_could_not_be_had_take_no_part(reward_weight):
    groups = [group(1.0, None, 0.0), group(None, None)]
    credit = credited(groups, configured(reward_weight=reward_weight), Scores(teacher=opinions(groups)))
    kept, lost, other = groups[0].rollouts
    assert lost.token_advantages_T is None
    assert math.isnan(lost.advantage)
    assert kept.token_advantages_T is not None
    assert other.token_advantages_T is not None
    assert [each.discarded for each in groups] == [None, "no_reward"]
    assert credit.denominators.tokens == len(kept) + len(other)


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
def test_a_teacher_that_gives_no_number_is_no_advantage(wrong):
    groups = [group(1.0, 0.0)]
    theirs = opinions(groups)
    theirs[1][0] = wrong
    with pytest.raises(RunFailed, match="teacher base gives a sampled token a log-probability that is not finite"):
        credited(groups, configured(), Scores(teacher=theirs))


def test_numbers_of_the_record_are_their_definitions():
    groups = [group(1.0, None, 0.0), group(1.0, 1.0)]
    theirs = opinions(groups)
    config = configured(weight=0.5, clamp=0.6)
    numbers = credited(groups, config, Scores(teacher=theirs)).metrics
    rated = [(one, said_T) for one, said_T in zip([o for g in groups for o in g.rollouts], theirs, strict=True)
             if one.reward.total_reward is not None]  # fmt: skip
    mine_T, said_T = (
        np.concatenate(part) for part in zip(*((one.logprobs_T, said) for one, said in rated), strict=True)
    )
    assert numbers["distillation/reverse_kl"] == pytest.approx((mine_T - said_T).mean())
    ratio_T = np.exp(said_T - mine_T)
    assert numbers["distillation/reverse_kl_k3"] == pytest.approx((ratio_T - 1 - np.log(ratio_T)).mean())
    assert numbers["distillation/teacher_logprob"] == pytest.approx(said_T.mean())
    cut = (abs(said_T - mine_T) > 0.6).mean()
    assert 0 < cut < 1
    assert numbers["distillation/clamped_frac"] == pytest.approx(cut)
    clipped_T = 0.5 * np.clip(said_T - mine_T, -0.6, 0.6)
    assert numbers["distillation/advantage_std"] == pytest.approx(clipped_T.std())
    names = {key for key in numbers if key.startswith("distillation/")}
    keys = {metric.key for metric in row_metrics(RunContext("c", "r", 1, config, 3, False))}
    of_the_loss = {"distillation/divergence"}  # with whole distributions
    assert {key for key in keys if key.startswith("distillation/")} == names | of_the_loss
    assert not any("distillation" in m.key for m in row_metrics(RunContext("c", "r", 1, parse_dict({}), 3, False)))


def test_nothing_is_asked_of_anybody_without_a_teacher_or_with_weight_0():
    for config in (parse_dict({}), configured(weight=0.0)):
        assert not config.distillation.active
        assert config.distillation.needs == set()
    assert configured().distillation.alone
    assert not configured(reward_weight=1.0).distillation.alone


# -- who teaches ----------------------------------------------------------------------------------------------------


def groups_of(samples) -> list[Group]:
    """One group for each sample, as it was read and drawn."""
    made = []
    for sample in samples:
        edges = np.flatnonzero(np.diff(sample.action_mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
        turns, at = [], 0
        for begin, end in edges.tolist():
            own = slice(begin, end)
            action = Action(sample.token_ids[own].tolist(), "", sample.logprobs[own], None, "stop")
            turns.append(Turn(tuple(sample.token_ids[at:begin].tolist()), action))
            at = end
        made.append(Group(PROMPT, [Rollout(PROMPT, turns, RewardResult(1.0))]))
    return made


def plain_logprobs(model, sample, temperature: float) -> np.ndarray:
    """By one unpadded forward pass of the whole model, in the plainest way."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(sample.token_ids)[None], use_cache=False).logits[0, :-1]
    logprobs = torch.log_softmax(logits.float() / temperature, -1)
    rows = torch.from_numpy(sample.action_mask[1:])
    return logprobs[rows, torch.from_numpy(drawn(sample))].numpy()


def made_for(base, lanes, folder: Path, model: str = "unused", **sections):
    """The teacher of one run with these sections, beside ``base``."""
    config = parse_dict({"model": {"model": model}, **sections})
    spec = RunSpec("run", "label", 1, 0, {}, False, config)
    told: list[str] = []
    with Bases() as bases:
        teachers, copies = teachers_of([spec], folder, base, lanes, bases, told.append)
        yield teachers["run"]
        yield copies
        yield told


@pytest.fixture
def samples(base, lanes):
    drawn_ = rollout(base, lanes, trained(lanes, 3), temperature=0.7, asked=requests(prompts=3, samples=2,
                                                                                    temperature=0.7))  # fmt: skip
    return [*drawn_, in_turns(drawn_[0])]


def assert_says(teacher, policy, samples, model, temperature: float = 0.7) -> None:
    said = taught(teacher, policy, groups_of(samples))
    assert len(said) == len(samples)
    for sample, own_T in zip(samples, said, strict=True):
        np.testing.assert_allclose(own_T, plain_logprobs(model, sample, temperature), atol=2e-5)


def test_an_adapter_of_the_base_teaches_with_its_own_rank_and_scale(base, lanes, samples, tmp_path):
    policy = local_policy(base, lanes, training={"temperature": 0.7})
    other = trained(lanes, 9, rank=3)
    (tmp_path / "teacher").mkdir()
    save_adapter(tmp_path / "teacher", other, base.name)
    teacher, copies, told = made_for(
        base, lanes, tmp_path, distillation={"teacher": "teacher"}, training={"temperature": 0.7}
    )
    assert isinstance(teacher, AdapterTeacher)
    assert (copies, told) == (0, [])
    with lanes.single(other):
        wanted = [plain_logprobs(base.model, sample, 0.7) for sample in samples]
    assert max(abs(wanted[0] - plain_logprobs(base.model, samples[0], 0.7))) > 0.1
    for own_T, wanted_T in zip(taught(teacher, policy, groups_of(samples)), wanted, strict=True):
        np.testing.assert_allclose(own_T, wanted_T, atol=2e-5)
    again, _, _ = made_for(base, lanes, tmp_path, distillation={"teacher": str(tmp_path / "teacher")})
    assert again.identity == teacher.identity
    save_adapter(tmp_path / "teacher", trained(lanes, 10, rank=3), base.name)
    changed, _, _ = made_for(base, lanes, tmp_path, distillation={"teacher": "teacher"})
    assert changed.identity != teacher.identity


def test_the_base_teaches_without_any_adapter(base, lanes, samples, tmp_path):
    policy = local_policy(base, lanes, training={"temperature": 0.7})
    with torch.no_grad():
        policy.adapter.flat.copy_(trained(lanes, 2).flat)
    teacher, copies, _ = made_for(base, lanes, tmp_path, distillation={"teacher": "base"})
    assert isinstance(teacher, BaseTeacher)
    assert copies == 0
    assert_says(teacher, policy, samples, base.model)


@pytest.mark.parametrize("tokens", ["auto", 20])
def test_another_model_with_the_same_tokens_teaches_from_beside_the_base(base, lanes, samples, tmp_path, tokens):
    other = twin(base, tmp_path / "larger", seed=5, hidden=48)
    sections = {"training": {"temperature": 0.7, "micro_batch_tokens": tokens}}
    policy = local_policy(base, lanes, **sections)
    teacher, copies, told = made_for(base, lanes, tmp_path, distillation={"teacher": "larger"}, **sections,
                                     backend={"devices": "cpu"})  # fmt: skip
    assert isinstance(teacher, ModelTeacher)
    assert copies == teacher.base.weight_bytes > 0
    assert re.search(r"teacher .*larger: a second model of \d+ MiB beside", told[0])
    from transformers import AutoModelForCausalLM

    assert_says(teacher, policy, samples, AutoModelForCausalLM.from_pretrained(other))


def twin(base, directory: Path, seed: int, hidden: int) -> Path:
    """Another model with the base's own tokenizer."""
    qwen3_directory(directory, ["12 + 34 = 46 so the answer is \\boxed{46}", "wait let me check the key is"],
                    seed=seed, hidden=hidden)  # fmt: skip
    base.tokenizer.save_pretrained(directory)
    return directory


def test_a_sample_longer_than_the_teachers_context_ends_the_run(base, lanes, samples, tmp_path):
    twin(base, tmp_path / "short", seed=5, hidden=48)
    config = read_json(tmp_path / "short/config.json")
    write_json(tmp_path / "short/config.json", config | {"max_position_embeddings": 8})
    teacher, _, _ = made_for(base, lanes, tmp_path, distillation={"teacher": "short"}, backend={"devices": "cpu"})
    with pytest.raises(RunFailed, match="reads 8 tokens at most, and a sample has"):
        taught(teacher, local_policy(base, lanes), groups_of(samples))


def test_memory_that_runs_out_makes_smaller_micro_batches(base, lanes, samples, tmp_path, monkeypatch):
    twin(base, tmp_path / "larger", seed=5, hidden=48)
    made = made_for(base, lanes, tmp_path, distillation={"teacher": "larger"}, backend={"devices": "cpu"})
    teacher = next(made)
    assert isinstance(teacher, ModelTeacher)
    policy, sizes, score = local_policy(base, lanes), [], teacher._score

    def short_of_memory(samples_, parts):
        sizes.append(max(map(len, parts)))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return score(samples_, parts)

    whole = taught(teacher, policy, groups_of(samples))
    monkeypatch.setattr(teacher, "_score", short_of_memory)
    for mine_T, wanted_T in zip(taught(teacher, policy, groups_of(samples)), whole, strict=True):
        np.testing.assert_allclose(mine_T, wanted_T, atol=1e-5)
    assert sizes[0] > 2 >= sizes[-1]


# -- what is refused ------------------------------------------------------------------------------------------------


def test_an_adapter_of_other_layers_or_shapes_is_refused_in_one_line(base, tmp_path):
    (tmp_path / "teacher").mkdir()
    try:
        save_adapter(tmp_path / "teacher", trained(Lanes(base), 1), base.name)
    finally:
        base.release()
    few = Lanes(base, ["q_proj", "v_proj"])
    try:
        with pytest.raises(
            UsageError, match=r"it changes the layer .*, which has no adapter here: set \[lora\] target"
        ):
            next(made_for(base, few, tmp_path, distillation={"teacher": "teacher"}))
        (tmp_path / "few").mkdir()
        save_adapter(tmp_path / "few", trained(few, 1), base.name)
    finally:
        base.release()
    lanes = Lanes(base)  # the other way round the layers that it lacks have zeros
    try:
        teacher = next(made_for(base, lanes, tmp_path, distillation={"teacher": "few"}))
        assert isinstance(teacher, AdapterTeacher)
        named = {name for name, (_, b) in teacher.weights.weights.tensors().items() if bool(b.any())}
        assert named == {shape.name for shape in few.shapes}
    finally:
        base.release()


def test_an_adapter_of_another_base_is_refused_by_its_record_or_its_shapes(base, lanes, tmp_path):
    run = tmp_path / "run"
    (run / "final").mkdir(parents=True)
    save_adapter(run / "final", trained(lanes, 1), base.name)
    facts = {"base": {"fingerprint": "another"}, "built": {"dtype": "float32"}}
    write_json(run / "config.json", facts)
    with pytest.raises(UsageError, match="it was trained on other weights than those of"):
        next(made_for(base, lanes, tmp_path, distillation={"teacher": "run"}))
    write_json(run / "config.json", facts | {"base": {"fingerprint": base.fingerprint}})
    next(made_for(base, lanes, tmp_path, distillation={"teacher": "run"}))
    (run / "config.json").unlink()
    made_base = load_base(str(twin(base, tmp_path / "larger", 5, 48)), devices="cpu")
    larger = Lanes(made_base)
    with pytest.raises(UsageError, match=r"is not one of .*larger: it is an adapter of another model"):
        next(made_for(made_base, larger, tmp_path, distillation={"teacher": str(run / "final")}))


def test_a_model_with_other_tokens_is_refused_before_any_weights_are_loaded(tmp_path):
    for name, text in (("student", "12+34=? the answer is"), ("teacher", "let me check the key 0 2 4 6 8")):
        qwen3_directory(tmp_path / name, [text])
    config = parse_dict({"model": {"model": str(tmp_path / "student")}, "distillation": {"teacher": "teacher"}})
    fault = teacher_fault(config, tmp_path)
    assert re.match(r"its tokens are not those of .*student: \d+ of \d+ differ, such as '.*', token \d+, which", fault)
    file = tmp_path / "f.toml"
    file.write_text(f'[model]\nmodel = "{tmp_path / "student"}"\n[distillation]\nteacher = "teacher"\n')
    result = CliRunner().invoke(app, ["train", str(file), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "its tokens are not those of" in result.stderr
    assert "loading" not in result.stdout


def test_a_file_says_where_its_teacher_is_wrong(tmp_path, model):
    def refused(*lines: str) -> str:
        file = tmp_path / "f.toml"
        file.write_text(f'[model]\nmodel = "{model}"\n' + "\n".join(lines))
        result = CliRunner().invoke(app, ["check", str(file)])
        assert result.exit_code == 2, result.output
        return re.sub(r"\s+", " ", result.stdout + result.stderr)

    said = refused("[distillation]", 'teacher = "./nowhere"')
    assert "f.toml:4" in said
    assert "distillation.teacher" in said
    assert 'is "./nowhere": there is no such directory' in said
    assert "has no effect without a teacher: teacher = " in refused("[distillation]", "clamp = 3.0")
    assert "has no effect without url" in refused("[distillation]", 'teacher = "base"', 'server = "sglang"')
    assert "no address" in refused("[distillation]", 'teacher = "base"', 'url = "gpu1:8000"')
    (tmp_path / "empty").mkdir()
    assert "it is an empty directory, nor an adapter" in refused("[distillation]", f'teacher = "{tmp_path / "empty"}"')
    runs = tmp_path / "campaign/runs/grpo+none_s1/final"
    runs.mkdir(parents=True)
    (runs / "adapter_model.safetensors").touch()
    said = refused("[distillation]", f'teacher = "{tmp_path / "campaign"}"')
    assert f"it is a campaign: give one of its runs, such as {runs.parent}" in said
    said = refused("[distillation]", f'teacher = "{model}"', "[backend]", 'shard = "dp"')
    assert "it is a second model" in said
    assert "give an adapter of the same base" in said
    teacher = ("[distillation]", 'teacher = "base"')
    assert "drops groups" in refused(*teacher, "[training]", "dynamic_sampling = 2")
    assert "its critic trains for nothing" in refused(*teacher, "[algorithm]", 'advantage_mode = "gae"')
    assert "no effect with reward_weight = 0" in refused(*teacher, "[algorithm]", 'transform_mode = "gtpo"')
    assert "at temperature 1" in refused(*teacher, 'url = "http://a:1"', "[training]", "temperature = 0.7")
    assert "says nothing of tokens" in refused(*teacher, "[backend]", 'backend = "mine:Own"')


@pytest.mark.parametrize("kept", [
    {"algorithm": {"advantage_mode": "gae"}, "distillation": {"teacher": "base", "reward_weight": 1.0}},
    {"algorithm": {"transform_mode": "gtpo"}, "distillation": {"teacher": "base", "reward_weight": 1.0}},
    {"training": {"group_size": 1}, "distillation": {"teacher": "base"}},
    {"training": {"temperature": 0.7, "top_p": 0.9}, "distillation": {"teacher": "base"}},
    {"training": {"dynamic_sampling": 2}, "distillation": {"teacher": "base", "weight": 0.0}},
])  # fmt: skip
def test_what_goes_together(kept):
    parse_dict(kept)


def test_with_one_answer_to_a_prompt_only_a_teacher_alone_has_something_to_say():
    with pytest.raises(ConfigError, match="advantages compare the completions of a group"):
        parse_dict({"training": {"group_size": 1}, "distillation": {"teacher": "base", "reward_weight": 1.0}})


def test_a_run_is_found_by_its_directory_its_final_adapter_or_its_newest_checkpoint(tmp_path):
    def found() -> str:
        return place_of(configured(teacher="run"), tmp_path).name

    for step in (2, 10):
        (tmp_path / f"run/checkpoints/step_{step:06d}").mkdir(parents=True)
        (tmp_path / f"run/checkpoints/step_{step:06d}/adapter_model.safetensors").touch()
    assert found().endswith("step_000010")
    (tmp_path / "run/final").mkdir()
    (tmp_path / "run/final/adapter_model.safetensors").touch()
    assert found().endswith("run/final")
    (tmp_path / "run/adapter_model.safetensors").touch()
    assert found() == str(tmp_path / "run")
    with pytest.raises(ModelError):
        place_of(configured(teacher="./gone"), tmp_path)
    assert place_of(configured(), tmp_path).kind == "base"
    assert place_of(configured(teacher="base", url="http://a:1"), tmp_path).kind == "server"
    assert place_of(configured(teacher="tiny-reasoner"), tmp_path).kind == "model"


# -- a teacher that is shown the solution ----------------------------------------------------------------------------


def shown(base, own, longest: int = 1000) -> Context:
    return Context(Renderer(base.text.source, parse_dict({}).data), own.distillation, longest)


def asked_and_answered(base, samples, rights: list[bool], answer: str = "46") -> Group:
    """A group of the tokens of these samples, as answers to one rendered prompt."""
    problem = Problem("1", "12 + 34", answer)
    prompt = Renderer(base.text.source, parse_dict({}).data).prompt(problem, [{"role": "user", "content": "12 + 34"}])
    actions = []
    for sample in samples:
        ids = drawn(sample).tolist()
        actions.append(Action(ids, base.text.decode(ids), sample.logprobs[sample.action_mask], None, "stop"))
    return single_turn(prompt, actions, [RewardResult(float(right)) for right in rights])


def test_the_reference_answer_stands_at_the_end_of_the_last_message(base, samples):
    own = configured(teacher="policy", context="answer", context_text="Hint: {context}!")
    group_ = asked_and_answered(base, samples[:3], [True, False, False])
    first, *others = shown(base, own).prompts(group_)
    assert first is not None
    assert others == [first, first]
    text = base.text.source.decode(list(first))
    assert "12 + 34\n\nHint: 46!" in text
    assert text.replace("\n\nHint: 46!", "") == group_.prompt.text
    assert shown(base, own, len(first) + len(group_.rollouts[0]) - 1).prompts(group_)[0] is None  # no room
    group_.prompt = Prompt(Problem("1", "12 + 34", ""), group_.prompt.text, group_.prompt.token_ids)
    assert shown(base, own).prompts(group_) == [None, None, None]


def test_a_sibling_is_the_first_other_answer_that_was_right(base, samples):
    own = configured(teacher="policy", context="sibling", context_text="<{context}>")
    group_ = asked_and_answered(base, samples[:4], [False, True, True, False])
    texts = [base.text.source.decode(list(prompt or ())) for prompt in shown(base, own).prompts(group_)]
    solutions = [one.text for one in group_.rollouts]
    for text, source in zip(texts, [1, 2, 1, 1], strict=True):
        assert f"<{solutions[source]}>" in text
    alone = asked_and_answered(base, samples[:3], [False, True, False])
    assert [prompt is None for prompt in shown(base, own).prompts(alone)] == [False, True, False]
    nobody = asked_and_answered(base, samples[:3], [False, False, False])
    assert shown(base, own).prompts(nobody) == [None, None, None]


@pytest.mark.parametrize("teacher", ["policy", "base"])
def test_what_it_says_is_of_the_same_tokens_after_its_own_prompt(base, lanes, samples, tmp_path, teacher):
    own = {"teacher": teacher, "context": "sibling"}
    policy = local_policy(base, lanes)
    with torch.no_grad():
        policy.adapter.flat.copy_(trained(lanes, 2).flat)
    group_ = asked_and_answered(base, samples[:3], [True, False, False])
    made, _, _ = made_for(base, lanes, tmp_path, distillation=own)
    context = shown(base, configured(**own))
    said = taught(made, policy, [group_], context)
    assert len(said[0]) == 0
    assert len(group_.rollouts[0]) > 0
    for one, prompt, said_T in list(zip(group_.rollouts, context.prompts(group_), said, strict=True))[1:]:
        whole = Sample.single_turn(prompt or (), one.token_ids, one.logprobs_T, one.logprobs_T)
        if teacher == "policy":
            with lanes.single(policy.adapter):
                wanted_T = plain_logprobs(base.model, whole, 1.0)
        else:
            wanted_T = plain_logprobs(base.model, whole, 1.0)
        np.testing.assert_allclose(said_T, wanted_T, atol=2e-5)
    assert abs(said[1] - group_.rollouts[1].logprobs_T).max() > 1e-3


def test_the_same_context_as_the_students_gives_no_advantage(base, lanes, samples, tmp_path):
    """OPSD's zero: a policy that reads what it has read says what it has said."""
    policy = local_policy(base, lanes)
    groups = groups_of([sample for sample in samples[:3]])
    said = taught(PolicyTeacher(), policy, groups)
    scored_T = policy.score(samples[:3], frozenset({Want.LOGPROBS})).logprobs
    assert scored_T is not None
    for mine_T, own_T in zip(said, scored_T, strict=True):
        assert (mine_T == own_T).all()
    config = configured(teacher="policy", context="answer", student="trainer")
    numbers = credited(groups, config, Scores(logprobs=scored_T, teacher=said)).metrics
    assert numbers["distillation/reverse_kl"] == numbers["distillation/advantage_std"] == 0.0


def test_prompts_are_exchanged_and_nothing_else(samples):
    for sample in samples:
        other = read_after(sample, (7, 8, 9, 10, 11))
        assert drawn(other).tolist() == drawn(sample).tolist()
        assert other.token_ids[:5].tolist() == [7, 8, 9, 10, 11]
        assert other.prefix == 5
        assert len(other) == len(sample) - sample.prefix + 5
        assert other.token_ids[5:].tolist() == sample.token_ids[sample.prefix :].tolist()
        for name in ("logprobs", "versions", "advantages", "loss_mask"):
            assert (getattr(other, name)[5:] == getattr(sample, name)[sample.prefix :]).all()


@pytest.mark.parametrize("reward_weight", [0.0, 1.0])
def test_answers_that_nobody_can_be_shown_anything_for_have_no_teacher(reward_weight):
    """They are counted, and train with what the reward gives them."""
    groups = [group(1.0, 0.0, 0.0), group(1.0, 1.0)]
    theirs = opinions(groups)
    theirs[0] = theirs[3] = theirs[4] = np.zeros(0)
    config = configured(teacher="policy", context="sibling", reward_weight=reward_weight)
    credit = credited(groups, config, Scores(teacher=theirs))
    silent, spoken, _ = groups[0].rollouts
    assert credit.metrics["distillation/taught_frac"] == pytest.approx(2 / 5)
    assert bool(silent.token_advantages_T.any()) == bool(reward_weight)
    assert spoken.token_advantages_T.any()
    assert [each.discarded for each in groups] == [None, "zero_advantage"]
    assert credit.denominators.tokens == sum(len(one) for each in groups for one in each.rollouts)
    nothing = credited(groups, config, Scores(teacher=[np.zeros(0)] * 5))
    assert nothing.metrics == {**nothing.metrics, "distillation/taught_frac": 0.0}
    assert "distillation/reverse_kl" not in nothing.metrics


@pytest.mark.parametrize(("keys", "why"), [
    ({"teacher": "policy"}, "the student itself, which without a context teaches nothing"),
    ({"context_text": "{context}"}, "has no effect without a context"),
    ({"context": "answer", "context_text": "the answer"}, "does not say where the answer stands"),
    ({"context": "answer", "environment": {"tools": ["calculator"], "max_turns": 3}}, "may have several turns"),
    ({"context": "sibling", "training": {"group_size": 1}}, "with group_size = 1 no completion has one"),
])  # fmt: skip
def test_a_context_that_could_not_be_shown_is_refused(keys, why):
    sections = {name: keys.pop(name) for name in ("environment", "training") if name in keys}
    with pytest.raises(ConfigError, match=why):
        parse_dict({"distillation": {"teacher": "base", **keys}, **sections})


# -- campaigns ------------------------------------------------------------------------------------------------------

TRAINING = """
[training]
batch_size = 3
group_size = 4
max_tokens = 10
lr = 0.02
save_every = 2
{training}
[evaluation]
problems = 0
[squeeze]
enabled = false
"""
SECTION = '[distillation]\nteacher = "{teacher}"\nweight = 0\n'
ALONE, MIXED = ("distillation = {weight = 1.0}\n", "distillation = {weight = 0.5, reward_weight = 1.0, clamp = 2.0}\n")
SELF = 'distillation = {weight = 0.5, teacher = "policy", context = "sibling", reward_weight = 1.0}\n'
SHOWN = 'distillation = {weight = 1.0, teacher = "base", context = "answer"}\n'
WHOLE = (
    'distillation = {weight = 1.0, teacher = "base", context = "answer", estimate = "vocabulary"}\n',
    'distillation = {weight = 1.0, estimate = "vocabulary", alpha = 1.0, top_tokens = 20, reward_weight = 0.5}\n',
)
ALL = ("", ALONE, MIXED, 'distillation = {weight = 1.0, student = "trainer"}\n', SELF, SHOWN, *WHOLE)


def campaign(folder: Path, model: Path, teacher: Path | str, *conditions: str, steps: int = 4, training: str = "",
             section: str = SECTION, name: str = "toy", extra: str = "") -> Path:  # fmt: skip
    """A file of one seed and a condition for each of these overrides."""
    head = campaign_head(seeds=[1], max_steps=steps)
    for overrides in conditions:
        head += campaign_head(("grpo", "none")).removeprefix("[campaign]\n") + overrides
    world = WORLD.format(model=model, module=model.parent / "toyrewards.py", dtype="float32")
    path = folder / f"{name}.toml"
    path.write_text(head + section.format(teacher=teacher) + world + TRAINING.format(training=training) + extra)
    return path


def runs_of(out: Path) -> list[Path]:
    return [out / run["path"] for run in read_json(out / "manifest.json")["runs"]]


def rows_of(run: Path) -> list[str]:
    rows = read_jsonl(run / "metrics.jsonl")
    return [json.dumps({key: value for key, value in row.items() if not is_timing_key(key)}) for row in rows]


def made(run: Path) -> dict[str, object]:
    return {"rows": rows_of(run), "adapter": (run / "final/adapter_model.safetensors").read_bytes()}


@pytest.fixture(scope="module")
def teacher(model, tmp_path_factory) -> Path:
    """A run that has learned what is rewarded."""
    folder = tmp_path_factory.mktemp("teacher")
    path = campaign(folder, model, "", "", steps=12, section="")
    assert launch(load(path), folder / "out", NullObserver()).exit_status == 0
    return runs_of(folder / "out")[0]


@pytest.fixture(scope="module")
def finished(model, teacher, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    path = campaign(folder, model, teacher, *ALL)
    assert launch(load(path), folder / "out", NullObserver()).exit_status == 0
    return folder / "out"


def test_students_come_nearer_to_the_teacher_and_the_baseline_is_as_without_one(finished, model, teacher, tmp_path):
    plain, *students = runs_of(finished)
    path = campaign(tmp_path, model, "", "", "lora = {alpha = 4.0}\n", section="")
    assert launch(load(path), tmp_path / "without", NullObserver()).exit_status == 0
    without = runs_of(tmp_path / "without")[0]
    same = {key: value for key, value in json.loads(rows_of(plain)[-1]).items() if key != "cohort_size"}
    assert same == {key: value for key, value in json.loads(rows_of(without)[-1]).items() if key != "cohort_size"}
    assert made(plain)["adapter"] == made(without)["adapter"]
    identities = {read_json(run / "config.json").get("taught_by") for run in (plain, *students)}
    assert len(identities) == 4
    assert {None, "policy"} < identities
    by_itself, answered, *whole = (read_jsonl(run / "metrics.jsonl") for run in students[3:])
    for row in [row for rows in whole for row in rows]:
        assert row["distillation/divergence"] > 0.0
        assert row["distillation/reverse_kl"] is None
        assert row["distillation/taught_frac"] == 1.0
        assert row["num_datums"] == 12
    assert all(0.0 <= row["distillation/taught_frac"] <= 1.0 for row in by_itself)
    assert all(row["distillation/taught_frac"] == 1.0 for row in answered)
    assert all(row["distillation/reverse_kl_k3"] > 0.0 for row in answered)
    first, last = (read_jsonl(students[0] / "metrics.jsonl")[place] for place in (0, -1))
    assert first["distillation/reverse_kl"] > 0.05
    assert first["num_datums"] == 12  # every answer trains, also of groups whose rewards are all the same
    longer = campaign(
        tmp_path, model, teacher, ALONE, "distillation = {weight = 0.0}\nlr = 0.01\n", steps=16, name="longer"
    )
    assert launch(load(longer), tmp_path / "longer", NullObserver()).exit_status == 0
    rows = read_jsonl(runs_of(tmp_path / "longer")[0] / "metrics.jsonl")
    near = [np.mean([row["distillation/reverse_kl_k3"] for row in part]) for part in (rows[:4], rows[-4:])]
    assert near[1] < 0.7 * near[0]
    assert last["distillation/reverse_kl"] is not None


def test_sampler_and_trainer_give_one_student_up_to_rounding(finished):
    _, sampler, _, trainer, *_ = runs_of(finished)
    one, other = (read_jsonl(run / "metrics.jsonl")[0] for run in (sampler, trainer))
    for key in ("distillation/reverse_kl", "loss", "optim/grad_norm", "distillation/teacher_logprob"):
        assert one[key] == pytest.approx(other[key], rel=1e-3, abs=1e-6), key


def test_interrupted_at_every_step_equals_uninterrupted(finished, model, teacher, tmp_path):
    path, out = campaign(tmp_path, model, teacher, *ALL), tmp_path / "out"
    assert launch(load(path), out, StopAfter(1)).exit_status == 130
    for _ in range(2):
        assert resume(out, StopAfter(1)).exit_status == 130
    assert resume(out, NullObserver()).exit_status == 0
    for mine, theirs in zip(runs_of(out), runs_of(finished), strict=True):
        assert mine.name == theirs.name
        assert made(mine) == made(theirs)


def test_with_several_updates_and_rollouts_ahead_it_trains(model, teacher, tmp_path):
    path = campaign(
        tmp_path, model, teacher, MIXED, WHOLE[1], "distillation = {weight = 1.0, student = \"trainer\"}\n",
        training='num_iterations = 2\nmax_off_policy_steps = 1', extra='[algorithm]\ncorrection = "tis"\n',
    )  # fmt: skip
    assert launch(load(path), tmp_path / "out", NullObserver()).exit_status == 0
    for run in runs_of(tmp_path / "out"):
        name = "distillation/divergence" if "vocabulary" in run.name else "distillation/reverse_kl"
        assert all(row[name] is not None for row in read_jsonl(run / "metrics.jsonl"))


def test_other_weights_of_the_teacher_are_told_before_a_run_goes_on(model, teacher, tmp_path):
    import shutil

    own = shutil.copytree(teacher / "final", tmp_path / "own")
    path, out = campaign(tmp_path, model, own, ALONE, MIXED), tmp_path / "out"
    assert launch(load(path), out, StopAfter(1)).exit_status == 130
    from safetensors.torch import load_file, save_file

    changed = {name: 1.5 * tensor for name, tensor in load_file(own / "adapter_model.safetensors").items()}
    save_file(changed, own / "adapter_model.safetensors", metadata={"format": "pt"})
    result = CliRunner().invoke(app, ["resume", str(out), "--plain"])
    assert result.exit_code == 2, result.output
    assert "weights of the teacher: adapter" in re.sub(r"\s+", " ", result.stdout + result.stderr)
    result = CliRunner().invoke(app, ["resume", str(out), "--plain", "--accept-changes"])
    assert result.exit_code == 0, result.output


def test_explain_says_what_it_adds(model, teacher, tmp_path):
    result = CliRunner().invoke(app, ["explain", str(campaign(tmp_path, model, teacher, *ALL))])
    assert result.exit_code == 0
    told = re.sub(r"\s+", " ", result.stdout)
    assert "distillation 1 × (ln π_teacher − ln π) of every token, teacher" in told
    assert "in place of A; the reward is only recorded" in told
    assert "0.5 × (ln π_teacher − ln π), the difference cut off at ±2, of every token" in told
    assert "plus 1 × A" in told
    assert "teacher base that is shown the reference answer, in place of A" in told
    assert "1 × D_α(π_teacher, π) with α = 0.5 over the vocabulary at every token in the loss, teacher base" in told
    assert "1 × KL(π ‖ π_teacher) over the 20 likeliest tokens and the rest as one" in told


def test_the_algorithm_needs_what_its_teacher_needs(base):
    for config in (configured(), configured(student="trainer"), parse_dict({})):
        made_ = Standard(config, None, None, base.text, ())  # type: ignore[arg-type]
        assert made_.needs == config.algorithm.needs | config.distillation.needs


def test_estimates_of_the_divergence_are_those_of_the_losses():
    one, other = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert kl_terms("k1", one, other, mask).tolist() == [[0.5, -1.0]]
