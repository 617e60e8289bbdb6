"""Looks before anything is written whether all places that a launch will write to are its own, or free."""

from collections.abc import Sequence
from pathlib import Path

from retrain.campaign.planning.plan import RunSpec, run_directory
from retrain.errors import NotOurs, listed
from retrain.ownership import ELSEWHERE, Owner, check_claim, check_publish, owner_of, refuse_links
from retrain.records.reader import read_manifest
from retrain.records.schema.layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MANIFEST, STATE

ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
CHECKPOINT_FILES = (*ADAPTER_FILES, MANIFEST, "optimizer.safetensors", STATE)
AWAY = "move it away, or " + ELSEWHERE
NOBODY = Owner("")


def run_place(spec: RunSpec) -> str:
    return run_directory(Path(), spec).as_posix()


def check_places(directory: Path, specs: Sequence[RunSpec]) -> None:
    """Raise NotOurs when training these runs in ``directory`` would write over what others have written there.

    Looked at are the directory itself and those of its runs, the checkpoints and adapters that unfinished runs will
    write, [backend] adapter_path and [squeeze] output_path. Raises UsageError for links, also for a damaged manifest.
    """
    check_claim(directory)
    refuse_links(directory)
    owner, content = owner_of(directory) or NOBODY, {}
    if owner is not NOBODY and (directory / MANIFEST).is_file():
        content = read_manifest(directory)
    entries = {entry["run_id"]: entry for entry in content.get("runs", ())}
    known = [(entries[spec.run_id]["path"], run_place(spec)) for spec in specs if spec.run_id in entries]
    # Other runs are another campaign's; so are runs that have their files elsewhere in the directory.
    if entries and (not known or any(there != here for there, here in known)):
        others = listed(list(entries), 3)
        raise NotOurs(f"{directory} holds other runs ({others}; here {specs[0].run_id}): {ELSEWHERE}")
    for spec in specs:
        place, folder = run_place(spec), run_directory(directory, spec)
        own = owner.at(place)
        check_claim(folder, own if owner is not NOBODY else None, AWAY)
        entry = entries.get(spec.run_id)
        if entry is None or entry["state"] != "done" or entry["step"] < spec.config.training.max_steps:
            _check_adapters(folder, spec, own)
    _check_squeezed(specs, owner, bool(content.get("squeeze")))


def _check_adapters(folder: Path, spec: RunSpec, owner: Owner) -> None:
    """The run's own checkpoints to come and ``final/``, and the user's directory for its adapter."""
    from_backend = spec.config.backend.backend != "local"
    check_publish(folder / "final", () if from_backend else ADAPTER_FILES, owner.at("final"), AWAY)
    newest, others = 0, []
    for path in (folder / "checkpoints").glob("step_*"):
        if path.name[5:].isdecimal():
            if owner_of(path) == owner.at(f"checkpoints/{path.name}"):
                newest = max(newest, int(path.name[5:]))
            else:
                others.append(path)
    for path in sorted(others):
        if newest < int(path.name[5:]) <= spec.config.training.max_steps:
            check_publish(path, CHECKPOINT_FILES, owner.at(f"checkpoints/{path.name}"), AWAY)
    if export := spec.export:
        advice = "set [backend] adapter_path to another directory"
        check_publish(export, () if from_backend else ADAPTER_FILES, owner.at("adapter_path"), advice)


def _check_squeezed(specs: Sequence[RunSpec], owner: Owner, made: bool) -> None:
    """The user's directory for the compressed adapter, which is that of whichever run ends first."""
    settings, advice = specs[0].config.squeeze, "set [squeeze] output_path to another directory"
    if not settings.enabled or made or not settings.output_path:
        return
    out, refused = Path(settings.output_path), []
    for spec in specs:
        try:
            check_publish(out, ADAPTER_FILES, owner.at(run_place(spec)).at("final/squeezed"), advice)
            return
        except NotOurs as error:
            refused.append(error)
    raise refused[0]
