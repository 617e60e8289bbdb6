"""The server engine that a configuration asks for."""

import os
from collections.abc import Callable
from pathlib import Path

from retrain.config import Config
from retrain.engines.server.adapters import AdapterStore
from retrain.engines.server.client import Server
from retrain.engines.server.dialects import DIALECTS
from retrain.engines.server.engine import ServerEngine, Vocabulary
from retrain.engines.server.fleet import Fleet, Launches
from retrain.engines.server.pool import WAITS
from retrain.errors import UsageError
from retrain.policy.base import BaseModel

ADAPTERS = "adapters"  # Default for `adapter_dir`, below a run's or campaign's directory


def server_engine(
    config: Config,
    base: BaseModel,
    directory: Path,
    tell: Callable[[str, str], None] = lambda text, level: None,
    kept: Fleet | None = None,
) -> ServerEngine:
    """The engine of ``config``, with its servers there. Those that it says are to be launched are ``kept`` by somebody,
    or else started in ``directory``.

    Raises UsageError when a key is missing or a server does not answer.
    """
    asked, model = config.inference, config.model.model
    key = os.environ.get(asked.api_key_env, "") if asked.api_key_env else ""
    if asked.api_key_env and not key:
        raise UsageError(f"[inference] api_key_env: ${asked.api_key_env} is not set: export {asked.api_key_env}=…")
    place = Path(asked.adapter_dir).expanduser() if asked.adapter_dir else directory / ADAPTERS
    store = AdapterStore(place, model)
    made: list[ServerEngine] = []

    def server_message(text: str, level: str) -> None:
        """Tell whoever listens to the engine now: it outlives the cohort that it is made for."""
        (made[0].tell if made else tell)(text, level)

    fleet = None if asked.launch is None else kept or Launches(config, directory, server_message)
    dialect = DIALECTS[asked.engine]
    engine = ServerEngine(
        model,
        [address.rstrip("/").removesuffix("/v1") for address in asked.url or ()],
        lambda url: Server(url, dialect, key, asked.timeout_s, asked.max_in_flight, asked.upload),
        store,
        Vocabulary(base.text, base.vocab_size, base.eos_ids, base.context_length),
        tell,
        asked.patience_s,
        fleet,
        asked.sleep,
        WAITS,
    )
    made.append(engine)
    try:
        engine.open()
    except BaseException:
        engine.close()
        raise
    return engine
