"""Loads what ``[algorithm]`` and ``[planning]`` name: built-in modes by name, code of the user's by module:function."""

from dataclasses import dataclass
from pathlib import Path

from retrain.algorithms.credit.planning_tokens import STRATEGIC_GRAMS, Detector, PluginDetector, RegexDetector
from retrain.config import Config
from retrain.config.algorithm import Algorithm as AlgorithmSection
from retrain.config.modes import MODES, Named
from retrain.plugins import load_function


@dataclass(frozen=True)
class Modes:
    """Formulas of a run: names of built-in ones, or functions of the user's."""

    advantage: Named
    transform: Named
    uncertainty: Named
    loss: Named = "ppo"


def load_modes(algorithm: AlgorithmSection, base_dir: Path | None = None) -> Modes:
    """Return the modes that ``[algorithm]`` names, plug-ins loaded from ``base_dir`` or the current directory.

    Raises PluginError when one cannot be loaded.
    """

    def load(key: str) -> Named:
        name = getattr(algorithm, key)
        return name if name in MODES[key] else load_function(name, base_dir, f"[algorithm] {key} =")

    return Modes(load("advantage_mode"), load("transform_mode"), load("uncertainty_kind"), load("loss"))


def load_detector(config: Config, base_dir: Path | None = None) -> Detector:
    """Return the detector of planning tokens that a configuration names, a plug-in loaded from ``base_dir`` or the
    current directory. Raises PluginError when it cannot be loaded."""
    name = config.planning.detector
    if name == "regex":
        return RegexDetector(tuple(config.logging.strategic_grams or STRATEGIC_GRAMS))
    return PluginDetector(load_function(name, base_dir, "[planning] detector ="))
