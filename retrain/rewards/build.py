"""From the ``[reward]`` section to a grader."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.errors import ConfigError, Problem
from retrain.rewards.base import Grader, Reward
from retrain.rewards.custom import CustomReward
from retrain.rewards.judge import JudgeReward
from retrain.rewards.rules import FormatReward, MatchReward
from retrain.rewards.symbolic import MathReward
from retrain.rewards.weighted import Component, WeightedReward

TYPES = ("match", "math", "format", "judge", "custom", "weighted")


def build_grader(config: Any, base_dir: Path | None = None) -> Grader:
    """The grader of a ``[reward]`` section (any object with its attributes).

    ``base_dir`` is the folder of the TOML: relative paths and modules are looked up there, then in the current
    directory. Raises MissingExtra, PluginError, UsageError or ConfigError for what the section names and is not there.
    """
    return Grader(build_reward(config, base_dir))


def build_reward(config: Any, base_dir: Path | None = None, workers: int = 2, timeout_s: float = 10.0) -> Reward:
    """The reward of a section or of one of its components, which inherit ``workers`` and ``timeout_s``.

    Its ``name`` is the section's, where that has one. Raises as ``build_grader``.
    """
    reward = _new_reward(config, base_dir, workers, timeout_s)
    reward.name = _get(config, "name", reward.name)
    return reward


def _new_reward(config: Any, base_dir: Path | None, workers: int, timeout_s: float) -> Reward:
    kind = _get(config, "type", "match")
    limits = {"workers": _get(config, "workers", workers), "timeout_s": _get(config, "timeout_s", timeout_s)}
    strict = _get(config, "strict", True)
    if kind == "match":
        return MatchReward(strict)
    if kind == "format":
        return FormatReward()
    if kind == "math":
        return MathReward(**limits, strict=strict)
    if kind == "judge":
        model = _required(config, "judge_model", 'judge_model = "the model\'s name at the endpoint"')
        return JudgeReward(model, _get(config, "judge_url", None), _get(config, "judge_api_key_env", None), **limits)
    if kind == "custom":
        module = _required(config, "custom_module", 'custom_module = "my_reward.py"')
        return CustomReward(module, _get(config, "custom_function", "score"), base_dir=base_dir, **limits)
    if kind == "weighted":
        fix = 'components = [{ type = "math" }, { type = "format", weight = 0.1, offset = -1.0 }]'
        return _weighted(_required(config, "components", fix), base_dir, limits)
    raise _mistake("type", f"is {kind!r}, no reward of this name", f'type = "match" (one of {", ".join(TYPES)})')


def _weighted(sections: Any, base_dir: Path | None, limits: dict[str, Any]) -> WeightedReward:
    components: list[Component] = []
    try:
        for section in sections:
            if _get(section, "type", "match") == "weighted":
                raise _mistake("components", "a weighted sum inside a weighted sum", "list its components directly")
            reward = build_reward(section, base_dir, **limits)
            if reward.name in [component.name for component in components]:
                reward.close()
                raise _mistake("components", f"two are named {reward.name!r}", 'give each its own: name = "…"')
            components.append(
                Component(reward.name, reward, _get(section, "weight", 1.0), _get(section, "offset", 0.0))
            )
    except BaseException:
        WeightedReward(components).close()  # workers that an earlier component has started
        raise
    return WeightedReward(components)


def _get(config: Any, key: str, default: Any) -> Any:
    """The value of ``key`` in an object or mapping; ``default`` when it is absent or None."""
    value = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
    return default if value is None else value


def _required(config: Any, key: str, fix: str) -> Any:
    value = _get(config, key, None)
    if not value:
        raise _mistake(key, f'type = "{_get(config, "type", "match")}" needs it', fix)
    return value


def _mistake(key: str, message: str, fix: str) -> ConfigError:
    return ConfigError([Problem("configuration", f"reward.{key}", message, fix)])
