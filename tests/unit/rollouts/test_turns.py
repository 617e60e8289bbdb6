"""Rollouts of several turns: what the model reads after an action, and that it trains on the very tokens it sampled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from chat_templates import TEMPLATES
from lane_cases import fresh_logprobs, trained

from retrain.config import parse_dict
from retrain.config.tasks import Data
from retrain.config.training import Sampling
from retrain.data.prompts import Renderer
from retrain.engines.local import LocalEngine
from retrain.engines.protocol import PolicyRef
from retrain.environments.protocol import Observation, Step
from retrain.policy.local import LocalPolicy
from retrain.policy.objective import Objective
from retrain.policy.protocol import Denominators, TrainBatch, Want, samples_of
from retrain.policy.threads import Workers
from retrain.rollouts.collect import RolloutRequest, collect
from retrain.types import Group, Problem, RewardResult, samples_of_rollout

QUIET = Data()
"""A [data] section without a system prompt and arguments for the template."""


# -- an environment of two turns --------------------------------------------------------------------------------


class Asking:
    """Asks back once, with the length of the answer; rewards the length of both. A first answer of an even number of
    characters ends the episode where ``may_end``."""

    reward_range = None
    exact = True

    def __init__(self, may_end: bool = False):
        self.may_end, self.seeds, self.metrics_ranges = may_end, [], {}

    def problems(self, split):
        return [Problem(f"p{i}", f"{i}2+34=?", "46") for i in range(3)]

    def start(self, problem, seed):
        self.seeds.append(seed)
        return AskingEpisode(self, problem)

    def results(self, episodes):
        return [episode.result() for episode in episodes]


class AskingEpisode:
    def __init__(self, environment: Asking, problem: Problem):
        self.environment, self.problem, self.said = environment, problem, []

    def observe(self):
        return Observation(({"role": "user", "content": str(self.problem.prompt)},))

    def step(self, action):
        self.said.append(action.text)
        done = len(self.said) == 2 or (self.environment.may_end and len(action.text) % 2 == 0)
        return Step(() if done else ({"role": "user", "content": f"check {len(action.text)}"},), done)

    def result(self):
        return RewardResult(float(sum(map(len, self.said))))


REF = PolicyRef("run", 5)


def asking(environment: Asking, base, samples: int = 4, temperature: float = 1.0) -> list[RolloutRequest]:
    return [
        RolloutRequest(
            environment, Renderer(base.tokenizer, QUIET), problem, REF, samples, Sampling(7, temperature), ("turns", i)
        )
        for i, problem in enumerate(environment.problems("train"))
    ]


@pytest.fixture
def policy(base, lanes) -> LocalPolicy:
    """A policy that has moved away from its base."""
    config = parse_dict({"model": {"lora_rank": 4}, "training": {"seed": 1}})
    made = LocalPolicy(base, lanes, config, ("turns",), Workers())
    with torch.no_grad():
        made.adapter.flat.copy_(trained(lanes, 3, rank=4).flat)
    return made


@pytest.fixture
def engine(base, lanes, policy) -> LocalEngine:
    made = LocalEngine(base, lanes)
    made.publish(REF, policy.snapshot())
    return made


def two_turns(engine: LocalEngine, base, **settings) -> list[Group]:
    collected = collect(engine, asking(Asking(), base, **settings))
    assert [name for name, _, _ in collected.spans] == ["rollout", "score"] * 2
    return collected.groups


def test_a_sample_is_what_the_model_read_and_sampled(base, engine):
    """The toy's template ends no turn: what is read begins where the action stopped, sampled end or not."""
    end = base.tokenizer.eos_token_id
    for group in two_turns(engine, base):
        assert len(group.rollouts) == 4
        for rollout in group.rollouts:
            first, second = rollout.turns
            assert (first.observation_ids, first.messages) == (group.prompt.token_ids, group.prompt.messages)
            (question,) = second.messages
            assert question["content"] == f"check {len(first.action.text)}"
            assert base.tokenizer.decode(second.observation_ids) == f"<turn>{question['content']}<turn>"
            for turn in rollout.turns:
                assert turn.action.policy_version == 5
                assert 1 <= len(turn.action) <= 7
                assert (turn.action.token_ids[-1] == end) == (turn.action.stop_reason == "stop")
            assert rollout.reward.total_reward == sum(len(turn.action.text) for turn in rollout.turns)
            (sample,) = samples_of_rollout(rollout)
            parts = [first.observation_ids, first.action.token_ids, second.observation_ids, second.action.token_ids]
            assert sample.token_ids.tolist() == [token for part in parts for token in part]
            assert sample.action_mask.tolist() == [k % 2 == 1 for k, part in enumerate(parts) for _ in part]
            assert sample.logprobs[sample.action_mask].tolist() == rollout.logprobs_T.tolist()
            assert set(sample.versions[sample.action_mask]) == {5}
            assert set(sample.versions[~sample.action_mask]) == {-1}
            assert not sample.logprobs[~sample.action_mask].any()


