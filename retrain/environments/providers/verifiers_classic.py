"""Use environments with ``load_environment``, as in verifiers up to 0.3: data, rollout and rubric in one class."""

import contextvars
import importlib
import logging
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from retrain.environments.providers.endpoint import Channel
from retrain.environments.providers.inversion import UNSET_KEY, HarnessResult, Inversion, Lead, TaskRow, digest
from retrain.environments.providers.messages import chat_messages
from retrain.errors import UsageError
from retrain.types import RewardResult

LAST_WITH = "0.3.1"  # Last version of verifiers with this kind of environment
PROMISE = 3600.0 * 24 * 7  # Seconds that the client waits for an answer: sampling has no limit here


class Classic:
    def __init__(self, id: str, args: Mapping[str, object], env: Mapping[str, object], inversion: Inversion):
        vf = importlib.import_module("verifiers")
        if env:
            raise UsageError(f"env is for tasksets of verifiers.v1, and {id} is none: give its arguments in args")
        if not hasattr(vf, "load_environment"):
            raise UsageError(
                f"there is no taskset {id}, and environments with load_environment need verifiers {LAST_WITH} or "
                f"older: pip install 'verifiers<={LAST_WITH}', in a virtual environment of its own if need be"
            )
        with _signals_kept():
            self.environment = vf.load_environment(id, **args)
        if getattr(self.environment, "requires_group_rollouts", False):
            raise UsageError(
                f"environment {id} grades the rollouts of a group together, which is not supported: they are graded in "
                "different processes"
            )
        self._id, self._inversion = id, inversion
        self._weights = _weights_of(self.environment.rubric)
        root = vf.load_environment.__module__.partition(".utils")[0]
        self._clients = importlib.import_module(f"{root}.clients")
        self._config = importlib.import_module(f"{root}.types").ClientConfig
        logger = logging.getLogger("verifiers")
        if not any(isinstance(handler, _Hearing) for handler in logger.handlers):
            logger.addHandler(_Hearing(logging.ERROR))

    def rows(self, part: str) -> Sequence[TaskRow]:
        """Return the tasks of a part: for ``eval`` the environment's own held-out data, else its training data. An
        environment that has only evaluation data is trained on them."""
        rows = []
        for row in self._dataset(part) or ():
            prompt = row.get("prompt") or ()
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            prompt = tuple(chat_messages(messages, placeholders=True))
            answer = "" if row.get("answer") is None else str(row["answer"])
            task = row.get("task")
            hashed = digest((prompt, answer, row.get("info")))
            rows.append(TaskRow(prompt, answer, (task,) if isinstance(task, str) and task else (), hashed))
        return rows

    def lead(self, part: str, index: int) -> Lead:
        row = self._dataset(part)[index]

        async def lead(channel: Channel) -> HarnessResult:
            heard: list[tuple[str, str]] = []
            _heard.set(heard)
            client = self._clients.resolve_client(
                self._config(
                    api_base_url=self._inversion.endpoint.url_of(channel),
                    api_key_var=UNSET_KEY,
                    timeout=PROMISE,
                    max_retries=0,
                )
            )
            try:
                output = await self.environment.run_rollout(row, client, "policy", {})
            finally:
                await client.close()
            return _outcome(output, heard, self._weights)

        return lead

    def _dataset(self, part: str) -> Any:
        environment = self.environment
        train = environment.build_dataset()
        if part != "eval" and train is not None:
            return train
        return environment.build_eval_dataset() if (part == "eval") == (train is not None) else None


def _weights_of(rubric: Any) -> dict[str, float]:
    """Return the weights of a rubric's functions by name; {} if the rubric does not reveal them."""
    try:
        names, weights = rubric._get_reward_func_names(), rubric._get_reward_weights()
    except AttributeError:
        return {}
    if len(names) != len(weights):
        return {}
    return {name: max(abs(w) for n, w in zip(names, weights, strict=True) if n == name) for name in names}


def _outcome(
    output: Mapping[str, Any], heard: Sequence[tuple[str, str]], weights: Mapping[str, float]
) -> HarnessResult:
    """Return the grade of a rollout. ``heard`` has (name, log line of the rubric) for every function that raised. A
    function of weight 0 is a metric: if it raised, only its value is missing. If any other function raised, there is no
    reward."""
    stop = str(output.get("stop_condition") or "")
    metrics = cast(
        "dict[str, float | None]", {name: _number(value) for name, value in (output.get("metrics") or {}).items()}
    )
    error = output.get("error")
    if error:
        if isinstance(error, Mapping):
            error = error.get("error_chain_str") or error.get("error_chain_repr")
        return HarnessResult(RewardResult(None, metrics, error=str(error)), stop or "error")
    # The rubric counts a function that raised as 0, and the model would be trained with it.
    raised = [text for name, text in heard if weights.get(name, 1.0)]
    if raised:
        return HarnessResult(RewardResult(None, metrics, error="; ".join(raised)), stop)
    metrics |= {name: None for name, _ in heard}
    logs = {"failed_metrics": "; ".join(text for _, text in heard)} if heard else {}
    return HarnessResult(RewardResult(_number(output.get("reward")), metrics), stop, logs)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


# (name, log line) of the rubric functions that raised in this rollout
_heard: contextvars.ContextVar[list[tuple[str, str]] | None] = contextvars.ContextVar("heard", default=None)
_RAISED = re.compile(r"Error calling (?:group )?reward function (.+?): ")


class _Hearing(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        heard = _heard.get()
        if heard is not None and record.msg and str(record.msg).startswith("Error calling"):
            text = record.getMessage()
            found = _RAISED.match(text)
            heard.append((found[1] if found else "", text))


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM at the end of a ``with`` block; environments replace them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
