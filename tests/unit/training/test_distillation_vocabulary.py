from __future__ import annotations

import pytest
import torch
from lane_cases import fresh_logits, local_policy, rollout, totals, trained

from retrain.config import parse_dict
from retrain.maths.distillation import divergence, with_tail
from retrain.policy import head as head_module
from retrain.policy.context import read_after
from retrain.policy.divergence import head_divergence
from retrain.policy.head import Head
from retrain.policy.local import LocalSnapshot
from retrain.policy.objective import TeacherTerm, objective_of
from retrain.policy.protocol import TrainBatch
from retrain.policy.teacher import AdapterTeacher, BaseTeacher, PolicyTeacher
from retrain.types import without_advantages


def states(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("alpha", "top", "softcap"), [(0.0, 0, None), (0.3, 5, 3.0), (1.0, 5, None), (0.3, 0, 3.0)])
def test_in_chunks_it_has_the_value_and_gradient_that_it_has_at_once(monkeypatch, alpha, top, softcap):
    monkeypatch.setattr(head_module, "CHUNK_BYTES", {"cpu": 1, "cuda": 1})
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


def settings(**keys):
    return {"distillation": {"teacher": "base", "estimate": "vocabulary", **keys}, "optimizer": {"grad_clip_norm": 0.0}}


def student(base, lanes, teacher, **keys):
    policy = local_policy(base, lanes, **settings(**keys))
    with torch.no_grad():
        policy.adapter.flat.copy_(trained(lanes, 2).flat)
    policy.teacher = teacher
    return policy, objective_of(policy.config, "ppo")


def asked(samples, prompts) -> TrainBatch:
    """A batch without advantages whose teacher reads these prompts."""
    views = [without_advantages(sample) for sample in samples]
    for view, prompt in zip(views, prompts, strict=True):
        view.teacher_prompt = prompt
    return TrainBatch(views, totals(views), 0, ("whole",))


@pytest.mark.parametrize(("who", "alpha", "top"), [("base", 0.5, 0), ("policy", 1.0, 0), ("adapter", 0.0, 7)])
def test_the_gradient_of_an_update_is_the_plain_losses(base, lanes, who, alpha, top):
    other = trained(lanes, 9, rank=3)
    teachers = {
        "base": BaseTeacher(""),
        "policy": PolicyTeacher(),
        "adapter": AdapterTeacher(LocalSnapshot(other.frozen(), {}), ""),
    }
    policy, objective = student(base, lanes, teachers[who], alpha=alpha, top_tokens=top, weight=0.7)
    samples = rollout(base, lanes, policy.adapter)[:5]
    prompts = [(5, 6, 7, 8), None, (), (9, 3), (4, 4, 4)]
    batch = asked(samples, prompts)
    gradient = policy.gradient(batch, objective)
    adapter = {"base": None, "policy": policy.adapter, "adapter": other}[who]
    policy.adapter.flat.grad.zero_()
    total, taught = torch.zeros(()), 0
    for sample, prompt in zip(samples, prompts, strict=True):
        if prompt is None:
            continue
        taught += int(sample.action_mask.sum())
        mine = torch.log_softmax(fresh_logits(lanes, policy.adapter, sample).float(), -1)
        with torch.no_grad():
            logits = fresh_logits(lanes, adapter, read_after(sample, prompt) if prompt else sample)
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
    numbers = policy.update(batch, objective, 1e-6)
    assert numbers["distillation/divergence"] == pytest.approx(float(total.detach()) / taught, rel=1e-4)
    assert numbers["num_datums"] == 5


def test_a_teacher_that_reads_what_the_student_reads_and_is_the_student_teaches_nothing(base, lanes):
    policy, objective = student(base, lanes, PolicyTeacher(), alpha=1.0)
    batch = asked(rollout(base, lanes, policy.adapter)[:3], [()] * 3)
    gradient = policy.gradient(batch, objective)
    assert float(gradient.norm()) < 1e-6
    assert policy.update(batch, objective, 1e-6)["distillation/divergence"] == pytest.approx(0.0, abs=1e-7)


def test_where_nobody_teaches_there_is_no_term_and_no_further_pass(base, lanes):
    for sections in ({}, {"distillation": {"teacher": "base"}}, settings(weight=0.0)):
        objective = objective_of(parse_dict(sections), "ppo")
        assert not any(isinstance(term, TeacherTerm) for term in objective.terms)
    policy = local_policy(base, lanes)
    batch = asked(rollout(base, lanes, policy.adapter)[:2], [None, None])
    assert "distillation/divergence" not in policy.update(batch, objective_of(policy.config, "ppo"), 1e-6)
