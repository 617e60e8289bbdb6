"""Algorithms: how rewards become advantages and masks of tokens. The tables map names in TOML files to code.

A new advantage is a function of a group's rewards in a file under ``credit/``, a row of ``GROUP_ADVANTAGES``, and a row
of ``retrain.config.modes``, whose ``parameters`` are keyword arguments of the function (``docs/extending.md``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from retrain.algorithms.algorithm import Algorithm, CreditStep
from retrain.algorithms.credit.entropy_mask import EntropyMask
from retrain.algorithms.credit.gae import GaeAdvantage, RewardKL
from retrain.algorithms.credit.group_advantage import (
    Formula,
    GroupAdvantage,
    SpreadAdvantage,
    TurnCredit,
    ZeroAdvantage,
    dr_grpo,
    grpo,
    maxrl,
    rloo,
)
from retrain.algorithms.credit.gtpo import GtpoWeights
from retrain.algorithms.credit.gtpo_paper import GtpoPaper
from retrain.algorithms.credit.hicra import Hicra
from retrain.algorithms.credit.planning_tokens import (
    STRATEGIC_GRAMS,
    Detector,
    PlanningTokens,
    PluginDetector,
    RegexDetector,
)
from retrain.algorithms.credit.rejection_mask import RejectionMask
from retrain.algorithms.credit.sepa_pooling import SepaPooling
from retrain.algorithms.credit.teacher import FullVocabularyTeacher, TeacherAdvantage
from retrain.algorithms.credit.transform_plugin import TransformPlugin
from retrain.algorithms.credit.uncertainty import TokenUncertainty
from retrain.algorithms.losses import LOSSES
from retrain.algorithms.losses.plugin import PluginLoss
from retrain.config import Config
from retrain.config.algorithm import AlgorithmSection
from retrain.config.modes import MODES, Named, advantage_of, loss_of
from retrain.config.root import value_at
from retrain.maths.corrections import Correction
from retrain.plugins import load_function
from retrain.policy.objective import (
    EntropyTerm,
    KLTerm,
    Objective,
    PolicyLoss,
    PolicyTerm,
    TeacherTerm,
    Term,
    ValueTerm,
)
from retrain.tokenizer import Tokenizer

Stream = tuple[int | str, ...]

# Formula of each ``advantage_mode`` that compares the rollouts of a group
GROUP_ADVANTAGES: dict[str, Formula] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "maxrl": maxrl,
    "reinforce_pp": dr_grpo,  # whitened over the batch afterwards
}

# Credit steps of each ``transform_mode``, from the configuration and the run's random stream
TOKEN_CREDIT: dict[str, Callable[[Config, Stream], Sequence[CreditStep]]] = {
    "none": lambda config, stream: [],
    "gtpo": lambda config, stream: [GtpoWeights(config.gtpo.beta)],
    "gtpo_hicra": lambda config, stream: [GtpoWeights(config.gtpo.beta), Hicra(config.hicra.alpha)],
    "gtpo_hicra_placebo": lambda config, stream: [
        GtpoWeights(config.gtpo.beta),
        Hicra(config.hicra.alpha, placebo_stream=(*stream, "placebo")),
    ],
    "gtpo_sepa": lambda config, stream: [SepaPooling(config.sepa), GtpoWeights(config.gtpo.beta)],
    "gtpo_paper": lambda config, stream: [
        GtpoPaper(config.gtpo.alpha1, config.gtpo.alpha2, config.gtpo.centred, config.algorithm.keeps_uniform_groups)
    ],
    "entropy_mask": lambda config, stream: [
        EntropyMask(config.algorithm.entropy_mask_rho, config.algorithm.entropy_mask_denominator)
    ],
}


@dataclass(frozen=True)
class Modes:
    advantage: Named
    transform: Named
    uncertainty: Named
    loss: Named = "ppo"


def load_modes(algorithm: AlgorithmSection, base_dir: Path | None = None) -> Modes:
    """Return the modes that ``[algorithm]`` names, plug-ins loaded from ``base_dir`` or the current directory.

    Raises PluginError when a plug-in cannot be loaded.
    """

    def load(key: str) -> Named:
        name = getattr(algorithm, key)
        return name if name in MODES[key] else load_function(name, base_dir, f"[algorithm] {key} =")

    return Modes(load("advantage_mode"), load("transform_mode"), load("uncertainty_kind"), load("loss"))


def load_detector(config: Config, base_dir: Path | None = None) -> Detector:
    """Return the configured detector. A plug-in is loaded from ``base_dir`` or the current directory; PluginError is
    raised if that fails."""
    name = config.planning.detector
    if name == "regex":
        return RegexDetector(tuple(config.logging.strategic_grams or STRATEGIC_GRAMS))
    return PluginDetector(load_function(name, base_dir, "[planning] detector ="))


def build_algorithm(
    config: Config, modes: Modes, detector: Detector, tokenizer: Tokenizer, stream: Stream
) -> Algorithm:
    planning_tokens = PlanningTokens(detector, tokenizer)
    steps = [
        _advantage(config, modes),
        planning_tokens,
        # Before token credit, which weights the token advantages that this step sets.
        SpreadAdvantage(config.algorithm.keeps_uniform_groups),
        TokenUncertainty(modes.uncertainty),
        *_token_credit(config, modes, stream),
        # After token credit, which distributes only the reward.
        *_teacher(config),
        # Last: M2PO reads the final advantages, and the divisor counts the tokens that still train.
        *_rejection(config),
    ]
    return Algorithm(steps, planning_tokens.mark)


def _advantage(config: Config, modes: Modes) -> CreditStep:
    if config.distillation.teacher_only:
        return ZeroAdvantage()
    if config.algorithm.critic:
        return GaeAdvantage(config.critic, RewardKL(config.algorithm.kl_in_reward, config.algorithm.reward_kl_coef))
    formula = None
    if isinstance(modes.advantage, str):
        formula = partial(GROUP_ADVANTAGES[modes.advantage], **config.algorithm.parameters_of("advantage_mode"))
    reward_name = config.environment.provider or config.reward.type
    facts = advantage_of(modes.advantage)
    return GroupAdvantage(modes.advantage, facts, formula, _turn_credit(config), reward_name)


def _turn_credit(config: Config) -> TurnCredit | None:
    algorithm = config.algorithm
    if algorithm.turn_credit == "episode":
        return None
    return TurnCredit(algorithm.turn_discount, algorithm.state_weight if algorithm.turn_credit == "state" else None)


def _token_credit(config: Config, modes: Modes, stream: Stream) -> Sequence[CreditStep]:
    if isinstance(modes.transform, str):
        return TOKEN_CREDIT[modes.transform](config, stream)
    return [TransformPlugin(modes.transform, config.algorithm.keeps_uniform_groups)]


def _teacher(config: Config) -> Sequence[CreditStep]:
    if config.distillation.sampled:
        return [TeacherAdvantage(config.distillation)]
    return [FullVocabularyTeacher(config.distillation)] if config.distillation.full_vocabulary else []


def _rejection(config: Config) -> Sequence[CreditStep]:
    algorithm = config.algorithm
    rejects = algorithm.rejection != "none" or algorithm.rejection_denominator == "kept" or algorithm.loss == "m2po"
    return [RejectionMask(algorithm, config.training.several_updates)] if rejects else []


def objective_of(config: Config, loss: Named) -> Objective:
    algorithm, critic, distillation = config.algorithm, config.critic, config.distillation
    correction = Correction(*algorithm.weight) if algorithm.weight else None
    terms: list[Term] = [PolicyTerm(build_loss(config, loss), correction, logged=algorithm.critic)]
    if algorithm.loss_kl_coef > 0 or config.logging.log_kl:
        terms.append(KLTerm(algorithm.loss_kl_coef))
    if algorithm.entropy_coef > 0 or algorithm.critic:
        terms.append(EntropyTerm(algorithm.entropy_coef, logged=algorithm.critic))
    if distillation.full_vocabulary:
        terms.append(TeacherTerm(distillation.weight, distillation.alpha, distillation.top_tokens))
    if algorithm.critic:
        terms.append(ValueTerm(critic.vf_coef, critic.cliprange_value))
    training = config.training
    return Objective(tuple(terms), algorithm.loss_normalizer, training.temperature, training.max_tokens)


def build_loss(config: Config, loss: Named) -> PolicyLoss:
    """Return the policy loss of a configuration; ``loss`` is the name in ``[algorithm] loss``, or a plug-in's function.

    The fields of a loss are the configuration keys in its row of ``config.modes``, without section and loss name.
    """
    if not isinstance(loss, str):
        return PluginLoss(loss)
    shared = {key.rpartition(".")[2]: value_at(config, key) for key in loss_of(loss).keys}
    return LOSSES[loss](**shared, **config.algorithm.parameters_of("loss"))
