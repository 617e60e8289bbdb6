"""Two batches that TRL's own PPOTrainer trained on: our functions give its numbers.

tests/data/trl_ppo.json holds local variables of ``PPOTrainer.train`` of TRL 1.12.0, the last release with PPO, on
random models in float32; `git show 2a5cb154:scripts/trl_ppo_numbers.py` prints the program that wrote it.

TRL puts the score one place after the last token where there is room, and has a value there; we put it on the last
token. With that place in the mask our functions give TRL's advantages. TRL averages some statistics over the padding,
too; ours run over the tokens.
"""

import json
from pathlib import Path

import pytest
import torch

from retrain.algorithms.credit.gae import gae, token_rewards, whiten_tokens
from retrain.algorithms.losses import PPO
from retrain.maths.ratios import loss_metrics, sampled_token_kl
from retrain.policy.objective import policy_loss, token_weights, value_loss

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "trl_ppo.json").read_text(encoding="utf-8"))
CLOSE = {"rtol": 0.0, "atol": 1e-5}


class Batch:
    """What TRL computed: ``trl`` its tensors of the batch, ``updates`` those of every minibatch."""

    def __init__(self, name):
        recorded = RECORDED[name]
        self.arguments, self.metrics = recorded["arguments"], recorded["metrics"]
        self.trl = tensors({key: recorded[key] for key in recorded if key not in ("updates", "slots")})
        self.updates = [{**update, **tensors(update)} for update in recorded["updates"]]
        self.tokens, self.room = ~self.trl["padding_mask"], ~self.trl["padding_mask_p1"]
        self.fills = self.tokens.all(1)

    def kl(self):
        logprobs, reference = self.trl["logprobs"], self.trl["ref_logprobs"]
        return sampled_token_kl(self.arguments["kl_estimator"], logprobs, reference, self.tokens)

    def rewards(self, mask):
        return token_rewards(self.trl["scores"], self.kl(), mask, self.arguments["kl_coef"])

    def advantages(self, mask):
        return gae(self.rewards(mask), self.trl["values"], mask, self.arguments["gamma"], self.arguments["lam"])

    def policy(self, update, mask):
        rows, clip = update["micro_batch_inds"], self.arguments["cliprange"]
        old, advantages = self.trl["logprobs"][rows], self.trl["advantages"][rows]
        loss, sums = policy_loss(PPO(clip_eps=clip), update["new_logprobs"], old, advantages, mask[rows])
        return mean(loss, mask[rows]), loss_metrics(sums)

    def value(self, update, mask):
        rows, clip = update["micro_batch_inds"], self.arguments["cliprange_value"]
        old, returns = self.trl["values"][rows], self.trl["returns"][rows]
        loss, marks = value_loss(update["vpred"], old, returns, mask[rows], clip)
        return mean(loss, mask[rows]), mean(marks.to(loss), mask[rows])


def tensors(recorded):
    lists = {key: torch.tensor(value) for key, value in recorded.items() if isinstance(value, list)}
    return {key: value.double() if value.is_floating_point() else value for key, value in lists.items()}


def mean(values, mask):
    total, rows = int(mask.sum()), len(mask)
    weights = token_weights("tokens", mask, total_tokens=total, total_sequences=rows, max_tokens=mask.shape[1])
    return float((torch.where(mask, values, 0.0) * weights.to(values)).sum())


@pytest.fixture(params=["ragged", "full"])
def batch(request):
    return Batch(request.param)


def test_divergence_and_entropy_of_the_samples(batch):
    torch.testing.assert_close(batch.kl(), batch.trl["kl"], **CLOSE)
    surprise = torch.where(batch.tokens, -batch.trl["logprobs"], 0.0)
    assert float(batch.kl().sum(1).mean()) == pytest.approx(batch.metrics["objective/kl"], abs=1e-5)
    assert float(surprise.sum(1).mean()) == pytest.approx(batch.metrics["objective/entropy"], abs=1e-5)


def test_rewards(batch):
    """TRL's, with the place after the end. Without that place, its score comes with the last token."""
    torch.testing.assert_close(batch.rewards(batch.room), batch.trl["rewards"], **CLOSE)
    short = torch.nonzero(~batch.fills).squeeze(1)
    last = batch.trl["sequence_lengths"][short]
    moved = batch.trl["rewards"].clone()
    moved[short, last] += batch.trl["scores"][short]
    moved[short, last + 1] = 0.0
    torch.testing.assert_close(batch.rewards(batch.tokens), moved, **CLOSE)


def test_advantages_and_returns(batch):
    found = batch.advantages(batch.room)
    torch.testing.assert_close(found, batch.trl["advantages_before_whitening"], **CLOSE)
    torch.testing.assert_close(found + batch.trl["values"], batch.trl["returns"], **CLOSE)
    torch.testing.assert_close(whiten_tokens(found, batch.tokens), batch.trl["advantages"], **CLOSE)


def test_policy_loss_ratio_and_approximate_divergence(batch):
    """TRL's mean runs over the padding, where the ratio is 1 and its logarithm 0; ours does not."""
    for update in batch.updates:
        loss, metrics = batch.policy(update, batch.tokens)
        assert loss == pytest.approx(update["pg_loss"], abs=1e-5)
        assert metrics["policy/clipfrac_avg"] == pytest.approx(update["pg_clipfrac"], abs=1e-5)
        inside = batch.tokens[update["micro_batch_inds"]]
        places, tokens = inside.numel(), int(inside.sum())
        assert metrics["policy/approxkl_avg"] == pytest.approx(update["approxkl"] * places / tokens, abs=1e-5)
        ratio = (update["ratio"] * places - (places - tokens)) / tokens
        assert metrics["val/ratio"] == pytest.approx(ratio, abs=1e-5)


def test_value_loss(batch):
    for update in batch.updates:
        loss, clipped = batch.value(update, batch.room)
        assert loss == pytest.approx(update["vf_loss"], abs=1e-5)
        assert clipped == pytest.approx(update["vf_clipfrac"], abs=1e-5)
        whole = batch.policy(update, batch.tokens)[0] + batch.arguments["vf_coef"] * loss
        assert whole == pytest.approx(update["loss"], abs=1e-5)
