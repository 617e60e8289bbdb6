"""``ui``: serve a local web page over directories of runs."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli.arguments import output_path
from retrain.extras import is_installed, missing

if TYPE_CHECKING:
    from retrain.ui.library import Library

PORT = 8571


def ui(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DIR...", help="Campaigns, runs, or directories of those; logs without any.", show_default=False
        ),
    ] = None,
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes a free port.")] = PORT,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Where to listen; other machines need a token.")
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle", metavar="OUT", parser=output_path, help="Write a copy that opens without a server, and end."
        ),
    ] = None,
) -> None:
    """Show campaigns and runs on a local web page, live.

    Their files are not changed. Prints the address of the page. Reads the records of retrain, the Tinker cookbook, TRL
    and trackio. Ctrl-C ends it.
    """
    for module in ("starlette", "uvicorn", "jinja2"):
        if not is_installed(module):
            raise missing("retrain ui", module, "ui")
    from retrain.serving.listening import HttpServer, listening_socket
    from retrain.ui.library import Library
    from retrain.ui.numbers import Pool, cache_directory
    from retrain.ui.places import Places
    from retrain.ui.server import app_of
    from retrain.util.addresses import is_local

    library = Library(Places(directories or [Path("logs")]), Pool(cache_directory()))
    if bundle is not None:
        write_copy(library, bundle)
        return
    token = None if is_local(host) else secrets.token_urlsafe(24)
    with listening_socket(host, port) as bound:
        url = address_of(bound, token)
        server: HttpServer | None = None

        def ready() -> None:
            print(f"retrain ui at {url}", flush=True)
            if browser:
                import webbrowser

                webbrowser.open(url)

        app = app_of(
            library, host=host, port=bound.getsockname()[1], token=token,
            closing=lambda: server is not None and server.should_exit,
        )  # fmt: skip
        server = HttpServer(app, ready)
        server.run(sockets=[bound])


def write_copy(library: Library, out: Path) -> None:
    from retrain.cli.output import note
    from retrain.ui.bundle import write_bundle

    size = write_bundle(library, out, lambda done, of: note(f"copied {done} of {of}"))
    print(f"{out / 'index.html'}: {size / 1e6:.1f} MB, opens in any browser without a server")


def address_of(bound: socket.socket, token: str | None) -> str:
    """Return the page's URL, with this machine's name if the server listens on all interfaces."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
