"""Convert a typed Python function or class to a tool: JSON schema for the chat template, and validation of arguments.

``transformers.utils.get_json_schema`` gives the same schema for plain annotations (tests compare them), but would
import torch into every worker process.

Arguments are converted: "3" to a number if a number is expected, 3 to a text if a text is expected. Any other text that
is not valid as it stands is parsed as JSON, because formats such as Qwen3-Coder's have no types.
"""

import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, cast, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PydanticUserError,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
)
from pydantic.errors import PydanticUndefinedAnnotation
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails

from retrain.environments.arguments import did_you_mean
from retrain.environments.tools import FunctionSchema, ParametersSchema, PropertySchema, ToolError, ToolSchema
from retrain.errors import PluginError, RetrainError
from retrain.plugins import described

NAME = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_CONFIG = ConfigDict(coerce_numbers_to_str=True, allow_inf_nan=False, extra="forbid", arbitrary_types_allowed=False)


class _UntitledSchema(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: object) -> bool:
        return False


@dataclass(frozen=True)
class Tool:
    """A tool. ``open()`` returns the callable for one episode; ``schema`` is the description for the model. ``exact``:
    the tool's answers are a function of the calls."""

    name: str
    schema: ToolSchema
    exact: bool
    open: Callable[[], Callable[..., object]]
    _arguments: type[BaseModel]

    def checked(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Validate and convert the arguments of a call. Raises ToolError, which names the invalid argument."""
        try:
            model = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            faults = [self._fault(each) for each in error.errors(include_url=False)[:5]]
            raise ToolError(f"{self.name}: {'; '.join(faults)}. It takes {self._takes()}") from None
        fields = self._arguments.model_fields
        return {str(fields[name].alias): getattr(model, name) for name in fields if name in model.model_fields_set}

    def _takes(self) -> str:
        parameters = self.schema["function"]["parameters"]
        texts = [
            f"{name} ({_type_of(schema)}{'' if name in parameters.get('required', ()) else ', optional'})"
            for name, schema in parameters["properties"].items()
        ]
        return ", ".join(texts) or "no arguments"

    def _fault(self, error: ErrorDetails) -> str:
        name = ".".join(map(str, error["loc"]))[:100]
        if error["type"] == "missing":
            return f"the argument {name!r} is missing"
        if error["type"] == "extra_forbidden":
            known = self.schema["function"]["parameters"]["properties"]
            return f"there is no argument {name!r}{did_you_mean(name, known)}"
        return f"{name}: {error['msg']}"


def tool_of(target: Callable[..., object], settings: Mapping[str, object] | None = None, label: str = "") -> Tool:
    """Create a tool from a function or a class.

    A class is instantiated for each episode with ``settings`` as keywords; its ``__call__`` is the tool, named as the
    class in snake_case. The description is the docstring of the function or ``__call__``, else of the class; the
    section ``Args:`` describes the arguments. ``exact = False`` on function or class declares that answers differ
    between runs. Raises PluginError, whose text begins with ``label``, if no schema can be derived.
    """
    label = label or f"tool {getattr(target, '__name__', target)!r}"
    settings = settings or {}
    try:
        return _class(target, settings) if inspect.isclass(target) else _function(target, settings)
    except PluginError as error:
        raise PluginError(f"{label}: {error}") from None


def _function(function: Callable[..., object], settings: Mapping[str, object]) -> Tool:
    if settings:
        raise PluginError(f"a function has no settings, such as {next(iter(settings))!r}; only a class takes them")
    name = getattr(function, "__name__", type(function).__name__)
    model, schema = _schema(name, function, inspect.getdoc(function) or "")
    return Tool(name, schema, bool(getattr(function, "exact", True)), lambda: function, model)


def _class(made: type, settings: Mapping[str, object]) -> Tool:
    call = inspect.getattr_static(made, "__call__", None)
    if not inspect.isfunction(call):
        raise PluginError("the class has no method __call__, which would be the tool")
    signature = inspect.signature(made)
    try:
        signature.bind(**settings)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "none"
        raise PluginError(f"settings: {error}; those of {made.__name__} are: {takes}") from None
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", made.__name__).lower()
    doc = inspect.cleandoc(call.__doc__ or "") or inspect.cleandoc(made.__doc__ or "")
    model, schema = _schema(name, call, doc, signature.parameters)

    def opened() -> Callable[..., object]:
        try:
            return made(**settings)
        except RetrainError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginError(f"tool {name!r} cannot be made: {described(error)}") from error

    return Tool(name, schema, bool(getattr(made, "exact", True)), opened, model)


def _schema(
    name: str, function: Callable[..., object], doc: str, settings: Collection[str] = ()
) -> tuple[type[BaseModel], ToolSchema]:
    if not NAME.fullmatch(name):
        raise PluginError(f"{name!r} is no name for a tool: letters, digits and _ only, at most 64")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise PluginError(
            f"{name} is asynchronous or a generator; a tool is an ordinary function that returns its answer"
        )
    description, documented = _docstring(doc)
    if not description:
        raise PluginError(f"{name} has no docstring; its first lines tell the model what it does")
    fields = _fields(name, function, documented)
    aliases = [field.alias for _, field in fields.values()]
    if stray := [argument for argument in documented if argument not in aliases and argument not in settings]:
        raise PluginError(f"the docstring of {name} describes {stray[0]!r}, which is no argument of it")
    try:
        model = create_model("Arguments", __config__=_CONFIG, **fields)
        schema = model.model_json_schema(schema_generator=_UntitledSchema)
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        reason = str(error).splitlines()[0]
        raise PluginError(f"{name} has an argument of a type that JSON has no form for: {reason}") from None
    required = schema.get("required", [])
    properties = {
        argument: _property(schema["properties"][argument], argument in required) for argument in aliases if argument
    }
    parameters: ParametersSchema = {"type": "object", "properties": properties, "required": required}
    if "$defs" in schema:
        parameters["$defs"] = schema["$defs"]
    function_schema: FunctionSchema = {"name": name, "description": description, "parameters": parameters}
    return model, {"type": "function", "function": function_schema}


def _fields(name: str, function: Callable[..., object], documented: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a pydantic model. Argument names are aliases, so that any name is possible."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:  # a name that does not exist, or any error in evaluating an annotation
        raise PluginError(f"the annotations of {name} cannot be resolved: {described(error)}") from None
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name == "self" and parameters[0].name not in hints:
        del parameters[0]
    fields: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise PluginError(f"{name} takes {parameter}; the arguments of a tool have names, one each")
        if parameter.name not in hints:
            raise PluginError(f"the argument {parameter.name!r} of {name} has no type; write {parameter.name}: str")
        default = ... if parameter.default is parameter.empty else None
        field = Field(default, alias=parameter.name, description=documented.get(parameter.name) or None)
        fields[f"argument_{len(fields)}"] = (Annotated[hints[parameter.name], WrapValidator(_lenient)], field)
    return fields


def _property(schema: dict[str, Any], required: bool) -> PropertySchema:
    """Return an argument's schema as chat templates expect it: type first, description last. An optional argument is
    omitted, not null: ``int | None = None`` becomes an integer."""
    types = [item for item in schema.get("anyOf", ()) if item != {"type": "null"}]
    if not required and len(types) == 1:
        schema = types[0] | {key: value for key, value in schema.items() if key != "anyOf"}
    order = sorted(schema, key=lambda key: (key == "description", key != "type"))
    return cast("PropertySchema", {key: schema[key] for key in order if key != "default"})  # None, not the function's


def _docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Return the description before the first section of a Google docstring, and the arguments' descriptions by
    name."""
    parts = SECTION.split(doc)
    documented: dict[str, str] = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title not in ("Args", "Arguments"):
            continue
        current = ""
        for line in inspect.cleandoc("\n" + body).splitlines():
            if not line.startswith(" ") and (argument := ARGUMENT.match(line)):
                current = argument[1]
                documented[current] = argument[2].strip()
            elif current and line.strip():
                documented[current] += " " + line.strip()
    return parts[0].strip(), documented


def _lenient(value: object, validated: ValidatorFunctionWrapHandler) -> object:
    """Validate an argument; if that fails for a text, parse it as JSON and validate the result."""
    try:
        return validated(value)
    except ValidationError:
        if not isinstance(value, str):
            raise
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = str(value)
        return validated(value)


def _type_of(schema: PropertySchema) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(map(repr, schema["enum"]))
    types = [str(each["type"]) for each in (schema, *schema.get("anyOf", ())) if "type" in each]
    return " or ".join(types) or "anything"
