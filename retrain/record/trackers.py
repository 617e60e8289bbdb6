"""Telling other programs of a run: wandb, tensorboard, trackio or one of the user's own, each with ``start``
and ``log``.

One call of ``log`` per optimizer step, with the step as the tracker's own step. The packages are imported only when
asked for. All verbs of a tracker are called on one thread of its own (``writer.Reporter``): one that cannot start stops
the run, a later failure does not reach the training.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from retrain.config.root import value_at
from retrain.config.upkeep import trackers
from retrain.errors import PluginError, RetrainError
from retrain.extras import missing
from retrain.files import dumps
from retrain.plugins import load_function
from retrain.record.catalogue import wandb_name
from retrain.record.context import RunContext

RUN_CONFIG_KEYS = {
    "advantage_mode": "algorithm.advantage_mode",
    "transform_mode": "algorithm.transform_mode",
    "uncertainty_kind": "algorithm.uncertainty_kind",
    "model": "model.model",
    "lora_rank": "model.lora_rank",
    "lr": "training.lr",
    "batch_size": "training.batch_size",
    "group_size": "training.group_size",
    "max_tokens": "training.max_tokens",
    "temperature": "training.temperature",
    "gtpo_beta": "gtpo.beta",
    "hicra_alpha": "hicra.alpha",
    "sepa_steps": "sepa.steps",
    "sepa_delay_steps": "sepa.delay_steps",
    "sepa_correct_rate_gate": "sepa.correct_rate_gate",
    "backend": "backend.backend",
}
"""Names in a tracker's run configuration → our keys."""

NOT_TRACKED = ("step", "condition", "advantage_mode", "transform_mode")
TAG_CHARACTERS = 64
"""wandb refuses a longer tag."""


