"""What ``explain --devices`` says: memory, cohorts, order and time on devices that are not here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from retrain.commands.output import duration, size
from retrain.errors import UsageError
from retrain.wording import plural

if TYPE_CHECKING:
    from retrain.campaign.planning.devices import Fleet
    from retrain.campaign.planning.plan import Plan, RunSpec
    from retrain.campaign.running.forecast import Forecast, Range


def forecast_json(plan: Plan, fleet: Fleet, one_process: bool) -> dict[str, Any]:
    """The forecast of a plan as plain data, with what it takes for granted. Raises UsageError where the model's sizes
    are not known."""
    from retrain.campaign.planning.architecture import architecture_of
    from retrain.campaign.running.forecast import forecast
    from retrain.commands.problems import problem_lines, typical

    config = plan.specs[0].config
    architecture = architecture_of(config.model.model, config.model.revision)
    if architecture is None:
        raise UsageError(missing_words(config.model.model))
    prompt_tokens = typical(problem_lines([spec.config for spec in plan.specs], plan.folder)[1])
    found = forecast(plan.specs, architecture, fleet, prompt_tokens, one_process)
    return {**asdict(found), "assuming": assumed(plan.specs[0], prompt_tokens)}


def missing_words(model: str) -> str:
    """Why nothing can be said of memory and time."""
    return (
        f"{model}: its config.json is not on this machine: no memory or time estimate; type retrain try FILE, which "
        "fetches the model, or give the directory of one as [model] model"
    )


def assumed(spec: RunSpec, prompt_tokens: int | None) -> list[str]:
    """What the forecast takes for granted."""
    from retrain.campaign.planning.costs import BEST, LIKELY, WORST, assumptions, work_of

    every, operations, _, *rest = assumptions(spec.config)
    return [
        f"prompts of {work_of(spec.config, prompt_tokens).prompt} tokens",
        every,
        operations,
        f"{LIKELY.words}, at best {BEST.words.removesuffix(' are reached')}, at worst "
        f"{WORST.words.removesuffix(' are reached')}",
        f"a layer's operations take {1e6 * LIKELY.layer_seconds:.0f} µs to launch for a token ("
        f"{1e6 * BEST.layer_seconds:.0f} to {1e6 * WORST.layer_seconds:.0f})",
        *rest,
        "starting, loading, saving, grading and failures take no time, and no rule ends a run early",
        "peaks are the makers' figures, GB are 10⁹ bytes; nothing was measured on these devices",
    ]


def forecast_lines(specs: Sequence[RunSpec], found: Forecast, fleet: Fleet, one_process: bool) -> list[tuple[str, str]]:
    """(name, text) of every line about a forecast, without its assumptions."""
    config, device = specs[0].config, fleet.device
    lines = [
        (
            "devices",
            f"{fleet.words}: {device.memory / 1e9:g} GB, {device.flops / 1e12:g} TFLOP/s in bf16 and"
            f" {device.bandwidth / 1e12:g} TB/s each",
        )
    ]
    if config.backend.devices == "cpu":
        lines.append(("careful", '[backend] devices = "cpu" would leave them alone: type --set backend.devices=auto'))
    if found.workers > 1 and config.campaign.executor == "inprocess":
        lines.append(
            (
                "careful",
                "one process trains on one of them: train with --executor processes on one machine, ray or slurm on "
                "several",
            )
        )
    if config.backend.shard != "none" and fleet.count > 1:
        alone = one_process or config.campaign.executor == "inprocess"
        having = "all of them" if alone else f"{min(fleet.count, config.gpus_per_worker)} of them"
        words = (
            f"each run has {having} together ([backend] shard): memory is that of each, times are those of one by "
            "itself, and what goes between them is not counted"
        )
        lines.append(("ranks", words))
    lines.append(("memory", memory_words(found, config.campaign.workers_per_gpu)))
    if found.refusal:
        return [*lines, ("careful", f"training would end at once: {found.refusal}")]
    if found.note:
        lines.append(("", found.note))
    lines.append(("cohorts", cohort_words(found, single=not specs[0].is_campaign or one_process)))
    one, whole = found.step_seconds, found.seconds
    largest = plural(max(found.cohorts), "run")
    lines += [
        ("time", f"a step of {largest}: {range_words(one)}, {found.sampling_share:.0%} of it sampling"),
        ("", f"a cohort of {largest}: {range_words(found.cohort_seconds)}"),
        ("", f"all of it: {range_words(whole)}"),
        ("GPU-hours", f"{hours_words(found.gpu_hours)}, {idle_words(found)}"),
    ]
    return lines + [("" if i else "waits", text) for i, text in enumerate(wait_lines(specs, found))]


def range_words(value: Range) -> str:
    """As in "about 3.2 h (1.5 h to 7 h)"."""
    return f"about {_seconds(value.likely)} ({_seconds(value.best)} to {_seconds(value.worst)})"


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 10 else duration(value)


def hours_words(value: Range) -> str:
    """As in "about 205 (96 to 448)"."""
    return f"about {_number(value.likely)} ({_number(value.best)} to {_number(value.worst)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def memory_words(found: Forecast, sharing: int) -> str:
    """What a device holds, and how many runs fit beside each other."""
    from retrain.campaign.running.forecast import MOST_LANES

    memory = found.memory
    part = f"each device has {size(memory.total)}"
    if sharing > 1 and found.workers > 1:
        part = f"a worker has 1/{sharing} of a device, {size(memory.total)}"
    again = f", the weights in bfloat16 for updates {size(memory.copy)}" if memory.copy else ""
    words = (
        f"{part}: model {size(memory.base)}{again}, adapters and optimizers of {plural(memory.lanes, 'run')}"
        f" {size(memory.lanes_take)}, and by turns {size(memory.update)} to train on {memory.update_tokens:,} tokens at"
        " a time"
    )
    if memory.rows:
        words += f" and {size(memory.decoding)} to decode {plural(memory.rows, 'sequence')} at once"
    most = f"{memory.fitting:,}" if memory.fitting < MOST_LANES else f"{MOST_LANES:,} or more"
    if not memory.fitting:
        return f"{words}; not even one run fits"
    return f"{words}; {most} {'run fits' if memory.fitting == 1 else 'runs fit'} together"


def cohort_words(found: Forecast, single: bool) -> str:
    """How the runs are cut, and who has nothing to do."""
    sizes = Counter(found.cohorts)
    cut = " and ".join(f"{many} of {plural(runs, 'run')}" for runs, many in sizes.items())
    words = f"{cut}, for {plural(found.workers, 'worker')}: {plural(found.rounds, 'round')}"
    if found.unused:
        why = "there are not more cohorts"
        if len(found.cohorts) >= found.workers:
            why = "one process trains on one device" if single else "there are not more workers"
        words += f"; {found.unused:,} of {plural(found.devices, 'device')} never have anything to do, because {why}"
    return words


def idle_words(found: Forecast) -> str:
    """How much of what is paid for trains nothing."""
    share = found.idle_gpu_hours / found.gpu_hours.likely if found.gpu_hours.likely else 0
    return f"{share:.0%} of them idle"


def wait_lines(specs: Sequence[RunSpec], found: Forecast) -> list[str]:
    """What waits for what, in the order of the clock."""
    lines = []
    waiting = len(found.cohorts) - found.workers
    if waiting > 0:
        lines.append(f"{plural(waiting, 'cohort')} for a free worker, in the order of the plan")
    if found.first_look is not None:
        look = found.first_look
        begun = f"{look.begun:,} of {plural(found.runs, 'run')} have begun by then, the others may never"
        if look.begun == found.runs:
            begun = f"all {plural(found.runs, 'run')} have begun by then"
        lines.append(f"the first look for whole seeds, after about {_seconds(look.seconds)}: {begun}")
    if found.squeezes:
        begin, end = min(begin for begin, _ in found.squeezes), max(end for _, end in found.squeezes)
        what = "the squeeze analysis" if len(found.squeezes) == 1 else f"the {len(found.squeezes)} squeeze analyses"
        whose = "its run" if len(found.squeezes) == 1 else "their runs"
        last = (
            f"the last to end: {_seconds(end - found.trained_after)} more"
            if end > found.trained_after
            else "beside the others"
        )
        lines.append(f"{what} for {whose}, begun after about {_seconds(begin)}, {last}")
    if len(specs) > 1:
        lines.append("comparison and report for all of it; they take no GPU")
    return lines or ["nothing for anything: there is one run"]
