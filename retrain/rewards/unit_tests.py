"""``unit_tests``: the answer is a program, graded by the tests of its problem.

A program runs in a new process of one sandbox, its tests in another sandbox. The two exchange calls and results as
lines of tagged JSON (``sandbox.literals``), which this module passes on. The program's process never has a test or an
expected value, and the verdict comes from the tests' process alone. A program that reads standard input has no tests:
its output is compared here.

A problem has one of these forms, as columns of the data:

- ``tests``, ``test_list`` (MBPP) or ``test`` (HumanEval): a text, or a list of texts, of Python with assertions; with
  ``entry_point``, the name of the function. A text that defines ``check(candidate)`` gets this function
- ``inputs`` and ``outputs``: lists of what the program reads from standard input and what it must print
"""

import ast
import contextlib
import json
import math
import os
import re
import signal
import textwrap
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from retrain.config.tasks import TEST_COLUMNS
from retrain.errors import DataError
from retrain.plugins import described
from retrain.rewards.base import Item, Reward, failed, prompt_text
from retrain.sandbox import inside_program, inside_tests, literals
from retrain.sandbox.inside import FLOOD, shortened
from retrain.sandbox.sandbox import Sandbox, SandboxLimits, SandboxOutcome, launch
from retrain.types import Problem, RewardResult

SHOWN_OUTPUT = 2000  # characters of a program's output that are recorded
TESTS_SECONDS = 2.0  # time for the tests themselves, beyond that of the program
SHOWN_TEXT = 200  # characters of an input or output in a message
LIMITS = {
    "memory": "it used more than {memory_mb} MiB of memory",
    "output": "it printed or returned too much",
    "lost": "its sandbox did not answer",
}
FAULTS = ("timeout", "crash", "syntax_error")
_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


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


class UnitTestReward(Reward):
    """Grades the share of passed tests or, with ``credit`` "all", 1 if all pass, else 0.

    As many programs run at once as there are processor cores. Equal programs for a problem are run once. Raises
    MissingExtra or UsageError if programs cannot be isolated here.
    """

    name = "unit_tests"

    def __init__(self, timeout_s: float = 10.0, memory_mb: int = 512, credit: Literal["share", "all"] = "share"):
        launch()
        self.limits = SandboxLimits(timeout_s=timeout_s, memory_mb=memory_mb, output_characters=FLOOD)
        self.credit = credit
        # The threads live as long as the sandboxes that they start.
        self._threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "unit tests")
        self._local, self._judges = threading.local(), list[ProgramJudge]()

    def grade_all(self, items: Sequence[Item]) -> list[RewardResult]:
        tests = {key: tests_of(problem) for key, problem in {id(problem): problem for problem, _ in items}.items()}
        jobs = [(id(problem), program_of(problem, str(text))) for problem, text in items]
        futures = {job: self._threads.submit(self._judged, job[1], tests[job[0]]) for job in dict.fromkeys(jobs)}
        try:
            verdicts = {job: future.result() for job, future in futures.items()}
        except BaseException:
            for future in futures.values():
                future.cancel()
            raise
        return [self._result(verdicts[job]) for job in jobs]

    def close(self) -> None:
        self._threads.shutdown()
        for judge in self._judges:
            judge.close()
        self._threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "unit tests")
        self._local, self._judges = threading.local(), []

    def _judged(self, program: str, tests: Tests) -> Verdict | str:
        try:
            if not hasattr(self._local, "judge"):
                self._local.judge = ProgramJudge(self.limits)
                self._judges.append(self._local.judge)
            return self._local.judge.judge(program, tests)
        except Exception as error:  # costs one completion, never the run
            return described(error)

    def _result(self, verdict: Verdict | str) -> RewardResult:
        if isinstance(verdict, str):
            return failed(verdict)
        is_right = verdict.share == 1.0
        metrics: dict[str, float | None] = {f"tests/{fault}": float(verdict.fault == fault) for fault in FAULTS}
        texts = {"output": shortened(verdict.output, SHOWN_OUTPUT), "tests": "\n".join(verdict.failures)}
        return RewardResult(
            float(is_right) if self.credit == "all" else verdict.share,
            sample_metrics={"tests/passed": verdict.share, **metrics},
            correct=is_right,
            format_ok=verdict.fault != "syntax_error",
            logs={name: text for name, text in texts.items() if text},
        )


