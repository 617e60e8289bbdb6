"""``environments``: list providers, environments, tools and rewards, describe one, and check reasoning-gym."""

from collections.abc import Iterable

from retrain.cli.arguments import AS_JSON, argument, option
from retrain.cli.output import print_record, print_report, print_table
from retrain.environments.installed import READY, Capability, arguments_of, capabilities
from retrain.environments.providers import reasoning_gym
from retrain.errors import RetrainError
from retrain.records.schema.base import Values

TITLES = {
    "provider": "provider =",
    "environment": "verifiers, id =",
    "tool": "tools =",
    "reward": "[reward] type =",
    "sandbox": "sandbox",
    "task": "reasoning_gym, id =",
}


def environments(
    name: str | None = argument("NAME", "Describe the arguments of this provider, environment or tool.", None),
    check: bool = option("--check", "Also look at every data set of reasoning-gym: a minute or two.", False),
    as_json: bool = AS_JSON,
) -> None:
    """List environments, tools and rewards, and what to install.

    With NAME, list its arguments. With --check, test every data set of reasoning-gym: its own answers must score 1 and
    nonsense must not.
    """
    if name is not None:
        arguments = arguments_of(name)
        rows = [each._asdict() for each in arguments]
        print_report(rows, as_json, lambda _: print_table(("argument", "type", "default"), arguments))
        return
    found = [each._asdict() for each in (*capabilities(), *(tasks() if check else ()))]
    print_report(found, as_json, print_capabilities, lambda rows: [print_record(**row) for row in rows])


def print_capabilities(found: Iterable[Values]) -> None:
    for kind, title in TITLES.items():
        rows = [[*capability.values()][1:] for capability in found if capability["kind"] == kind]
        if kind == "task" and rows:
            refused = [row for row in rows if row[1] != READY]
            print(f"\n{len(rows) - len(refused)} of {len(rows)} data sets of reasoning-gym are sound")
            rows = refused
        if rows:
            print()
            print_table((title, "state", ""), rows)


def tasks() -> list[Capability]:
    try:
        checked = reasoning_gym.check()
    except RetrainError as error:
        return [Capability("task", "reasoning_gym", str(error), "")]
    return [Capability("task", each.name, each.reason or READY, f"{each.seconds:.1f} s") for each in checked]
