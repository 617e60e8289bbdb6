"""``serve``: serve a model and adapters over OpenAI's protocol."""

import os
from typing import Annotated

import typer

from retrain.cli.output import note
from retrain.errors import UsageError
from retrain.extras import is_installed, missing

Target = Annotated[
    str,
    typer.Argument(
        metavar="WHAT",
        help="A run, campaign or adapter directory; a model's name or directory; a run's file (TOML).",
        show_default=False,
    ),
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option("--api-key-env", metavar="NAME", help="Environment variable with the key that clients must send."),
]


def serve(
    target: Target,
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes a free port.")] = 8000,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Where to listen; other machines need a key.")
    ] = "127.0.0.1",
    api_key_env: ApiKeyEnv = None,
    adapters: Annotated[
        list[str] | None, typer.Option("--adapter", metavar="NAME=DIR", help="Serve this adapter too; may be repeated.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="MODEL", help="Base model that replaces the one that the adapter names."),
    ] = None,
    max_queue: Annotated[
        int, typer.Option("--max-queue", metavar="N", min=1, help="Completions that may wait; more get a 503.")
    ] = 4096,
    max_rows: Annotated[
        int, typer.Option("--max-rows", metavar="N", min=1, help="Completions that are decoded at once.")
    ] = 256,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="Longest time for one request.")
    ] = 3600.0,
) -> None:
    """Serve a model with LoRA adapters over OpenAI's HTTP API.

    Offers completions, chats, and vLLM's routes for adapters. Prints one line when it is ready. Ctrl-C lets it finish
    running requests.
    """
    for module in ("starlette", "uvicorn"):
        if not is_installed(module):
            raise missing("retrain serve", module)
    key = _key(host, api_key_env)
    from retrain.serving.listening import ARRIVAL_S, HttpServer, listening_socket, url_of
    from retrain.serving.sources import sources

    with listening_socket(host, port) as bound:
        served = sources(target, adapters or (), base)
        for line in served.notes:
            note(line)
        from retrain.policy.base import find_model_files, load_weights
        from retrain.serving.app import app_of
        from retrain.serving.service import Service

        loaded = load_weights(
            find_model_files(served.config), served.config.backend.device, served.config.inference.dtype
        )
        service = Service(loaded, served.name, max_queue=max_queue, max_rows=max_rows, timeout_s=timeout, notify=note)
        try:
            for name, directory in served.adapters.items():
                service.load_at_start(name, directory)
            names = ",".join(service.served)

            def ready() -> None:
                print(f"serving {names} at {url_of(bound)}", flush=True)

            HttpServer(app_of(service, key), ready, min(ARRIVAL_S, timeout)).run(sockets=[bound])
        finally:
            service.close()


def _key(host: str, name: str | None) -> str | None:
    """Return the key that clients must send. Raises UsageError if one is required and missing."""
    from retrain.util.addresses import is_local

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
