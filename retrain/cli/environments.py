"""``environments``: list providers, tools and tasks, and check whether they work."""

import sys
from dataclasses import dataclass
from typing import Annotated

from retrain.cli.arguments import AsJson, option
from retrain.cli.output import print_record, print_table
from retrain.environments.providers import reasoning_gym
from retrain.errors import RetrainError
from retrain.extras import EXTRAS, install_line, is_installed
from retrain.files import dumps
from retrain.sandbox import sandbox


@dataclass(frozen=True)
class Capability:
    """``kind`` is provider, tool or task; ``state`` is "ready", or the fault."""

    kind: str
    name: str
    state: str
    about: str

    @property
    def ready(self) -> bool:
        return self.state == READY


READY = "ready"
ABOUT_PROVIDERS = {
    "reasoning_gym": "a hundred kinds of generated problems with verifiable answers, one turn each",
    "verifiers": "environments of Prime Intellect's hub and others made with verifiers, and its tasksets",
    "openenv": "environments behind an OpenEnv server, one that runs or one that each worker starts",
}
ABOUT_TOOLS = {
    "calculator": "exact arithmetic",
    "python": "runs the model's Python in a sandbox",
    "search": "finds passages of a local corpus",
}


def environments(
    check: Annotated[bool, option("--check", "Also look at every data set of reasoning-gym: a minute or two.")] = False,
    as_json: AsJson = False,
) -> None:
    """List environment providers and tools, and what to install.

    With --check, test every data set of reasoning-gym: its own answers must score 1 and nonsense must not.
    """
    capabilities = [*providers(), *tools(), *(tasks() if check else [])]
    if as_json:
        print(dumps([vars(capability) for capability in capabilities], indent=2))
        return
    if not sys.stdout.isatty():
        for capability in capabilities:
            print_record(capability.kind, name=capability.name, state=capability.state, about=capability.about)
        return
    for kind, title in (("provider", "provider ="), ("tool", "tools ="), ("task", "reasoning_gym, id =")):
        rows = [capability for capability in capabilities if capability.kind == kind]
        if kind == "task":
            refused = [capability for capability in rows if not capability.ready]
            if rows:
                print(f"\n{len(rows) - len(refused)} of {len(rows)} data sets of reasoning-gym are sound")
            rows = refused
        if rows:
            print()
            print_table(
                (title, "state", ""), [(capability.name, capability.state, capability.about) for capability in rows]
            )


def providers() -> list[Capability]:
    states = {name: READY if is_installed(name) else install_line(name) for name in ABOUT_PROVIDERS}
    return [Capability("provider", name, states[name], about) for name, about in ABOUT_PROVIDERS.items()]


def tools() -> list[Capability]:
    (bm25,) = EXTRAS["search"].packages
    states = {
        "calculator": READY,
        "python": sandbox.available() or READY,
        "search": READY if is_installed(bm25) else install_line(bm25),
    }
    return [Capability("tool", name, states[name], about) for name, about in ABOUT_TOOLS.items()]


def tasks() -> list[Capability]:
    try:
        checked = reasoning_gym.check()
    except RetrainError as error:
        return [Capability("task", "reasoning_gym", str(error), "")]
    return [Capability("task", each.name, each.reason or READY, f"{each.seconds:.1f} s") for each in checked]
