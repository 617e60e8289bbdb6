"""The executor that a plan asks for, and on which devices its workers compute."""

import os
from collections.abc import Callable, Sequence

from retrain.campaign.planning.plan import Plan
from retrain.campaign.running.in_process import Guard, InProcess, allow_all
from retrain.campaign.running.processes import Slot, processes
from retrain.campaign.running.protocol import Executor
from retrain.campaign.running.raycluster import ray_workers
from retrain.campaign.running.slurm import workers_of
from retrain.campaign.running.team import Team, torchrun_rank
from retrain.config import Config
from retrain.device import OWN_GPU, resolve_device
from retrain.engines.server.fleet import Fleet, Launches, Tell
from retrain.errors import UsageError, plural


def executor_of(plan: Plan, guard: Guard = allow_all) -> Executor | InProcess:
    """Return the executor that a plan's configuration selects.

    ``guard`` is called before writes of a run that trains in this process; workers hold leases of their own. Raises
    UsageError when a configured device does not exist, or when torchrun has started processes that nothing uses.
    """
    config = plan.specs[0].config
    if torchrun_rank() is not None and config.backend.shard == "none":
        raise UsageError(
            f'torchrun has started {os.environ["WORLD_SIZE"]} process(es), and with [backend] shard = "none" one '
            'trains: type --set backend.shard="dp", or start retrain without torchrun'
        )
    if torchrun_rank() is not None and config.campaign.executor != "inprocess":
        raise UsageError(
            f"torchrun has started {os.environ['WORLD_SIZE']} process(es), and workers of executor = "
            f'"{config.campaign.executor}" start their ranks themselves: start retrain without torchrun'
        )
    return EXECUTORS[config.campaign.executor](plan, guard)


def slots_of(config: Config) -> list[Slot]:
    """One slot for each worker: a GPU or the asked part of one each, or an equal share of this machine's cores and
    memory."""
    asked, each, share = config.campaign.workers, config.campaign.workers_per_gpu, config.campaign.gpus_per_cohort
    gpus, size = _left_by_servers(config, gpus_of(config)), config.gpus_per_worker
    if not gpus:
        if share != 1:
            raise UsageError(
                f"[campaign] gpus_per_cohort = {share:g} has no effect: this machine shows no GPU; remove the line, or "
                "type --set campaign.gpus_per_cohort=1"
            )
        count = 1 if asked == "auto" else asked
        return [Slot("cpu", max(1, cores() // count), memory=1 / count)] * count
    groups = [gpus[first : first + size] for first in range(0, len(gpus) - size + 1, size)]
    if not groups:
        raise UsageError(
            f"each worker has {size} GPUs ([campaign] gpus_per_cohort, [backend] ranks), and [backend] devices means "
            f"{plural(len(gpus), 'GPU')}; type --set campaign.gpus_per_cohort={len(gpus)}"
        )
    most = each * len(groups)
    count = most if asked == "auto" else asked
    if count > most:
        has = f"a worker has {size} of them" if size > 1 else f"a GPU has {plural(each, 'worker')}"
        raise UsageError(
            f"[campaign] workers = {count}, and [backend] devices means {plural(len(gpus), 'GPU')}: {has}"
            f"{f' with gpus_per_cohort = {share:g}' if each > 1 else ''}; type --workers {most}"
        )
    threads, memory = max(1, cores() // count), min(1.0, share)
    return [Slot(_named(group), threads, _seen(group), memory) for group in (groups * each)[:count]]


def _left_by_servers(config: Config, gpus: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those that servers which are started beside them do not have."""
    asked, backend = config.inference, config.backend
    if not gpus or asked.launch is None:
        return gpus
    if asked.launch_gpus is None:
        raise UsageError(
            "[inference] launch starts servers beside the workers, and nothing says which of "
            f'{plural(len(gpus), "GPU")} are theirs: type --set inference.launch_gpus="{gpus[-1][1]}"'
        )
    theirs = [name.strip() for name in asked.launch_gpus.split(",")]
    there = [visible for _, visible in _visible_gpus()]
    if wrong := [name for name in theirs if name not in there or theirs.count(name) > 1]:
        what = "twice" if wrong[0] in there else f"and this machine shows {', '.join(there)}"
        raise UsageError(
            f"[inference] launch_gpus has {wrong[0]}, {what}: it names GPUs as CUDA_VISIBLE_DEVICES does; type "
            f'--set inference.launch_gpus="{gpus[-1][1]}"'
        )
    if both := [name for name, visible in gpus if backend.named_gpus and visible in theirs]:
        raise UsageError(
            f"[backend] devices has {both[0]}, which [inference] launch_gpus gives to the servers; leave it out of one"
        )
    left = [(name, visible) for name, visible in gpus if visible not in theirs]
    if not left:
        raise UsageError(
            f"[inference] launch_gpus = {asked.launch_gpus} gives all {plural(len(gpus), 'GPU')} to the servers, and "
            "none is left for workers"
        )
    return left


def _fleet(plan: Plan) -> Callable[[Tell], Fleet] | None:
    config = plan.specs[0].config
    if config.inference.launch is None:
        return None
    return lambda tell: Launches(config, plan.directory, tell)


def _named(gpus: Sequence[tuple[str, str]]) -> str:
    return "gpu:" + ",".join(name.removeprefix("gpu:") for name, _ in gpus)


def _seen(gpus: Sequence[tuple[str, str]]) -> str:
    """As ``CUDA_VISIBLE_DEVICES`` has them."""
    return ",".join(visible for _, visible in gpus)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus_of(config: Config) -> list[tuple[str, str]]:
    """The GPUs that the configuration means, each with what ``CUDA_VISIBLE_DEVICES`` calls it; none for a CPU. In a
    process that has been given its GPUs, all that it sees."""
    backend, own = config.backend, bool(os.environ.get(OWN_GPU))
    if backend.devices == "cpu":
        return []

    there = _visible_gpus()
    count = len(there)
    if not count and (own or not backend.named_gpus):
        if backend.devices == "all":
            raise UsageError('devices = "all": this machine shows no GPU; type devices = "auto" or "cpu"')
        resolve_device("auto")  # says why, where there is one that cannot be used
        return []
    names = (not own and backend.named_gpus) or [f"gpu:{index}" for index in range(count)]
    if missing := [name for name in names if int(name.removeprefix("gpu:")) >= count]:
        raise UsageError(f"devices has {missing[0]}: this machine shows {plural(count, 'GPU')}")
    return [there[int(name.removeprefix("gpu:"))] for name in names]


def _visible_gpus() -> list[tuple[str, str]]:
    """All GPUs that this process sees, each with what ``CUDA_VISIBLE_DEVICES`` calls it."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    given = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return [(f"gpu:{index}", given[index] if given else str(index)) for index in range(count)]


def _in_process(plan: Plan, guard: Guard) -> InProcess:
    config = plan.specs[0].config
    return InProcess(None if config.backend.shard == "none" else Team(config), guard=guard)


EXECUTORS: dict[str, Callable[[Plan, Guard], Executor | InProcess]] = {
    "inprocess": _in_process,
    "processes": lambda plan, guard: processes(slots_of(plan.specs[0].config), plan.directory, _fleet(plan)),
    "ray": lambda plan, guard: ray_workers(plan),
    "slurm": lambda plan, guard: workers_of(plan, cores()),
}
