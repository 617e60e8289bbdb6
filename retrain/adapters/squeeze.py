"""Apply LoRA-Squeeze to run directories: rank analysis and compression of adapters (arXiv 2602.10993)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from retrain.adapters.streaming import write_streamed
from retrain.adapters.verify import Evaluate, read_verification, verify_ranks
from retrain.config.evaluation import Squeeze
from retrain.config.runs import RunSpec, run_directory
from retrain.errors import UsageError
from retrain.files import ASIDE, aside_of, dumps, prepare_directory, write_json
from retrain.maths.squeeze import analyse, rank_pattern, recommend, truncate
from retrain.ownership import Owner, check_publish, install, owner_of, publish
from retrain.policy.adapter_io import AdapterFile, Pair, padded
from retrain.records.context import RunContext
from retrain.records.reader import read_config, read_manifest, recorded_checkpoints, verification_files
from retrain.records.reporter import FINISH_SECONDS
from retrain.records.schema.base import Row, Values
from retrain.records.schema.layout import (
    ADAPTER_FILES,
    ADAPTER_WEIGHTS,
    ANALYSIS,
    CONFIG,
    FINAL,
    MANIFEST,
    VERIFICATION,
)
from retrain.records.trackers import TrackedRun, Warn, import_tracker, wandb_init
from retrain.threads import Thread


def find_adapter(directory: Path) -> Path:
    """Return the adapter to squeeze: the directory itself, a run's ``final/`` or newest checkpoint, or a campaign's
    first finished run. Raises UsageError if there is none."""
    if (directory / ADAPTER_WEIGHTS).is_file():
        return directory
    if (directory / FINAL / ADAPTER_WEIGHTS).is_file():
        return directory / FINAL
    for row in reversed(recorded_checkpoints(directory)):
        path = row.get("sampler_path")
        if isinstance(path, str) and (directory / path / ADAPTER_WEIGHTS).is_file():
            return directory / path
    if (directory / MANIFEST).is_file():
        for run in read_manifest(directory)["runs"]:
            if run["state"] == "done" and run["path"] != ".":
                return find_adapter(directory / run["path"])
    raise UsageError(f"{directory} holds no adapter: give a run directory, its final/ or a PEFT adapter directory")


def analyse_adapter(adapter: Path, settings: Squeeze) -> Row:
    """Return the squeeze table of one adapter directory as JSON (see ``tables.squeeze_table``).

    Candidates are ``settings.target_ranks``. By default every rank is a candidate, and the table shows the powers of
    two, the source rank and the recommended rank.
    """
    spectra = _spectra(adapter)
    result = recommend(
        spectra,
        min_variance_retention=settings.min_variance_retention,
        min_layer_retention=settings.min_layer_retention,
        ranks=settings.target_ranks,
    )
    table_ranks = {result.source_rank, result.recommended, *(1 << k for k in range(result.source_rank.bit_length()))}
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
            if settings.target_ranks or row.rank in table_ranks
        ],
        "worst_module": result.worst_module,
        "rank_pattern": result.rank_pattern,
        "untrained": list(result.untrained),
        "message": result.reason,
    }


def _spectra(adapter: Path) -> Row:
    with AdapterFile(adapter) as file:
        return {name: analyse(*file.factors(name), file.scales[name]) for name in file.modules}


def compress_adapter(adapter: Path, rank: int, out: Path, pattern: bool = False) -> Path:
    """Write the adapter truncated to ``rank`` as a PEFT directory, module by module.

    With ``pattern``, each module gets its own rank, such that the sum of ranks is the smallest that keeps the energy
    Σ s² that ``rank`` keeps over all modules. Raises UsageError for a rank above the adapter's, ModelError for an
    adapter with more than LoRA factors, NotOurs if ``out`` holds an adapter that was not compressed from this one.
    """
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
        other_ranks = {name: each for name, each in ranks.items() if each != rank}
        config = file.config | {
            "r": rank, "lora_alpha": alpha, "use_rslora": False, "rank_pattern": other_ranks,
            "alpha_pattern": {name: float(each) for name, each in other_ranks.items()},
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


def _owner(adapter: Path, subfolder: str) -> Owner:
    here = Owner(hashlib.blake2b(str(adapter.resolve()).encode(), digest_size=16).hexdigest())
    return (owner_of(adapter) or here).at(subfolder)


def _truncated(a: torch.Tensor, b: torch.Tensor, scale: float, rank: int, new_scale: float) -> Pair:
    # A layer of lower rank (rank_pattern) is padded with zeros.
    return padded(truncate(a, b, scale, min(rank, a.shape[0]), new_scale), rank)


def squeeze(directory: Path, to: int | None = None, out: Path | None = None, pattern: bool = False) -> Row:
    """Return the rank analysis of a run directory's adapter. With ``to``, also compress the adapter to this rank, or
    with ``pattern`` each module to its own rank (``compress_adapter``).

    The compressed adapter goes to ``out``, by default ``squeeze/rank_<to>`` or ``squeeze/pattern_<to>`` beside the
    adapter. Without ``to``, the analysis goes to ``out``, if given. Returns the keys of ``analyse_adapter``,
    ``compressed`` (path of the compressed adapter) and ``verified`` (accuracy by rank, if it was measured).
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


