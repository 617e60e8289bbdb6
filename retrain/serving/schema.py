"""Validate request bodies strictly: every mistake is a ``ServingError`` that names the field.

Fields are those of OpenAI's API and vLLM's additions. Unsupported fields that would change the distribution are
rejected, not ignored.
"""

import json
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

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


class Body(BaseModel):
    """JSON object with strict types; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = False


class SamplingBody(Body):
    model: Name | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
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
    user: str | None = None
    # Not supported: refused unless they have no effect.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    use_beam_search: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    logprob_token_ids: list[int] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check(self) -> None:
        for name, neutral in NOT_SUPPORTED.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                raise ServingError(400, f"{name} is not supported: leave it out", name)
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise ServingError(400, "only response_format of type text is supported", "response_format")
        if self.stream_options is not None and not self.stream:
            raise ServingError(400, "stream_options can only be given with stream = true", "stream_options")
        if len(self.stops) > MAX_STOPS or len(self.stop_token_ids or ()) > MAX_STOPS:
            raise ServingError(400, f"more than {MAX_STOPS} stops", "stop")
        if "" in self.stops:
            raise ServingError(400, "stop has an empty string, which would end every completion", "stop")
        if self.temperature == 0 and (self.n or 1) > 1:
            raise ServingError(400, "n must be 1 with temperature 0: all choices would be the same", "n")


class CompletionBody(SamplingBody):
    prompt: Any = None
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = False
    add_special_tokens: bool | None = True
    suffix: str | None = None
    best_of: int | None = None

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ServingError(400, "best_of is not supported: leave it out", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise ServingError(400, "max_tokens must be at least 1, unless echo is true", "max_tokens")

    def prompts(self) -> list[Any]:
        """Return the prompts, either all texts or all lists of token ids. Raises ServingError."""
        given = [self.prompt] if isinstance(self.prompt, str) or _are_all(self.prompt, int) else self.prompt
        if _are_all(given, str) or (_are_all(given, list) and all(_are_all(each, int) or not each for each in given)):
            return given
        raise ServingError(
            400, "prompt must be a text, token ids, or a list of texts or of lists of token ids", "prompt"
        )


def _are_all(values: Any, kind: type) -> bool:
    """Return whether this is a list whose values all have exactly this type (a bool is not an int)."""
    return isinstance(values, list) and bool(values) and all(type(each) is kind for each in values)


class ChatBody(SamplingBody):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    echo: bool | None = False

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ServingError(400, "top_logprobs needs logprobs = true", "top_logprobs")
        if self.tool_choice not in (None, "none", "auto"):
            raise ServingError(400, 'tool_choice must be "none" or "auto": no call can be forced', "tool_choice")
        if self.echo:
            raise ServingError(400, "echo is not supported: leave it out", "echo")
        if self.add_generation_prompt is False:
            raise ServingError(400, "add_generation_prompt must be true", "add_generation_prompt")

    @property
    def offered(self) -> list[dict[str, Any]]:
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
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class DetokenizeBody(Body):
    model: Name | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


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


def plain_text(text: str, param: str) -> str:
    """Return the text. Raises ServingError for a lone surrogate, which tokenizers reject."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ServingError(400, f"{param} contains a lone surrogate: send valid Unicode", param) from error
    return text
