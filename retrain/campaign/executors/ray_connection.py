"""Connect to a Ray cluster, and send retrain's code to its nodes."""

import importlib
import logging
import math
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import retrain
from retrain.config import Config
from retrain.errors import UsageError
from retrain.extras import is_installed, missing
from retrain.ownership import owner_of
from retrain.records.schema.base import Row

ANSWER_SECONDS = 10.0
# Seconds within which a node must see the campaign's directory: network file systems cache directory entries
SHARED_SECONDS = 15.0
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Set in processes of `ray job submit`, whose runtime_env takes precedence
# Patterns of files beside the campaign's file that are not sent to other machines
LEFT_OUT = [".git", ".venv", "__pycache__", "logs", "build", "*.safetensors", "*.gguf"]


def ray_module() -> Any:
    """Import Ray without usage reports, and so that logs of a lost node are not printed. Raises MissingExtra."""
    if not is_installed("ray"):
        raise missing('[campaign] executor = "ray"', "ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # otherwise the last logs of a lost node are printed here
    import ray

    return ray


def connect(config: Config, folder: Path) -> None:
    """Connect to the cluster. With ``[ray] ship``, other machines get retrain's code and ``folder``'s files."""
    ray, mine = ray_module(), dict(config.ray.runtime_env)
    address = _head_address(config.ray.address)
    _init(address, mine)
    elsewhere = any(node["Alive"] and node["NodeManagerHostname"] != socket.gethostname() for node in ray.nodes())
    if elsewhere and config.ray.ship and JOB_CONFIG not in os.environ:
        ray.shutdown()
        package = str(Path(retrain.__file__).parent)
        shipped = {"py_modules": [package], "working_dir": str(folder.absolute()), "excludes": LEFT_OUT}
        _init(address, shipped | mine)


def _head_address(address: str) -> str:
    """Return the address of the cluster's head. Raises UsageError if it does not answer within ``ANSWER_SECONDS``; Ray
    itself would retry for minutes."""
    advice = "type: ray start --head, or --address local to have a cluster started for this campaign"
    try:
        where = importlib.import_module("ray._private.services").canonicalize_bootstrap_address(address)
    except (ConnectionError, ValueError, OSError) as error:
        raise UsageError(f'there is no Ray cluster at address "{address}"; {advice}') from error
    if where is None:
        return address
    host, _, port = where.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()
    except OSError as error:
        raise UsageError(f'no Ray cluster answers at {where} (address "{address}"): {error}; {advice}') from error
    return where


def _init(address: str, runtime_env: Row) -> None:
    ray = ray_module()
    options: Row = {"include_dashboard": False} if address == "local" else {}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address,
            runtime_env=runtime_env or None,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **options,
        )
    except (ConnectionError, RuntimeError, ValueError, TypeError) as error:
        raise UsageError(f'the Ray cluster at address "{address}" cannot be used: {first_line(error)}') from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray installs its own handler


def first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def last_line(error: Exception) -> str:
    # Ray puts the text of the original error last
    return ([line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__])[-1]


def sees(directory: Path, owner: str) -> bool:
    pause = threading.Event()
    for _ in range(math.ceil(SHARED_SECONDS)):
        mark = owner_of(directory)
        if mark is not None and mark.id == owner:
            return True
        pause.wait(1.0)
    return False