def _known_verification(adapter: Path) -> Row | None:
    run = adapter.absolute().parent
    for home in (run, run.parent.parent):  # for logs/<campaign>/runs/<run>/final
        for path in verification_files(home):
            if verified := read_verification(path, adapter):
                return verified
    return None


def _settings(adapter: Path) -> Squeeze:
    for folder in (adapter.parent, adapter.parent.parent):  # for final/ and checkpoints/step_…/
        if (folder / CONFIG).is_file():
            stored = read_config(folder).get("squeeze") or {}
            keys = ("min_variance_retention", "min_layer_retention", "target_ranks")
            return Squeeze().model_copy(update={key: stored[key] for key in keys if key in stored})
    return Squeeze()


def squeeze_after_run(
    directory: Path, subfolder: str, spec: RunSpec, evaluate: Evaluate, warn: Warn = lambda text: None
) -> Row:
    """Analyse the adapter after a run, compress it to the configured or recommended rank, and verify candidate ranks on
    the held-out problems. Writes ``analysis.json`` in ``subfolder`` of the directory.

    ``warn`` receives failures of wandb.
    """
    settings, home = spec.config.squeeze, directory / subfolder
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
            analysis["verified"] = _verified(home, spec, adapter, smaller or [rank], evaluate)
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


def _report(context: RunContext, directory: Path, analysis: Row, warn: Warn) -> None:
    thread = Thread("tracker wandb", limit=1)
    thread.put(lambda: log_squeeze_analysis(context, directory, analysis, warn))
    if not thread.wait(FINISH_SECONDS):
        warn(f"wandb has not received the squeeze analysis within {FINISH_SECONDS:g} s: continuing without it")
        return
    thread.close()
    if thread.error is not None:
        warn(f"the squeeze analysis is not on wandb: {thread.error}")


def log_squeeze_analysis(context: RunContext, directory: Path, report: Values, warn: Warn = lambda text: None) -> None:
    """Send the variance table of ``report`` (from ``analyse_adapter``) to wandb, as a run ``squeeze-analysis`` in the
    group of the analysed run. The same analysis sent again continues the same wandb run. Raises RetrainError if wandb
    is missing or cannot start."""
    summary = ("recommended_rank", "source_rank", "min_variance_retention", "num_layers")
    facts = {key: report.get(key) for key in summary}
    columns = ("rank", "mean_variance", "min_variance", "max_variance")
    best, owner, analysed = facts["recommended_rank"], owner_of(directory), TrackedRun.of(context)
    content = dumps([owner.id if owner else str(directory.resolve()), context.run_id, report])
    named = {
        "id": hashlib.sha256(content.encode()).hexdigest()[:16],
        "name": "squeeze-analysis",
        "group": analysed.group,
        "job_type": "squeeze",
        "tags": ["squeeze", *([f"rank-{best}"] if best else []), *analysed.tags],
        "config": {**facts, "run_id": context.run_id, "condition": context.condition, "seed": context.seed},
    }
    run = wandb_init("wandb_project", context, directory, warn, **named)
    table = import_tracker("wandb", "wandb_project").Table(columns=[*columns, "recommended"])
    for row in report["rows"]:
        table.add_data(*(row[name] for name in columns), row["rank"] == best)
    run.log({"squeeze/variance_table": table}, step=0)
    for step, row in enumerate(report["rows"], start=1):
        run.log({f"squeeze/{name}": row[name] for name in columns}, step=step)
    run.summary.update({f"squeeze/{key}": value for key, value in facts.items()})
    run.finish()


def _verified(home: Path, spec: RunSpec, adapter: Path, ranks: Sequence[int], evaluate: Evaluate) -> Row:
    out = home / VERIFICATION
    known = read_verification(out, adapter)
    if known is not None and set(ranks) <= {row["rank"] for row in known["ranks"]}:
        return known
    home.mkdir(parents=True, exist_ok=True)  # where the compressed adapter is elsewhere
    with TemporaryDirectory(dir=home, prefix=".", suffix=ASIDE) as aside:
        smaller = [compress_adapter(adapter, rank, Path(aside) / str(rank)) for rank in ranks]
        return verify_ranks(spec, adapter, smaller, out, evaluate)
