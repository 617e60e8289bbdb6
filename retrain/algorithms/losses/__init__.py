"""Policy losses, one file each, and the table from their TOML names to their classes.

The importance ratio ρ is taken between log-probabilities of the same distribution, temperature applied. On policy all
losses have the same gradient. The formula, the paper and the TOML keys of each stand in ``retrain.config.modes``.
"""

from collections.abc import Callable

from retrain.algorithms.losses.cispo import CISPO
from retrain.algorithms.losses.dppo import DPPO
from retrain.algorithms.losses.gspo import GSPO
from retrain.algorithms.losses.m2po import M2PO
from retrain.algorithms.losses.plugin import PluginLoss
from retrain.algorithms.losses.ppo import PPO
from retrain.algorithms.losses.reinforce import Reinforce
from retrain.algorithms.losses.sapo import SAPO
from retrain.algorithms.losses.vespo import VESPO
from retrain.config import Config
from retrain.config.modes import Named, loss_of
from retrain.config.root import value_at
from retrain.policy.terms import PolicyLoss

LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "ppo": PPO,
    "reinforce": Reinforce,
    "gspo": GSPO,
    "cispo": CISPO,
    "dppo": DPPO,
    "sapo": SAPO,
    "vespo": VESPO,
    "m2po": M2PO,
}


def build_loss(config: Config, loss: Named) -> PolicyLoss:
    """Return the policy loss of a configuration; ``loss`` is ``[algorithm] loss``, or the function that it names.

    The fields of a loss are the keys of its row in ``config.modes``; the ``parameters`` among them lose its name.
    """
    if not isinstance(loss, str):
        return PluginLoss(loss)
    shared = {key.rpartition(".")[2]: value_at(config, key) for key in loss_of(loss).keys}
    return LOSSES[loss](**shared, **config.algorithm.parameters_of("loss"))
