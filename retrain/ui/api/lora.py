"""``/api/lora``: energy of adapters by rank, module and checkpoint, and overlap of runs' leading directions."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path

import numpy as np

from retrain.records.reader import checkpoint_paths
from retrain.records.schema.layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS, FINAL, SAVED
from retrain.ui.adapters import DIRECTIONS, Spectrum, norm, overlap, spectra
from retrain.ui.answers import JsonObject, Query, plain
from retrain.ui.context import ApiContext
from retrain.ui.decimation import evenly_spaced
from retrain.ui.library import Library
from retrain.ui.sources import Home, RunSource

MOST_RUNS, MOST_CHECKPOINTS = 12, 12
MOST_BYTES = 1 << 30  # Bytes of adapters that one page reads


def lora(context: ApiContext, query: Query) -> JsonObject:
    home = context.library.home(query.text("at"))
    runs = readable_runs(context.library, home)
    return {
        "runs": [adapter_json(context.library, run, len(home.runs) == 1) for run in runs],
        "squeeze": squeezed(home),
        "overlap": overlaps(context.library, runs),
        "directions": DIRECTIONS,
        "left_out": len(home.runs) - len(runs),
    }


def readable_runs(library: Library, home: Home) -> list[RunSource]:
    chosen, size = [], 0
    for run in home.runs[:MOST_RUNS]:
        adapters = adapters_of(library, run)
        weights = library.places.file(adapters[-1][1], ADAPTER_WEIGHTS) if adapters else None
        with suppress(OSError):
            size += weights.stat().st_size if weights is not None else 0
        if chosen and size > MOST_BYTES:
            break
        chosen.append(run)
    return chosen


def adapter_json(library: Library, run: RunSource, all_checkpoints: bool) -> JsonObject:
    adapters = adapters_of(library, run)[0 if all_checkpoints else -1 :]
    checkpoints = [(step, read) for step, path in adapters if (read := _read(library, path))]
    if not checkpoints:
        return run.head | {"step": None, "modules": [], "energy": [], "checkpoints": []}
    step, modules = checkpoints[-1]
    return run.head | {
        "step": step,
        "modules": [
            {"name": name, "norm": norm(spectrum), "energy": plain(spectrum.energy)}
            for name, spectrum in modules.items()
        ],
        "energy": plain(mean_energy(modules)),
        "checkpoints": [
            {"step": step, "norm": float(np.sqrt(sum(norm(each) ** 2 for each in read.values()))),
             "energy": plain(mean_energy(read))}
            for step, read in checkpoints
        ],
    }  # fmt: skip


def mean_energy(modules: Mapping[str, Spectrum]) -> np.ndarray:
    """Return the mean over trained modules of the energy in the first k directions, k = 1 … largest rank."""
    curves = [curve for each in modules.values() if len(curve := each.energy) and curve[-1] > 0]
    rank = max(map(len, curves), default=0)
    return np.mean([np.pad(curve, (0, rank - len(curve)), constant_values=1.0) for curve in curves], axis=0) \
        if curves else np.empty(0)  # fmt: skip


def adapters_of(library: Library, run: RunSource) -> list[tuple[int | None, Path]]:
    """Return (updates done, directory) of up to ``MOST_CHECKPOINTS`` checkpoints in order, and the final adapter."""
    checkpoints: list[tuple[int | None, Path]] = []
    if library.places.folder(run.path, SAVED) is not None:
        with suppress(OSError):
            names = sorted((entry.name for entry in checkpoint_paths(run.path)), key=_number)
            paths = [(_number(name), library.places.folder(run.path, f"{SAVED}/{name}")) for name in names]
            checkpoints = [(step, path) for step, path in paths if step >= 0 and path is not None]
    checkpoints = evenly_spaced(checkpoints, MOST_CHECKPOINTS)
    final = library.places.folder(run.path, FINAL)
    if final is not None and (not checkpoints or checkpoints[-1][0] != run.step):
        return [*checkpoints, (run.step, final)]
    return checkpoints


def overlaps(library: Library, runs: Sequence[RunSource]) -> list[JsonObject]:
    """Return for every pair of runs their ``overlap``, averaged over modules, and its value by ``chance``."""
    read = [(run, modules) for run in runs
            if (adapters := adapters_of(library, run)) and (modules := _read(library, adapters[-1][1]))]  # fmt: skip
    out: list[JsonObject] = []
    for (a, mine), (b, its) in combinations(read, 2):
        shared = [(value, DIRECTIONS / mine[name].directions.shape[0]) for name in mine
                  if name in its and (value := overlap(mine[name], its[name])) is not None]  # fmt: skip
        if shared:
            mean, chance = (float(np.mean([pair[i] for pair in shared])) for i in (0, 1))
            out.append({"a": a.location, "b": b.location, "same_condition": a.label == b.label, "overlap": mean,
                        "chance": min(1.0, chance), "modules": len(shared)})  # fmt: skip
    return out


def squeezed(home: Home) -> list[JsonObject]:
    tables = [home.manifest.get("squeeze"), *(home.manifest.get("squeezes") or {}).values()]
    return [{key: value for key, value in table.items() if key not in ("run", "compressed")}
            for table in tables if isinstance(table, dict)]  # fmt: skip


def _read(library: Library, adapter: Path) -> dict[str, Spectrum]:
    """Return the spectra of an adapter; {} if its files are missing or cannot be read, as while they are written."""
    weights, settings = (library.places.file(adapter, name) for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG))
    if weights is None or settings is None:
        return {}
    try:
        return spectra(weights, settings)
    except (ValueError, KeyError, TypeError, OSError, RecursionError, np.linalg.LinAlgError):
        return {}


def _number(name: str) -> int:
    match = re.fullmatch(r"step_(\d{1,12})", name)
    return int(match[1]) if match else -1
