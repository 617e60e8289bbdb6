"""What a file refers to beyond itself, looked up before anything is trained: code of the user's own, layers of a model
that lies on this machine, and problems.

Nothing of torch is imported here; what the user's modules import is theirs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from retrain.campaign.plan import plan
from retrain.config import Loaded
from retrain.config.base import is_plugin
from retrain.config.checking import Places
from retrain.config.lines import key_lines
from retrain.environments import load_data
from retrain.environments.sources import on_hub
from retrain.errors import ConfigError, DataError, MissingExtra, PluginError, Problem
from retrain.files import read_json
from retrain.models import find_config
from retrain.models.targets import dense_layers, target_mistakes
from retrain.plugins import check_backend_class, described, load_function, plugin_ranges, search_folders

KEYS = (
    "algorithm.advantage_mode",
    "algorithm.transform_mode",
    "algorithm.uncertainty_kind",
    "algorithm.loss",
    "planning.detector",
    "backend.backend",
)
"""Keys that name code which runs in the training process."""
SOURCES = ("data.source", "data.eval_source")


def check_references(loaded: Loaded, rewards: bool = False) -> None:
    """Load every function and class that the file names, with ``rewards`` also those of [reward], look for the layers
    that get an adapter, and read the problems.

    Raises ConfigError with one line for each that cannot be used, and for token credit that a backend would flatten.
    """
    problems = list(dict.fromkeys([*_problems(loaded, rewards), *data_problems(loaded)]))
    if problems:
        raise ConfigError(problems)


def _problems(loaded: Loaded, rewards: bool) -> Iterator[Problem]:
    places, folder = Places(loaded.path.name, key_lines(loaded.text)), loaded.path.parent
    for spec in plan(loaded):
        for key, value in named_code(spec.config):
            where = _place(loaded, places, key, value)
            try:
                found = load_function(value, folder, "")
                plugin_ranges(value, folder, "")
                if key == "backend.backend":
                    check_backend_class(found, value)
            except PluginError as error:
                reason = str(error).removeprefix(f" {value!r}: ").removeprefix(f"{value} ")
                yield Problem(where, key, f'is "{value}": {reason}')
                continue
            if key == "backend.backend":
                yield from _capability_problems(loaded, places, spec.config, found)
        yield from _target_problems(loaded, places, spec.config)
        if rewards:
            yield from _reward_problems(places, spec.config.reward, folder)


def data_problems(loaded: Loaded) -> list[Problem]:
    """What is wrong with the problems that the file names: of files and directories everything but what the model's
    tokenizer says of them; of the hub's data sets whether they could be read; of functions nothing."""
    places, folder = Places(loaded.path.name, key_lines(loaded.text)), loaded.path.parent
    found: dict[str, Problem | None] = {}
    for config in (spec.config for spec in plan(loaded)):
        wanted = repr((config.data, config.evaluation.problems, config.training.max_examples))
        if wanted not in found:
            found[wanted] = _data_problem(loaded, places, config, folder)
    return [problem for problem in found.values() if problem is not None]


def _data_problem(loaded: Loaded, places: Places, config: Any, folder: Path) -> Problem | None:
    """The first mistake in the problems of one configuration."""
    data, heldout = config.data, config.evaluation.problems
    sources = {"data.source": data.source}
    if data.eval_source is not None and heldout:
        sources["data.eval_source"] = data.eval_source
    local = [key for key, value in sources.items() if not is_plugin(value) and not on_hub(value, folder)]
    for key, value in sources.items():
        try:
            if on_hub(value, folder) and importlib.util.find_spec("datasets") is None:
                raise MissingExtra(f"data source {value!r}", "datasets", "data")
            if local == list(sources) and key == "data.source":
                load_data(data, heldout, config.training.max_examples, config.campaign.seed, folder)
            elif key in local:  # the other one is read when training starts
                split = data.split if key == "data.source" else data.eval_split
                load_data(
                    data.model_copy(update={"source": value, "split": split, "eval_source": None}), 0, None, 0, folder
                )
        except (DataError, MissingExtra) as error:
            named = [name for name, source in sources.items() if source in str(error)]
            key = key if key in named or not named else named[0]
            message = str(error).replace(f"data source {value!r}: ", f'is "{value}": ', 1)
            return Problem(_place(loaded, places, key, sources[key]), key, message)
    return None


