"""Environments of other people's libraries, each behind our protocol."""

from __future__ import annotations

from typing import NamedTuple


class Provider(NamedTuple):
    """``target`` is the ``module:Class`` of the adapter."""

    target: str


PROVIDERS: dict[str, Provider] = {}
