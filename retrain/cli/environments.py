"""``environments``: list providers, tools and tasks, and check whether they work."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from retrain.cli.arguments import AS_JSON, option
from retrain.cli.output import print_record, print_report, print_table
from retrain.environments.providers import reasoning_gym
from retrain.errors import RetrainError
from retrain.extras import EXTRAS, install_line, is_installed
from retrain.records.schema.base import Values
from retrain.sandbox import sandbox

READY = "ready"
ABOUT_PROVIDERS = {
    "reasoning_gym": "a hundred kinds of generated problems with verifiable answers, one turn each",
    "verifiers": "environments of Prime Intellect's hub and others made with verifiers, and its tasksets",
    "openenv": "environments behind an OpenEnv server, one that runs or one that each worker starts",
}
TITLES = {"provider": "provider =", "tool": "tools =", "task": "reasoning_gym, id ="}


class Capability(NamedTuple):
    """A provider, tool or task (``kind``). ``state``: "ready", else what to install or why it does not work."""

    kind: str
    name: str
    state: str
    about: str


def environments(
    check: bool = option("--check", "Also look at every data set of reasoning-gym: a minute or two.", False),
    as_json: bool = AS_JSON,
) -> None:
    """List environment providers and tools, and what to install.

    With --check, test every data set of reasoning-gym: its own answers must score 1 and nonsense must not.
    """
    capabilities = [each._asdict() for each in (*providers_and_tools(), *(tasks() if check else ()))]
    print_report(capabilities, as_json, print_capabilities, lambda rows: [print_record(**row) for row in rows])


def print_capabilities(capabilities: Sequence[Values]) -> None:
    for kind, title in TITLES.items():
        rows = [[*capability.values()][1:] for capability in capabilities if capability["kind"] == kind]
        if kind == "task" and rows:
            refused = [row for row in rows if row[1] != READY]
            print(f"\n{len(rows) - len(refused)} of {len(rows)} data sets of reasoning-gym are sound")
            rows = refused
        if rows:
            print()
            print_table((title, "state", ""), rows)


def providers_and_tools() -> Iterator[Capability]:
    def state(package: str) -> str:
        return READY if is_installed(package) else install_line(package)

    for name, about in ABOUT_PROVIDERS.items():
        yield Capability("provider", name, state(name), about)
    (bm25,) = EXTRAS["search"].packages
    yield Capability("tool", "calculator", READY, "exact arithmetic")
    yield Capability("tool", "python", sandbox.available() or READY, "runs the model's Python in a sandbox")
    yield Capability("tool", "search", state(bm25), "finds passages of a local corpus")


def tasks() -> list[Capability]:
    try:
        checked = reasoning_gym.check()
    except RetrainError as error:
        return [Capability("task", "reasoning_gym", str(error), "")]
    return [Capability("task", each.name, each.reason or READY, f"{each.seconds:.1f} s") for each in checked]
