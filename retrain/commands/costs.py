"""What ``explain`` says a file costs: work, memory, cohorts and time, here or on devices that are not here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from retrain.commands.output import count, duration, size
from retrain.gpus import nvidia_gpus
from retrain.wording import plural

if TYPE_CHECKING:
    from retrain.campaign.planning.architecture import Architecture
    from retrain.campaign.planning.costs import Estimate, Memory
    from retrain.campaign.planning.devices import Device, Fleet
    from retrain.campaign.planning.plan import RunSpec
    from retrain.config import Config


def print_work(specs: list[RunSpec], prompt_tokens: int | None) -> None:
    """Print how much is sampled; ``prompt_tokens`` are those of a usual prompt, where they were measured."""
    from retrain.campaign.planning import costs

    training, works = specs[0].config.training, [costs.work_of(spec.config, prompt_tokens) for spec in specs]
    print(
        f"each run      {training.max_steps} steps × {training.batch_size} prompts × {training.group_size} completions"
        f" = {works[0].completions:,} completions, at most {count(works[0].completions * works[0].tokens)} tokens;"
        f" {works[0].evaluation_completions:,} completions for held-out evaluation"
    )
    if again := training.dynamic_sampling:
        print(f"{'':<14}and up to {again} times as many more in place of prompts that teach nothing (dynamic_sampling)")
    tokens = sum(work.draws * work.completions * work.tokens for work in works)
    print(f"altogether    at most {count(tokens)} sampled training tokens")
    print_squeeze_plan(specs[0].config)


def print_forecast(specs: list[RunSpec], fleet: Fleet, prompt_tokens: int | None, one_process: bool) -> None:
    """Print memory, cohorts, time and order on devices that are not here."""
    from retrain.campaign.planning.architecture import architecture_of
    from retrain.campaign.running.forecast import forecast
    from retrain.commands.forecast import assumed, forecast_lines, missing_words

    config = specs[0].config
    architecture = architecture_of(config.model.model, config.model.revision)
    if architecture is None:
        print(f"model         {missing_words(config.model.model)}")
        return
    found = forecast(specs, architecture, fleet, prompt_tokens, one_process)
    print_models(specs, architecture, fleet.device, prompt_tokens)
    for name, text in forecast_lines(specs, found, fleet, one_process):
        print(f"{name:<14}{text}")
    kinds = kinds_of(specs)
    print_by_kind("assuming", {i: "; ".join(assumed(specs[i], prompt_tokens)) for i in kinds}, kinds)


def print_costs(specs: list[RunSpec], prompt_tokens: int | None) -> None:
    """Print memory and time here with the assumptions behind them."""
    from retrain.campaign.planning import costs
    from retrain.campaign.planning.architecture import architecture_of
    from retrain.campaign.planning.devices import find_device, reference_gpu

    config = specs[0].config
    peaks = config.backpressure
    device = find_device(config.backend.device, peaks.peak_gflops or 0, peaks.peak_bw_gb_s or 0)
    device = replace(device, memory=device.memory // workers_on(device, config))  # of the CPU's machine
    architecture = architecture_of(config.model.model, config.model.revision)
    if architecture is None:
        print(f"model         {config.model.model}: its config.json is not on this machine: no memory or time estimate")
        return
    estimates = [costs.estimate_run(spec.config, architecture, device, prompt_tokens) for spec in specs]
    kinds, works = kinds_of(specs), [costs.work_of(spec.config, prompt_tokens) for spec in specs]
    print_models(specs, architecture, device, prompt_tokens)
    print_by_kind("memory", {i: run_memory_words(estimates[i]) for i in kinds}, kinds)
    if len(specs) > 1:
        print_lanes(
            planned_cohorts(specs, device), {spec.run_id: one for spec, one in zip(specs, estimates, strict=True)}
        )
    total = sum(each.seconds for each in estimates)
    print(f"time          {time_words(specs, total, architecture, device, prompt_tokens)}")
    if device.kind == "cpu" and config.backend.device != "cpu" and total > DAY:
        there = reference_gpu()
        alone = sum(costs.estimate_run(spec.config, architecture, there, prompt_tokens).seconds for spec in specs)
        print(f"              {time_words(specs, alone, architecture, there, prompt_tokens)}")
    assumed = {
        i: "; ".join([f"prompts of {works[i].prompt} tokens", *costs.assumptions(specs[i].config, estimates[i].memory)])
        for i in kinds
    }
    print_by_kind("assuming", assumed, kinds)


def kinds_of(specs: list[RunSpec]) -> dict[int, list[str]]:
    """The first run of every kind, by its place, with the labels of those that it stands for. Kinds differ in their
    critics and in what an update computes; what else differs between conditions is told of the first one alone."""
    from retrain.campaign.planning.costs import assumptions

    places: dict[tuple[object, ...], int] = {}
    kinds: dict[int, list[str]] = {}
    for i, spec in enumerate(specs):
        critic_rank = spec.config.lane_ranks - spec.config.model.lora_rank
        labels = kinds.setdefault(places.setdefault((critic_rank, assumptions(spec.config)), i), [])
        if spec.label not in labels:
            labels.append(spec.label)
    return kinds


def print_by_kind(name: str, texts: dict[int, str], kinds: dict[int, list[str]]) -> None:
    """Print each of these texts once, with the labels of the kinds of runs that it holds for where there are others."""
    for text in dict.fromkeys(texts.values()):
        having = [i for i in kinds if texts[i] == text]
        labels = ", ".join(label for i in having for label in kinds[i])
        print(f"{name:<14}{text}" + ("" if len(having) == len(kinds) else f"  ({labels})"))


def print_models(specs: list[RunSpec], architecture: Architecture, device: Device, prompt_tokens: int | None) -> None:
    """Print the model and what is trained beside it, for every kind of run."""
    from retrain.campaign.planning.costs import estimate_run

    kinds = kinds_of(specs)
    words = {
        i: model_words(
            specs[i].config, architecture, estimate_run(specs[i].config, architecture, device, prompt_tokens)
        )
        for i in kinds
    }
    print_by_kind("model", words, kinds)


def model_words(config: Config, architecture: Architecture, one: Estimate) -> str:
    """The model, and how much of it and beside it is trained."""
    trained = f"{count(one.adapter_parameters)} trained in the adapter (rank {config.model.lora_rank})"
    if one.critic_parameters:
        trained += f", {count(one.critic_parameters)} in the critic"
    return f"{config.model.model}: {count(architecture.parameters())} parameters, frozen; {trained}"


def run_memory_words(one: Estimate) -> str:
    """What one run takes, and of what that is made up."""
    memory = one.memory
    process = f"Python and torch {size(memory.process)}, " if memory.process else ""
    adapter = "adapter, critic and optimizers" if one.critic_parameters else "adapter and optimizer"
    head = f", a copy of the output layer {size(memory.head_copy)}" if memory.head_copy else ""
    if memory.update_copy:
        head += f", the weights in bfloat16 for updates {size(memory.update_copy)}"
    blocks = f", with {size(memory.block_copy)} of weights copied for it" if memory.block_copy else ""
    staying = f"{process}model {size(memory.base)}, {adapter} {size(memory.adapter)}{head}"
    training = f"{size(memory.training)} to train on {memory.micro_batch_tokens:,} tokens at a time"
    if not memory.sampling:  # servers have memory of their own
        return f"{memory_words(memory)} for one run: {staying}, and {training}"
    return (
        f"{memory_words(memory)} for one run: {staying}, and by turns {training} and"
        f" {size(memory.sampling)} to decode all its sequences at once (fewer decode together when memory is short)"
        f"{blocks}"
    )


def print_squeeze_plan(config: Config) -> None:
    """Print what is done about the rank after the first run, or that of each condition, and how many answers that
    takes."""
    from retrain.campaign.planning.costs import verified_ranks

    squeeze, held_out = config.squeeze, config.decisive
    if not squeeze.enabled:
        return
    each = squeeze.runs == "one per condition" and config.is_campaign
    adapters = len(config.campaign.conditions) if each else 1
    after = "after the first run of each condition" if each else "after the first run"
    words = f"{after}: which rank up to {config.model.lora_rank} keeps enough energy"
    if held_out is not None and (evaluated := verified_ranks(config)):
        answers = adapters * evaluated * held_out.problems * held_out.samples
        words += f", and held-out accuracy at up to {evaluated} ranks ({answers:,} completions; [squeeze] verify)"
    print(f"squeeze       {words}")


DAY = 86_400.0


def planned_cohorts(specs: list[RunSpec], device: Device) -> list[list[RunSpec]]:
    """Which runs will step together on this device, if memory allows."""
    from retrain.campaign.planning.cohorts import cut

    return cut(specs, device.kind == "gpu", workers_on(device, specs[0].config))


def workers_on(device: Device, config: Config) -> int:
    """How many workers would train on such devices here."""
    asked = config.campaign.workers
    if config.campaign.executor == "inprocess":
        return 1
    if asked != "auto":
        return asked
    return config.campaign.workers_per_gpu * gpus_on(config) if device.kind == "gpu" else 1


def gpus_on(config: Config) -> int:
    """How many GPUs workers would train on."""
    return len(config.backend.named_gpus) or max(1, len(nvidia_gpus()))


def print_lanes(groups: list[list[RunSpec]], estimates: dict[str, Estimate]) -> None:
    """Print how many runs share the base at a time, and what memory the cohort that takes most needs; ``estimates`` by
    the names of the runs."""
    from retrain.campaign.planning.costs import shared_memory

    sizes = [len(group) for group in groups]
    together = f"{max(sizes)} at a time" if len(set(sizes)) == 1 else " + ".join(map(str, sizes))
    taken = [shared_memory([estimates[spec.run_id].memory for spec in group]) for group in groups]
    most, runs = max(zip(taken, sizes, strict=True), key=lambda each: each[0].peak())
    print(
        f"lanes         {plural(len(groups), 'cohort')} of runs that step together over one base: {together};"
        f" {memory_words(most)} for {runs} of them"
    )


def memory_words(memory: Memory) -> str:
    """What is needed at least, and taken at most where that is more."""
    least, most = memory.least(), memory.peak()
    return f"about {size(least)}" if least == most else f"{size(least)} to {size(most)}"


def time_words(
    specs: list[RunSpec], alone: float, architecture: Architecture, device: Device, prompt_tokens: int | None
) -> str:
    """Time for all runs in their cohorts, and what they would take one after the other (``alone`` seconds)."""
    from retrain.campaign.planning.costs import cohort_seconds

    groups = planned_cohorts(specs, device)
    config = specs[0].config  # workers on a CPU share it, and so do several on one GPU
    gpus = min(gpus_on(config), workers_on(device, config)) if device.kind == "gpu" else 1
    busy = [0.0] * gpus
    for group in groups:  # each to the one that is free first
        first = busy.index(min(busy))
        busy[first] += cohort_seconds([spec.config for spec in group], architecture, device, prompt_tokens)
    total = max(busy)
    each = f" ({duration(alone)} one after the other)" if max(map(len, groups)) > 1 else ""
    return f"about {duration(total)} on {f'{gpus} × ' if gpus > 1 else ''}{device.name}{each}"
