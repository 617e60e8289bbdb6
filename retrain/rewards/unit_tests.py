"""``unit_tests``: the answer is a program, graded by the tests of its problem in sandboxes (``programs``).

A problem has one of these forms, as columns of the data:

- ``tests``, ``test_list`` (MBPP) or ``test`` (HumanEval): a text, or a list of texts, of Python with assertions; with
  ``entry_point``, the name of the function. A text that defines ``check(candidate)`` gets this function
- ``inputs`` and ``outputs``: lists of what the program reads from standard input and what it must print
"""

import ast
import os
import re
import textwrap
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Literal

from retrain.config.tasks import TEST_COLUMNS
from retrain.errors import DataError
from retrain.plugins import described
from retrain.rewards.base import Item, Reward, failed, prompt_text
from retrain.rewards.programs import SHOWN_OUTPUT, ProgramJudge, Tests, Verdict
from retrain.sandbox.inside import FLOOD
from retrain.sandbox.inside_tests import Suite
from retrain.sandbox.sandbox import SandboxLimits, launch
from retrain.types import Problem, RewardResult

FAULTS = ("timeout", "crash", "syntax_error")
_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


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
        output, end = verdict.output, SHOWN_OUTPUT // 2
        if len(output) > SHOWN_OUTPUT:
            output = f"{output[:end]}\n[{len(output) - 2 * end} characters left out]\n{output[-end:]}"
        texts = {"output": output, "tests": "\n".join(verdict.failures)}
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
        suite = Suite(**arguments)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise DataError(f'{problem.id}  column "{column}" is not Python: {error}') from None
    if not suite.sites:
        raise DataError(f'{problem.id}  column "{column}" asserts nothing, so every program would pass: add an assert')
    defines_check = any(getattr(node, "name", "") == "check" for tree in suite.trees for node in tree.body)
    if defines_check and not suite.entry_point and "check" not in suite.called():
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
