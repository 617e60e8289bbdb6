"""Two batches that TRL's own PPOTrainer trained on (scripts/trl_ppo_numbers.py): our functions give its numbers.

TRL puts the score one place after the last token where there is room, and has a value there; we put it on the last
token. With that place in the mask our functions give TRL's advantages. TRL averages some statistics over the padding,
too; with a mask of everything ours are the same, and with the tokens' mask they are what we log.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from retrain.maths.critic import gae, token_rewards, value_loss, whiten_tokens
from retrain.maths.losses import LossBounds, kl_terms, loss_metrics, policy_loss, token_weights

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "trl_ppo.json").read_text(encoding="utf-8"))
BATCHES = ["ragged", "full"]
CLOSE = {"rtol": 0.0, "atol": 1e-5}
PADDING_LOGPROB = 1.0


class Batch:
    """What TRL computed: ``trl`` its tensors of the batch, ``updates`` those of every minibatch."""

    def __init__(self, name, dtype):
        recorded = RECORDED[name]
        self.arguments, self.metrics, self.slots = (recorded[key] for key in ("arguments", "metrics", "slots"))
        self.trl = tensors({key: recorded[key] for key in recorded if key not in ("updates", "slots")}, dtype)
        self.updates = [{**update, **tensors(update, dtype)} for update in recorded["updates"]]
        self.tokens, self.room = ~self.trl["padding_mask"], ~self.trl["padding_mask_p1"]
        self.fills = self.tokens.all(1)

    def kl(self):
        """Our estimate, at the tokens."""
        return kl_terms(self.arguments["kl_estimator"], self.trl["logprobs"], self.trl["ref_logprobs"], self.tokens)

    def rewards(self, mask):
        return token_rewards(self.trl["scores"], self.kl(), mask, self.arguments["kl_coef"])

    def advantages(self, mask, **discounts):
        discounts = {key: self.arguments[key] for key in ("gamma", "lam")} | discounts
        return gae(self.rewards(mask), self.trl["values"], mask, **discounts)

    def policy(self, update, mask):
        """Our policy loss of an update as a mean over ``mask``, and its metrics."""
        rows, clip = update["micro_batch_inds"], self.arguments["cliprange"]
        old, advantages = self.trl["logprobs"][rows], self.trl["advantages"][rows]
        loss, sums = policy_loss("ppo", update["new_logprobs"], old, advantages, mask[rows], LossBounds(clip_low=clip))
        return mean(loss, mask[rows]), loss_metrics(sums)

    def value(self, update, mask):
        """Our value loss of an update, and how much of it is clipped, as means over ``mask``."""
        rows, clip = update["micro_batch_inds"], self.arguments["cliprange_value"]
        old, returns = self.trl["values"][rows], self.trl["returns"][rows]
        loss, marks = value_loss(update["vpred"], old, returns, mask[rows], clip)
        return mean(loss, mask[rows]), mean(marks.to(loss), mask[rows])

    def logged(self, numbers):
        """A statistic's table as TRL keeps it, with 0 in the places that no update filled."""
        places = torch.Size(self.slots).numel()
        return torch.tensor([*numbers, *[0.0] * (places - len(numbers))], dtype=torch.float64)


def tensors(recorded, dtype):
    """Its lists, of numbers or of truths."""
    lists = {key: torch.tensor(value) for key, value in recorded.items() if isinstance(value, list)}
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in lists.items()}


def mean(values, mask):
    """Over the tokens of the mask, with the weights of the `tokens` denominator."""
    total, rows = int(mask.sum()), len(mask)
    weights = token_weights("tokens", mask, total_tokens=total, total_sequences=rows, max_tokens=mask.shape[1])
    return float((torch.where(mask, values, 0.0) * weights.to(values)).sum())


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture(params=BATCHES)
def batch(request, dtype):
    return Batch(request.param, dtype)


@pytest.fixture
def ragged(dtype):
    return Batch("ragged", dtype)


