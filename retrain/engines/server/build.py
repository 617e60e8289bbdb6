"""Builds the server engine of a configuration; training and the doctor call it."""

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from retrain.config import Config
from retrain.engines.server.adapters import AdapterStore
from retrain.engines.server.automatic import is_composed
from retrain.engines.server.client import ServerClient
from retrain.engines.server.completions import ServedModel
from retrain.engines.server.connection import api_key, server_root
from retrain.engines.server.dialects import DIALECTS
from retrain.engines.server.engine import ServerEngine
from retrain.engines.server.fleet import Fleet, LocalFleet, names_of
from retrain.engines.server.pool import WAITS
from retrain.policy.base import BaseModel

ADAPTERS = "adapters"  # Default for `adapter_dir`, below a run's or campaign's directory


def server_engine(
    config: Config,
    base: BaseModel,
    directory: Path,
    notify: Callable[[str, str], None] = lambda text, level: None,
    fleet: Fleet | None = None,
) -> ServerEngine:
    """Return the engine of ``config`` after its servers have answered. Without a ``fleet``, servers of ``[inference]
    launch`` are started; their logs are in ``directory``.

    Raises UsageError if an API key's variable is not set, the adapter directory cannot be made, or no server answers.
    """
    settings, model = config.inference, config.model.model
    key = api_key(settings.api_key_env, "[inference]")
    composed = is_composed(settings.launch)
    if composed and not key:
        key = secrets.token_urlsafe(24)  # other users of this machine cannot send requests
    adapter_directory = Path(settings.adapter_dir).expanduser() if settings.adapter_dir else directory / ADAPTERS
    store = AdapterStore(adapter_directory, model, base.dtype)
    engines: list[ServerEngine] = []

    def server_message(text: str, level: str) -> None:
        # The engine outlives the cohort that it is built for: its present ``notify`` is the later cohort's.
        (engines[0].pool.notify if engines else notify)(text, level)

    dialect = DIALECTS[settings.engine]
    engine = ServerEngine(
        ServedModel(model, base.text, base.vocab_size, base.eos_ids, base.context_length),
        [server_root(address) for address in settings.url or ()],
        lambda url: ServerClient(url, dialect, key, settings.timeout_s, settings.max_in_flight, settings.upload),
        store,
        notify,
        None if settings.launch is None else fleet or LocalFleet(config, directory, server_message, key),
        settings.released,
        replace(WAITS, patience_s=settings.patience_s),
    )
    engines.append(engine)
    begin = time.monotonic()
    if composed:
        logs = ", ".join(f"{directory / name}.log" for name in names_of(settings.replicas))
        notify(f"vLLM starts (log: {logs})", "info")
    try:
        engine.open()
    except BaseException:
        engine.close()
        raise
    if composed:
        notify(f"vLLM is ready after {time.monotonic() - begin:.0f} s", "info")
    return engine
