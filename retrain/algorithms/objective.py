"""The objective of a run: which terms its configuration switches on."""

from retrain.algorithms.losses import build_loss
from retrain.config import Config
from retrain.config.modes import Named
from retrain.maths.corrections import Correction
from retrain.policy.objective import Objective
from retrain.policy.terms import EntropyTerm, KLTerm, PolicyTerm, TeacherTerm, Term, ValueTerm


def objective_of(config: Config, loss: Named) -> Objective:
    """Return the objective of a configuration; ``loss`` is ``[algorithm] loss``, or the function that it names."""
    algorithm, critic, distillation = config.algorithm, config.critic, config.distillation
    correction = Correction(*algorithm.weight) if algorithm.weight else None
    terms: list[Term] = [PolicyTerm(build_loss(config, loss), correction, logged=algorithm.critic)]
    if algorithm.loss_kl_coef > 0 or config.logging.log_kl:
        terms.append(KLTerm(algorithm.loss_kl_coef))
    if algorithm.entropy_coef > 0 or algorithm.critic:
        terms.append(EntropyTerm(algorithm.entropy_coef, logged=algorithm.critic))
    if distillation.whole:
        terms.append(TeacherTerm(distillation.weight, distillation.alpha, distillation.top_tokens))
    if algorithm.critic:
        terms.append(ValueTerm(critic.vf_coef, critic.cliprange_value))
    training = config.training
    return Objective(tuple(terms), algorithm.loss_normalizer, training.temperature, training.max_tokens)
