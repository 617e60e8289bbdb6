"""Trackers that a run reports to: wandb, tensorboard, trackio or a plug-in (``reporter`` calls them).

Trackers get the same steps as the files: a row has its step in ``metrics.jsonl``, an evaluation the number of updates
before it, as in ``evals.jsonl``. The packages are imported only if the configuration names the tracker.
"""

from __future__ import annotations

import contextlib
import importlib
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from logging import CRITICAL, getLogger
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TextIO, cast

from retrain.config.root import value_at
from retrain.errors import UsageError
from retrain.extras import missing
from retrain.records.context import RunContext
from retrain.records.schema.base import Row, Values

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
TAG_CHARACTERS = 64  # wandb refuses a longer tag
ANSWER_SECONDS = 5.0  # How long the start of a run waits for W&B's server to answer anything at all

Warn = Callable[[str], None]


class Tracker(Protocol):
    """A built-in tracker or a plug-in.

    Optional attributes: ``finish(failed)`` is called at the end. ``skips_sent_steps = True`` says that ``log`` skips
    steps that the service already has; a resumed run then passes its whole history, otherwise only rows that earlier
    processes may not have sent. ``advice`` is a sentence for the user if the tracker fails.
    """

    def start(self, run: TrackedRun, state: Row | None) -> Row | None:
        """Begin a run and return its state, a JSON object or None. On resume, ``state`` is the state that an earlier
        process got, and that run is continued."""
        ...

    def log(self, step: int, values: Values) -> None:
        """Send the numbers of one row, or of the evaluations after ``step`` updates.

        After a resume, steps that were sent before may be passed again, with the same values.
        """


@dataclass(frozen=True)
class TrackedRun:
    name: str
    group: str | None
    tags: list[str]
    project: str
    config: Row  # Settings under short names (RUN_CONFIG_KEYS)

    @classmethod
    def of(cls, context: RunContext) -> TrackedRun:
        """Return the run with the name, group and tags of ``[logging]``. In a campaign, condition and seed are added to
        the tags and give the default name and group."""
        logging, condition = context.config.logging, context.condition
        name, group, tags = logging.wandb_run_name or condition, logging.wandb_group, list(logging.wandb_tags)
        if context.is_campaign:
            name, group = logging.wandb_run_name or f"{condition}_s{context.seed}", group or condition
            tags = list(dict.fromkeys([*tags, condition, f"seed{context.seed}"]))
        config = {short: value_at(context.config, path) for short, path in RUN_CONFIG_KEYS.items()}
        config |= {"condition": condition, "max_steps": context.max_steps, "seed": context.seed}
        if context.ranges:
            config["metrics_ranges"] = {key: dict(ends) for key, ends in context.ranges.items()}
        tags = [tag[:TAG_CHARACTERS] for tag in tags if tag]
        return cls(name, group, tags, logging.wandb_project or "retrain", config)


def is_evaluation(values: Values) -> bool:
    return all(key.startswith("eval/") for key in values)


class WandbTracker:
    """Tracker for Weights & Biases. The run id is kept, so that a resumed run continues the same curve.

    W&B has one row of history per step and accepts steps in increasing order only. An evaluation therefore waits for
    the row of its step; only the evaluation after the last step is logged separately. Online, the server says which
    steps it has, and these are skipped. Offline, a resumed run records its whole history again: ``wandb sync``
    replaces what an earlier process uploaded under the same id, or appends rows that repeat steps with the same values.
    """

    skips_sent_steps = True

    def __init__(self, context: RunContext, run_dir: Path, warn: Warn):
        self.context, self.run_dir, self.warn = context, run_dir, warn
        self.files: Path | None = None  # wandb's directory of the run, once the run has started
        self.evaluations: dict[int, Row] = {}

    def start(self, run: TrackedRun, state: Row | None) -> Row:
        named = {"name": run.name, "group": run.group, "tags": run.tags or None, "config": run.config}
        earlier = (state or {}).get("run_id")
        self.run = wandb_init("report_to", self.context, self.run_dir, self.warn, id=earlier, **named)
        self.files = Path(self.run.dir).parent
        self.first = self.run.starting_step  # first step that the server lacks; 0 for a new run and offline
        return {"run_id": self.run.id}

    def log(self, step: int, values: Values) -> None:
        if step < self.first:
            return
        if is_evaluation(values):
            self.evaluations.setdefault(step, {}).update(values)
        else:
            self.run.log({**self.evaluations.pop(step, {}), **values}, step=step, commit=True)

    @property
    def advice(self) -> str:
        if self.files is None or not self.files.name.startswith("run-"):  # offline
            return ""
        return f"To upload it later, type: wandb sync --include-online {shlex.quote(str(self.files))}"

    def finish(self, failed: bool) -> None:
        if last := self.evaluations.get(self.context.max_steps):
            self.run.log(last, step=self.context.max_steps, commit=True)
        self.run.finish(exit_code=int(failed))


