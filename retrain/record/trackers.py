"""Trackers that a run reports to: wandb, tensorboard, trackio or one of the user's own.

One call of ``log`` per optimizer step, with the step as the tracker's own step. The packages are imported only when
asked for. All methods of a tracker are called on one thread of its own (``writer.Reporter``): one that cannot start
stops the run, a later failure does not reach the training.
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
    """One of ours or of the user's; it may also have ``finish(failed)``, which is called at the end."""

    def start(self, run: TrackedRun, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """Begin, or continue what ``state`` (an earlier return value) names."""
        ...

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """One step's ``tracker_values``."""


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
        """The run of this context, as ``[logging]`` has it; a campaign's runs are named, grouped and tagged by
        condition and seed. ``config`` has the run's configuration under the flat names that people filter by."""
        logging, condition = context.config.logging, context.condition
        name, group, tags = logging.wandb_run_name or condition, logging.wandb_group, list(logging.wandb_tags)
        if context.is_campaign:
            name, group = logging.wandb_run_name or f"{condition}_s{context.seed}", condition
            tags = list(dict.fromkeys([*tags, condition, f"seed{context.seed}"]))
        config = {short: value_at(context.config, path) for short, path in RUN_CONFIG_KEYS.items()}
        config |= {"condition": condition, "max_steps": context.max_steps, "seed": context.seed}
        if context.ranges:
            config["metrics_ranges"] = {key: dict(ends) for key, ends in context.ranges.items()}
        tags = [tag[:TAG_CHARACTERS] for tag in tags if tag]
        return cls(name, group, tags, logging.wandb_project or "retrain", config)


def make_trackers(context: RunContext, run_dir: Path) -> dict[str, Tracker]:
    """The trackers that ``[logging]`` asks for, by name: ``report_to``, and wandb when ``wandb_project`` is set.

    One of the user's own is what their ``module:function`` returns for ``run_dir``. Raises PluginError for one that
    cannot be loaded or is no tracker.
    """
    wanted = trackers(context.config.logging.report_to, context.config.logging.wandb_project)
    return {
        name: TRACKERS[name](context, run_dir) if name in TRACKERS else _plugin(name, context, run_dir)
        for name in wanted
    }


def _plugin(plugin: str, context: RunContext, run_dir: Path) -> Tracker:
    what = f"logging.report_to: {plugin!r}"
    try:
        own = load_function(plugin, context.folder, "logging.report_to:")(run_dir)
    except PluginError:
        raise
    except Exception as error:  # the user's code
        raise PluginError(f"{what} raised {type(error).__name__}: {error}") from error
    for method in ("start", "log"):
        if not callable(getattr(own, method, None)):
            raise PluginError(f"{what} returned {type(own).__name__}, which has no method {method}")
    return own


def start_tracker(name: str, tracker: Tracker, context: RunContext, state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Start it; what it returns, a dict of JSON or None, is its ``state`` when the run is resumed.

    Raises RetrainError when it cannot start.
    """
    try:
        returned = tracker.start(TrackedRun.of(context), dict(state) if state else None)
    except RetrainError:
        raise
    except Exception as error:  # whatever a client raises for logins, networks and names
        raise RetrainError(
            f"{name} could not start: {type(error).__name__}: {error}. Correct it, or leave it out of "
            "[logging] report_to"
        ) from error
    try:
        dumps(dict(returned or {}))
    except (TypeError, ValueError) as error:
        raise PluginError(f"{name}: start returned {returned!r}, not None or a dict of JSON") from error
    return dict(returned or {})


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

    def __init__(self, context: RunContext, run_dir: Path):
        self.context, self.run_dir = context, run_dir
        self.run: Any = None

    def start(self, run: TrackedRun, state: dict[str, Any] | None) -> dict[str, Any]:
        """Open the run; ``logging.wandb_mode`` goes before the environment's mode."""
        named = {"name": run.name, "group": run.group, "tags": run.tags or None, "config": run.config}
        earlier = (state or {}).get("run_id")
        self.run = _wandb_init("report_to", self.context, self.run_dir, id=earlier, resume="allow", **named)
        return {"run_id": self.run.id}

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """One wandb step per optimizer step."""
        self.run.log(values, step=step)

    def finish(self, failed: bool) -> None:
        """Close the run, marked as failed or done."""
        self.run.finish(exit_code=int(failed))


def log_squeeze_analysis(context: RunContext, directory: Path, report: Mapping[str, Any]) -> None:
    """A wandb run ``squeeze-analysis`` with the variance table of ``report`` (the dict of ``squeeze_table``).

    Raises:
        RetrainError: wandb is missing or cannot start.
    """
    summary = ("recommended_rank", "source_rank", "min_variance_retention", "num_layers")
    facts = {key: report.get(key) for key in summary}
    columns = ("rank", "mean_variance", "min_variance", "max_variance")
    best = facts["recommended_rank"]
    named = {"name": "squeeze-analysis", "job_type": "squeeze", "tags": ["squeeze", f"rank-{best}"], "config": facts}
    run = _wandb_init("wandb_project", context, directory, **named)
    table = _import("wandb", "wandb_project").Table(columns=[*columns, "recommended"])
    for row in report["rows"]:
        table.add_data(*(row[name] for name in columns), row["rank"] == best)
    run.log({"squeeze/variance_table": table})
    for row in report["rows"]:
        run.log({f"squeeze/{name}": row[name] for name in columns})
    run.summary.update({f"squeeze/{key}": value for key, value in facts.items()})
    run.finish()


def _wandb_init(key: str, context: RunContext, directory: Path, **arguments: Any) -> Any:
    """A new wandb run, asked for by ``[logging] <key>``, beside any others of this process; RetrainError when there
    can be none."""
    wandb, logging = _import("wandb", key), context.config.logging
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

    def __init__(self, context: RunContext, run_dir: Path):
        chosen, self.directory = context.config.logging.logging_dir, run_dir / "tensorboard"
        if chosen is not None:
            self.directory = Path(chosen) / context.run_id if context.is_campaign else Path(chosen)
        self.writer: Any = None
        self.events: Any = None
        self.summary: Any = None
        self.begun = False

    def start(self, run: TrackedRun, state: dict[str, Any] | None) -> None:
        """Open a new event file; tensorboard itself joins the files of one directory."""
        self.events = _import("tensorboard.compat.proto.event_pb2")
        self.summary = _import("tensorboard.compat.proto.summary_pb2").Summary
        files = _import("tensorboard.summary.writer.event_file_writer")
        self.writer = files.EventFileWriter(str(self.directory))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """All numbers of the row as scalars at ``step``."""
        scalars = [
            self.summary.Value(tag=key, simple_value=float(value))
            for key, value in values.items()
            if isinstance(value, int | float)
        ]
        event, now = self.events.Event, time.time()
        if not self.begun:  # what an earlier process wrote of this step and later ones is out of date
            start = self.events.SessionLog(status=self.events.SessionLog.START)
            self.writer.add_event(event(wall_time=now, step=step, session_log=start))
            self.begun = True
        self.writer.add_event(event(wall_time=now, step=step, summary=self.summary(value=scalars)))
        self.writer.flush()

    def finish(self, failed: bool) -> None:
        """Close the event file."""
        self.writer.close()


class TrackioTracker:
    """trackio, which keeps its data on this machine."""

    def __init__(self, context: RunContext, run_dir: Path):
        self.run: Any = None
        self.first = 0

    def start(self, run: TrackedRun, state: dict[str, Any] | None) -> dict[str, Any]:
        """Open the run, or go on with the one of the same name."""
        trackio = _import("trackio")
        with contextlib.redirect_stdout(io.StringIO()):  # it prints hints into the live view
            self.run = trackio.init(
                project=run.project,
                name=run.name,
                group=run.group,
                config=run.config,
                resume="allow" if state else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        # It would keep a repeated step, which has the same numbers, twice.
        self.first = getattr(self.run, "_next_step", 0) if state else 0
        return {"name": run.name}

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """One trackio step per optimizer step."""
        if step >= self.first:
            self.run.log(values, step=step)

    def finish(self, failed: bool) -> None:
        """Send what is left and close."""
        with contextlib.redirect_stdout(io.StringIO()):
            self.run.finish()


TRACKERS: dict[str, Callable[[RunContext, Path], Tracker]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorboardTracker,
    "trackio": TrackioTracker,
}


def _import(module: str, key: str = "report_to") -> Any:
    """The module that ``[logging] <key>`` asks for, or one line that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(f"logging.{key}", module.partition(".")[0]) from error
