"""Runs programs against tests: each program in a new process of one sandbox, its tests in another sandbox.

The two exchange calls and results as lines of tagged JSON (``sandbox.literals``), which this module passes on. The
program's process never has a test or an expected value, and the verdict comes from the tests' process alone. A program
that reads standard input has no tests: its output is compared here.
"""

import contextlib
import json
import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from retrain.sandbox import inside_program, inside_tests, literals
from retrain.sandbox.sandbox import Sandbox, SandboxLimits, SandboxOutcome

SHOWN_OUTPUT = 2000  # characters of a program's output that are recorded
TESTS_SECONDS = 2.0  # time for the tests themselves, beyond that of the program
SHOWN_TEXT = 200  # characters of an input or output in a message
LIMITS = {
    "memory": "it used more than {memory_mb} MiB of memory",
    "output": "it printed or returned too much",
    "lost": "its sandbox did not answer",
}


class Tests(NamedTuple):
    """Tests of a problem: arguments of ``inside_tests.Suite``, or inputs and outputs of a script."""

    suite: Mapping[str, Any]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """``share``: share of passed tests. ``failures``: texts about the first failed ones. ``fault``: why the program
    failed, unless it only gave wrong results. ``output``: what it printed."""

    share: float
    failures: list[str] = field(default_factory=list)
    fault: Literal["", "syntax_error", "crash", "timeout"] = ""
    output: str = ""


def sources(*modules: Any) -> dict[str, str]:
    return {module.__name__: Path(module.__file__).read_text(encoding="utf-8") for module in modules}


class ProgramJudge:
    """Judges one program at a time, each in a new process of the same two sandboxes. Only one thread may use it, and
    the sandboxes end with this thread."""

    def __init__(self, limits: SandboxLimits):
        self.limits = limits
        self.program = Sandbox(limits, modules=sources(literals, inside_program))
        # The tests get more time, so that a slow program reaches its limit first.
        limits = limits.model_copy(update={"timeout_s": limits.timeout_s + TESTS_SECONDS})
        self.tests = Sandbox(limits, modules=sources(literals, inside_tests))

    def close(self) -> None:
        self.program.close()
        self.tests.close()

    def judge(self, program: str, tests: Tests) -> Verdict:
        """Return the verdict on a program. Raises SandboxFailed if no sandbox starts."""
        try:
            return self._by_outputs(program, tests) if tests.inputs else self._by_calls(program, tests)
        except BaseException:  # a process may still be running
            self.close()
            raise

    def _begin(self, function: str, *arguments: object) -> None:
        arguments = (*arguments, math.ceil(self.limits.timeout_s))
        self.program.begin(f"from retrain.sandbox.inside_program import {function}\n{function}{arguments!r}")

    def _by_calls(self, program: str, tests: Tests) -> Verdict:
        self._begin("answer_calls", program)
        reply = self.program.next_line()
        if isinstance(reply, SandboxOutcome):
            return self._ended(reply, [])
        facts = _object(reply)
        names, entry_point = facts.get("names"), tests.suite.get("entry_point")
        if not isinstance(names, dict):
            output = self.program.stop().output
            return Verdict(0.0, [], "syntax_error" if "syntax" in facts else "crash", output)
        if entry_point and entry_point not in names:
            return Verdict(0.0, [f"the program does not define {entry_point}"], output=self.program.stop().output)
        outcome, verdict = self._dialogue(tests, {name: value is True for name, value in names.items()})
        if outcome is None:
            outcome = self.program.stop()
        share, failures = float(verdict["share"]), list(verdict["failures"])
        if outcome.ended != "stopped":
            return self._ended(outcome, failures, share)
        fault = verdict.get("fault") or ("crash" if verdict["of_program"] and share < 1 else "")
        return Verdict(share, failures, fault, outcome.output)

    def _dialogue(self, tests: Tests, names: Mapping[str, bool]) -> tuple[SandboxOutcome | None, dict[str, Any]]:
        """Run the tests and pass on their calls. Return the program's outcome, if it has ended, and the verdict."""
        outcome = None
        self.tests.begin(f"from retrain.sandbox.inside_tests import judge\njudge({dict(tests.suite)!r}, {names!r})")
        while isinstance(reply := self.tests.next_line(), str):
            kind, _, content = reply.partition(" ")
            if kind == "verdict":
                self.tests.stop()
                return outcome, json.loads(content)
            if outcome is None:
                self.program.send_line(content)
                answer = self.program.next_line()
                outcome = answer if isinstance(answer, SandboxOutcome) else None
            else:
                answer = outcome
            self.tests.send_line(json.dumps({"ended": self._reason(answer)}) if not isinstance(answer, str) else answer)
        fault = "timeout" if reply.ended == "time" else "crash"
        failures = [f"the tests did not finish: {self._reason(reply)}"]
        return outcome, {"share": 0.0, "failures": failures, "of_program": False, "fault": fault}

    def _by_outputs(self, program: str, tests: Tests) -> Verdict:
        passed, failures, fault, shown = 0, list[str](), "", ""
        for text, expected in zip(tests.inputs, tests.outputs, strict=True):
            self._begin("run_script", program, text)
            last_line = ""
            while isinstance(reply := self.program.next_line(), str):
                last_line = reply
            shown = shown or reply.output
            if reply.ended == "exit" and reply.status == 0:
                is_right = _lines(reply.output) == _lines(expected)
                passed += is_right
                if not is_right:
                    pair = repr(reply.output[:SHOWN_TEXT]), repr(expected[:SHOWN_TEXT])
                    failures.append(f"input {text[:SHOWN_TEXT]!r}: printed {pair[0]}, not {pair[1]}")
                continue
            ended = self._ended(reply, failures)
            fault, shown = "syntax_error" if last_line else ended.fault, reply.output
            if fault != "crash":  # other inputs would end in the same way, after as long a time
                break
        return Verdict(passed / len(tests.inputs), failures[: inside_tests.SHOWN_FAILURES], fault, shown)

    def _ended(self, outcome: SandboxOutcome, failures: list[str], share: float = 0.0) -> Verdict:
        fault = "timeout" if outcome.ended == "time" or outcome.status == -signal.SIGXCPU else "crash"
        return Verdict(share, failures or [f"the program ended: {self._reason(outcome)}"], fault, outcome.output)

    def _reason(self, outcome: SandboxOutcome) -> str:
        if outcome.ended == "time" or outcome.status == -signal.SIGXCPU:
            return f"it took longer than {self.limits.timeout_s:g} s"
        if outcome.ended in LIMITS:
            return LIMITS[outcome.ended].format(memory_mb=self.limits.memory_mb)
        return f"exit status {outcome.status}" if outcome.status >= 0 else f"signal {-outcome.status}"


def _object(line: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(line)
        if isinstance(value, dict):
            return value
    return {}


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
