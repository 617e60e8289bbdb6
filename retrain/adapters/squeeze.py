"""LoRA-Squeeze on run directories: how much rank an adapter uses, and a smaller adapter (arXiv 2602.10993)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from retrain.config.evaluation import Squeeze
from retrain.config.runs import RunSpec, run_directory
from retrain.environments.build import Longest
from retrain.errors import UsageError
from retrain.files import ASIDE, aside_of, prepare_directory, write_json
from retrain.ownership import Owner, check_publish, install, owner_of, publish
from retrain.records.context import RunContext
from retrain.records.reader import RunReader, read_manifest, verification_files
from retrain.records.reporter import FINISH_SECONDS
from retrain.records.schema.layout import (
    ADAPTER_FILES,
    ADAPTER_WEIGHTS,
    ANALYSIS,
    CONFIG,
    FINAL,
    MANIFEST,
    VERIFICATION,
)
from retrain.records.trackers import Warn, log_squeeze_analysis
from retrain.threads import Thread

if TYPE_CHECKING:
    from retrain.training.bases import Bases


def find_adapter(directory: Path) -> Path:
    """The adapter to squeeze: the directory itself, a run's ``final/`` or newest checkpoint, or a campaign's first
    finished run. Raises UsageError when there is none."""
    if (directory / ADAPTER_WEIGHTS).is_file():
        return directory
    if (directory / FINAL / ADAPTER_WEIGHTS).is_file():
        return directory / FINAL
    for row in reversed(RunReader(directory).checkpoints()):
        path = row.get("sampler_path")
        if isinstance(path, str) and (directory / path / ADAPTER_WEIGHTS).is_file():
            return directory / path
    if (directory / MANIFEST).is_file():
        for run in read_manifest(directory)["runs"]:
            if run["state"] == "done" and run["path"] != ".":
                return find_adapter(directory / run["path"])
    raise UsageError(f"{directory} holds no adapter: give a run directory, its final/ or a PEFT adapter directory")


def analyse_adapter(adapter: Path, settings: Squeeze) -> dict[str, Any]:
    """The squeeze table of one adapter directory, as JSON (see ``record.tables.squeeze_table``).

    Candidates are its ``target_ranks``, by default every rank; the table then shows the powers of two, the source rank
    and the recommended one.
    """
    from retrain.maths.squeeze import recommend

    spectra = _spectra(adapter)
    result = recommend(
        spectra,
        min_variance_retention=settings.min_variance_retention,
        min_layer_retention=settings.min_layer_retention,
        ranks=settings.target_ranks,
    )
    shown = {result.source_rank, result.recommended, *(1 << k for k in range(result.source_rank.bit_length()))}
    return {
        "run": str(adapter),
        "source_rank": result.source_rank,
        "recommended_rank": result.recommended,
        "min_variance_retention": settings.min_variance_retention,
        "min_layer_retention": settings.min_layer_retention,
        "num_layers": len(spectra),
        "rows": [
            {
                "rank": row.rank,
                "mean_variance": row.mean_energy,
                "min_variance": row.min_energy,
                "max_variance": row.max_energy,
                "relative_error": row.weight_error,
            }
            for row in result.rows
            if settings.target_ranks or row.rank in shown
        ],
        "worst_module": result.worst_module,
        "rank_pattern": result.rank_pattern,
        "untrained": list(result.untrained),
        "message": result.reason,
    }


def _spectra(adapter: Path) -> dict[str, Any]:
    from retrain.maths.squeeze import analyse
    from retrain.policy.adapter_io import AdapterFile

    with AdapterFile(adapter) as file:
        return {name: analyse(*file.factors(name), file.scales[name]) for name in file.modules}


def compress_adapter(adapter: Path, rank: int, out: Path, pattern: bool = False) -> Path:
    """Write the adapter truncated to ``rank`` as a PEFT directory, module by module.

    With ``pattern`` every module gets a rank of its own: the fewest altogether that keep the total energy of ``rank``
    everywhere. Raises UsageError above the source rank, ModelError for what is more than a LoRA adapter, NotOurs when
    ``out`` holds an adapter that was not compressed from this one.
    """
    from retrain.adapters.streaming import write_streamed
    from retrain.maths.squeeze import rank_pattern
    from retrain.policy.adapter_io import AdapterFile

    with AdapterFile(adapter) as file:
        if not 1 <= rank <= file.rank:
            raise UsageError(
                f"cannot compress {adapter} to rank {rank}: its rank is {file.rank}; use --to 1 … {file.rank}"
            )
        file.require_plain()
        alpha = file.config["lora_alpha"] if not file.config.get("use_rslora") else None
        if alpha is None or file.config.get("rank_pattern") or file.config.get("alpha_pattern"):
            # One plain rule for the result, alpha = r: a scale of 1 that every loader computes alike.
            alpha = float(rank)
        ranks = dict.fromkeys(file.modules, rank)
        if pattern:
            ranks, alpha = rank_pattern(_spectra(adapter), rank), float(rank)
        layout = {name: where.at(ranks[name]) for name, where in file.modules.items()}
        own = {name: each for name, each in ranks.items() if each != rank}
        config = file.config | {
            "r": rank, "lora_alpha": alpha, "use_rslora": False, "rank_pattern": own,
            "alpha_pattern": {name: float(each) for name, each in own.items()},
        }  # fmt: skip
        prepare_directory(out.parent)
        owner = _owner(adapter, "squeezed")
        check_publish(out, ADAPTER_FILES, owner)
        aside = aside_of(out)
        pairs = (
            (name, _truncated(*file.factors(name), file.scales[name], ranks[name], alpha / rank))
            for name in file.modules
        )
        write_streamed(aside, layout, pairs, config)
    publish(aside, out, owner)
    return out


def _owner(adapter: Path, place: str) -> Owner:
    here = Owner(hashlib.blake2b(str(adapter.resolve()).encode(), digest_size=16).hexdigest())
    return (owner_of(adapter) or here).at(place)


def _truncated(a: Any, b: Any, scale: float, rank: int, new_scale: float) -> tuple[Any, Any]:
    """Factors of exactly ``rank`` rows; a layer of lower rank (rank_pattern) is filled up with zeros."""
    from retrain.maths.squeeze import truncate
    from retrain.policy.adapter_io import padded

    return padded(truncate(a, b, scale, min(rank, a.shape[0]), new_scale), rank)


def squeeze(directory: Path, to: int | None = None, out: Path | None = None, pattern: bool = False) -> dict[str, Any]:
    """Analyse the adapter of a run directory; with ``to`` also compress it to that rank, or with ``pattern`` to ranks
    by module that keep as much energy.

    The compressed adapter goes to ``out``, else to ``squeeze/rank_<to>`` beside the adapter. Accuracy by rank is read
    from the verification of this very adapter, if there is one.
    """
    adapter = find_adapter(directory)
    analysis = analyse_adapter(adapter, _settings(adapter))
    if verified := _known_verification(adapter):
        analysis["verified"] = verified
    if to is not None:
        target = out or adapter.parent / "squeeze" / (f"pattern_{to}" if pattern else f"rank_{to}")
        analysis["compressed"] = str(compress_adapter(adapter, to, target, pattern))
    elif out is not None:
        prepare_directory(out)
        with TemporaryDirectory() as aside:
            write_json(Path(aside) / ANALYSIS, analysis)
            install(Path(aside), out, _owner(adapter, "analysed"))
    return analysis


def _known_verification(adapter: Path) -> dict[str, Any] | None:
    """The verification of an adapter in its run's directory or its campaign's, None without one."""
    from retrain.adapters.verify import read_verification

    run = adapter.absolute().parent
    for home in (run, run.parent.parent):  # of logs/<campaign>/runs/<run>/final
        for path in verification_files(home):
            if verified := read_verification(path, adapter):
                return verified
    return None


def _settings(adapter: Path) -> Squeeze:
    """What must be kept and which ranks are tabulated, as the run's own [squeeze] section says, else the defaults."""
    for folder in (adapter.parent, adapter.parent.parent):  # of final/ and of checkpoints/step_…/
        if (folder / CONFIG).is_file():
            stored = RunReader(folder).config().get("squeeze") or {}
            keys = ("min_variance_retention", "min_layer_retention", "target_ranks")
            return Squeeze().model_copy(update={key: stored[key] for key in keys if key in stored})
    return Squeeze()


