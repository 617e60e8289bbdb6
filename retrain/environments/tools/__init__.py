"""Tools that the policy may call during an episode."""

from typing import Literal, NotRequired, TypedDict


class PropertySchema(TypedDict, total=False):
    type: str
    enum: list[object]
    anyOf: "list[PropertySchema]"
    description: str


ParametersSchema = TypedDict(
    "ParametersSchema",
    {
        "type": Literal["object"],
        "properties": dict[str, PropertySchema],
        "required": NotRequired[list[str]],
        "$defs": NotRequired[dict[str, object]],
    },
)


class FunctionSchema(TypedDict):
    name: str
    description: str
    parameters: ParametersSchema


class ToolSchema(TypedDict):
    type: Literal["function"]
    function: FunctionSchema


class ToolError(Exception):
    """The policy called a tool incorrectly; the text becomes the tool's answer."""
