"""Servers and engines that tests of one module open; the modules define ``base`` and ``server`` by ``served_world``."""

import pytest
from helpers.servers import StandIn, engine_of


@pytest.fixture
def start():
    """Start another server; it is closed at the end."""
    servers = []

    def start(model, **keys) -> StandIn:
        servers.append(StandIn(model, **keys))
        return servers[-1]

    yield start
    for each in servers:
        each.close()


@pytest.fixture
def connect(base, server, start, tmp_path):
    """Open an engine at these addresses, or at the one server; it is closed at the end."""
    engines = []

    def connect(*urls: str, **keys):
        engines.append(engine_of(base, urls or [server.url], tmp_path / "adapters", **keys))
        return engines[-1]

    yield connect
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(connect):
    return connect()
