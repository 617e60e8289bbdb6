"""Select the executor of a plan, and the devices of its workers."""

from collections.abc import Callable
from functools import partial

from retrain.campaign.executors.local import Local
from retrain.campaign.executors.ray import ray_workers
from retrain.campaign.executors.slurm import slurm_workers
from retrain.campaign.planning.plan import Plan
from retrain.campaign.running.protocol import WorkerDevice
from retrain.campaign.running.workers import CampaignWorkers
from retrain.config import Config
from retrain.device import gpus_of, usable_cpus, visible_gpus
from retrain.engines.server.fleet import LocalFleet
from retrain.errors import UsageError, plural


def slots_of(config: Config) -> list[WorkerDevice]:
    requested, per_gpu, share = (
        config.campaign.workers,
        config.campaign.workers_per_gpu,
        config.campaign.gpus_per_cohort,
    )
    cores = usable_cpus() or 1
    size = config.gpus_per_worker
    gpus = _left_by_servers(config, gpus_of(config.backend.devices, config.backend.named_gpus))
    if not gpus:
        if share != 1:
            raise UsageError(
                f"[campaign] gpus_per_cohort = {share:g} has no effect: this machine shows no GPU; remove the line, or "
                "type --set campaign.gpus_per_cohort=1"
            )
        count = 1 if requested == "auto" else requested
        return [WorkerDevice("cpu", max(1, cores // count), memory=1 / count)] * count
    groups = [gpus[first : first + size] for first in range(0, len(gpus) - size + 1, size)]
    if not groups:
        raise UsageError(
            f"each worker has {size} GPUs ([campaign] gpus_per_cohort, [backend] ranks), and [backend] devices means "
            f"{plural(len(gpus), 'GPU')}; type --set campaign.gpus_per_cohort={len(gpus)}"
        )
    most = per_gpu * len(groups)
    count = most if requested == "auto" else requested
    if count > most:
        has = f"a worker has {size} of them" if size > 1 else f"a GPU has {plural(per_gpu, 'worker')}"
        raise UsageError(
            f"[campaign] workers = {count}, and [backend] devices means {plural(len(gpus), 'GPU')}: {has}"
            f"{f' with gpus_per_cohort = {share:g}' if per_gpu > 1 else ''}; type --workers {most}"
        )
    threads, memory = max(1, cores // count), min(1.0, share)
    return [WorkerDevice.of(group, threads, memory) for group in (groups * per_gpu)[:count]]


def _left_by_servers(config: Config, gpus: list[tuple[str, str]]) -> list[tuple[str, str]]:
    inference, backend = config.inference, config.backend
    if not gpus or inference.launch is None or inference.beside_trainer:
        return gpus
    if inference.launch_gpus is None:
        raise UsageError(
            "[inference] launch starts servers beside the workers, and nothing says which of "
            f'{plural(len(gpus), "GPU")} are theirs: type --set inference.launch_gpus="{gpus[-1][1]}"'
        )
    theirs = _launch_gpus(inference.launch_gpus, gpus[-1][1])
    if both := [name for name, visible in gpus if backend.named_gpus and visible in theirs]:
        raise UsageError(
            f"[backend] devices has {both[0]}, which [inference] launch_gpus gives to the servers; leave it out of one"
        )
    free = [(name, visible) for name, visible in gpus if visible not in theirs]
    if not free:
        raise UsageError(
            f"[inference] launch_gpus = {inference.launch_gpus} gives all {plural(len(gpus), 'GPU')} to the servers, "
            "and none is left for workers"
        )
    return free


def _launch_gpus(text: str, example: str) -> list[str]:
    theirs = [name.strip() for name in text.split(",")]
    there = [visible for _, visible in visible_gpus()]
    if wrong := [name for name in theirs if name not in there or theirs.count(name) > 1]:
        what = "twice" if wrong[0] in there else f"and this machine shows {', '.join(there)}"
        raise UsageError(
            f"[inference] launch_gpus has {wrong[0]}, {what}: it names GPUs as CUDA_VISIBLE_DEVICES does; type "
            f'--set inference.launch_gpus="{example}"'
        )
    return theirs


def _local(plan: Plan) -> CampaignWorkers:
    config, directory = plan.specs[0].config, plan.directory
    shared = config.inference.launch is not None and not config.inference.beside_trainer
    launch = partial(LocalFleet, config, directory) if shared else None
    return CampaignWorkers(Local(slots_of(config), directory), directory, launch)


# Constructors of the executors that start workers, by the executor's name in the file
EXECUTORS: dict[str, Callable[[Plan], CampaignWorkers]] = {
    "processes": _local,
    "ray": ray_workers,
    "slurm": lambda plan: slurm_workers(plan, usable_cpus() or 1),
}