def test_an_update_takes_the_tokens_of_all_actions_and_no_others(base, policy, engine):
    """Ratios of 1 between sampler and trainer, and a change of what was read that moves nothing."""
    groups = two_turns(engine, base)
    for group in groups:
        for k, rollout in enumerate(group.rollouts):
            rollout.advantage = float(k - 1.5)
            rollout.token_advantages_T = np.full(len(rollout), rollout.advantage)
    samples = samples_of(groups)
    tokens = sum(len(rollout) for group in groups for rollout in group.rollouts)
    assert sum(int(sample.loss_mask.sum()) for sample in samples) == tokens
    batch = TrainBatch(samples, Denominators(tokens, len(samples)), 0, ("turns",))
    numbers = policy.update(batch, Objective(), 1e-3)
    assert numbers["num_datums"] == 12
    assert numbers["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert abs(numbers["kl_sample_train_v1"]) < 1e-5
    assert numbers["optim/grad_norm"] > 0
    expected = -sum(float(s.advantages[s.action_mask].sum()) for s in samples) / tokens
    assert numbers["loss"] == pytest.approx(expected, abs=1e-4)


def test_turns_are_sampled_from_streams_of_their_own(base, engine):
    """The same rollouts whatever else is asked for beside them, and whether or not others go on."""
    together = two_turns(engine, base)
    for index, request in enumerate(asking(Asking(), base)):
        (alone,) = collect(engine, [request], max_rows=2).groups
        assert isinstance(alone, Group)
        for mine, theirs in zip(alone.rollouts, together[index].rollouts, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert [turn.observation_ids for turn in mine.turns] == [turn.observation_ids for turn in theirs.turns]
    texts = {rollout.turns[1].action.text for group in together for rollout in group.rollouts}
    assert len(texts) > 6
    environment = Asking(may_end=True)
    ending = collect(engine, asking(environment, base)).groups
    assert [environment.seeds.count(seed) for seed in dict.fromkeys(environment.seeds)] == [4, 4, 4]  # one per group
    lengths = set()
    for group, other in zip(ending, together, strict=True):
        assert isinstance(group, Group)
        for mine, theirs in zip(group.rollouts, other.rollouts, strict=True):
            lengths.add(len(mine.turns))
            assert len(mine.turns) == 1 + len(mine.turns[0].action.text) % 2
            for turn, same in zip(mine.turns, theirs.turns, strict=False):
                assert turn.action.token_ids == same.action.token_ids
    assert lengths == {1, 2}


@pytest.mark.parametrize("name", [*TEMPLATES, "qwen3 without thinking"])
def test_trainer_and_engine_agree_turn_by_turn_under_every_template(name, base, lanes, policy, engine, monkeypatch):
    """What the template rewrites, the policy reads anew: then each turn is a sample of its own, as it was seen."""
    rewrites = name not in TEMPLATES
    template, end = TEMPLATES["qwen3" if rewrites else name]
    monkeypatch.setattr(base.tokenizer, "chat_template", template)
    settings = Data(chat_template_kwargs={"enable_thinking": False}) if rewrites else QUIET
    renderer = Renderer(base.tokenizer, settings)
    requests = [replace(request, renderer=renderer) for request in asking(Asking(), base)]
    groups = [group for group in collect(engine, requests).groups if isinstance(group, Group)]
    assert len(groups) == 3
    for rollout in (one for group in groups for one in group.rollouts):
        first, second = rollout.turns
        assert second.fresh == rewrites
        samples = samples_of_rollout(rollout)
        assert len(samples) == 1 + rewrites
        before = [] if rewrites else [*first.observation_ids, *first.action.token_ids]
        for turn, history in ((first, []), (second, before)):
            read = [*history, *turn.observation_ids]
            expected, entropy = fresh_logprobs(base, lanes, policy.adapter, read, turn.action.token_ids, 1.0)
            assert turn.action.logprobs_T == pytest.approx(expected, abs=2e-5)
            assert turn.action.entropy_T == pytest.approx(entropy, abs=2e-4)
        said = [{"role": "assistant", "content": first.action.text}]
        whole = renderer.text([*rollout.prompt.messages, *said, *second.messages[-1:]])
        seen = base.tokenizer.decode([*before, *second.observation_ids], skip_special_tokens=True)
        spaces = name in ("llama3", "mistral")  # these set what was said in spaces, or trim it
        assert _plain(seen, end, spaces) == _plain(whole, end, spaces)
    scores = policy.score(samples_of(groups, every=True), frozenset({Want.LOGPROBS})).of_rollouts(groups).logprobs
    assert scores is not None
    for rollout, own_T in zip((one for group in groups for one in group.rollouts), scores, strict=True):
        assert own_T == pytest.approx(rollout.logprobs_T, abs=2e-5)


def _plain(text: str, end: str, spaces: bool) -> str:
    """Without the text of end tokens, which the toy's tokenizer has as one of another name, and perhaps spaces."""
    text = text.replace(end, "")
    return "".join(text.split()) if spaces else text