def squeeze_after_run(
    directory: Path, place: str, spec: RunSpec, folder: Path, longest: Longest, bases: Bases,
    warn: Warn = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """The analysis that follows a run, saved as ``analysis.json`` in ``place`` below the directory, with the adapter
    compressed to the rank that the TOML names, else to the recommended one, and the candidate ranks verified on the
    held-out problems.

    ``folder`` is that of the TOML file, ``longest`` and ``bases`` are as for ``verify_ranks``; ``warn`` tells
    the user what wandb has not taken."""
    settings, home = spec.config.squeeze, directory / place
    adapter = find_adapter(run_directory(directory, spec))
    analysis = {"run_id": spec.run_id, "label": spec.label, **analyse_adapter(adapter, settings)}
    rank = settings.compress_to or analysis["recommended_rank"]
    if rank:
        out = Path(settings.output_path) if settings.output_path else home / f"rank_{rank}"
        analysis["compressed"] = str(compress_adapter(adapter, rank, out))
        held_out = spec.config.decisive
        if settings.verify != "off" and held_out is not None and held_out.problems >= 2:
            ranks = {rank} | ({row["rank"] for row in analysis["rows"]} if settings.verify == "all" else set())
            smaller = sorted(ranks - {analysis["source_rank"]})
            analysis["verified"] = _verified(home, spec, folder, adapter, smaller or [rank], longest, bases)
    write_json(home / ANALYSIS, analysis)
    if spec.config.logging.wandb and settings.wandb:
        context = RunContext(
            condition=spec.label,
            run_id=spec.run_id,
            seed=spec.seed,
            config=spec.config,
            max_steps=spec.config.training.max_steps,
            is_campaign=spec.is_campaign,
        )
        _report(context, directory, analysis, warn)
    return analysis


def _report(context: RunContext, directory: Path, analysis: dict[str, Any], warn: Warn) -> None:
    """Send the analysis to wandb; a fault there costs that wandb run only."""
    thread = Thread("tracker wandb", limit=1)
    thread.put(lambda: log_squeeze_analysis(context, directory, analysis, warn))
    if not thread.wait(FINISH_SECONDS):
        warn(f"wandb has not taken the squeeze analysis after {FINISH_SECONDS:g} s and is not waited for")
        return
    thread.close()
    if thread.error is not None:
        warn(f"the squeeze analysis is not on wandb: {thread.error}")


def _verified(
    home: Path, spec: RunSpec, folder: Path, adapter: Path, ranks: Sequence[int], longest: Longest, bases: Bases
) -> dict[str, Any]:
    """Held-out accuracy of the adapter compressed to each of these ranks, in ``verification.json`` of ``home``; what is
    there already of this very adapter is read."""
    from retrain.adapters.verify import read_verification, verify_ranks

    out = home / VERIFICATION
    known = read_verification(out, adapter)
    if known is not None and set(ranks) <= {row["rank"] for row in known["ranks"]}:
        return known
    home.mkdir(parents=True, exist_ok=True)  # where the compressed adapter is elsewhere
    with TemporaryDirectory(dir=home, prefix=".", suffix=ASIDE) as aside:
        smaller = [compress_adapter(adapter, rank, Path(aside) / str(rank)) for rank in ranks]
        return verify_ranks(spec, folder, adapter, smaller, out, longest, bases)
