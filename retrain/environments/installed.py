"""List environments, tools and rewards that are installed here, without importing them, and describe arguments."""

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from pydantic import BaseModel

from retrain.environments.arguments import did_you_mean
from retrain.environments.providers import PROVIDERS
from retrain.environments.tool_use import OURS
from retrain.errors import RetrainError, UsageError
from retrain.extras import EXTRAS, install_line, is_installed
from retrain.plugins import described
from retrain.sandbox import sandbox

READY = "ready"
ABOUT = {
    "reasoning_gym": "generated problems with verifiable answers, one turn each",
    "verifiers": "tasksets of verifiers 0.4; environments with load_environment up to 0.3",
    "openenv": "environments behind an OpenEnv server, one that runs or one that each worker starts",
}
_GYM_NAME = re.compile(r'^(?:DATASET_NAME = |register_dataset\(\s*)"(\w+)"', re.MULTILINE)


class Capability(NamedTuple):
    """Something to train with. ``state``: "ready", else what to install or why it does not work."""

    kind: str
    name: str
    state: str
    about: str


class Argument(NamedTuple):
    name: str
    type: str
    default: str


def capabilities() -> Iterator[Capability]:
    def state(package: str) -> str:
        return READY if is_installed(package) else install_line(package)

    for name, about in ABOUT.items():
        if name == "reasoning_gym" and is_installed(name):
            about = f"{len(gym_names())} data sets of {about}"
        yield Capability("provider", name, state(name), about)
    for name, about in verifiers_environments() if is_installed("verifiers") else ():
        yield Capability("environment", name, READY, about)
    (bm25,) = EXTRAS["search"].packages
    yield Capability("tool", "calculator", READY, "exact arithmetic")
    yield Capability("tool", "python", sandbox.available() or READY, "runs the model's Python in a sandbox")
    yield Capability("tool", "search", state(bm25), "finds passages of a local corpus")
    yield Capability("reward", "custom", READY, "your functions, also those written for TRL's GRPOTrainer")
    yield Capability("sandbox", "bubblewrap", sandbox.available() or READY, "for programs that the model writes")


def gym_names() -> list[str]:
    """Return the names of reasoning-gym's data sets, read from its source files."""
    spec = importlib.util.find_spec("reasoning_gym")
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    texts = (file.read_text(encoding="utf-8") for folder in folders for file in folder.rglob("*.py"))
    return sorted({name for text in texts for name in _GYM_NAME.findall(text)} - {"composite"})


def verifiers_environments() -> list[tuple[str, str]]:
    """Return name and summary of the installed packages that require verifiers."""
    found = {}
    for package in distributions():
        required = {re.split(r"[^\w.-]", each, maxsplit=1)[0].lower() for each in package.requires or ()}
        if "verifiers" in required and package.name != "retrain":
            found[package.name] = str(package.metadata.json.get("summary", ""))
    return sorted(found.items())


def arguments_of(name: str) -> list[Argument]:
    """Return the settings of a tool, or everything that ``args`` takes for a provider, a data set of reasoning-gym or
    an environment of verifiers. Imports it. Raises UsageError for an unknown name or a failed import."""
    try:
        named = {each.name: each for subject in _subjects(name) for each in _parameters(subject)}
    except RetrainError:
        raise
    except Exception as error:  # any exception of the environment's code
        raise UsageError(f"{name} cannot be imported: {described(error)}") from error
    return [each for each in named.values() if each.name != "id"]


def _subjects(name: str) -> list[Any]:
    """Return the classes, models and functions whose parameters are the arguments of ``name``."""
    if name in OURS or name in PROVIDERS:
        module, _, attribute = (OURS | PROVIDERS)[name].partition(":")
        attribute = {"openenv": "Arguments", "reasoning_gym": "Numbers"}.get(name, attribute)
        subject = getattr(importlib.import_module(module), attribute)
        return [subject] if inspect.isclass(subject) else []  # a function has no settings
    if name in (data_sets := gym_names()):
        return [importlib.import_module("reasoning_gym.factory").DATASETS[name][1], *_subjects("reasoning_gym")]
    module = name.replace("-", "_")
    if not is_installed("verifiers") or not is_installed(module):
        known = [*OURS, *PROVIDERS, *data_sets, *(environment for environment, _ in verifiers_environments())]
        hint = did_you_mean(name, known) or ": retrain environments lists them"
        raise UsageError(f"there is no environment, tool or data set {name!r} here{hint}")
    load = getattr(importlib.import_module(module), "load_environment", None)
    return [load or importlib.import_module("verifiers.v1").taskset_config_type(name), *_subjects("verifiers")]


def _parameters(subject: Any) -> list[Argument]:
    is_model = inspect.isclass(subject) and issubclass(subject, BaseModel)
    types = get_type_hints(subject if is_model or inspect.isfunction(subject) else subject.__init__)
    listed = []
    for each in inspect.signature(subject).parameters.values():
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            default = "required" if each.default is each.empty else repr(each.default)
            listed.append(Argument(each.name, inspect.formatannotation(types.get(each.name, object)), default))
    return listed
