"""Convert pydantic's errors to one actionable line each."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, get_args, get_origin

import tomli
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from retrain.config.describe import (
    accepts,
    choices,
    default_of,
    expected,
    field_expected,
    kind,
    schema_of,
    show,
    toml,
    unsupported,
)
from retrain.config.legacy import REPLACED, REPLACED_SECTIONS
from retrain.config.root import fields_of, homes, keys, listed, lists, sections

Path = tuple[str | int, ...]
OTHERS: dict[str, str] = {
    "training.lr": "learning_rate",
    "training.group_size": "num_generations num_samples rollouts_per_prompt",
    "training.batch_size": "per_device_train_batch_size groups_per_batch",
    "training.max_tokens": "max_completion_length max_new_tokens",
    "training.clip_eps": "epsilon cliprange clip_range",
    "training.clip_eps_high": "epsilon_high",
    "training.num_iterations": "num_ppo_epochs ppo_epochs update_epochs",
    "training.minibatches": "num_mini_batches num_minibatches",
    "training.target_kl": "kl_target max_kl",
    "training.save_every": "save_steps",
    "training.eval_every": "eval_steps",
    "training.max_steps": "num_steps total_steps",
    "model.lora_rank": "rank r",
    "model.model": "model_name model_name_or_path",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "optimizer.grad_clip_norm": "max_grad_norm",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_epsilon",
    "optimizer.schedule": "lr_scheduler_type lr_schedule",
    "algorithm.loss": "loss_fn loss_type",
    "algorithm.kl_coef": "kl_loss_coef",
    "algorithm.kl_in_reward": "kl_estimator use_kl_in_reward",
    "algorithm.entropy_coef": "entropy_coeff",
    "algorithm.tis_cap": "vllm_importance_sampling_cap",
    "critic.lam": "gae_lambda lambda",
    "critic.vf_coef": "value_coef value_loss_coef",
    "critic.cliprange_value": "vf_clip",
    "critic.whiten": "whiten_advantages norm_adv",
    "critic.warmup_steps": "critic_warmup",
    "critic.lr": "critic_lr value_lr",
    "data.source": "dataset dataset_name",
    "reward.type": "reward_type",
    "reward.reward_model": "reward_model_path reward_model_name reward_model_name_or_path",
    "logging.log_dir": "log_path output_dir",
}
"""Names of our keys in TRL, verl, prime-rl and other tools, which users may type in their place."""
SYNONYMS = {name: dotted for dotted, names in OTHERS.items() for name in names.split()}


class Mistake(NamedTuple):
    """A wrong entry of a configuration file, without its line number. ``about``: the key that the message names, if it
    is not the one at ``path``."""

    path: Path
    message: str
    fix: str = ""
    about: str = ""

    @property
    def key(self) -> str:
        """The dotted path that the message is about; list positions count from 1."""
        if self.about:
            return self.about
        text = ""
        for part in self.path:
            text += f"[{part + 1}]" if isinstance(part, int) else f".{part}" if text else part
        return text


def path_of(dotted: str) -> Path:
    """Return the path of a dotted key, list positions counted from 0."""
    return tuple(int(part) if part.isdigit() else part for part in dotted.split("."))


def mistakes(error: ValidationError, data: Mapping[str, object]) -> list[Mistake]:
    """Return one mistake for every wrong key in ``data``, although pydantic may report several."""
    by_path: dict[Path, Mistake] = {}
    for details in error.errors(include_url=False):
        mistake = _mistake(details, data)
        by_path.setdefault(mistake.path, mistake)
    return list(by_path.values())


def _mistake(details: ErrorDetails, data: Mapping[str, object]) -> Mistake:
    location = details["loc"]
    if details["type"] == "extra_forbidden":
        return unknown(tuple(location), details["input"])
    if len(location) < 2:
        return _not_a_table(location, details["input"])
    path, field, inside = _field(location)
    if field is None:
        return _not_a_table(path, details["input"])
    name = str(path[-1])
    if details["type"] == "missing":
        return Mistake(path, "is missing", f"{name} = {toml(_example(field))}")
    if details["type"] == "fault":
        context = details.get("ctx", {})
        return Mistake(path, context["message"], context["fix"])
    value: Any = data
    for part in path:
        value = value[part]
    return wrong_value(path, field, value, inside)


def _field(location: Path) -> tuple[Path, FieldInfo | None, Path]:
    """Return the path of the key that contains an error, its field (None if a whole table is wrong), and the path of
    the error inside the key's value."""
    path: Path = (str(location[0]), str(location[1]))
    field, inside = keys()[f"{path[0]}.{path[1]}"], location[2:]
    while inside and (table := listed(field)):
        path = (*path, inside[0])
        if len(inside) == 1:
            return path, None, ()
        path, field, inside = (*path, inside[1]), fields_of(table)[str(inside[1])], inside[2:]
    return path, field, inside