# Set if W&B's server did not answer: later runs of this process are then recorded offline without waiting
_unreachable = threading.Event()


def wandb_init(key: str, context: RunContext, directory: Path, warn: Warn, **arguments: object) -> Any:
    """Start a wandb run; one process may have several. The run is offline if W&B's server does not answer. ``key`` is
    the key of ``[logging]`` that needs wandb, for error messages. Raises UsageError if W&B refuses."""
    wandb, logging = import_tracker("wandb", key), context.config.logging
    try:
        # Silent: nothing is printed into the live view, and a missing API key is an error instead of a question.
        settings = wandb.setup(wandb.Settings(silent=True)).settings
        getLogger("opentelemetry").setLevel(CRITICAL)  # wandb's own telemetry, which the server may refuse as well
        mode = logging.wandb_mode or settings.mode
        online = mode not in ("offline", "dryrun", "disabled")
        if online and not _wandb_answers(wandb):
            mode, online = "offline", False
            if not _unreachable.is_set():
                _unreachable.set()
                where = f"W&B at {settings.base_url} has not answered for {ANSWER_SECONDS:g} s"
                warn(f"{where}; recording offline (the last line tells how to upload)")
        return wandb.init(
            project=logging.wandb_project or "retrain",
            entity=logging.wandb_entity,
            mode=mode,
            dir=str(directory),
            # wandb sync shifts the steps of an offline run that is marked as resumed.
            resume="allow" if online else None,
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
            **arguments,
        )
    except Exception as error:  # wandb raises its own, and others, for logins, networks and names
        raise UsageError(
            f"wandb could not start: {' '.join(str(error).split()).rstrip('.')}. Type wandb login, or set "
            "[logging] wandb_mode = 'offline', or leave wandb out"
        ) from error