def named_code(config: Any) -> Iterator[tuple[str, str]]:
    """(key, ``module:function``) of all code besides rewards that a configuration names."""
    for key in (*KEYS, *SOURCES):
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if is_plugin(value):
            yield key, value


def _capability_problems(loaded: Loaded, places: Places, config: Any, backend: Any) -> Iterator[Problem]:
    """Token credit that needs what this backend does not do."""
    algorithm, name = config.algorithm, config.backend.backend
    mode = algorithm.transform_mode
    if mode != "none" and not backend.preserves_token_advantages:
        where = _place(loaded, places, "algorithm.transform_mode", mode)
        message = f'is "{mode}", which gives tokens different advantages, and backend {name} flattens them'
        yield Problem(where, "algorithm.transform_mode", message, 'transform_mode = "none"')
    wants = "entropy_mask" if mode == "entropy_mask" else algorithm.uncertainty_kind
    if wants in ("entropy_mask", "shannon_entropy") and not getattr(backend, "gives_entropy", False):
        key = "algorithm.transform_mode" if wants == "entropy_mask" else "algorithm.uncertainty_kind"
        message = f'is "{wants}", which needs the entropy of whole distributions; backend {name} gives none'
        fix = 'transform_mode = "gtpo"' if wants == "entropy_mask" else 'uncertainty_kind = "surprisal"'
        yield Problem(_place(loaded, places, key, wants), key, message, fix)


def _target_problems(loaded: Loaded, places: Places, config: Any) -> Iterator[Problem]:
    """Names in ``target_modules`` that mean no layer; where only the loaded model tells its layers, nothing here."""
    key, targets = "lora.target_modules", config.lora.target_modules
    path = None if config.backend.backend != "local" else find_config(config.model.model, config.model.revision)
    layers = None if path is None else dense_layers(read_json(path))
    if layers is not None:
        for message, fix in target_mistakes(targets, layers, "lm_head"):
            yield Problem(_place(loaded, places, key, targets), key, message, fix)


def _reward_problems(places: Places, reward: Any, folder: Path) -> Iterator[Problem]:
    """Modules and functions of rewards of type ``custom``."""
    from retrain.rewards.custom import found_file, is_path, scorer

    parts = [(("reward",), reward), *((("reward", "components", i), part) for i, part in enumerate(reward.components))]
    for path, part in parts:
        if part.type != "custom" or part.custom_module is None:
            continue
        module = part.custom_module
        try:
            if is_path(module):
                module = str(found_file(module, folder))
            scorer(module, part.custom_function, [str(each) for each in search_folders(folder)])
        except (Exception, SystemExit) as error:  # whatever a user's module does when it is imported
            if isinstance(error, PluginError):
                told = str(error).rpartition(f"custom_module = {part.custom_module!r}: ")[2]
            else:
                told = f"importing it failed: {described(error)}"
            key = ".".join(str(each + 1) if isinstance(each, int) else each for each in path) + ".custom_module"
            yield Problem(places.find((*path, "custom_module"))[1], key, f'is "{part.custom_module}": {told}')


def _place(loaded: Loaded, places: Places, key: str, value: Any) -> str:
    """Where the key was written: in the first condition that has the value, else in its section."""
    section, _, name = key.partition(".")
    for index, condition in enumerate(loaded.config.campaign.conditions if loaded.is_campaign else []):
        own = getattr(condition, name, None) if section == "algorithm" else None
        if value in (own, condition.overrides.get(key)):
            for path in ((name,), (key,), (section, name)):
                if places.given(("campaign", "conditions", index, *path)):
                    return places.find(("campaign", "conditions", index, *path))[1]
            return places.find(("campaign", "conditions", index))[1]
    return places.find((section, name))[1]
