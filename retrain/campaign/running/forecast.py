"""What a plan would take on devices that are not here: memory, cohorts, order and time, by calculation alone.

Cohorts are cut, made smaller where they do not fit, and put in order by the code that does so when a campaign runs
(``planning.cohorts``, ``Scheduler``), over an executor that only has a clock. Seconds are those of
``planning.costs.cohort_time``: a token takes what its reading or its arithmetic takes, whichever is more. What is not
counted: starting processes, loading weights, saving, grading, failures, and decisions that end runs early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice

from retrain.campaign.planning.architecture import Architecture
from retrain.campaign.planning.cohorts import cut, smaller_cohorts
from retrain.campaign.planning.costs import (
    BEST,
    LIKELY,
    WORST,
    CohortTime,
    Memory,
    Reached,
    cohort_time,
    decode_seconds,
    estimate_run,
    least_cached_tokens,
    number_bytes,
    shared_memory,
    verified_ranks,
    work_of,
)
from retrain.campaign.planning.devices import Device, Fleet
from retrain.campaign.planning.plan import RunSpec
from retrain.campaign.running.protocol import CohortJob, Job, JobEnded, SqueezeJob
from retrain.campaign.running.scheduler import Scheduler, Work
from retrain.campaign.running.virtual import Span, VirtualExecutor
from retrain.errors import UsageError
from retrain.models.sizes import (
    GPU_COLUMNS,
    GPU_MOST_ROWS,
    GPU_SAMPLING_SHARE,
    LOGITS_COPIES,
    USABLE_SHARE,
    decode_row_bytes,
    fitting_lanes,
)
from retrain.wording import plural

HOUR, GIB = 3600.0, 2**30
MOST_LANES = 1024
"""Beyond which it is not counted how many lanes would fit."""


@dataclass(frozen=True)
class Range:
    """A figure with the devices' peaks reached as well as they may be (``best``), as is ``likely``, and as badly as
    they may be (``worst``)."""

    best: float
    likely: float
    worst: float

    @classmethod
    def of(cls, value: Callable[[Reached], float]) -> Range:
        """This value under each of the three."""
        return cls(value(BEST), value(LIKELY), value(WORST))


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one worker's device with the cohort that takes most: ``total``, of which ``base``, ``copy`` (the weights
    again, for updates in bfloat16) and ``lanes_take``, what its ``lanes`` take, stay, and by turns there is an
    ``update`` of ``update_tokens`` tokens at a time, or ``decoding`` of ``rows`` sequences at once. ``fitting`` lanes
    would fit at most."""

    total: int
    base: int
    copy: int
    lanes: int
    lanes_take: int
    update_tokens: int
    update: int
    rows: int
    decoding: int
    fitting: int


@dataclass(frozen=True)
class FirstLook:
    """The first time that the sequential rule may stop a condition, and how many runs have begun by then."""

    seconds: float
    begun: int


@dataclass(frozen=True)
class Forecast:
    """What a plan takes on a fleet. ``refusal`` says why it would not train there; times are then those of nothing.

    ``cohorts`` are the numbers of runs that step together, in their order; ``rounds`` how many cohorts the busiest
    worker trains one after the other. ``step_seconds`` are those of one step of the largest cohort, of which sampling
    takes ``sampling_share``. ``seconds`` is from the first start to the last end, ``gpu_hours`` that on all devices.
    ``unused`` devices never have anything to do, and of ``gpu_hours`` ``idle_gpu_hours`` are idle, theirs among them.
    ``trained_after`` is the last cohort's end, ``squeezes`` when each analysis begins and ends. Shares and all that
    speaks of an order are the likely case's.
    """

    devices: int
    device: str
    workers: int
    runs: int
    memory: DeviceMemory
    refusal: str = ""
    note: str = ""
    cohorts: list[int] = field(default_factory=list)
    rounds: int = 0
    step_seconds: Range = Range(0, 0, 0)
    sampling_share: float = 0
    cohort_seconds: Range = Range(0, 0, 0)
    seconds: Range = Range(0, 0, 0)
    gpu_hours: Range = Range(0, 0, 0)
    unused: int = 0
    idle_gpu_hours: float = 0
    trained_after: float = 0
    squeezes: list[tuple[float, float]] = field(default_factory=list)
    first_look: FirstLook | None = None


