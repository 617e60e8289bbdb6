"""Validate request bodies strictly: every mistake is a ``ServingError`` that names the field.

Fields are those of OpenAI's API and vLLM's additions. Unsupported fields that would change the distribution are
rejected, not ignored.
"""

import json
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from retrain.serving.refusal import ServingError

MAX_CHOICES = 256  # Largest `n`
MAX_LOGPROBS = 20  # Largest `logprobs` and `top_logprobs`; vLLM's default
MAX_STOPS = 64

NOT_SUPPORTED = {
    "frequency_penalty": [0],
    "presence_penalty": [0],
    "repetition_penalty": [1],
    "min_tokens": [0],
    "logit_bias": [{}],
    "bad_words": [[]],
    "allowed_token_ids": [[]],
    "structured_outputs": [{}],
    "use_beam_search": [False],
    "logprob_token_ids": [[]],
    "prompt_logprobs": [],  # 0 is a request for prompt log-probabilities
    "truncate_prompt_tokens": [],
    "suffix": [""],
    "chat_template": [""],
    "continue_final_message": [False],
}
"""Unsupported fields, with the values that have no effect and are accepted."""

Model = TypeVar("Model", bound="Body")
Name = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class Body(BaseModel):
    """JSON object with strict types; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def _unicode(text: str) -> str:
    """Return the text. Raises PydanticCustomError for a lone surrogate, which tokenizers reject."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("surrogate", "contains a lone surrogate: send valid Unicode") from error
    return text


Text = Annotated[str, AfterValidator(_unicode)]


class TextPart(Body):
    type: Literal["text"]
    text: str


def _joined(content: Any) -> Any:
    """Return the content of a message as one text, which every template takes."""
    if not isinstance(content, list):
        return "" if content is None else content
    try:
        return "\n".join(part.text for part in map(TextPart.model_validate, content))
    except ValidationError as error:
        raise PydanticCustomError("text", "only text is supported: leave out all other parts") from error


def _arguments(arguments: Any) -> Any:
    """Return the arguments of a call, which OpenAI's API has as JSON text, as an object."""
    try:
        decoded = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise PydanticCustomError("json", "arguments are no JSON") from error
    return {} if decoded is None else decoded


class ChatFunction(Body):
    model_config = ConfigDict(extra="allow")

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments)] = {}


class ChatToolCall(Body):
    id: str | None = ""
    type: str = "function"
    function: ChatFunction


class ChatMessage(Body):
    """A message as templates expect it: text content, arguments of calls as JSON values."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Text, BeforeValidator(_joined)] = ""
    name: Text | None = None
    tool_call_id: Text | None = None
    tool_calls: list[ChatToolCall] | None = None

    @model_validator(mode="after")
    def check_calls(self) -> "ChatMessage":
        self.tool_calls = self.tool_calls or None
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("calls", "only an assistant's message can have tool_calls")
        return self


class ToolParameters(Body):
    properties: dict[str, dict[str, Any]] | None = None


class ToolFunction(Body):
    name: str
    parameters: ToolParameters | None = None


class ChatTool(Body):
    function: ToolFunction


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the tool as it was sent, which is what the template renders, after checking it."""
    ChatTool.model_validate(tool)
    return tool


Tools = list[Annotated[dict[str, Any], AfterValidator(_tool)]]
Messages = Annotated[list[ChatMessage], Field(min_length=1)]


