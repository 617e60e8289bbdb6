"""Run episodes with tools: calls are answered, and the first message without a call ends the episode.

Metrics of an episode are named as in ``get_tool_metrics`` of other trainers, with the prefix ``tools/``:
``total_tool_calls`` (malformed calls and unknown tools included), ``tool_errors``, ``tool_success_rate``,
``calls/<name>`` per tool, and ``tool_time`` in seconds, the only metric that differs between two otherwise equal runs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from retrain.environments.arguments import did_you_mean
from retrain.environments.protocol import Observation, Range, Step
from retrain.environments.tools import ToolError
from retrain.environments.tools.calls import Call, answer, as_text, parse
from retrain.environments.tools.schema import Tool, tool_of
from retrain.errors import PluginError, PluginMissing
from retrain.plugins import load_function
from retrain.types import Action, Message, Problem, RewardResult

OURS = {
    "calculator": "retrain.environments.tools.calculator:calculator",
    "python": "retrain.environments.tools.python:Python",
    "search": "retrain.environments.tools.search:Search",
}


class ToolUse:
    """Environment with tools for the policy. ``exact``: all tools are exact.

    Raises PluginError for a tool that cannot be loaded, described or made with its settings: every tool is opened once.
    """

    def __init__(
        self, tools: Sequence[str | Mapping[str, object]], folder: str | None = None, result_characters: int = 4000
    ):
        self.tools: dict[str, Tool] = {}
        for entry in tools:
            tool = _loaded(entry, None if folder is None else Path(folder))
            if tool.name in self.tools:
                raise PluginError(f"two tools are named {tool.name!r}; rename one of the functions")
            self.tools[tool.name] = tool
        self.schemas = tuple(tool.schema for tool in self.tools.values())
        self.exact = all(tool.exact for tool in self.tools.values())
        self.result_characters = result_characters
        self.metrics_ranges: dict[str, Range] = {
            "tools/total_tool_calls": {"min": 0},
            "tools/tool_success_rate": {"min": 0, "max": 1},
            "tools/tool_errors": {"min": 0, "invert": True},
            "tools/tool_time": {"min": 0, "invert": True},
            **{f"tools/calls/{name}": {"min": 0} for name in self.tools},
        }
        self.start(Problem("", "", ""), 0).close()

    def start(self, problem: Problem, seed: int) -> ToolEpisode:
        with contextlib.ExitStack() as stack:
            functions: dict[str, Callable[..., object]] = {}
            for name, tool in self.tools.items():
                functions[name] = tool.open()
                close = getattr(functions[name], "close", None)
                if callable(close):
                    stack.callback(close)
            return ToolEpisode(self, functions, stack.pop_all())


@dataclass
class ToolEpisode:
    environment: ToolUse
    functions: Mapping[str, Callable[..., object]]
    stack: contextlib.ExitStack
    total: int = 0
    errors: int = 0
    seconds: float = 0.0
    by_tool: dict[str, int] = field(default_factory=dict)

    def observe(self) -> Observation:
        return Observation((), self.environment.schemas)

    def step(self, action: Action) -> Step:
        """Return one message for each call, in order; the episode is done if there are no calls."""
        calls = parse(action.text).items
        before = self.errors
        messages = tuple(self._answer(call) for call in calls)
        self.total += len(calls)
        metrics = {"tools/calls": float(len(calls)), "tools/errors": float(self.errors - before)}
        return Step(messages, done=not calls, metrics=metrics)

    def result(self) -> RewardResult:
        metrics: dict[str, float | None] = {
            "tools/total_tool_calls": float(self.total),
            "tools/tool_success_rate": (self.total - self.errors) / self.total if self.total else None,
            "tools/tool_errors": float(self.errors),
            "tools/tool_time": self.seconds,
        }
        calls = {f"tools/calls/{name}": float(self.by_tool.get(name, 0)) for name in self.environment.tools}
        return RewardResult(None, sample_metrics=metrics | calls)

    def close(self) -> None:
        self.stack.close()

    def _answer(self, call: Call | str) -> Message:
        begun = time.perf_counter()
        try:
            text = self._called(call)
        except (Exception, SystemExit) as error:  # any exception of a tool becomes its answer, including SystemExit
            self.errors += 1
            text = f"Error: {_reason(error)}"
        self.seconds += time.perf_counter() - begun
        limit = self.environment.result_characters
        if len(text) > limit:
            text = text[:limit] + f"\n[cut: {len(text) - limit:,} more characters]"
        return answer(call, text)

    def _called(self, call: Call | str) -> str:
        tools = self.environment.tools
        if isinstance(call, str):
            raise ToolError(call)
        tool = tools.get(call.name)
        if tool is None:
            near = did_you_mean(call.name, tools)
            raise ToolError(f"there is no tool {call.name[:64]!r}{near}. The tools are: {', '.join(tools) or 'none'}")
        self.by_tool[tool.name] = self.by_tool.get(tool.name, 0) + 1
        return as_text(self.functions[tool.name](**tool.checked(call.arguments)))


def _loaded(entry: str | Mapping[str, object], folder: Path | None) -> Tool:
    table = {"tool": entry} if isinstance(entry, str) else dict(entry)
    name, settings = table.get("tool"), {key: value for key, value in table.items() if key != "tool"}
    if not isinstance(name, str):
        raise PluginMissing(f'the tool {table!r} has no name; write tool = "calculator" in its table')
    if ":" not in name and name not in OURS:
        ours = ", ".join(OURS)
        raise PluginMissing(
            f"tool {name!r} is none of {ours}{did_you_mean(name, OURS)}; one of your own is named module:function"
        )
    if name == "search" and folder is not None:  # as other files that a configuration names: beside it first
        beside = folder / Path(str(settings.get("corpus"))).expanduser()
        settings |= {"corpus": str(beside)} if beside.exists() else {}
    return tool_of(load_function(OURS.get(name, name), folder, "tool"), settings, f"tool {name!r}")


def _reason(error: BaseException) -> str:
    if isinstance(error, ToolError):
        return str(error)
    name = type(error).__name__
    if isinstance(error, SystemExit):
        return f"{name}: the tool tried to exit"
    try:
        return f"{name}: {error}"
    except Exception:  # the user's exception cannot be converted to text
        return name