def _wandb_answers(wandb: ModuleType) -> bool:
    """Return whether W&B's server answers within ``ANSWER_SECONDS``. A refusal counts as an answer.

    ``wandb.init`` cannot be used to find out: after a timeout it holds the run's id until the process ends.
    """
    if _unreachable.is_set():
        return False

    def ask() -> None:
        with contextlib.suppress(Exception):
            _ = wandb.Api(timeout=int(2 * ANSWER_SECONDS)).viewer

    thread = threading.Thread(target=ask, name="W&B", daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return not thread.is_alive()


def wandb_upload_command(directory: Path, since: float) -> str | None:
    """Return the command that uploads the offline wandb runs in a campaign's or run's directory that were written since
    a Unix time; None if there are none."""
    in_wandb = "wandb/offline-run-*/run-*.wandb"
    here, in_runs = (
        [shlex.quote(str(file.parent)) for file in sorted(directory.glob(pattern)) if file.stat().st_mtime >= since]
        for pattern in (in_wandb, f"runs/*/{in_wandb}")
    )
    if len(in_runs) > 1:
        in_runs = [f"{shlex.quote(str(directory))}/runs/*/wandb/offline-run-*"]
    return f"wandb sync {' '.join([*in_runs, *here])}" if in_runs or here else None


class TensorboardTracker:
    """Tracker that writes tensorboard event files to ``[logging] logging_dir``, in a campaign to its subdirectory
    ``<run id>``; without ``logging_dir`` to ``<run>/tensorboard``."""

    def __init__(self, context: RunContext, run_dir: Path, warn: Warn):
        chosen, self.directory = context.config.logging.logging_dir, run_dir / "tensorboard"
        if chosen is not None:
            self.directory = Path(chosen) / context.run_id if context.is_campaign else Path(chosen)
        self.begun = False

    def start(self, run: TrackedRun, state: Row | None) -> None:
        """Open a new event file; tensorboard itself joins the files of one directory."""
        self.events = import_tracker("tensorboard.compat.proto.event_pb2")
        self.summary = import_tracker("tensorboard.compat.proto.summary_pb2").Summary
        files = import_tracker("tensorboard.summary.writer.event_file_writer")
        self.writer = files.EventFileWriter(str(self.directory))

    def log(self, step: int, values: Values) -> None:
        scalars = [
            self.summary.Value(tag=key, simple_value=float(value))
            for key, value in values.items()
            if isinstance(value, int | float)
        ]
        event, now = self.events.Event, time.time()
        if not self.begun:  # tensorboard then discards what an earlier process wrote from this step on
            start = self.events.SessionLog(status=self.events.SessionLog.START)
            self.writer.add_event(event(wall_time=now, step=step, session_log=start))
            self.begun = True
        self.writer.add_event(event(wall_time=now, step=step, summary=self.summary(value=scalars)))
        self.writer.flush()

    def finish(self, failed: bool) -> None:
        self.writer.close()


class TrackioTracker:
    """Tracker for trackio, which keeps its data on this machine or on a trackio server.

    The run id is kept, so that a resumed run is continued even if other runs have the same name. trackio would store a
    repeated step twice, so steps that it already has are skipped.
    """

    skips_sent_steps = True

    def __init__(self, context: RunContext, run_dir: Path, warn: Warn):
        logging, home = context.config.logging, run_dir.parents[1] if context.is_campaign else run_dir
        self.project = logging.wandb_project or context.config.campaign.name or home.resolve().name
        self.warn = warn
        self.evaluated = [f"eval/{each.recorded_name}/problems" for each in context.config.evaluated]
        self.rows: set[int] = set()
        self.evaluations: set[int] = set()

    def start(self, run: TrackedRun, state: Row | None) -> Row:
        trackio, earlier = import_tracker("trackio"), state or {}
        self.project = earlier.get("project", self.project)
        with _muted():  # it prints hints into the live view
            self.run = trackio.init(
                project=self.project,
                name=run.name,
                group=run.group,
                config=run.config,
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        if "run_id" in earlier:
            self.run.id = earlier["run_id"]  # init finds runs by name only
            try:
                self.rows = self._stored_steps(trackio, "train/step_time_s")
                self.evaluations = {step for key in self.evaluated for step in self._stored_steps(trackio, key)}
            except Exception as error:  # whatever trackio's client raises if its server does not answer
                self.warn(f"trackio does not tell which steps it has ({error}); all are sent again")
        return {"run_id": self.run.id, "project": self.project}

    def _stored_steps(self, trackio: ModuleType, metric: str) -> set[int]:
        query = {"project": self.project, "run": self.run.name, "run_id": self.run.id, "metric_name": metric}
        server = trackio.context_vars.current_server.get()
        if server is None:
            values = import_tracker("trackio.sqlite_storage").SQLiteStorage.get_metric_values(**query)
        else:
            token = trackio.context_vars.current_server_write_token.get()
            key = None if token else import_tracker("huggingface_hub").get_token()
            client = trackio.RemoteClient(server, hf_token=key, write_token=token, verbose=False)
            values = client.predict(api_name="/get_metric_values", **query)
        return {value["step"] for value in values}

    def log(self, step: int, values: Values) -> None:
        if step not in (self.evaluations if is_evaluation(values) else self.rows):
            self.run.log(values, step=step)

    def finish(self, failed: bool) -> None:
        with _muted():
            self.run.finish()


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """Discard what this thread prints inside the block."""
    with contextlib.redirect_stdout(cast(TextIO, _OtherThreads(sys.stdout))):
        yield


class _OtherThreads:
    def __init__(self, stream: TextIO):
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


TRACKERS: dict[str, Callable[[RunContext, Path, Warn], Tracker]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorboardTracker,
    "trackio": TrackioTracker,
}


def import_tracker(module: str, key: str = "report_to") -> ModuleType:
    """Import a module that ``[logging] <key>`` needs. Raises MissingExtra, which says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(f"logging.{key}", module.partition(".")[0]) from error
