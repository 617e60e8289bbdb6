"""Parse the command line, run one command, and convert errors to printed lines and exit statuses.

Nothing heavy is imported here: ``retrain --help`` must answer in less than half a second. The module of a command is
imported when the command is used; it imports torch only in the function that needs it, after it has checked the input.
"""

import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from retrain import __version__
from retrain.errors import RetrainError
from retrain.util.text import visible

# Base class of usage errors in click, or for newer versions of typer in its private copy of click.
CommandLineError: type[Exception] = typer.BadParameter.__mro__[1]

COMMANDS = {
    "Run": {
        "train:train": "Train a campaign or run; print comparison, rank and paths.",
        "train:resume": "Continue an interrupted run or campaign from its last checkpoints.",
        "train:squeeze": "Analyse the LoRA rank of an adapter and compress it.",
        "adapters:export": "Export an adapter merged into a model or padded.",
        "serve:serve": "Serve a model with LoRA adapters over OpenAI's HTTP API.",
    },
    "Look": {
        "look:check": "Check a file and print every mistake with its fix.",
        "explain:explain": "Show a file's conditions, detectable effects and costs; train nothing.",
        "probe:eval_": "Evaluate models on held-out problems; train nothing.",
        "probe:try_": "Show a file's prompts, sampled answers and rewards; train nothing.",
        "probe:probe": "Compare the updates of all conditions on the same rollouts.",
        "status:status": "Show runs: state, steps, reward and held-out accuracy.",
        "serve:ui": "Show campaigns and runs on a local web page, live.",
        "compare:compare": "Compare conditions over seeds: paired differences, confidence intervals, verdicts.",
        "look:report": "Write the HTML report of a campaign or run.",
        "adapters:sample": "Sample from an adapter and its base, side by side.",
    },
    "Set up": {
        "setup:init": "Write a commented campaign file and its JSON Schema.",
        "setup:schema": "Print the JSON Schema of campaign files, for editors.",
        "setup:doctor": "Check this machine: Python, packages, devices, extras, disk.",
        "environments:environments": "List environments, tools and rewards, and what to install.",
    },
}
"""Commands by their heading in the help: ``module:function`` → first line of the command's help."""


def command_name(path: str) -> str:
    return path.partition(":")[2].rstrip("_")


FUNCTIONS = {command_name(path): path for commands in COMMANDS.values() for path in commands}


def command_of(name: str) -> Any:
    single = typer.Typer(add_completion=False)
    single.command(name)(pkgutil.resolve_name(f"retrain.cli.{FUNCTIONS[name]}"))
    return typer.main.get_command(single)


class CommandLine(TyperGroup):
    """Imports only the command that runs, and prints a user's mistakes without a traceback; other exceptions pass
    through."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, others = super().resolve_command(ctx, args)
        return name, command_of(name) if name else command, others

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with plain_usage_errors():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; exit with ``error.exit_status``, 2 on a usage or permission error, 130 on Ctrl-C."""
        try:
            with plain_usage_errors():
                return super().invoke(ctx)
        except RetrainError as error:
            print(visible(str(error)), file=sys.stderr)
            raise typer.Exit(error.exit_status) from error
        except PermissionError as error:
            print(f"{error.filename or 'a file'}: permission denied", file=sys.stderr)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            print("Interrupted.", file=sys.stderr)
            raise typer.Exit(130) from error


@contextmanager
def plain_usage_errors() -> Iterator[None]:
    """Print a usage error (unknown, missing or wrong command, option or argument) in one line; exit with status 2."""
    try:
        yield
    except CommandLineError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # typer prints the help
            raise
        context: Any = getattr(error, "ctx", None)
        fault = " ".join(error.format_message().split())  # pyright: ignore[reportAttributeAccessIssue]
        fault += "" if fault.endswith((".", "?")) else "."
        command = context.command_path if context else "retrain"
        print(f"error: {visible(fault)} For help type: {command} --help", file=sys.stderr)
        raise typer.Exit(2) from error


app = typer.Typer(
    name="retrain",
    cls=CommandLine,
    help="Reinforcement learning of language models as experiments: train a campaign, compare its conditions.",
    epilog="Exit status: 0 done, 1 a run failed, 2 usage or configuration, 129 terminal closed, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for panel, commands in COMMANDS.items():
    for path, line in commands.items():
        app.command(command_name(path), help=line, rich_help_panel=panel)(lambda: None)  # replaced when it runs


def print_version(version: bool) -> None:
    if version:
        print(f"retrain {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Declare the options that precede the command."""


def main() -> None:
    app(prog_name="retrain")
