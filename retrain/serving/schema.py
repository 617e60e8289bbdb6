"""Validate request bodies strictly: every mistake raises a ``ServingError`` with the name of the field.

Fields are those of OpenAI's API and vLLM's additions. Known fields that are not supported are rejected, not ignored,
unless their value has no effect.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

MAX_CHOICES = 256  # Largest `n`
MAX_LOGPROBS = 20  # Largest `logprobs` and `top_logprobs`; vLLM's default
MAX_STOPS = 64

ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}

# Fields that are not supported, with the value that has no effect and is therefore accepted
NOT_SUPPORTED: dict[str, object] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "logit_bias": {},
    "bad_words": [],
    "allowed_token_ids": [],
    "structured_outputs": {},
    "response_format": {"type": "text"},
    "best_of": 1,
    "use_beam_search": False,
    "logprob_token_ids": [],
    "prompt_logprobs": None,  # 0 is a request for prompt log-probabilities
    "truncate_prompt_tokens": None,
    "suffix": "",
    "chat_template": "",
    "continue_final_message": False,
}


class ServingError(Exception):
    """A rejected request. ``status`` is the HTTP status, ``param`` the invalid field, ``retry_after`` in seconds."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after: int | None = None):
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
        kind = ERROR_TYPES.get(status, "Error")
        self.body: dict[str, object] = {"error": {"message": message, "type": kind, "param": param, "code": status}}


Name = Annotated[str, Field(min_length=1, max_length=4096)]
TokenId = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class Body(BaseModel):
    """JSON object with strict types. A null stands for the field's default, and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, fields: object) -> object:
        return (
            {key: value for key, value in fields.items() if value is not None} if isinstance(fields, dict) else fields
        )


ModelT = TypeVar("ModelT", bound=Body)


class TextPart(Body):
    type: Literal["text"]
    text: str


def _joined(content: object) -> object:
    """Return text parts of a message joined by newlines, other content unchanged. Rejects parts that are not text."""
    if not isinstance(content, list):
        return content
    try:
        return "\n".join(part.text for part in map(TextPart.model_validate, content))
    except ValidationError as error:
        raise PydanticCustomError("text", "only text is supported: leave out all other parts") from error


def _arguments(arguments: object) -> object:
    """Decode the arguments of a call, which are JSON text in OpenAI's API; {} if they are empty."""
    decoded = from_json(arguments or "{}") if isinstance(arguments, str) else arguments
    return {} if decoded is None else decoded


class ChatFunction(Body):
    model_config = ConfigDict(extra="allow")

    name: str
    arguments: Annotated[dict[str, object], BeforeValidator(_arguments)] = {}


class ChatToolCall(Body):
    id: str = ""
    type: str = "function"
    function: ChatFunction


class MessageBody(Body):
    """A message as templates expect it: text content, arguments of calls as JSON values."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str, BeforeValidator(_joined)] = ""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ChatToolCall] | None, AfterValidator(lambda calls: calls or None)] = None

    @model_validator(mode="after")
    def check_calls(self) -> "MessageBody":
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("calls", "only an assistant's message can have tool_calls")
        return self


class ToolParameters(Body):
    properties: dict[str, dict[str, object]] = {}


class ToolFunction(Body):
    name: str
    parameters: ToolParameters = ToolParameters()


class ChatTool(Body):
    function: ToolFunction


def _tool(tool: dict[str, object]) -> dict[str, object]:
    ChatTool.model_validate(tool)
    return tool


Tools = list[Annotated[dict[str, object], AfterValidator(_tool)]]
Messages = Annotated[list[MessageBody], Field(min_length=1)]


def _prompts(prompt: object, validate: ValidatorFunctionWrapHandler) -> object:
    """Return the prompts as a list. A mistake raises one error instead of one error for each accepted form."""
    is_single = isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int))
    try:
        return validate([prompt] if is_single else prompt)
    except ValidationError as error:
        message = "must be a text, token ids, or a list of texts or of lists of token ids"
        raise PydanticCustomError("prompt", message) from error


Prompts = Annotated[list[str] | list[list[TokenId]], Field(min_length=1), WrapValidator(_prompts)]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1)]],  # an empty one would end every completion
    Field(max_length=MAX_STOPS),
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]


class StreamOptions(Body):
    include_usage: bool = False


class SamplingBody(Body):
    model_config = ConfigDict(extra="allow")  # for the fields that are not supported

    model: Name | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stops = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS)] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    temperature: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1), AfterValidator(lambda top_k: max(0, top_k))] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="after")
    def check(self) -> "SamplingBody":
        for name, neutral in NOT_SUPPORTED.items():
            if (self.model_extra or {}).get(name, neutral) != neutral:
                raise ServingError(400, f"{name} is not supported: leave it out", name)
        if self.stream_options is not None and not self.stream:
            message = "stream_options can only be given with stream = true"
            raise ServingError(400, message, "stream_options")
        if self.temperature == 0 and self.n > 1:
            raise ServingError(400, "n must be 1 with temperature 0: all choices would be the same", "n")
        return self


class CompletionBody(SamplingBody):
    prompt: Prompts
    max_tokens: TokenId = 16
    logprobs: LogprobCount | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def check_length(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise ServingError(400, "max_tokens must be at least 1, unless echo is true", "max_tokens")
        return self


class ChatBody(SamplingBody):
    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: LogprobCount = 0
    tools: Tools = []
    tool_choice: Literal["none", "auto"] = "auto"
    chat_template_kwargs: dict[str, object] = {}
    add_generation_prompt: Literal[True] = True
    echo: Literal[False] = False

    @model_validator(mode="after")
    def check_chat(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ServingError(400, "top_logprobs needs logprobs = true", "top_logprobs")
        self.tools = [] if self.tool_choice == "none" else self.tools
        return self


class LoadBody(Body):
    """Body of ``/v1/load_lora_adapter``: a directory of this machine, or the files by name in base64."""

    lora_name: Name
    lora_path: Name | None = None
    files: Mapping[str, str] | None = None
    load_inplace: bool = False


class UnloadBody(Body):
    lora_name: Name


class TokenizeBody(Body):
    """Body of ``/tokenize``: either ``prompt`` or ``messages``."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools = []
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    model: Name | None = None
    tokens: list[TokenId]


def read(kind: type[ModelT], raw: bytes) -> ModelT:
    """Parse and validate a request body. Raises ServingError (400)."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        field = str(first["loc"][0]) if first["loc"] else None
        raise ServingError(400, f"{where}: {first['msg']}"[:500], field) from error
