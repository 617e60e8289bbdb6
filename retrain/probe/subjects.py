"""Resolve the models, adapters, checkpoints and runs that ``retrain eval`` evaluates; no weights are loaded."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from retrain.adapters.provenance import Provenance, provenance
from retrain.campaign.planning.manifest import read_plan
from retrain.campaign.planning.plan import Plan
from retrain.config import Config
from retrain.config.runs import RunSpec, run_directory
from retrain.environments.arguments import did_you_mean
from retrain.errors import ModelError, UsageError
from retrain.models.directory import bundled_name, model_fault
from retrain.models.layers import architecture_of
from retrain.policy.adapter_io import AdapterFile
from retrain.probe.conditions import temporary
from retrain.records.reader import read_object, recorded_checkpoints
from retrain.records.schema.layout import CONFIG, FINAL, MANIFEST, PLAN


@dataclass(frozen=True)
class Subject:
    """A model to evaluate. ``spec``: the settings of the evaluation with this model; its run id names the model.

    ``target`` is what the user typed, ``source`` the adapter, if any. ``stream`` and ``step`` are those of the run that
    trained the adapter, so that the answers equal those of its own evaluation; for other models, those of an untrained
    run.
    """

    spec: RunSpec
    target: str
    stream: tuple[int | str, ...]
    step: int = 0
    source: Provenance | None = None

    @property
    def adapter(self) -> Path | None:
        return None if self.source is None else self.source.adapter

    @property
    def name(self) -> str:
        return self.spec.run_id

    @property
    def base_key(self) -> str:
        """Return a key that is equal for models that share the base's weights."""
        return repr(self.spec.config.model.model_copy(update={"lora_rank": 0}))

    @property
    def lanes_key(self) -> str:
        """Return a key that is equal for models that share the base's weights and its adapted layers."""
        return repr((self.base_key, self.spec.config.lora.target_modules))


def recorded_plan(targets: Sequence[str], sets: Sequence[str]) -> Plan:
    """Return the plan of the first run of retrain among ``targets``, with its run in front. Raises UsageError if there
    is none."""
    for path in (Path(target).expanduser().absolute() for target in targets):
        folders = (path, *list(path.parents)[:4]) if path.is_dir() else ()
        home = next((folder for folder in folders if (folder / PLAN).is_file()), None)
        if home is not None:
            home = home.relative_to(Path.cwd()) if home.is_relative_to(Path.cwd()) else home
            plan, inside = read_plan(home, sets), {folder.resolve() for folder in folders}
            specs = sorted(plan.specs, key=lambda spec: run_directory(home, spec).resolve() not in inside)
            return replace(plan, specs=specs)
    _refuse_mistyped(targets[0])
    raise UsageError(f"{targets[0]} has no recorded settings: name the held-out problems with --file FILE")


def subjects_of(targets: Sequence[str], base: str | None, template: RunSpec) -> list[Subject]:
    """Return the models that ``targets`` name, evaluated with the settings of ``template``. ``base`` replaces the base
    that adapters name. Raises RetrainError for a target that cannot be evaluated."""
    subjects: list[Subject] = []
    for target in targets:
        path = Path(target).expanduser()
        names = {subject.name for subject in subjects}
        if path.is_dir() and "model_type" not in read_object(path / CONFIG):
            subjects.append(_adapter_subject(target, provenance(path, base), template, names))
        else:
            subjects.append(_model_subject(target, path, template, names))
    return subjects


def _refuse_mistyped(target: str) -> None:
    """Raise UsageError for a path that does not exist beside directories of campaigns: it is no hub name."""
    path = Path(target).expanduser()
    beside = [each.parent.name for each in path.parent.glob(f"*/{MANIFEST}")] if "/" in target else []
    if beside and not path.exists():
        raise UsageError(f"{target} cannot be evaluated: there is no such directory{did_you_mean(path.name, beside)}")


def _model_subject(target: str, path: Path, template: RunSpec, names: Collection[str]) -> Subject:
    config = template.config
    _refuse_mistyped(target)
    if fault := model_fault(target, trust_remote_code=config.model.trust_remote_code):
        raise UsageError(f"{target} cannot be evaluated: {fault}")
    revision = config.model.revision if target == config.model.model else None
    model = bundled_name(target) or (str(path.resolve()) if path.is_dir() else target)
    section = config.model.model_copy(update={"model": model, "revision": revision})
    name = path.resolve().name if path.is_dir() else model
    spec = _named(template, config.model_copy(update={"model": section}), name, names)
    return Subject(spec, target, config.evaluation_stream(0))


def _adapter_subject(target: str, source: Provenance, template: RunSpec, names: Collection[str]) -> Subject:
    config, record = template.config, source.record
    with AdapterFile(source.adapter) as file:
        file.require_plain()
        _require_fit(file, source)
        layers = list(file.modules)
    if record is None:
        model, lora = config.model, config.lora.model_copy(update={"target_modules": layers})
    else:
        model, lora = source.config.model, source.config.lora
    where = {"model": bundled_name(source.base) or source.base, "revision": source.config.model.revision}
    config = config.model_copy(update={"model": model.model_copy(update=where), "lora": lora})
    step = None if record is None else _recorded_step(record, source.adapter)
    if record is None or step is None:
        spec = _named(template, config, source.adapter.name, names)
        return Subject(spec, target, config.evaluation_stream(0), 0, source)
    trained = _with_recorded_seeds(config, record)
    name = record.resolve().name + ("" if source.adapter.name == FINAL else f"-step{step}")
    config = config.model_copy(update={"training": trained.training})
    return Subject(_named(template, config, name, names), target, trained.evaluation_stream(step), step, source)


def _require_fit(file: AdapterFile, source: Provenance) -> None:
    """Raise ModelError if the adapter adapts a linear layer that its base has in another size."""
    architecture = architecture_of(source.base, source.config.model.revision)
    if architecture is None or not architecture.dense:
        return  # known once the weights are loaded
    for name, where in file.modules.items():
        shape = architecture.linear_shapes.get(".".join(name.split(".")[-2:]))
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        exists = layer is not None and int(layer[1]) < architecture.layers
        if not exists or shape != (where.a_shape[1], where.b_shape[0]):
            raise ModelError(
                f"{file.directory} adapts {name}, which is not a linear layer of that size in {source.base}: "
                "give the right base with --base"
            )


def _recorded_step(record: Path, adapter: Path) -> int | None:
    """Return the updates after which a run saved this adapter; None if it is not one of its checkpoints."""
    rows = reversed(recorded_checkpoints(record))
    return next((row["batch"] for row in rows if (record / row["sampler_path"]).resolve() == adapter), None)


def _with_recorded_seeds(config: Config, record: Path) -> Config:
    facts = read_object(record / CONFIG)
    seeds, vary = facts["seeds"], facts.get("campaign", {}).get("vary", config.campaign.vary)
    campaign = config.campaign.model_copy(update={"seed": seeds["campaign"], "vary": vary})
    training = config.training.model_copy(update={"seed": seeds["run"]})
    return config.model_copy(update={"campaign": campaign, "training": training})


def _named(template: RunSpec, config: Config, name: str, names: Collection[str]) -> RunSpec:
    """Return the settings with a run id that is not among ``names``, and without trackers and checkpoints."""
    name = re.sub(r"[^A-Za-z0-9_+~=.-]+", "_", name).lstrip(".") or "model"
    unique = name if name not in names else next(each for n in range(2, 999) if (each := f"{name}-{n}") not in names)
    spec = replace(template, run_id=unique, label=unique, seed=config.training.seed, overrides={}, condition_index=0)
    return temporary(replace(spec, config=config))
