"""Load the user's own code, named as ``module:function`` or as a file.

Modules are searched in the TOML's folder, then in the current directory, then among the installed modules. Only the
modules that the configuration names are loaded.
"""

import importlib
import importlib.util
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from retrain.errors import PluginError, PluginMissing
from retrain.extras import EXTRA_OF, install_line
from retrain.files import search_folders


def load_file(path: Path, name: str) -> ModuleType:
    """Load a ``.py`` file as module ``name``; it can import modules from its folder, as a script can.

    A module already loaded under this name stays in ``sys.modules``. Raises PluginMissing if this is not a Python file;
    exceptions of the module itself pass through.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginMissing(f"{path} is not a Python file")
    _look_in([path.parent])
    module, before = importlib.util.module_from_spec(spec), sys.modules.get(name)
    sys.modules[name] = module  # dataclasses look up the module there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        if before is not None:
            sys.modules[name] = before
    return module


def load_module(name: str, folders: Sequence[Path]) -> ModuleType:
    """Import a module; a file in ``folders`` takes precedence over an installed one. Import errors pass through."""
    _look_in(folders)
    importlib.invalidate_caches()
    file = next((path for folder in folders if (path := folder / f"{name}.py").is_file()), None)
    loaded = sys.modules.get(name)
    if file is None or (loaded is not None and getattr(loaded, "__file__", None) == str(file)):
        return importlib.import_module(name)
    return load_file(file, name)


def load_function(plugin: str, base_dir: Path | None, label: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` names.

    Raises PluginMissing, whose text begins with ``label`` and ``plugin``, if the module is missing, fails to import, or
    has no such function.
    """
    return _load(plugin, base_dir, label)[1]


def _load(plugin: str, base_dir: Path | None, label: str) -> tuple[ModuleType, Callable[..., Any]]:
    module, _, name = plugin.partition(":")
    folders = search_folders(base_dir)
    subject = f"{label} {plugin!r}"
    try:
        loaded = load_module(module, folders)
    except ModuleNotFoundError as error:
        places = ", ".join(map(str, folders))
        fix = f"; type: {install_line(error.name)}" if error.name in EXTRA_OF else ""
        raise PluginMissing(f"{subject}: no module {error.name!r} here or in {places}{fix}") from None
    except (Exception, SystemExit) as error:  # any exception of the user's module at import
        raise PluginMissing(f"{subject}: importing {module!r} failed: {described(error)}") from error
    function = getattr(loaded, name, None)
    if not callable(function):
        raise PluginMissing(f"{subject}: the module {module!r} has no function {name!r}")
    return loaded, function


def plugin_ranges(plugin: str, base_dir: Path | None, label: str) -> dict[str, dict[str, Any]]:
    """Return the ranges of metrics that ``module:function`` declares as attributes of the function (or class) or of its
    module.

    Raises PluginError, whose text begins with ``label`` and ``plugin``, if it cannot be loaded or a range is invalid.
    """
    loaded, function = _load(plugin, base_dir, label)
    try:
        return declared_ranges(function, loaded)
    except PluginError as error:
        raise PluginError(f"{label} {plugin!r}: {error}") from None


def declared_ranges(*owners: object) -> dict[str, dict[str, Any]]:
    """Return ``{"reward": {"min": …, "max": …}, <metric>: {…}}`` from the attributes ``reward_min``, ``reward_max`` and
    ``metrics_ranges``, each from the first owner that has it. Raises PluginError for an invalid range."""

    def attribute(name: str) -> Any:
        return next((getattr(owner, name) for owner in owners if getattr(owner, name, None) is not None), None)

    ends = {"min": attribute("reward_min"), "max": attribute("reward_max")}
    ranges = dict(attribute("metrics_ranges") or {})
    if known := {name: end for name, end in ends.items() if end is not None}:
        ranges["reward"] = known
    for name, limits in ranges.items():
        if wrong := why_no_range(limits):
            raise PluginError(f"its metrics_ranges, reward_min and reward_max have {wrong} for {name!r}")
    return {str(name): dict(limits) for name, limits in ranges.items()}


def described(error: BaseException) -> str:
    """Return an exception in one line, with the innermost file and line outside installed packages.

    A line inside a package says little to the user, and some packages wrap even ``sys.exit`` (wandb does).
    """
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({Path(error.filename or '').name}:{error.lineno})"
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    # Skip this module and its callers, which did not raise the exception.
    loader = max((i for i, (file, _) in enumerate(frames) if file == __file__), default=-1)
    of_import = importlib.__file__, "<frozen importlib"
    raised = [(file, line) for file, line in frames[loader + 1 :] if not file.startswith(of_import)]
    own = [(file, line) for file, line in raised if "site-packages" not in file]
    where = "".join(f" ({Path(file).name}:{line})" for file, line in (own or raised)[-1:])
    return f"{type(error).__name__}: {error}".rstrip(": ") + where


def why_no_range(limits: object) -> str:
    """Return what is wrong with a chart's range, a table with ``min``, ``max`` and ``invert``; "" if it is valid."""
    if not isinstance(limits, Mapping):
        return f"{type(limits).__name__}, not a table with min, max or invert"
    if unknown := [key for key in limits if key not in ("min", "max", "invert")]:
        return f"the key {unknown[0]}, which is none of min, max and invert"
    ends = [limits[key] for key in ("min", "max") if limits.get(key) is not None]
    if any(type(end) not in (int, float) or not math.isfinite(end) for end in ends):
        return "an end that is not a finite number"
    if type(limits.get("invert", False)) is not bool:
        return "an invert that is neither true nor false"
    return "a min that is not below its max" if len(ends) == 2 and ends[0] >= ends[1] else ""


BACKEND_METHODS = ("sample", "train_step", "save", "load")
BACKEND_CAPABILITIES = ("reports_sync_loss", "preserves_token_advantages")


def check_backend_class(backend: object, name: str) -> None:
    """Raise PluginError, whose text begins with ``name``, unless the class has the methods and flags of
    ``retrain.policy.plugin.Backend``. Attributes that are set only on instances count as missing."""
    missing = [method for method in BACKEND_METHODS if not callable(getattr(backend, method, None))]
    if missing:
        raise PluginError(f"{name} has no {missing[0]}(): a backend has {', '.join(BACKEND_METHODS)}")
    for capability in BACKEND_CAPABILITIES:
        if not isinstance(getattr(backend, capability, None), bool):
            raise PluginError(f"{name} does not set {capability} = True or False on its class")


def _look_in(folders: Sequence[Path]) -> None:
    sys.path[:0] = [str(folder) for folder in folders if str(folder) not in sys.path]