def test_the_recorded_batches_have_what_they_are_for():
    ragged, full = (Batch(name, torch.float64) for name in BATCHES)
    assert RECORDED["versions"]["trl"] == "1.12.0"
    lengths = ragged.tokens.sum(1)
    assert set(lengths.tolist()) == {2, 3, 5, 6}
    assert full.fills.all()
    assert torch.equal(ragged.room.sum(1), (lengths + 1).clamp(max=6))
    assert bool((ragged.trl["logprobs"][~ragged.tokens] == PADDING_LOGPROB).all())
    for batch in (ragged, full):
        assert len(batch.updates) == batch.arguments["num_ppo_epochs"] * batch.arguments["num_mini_batches"] == 4
        assert len(batch.metrics) == 16  # and eps, by the clock
        assert sorted(torch.cat([update["micro_batch_inds"] for update in batch.updates[:2]]).tolist()) == [*range(8)]
        first, *later = batch.updates
        assert (first["pg_clipfrac"], first["vf_clipfrac"]) == (0, 0)
        assert all(update["pg_clipfrac"] > 0.1 and update["vf_clipfrac"] > 0.1 for update in later)


# Before the updates


def test_divergence_and_entropy_of_the_samples(batch):
    torch.testing.assert_close(batch.kl(), batch.trl["kl"], **CLOSE)
    divergence = float(batch.kl().sum(1).mean())
    score = float(batch.trl["scores"].mean())
    surprise = float(torch.where(batch.tokens, -batch.trl["logprobs"], 0.0).sum(1).mean())
    cost = -batch.arguments["kl_coef"] * divergence
    for key, value in {
        "kl": divergence,
        "entropy": surprise,
        "non_score_reward": cost,
        "scores": score,
        "rlhf_reward": cost + score,
    }.items():
        assert value == pytest.approx(batch.metrics[f"objective/{key}"], abs=1e-5)
    old = float(-batch.trl["logprobs"].sum(1).mean())  # what earlier versions logged: −1 for each padding
    padding = int((~batch.tokens).sum())
    assert surprise - old == pytest.approx(padding / len(batch.tokens), abs=1e-5)


def test_rewards(batch):
    """TRL's, with the place after the end; in rows without one, ours."""
    torch.testing.assert_close(batch.rewards(batch.room), batch.trl["rewards"], **CLOSE)
    ours = batch.rewards(batch.tokens)
    torch.testing.assert_close(ours[batch.fills], batch.trl["rewards"][batch.fills], **CLOSE)


def test_our_score_comes_with_the_last_token(ragged):
    """In a row with room TRL leaves the last token its divergence and gives the score to the place after it."""
    ours, theirs, scores = ragged.rewards(ragged.tokens), ragged.trl["rewards"], ragged.trl["scores"]
    short = torch.nonzero(~ragged.fills).squeeze(1)
    assert len(short) == 4
    last = ragged.trl["sequence_lengths"][short]
    moved = torch.zeros_like(ours)
    moved[short, last], moved[short, last + 1] = scores[short], -scores[short]
    torch.testing.assert_close(ours - theirs, moved, **CLOSE)


def test_advantages_and_returns(batch):
    found = batch.advantages(batch.room)
    torch.testing.assert_close(found, batch.trl["advantages_before_whitening"], **CLOSE)
    torch.testing.assert_close(found + batch.trl["values"], batch.trl["returns"], **CLOSE)
    ours = batch.advantages(batch.tokens)
    torch.testing.assert_close(
        ours[batch.fills], batch.trl["advantages_before_whitening"][batch.fills], rtol=0.0, atol=1e-5
    )


def test_the_place_after_the_end_counts_unless_everything_counts_alike(ragged):
    """At γ = λ = 1 its value cancels: the policy's tokens have the same advantages with it and without."""
    ours, theirs = (ragged.advantages(mask, gamma=1.0, lam=1.0) for mask in (ragged.tokens, ragged.room))
    torch.testing.assert_close(ours[ragged.tokens], theirs[ragged.tokens], **CLOSE)
    ours, theirs = ragged.advantages(ragged.tokens), ragged.advantages(ragged.room)
    assert float((ours - theirs)[~ragged.fills].abs().max()) > 0.01


def test_whitening(batch):
    found = whiten_tokens(batch.trl["advantages_before_whitening"], batch.tokens)
    torch.testing.assert_close(found, batch.trl["advantages"], **CLOSE)
    torch.testing.assert_close(whiten_tokens(batch.advantages(batch.room), batch.tokens), found, **CLOSE)


# The updates


