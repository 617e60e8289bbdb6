"""Generate the JSON Schema of configuration files from the models."""

from typing import Any

from retrain.config.checking import MODES, why_fixed
from retrain.config.root import Config, homes, keys, sections


def json_schema() -> dict[str, Any]:
    schema = Config.model_json_schema(by_alias=True, mode="validation")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "retrain"
    schema["description"] = "A run or a campaign of retrain."
    definitions = schema["$defs"]
    overridable = [dotted for dotted in keys() if not why_fixed(dotted)]
    condition: dict[str, Any] = definitions["Condition"]["properties"]
    for dotted in overridable:
        section, _, key = dotted.partition(".")
        of_key = {"$ref": f"#/$defs/{sections()[section].__name__}/properties/{key}"}
        if dotted.startswith("algorithm.") and key in MODES:
            continue
        condition[dotted] = of_key
        if [each for each in homes(key) if each in overridable] == [dotted] and key not in sections():
            condition[key] = of_key
        table = condition.setdefault(section, {"type": "object", "properties": {}, "additionalProperties": False})
        table["properties"][key] = of_key
    definitions["Condition"]["additionalProperties"] = False
    for definition in definitions.values():
        for of_key in definition["properties"].values():
            of_key.pop("title", None)  # pydantic's rewording of the key
    return schema
