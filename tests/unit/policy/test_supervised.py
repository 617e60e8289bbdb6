from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.lanes import relative_gap, trained

from retrain.config import Config, parse_dict
from retrain.policy.backbone import backbone_of
from retrain.policy.lora import Lanes, LoraWeights
from retrain.policy.packing import Budget
from retrain.policy.supervised import SupervisedTrainer, supervised_sample
from retrain.policy.update import UpdateContext
from retrain.rng import generator
from retrain.threads import Workers

PLAIN = parse_dict({"optimizer": {"grad_clip_norm": 0.0}})
FAMILIES = ("tied llama", "qwen3", "gemma2", "windowed mistral")


def examples(vocabulary: int) -> list[tuple[list[int], list[bool]]]:
    """Return conversations of two answers; two of them share a prompt, and one ends with tokens that do not train."""
    random, made = generator("supervised"), []
    for prompt, first, between, second in ((4, 5, 3, 2), (4, 1, 2, 6), (7, 3, 1, 1), (2, 8, 4, 3), (5, 2, 2, 2)):
        ids = random.integers(2, vocabulary, prompt + first + between + second).tolist()
        mask = np.repeat([False, True, False, True], [prompt, first, between, second]).tolist()
        made.append((ids, mask))
    made[1][0][:4] = made[0][0][:4]
    made[3][1][-2:] = [False, False]
    return made


def trainer(
    lanes: Lanes, tokens: int = 1000, config: Config = PLAIN, workers: int = 1, dropout: float = 0.0
) -> SupervisedTrainer:
    context = UpdateContext(lanes, Budget(tokens), Workers(workers), dropout)
    return SupervisedTrainer(context, trained(lanes, 3), config, ("test",))