class Tracker(Protocol):
    """What a tracker must be able to do."""

    name: str

    def start(self, context: RunContext, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Begin, or continue what ``state`` (an earlier return value) names; RetrainError when that is impossible."""
        ...

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """One step's row."""
        ...

    def finish(self, failed: bool = False) -> None:
        """The run is over."""
        ...


def make_trackers(context: RunContext, run_dir: Path) -> list[Tracker]:
    """The trackers that ``[logging]`` asks for: ``report_to``, and wandb when ``wandb_project`` is set.

    Raises PluginError for one of the user's own that cannot be loaded or returns no tracker.
    """
    wanted = trackers(context.config.logging.report_to, context.config.logging.wandb_project)
    return [TRACKERS[name](run_dir) if name in TRACKERS else plugin_tracker(name, context, run_dir) for name in wanted]


def plugin_tracker(plugin: str, context: RunContext, run_dir: Path) -> Tracker:
    """The tracker that the user's ``module:function`` returns for ``run_dir``.

    It has ``start(run, state)`` and ``log(step, values)``, and may have ``finish(failed)``; ``run`` is a
    ``TrackedRun``, ``values`` what wandb would get. Raises PluginError.
    """
    what = f"logging.report_to: {plugin!r}"
    try:
        own = load_function(plugin, context.folder, "logging.report_to:")(run_dir)
    except PluginError:
        raise
    except Exception as error:  # the user's code
        raise PluginError(f"{what} raised {type(error).__name__}: {error}") from error
    missing = [verb for verb in ("start", "log") if not callable(getattr(own, verb, None))]
    if missing:
        raise PluginError(f"{what} returned {type(own).__name__}, which has no method {missing[0]}")
    return PluginTracker(plugin, own)


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers name and file it."""

    name: str
    group: str | None
    tags: list[str]
    project: str
    config: dict[str, Any]

    @classmethod
    def of(cls, context: RunContext) -> TrackedRun:
        """The run of this context; the project is ``logging.wandb_project``, else ``retrain``."""
        identity = run_identity(context)
        project = context.config.logging.wandb_project or "retrain"
        return cls(identity["name"], identity["group"], identity["tags"] or [], project, run_config(context))


class PluginTracker:
    """A tracker of the user's own."""

    def __init__(self, name: str, own: Any):
        self.name, self.own = name, own

    def start(self, context: RunContext, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Start it; what it returns, a dict of JSON or None, is its ``state`` when the run is resumed."""
        try:
            found = self.own.start(TrackedRun.of(context), dict(state) if state else None)
        except RetrainError:
            raise
        except Exception as error:  # whatever a client raises for logins, networks and names
            raise RetrainError(
                f"{self.name} could not start: {type(error).__name__}: {error}. Correct it, or leave it out of "
                "[logging] report_to"
            ) from error
        try:
            state = dict(found or {})
            dumps(state)
        except (TypeError, ValueError) as error:
            raise PluginError(f"{self.name}: start returned {found!r}, not None or a dict of JSON") from error
        return state

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """One call per optimizer step."""
        self.own.log(step, tracker_values(row))

    def finish(self, failed: bool = False) -> None:
        """Told if it wants to know."""
        if callable(finish := getattr(self.own, "finish", None)):
            finish(failed)


def run_config(context: RunContext) -> dict[str, Any]:
    """The run's configuration under the flat names that people filter by."""
    flat = {name: value_at(context.config, path) for name, path in RUN_CONFIG_KEYS.items()}
    ranges = {"metrics_ranges": {k: dict(v) for k, v in context.ranges.items()}} if context.ranges else {}
    return flat | {"condition": context.condition, "max_steps": context.max_steps, "seed": context.seed} | ranges


def run_identity(context: RunContext) -> dict[str, Any]:
    """Name, group and tags, as ``[logging]`` of the planned run has them; a campaign's runs are named, grouped and
    tagged by condition and seed."""
    logging = context.config.logging
    tags = list(logging.wandb_tags)
    if not context.is_campaign:
        return {
            "name": logging.wandb_run_name or context.condition,
            "group": logging.wandb_group,
            "tags": [tag[:TAG_CHARACTERS] for tag in tags if tag] or None,
        }
    tags += [context.condition, f"seed{context.seed}"]
    return {
        "name": logging.wandb_run_name or f"{context.condition}_s{context.seed}",
        "group": context.condition,
        "tags": [tag[:TAG_CHARACTERS] for tag in dict.fromkeys(tags) if tag],
    }


def tracker_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row under its tracker names: nulls left out, booleans as 0 and 1; the step is the tracker's, and what the
    run's configuration says there does not change."""
    return {
        wandb_name(key): int(value) if isinstance(value, bool) else value
        for key, value in row.items()
        if value is not None and key not in NOT_TRACKED
    }


class WandbTracker:
    """Weights & Biases; the run id is kept so that a resumed run continues the same curve."""

    name = "wandb"

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.run: Any = None

    def start(self, context: RunContext, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Open the run; ``logging.wandb_mode`` goes before the environment's mode."""
        wandb = _import("wandb", "logging.report_to")
        self.run = _wandb_init(
            wandb,
            context,
            self.run_dir,
            config=run_config(context),
            id=(state or {}).get("run_id"),
            resume="allow",
            **run_identity(context),
        )
        return {"run_id": self.run.id}

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """One wandb step per optimizer step."""
        self.run.log(tracker_values(row), step=step)

    def finish(self, failed: bool = False) -> None:
        """Close the run, marked as failed or done."""
        self.run.finish(exit_code=int(failed))


def log_squeeze_analysis(context: RunContext, directory: Path, report: Mapping[str, Any]) -> None:
    """A wandb run ``squeeze-analysis`` with the variance table of ``report`` (the dict of ``squeeze_table``).

    Raises:
        RetrainError: wandb is missing or cannot start.
    """
    wandb = _import("wandb", "logging.wandb_project")
    facts = {
        key: report.get(key) for key in ("recommended_rank", "source_rank", "min_variance_retention", "num_layers")
    }
    columns = ("rank", "mean_variance", "min_variance", "max_variance")
    run = _wandb_init(
        wandb,
        context,
        directory,
        name="squeeze-analysis",
        job_type="squeeze",
        tags=["squeeze", f"rank-{facts['recommended_rank']}"],
        config=facts,
    )
    table = wandb.Table(columns=[*columns, "recommended"])
    for row in report["rows"]:
        table.add_data(*(row[name] for name in columns), row["rank"] == facts["recommended_rank"])
    run.log({"squeeze/variance_table": table})
    for row in report["rows"]:
        run.log({f"squeeze/{name}": row[name] for name in columns})
    run.summary.update({f"squeeze/{key}": value for key, value in facts.items()})
    run.finish()


def _wandb_init(wandb: Any, context: RunContext, directory: Path, **arguments: Any) -> Any:
    """A new wandb run beside any others of this process; RetrainError when there can be none."""
    logging = context.config.logging
    try:
        return wandb.init(
            project=logging.wandb_project or "retrain",
            entity=logging.wandb_entity,
            mode=logging.wandb_mode,
            dir=str(directory),
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
            **arguments,
        )
    except Exception as error:  # wandb raises its own, and others, for logins, networks and names
        raise RetrainError(
            f"wandb could not start: {error}. Set logging.wandb_mode = 'offline', or leave wandb out"
        ) from error


class TensorboardTracker:
    """tensorboard event files in ``logging.logging_dir`` (of a campaign, ``<run id>`` in it), else in
    ``<run>/tensorboard``; numbers only."""

    name = "tensorboard"

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.writer: Any = None
        self.proto: Any = None
        self.begun = False
        self.summary: Any = None

    def start(self, context: RunContext, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Open a new event file; tensorboard itself joins the files of one directory."""
        module = _import("tensorboard.summary.writer.event_file_writer", "logging.report_to")
        self.proto = _import("tensorboard.compat.proto.event_pb2", "logging.report_to")
        self.summary = _import("tensorboard.compat.proto.summary_pb2", "logging.report_to").Summary
        try:
            self.writer = module.EventFileWriter(str(self._directory(context)))
        except OSError as error:
            raise RetrainError(f"tensorboard could not start: {error}") from error
        return {}

    def _directory(self, context: RunContext) -> Path:
        chosen = context.config.logging.logging_dir
        if chosen is None:
            return self.run_dir / "tensorboard"
        return Path(chosen) / context.run_id if context.is_campaign else Path(chosen)

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """All numbers of the row as scalars at ``step``."""
        values = [
            self.summary.Value(tag=key, simple_value=float(value))
            for key, value in tracker_values(row).items()
            if isinstance(value, int | float)
        ]
        event, now = self.proto.Event, time.time()
        if not self.begun:  # what an earlier process wrote of this step and later ones is out of date
            start = self.proto.SessionLog(status=self.proto.SessionLog.START)
            self.writer.add_event(event(wall_time=now, step=step, session_log=start))
            self.begun = True
        self.writer.add_event(event(wall_time=now, step=step, summary=self.summary(value=values)))
        self.writer.flush()

    def finish(self, failed: bool = False) -> None:
        """Close the event file."""
        self.writer.close()


class TrackioTracker:
    """trackio, which keeps its data on this machine."""

    name = "trackio"

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.run: Any = None
        self.first = 0

    def start(self, context: RunContext, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Open the run, or go on with the one of the same name."""
        trackio = _import("trackio", "logging.report_to")
        identity = run_identity(context)
        project = context.config.logging.wandb_project or "retrain"
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it prints hints into the live view
                self.run = trackio.init(
                    project=project,
                    name=identity["name"],
                    group=identity["group"],
                    config=run_config(context),
                    resume="allow" if state else "never",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except Exception as error:  # trackio raises whatever its storage raises
            raise RetrainError(f"trackio could not start: {error}") from error
        # It would keep a step that is made anew, with the same numbers, twice.
        self.first = getattr(self.run, "_next_step", 0) if state else 0
        return {"name": identity["name"]}

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """One trackio step per optimizer step."""
        if step >= self.first:
            self.run.log(tracker_values(row), step=step)

    def finish(self, failed: bool = False) -> None:
        """Send what is left and close."""
        with contextlib.redirect_stdout(io.StringIO()):
            self.run.finish()


TRACKERS: dict[str, Callable[[Path], Tracker]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorboardTracker,
    "trackio": TrackioTracker,
}


def _import(module: str, asked_by: str) -> Any:
    """The module, or one line that says how to install it."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(asked_by, package) from error
