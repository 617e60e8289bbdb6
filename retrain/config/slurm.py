"""[slurm]: what is asked of Slurm for each worker."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from retrain.config.base import Count, Finding, OptionalCount, OptionalText, Role, Section, Text, fault
from retrain.config.describe import toml

if TYPE_CHECKING:
    from retrain.config.root import Config

LIMIT = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
GPU_OPTIONS = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "tres-per-task")
"""Options of sbatch that ask for GPUs; with one of them among the further options nothing else is asked for."""


def minutes_of(limit: str) -> int:
    """A time limit as sbatch takes it, in whole minutes, rounded up: minutes, minutes:seconds, hours:minutes:seconds,
    days-hours, days-hours:minutes or days-hours:minutes:seconds. ValueError for anything else."""
    match = LIMIT.fullmatch(limit)
    if match is None:
        raise ValueError(limit)
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return (int(days or 0) * 24 + hours) * 60 + minutes + (seconds > 0)


def _limit(text: str) -> str:
    try:
        minutes = minutes_of(text)
    except ValueError:
        minutes = 0
    if minutes < 1:
        raise fault(f'is "{text}": no time limit as sbatch takes it', 'time = "4:00:00" or "2-12:00:00"')
    return text


def _memory(text: str | None) -> str | None:
    if text is not None and re.fullmatch(r"\d+[KMGT]?", text) is None:
        raise fault(f'is "{text}": no amount of memory as sbatch takes it', 'memory = "64G"')
    return text


def _option_names(options: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
    own = {
        "array": "workers in [campaign]", "time": "time", "signal": "notice_s", "requeue": "nothing, it is always on",
        "output": "nothing, logs lie in workers/", "error": "nothing, logs lie in workers/",
    }  # fmt: skip
    for name in options:
        if re.fullmatch(r"[a-z][a-z0-9-]*", name) is None:
            raise fault(f'has "{name}": an option of sbatch by its long name', 'exclude = "node7"')
        if name in own:
            raise fault(f'has "{name}", which stands here in its own place', own[name])
    return options


class Slurm(Section):
    """Workers as tasks of one Slurm job array, for `[campaign] executor = "slurm"`. Each has one GPU, none with
    `[backend] devices = "cpu"`."""

    role: ClassVar[Role] = Role.NAMES

    partition: OptionalText = None
    """Where the jobs wait; unset is the cluster's default partition."""
    time: Annotated[str, AfterValidator(_limit)] = "4:00:00"
    """Time limit of a worker as sbatch takes it (`4:00:00`, `2-12:00:00`, or a text of minutes). Training may take
    longer: a worker that runs into the limit saves, waits in the queue again, and goes on."""
    notice_s: Count = 90
    """Seconds before the time limit at which a worker is told (SIGUSR1): room for the step that is under way and for
    saving."""
    account: OptionalText = None
    """What the time is charged to."""
    qos: OptionalText = None
    """Quality of service."""
    constraint: OptionalText = None
    """Features that a node must have, as sbatch takes them (`a100&nvlink`)."""
    gpu_type: OptionalText = None
    """Which GPU, by Slurm's name for it, such as `h100`; unset is any."""
    cpus: OptionalCount = None
    """Cores of a worker, which are also its threads; unset is what the cluster gives."""
    memory: Annotated[OptionalText, AfterValidator(_memory)] = None
    """Memory of a worker, such as `64G`; unset is what the cluster gives."""
    setup: list[Text] = Field(default_factory=list)
    """Lines of shell that run on the node before the worker starts, such as `module load cuda`."""
    extra: Annotated[dict[str, str | int | bool], AfterValidator(_option_names)] = Field(default_factory=dict)
    """Further options of sbatch by their long names, such as `{ exclude = "node7", gres = "gpu:1" }`; one that asks for
    GPUs stands for the GPU that is asked for otherwise."""
    cluster: Literal["slurm", "local"] = "slurm"
    """`local` starts the tasks on this machine without Slurm, on its CPU, to see that a campaign works in this way."""

    @property
    def minutes(self) -> int:
        return minutes_of(self.time)


def slurm_rules(config: Config) -> Iterator[Finding]:
    """What workers on Slurm need; one GPU each is Slurm's to choose."""
    slurm, campaign, devices = config.slurm, config.campaign, config.backend.devices
    if campaign.executor != "slurm":
        return
    if campaign.workers == "auto":
        keys = ("campaign.workers", "campaign.executor")
        yield Finding(keys, 'is "auto": say how many are asked of Slurm', "workers = 4, or --workers 4")
    if devices not in ("auto", "cpu"):
        words = f"is {toml(devices)}: each worker has the GPU that Slurm gives it"
        yield Finding(("backend.devices", "campaign.executor"), words, 'devices = "auto"')
    if slurm.cluster == "local" and devices == "auto":
        words = 'is "local": workers of this machine without Slurm share its CPU'
        yield Finding(("slurm.cluster", "backend.devices"), words, 'cluster = "slurm", or devices = "cpu"')
    if slurm.notice_s >= 60 * slurm.minutes:
        words = f"is {slurm.notice_s}, and the time limit of {slurm.time} is {60 * slurm.minutes} s"
        yield Finding(("slurm.notice_s", "slurm.time"), words, f"notice_s = {15 * slurm.minutes}, or a longer time")
    if slurm.gpu_type is not None and (options := [name for name in GPU_OPTIONS if name in slurm.extra]):
        words = f"has no effect with {options[0]} in extra"
        yield Finding(("slurm.gpu_type", "slurm.extra"), words, "remove one of the two")
    if devices == "cpu" and slurm.gpu_type is not None:
        keys = ("slurm.gpu_type", "backend.devices")
        yield Finding(keys, 'has no effect with devices = "cpu"', "remove one of the two")


def idle_slurm(config: Config) -> Iterator[Finding]:
    """Keys of [slurm] that were given and nobody reads. Not asked of a planned run: that may go on without Slurm, and
    later with it again."""
    if config.campaign.executor == "slurm":
        return
    for name, field in Slurm.model_fields.items():
        if getattr(config.slurm, name) != field.get_default(call_default_factory=True):
            words = f'has no effect with executor = "{config.campaign.executor}"'
            yield Finding((f"slurm.{name}", "campaign.executor"), words, 'remove the line, or executor = "slurm"')