def tests_of(problem: Problem) -> Tests:
    """Return a problem's tests. Raises DataError, which names the problem and the column, if there are none or they are
    malformed."""
    columns = problem.metadata
    if "inputs" in columns or "outputs" in columns:
        inputs, outputs = _texts(problem, "inputs"), _texts(problem, "outputs")
        if len(inputs) != len(outputs):
            raise DataError(f"{problem.id}  has {len(inputs)} inputs and {len(outputs)} outputs: give each an output")
        return Tests({}, tuple(inputs), tuple(outputs))
    column = next((name for name in TEST_COLUMNS if columns.get(name)), None)
    if column is None:
        raise DataError(f"{problem.id}  has no tests: add a column {', '.join(TEST_COLUMNS)}, or inputs and outputs")
    arguments = _suite(problem, column)
    try:
        suite = inside_tests.Suite(**arguments)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise DataError(f'{problem.id}  column "{column}" is not Python: {error}') from None
    if not suite.sites:
        raise DataError(f'{problem.id}  column "{column}" asserts nothing, so every program would pass: add an assert')
    defines_check = any(getattr(node, "name", "") == "check" for tree in suite.trees for node in tree.body)
    if defines_check and not suite.entry_point and not suite.uses_check():
        raise DataError(
            f'{problem.id}  column "{column}" defines check(candidate), and nothing names the candidate: add a column '
            '"entry_point" with the name of the function'
        )
    return Tests(arguments)


def _suite(problem: Problem, column: str) -> dict[str, Any]:
    entry_point = problem.metadata.get("entry_point") or ""
    if not isinstance(entry_point, str) or (entry_point and not entry_point.isidentifier()):
        raise DataError(f'{problem.id}  column "entry_point" is {entry_point!r}, not the name of a function')
    imports, setup = (problem.metadata.get(name) or "" for name in ("test_imports", "test_setup_code"))
    return {
        "tests": [textwrap.dedent(text) for text in _texts(problem, column)],
        "setup": "\n".join(map(str, [*(imports if isinstance(imports, list) else [imports]), setup])),
        "helpers": code_of(prompt_text(problem)),
        "entry_point": entry_point,
    }


def _texts(problem: Problem, column: str) -> list[str]:
    value = problem.metadata.get(column)
    texts = [value] if isinstance(value, str) and column in TEST_COLUMNS else value
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
        raise DataError(f'{problem.id}  column "{column}" is {str(value)[:40]!r}, not a list of texts')
    return list(texts)


@lru_cache(maxsize=1024)
def code_of(prompt: str) -> str:
    """Return a prompt's code, its last fenced block or all of it; "" if that is not Python with definitions."""
    blocks = _FENCE.findall(prompt)
    code = blocks[-1] if blocks else prompt
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    return code if any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in body) else ""


def program_of(problem: Problem, answer: str) -> str:
    """Return the program in an answer.

    It is the last fenced block, or of several the last that defines the entry point; without a block, the answer. The
    definition may also stand before the first fence, where a model continues a block of the prompt. If the prompt is
    code that declares the entry point (HumanEval), it comes before the program, and an answer without the definition
    continues the function, up to the first line that is not indented.
    """
    name = str(problem.metadata.get("entry_point") or "")
    definition = re.compile(rf"^(?:async[ \t]+)?(?:def|class)[ \t]+{re.escape(name)}\b", re.MULTILINE)
    blocks = _FENCE.findall(answer)
    candidates = [answer.partition("```")[0], *blocks] if name else []
    program = next((text for text in reversed(candidates) if definition.search(text)), None)
    program = program or (blocks[-1] if blocks else answer)
    stub = code_of(prompt_text(problem)) if name else ""
    if not stub or not definition.search(stub):
        return textwrap.dedent(program) if blocks else program.strip()
    return f"{stub}\n{program if definition.search(program) else _body(program)}"


def _body(text: str) -> str:
    lines = text.strip("\n").split("\n")
    if lines[0][:1].strip():  # models drop the first line's indentation
        lines[0] = f"    {lines[0]}"
    end = next((index for index, line in enumerate(lines) if line[:1].strip()), len(lines))
    return "\n".join(lines[:end])