def _not_a_table(path: Path, value: object) -> Mistake:
    name = str(path[0])
    if isinstance(path[-1], int):
        of_list = ".".join(part for part in path if isinstance(part, str))
        return Mistake(path, f"is {show(value)}, {kind(value)}, but must be a table", f"[[{of_list}]]")
    if isinstance(value, list):
        return Mistake(path, f"is a list, but there is one [{name}]", f"[{name}]")
    fix = f"[{name}]"
    if f"{name}.{name}" in keys():
        fix = f"[{name}] and below it {name} = {show(value)}"
    return Mistake(path, f"is {show(value)}, {kind(value)}, but must be a table", fix)


def _example(field: FieldInfo) -> object:
    default = default_of(field)
    return default if default is not None else next(iter(choices(field)), "…")


def wrong_value(path: Path, field: FieldInfo, value: object, inside: Path) -> Mistake:
    """Return the mistake of a value. ``inside``: path in the value at which pydantic found the error."""
    name = str(path[-1])
    if known := unsupported(field, value):
        return Mistake(path, f"is {show(value)}: {known[0]}", known[1])
    if isinstance(value, str) and choices(field) and re.fullmatch(r"[A-Za-z_][\w.]*[.:]\w+", value):
        if accepts(field, "module:function"):
            module, _, function = value.rpartition(".")
            message = f"is {show(value)}, but code of your own is named as module:function"
            return Mistake(path, message, f"{name} = {show(f'{module}:{function}')}")
        message = f"is {show(value)}: code of your own cannot be named here"
        return Mistake(path, message, f"{name} = {show(_example(field))}")
    if get_origin(field.annotation) is dict and isinstance(value, Mapping):
        names, item, wanted = _wrong_entry(field.annotation, value, inside)
        fix = f'{names[-1]} = "{show(item)[1:-1]}"' if isinstance(item, list) and str in get_args(wanted) else ""
        message = f"has {'.'.join(names)} = {show(item)}, {kind(item)}, but its values must be "
        message += expected(schema_of(wanted))
        return Mistake(path, message, fix or _suggestion(name, field, value))
    message = f"is {show(value)}" if value != [] else "is an empty list"
    if not isinstance(value, list):
        message += f", {kind(value)}" if not _same_kind(field, value) else ""
    message += f", but must be {field_expected(field, value)}" + (", at least one" if value == [] else "")
    return Mistake(path, message, _suggestion(name, field, value))


def _wrong_entry(annotation: object, value: object, inside: Path) -> tuple[list[str], object, object]:
    """Find the wrong entry of a table whose entries have one type. Return its names from the table down, its value and
    the type that was expected. ``inside``: pydantic's path from the table to the error."""
    names: list[str] = []
    while get_origin(annotation) is dict and isinstance(value, Mapping):
        names.append(str(inside[len(names)]))
        annotation, value = get_args(annotation)[1], value[names[-1]]
    return names, value, annotation


def _same_kind(field: FieldInfo, value: object) -> bool:
    """Return whether the value has a type that the field accepts, so that a message need not name the type."""
    text = field_expected(field)
    if isinstance(value, bool):
        return "true" in text
    if isinstance(value, int | float):
        return "number" in text or "integer" in text
    return isinstance(value, str) and '"' in text


