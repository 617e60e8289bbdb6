"""Parse the command line, run one command, and convert errors to printed lines and exit statuses.

Imports nothing heavy, nor do the other modules of ``retrain.cli`` at their top level: ``retrain --help`` must answer in
less than half a second, and ``retrain check`` without torch.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from retrain import __version__
from retrain.cli import adapters, environments, explain, look, probe, serve, setup, status, train, trial, ui
from retrain.errors import RetrainError

# The class belongs to click, or in newer versions to a private copy of it inside typer.
CommandLineError: type[Exception] = typer.BadParameter.__mro__[1]


class CommandLine(TyperGroup):
    """Prints a user's mistakes without a traceback; other exceptions pass through."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Parse the options before the command; exit with status 2 on an unknown one."""
        with plain_usage_errors():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; exit with ``error.exit_status``, 2 on a usage or permission error, 130 on Ctrl-C."""
        try:
            with plain_usage_errors():
                return super().invoke(ctx)
        except RetrainError as error:
            from retrain.util.text import visible

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
        from retrain.util.text import visible

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

COMMANDS = {
    "Run": (train.train, train.resume, train.squeeze, adapters.export, serve.serve),
    "Look": (look.check, explain.explain, trial.try_, probe.probe, status.status, ui.ui, look.compare, look.report,
             adapters.sample),
    "Set up": (setup.init, setup.schema, setup.doctor, environments.environments),
}  # fmt: skip
"""Commands by their heading in the help, in its order."""
for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(name=command.__name__.rstrip("_"), rich_help_panel=panel)(command)


def print_version(version: bool) -> None:
    if version:
        print(f"retrain {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Declare the options that precede the command."""


def main() -> None:
    app(prog_name="retrain")
