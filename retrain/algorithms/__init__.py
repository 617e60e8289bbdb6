"""Algorithms: from rewards to what each token is trained with. The tables map names in TOML files to code.

A new advantage is a function of the rewards of a group in a file under ``credit/``, a row of ``GROUP_ADVANTAGES``, and
a row of ``retrain.config.modes``, whose ``parameters`` are keyword arguments of the function (``docs/extending.md``).
"""

from collections.abc import Callable, Sequence
from functools import partial

from retrain.algorithms.algorithm import Algorithm, CreditStep, StepContext
from retrain.algorithms.credit.entropy_mask import EntropyMask
from retrain.algorithms.credit.gae import GaeAdvantage, RewardKL
from retrain.algorithms.credit.group_advantage import Formula, GroupAdvantage, ZeroAdvantage, dr_grpo, grpo, maxrl, rloo
from retrain.algorithms.credit.gtpo import GtpoWeights
from retrain.algorithms.credit.gtpo_paper import GtpoPaper
from retrain.algorithms.credit.hicra import Hicra
from retrain.algorithms.credit.planning_tokens import Detector, PlanningTokens
from retrain.algorithms.credit.rejection_mask import RejectionMask
from retrain.algorithms.credit.sepa_pooling import SepaPooling
from retrain.algorithms.credit.spread import SpreadAdvantage
from retrain.algorithms.credit.teacher import FullVocabularyTeacher, TeacherAdvantage
from retrain.algorithms.credit.transform_plugin import TransformPlugin
from retrain.algorithms.credit.turns import TurnCredit
from retrain.algorithms.credit.uncertainty import TokenUncertainty
from retrain.algorithms.modes import Modes, load_detector, load_modes
from retrain.config import Config
from retrain.tokenizer import Tokenizer

__all__ = [
    "GROUP_ADVANTAGES",
    "TOKEN_CREDIT",
    "Algorithm",
    "CreditStep",
    "Modes",
    "StepContext",
    "build_algorithm",
    "grpo",
    "load_detector",
    "load_modes",
]

Stream = tuple[int | str, ...]

GROUP_ADVANTAGES: dict[str, Formula] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "maxrl": maxrl,
    "reinforce_pp": dr_grpo,  # whitened over the batch afterwards
}
"""Formula of each ``advantage_mode`` that compares the rollouts of a group."""

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
"""Credit steps of each ``transform_mode``, from the configuration and the run's random stream."""


def build_algorithm(
    config: Config, modes: Modes, detector: Detector, tokenizer: Tokenizer, stream: Stream
) -> Algorithm:
    """Return the credit steps that a configuration asks for, in the order in which they are applied."""
    planning_tokens = PlanningTokens(detector, tokenizer)
    steps = [
        _advantage(config, modes),
        planning_tokens,
        SpreadAdvantage(config.algorithm.keeps_uniform_groups),
        TokenUncertainty(modes.uncertainty),
        *_token_credit(config, modes, stream),
        *_teacher(config),
        *_rejection(config),
    ]
    return Algorithm(steps, planning_tokens.mark)


def _advantage(config: Config, modes: Modes) -> CreditStep:
    if config.distillation.alone:
        return ZeroAdvantage()
    if config.algorithm.critic:
        return GaeAdvantage(config.critic, RewardKL(config.algorithm.kl_in_reward, config.algorithm.reward_kl_coef))
    formula = None
    if isinstance(modes.advantage, str):
        formula = partial(GROUP_ADVANTAGES[modes.advantage], **config.algorithm.parameters_of("advantage_mode"))
    reward_name = config.environment.provider or config.reward.type
    return GroupAdvantage(modes.advantage, formula, TurnCredit.of(config.algorithm), reward_name)


def _token_credit(config: Config, modes: Modes, stream: Stream) -> Sequence[CreditStep]:
    if isinstance(modes.transform, str):
        return TOKEN_CREDIT[modes.transform](config, stream)
    return [TransformPlugin(modes.transform, config.algorithm.keeps_uniform_groups)]


def _teacher(config: Config) -> Sequence[CreditStep]:
    if config.distillation.sampled:
        return [TeacherAdvantage(config.distillation)]
    return [FullVocabularyTeacher(config.distillation)] if config.distillation.whole else []


def _rejection(config: Config) -> Sequence[CreditStep]:
    step = RejectionMask.of(config)
    return [] if step is None else [step]
