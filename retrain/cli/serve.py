"""``serve``: serve a model and adapters over OpenAI's protocol."""

import os

from retrain.cli.arguments import argument, option
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
        server = service.Service(
            loaded, served.name, max_queue=max_queue, max_rows=max_rows, timeout_s=timeout, notify=note
        )
        try:
            for name, directory in served.adapters.items():
                server.load_at_start(name, directory)
            names = ",".join(server.served)

            def ready() -> None:
                print(f"serving {names} at {listening.url_of(bound)}", flush=True)

            listening.HttpServer(app.app_of(server, key), ready, min(listening.ARRIVAL_S, timeout)).run(sockets=[bound])
        finally:
            server.close()


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