def by_transformers(lanes: Lanes, learner: SupervisedTrainer, rows) -> tuple[float, float, torch.Tensor]:
    """Return loss and token accuracy of ``model(labels=…)`` on the padded batch with ΔW added to the weights, and the
    gradient of the loss in the order of the adapter."""
    adapter, model, longest = learner.adapter, lanes.base.model, max(len(ids) for ids, _ in rows)
    flat = adapter.flat.detach().clone().requires_grad_()
    copy, merged = LoraWeights(adapter.shapes, adapter.rank, adapter.scale, adapter.live_rank, flat), {}
    for shape in adapter.shapes:
        weight = model.get_submodule(shape.name).weight
        merged[f"{shape.name}.weight"] = weight + adapter.scale * copy.B[shape.name] @ copy.A[shape.name]
    ids_BT = torch.full((len(rows), longest), lanes.base.pad_id)
    labels_BT, attended_BT = torch.full_like(ids_BT, -100), torch.zeros_like(ids_BT)
    for i, (ids, mask) in enumerate(rows):
        ids_BT[i, : len(ids)], attended_BT[i, : len(ids)] = torch.tensor(ids), 1
        labels_BT[i, : len(ids)] = torch.where(torch.tensor(mask), torch.tensor(ids), -100)
    inputs = {"input_ids": ids_BT, "attention_mask": attended_BT, "labels": labels_BT}
    lanes.detach()
    result = torch.func.functional_call(model, merged, kwargs=inputs)
    right_BT = result.logits[:, :-1].argmax(-1) == labels_BT[:, 1:]
    (gradient,) = torch.autograd.grad(result.loss, flat)
    return result.loss.item(), float(right_BT.sum() / (labels_BT[:, 1:] != -100).sum()), gradient


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradient_are_those_of_transformers(tiny, family):
    base = tiny(family, torch.float32)
    lanes, rows = Lanes(base), examples(base.vocab_size)
    learner = trainer(lanes)
    metrics = learner.update([supervised_sample(*row) for row in rows], 0, lr=0.0)
    gradient = learner.adapter.flat.grad.clone()
    assert backbone_of(base).packs
    base.release()
    loss, accuracy, expected = by_transformers(lanes, learner, rows)
    assert metrics["sft/loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["sft/token_accuracy"] == pytest.approx(accuracy)
    assert metrics["sft/completion_tokens"] == sum(sum(mask) for _, mask in rows)
    assert metrics["sft/grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-4)
    assert relative_gap(gradient, expected) < 1e-4
    assert float(expected.norm()) > 0.01


def test_micro_batches_packing_and_threads_change_neither_loss_nor_gradient(tiny):
    base = tiny("qwen3", torch.float64)
    lanes = Lanes(base)
    samples = [supervised_sample(*row) for row in examples(base.vocab_size)]
    results = []
    for packs, tokens, workers in ((True, 1000, 1), (True, 30, 1), (True, 12, 2), (False, 1000, 1), (False, 20, 1)):
        base.backbone = replace(backbone_of(base), packs=packs)
        learner = trainer(lanes, tokens, workers=workers)
        metrics = learner.update(samples, 0, lr=0.0)
        measured = learner.measure(samples)
        assert measured == {key: pytest.approx(metrics[key]) for key in measured}
        learner.update(samples, 0, lr=0.0)  # after ``measure``, which zeroes the gradient
        results.append((metrics, learner.adapter.flat.grad.clone()))
    first, gradient = results[0]
    for metrics, other in results[1:]:
        assert metrics == {key: pytest.approx(first[key], rel=1e-6) for key in first}
        assert relative_gap(other, gradient) < 1e-6
    base.release()


def test_sequences_do_not_see_each_other(tiny):
    base = tiny("tied llama", torch.float64)
    lanes = Lanes(base)
    samples = [supervised_sample(*row) for row in examples(base.vocab_size)]
    learner = trainer(lanes)
    alone = [learner.measure([sample]) for sample in samples]
    tokens = [metrics["sft/completion_tokens"] for metrics in alone]
    mean = np.average([metrics["sft/loss"] for metrics in alone], weights=tokens)
    assert learner.measure(samples)["sft/loss"] == pytest.approx(mean, rel=1e-9)
    base.release()


def test_dropout_acts_in_training_and_not_on_held_out_examples(tiny):
    base = tiny("tied llama", torch.float32)
    lanes = Lanes(base)
    samples = [supervised_sample(*row) for row in examples(base.vocab_size)]
    learner = trainer(lanes, dropout=0.5)
    measured = learner.measure(samples)
    assert measured == pytest.approx(trainer(lanes).measure(samples))
    assert learner.update(samples, 0, lr=0.0)["sft/loss"] != pytest.approx(measured["sft/loss"], rel=1e-4)
    base.release()


def test_training_lowers_the_loss_and_continues_from_a_snapshot_bit_for_bit(tiny, tmp_path):
    base = tiny("qwen3", torch.float32)
    lanes = Lanes(base)
    samples = [supervised_sample(*row) for row in examples(base.vocab_size)]
    config = parse_dict({"optimizer": {"beta2": 0.99}, "training": {"weight_decay": 0.1}})
    learner = trainer(lanes, config=config)
    losses = [learner.update(samples, step, lr=0.01)["sft/loss"] for step in range(3)]
    learner.snapshot({"r": 4, "lora_alpha": 8.0}).write(tmp_path)
    rest = [learner.update(samples, step, lr=0.01)["sft/loss"] for step in range(3, 6)]
    assert rest[-1] < 0.8 * losses[0]
    other = trainer(lanes, config=config)
    other.load(tmp_path)
    assert [other.update(samples, step, lr=0.01)["sft/loss"] for step in range(3, 6)] == rest
    assert torch.equal(other.adapter.flat, learner.adapter.flat)
    base.release()


def test_a_sample_ends_with_its_last_trained_token_and_never_trains_its_first():
    sample = supervised_sample([5, 6, 7, 8, 9], [True, False, True, True, False])
    assert sample.token_ids.tolist() == [5, 6, 7, 8]
    assert sample.loss_mask.tolist() == sample.action_mask.tolist() == [False, False, True, True]
    with pytest.raises(ValueError, match="no token of the example is trained"):
        supervised_sample([5, 6], [True, False])
