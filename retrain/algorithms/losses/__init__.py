"""Policy losses, one file each, and the table from their TOML names to their classes.

The importance ratio ρ compares log-probabilities of the same distribution, temperature applied; sg is the
stop-gradient. On policy all losses have the same gradient. ``retrain.config.modes`` has formula, paper and TOML keys of
each.
"""

from collections.abc import Callable

from retrain.algorithms.losses.cispo import CISPO
from retrain.algorithms.losses.dppo import DPPO
from retrain.algorithms.losses.gspo import GSPO
from retrain.algorithms.losses.m2po import M2PO
from retrain.algorithms.losses.ppo import PPO
from retrain.algorithms.losses.reinforce import Reinforce
from retrain.algorithms.losses.sapo import SAPO
from retrain.algorithms.losses.vespo import VESPO
from retrain.policy.objective import PolicyLoss

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