def workers_on(specs: Sequence[RunSpec], devices: int, one_process: bool = False) -> int:
    """How many workers train these runs on so many GPUs; ``one_process``: the one that was started, and no other."""
    config = specs[0].config
    campaign = config.campaign
    if one_process or not specs[0].is_campaign or (config.inference.served and campaign.executor == "inprocess"):
        return 1
    there = min(devices, len(config.backend.named_gpus) or devices)
    most = max(1, there // _devices_each(specs, devices)) * campaign.workers_per_gpu
    return most if campaign.workers == "auto" else min(most, campaign.workers)


def _devices_each(specs: Sequence[RunSpec], devices: int, one_process: bool = False) -> int:
    """With how many of so many devices a worker trains."""
    config = specs[0].config
    if config.backend.shard == "none":
        return 1
    if one_process or not specs[0].is_campaign or config.campaign.executor == "inprocess":
        return devices
    return min(devices, config.gpus_per_worker)


def forecast(
    specs: Sequence[RunSpec],
    architecture: Architecture,
    fleet: Fleet,
    prompt_tokens: int | None = None,
    one_process: bool = False,
) -> Forecast:
    """That of these runs. ``prompt_tokens`` are those of a usual prompt; ``one_process`` trains all of them in the
    process that was started."""
    each = _devices_each(specs, fleet.count, one_process)
    specs = [_with_parts(spec, each) for spec in specs]
    workers = workers_on(specs, fleet.count, one_process)
    share = specs[0].config.campaign.workers_per_gpu if workers > 1 else 1
    of = _Costs(architecture, _part(fleet.device, share), prompt_tokens)
    begun = cut(specs, True, workers)
    start = Forecast(fleet.count, fleet.device.name, workers, len(specs), of.memory(max(begun, key=len)))
    groups, note = list[list[RunSpec]](), ""
    for group in begun:
        fitting = of.fitting(group)
        if fitting == len(group):
            groups.append(group)
            continue
        reason = of.reason(group)
        try:
            groups += smaller_cohorts(group, fitting, reason)
        except UsageError as error:
            return replace(start, refusal=str(error))
        note = note or reason
    largest = max(groups, key=len)
    spans = {reached: _schedule(groups, workers, of, reached) for reached in (BEST, LIKELY, WORST)}
    ends = {reached: max(span.end for span in each) for reached, each in spans.items()}
    likely, step = spans[LIKELY], of.time(largest, LIKELY)
    trained = [span for span in likely if isinstance(span.job, CohortJob)]
    busy = sum(span.end - span.begin for span in likely) / share
    used = each * len({span.slot % (fleet.count // each) for span in likely})
    return replace(
        start,
        memory=of.memory(largest),
        note=note,
        cohorts=[len(group) for group in groups],
        rounds=max(Counter(span.slot for span in trained).values()),
        step_seconds=Range.of(lambda reached: of.time(largest, reached).step),
        sampling_share=step.sampling / (step.sampling + step.training),
        cohort_seconds=Range.of(lambda reached: of.time(largest, reached).seconds),
        seconds=Range.of(lambda reached: ends[reached]),
        gpu_hours=Range.of(lambda reached: fleet.count * ends[reached] / HOUR),
        unused=fleet.count - used,
        idle_gpu_hours=(fleet.count * ends[LIKELY] - busy * each) / HOUR,
        trained_after=max(span.end for span in trained),
        squeezes=[(span.begin, span.end) for span in likely if isinstance(span.job, SqueezeJob)],
        first_look=_first_look(specs, trained),
    )


def _with_parts(spec: RunSpec, devices: int) -> RunSpec:
    """The run on so many devices, over all of which its base is cut where it is cut and nothing else is said."""
    backend = spec.config.backend
    if backend.shard != "fsdp2" or backend.ranks != "auto" or backend.named_gpus:
        return spec
    own = spec.config.model_copy(update={"backend": backend.model_copy(update={"ranks": devices})})
    return replace(spec, config=own)


def _part(device: Device, workers: int) -> Device:
    """What each of several workers has of a device."""
    return replace(
        device,
        flops=device.flops / workers,
        bandwidth=device.bandwidth / workers,
        memory=device.memory // workers,
    )


class _Costs:
    """Memory and time of cohorts on one device; those that train the same conditions cost the same."""

    def __init__(self, architecture: Architecture, device: Device, prompt_tokens: int | None):
        self.architecture, self.device, self.prompt_tokens = architecture, device, prompt_tokens
        self._times: dict[tuple[tuple[str, ...], Reached], CohortTime] = {}
        self._fitting: dict[tuple[str, ...], int] = {}

    def time(self, group: Sequence[RunSpec], reached: Reached) -> CohortTime:
        """That of runs that step together."""
        key = (_labels(group), reached)
        if key not in self._times:
            rows, configs = self._rows(group)[0], [spec.config for spec in group]
            self._times[key] = cohort_time(configs, self.architecture, self.device, self.prompt_tokens, rows, reached)
        return self._times[key]

    def squeeze_seconds(self, spec: RunSpec, reached: Reached) -> float:
        """Of measuring a finished adapter's accuracy at every rank that is asked for."""
        held_out, ranks = spec.config.decisive, verified_ranks(spec.config)
        if held_out is None or not ranks:
            return 0.0
        answers, (rows, _) = held_out.problems * held_out.samples, self._rows([spec])
        return ranks * decode_seconds(
            [spec.config], self.architecture, self.device, answers, self.prompt_tokens, rows, reached
        )

    def fitting(self, group: Sequence[RunSpec]) -> int:
        """How many of these runs fit into memory together, by the rule of ``running.fitting``."""
        key = _labels(group)
        if key not in self._fitting:
            self._fitting[key] = fitting_lanes(*self._needs(group))
        return self._fitting[key]

    def memory(self, group: Sequence[RunSpec]) -> DeviceMemory:
        """What a cohort of these runs takes."""
        own = [self._estimate(spec, len(group)) for spec in group]
        together, works = shared_memory(own), [work_of(spec.config, self.prompt_tokens) for spec in group]
        holds, row = self._rows(group)
        rows = min(holds, sum(work.rows for work in works))
        return DeviceMemory(
            total=self.device.memory,
            base=together.base,
            copy=together.update_copy,
            lanes=len(group),
            lanes_take=together.adapter,
            update_tokens=max(memory.micro_batch_tokens for memory in own),
            update=together.training,
            rows=rows,
            decoding=rows * row,
            fitting=self.fitting(list(islice(cycle(group), MOST_LANES))),
        )

    def _rows(self, group: Sequence[RunSpec]) -> tuple[int, int]:
        """How many sequences of a cohort's longest decode at once, 0 where servers do that, and what one takes."""
        architecture, config = self.architecture, group[0].config
        cache = architecture.cache_bytes(number_bytes(config, self.device))
        length = max(work_of(spec.config, self.prompt_tokens).length for spec in group)
        row = decode_row_bytes(length, GPU_COLUMNS, architecture.layers, cache, LOGITS_COPIES * 4 * architecture.vocab)
        together = shared_memory([self._estimate(spec) for spec in group])
        room = max(0, self.device.memory - together.base - together.adapter)
        holds = max(1, min(GPU_MOST_ROWS, int(GPU_SAMPLING_SHARE * room) // row))
        return 0 if config.inference.served else holds, row

    def reason(self, group: Sequence[RunSpec]) -> str:
        """Why not all of these runs fit."""
        usable, copy, update, lanes = self._needs(group)
        base = self._estimate(group[0]).base
        if base > self.device.memory:
            return f"the model alone takes {base / GIB:.1f} GiB, and a worker has {self.device.memory / GIB:.1f} GiB"
        needed = copy + sum(own for own, _ in lanes) + max(sum(cache for _, cache in lanes), update)
        return (
            f"{plural(len(group), 'run')} need {needed / GIB:.1f} GiB beside the model, {usable / GIB:.1f} GiB are "
            f"usable: {fitting_lanes(usable, copy, update, lanes)} fit"
        )

    def _needs(self, group: Sequence[RunSpec]) -> tuple[int, int, int, list[tuple[int, int]]]:
        """The arguments of ``fitting_lanes``."""
        config, architecture = group[0].config, self.architecture
        own = {label: self._estimate(spec) for label, spec in {spec.label: spec for spec in group}.items()}
        width, prompt = number_bytes(config, self.device), work_of(config, self.prompt_tokens).prompt
        cached = architecture.cache_bytes(width) * (not config.inference.served)
        longest = prompt + max(spec.config.training.max_tokens for spec in group)
        return (
            int(USABLE_SHARE * max(0, self.device.memory - own[group[0].label].base)),
            max(memory.update_copy for memory in own.values()),
            longest * architecture.kept_bytes(width),
            [(own[spec.label].adapter, least_cached_tokens(spec.config, prompt) * cached) for spec in group],
        )

    def _estimate(self, spec: RunSpec, lanes: int = 1) -> Memory:
        return estimate_run(spec.config, self.architecture, self.device, self.prompt_tokens, lanes).memory


def _labels(group: Iterable[RunSpec]) -> tuple[str, ...]:
    return tuple(spec.label for spec in group)


class _Undisturbed:
    """Work that nothing interrupts."""

    def give_up(self, reason: str) -> None:
        """See ``Work.give_up``: nothing dies here."""
        raise AssertionError(f"a simulated job was given up: {reason}")


@dataclass(eq=False)
class _Training(_Undisturbed):
    """The work of a cohort."""

    specs: Sequence[RunSpec]
    trains: bool = field(default=True, init=False)
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = frozenset(spec.run_id for spec in self.specs)

    def job(self) -> CohortJob:
        """See ``Work.job``."""
        return CohortJob("", "", [{"run_id": spec.run_id} for spec in self.specs], {})


@dataclass(eq=False)
class _Analysis(_Undisturbed):
    """The analysis of a finished run's adapter."""

    spec: RunSpec
    trains: bool = field(default=False, init=False)
    names: frozenset[str] = field(default=frozenset(), init=False)

    def job(self) -> SqueezeJob:
        """See ``Work.job``."""
        return SqueezeJob("", "", {"run_id": self.spec.run_id}, {})


def _schedule(groups: Sequence[Sequence[RunSpec]], workers: int, of: _Costs, reached: Reached) -> list[Span]:
    """Who does what when, as the scheduler has it."""
    by_id = {spec.run_id: spec for group in groups for spec in group}
    due = {spec.run_id: spec for spec in _analysed([spec for group in groups for spec in group])}

    def seconds(job: Job, now: float) -> float:
        if isinstance(job, SqueezeJob):
            return of.squeeze_seconds(by_id[job.run["run_id"]], reached)
        time = of.time([by_id[run["run_id"]] for run in job.runs], reached)
        return time.seconds - (time.at_start if now > 0 else 0)  # what the untrained model answered is read then

    def after(work: Work, end: JobEnded) -> list[Work]:
        return [_Analysis(due.pop(name)) for name in sorted(work.names & due.keys())]

    executor = VirtualExecutor(workers, seconds)
    Scheduler(executor, lambda event: None, after, lambda: False, 0).carry_out([_Training(group) for group in groups])
    return executor.spans


def _analysed(specs: Sequence[RunSpec]) -> list[RunSpec]:
    """The runs whose adapters are analysed: the first of all, or of each condition."""
    enabled = [spec for spec in specs if spec.config.squeeze.enabled]
    each = bool(enabled) and enabled[0].config.squeeze.runs == "one per condition"
    return list({spec.label: spec for spec in reversed(enabled)}.values()) if each else enabled[:1]


def _first_look(specs: Sequence[RunSpec], trained: Sequence[Span]) -> FirstLook | None:
    """When the first seed is complete; None without a rule that looks."""
    if not specs[0].is_campaign or specs[0].config.campaign.sequential == "off":
        return None
    first = {spec.run_id for spec in specs if spec.seed == specs[0].seed}
    at = max(span.end for span in trained if first & _names(span))
    return FirstLook(at, sum(len(_names(span)) for span in trained if span.begin < at))


def _names(span: Span) -> set[str]:
    assert isinstance(span.job, CohortJob)
    return {run["run_id"] for run in span.job.runs}
