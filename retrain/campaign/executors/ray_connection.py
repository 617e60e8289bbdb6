"""Connect to a Ray cluster, send retrain's code to its nodes, and count the workers that have room in it."""

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
from retrain.errors import UsageError, plural
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
    """Import Ray, with usage reports and the printing of a lost node's logs switched off. Raises MissingExtra."""
    if not is_installed("ray"):
        raise missing('[campaign] executor = "ray"', "ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # otherwise the last logs of a lost node are printed here
    import ray

    return ray


def connect(config: Config, folder: Path) -> None:
    """Connect to the cluster. With ``[ray] ship``, other machines get retrain's code and the files in ``folder``."""
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


# Free or total resources of a node, by Ray's names (CPU, GPU)
Resources = dict[str, float]


def slots_in(nodes: list[Row], config: Config) -> tuple[int, bool]:
    """Return the number of workers and whether they use GPUs. ``nodes``: result of ``ray.nodes()``. Raises UsageError
    if ``gpus_per_cohort`` has no effect because there is no GPU, or if no worker fits on a node."""
    workers, devices = config.campaign.workers, config.backend.devices
    alive: list[Resources] = [node["Resources"] for node in nodes if node["Alive"]]
    gpus = devices == "all" or (devices != "cpu" and any(int(node.get("GPU", 0)) for node in alive))
    if not gpus and config.campaign.gpus_per_cohort != 1:
        raise UsageError(
            f"[campaign] gpus_per_cohort = {config.campaign.gpus_per_cohort:g} has no effect: the Ray cluster has no "
            "GPU; remove the line, or type --set campaign.gpus_per_cohort=1"
        )
    if workers != "auto":
        return workers, gpus
    has_servers = config.inference.launch is not None
    free = _left_by_servers(alive, config, gpus) if has_servers else alive
    if count := sum(_room(node, config, gpus) for node in free):
        return count, gpus
    raise _no_room(config, gpus, has_servers and any(_room(node, config, gpus) for node in alive))


def _no_room(config: Config, gpus: bool, servers_fill_it: bool) -> UsageError:
    resources = _resource_words(config.ray.cpus, actor_gpus(config) if gpus else 0.0)
    if servers_fill_it:
        return UsageError(
            f"beside {plural(config.inference.replicas, 'server')} of [inference] launch the Ray cluster has no room "
            f"for a worker, which asks for {resources} ([ray] cpus, [backend] devices): add a node, or give the "
            "servers less ([ray] server_gpus, server_cpus)"
        )
    return UsageError(
        f"no node of the Ray cluster has {resources}, which is what a worker asks for ([ray] cpus, [backend] devices); "
        "where nodes come when they are asked for, say how many workers: --workers 4"
    )


def _room(node: Resources, config: Config, gpus: bool) -> int:
    room = int(node.get("CPU", 0)) // config.ray.cpus
    if not gpus:
        return room
    gpus_of_node, part = divmod(node.get("GPU", 0.0), 1)
    on_parts = int(part / actor_gpus(config) + 1e-9) if config.gpus_per_worker == 1 else 0
    return min(room, config.campaign.workers_per_gpu * (int(gpus_of_node) // config.gpus_per_worker) + on_parts)


def _left_by_servers(nodes: list[Resources], config: Config, gpus: bool) -> list[Resources]:
    """Return the resources that launched servers leave on each node, if each server takes the node with the most free
    resources. Raises UsageError if a server fits on no node."""
    free, inference = [dict(node) for node in nodes], config.inference
    on_gpus = config.backend.devices != "cpu" and any(node.get("GPU", 0) for node in nodes)
    asks = {"CPU": float(config.ray.server_cpus), "GPU": config.ray.server_gpus if on_gpus else 0.0}
    for _ in range(inference.replicas):
        room = [node for node in free if all(node.get(kind, 0) >= count for kind, count in asks.items())]
        if not room:
            resources = _resource_words(config.ray.server_cpus, config.ray.server_gpus if gpus else 0.0)
            raise UsageError(
                f"the Ray cluster has no room for {plural(inference.replicas, 'server')} of [inference] launch, "
                f"each of which asks for {resources} ([ray] server_cpus, server_gpus); where nodes come when asked "
                "for, say how many workers: --workers 4"
            )
        most = max(room, key=lambda node: (node.get("GPU", 0), node.get("CPU", 0)))
        for kind, count in asks.items():
            most[kind] = most.get(kind, 0) - count
    return free


def actor_gpus(config: Config) -> float:
    return min(config.campaign.gpus_per_cohort, 1.0) if config.gpus_per_worker == 1 else config.gpus_per_worker


def _resource_words(cpus: int, gpus: float) -> str:
    return f"{plural(cpus, 'CPU')} and {amount(gpus, 'GPU')}" if gpus else plural(cpus, "CPU")


def amount(count: float, kind: str) -> str:
    return f"{count:g} of a {kind}" if count % 1 else plural(int(count), kind)
