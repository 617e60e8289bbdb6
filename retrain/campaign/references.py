"""What a file refers to beyond itself, looked up before anything is trained: packages, code of the user's own, and a
model that lies on this machine, with its layers.

Nothing of torch is imported here; what the user's modules import is theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from retrain.campaign.plan import plan
from retrain.config import Config, Loaded
from retrain.config.base import is_plugin
from retrain.config.checking import Places
from retrain.config.lines import key_lines
from retrain.config.modes import Need, mode_of
from retrain.config.problems import Mistake
from retrain.config.tasks import Reward
from retrain.environments.sources import HUB
from retrain.errors import ConfigError, PluginError, Problem
from retrain.extras import EXTRA_OF, install_line, is_installed, missing, package_of
from retrain.files import read_json
from retrain.models import find_config
from retrain.models.directory import model_fault
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
SET_SOURCE = "evaluation.sets.{}.source"


def check_references(loaded: Loaded, rewards: bool = False) -> None:
    """Look for the packages that the file needs and for its model, load every function and class that it names, with
    ``rewards`` also those of [reward], and look for the layers that get an adapter.

    Raises ConfigError with one line for each that cannot be used, and for token credit that a backend would flatten.
    """
    problems = list(dict.fromkeys(_problems(loaded, rewards)))
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
        yield from _package_problems(loaded, places, spec.config)
        yield from _model_problems(loaded, places, spec.config)
        if rewards:
            yield from _reward_problems(places, spec.config.reward, folder)


def absent_packages(config: Config) -> Iterator[tuple[str, Any, str]]:
    """(key, its value, module) for every optional package that a run needs and that is not installed."""
    data, reward, logging = config.data, config.reward, config.logging
    wanted: list[tuple[str, Any, str]] = []
    for key, source in (("data.source", data.source), ("data.eval_source", data.eval_source)):
        if source in HUB:
            wanted.append((key, source, "datasets"))
        elif source is not None and source.endswith(".parquet"):
            wanted.append((key, source, "pyarrow"))
    graders = [("reward.type", reward), *((f"reward.components.{i}.type", p) for i, p in enumerate(reward.components))]
    wanted += [(key, "math", "math_verify") for key, grader in graders if grader.type == "math"]
    if config.planning.detector == "semantic":
        wanted.append(("planning.detector", "semantic", "sentence_transformers"))
    if logging.wandb_project is not None:
        wanted.append(("logging.wandb_project", logging.wandb_project, "wandb"))
    wanted += [("logging.report_to", name, name) for name in logging.report_to if name in EXTRA_OF]
    yield from (each for each in wanted if not is_installed(each[2]))


def require_packages(configs: Iterable[Config]) -> None:
    """Raise MissingExtra for the first package that one of these runs needs and that is not installed."""
    for config in configs:
        for key, value, module in absent_packages(config):
            section, _, name = key.partition(".")
            raise missing(f'[{section}] {name} = "{value}"', module)


def _package_problems(loaded: Loaded, places: Places, config: Config) -> Iterator[Problem]:
    """Packages that the run needs and that are not installed."""
    for key, value, module in absent_packages(config):
        path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
        where = _place(loaded, places, key, value) if len(path) == 2 else places.find(path)[1]
        message = f'is "{value}", which needs the package {package_of(module)}'
        yield Problem(where, Mistake(path, message).key, message, install_line(module))


def _model_problems(loaded: Loaded, places: Places, config: Config) -> Iterator[Problem]:
    """What keeps the model from being loaded, as far as names, sizes and headers of its files tell; where nothing does,
    layers that it does not have."""
    model = config.model
    if config.backend.backend != "local":
        return
    if fault := model_fault(model.model, trust_remote_code=model.trust_remote_code):
        where = _place(loaded, places, "model.model", model.model)
        yield Problem(where, "model.model", f'is "{model.model}": {fault}')
    else:
        yield from _target_problems(loaded, places, config)


def named_code(config: Config) -> Iterator[tuple[str, str]]:
    """(key, ``module:function``) of all code besides rewards that a configuration names."""
    for key in (*KEYS, *SOURCES):
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if is_plugin(value):
            yield key, value
    for index, each in enumerate(config.evaluation.sets):
        if each.source is not None and is_plugin(each.source):
            yield SET_SOURCE.format(index), each.source


def is_source(key: str) -> bool:
    """Whether the key names a source of problems."""
    return key in SOURCES or key.startswith("evaluation.sets.")


def _capability_problems(loaded: Loaded, places: Places, config: Config, backend: Any) -> Iterator[Problem]:
    """Token credit that needs what this backend does not do."""
    algorithm, name = config.algorithm, config.backend.backend
    mode = algorithm.transform_mode
    if mode != "none" and not backend.preserves_token_advantages:
        where = _place(loaded, places, "algorithm.transform_mode", mode)
        message = f'is "{mode}", which gives tokens different advantages, and backend {name} flattens them'
        yield Problem(where, "algorithm.transform_mode", message, 'transform_mode = "none"')
    for key, fix in (
        ("transform_mode", 'transform_mode = "gtpo"'),
        ("uncertainty_kind", 'uncertainty_kind = "surprisal"'),
    ):
        wants, dotted = getattr(algorithm, key), f"algorithm.{key}"
        if Need.ENTROPY in mode_of(key, wants).needs and not getattr(backend, "gives_entropy", False):
            message = f'is "{wants}", which needs the entropy of whole distributions; backend {name} gives none'
            yield Problem(_place(loaded, places, dotted, wants), dotted, message, fix)
            return


def _target_problems(loaded: Loaded, places: Places, config: Config) -> Iterator[Problem]:
    """Names in ``target_modules`` that mean no layer; where only the loaded model tells its layers, nothing here."""
    key, targets = "lora.target_modules", config.lora.target_modules
    path = find_config(config.model.model, config.model.revision)
    layers = None if path is None else dense_layers(read_json(path))
    if layers is not None:
        for message, fix in target_mistakes(targets, layers, "lm_head"):
            yield Problem(_place(loaded, places, key, targets), key, message, fix)


def _reward_problems(places: Places, reward: Reward, folder: Path) -> Iterator[Problem]:
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
    return places.find(tuple(int(part) if part.isdigit() else part for part in key.split(".")))[1]
