"""``ui``: serve a local web page over directories of runs."""

import secrets
import socket
import webbrowser
from pathlib import Path

from retrain.cli.arguments import argument, option, output_path
from retrain.cli.output import note
from retrain.extras import is_installed, missing
from retrain.util.addresses import is_local

PORT = 8571


def ui(
    directories: list[Path] | None = argument(
        "DIR...", "Campaigns, runs, or directories of those; logs without any.", default=None
    ),
    port: int = option("--port N", "0 takes a free port.", PORT, min=0, max=65535),
    host: str = option("--host ADDRESS", "Where to listen; other machines need a token.", "127.0.0.1"),
    browser: bool = option("--open", "Open the page in a browser.", False),
    bundle: Path | None = option(
        "--bundle OUT", "Write a copy that opens without a server, and end.", parser=output_path
    ),
) -> None:
    """Show campaigns and runs on a local web page, live.

    Their files are not changed. Prints the address of the page. Reads the records of retrain, the Tinker cookbook, TRL
    and trackio. Ctrl-C ends it.
    """
    for module in ("starlette", "uvicorn", "jinja2"):
        if not is_installed(module):
            raise missing("retrain ui", module, "ui")
    from retrain.serving.listening import HttpServer, listening_socket
    from retrain.ui import bundle as copies
    from retrain.ui import library, numbers, places, server

    pages = library.Library(places.Places(directories or [Path("logs")]), numbers.cache_directory())
    if bundle is not None:
        size = copies.write_bundle(pages, bundle, lambda done, of: note(f"copied {done} of {of}"))
        print(f"{bundle / 'index.html'}: {size / 1e6:.1f} MB, opens in any browser without a server")
        return
    token = None if is_local(host) else secrets.token_urlsafe(24)
    with listening_socket(host, port) as bound:
        url = address_of(bound, token)
        http: HttpServer | None = None

        def ready() -> None:
            print(f"retrain ui at {url}", flush=True)
            if browser:
                webbrowser.open(url)

        app = server.app_of(
            pages, host=host, port=bound.getsockname()[1], token=token,
            closing=lambda: http is not None and http.should_exit,
        )  # fmt: skip
        http = HttpServer(app, ready)
        http.run(sockets=[bound])


def address_of(bound: socket.socket, token: str | None) -> str:
    """Return the page's URL, with this machine's name if the server listens on all interfaces."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
