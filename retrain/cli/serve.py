"""``serve`` and ``ui``: serve models over OpenAI's protocol, and a local web page over directories of runs."""

import os
import secrets
import socket
import webbrowser
from contextlib import closing
from pathlib import Path

from retrain.cli.arguments import argument, option, output_path
from retrain.cli.output import note
from retrain.errors import UsageError
from retrain.extras import is_installed, missing
from retrain.util.addresses import is_local


def serve(
    target: str = argument(
        "WHAT", "A run, campaign or adapter directory; a model's name or directory; a run's file (TOML)."
    ),
    port: int = option("--port N", "0 takes a free port.", 8000, min=0, max=65535),
    host: str = option("--host ADDRESS", "Where to listen; other machines need a key.", "127.0.0.1"),
    api_key_env: str | None = option("--api-key-env NAME", "Environment variable with the key that clients must send."),
    adapters: list[str] | None = option("--adapter NAME=DIR", "Serve this adapter too; may be repeated."),
    base: str | None = option("--base MODEL", "Base model that replaces the one that the adapter names."),
    max_queue: int = option("--max-queue N", "Completions that may wait; more get a 503.", 4096, min=1),
    max_rows: int = option("--max-rows N", "Completions that are decoded at once.", 256, min=1),
    timeout: float = option("--timeout SECONDS", "Longest time for one request.", 3600.0, min=0.1),
) -> None:
    """Serve a model with LoRA adapters over OpenAI's HTTP API.

    Offers completions, chats, and vLLM's routes for adapters. Prints one line when it is ready. Ctrl-C lets it finish
    running requests.
    """
    for module in ("starlette", "uvicorn"):
        if not is_installed(module):
            raise missing("retrain serve", module)
    key = _key(host, api_key_env)
    from retrain.adapters.sources import sources
    from retrain.policy.base import find_model_files, load_weights
    from retrain.serving import app, listening, service

    with listening.listening_socket(host, port) as bound:
        served = sources(target, adapters or (), base)
        for line in served.notes:
            note(line)
        loaded = load_weights(
            find_model_files(served.config), served.config.backend.device, served.config.inference.dtype
        )
        with closing(
            service.Service(loaded, served.name, max_queue=max_queue, max_rows=max_rows, timeout_s=timeout, notify=note)
        ) as server:
            for name, directory in served.adapters.items():
                server.load_at_start(name, directory)
            names = ",".join(server.served)

            def ready() -> None:
                print(f"serving {names} at {listening.url_of(bound)}/v1", flush=True)

            listening.HttpServer(app.app_of(server, key), ready, min(listening.ARRIVAL_S, timeout)).run(sockets=[bound])


def _key(host: str, name: str | None) -> str | None:
    """Return the key that clients must send. Raises UsageError if one is required and missing."""
    if name is None:
        if not is_local(host):
            raise UsageError(f"--host {host} is open to other machines: name a key with --api-key-env NAME")
        return None
    key = os.environ.get(name, "")
    if not key:
        raise UsageError(f"the environment variable {name} is not set: type {name}=… retrain serve …")
    if not key.isascii() or key != key.strip():
        raise UsageError(f"the key in {name} must be ASCII without spaces around it, as a header can hold it")
    return key


def ui(
    directories: list[Path] | None = argument(
        "DIR...", "Campaigns, runs, or directories of those; logs without any.", default=None
    ),
    port: int = option("--port N", "0 takes a free port.", 8571, min=0, max=65535),
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
    from retrain.serving.listening import HttpServer, listening_socket, url_of
    from retrain.ui import bundle as copies
    from retrain.ui import library, numbers, places, server

    pages = library.Library(places.Places(directories or [Path("logs")]), numbers.cache_directory())
    if bundle is not None:
        size = copies.write_bundle(pages, bundle, lambda done, of: note(f"copied {done} of {of}"))
        print(f"{bundle / 'index.html'}: {size / 1e6:.1f} MB, opens in any browser without a server")
        return
    token = None if is_local(host) else secrets.token_urlsafe(24)
    with listening_socket(host, port) as bound:
        url = url_of(bound, socket.gethostname()) + (f"/?token={token}" if token else "/")
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