def test_policy_loss(batch):
    for update in batch.updates:
        loss, metrics = batch.policy(update, batch.tokens)
        assert loss == pytest.approx(update["pg_loss"], abs=1e-5)
        assert metrics["policy/clipfrac_avg"] == pytest.approx(update["pg_clipfrac"], abs=1e-5)


def test_value_loss(batch):
    for update in batch.updates:
        loss, clipped = batch.value(update, batch.room)
        assert loss == pytest.approx(update["vf_loss"], abs=1e-5)
        assert clipped == pytest.approx(update["vf_clipfrac"], abs=1e-5)
        whole = batch.policy(update, batch.tokens)[0] + batch.arguments["vf_coef"] * loss
        assert whole == pytest.approx(update["loss"], abs=1e-5)


def test_value_loss_of_the_tokens_alone(ragged):
    """Ours has no value after the end."""
    for update in ragged.updates:
        assert abs(ragged.value(update, ragged.tokens)[0] - update["vf_loss"]) > 1e-3


def test_ratio_and_approximate_divergence(batch):
    """TRL's mean runs over the padding, where the ratio is 1 and its logarithm 0; ours does not."""
    everywhere = torch.ones_like(batch.tokens)
    for update in batch.updates:
        theirs, ours = (batch.policy(update, mask)[1] for mask in (everywhere, batch.tokens))
        assert theirs["policy/approxkl_avg"] == pytest.approx(update["approxkl"], abs=1e-5)
        assert theirs["val/ratio"] == pytest.approx(update["ratio"], abs=1e-5)
        inside = batch.tokens[update["micro_batch_inds"]]
        places, tokens = inside.numel(), int(inside.sum())
        assert ours["policy/approxkl_avg"] == pytest.approx(update["approxkl"] * places / tokens, abs=1e-5)
        ratio = (update["ratio"] * places - (places - tokens)) / tokens
        assert ours["val/ratio"] == pytest.approx(ratio, abs=1e-5)
        if places > tokens and update is not batch.updates[0]:
            assert abs(ours["policy/approxkl_avg"] - update["approxkl"]) > 1e-2
            assert abs(ours["val/ratio"] - update["ratio"]) > 1e-4


def test_entropy_of_the_distributions(batch):
    """TRL's mean has the padding's distributions in it."""
    theirs, ours = [], []
    for update in batch.updates:
        inside = batch.tokens[update["micro_batch_inds"]]
        theirs.append(mean(update["entropy"], torch.ones_like(inside)))
        ours.append(mean(update["entropy"], inside))
        assert ours[-1] == pytest.approx(float(update["entropy"][inside].mean()), abs=1e-5)
        assert (abs(theirs[-1] - ours[-1]) > 1e-3) == (not inside.all())
    assert float(batch.logged(theirs).mean()) == pytest.approx(batch.metrics["policy/entropy_avg"], abs=1e-5)


def test_the_logged_means(batch):
    """Of the table of statistics, each minibatch alike whatever its tokens; half of it is empty in `full`."""
    everywhere = torch.ones_like(batch.tokens)
    policy = [batch.policy(update, batch.tokens) for update in batch.updates]
    padded = [batch.policy(update, everywhere)[1] for update in batch.updates]
    value = [batch.value(update, batch.room) for update in batch.updates]
    tables = {
        "loss/policy_avg": [loss for loss, _ in policy],
        "policy/clipfrac_avg": [metrics["policy/clipfrac_avg"] for _, metrics in policy],
        "loss/value_avg": [loss for loss, _ in value],
        "val/clipfrac_avg": [clipped for _, clipped in value],
        "policy/approxkl_avg": [metrics["policy/approxkl_avg"] for metrics in padded],
        "val/ratio": [metrics["val/ratio"] for metrics in padded],
    }
    for key, numbers in tables.items():
        assert float(batch.logged(numbers).mean()) == pytest.approx(batch.metrics[key], abs=1e-5)
    ratios = batch.logged(tables["val/ratio"])
    assert float(ratios.var()) == pytest.approx(batch.metrics["val/ratio_var"], abs=1e-5)
    assert int((ratios == 0).sum()) == (4 if batch.fills.all() else 0)


def test_counts(batch):
    end = 1
    assert int((batch.trl["responses"] == end).sum()) == batch.metrics["val/num_eos_tokens"]
    assert batch.metrics["episode"] == len(batch.trl["responses"])
    assert batch.metrics["lr"] == batch.arguments["learning_rate"]