def _prompt(prompt: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Return the prompt. Raises ServingError with one message in place of one for each form."""
    try:
        return validate(prompt)
    except ValidationError as error:
        message = "prompt must be a text of valid Unicode, token ids, or a list of texts or of lists of token ids"
        raise ServingError(400, message, "prompt") from error


Prompt = Annotated[
    Text | Annotated[list[Text] | list[int] | list[list[int]], Field(min_length=1)], WrapValidator(_prompt)
]


class StreamOptions(Body):
    include_usage: bool | None = False


class ResponseFormat(Body):
    type: str | None = None


class SamplingBody(Body):
    model_config = ConfigDict(extra="allow")  # for the fields that are not supported

    model: Name | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1)] | None = 0
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    response_format: ResponseFormat | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @model_validator(mode="after")
    def check(self) -> "SamplingBody":
        """Raise ServingError for fields that are not supported, and for those that contradict each other."""
        for name, neutral in NOT_SUPPORTED.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in neutral:
                raise ServingError(400, f"{name} is not supported: leave it out", name)
        is_plain = self.response_format is None or self.response_format.type == "text"
        stop_count = max(len(self.stops), len(self.stop_token_ids or ()))
        _refuse(not is_plain, "response_format", "only response_format of type text is supported")
        _refuse(
            self.stream_options is not None and not self.stream,
            "stream_options",
            "stream_options can only be given with stream = true",
        )
        _refuse(stop_count > MAX_STOPS, "stop", f"more than {MAX_STOPS} stops")
        _refuse("" in self.stops, "stop", "stop has an empty string, which would end every completion")
        _refuse(
            self.temperature == 0 and (self.n or 1) > 1,
            "n",
            "n must be 1 with temperature 0: all choices would be the same",
        )
        return self


def _refuse(wrong: bool, param: str, message: str) -> None:
    if wrong:
        raise ServingError(400, message, param)


class CompletionBody(SamplingBody):
    prompt: Prompt
    max_tokens: TokenId | None = 16
    logprobs: LogprobCount | None = None
    echo: bool | None = False
    add_special_tokens: bool | None = True
    best_of: int | None = None

    @model_validator(mode="after")
    def check_completion(self) -> "CompletionBody":
        several = self.best_of is not None and self.best_of != (self.n or 1)
        _refuse(several, "best_of", "best_of is not supported: leave it out")
        nothing = self.max_tokens == 0 and not self.echo
        _refuse(nothing, "max_tokens", "max_tokens must be at least 1, unless echo is true")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, either all texts or all lists of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt  # pyright: ignore[reportReturnType]


class ChatBody(SamplingBody):
    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: LogprobCount | None = None
    tools: Tools | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = True
    echo: bool | None = False

    @model_validator(mode="after")
    def check_chat(self) -> "ChatBody":
        _refuse(bool(self.top_logprobs) and not self.logprobs, "top_logprobs", "top_logprobs needs logprobs = true")
        is_forced = self.tool_choice not in (None, "none", "auto")
        _refuse(is_forced, "tool_choice", 'tool_choice must be "none" or "auto": no call can be forced')
        _refuse(bool(self.echo), "echo", "echo is not supported: leave it out")
        _refuse(self.add_generation_prompt is False, "add_generation_prompt", "add_generation_prompt must be true")
        return self

    @property
    def offered(self) -> Tools:
        return [] if self.tool_choice == "none" else self.tools or []


class LoadBody(Body):
    """``/v1/load_lora_adapter``: a directory of this machine, or the files by name in base64."""

    lora_name: Name
    lora_path: Name | None = None
    files: dict[str, str] | None = None
    load_inplace: bool = False


class UnloadBody(Body):
    lora_name: Name
    lora_int_id: int | None = None


class TokenizeBody(Body):
    """``/tokenize`` of a text, or of messages."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class DetokenizeBody(Body):
    model: Name | None = None
    tokens: list[TokenId]


def read(kind: type[Model], raw: bytes) -> Model:
    """Parse and validate a request body. Raises ServingError (400)."""
    try:
        content = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # also for bytes that are not UTF-8, and for endless numbers
        raise ServingError(400, f"the body is not JSON: {str(error)[:200]}") from error
    if not isinstance(content, dict):
        raise ServingError(400, f"the body must be a JSON object, not {type(content).__name__}")
    try:
        return kind.model_validate(content)
    except RecursionError as error:
        raise ServingError(400, "the body is nested too deeply") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        field = str(first["loc"][0]) if first["loc"] else None
        raise ServingError(400, f"{where}: {first['msg']}"[:500], field) from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
