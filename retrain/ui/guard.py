"""Check every request: the Host header, the token, and that it only reads.

Another site that is open in the same browser must not read anything here. The Host header is checked against DNS
rebinding, no answer permits reading across origins, and events need this page's origin.
"""

import hmac
import ipaddress
import re
import socket
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retrain.ui.answers import error_response
from retrain.util.addresses import is_local

LISTENED = ("/api/events",)
"""Paths with endless answers. Their number is limited, and another site must not be able to use it up."""
MOST_QUERY = 16_384  # Bytes of a query
CSP = "; ".join((
    "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:", "connect-src 'self'",
    "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
))  # fmt: skip
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Guard:
    """Outermost layer of the application. ``host``: address at which it listens; ``token``: None if requests need
    none."""

    def __init__(self, app: ASGIApp, host: str, token: str | None = None, port: int = 0):
        self.app, self.host, self.token = app, host, token
        self.cookie = f"retrain_ui_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        answer = self._stopped(scope, headers) or self._without_token(scope, headers)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await (answer or self.app)(scope, receive, with_headers)

    def _stopped(self, scope: Scope, headers: Headers) -> Response | None:
        method, path = scope["method"], scope["path"]
        if not self._is_ours(name_in(headers.get("host", ""))):
            return error_response(403, "this server is asked under another name than the one that it listens at")
        if path in LISTENED and _is_cross_site(headers):
            return error_response(403, "another page must not listen here")
        if method not in ("GET", "HEAD"):
            return error_response(405, f"{method[:20]} {path[:100]} is not answered: this server only reads")
        if len(scope["query_string"]) > MOST_QUERY:
            return error_response(414, f"the query is longer than {MOST_QUERY} bytes")
        return None

    def _is_ours(self, name: str) -> bool:
        """Return whether a Host name is this server's. If other machines may connect, every IP address is accepted,
        because DNS rebinding needs a name. The port is not checked, because it may be a tunnel's."""
        if is_local(self.host):
            return is_local(name)
        names = {self.host, "localhost", socket.gethostname(), socket.getfqdn()}
        return _is_number(name) or name in {each.lower() for each in names}

    def _without_token(self, scope: Scope, headers: Headers) -> Response | None:
        """Return None if the cookie or Bearer token is right; a redirect that sets the cookie if the query's token is
        right; else 401."""
        if self.token is None:
            return None
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_right(bearer) or self._is_right(Request(scope).cookies.get(self.cookie, "")):
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if any(name == "token" and self._is_right(value) for name, value in query):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            path = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
            target = "/" + path.lstrip("/") + (f"?{rest}" if rest else "")
            answer = RedirectResponse(target, 303, {"Cache-Control": "no-store"})
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
            return answer
        return error_response(
            401, "this server needs the token that it printed when it began: open the address with ?token=…"
        )

    def _is_right(self, token: str) -> bool:
        return self.token is not None and hmac.compare_digest(token.encode(), self.token.encode())


def name_in(host: str) -> str:
    """Return the lower-case name in a Host header, without port and brackets; "" if the header is malformed."""
    found = re.fullmatch(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::[0-9]+)?", host)
    return (found[1] or found[2] or "").lower().rstrip(".") if found else ""


def _is_cross_site(headers: Headers) -> bool:
    """Return whether a browser's headers name another origin. Programs that are no browsers send neither header."""
    origin = headers.get("origin")
    ours = {f"{scheme}://{headers.get('host', '')}" for scheme in ("http", "https")}
    if origin is not None and origin not in ours:
        return True
    return headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
