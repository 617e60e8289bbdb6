"""``mine``: strategic grams from a run's own completions, for ``[planning]``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.commands.arguments import AsJson, output_path
from retrain.commands.output import note, print_table, visible
from retrain.files import dumps
from retrain.wording import plural

if TYPE_CHECKING:
    from retrain.mining.mine import Tell

SHOWN = 20
"""Groups that are printed."""


def mine(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.", show_default=False)],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", parser=output_path, help="TOML file to write.", show_default=False)
    ],
    every: Annotated[bool, typer.Option("--all", help="Take wrong answers too, not only right ones.")] = False,
    embedder: Annotated[
        str,
        typer.Option(
            "--embedder",
            metavar="MODEL",
            help="What tells which grams mean the same: base, the input embeddings of the run's base; or a directory "
            "or name that sentence-transformers loads.",
        ),
    ] = "base",
    clusters: Annotated[
        int | None,
        typer.Option(
            "--clusters",
            metavar="N",
            min=1,
            help="Groups of like meaning; without it a fifth as many as grams, 100 at most.",
            show_default=False,
        ),
    ] = None,
    top: Annotated[
        float,
        typer.Option(
            "--top",
            metavar="SHARE",
            min=1e-9,
            max=1.0,
            help="Share of the groups that is kept, by the number of completions that hold them.",
        ),
    ] = 0.2,
    least: Annotated[
        float,
        typer.Option(
            "--least", metavar="SHARE", min=0.0, max=1.0, help="Share of the completions that a gram must be in."
        ),
    ] = 0.01,
    as_json: AsJson = False,
) -> None:
    """Find the phrases that recur over a run's right answers, in groups of one meaning, for the key grams of planning.

    The same completions and options give the same file.
    """
    from retrain.algorithms.grams import check_writable, write_grams
    from retrain.mining.corpus import completions_of
    from retrain.mining.embedding import embedder_of
    from retrain.mining.mine import Wanted
    from retrain.mining.mine import mine as mined

    check_writable(out)
    completions = completions_of(run, correct=not every)
    name, embed = embedder_of(embedder, completions.facts)
    wanted = Wanted(clusters, top, least)
    with _progress() as tell:
        found = mined(completions, embed, wanted, tell)
    options = ["--all"] * every + ["--embedder", embedder] + ([] if clusters is None else ["--clusters", str(clusters)])
    options += ["--top", f"{top:g}", "--least", f"{least:g}"]
    command = shlex.join(["retrain", "mine", str(run), "--out", str(out), *options])
    about = found.about(completions, wanted, name, command)
    write_grams(out, about, found.clusters, found.completions)
    if found.cut:
        note(
            f"{found.cut:,} of {found.completions:,} completions were recorded without their ends; "
            "[logging] rollouts_every = 1 records every step whole"
        )
    if as_json:
        groups = [{"grams": list(each.grams), "documents": each.documents} for each in found.clusters]
        print(dumps({**about, "out": str(out), "cluster": groups}, indent=2))
        return
    kind = "completions" if every else "right answers"
    kept = sum(len(each.grams) for each in found.clusters)
    print(f"{found.completions:,} {kind} of {visible(completions.facts['run_id'])}, {plural(found.candidates, 'gram')} "
          f"in {plural(found.groups, 'group')} by {visible(name)}; kept: {plural(kept, 'gram')} in "
          f"{plural(len(found.clusters), 'group')}\n")  # fmt: skip
    rows = [(f"{100 * each.documents / found.completions:.1f}%", str(len(each.grams)),
             "; ".join(map(visible, each.grams[:4])) + ("; …" if len(each.grams) > 4 else ""))
            for each in found.clusters[:SHOWN]]  # fmt: skip
    print_table((kind, "grams", "the most frequent of them"), rows, left=("the most frequent of them",))
    if len(found.clusters) > SHOWN:
        print(f"and {len(found.clusters) - SHOWN} more")
    print(f'\nwritten     {visible(str(out))}: read and edit it, then [planning] grams = "{visible(out.name)}"')


@contextmanager
def _progress() -> Iterator[Tell]:
    """Bars on standard error for a person who waits; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda what, done, of: None
        return
    from rich.console import Console
    from rich.progress import Progress, TaskID

    tasks: dict[str, TaskID] = {}
    with Progress(console=Console(stderr=True), transient=True) as bars:

        def tell(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=of)
            bars.update(tasks[what], completed=done)

        yield tell
