"""Choose the engine of ``[inference] engine = "auto"`` for a plan, and compose the command of ``launch = "auto"``.

``launch`` and ``retrain explain`` call it. The choice is part of the plan from then on: a continued run keeps it.
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
from retrain.errors import RunFailed, UsageError
from retrain.models.layers import Architecture, architecture_of
from retrain.records.reader import planned_configs
from retrain.training.estimate import Device, number_bytes, run_memory, run_size
from retrain.util.text import count

# Parameters below which retrain's own engine samples faster on a GPU (docs/performance.md)
OWN_FASTER = 2_000_000_000
CHOSEN = ("engine", "launch", "launch_options", "launch_gpus", "python", "sleep")  # Keys that the choice settles
OWN = "Sampling with retrain's own engine: "


def with_engine(plan: Plan, machine: Machine | None = None, broken: str = "", smallest: int = OWN_FASTER) -> Plan:
    """Return the plan with its engine chosen, and a note on the choice if a GPU is there.

    ``broken``: why vLLM is ruled out; ``smallest``: parameters from which "auto" takes it. Raises UsageError if the
    file asks for a vLLM that cannot run here.
    """
    inference = plan.specs[0].config.inference
    if inference.engine != "auto" and inference.launch != "auto":
        return plan
    if broken:
        return _settled(plan, {"engine": "local"}, f"{OWN}{broken}")
    machine = machine or automatic.machine_of(plan.specs[0].config)
    served = [replace(spec, config=_with_server(spec.config)) for spec in plan.specs]
    reason = _obstacle(served, machine)
    if not reason:
        try:
            architecture = _architecture(plan.specs[0].config)
            parameters = architecture.parameters()
            if inference.engine == "auto" and parameters < smallest:
                model = plan.specs[0].config.model.model
                raise NoVllm(f"{model} has {count(parameters)} parameters, and below {count(smallest)} it is faster")
            return _settled(plan, *_vllm(served, machine, architecture))
        except (NoVllm, RunFailed) as error:
            reason = str(error)
    if inference.engine == "auto":
        return _settled(plan, {"engine": "local"}, f"{OWN}{reason}" if machine.gpus else "")
    raise UsageError(
        f'[inference] engine = "vllm" cannot start vLLM here: {reason}; give the url of a server, or type '
        "--set inference.engine=local"
    )


def as_begun(plan: Plan) -> Plan | None:
    """Return the plan with the engine with which its runs have begun; None if none has, or the file names another."""
    inference, configs = plan.specs[0].config.inference, planned_configs(plan.directory)
    if (inference.engine != "auto" and inference.launch != "auto") or not configs:
        return None
    if not has_begun(recorded_entries(plan.directory, plan.specs)[0].values()):
        return None
    recorded = next(iter(configs.values()))["inference"]
    return _settled(plan, {"engine": "local"} | {key: recorded[key] for key in CHOSEN if key in recorded})


def _settled(plan: Plan, settings: Mapping[str, Any], note: str = "") -> Plan:
    specs = [replace(spec, config=_with(spec.config, settings)) for spec in plan.specs]
    source = plan.source
    if source is not None:
        # The file's own configuration is recorded, too.
        changed = source.config.inference.model_copy(update=settings)
        source = replace(source, config=source.config.model_copy(update={"inference": changed}))
    return replace(plan, specs=specs, source=source, notes=(note,) if note else ())


def _with(config: Config, settings: Mapping[str, Any]) -> Config:
    data = config.to_dict()
    if data["inference"] == data["inference"] | settings:
        return config
    data["inference"] |= settings
    return parse_dict(without_unused(Config.model_validate(data)))


def _with_server(config: Config) -> Config:
    data = config.to_dict()
    data["inference"] |= {"engine": "vllm", "launch": "auto"}
    return Config.model_validate(data)


def _obstacle(specs: Sequence[RunSpec], machine: Machine) -> str:
    """Return why vLLM cannot sample for these runs, which would use it, on this machine; "" if it can."""
    if not machine.gpus:
        return "this machine shows no GPU"
    for spec in specs:
        for issue in (issue for issue in rule_issues(spec.config) if not issue.warning):
            section, _, name = issue.keys[0].partition(".")
            return f"[{section}] {name} {issue.message}"
        if spec.config.distillation.active and spec.config.distillation.teacher is not None:
            return "[distillation] teacher takes memory that vLLM would need"
    return "" if machine.vllm else automatic.absence(specs[0].config)


def _vllm(specs: Sequence[RunSpec], machine: Machine, architecture: Architecture) -> tuple[dict[str, Any], str]:
    """Return the settings of a vLLM for these runs, and the note. Raises NoVllm."""
    config = specs[0].config
    names, trainer = list(machine.gpus), int((config.backend.named_gpus or ["gpu:0"])[0].removeprefix("gpu:"))
    if trainer >= len(names):
        raise NoVllm(f"[backend] devices has gpu:{trainer}, and this machine shows {len(names)}")
    lanes = min(lane_count(specs, on_gpu=True), len(specs))
    total, sizes = machine.gpus[names[trainer]], _sizes(specs, architecture, lanes)
    others = [name for name in names if name != names[trainer]]
    rank = max(server_rank(spec.config.model.lora_rank) for spec in specs)
    versions = max(spec.config.published_versions for spec in specs)
    settings: dict[str, Any] = {"engine": "vllm", "launch_options": None, "python": None}
    division: Division | None = None
    cards = 0
    if others:
        used, cards = _own_gpus(
            config, others, automatic.cards_needed(machine.gpus[others[0]], sizes.base, len(others))
        )
        settings |= {"launch_gpus": ",".join(used), "sleep": False}
        place = f"on GPU {settings['launch_gpus']} of its own"
        if idle := [name for name in others if name not in used]:
            place += f"; GPU {', '.join(idle)} idle ([inference] replicas and launch_gpus use them)"
    else:
        if config.inference.replicas > 1:
            raise NoVllm(f"[inference] replicas is {config.inference.replicas}, and there is one GPU")
        division = automatic.divide(total, machine.host, sizes, config.inference.sleep)
        settings["sleep"] = division.sleep
        released = "its KV cache is" if division.sleep == "kv" else "KV cache and weights are"
        place = (
            f"on gpu:{trainer} beside the trainer: KV cache {division.kv_bytes / GIB:.1f} GiB ({division.rows} "
            f"sequences of {sizes.tokens:,} tokens); {released} released during updates"
        )
    settings["launch"] = automatic.command(config, rank, lanes, versions, division, cards)
    untried = automatic.version_note(machine.vllm)
    return settings, f"Sampling with vLLM {machine.vllm} {place}" + (f". Careful: {untried}" if untried else "")


def _own_gpus(config: Config, others: Sequence[str], cards: int) -> tuple[Sequence[str], int]:
    """Return the GPUs of all replicas, and how many each has: ``launch_gpus``, else ``cards`` for each."""
    replicas, given = config.inference.replicas, config.inference.launch_gpus
    if given is not None:
        names = [name.strip() for name in given.split(",")]
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
