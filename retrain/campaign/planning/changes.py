"""Compare a continued run with its records; a person approves every difference.

The comparison covers the resolved configuration, the code of retrain and plug-ins, package versions, the base model's
weights and tokenizer, the data, device and number format.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from retrain.config.runs import EXTENSION, RunSpec, differences
from retrain.errors import UsageError
from retrain.records.environment import code_version, module_hashes, package_versions
from retrain.records.reader import checkpoint_paths, intact_config
from retrain.records.schema.base import Values
from retrain.records.schema.campaign import RunEntry
from retrain.records.schema.layout import CONFIG
from retrain.training.inputs import change_line

# Packages that do not affect the numbers of a run; ``retrain`` itself is compared by its code
QUIET_PACKAGES = ("pydantic", "retrain", "rich", "trackio", "typer", "wandb")
MISSING = "(not recorded)"


@dataclass
class Approval:
    """Approves or refuses differences. ``accept``: all are approved. Otherwise ``ask`` shows new lines to the user and
    returns the answer; None if the user cannot be asked. ``notify`` receives every approved line."""

    accept: bool = False
    ask: Callable[[list[str]], bool] | None = None
    notify: Callable[[str], None] = lambda line: None
    accepted: list[str] = field(default_factory=list)

    def __call__(self, directory: Path, changes: Sequence[str]) -> None:
        """Raise UsageError, which lists them, unless all ``changes`` are accepted."""
        new = [line for line in dict.fromkeys(changes) if line not in self.accepted]
        if not new:
            return
        if not self.accept and (self.ask is None or not self.ask(new)):
            listed = "".join(f"\n  {line}" for line in new)
            raise UsageError(
                f"{directory} has changed since its last start:{listed}\n"
                "To go on all the same, add --accept-changes; to begin anew, give another directory with --out"
            )
        self.accepted += new
        for line in new:
            self.notify(f"changed since the last start: {line}")


def version_changes(home: Path, spec: RunSpec, folder: Path) -> list[str]:
    """Return a line for each recorded version (retrain, plug-ins, packages) of a run that differs from the present one.
    If a run with checkpoints has no record, the only line says that the record is lost."""
    facts = intact_config(home)
    if not facts:
        begun = checkpoint_paths(home)
        return [f"{home / CONFIG} is lost: what made the checkpoints is not known"] if begun else []
    lines = []
    code, now = facts.get("code") or {}, code_version()
    if code.get("sha256") != now["sha256"]:
        old = f"{code.get('version')} ({str(code.get('sha256'))[:12]})" if code else MISSING
        lines.append(change_line("retrain's code", old, f"{now['version']} ({now['sha256'][:12]})"))
    modules, hashes = facts.get("modules") or {}, module_hashes(spec.config, folder)
    for name in sorted({*modules, *hashes}):
        if modules.get(name) != hashes.get(name):
            old, new = (str(table.get(name, "(not there)"))[:12] for table in (modules, hashes))
            kind = "files of the reward model" if name in spec.config.reward_models else "code of"
            lines.append(change_line(f"{kind} {name}", old, new))
    packages, installed = facts.get("packages") or {}, package_versions()
    for name in sorted({*packages, *installed} - set(QUIET_PACKAGES)):
        if packages.get(name) != installed.get(name):
            old, new = packages.get(name, "(absent)"), installed.get(name, "(absent)")
            lines.append(change_line(f"package {name}", old, new))
    return lines


def settings_changes(
    specs: Sequence[RunSpec], old: Mapping[str, Values], entries: Mapping[str, RunEntry]
) -> tuple[list[str], list[str]]:
    """Return changed settings of existing runs: (lines to approve, lines about additional steps).

    ``old`` are recorded configurations and ``entries`` the manifest's entries, both by run id. More steps need no
    approval, because the user requested them. Raises UsageError for impossible changes: fewer steps than are done, and
    changed settings of a finished run that gets no more steps.
    """
    to_approve, extensions = [], []
    for spec in specs:
        entry = entries.get(spec.run_id)
        if entry is None or spec.run_id not in old or (entry.state == "pending" and not entry.step):
            continue
        changed = differences(old[spec.run_id], spec.config.to_dict())
        steps = changed.pop(EXTENSION, None)
        if steps and steps[1] < entry.step:
            raise UsageError(
                f"{spec.run_id} has done {entry.step} steps, max_steps = {steps[1]} asks for fewer: "
                "give another directory with --out"
            )
        if steps:
            extensions.append(change_line(EXTENSION, *steps))
        lines = [change_line(key, *pair) for key, pair in sorted(changed.items())]
        if lines and entry.state == "done" and not (steps and steps[1] > entry.step):
            raise UsageError(
                f"{spec.run_id} is finished, with other settings ({'; '.join(lines)}): give another directory with "
                f"--out, or ask for more steps than {entry.step} to continue it with these"
            )
        to_approve += lines
    return list(dict.fromkeys(to_approve)), list(dict.fromkeys(extensions))
