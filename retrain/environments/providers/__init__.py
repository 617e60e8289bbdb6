"""Environments of other people's libraries behind ``environments.protocol``; one file for each, none imported here."""

from typing import NamedTuple


class Provider(NamedTuple):
    """``target`` is ``module:Class``; ``module`` what the library is imported as, ``extra`` what installs it."""

    target: str
    module: str
    extra: str
    purpose: str


_HERE = "retrain.environments.providers"

PROVIDERS = {
    "reasoning_gym": Provider(
        f"{_HERE}.reasoning_gym:ReasoningGym",
        "reasoning_gym",
        "gym",
        "a hundred kinds of generated problems with verifiable answers, one turn each",
    ),
    "verifiers": Provider(
        f"{_HERE}.verifiers:Verifiers",
        "verifiers",
        "verifiers",
        "environments of Prime Intellect's hub and others made with verifiers, and its tasksets",
    ),
    "openenv": Provider(
        f"{_HERE}.openenv:OpenEnv",
        "openenv",
        "openenv",
        "environments behind an OpenEnv server, one that runs or one that each worker starts",
    ),
}
"""By the name that a configuration uses."""