def _candidates(value: object) -> Iterator[object]:
    """Yield values that a user may have meant by ``value``, the likeliest first."""
    if isinstance(value, str):
        with suppress(KeyError, ValueError, RecursionError):
            yield tomli.loads(f"v = {value.strip().lower()}")["v"]
        yield value.strip().lower()
        yield value.strip()
        yield [value]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if value in (0, 1):
            yield bool(value)
        if isinstance(value, float) and value.is_integer():
            yield int(value)
        yield [value]
    elif isinstance(value, list) and len(value) == 1:
        yield value[0]


def _suggestion(name: str, field: FieldInfo, value: object) -> str:
    options = choices(field)
    if isinstance(value, str) and options:
        close = difflib.get_close_matches(value.lower(), options, n=1, cutoff=0.5)
        if close:
            return f'did you mean {name} = "{close[0]}"'
    for candidate in _candidates(value):
        if (type(candidate), candidate) != (type(value), value) and accepts(field, candidate):
            return f"{name} = {show(candidate)}"
    default = default_of(field)
    if default is not None and default != []:
        return f"{name} = {show(default)}"
    return f"{name} = {show(options[0])}" if options else "remove the line for the default"


def unknown(path: Path, value: object) -> Mistake:
    """Return the mistake of an unknown section or key, with the most similar existing one."""
    section, name = str(path[0]), str(path[-1])
    if len(path) == 1:
        return _unknown_section(path, name, value)
    if len(path) > 2:
        of_list = ".".join(part for part in path[:-1] if isinstance(part, str))
        return Mistake(path, f"is not a key of [[{of_list}]]", nearest(name, fields_of(lists()[of_list]), value))
    if replaced := REPLACED.get(f"{section}.{name}"):
        return Mistake(path, f"is not a key: {replaced[0]}", replaced[1])
    candidates = sections()[section].roles()
    fix = nearest(name, candidates, value)
    is_close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.65)
    everywhere = [] if is_close else [dotted.partition(".")[2] for dotted in keys()]
    if synonym := SYNONYMS.get(name):
        fix = f"{_elsewhere(synonym, section)} = {show(value)}"
    elif elsewhere := homes(name):
        fix = f"{name} belongs to " + " and ".join(f"[{dotted.partition('.')[0]}]" for dotted in elsewhere)
    elif wide := difflib.get_close_matches(name, everywhere, n=1, cutoff=0.8):
        fix = f"did you mean {_elsewhere(homes(wide[0])[0], section)}"
    return Mistake(path, f"is not a key of [{section}]", fix)


def _elsewhere(dotted: str, section: str) -> str:
    home, _, key = dotted.partition(".")
    return key if home == section else f"[{home}] {key}"


def nearest(name: str, candidates: Iterable[str], value: object = None) -> str:
    """Return ``did you mean …`` with the most similar candidate and the value, or all candidates."""
    names = list(candidates)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    given = "" if value is None or isinstance(value, Mapping) else f" = {show(value)}"
    return f"did you mean {close[0]}{given}" if close else f"its keys are {', '.join(names)}"


def _unknown_section(path: Path, name: str, value: object) -> Mistake:
    if name in REPLACED_SECTIONS:
        return Mistake(path, *REPLACED_SECTIONS[name])
    tables = [f"[{dotted.partition('.')[0]}]" for dotted in homes(name)]
    if name in SYNONYMS and not isinstance(value, Mapping):
        fix = f"{_elsewhere(SYNONYMS[name], '')} = {show(value)}"
        return Mistake(path, "is not a key outside a section", fix)
    if tables and not isinstance(value, Mapping):
        return Mistake(path, "stands outside a section", f"put it under {' or '.join(tables)}")
    close = difflib.get_close_matches(name, list(sections()), n=1, cutoff=0.6)
    every = "the sections are " + ", ".join(f"[{section}]" for section in sections())
    return Mistake(path, "is not a section", f"did you mean [{close[0]}]" if close else every)
