"""Build answers of the API (JSON with an ETag, errors of one sentence), and read the parameters of a query."""

import math
import zlib
from collections.abc import Callable, Sequence

import numpy as np
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from retrain.errors import RetrainError
from retrain.files import dumps

JsonObject = dict[str, object]
MOST_VALUE = 4096  # Characters of one value of a query
DIGITS = 7  # Significant digits of numbers that are float32 on the disk


class ApiError(Exception):
    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status, self.text = status, text


class Query:
    """Query parameters of a request. Its methods raise ApiError (400) for a missing or invalid value."""

    def __init__(self, source: Request | QueryParams):
        self._values = source.query_params if isinstance(source, Request) else source
        for name, value in self._values.multi_items():
            if len(value) > MOST_VALUE or "\0" in value:
                raise ApiError(400, f"the value of {name[:40]!r} is too long, or holds a NUL")

    def text(self, name: str, default: str | None = None) -> str:
        value = self._values.get(name, default)
        if value is None:
            raise ApiError(400, f"the query needs {name}=…")
        return value

    def texts(self, name: str, most: int, default: Sequence[str] = ()) -> list[str]:
        """Return the distinct values of a parameter that may be repeated: one at least, ``most`` at most."""
        values = list(dict.fromkeys(self._values.getlist(name))) or list(default)
        if not values:
            raise ApiError(400, f"the query needs {name}=…")
        if len(values) > most:
            raise ApiError(400, f"{name} may be given {most} times")
        return values

    def number(self, name: str, default: int, low: int, high: int) -> int:
        value = self._values.get(name)
        if value is None or value == "":
            return default
        digits = value.removeprefix("-")
        if not (digits.isascii() and digits.isdecimal() and len(digits) < 19 and low <= int(value) <= high):
            raise ApiError(400, f"{name} is a whole number from {low} to {high}")
        return int(value)

    def real(self, name: str) -> float | None:
        text = self.text(name, "")
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ApiError(400, f"{name} is a number")
        return value

    def choice(self, name: str, choices: Sequence[str]) -> str:
        value = self._values.get(name) or choices[0]
        if value not in choices:
            raise ApiError(400, f"{name} is one of {', '.join(choices)}")
        return value


class JsonRoute(Route):
    """A GET route. ``answer`` computes its JSON from a query, in a thread of the server's pool. An ApiError,
    RetrainError or OSError becomes a JSON error of one sentence."""

    def __init__(self, path: str, answer: Callable[[Query], object]):
        def endpoint(request: Request) -> Response:
            try:
                return _json_response(request, answer(Query(request)))
            except ApiError as error:
                return error_response(error.status, error.text)
            except RetrainError as error:
                return error_response(400, str(error))
            except OSError as error:
                reason = (error.strerror or type(error).__name__).lower()
                text = f"a file could not be read: {reason}; it may have been moved or replaced just now"
                return error_response(404, text)

        super().__init__(path, endpoint, methods=["GET"])
        self.answer = answer


def error_response(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": " ".join(text.split())}, status)


def _json_response(request: Request, value: object) -> Response:
    body = dumps(value).encode()
    tag = f'W/"{zlib.crc32(body):08x}{len(body):x}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)


def plain(values: np.ndarray) -> list[float | None]:
    """Return numbers for JSON: integers unchanged, others rounded to ``DIGITS`` significant digits, NaN and infinities
    as None."""
    if np.issubdtype(values.dtype, np.integer):
        return values.tolist()
    numbers = np.asarray(values, np.float64)
    finite = np.isfinite(numbers)
    is_whole = finite & (numbers == np.rint(numbers)) & (np.abs(numbers) < 1e15)
    if not is_whole.all():
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            power = DIGITS - 1 - np.floor(np.log10(np.abs(np.where(finite & (numbers != 0), numbers, 1.0))))
            scale = 10.0 ** np.clip(power, -300, 300)
            numbers = np.where(is_whole, numbers, np.rint(numbers * scale) / scale)
    if finite.all():
        return numbers.tolist()
    return [number if known else None for number, known in zip(numbers.tolist(), finite.tolist(), strict=True)]
