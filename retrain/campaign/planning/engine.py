"""Choose the engine of ``[inference] engine = "auto"`` for a plan, and compose the command of ``launch = "auto"``.

Training and ``retrain explain`` call it. The choice is part of the plan from then on: a continued run keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from retrain.campaign.planning.manifest import has_begun, recorded_entries
from retrain.campaign.planning.plan import Plan, base_key, lane_count
from retrain.config import Config, parse_dict
from retrain.config.root import without_unused
from retrain.config.rules import rule_issues
from retrain.config.runs import RunSpec
from retrain.engines.server import automatic
from retrain.engines.server.automatic import GIB, Division, Machine, MemoryNeeds, NoVllm, server_rank
from retrain.errors import RunFailed, UsageError, plural
from retrain.models.layers import Architecture, architecture_of
from retrain.records.reader import planned_configs
from retrain.training.estimate import Device, number_bytes, run_memory, run_size
from retrain.util.text import count

# Parameters below which retrain's own engine samples faster on a GPU (docs/performance.md)
OWN_FASTER = 2_000_000_000
SETTLED = ("engine", "launch", "launch_options", "launch_gpus", "python", "sleep")  # Keys of [inference]
OWN = "Sampling with retrain's own engine: "


def with_engine(plan: Plan, machine: Machine | None = None, broken: str = "", smallest: int = OWN_FASTER) -> Plan:
    """Return the plan with its engine settled, and a note on the choice if a GPU is there.

    Runs that have begun keep their engine. ``broken``: why "auto" cannot take vLLM; ``smallest``: parameters from which
    it does. Raises UsageError if the file asks for a vLLM that cannot run here, or names a GPU that is not here.
    """
    config = plan.specs[0].config
    inference = config.inference
    if inference.launch_gpus is not None:
        machine = machine or automatic.machine_of(config)
        _check_launch_gpus(config, machine)
    if inference.engine != "auto" and inference.launch != "auto":
        return plan
    begun = _begun_settings(plan)
    if begun and inference.engine in ("auto", begun["engine"]):
        return _settled(plan, begun)
    if broken and inference.engine == "auto":
        return _settled(plan, {"engine": "local"}, f"{OWN}{broken}")
    machine = machine or automatic.machine_of(config)
    try:
        served, architecture = _served(plan.specs, machine, smallest if inference.engine == "auto" else 0)
        return _settled(plan, *_vllm(served, machine, architecture))
    except (NoVllm, RunFailed) as error:
        if inference.engine == "auto":
            return _settled(plan, {"engine": "local"}, f"{OWN}{error}" if machine.gpus else "")
        raise UsageError(
            f'[inference] engine = "vllm" cannot start vLLM here: {error}; give the url of a server, or type '
            "--set inference.engine=local"
        ) from error


def _begun_settings(plan: Plan) -> dict[str, Any] | None:
    """Return the recorded engine and its settings, if a run of the directory has begun."""
    configs = planned_configs(plan.directory)
    if not configs or not has_begun(recorded_entries(plan.directory, plan.specs)[0].values()):
        return None
    recorded = next(iter(configs.values()))["inference"]
    return {"engine": "local"} | {key: recorded[key] for key in SETTLED if key in recorded}


def _check_launch_gpus(config: Config, machine: Machine) -> None:
    there = ", ".join(machine.gpus)
    for name in (config.inference.launch_gpus or "").split(","):
        if there and name.strip() not in machine.gpus:
            raise UsageError(
                f"[inference] launch_gpus has {name.strip()}, and this machine shows {there}: it names GPUs as "
                f"CUDA_VISIBLE_DEVICES does; type --set inference.launch_gpus={[*machine.gpus][-1]}"
            )


def _settled(plan: Plan, settings: Mapping[str, Any], note: str = "") -> Plan:
    # [inference] is the same for all runs of a plan.
    data = plan.specs[0].config.to_dict()
    data["inference"] |= settings
    section = parse_dict(without_unused(Config.model_validate(data))).inference
    specs = [replace(spec, config=spec.config.model_copy(update={"inference": section})) for spec in plan.specs]
    source = plan.source
    if source is not None:
        # The file's own configuration is recorded, too.
        changed = source.config.inference.model_copy(update=settings)
        source = replace(source, config=source.config.model_copy(update={"inference": changed}))
    return replace(plan, specs=specs, source=source, notes=(note,) if note else ())


def _check_possible(specs: Sequence[RunSpec], machine: Machine) -> None:
    """Raise NoVllm with the first reason why vLLM cannot sample for these runs, whose configurations must have vLLM as
    the engine: otherwise the rules for servers would not apply."""
    for spec in specs:
        for issue in (issue for issue in rule_issues(spec.config) if not issue.warning):
            section, _, name = issue.keys[0].partition(".")
            raise NoVllm(f"[{section}] {name} {issue.message}")
        if spec.config.distillation.active and spec.config.distillation.teacher is not None:
            raise NoVllm("[distillation] teacher takes memory that vLLM would need")
    if not machine.vllm:
        raise NoVllm(automatic.absence(specs[0].config))


def _served(specs: Sequence[RunSpec], machine: Machine, smallest: int) -> tuple[list[RunSpec], Architecture]:
    """Return the runs with vLLM as their engine, and the sizes of their model. Raises NoVllm if vLLM cannot sample for
    them here, or the model has fewer parameters than ``smallest``."""
    if not machine.gpus:
        raise NoVllm("this machine shows no GPU")
    inference = specs[0].config.inference.model_copy(update={"engine": "vllm", "launch": "auto"})
    served = [replace(spec, config=spec.config.model_copy(update={"inference": inference})) for spec in specs]
    _check_possible(served, machine)
    model, architecture = specs[0].config.model.model, _architecture(specs[0].config)
    if (parameters := architecture.parameters()) < smallest:
        below = f"below {count(smallest)} this engine is faster than vLLM"
        raise NoVllm(f"{model} has {count(parameters)} parameters, and {below}")
    return served, architecture


def _vllm(specs: Sequence[RunSpec], machine: Machine, architecture: Architecture) -> tuple[dict[str, Any], str]:
    """Return the settings of a vLLM for these runs, and the note. Raises NoVllm, and RunFailed for a rank that vLLM
    does not take."""
    config, trainers = specs[0].config, _trainer_gpus(specs[0].config, machine)
    lanes = min(lane_count(specs, on_gpu=True, slots=len(trainers)), len(specs))
    inprocess = config.campaign.executor == "inprocess"
    others = [name for name in machine.gpus if name not in trainers] if inprocess else []
    rank = max(server_rank(spec.config.model.lora_rank) for spec in specs)
    versions = max(spec.config.published_versions for spec in specs)
    settings: dict[str, Any] = {"engine": "vllm", "launch_options": None, "python": None}
    division: Division | None = None
    cards, fewer = 0, ""
    if others or config.inference.launch_gpus is not None:
        used, cards = _own_gpus(config, machine, others, _sizes(specs, architecture, lanes).base)
        settings |= {"launch_gpus": ",".join(used), "sleep": False}
        place = f"on GPU {settings['launch_gpus']} of its own"
        if idle := [name for name in others if name not in used]:
            place += f"; GPU {', '.join(idle)} idle ([inference] replicas and launch_gpus use them)"
    else:
        if config.inference.replicas > 1:
            raise NoVllm(f"[inference] replicas is {config.inference.replicas}, and there is one GPU")
        division, lanes, fewer = _division(specs, machine, architecture, trainers, lanes)
        settings["sleep"] = division.sleep
        released = "its KV cache is" if division.sleep == "kv" else "KV cache and weights are"
        where = f"gpu:{[*machine.gpus].index(trainers[0])} beside the trainer"
        if not inprocess:
            where = f"each of {plural(len(trainers), 'GPU')} beside its worker"
        place = (
            f"on {where}: KV cache {division.kv_bytes / GIB:.1f} GiB ({division.rows} "
            f"sequences of {division.tokens:,} tokens); {released} released during updates{fewer}"
        )
    settings["launch"] = automatic.command(config, rank, lanes, versions, division, cards)
    untried = automatic.version_note(machine.vllm)
    return settings, f"Sampling with vLLM {machine.vllm} {place}" + (f". Careful: {untried}" if untried else "")


def _trainer_gpus(config: Config, machine: Machine) -> list[str]:
    """Return the names of the GPUs that train: one, or one for each worker."""
    names, backend, campaign = list(machine.gpus), config.backend, config.campaign
    if missing := [name for name in backend.named_gpus if int(name.removeprefix("gpu:")) >= len(names)]:
        raise NoVllm(f"[backend] devices has {missing[0]}, and this machine shows {len(names)}")
    named = [names[int(name.removeprefix("gpu:"))] for name in backend.named_gpus] or names
    if campaign.executor == "inprocess":
        return named[:1]
    return named if campaign.workers == "auto" else named[: campaign.workers]


def _division(
    specs: Sequence[RunSpec], machine: Machine, architecture: Architecture, trainers: Sequence[str], planned: int
) -> tuple[Division, int, str]:
    """Return how a trainer's GPU is shared with vLLM, the number of lanes, and text to append to the note. The lanes
    are ``planned``; with ``lanes = "auto"`` fewer if these do not fit. Raises NoVllm if nothing fits."""
    config, slots = specs[0].config, len(trainers)
    total, host = min(machine.gpus[name] for name in trainers), machine.host // slots
    lanes, reason = planned, ""
    while True:
        try:
            division = automatic.divide(total, host, _sizes(specs, architecture, lanes), config.inference.sleep)
        except NoVllm as error:
            if config.campaign.lanes != "auto" or lanes == 1:
                raise
            reason = reason or str(error)
            lanes = min(lane_count(specs, on_gpu=True, slots=slots, most=lanes - 1), lanes - 1)
        else:
            fewer = f"; {plural(lanes, 'run')} at a time in place of {planned}, with which {reason}" if reason else ""
            return division, lanes, fewer


def _own_gpus(config: Config, machine: Machine, others: Sequence[str], base: int) -> tuple[Sequence[str], int]:
    """Return the GPUs of all replicas, and the number of GPUs of each: those of ``launch_gpus``, else as many as a
    base model of ``base`` bytes needs. Raises NoVllm."""
    replicas, given = config.inference.replicas, config.inference.launch_gpus
    names = [name.strip() for name in given.split(",")] if given is not None else []
    if trainers := [name for name in names if name not in others]:
        raise NoVllm(f"[inference] launch_gpus has {trainers[0]}, which is the trainer's GPU")
    cards = automatic.cards_needed(machine.gpus[others[0]], base, len(others))
    if names:
        return names, len(names) // replicas
    if cards * replicas > len(others):
        raise NoVllm(f"[inference] replicas = {replicas} takes {cards * replicas} GPUs, and {len(others)} are left")
    return others[: cards * replicas], cards


def _sizes(specs: Sequence[RunSpec], architecture: Architecture, lanes: int) -> MemoryNeeds:
    """Return the sizes of the first cohort of ``lanes`` runs."""
    group = [spec for spec in specs if base_key(spec) == base_key(specs[0])][:lanes]
    config, device = specs[0].config, Device("gpu")
    width = number_bytes(config, device)
    memories = [run_memory(spec.config, architecture, device, lanes=lanes) for spec in group]
    rank = max(server_rank(spec.config.model.lora_rank) for spec in group)
    adapter = architecture.adapter_parameters(rank, config.lora.target_modules) * width
    work = [run_size(spec.config) for spec in group]
    return MemoryNeeds(
        base=memories[0].base,
        lanes=sum(memory.adapter for memory in memories) + max(memory.update_copy for memory in memories),
        slots=min(lanes, automatic.MOST_ADAPTERS) * adapter,
        cache=architecture.cache_bytes(width),
        kept=architecture.kept_bytes(width),
        tokens=max(each.length for each in work),
        rows=min(config.inference.max_in_flight, sum(each.rows for each in work)),
    )


def _architecture(config: Config) -> Architecture:
    """Return the sizes of the model, after downloading the config.json of a hub model. Raises NoVllm."""
    name, revision = config.model.model, config.model.revision
    known = architecture_of(name, revision)
    if known is None and not config.model.local_files_only:
        from huggingface_hub import hf_hub_download

        with suppress(OSError, ValueError):
            hf_hub_download(name, "config.json", revision=revision)
            known = architecture_of(name, revision)
    if known is None:
        raise NoVllm(f"the config.json of {name} could not be read, so that its size is not known")
    return known
