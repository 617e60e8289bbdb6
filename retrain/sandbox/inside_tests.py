"""Runs tests inside a sandbox of their own, against proxies of the functions of a program in another sandbox.

A test is an ``assert`` statement, or a statement such as ``self.assertEqual(…)`` or ``with self.assertRaises(…):``. It
passes if it is reached and never fails. Statements after a failed test run all the same. Imports the standard library
only.
"""

import ast
import builtins
import contextlib
import functools
import importlib
import json
import os
import random
import sys
from typing import Any

from retrain.sandbox.literals import REQUESTS, NotLiteral, decode, encode, send_line

SHOWN_FAILURES = 5
SHOWN = 300  # characters of a test, a value or an error in a failure
INVALID = "the program sent an invalid answer"


class ProgramError(BaseException):
    """The program ended, returned a value without a literal, or raised an exception that is not an ``Exception``.

    This class is not one either: otherwise ``assertRaises(Exception)`` would pass.
    """


class Program:
    """The program in the other sandbox. ``last`` describes the latest call. ``faults``: ProgramErrors of all calls."""

    def __init__(self) -> None:
        self.lines, self.last, self.ended = os.fdopen(REQUESTS, "rb", closefd=False), "", ""
        self.faults = list[ProgramError]()

    def ask(self, request: dict[str, object]) -> tuple[Any, Any]:
        """Return the decoded value and changed arguments. Raises the program's exception, or ProgramError."""
        if self.ended:
            raise ProgramError(self.ended)
        send_line(f"call {json.dumps(request)}")
        try:
            answer = json.loads(self.lines.readline())
            value, changed = decode(answer.get("value")), decode(answer.get("changed"))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ProgramError(INVALID) from error
        if "ended" in answer or "raised" in answer:
            self.ended = str(answer.get("ended", ""))
            error = ProgramError(self.ended) if self.ended else exception(answer)
            error.of_program = True  # type: ignore[attr-defined]
            raise error
        if "type" in answer:
            raise ProgramError(f"the result has {clipped(str(answer['type']))}")
        return value, changed

    def call(self, name: str, /, *arguments: object, **named: object) -> object:
        try:
            return self.result(name, arguments, named)
        except ProgramError as error:
            self.faults.append(error)
            raise

    def result(self, name: str, arguments: tuple[object, ...], named: dict[str, object]) -> object:
        values = [*arguments, *named.values()]
        self.last = f"{name}({', '.join(map(short, values))})"
        try:
            request = {"name": name, "arguments": encode(list(arguments)), "named": encode(named)}
        except NotLiteral as error:
            raise ProgramError(f"the tests pass {error} to {name}, which cannot be sent to the program") from None
        result, changed = self.ask(request)
        try:
            for value, new in zip(values, changed, strict=True):
                update(value, new)
        except (ValueError, TypeError) as error:
            raise ProgramError(INVALID) from error
        self.last += f" returned {short(result)}"
        return result


def exception(answer: dict[str, Any]) -> BaseException:
    """Return the exception that the program raised, as its first base class that is a built-in Exception.

    StopIteration is a RuntimeError, as in generators: otherwise a program could end ``all(map(program, inputs))``.
    """
    names, message = answer.get("raised"), str(answer.get("message", ""))
    names = [str(name) for name in names] if names and isinstance(names, list) else [INVALID]
    for name in names:
        kind = RuntimeError if name in ("StopIteration", "StopAsyncIteration") else getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(message)
            except TypeError:  # it needs other arguments, as UnicodeDecodeError does
                continue
    return ProgramError(f"{names[0]}: {message}")


def update(value: object, new: Any) -> None:
    """Give an argument of the tests the content that it has after the call."""
    if isinstance(value, list | bytearray):
        value[:] = new
    elif isinstance(value, dict | set):
        value.clear()
        value.update(new)


def short(value: object) -> str:
    try:
        return clipped(repr(value))
    except ValueError:  # an integer of too many digits
        return f"<{type(value).__name__}>"


def clipped(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


class Instrument(ast.NodeTransformer):
    """Wraps every test in a ``try`` statement that records how it ends. A loop or helper function with tests is wrapped
    in another, which records errors outside its tests. ``sites``: the tests' source texts."""

    def __init__(self) -> None:
        self.sites: list[str] = []

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        return node if isinstance(node.test, ast.Constant) and node.test.value else self.wrapped(node)

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        return self.wrapped(node) if _is_assertion(node.value) else node

    def visit_With(self, node: ast.With) -> ast.AST:
        return self.wrapped(node) if _is_assertion(node.items[0].context_expr) else self.generic_visit(node)

    def visit_For(self, node: ast.For | ast.While) -> ast.stmt:
        first = len(self.sites)
        self.generic_visit(node)
        return self.repeated([node], first)[0]

    visit_While = visit_For

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        first = len(self.sites)
        self.generic_visit(node)
        if node.name != "check" and not node.name.startswith("test"):  # those run once
            node.body = self.repeated(node.body, first)
        return node

    def repeated(self, body: list[ast.stmt], first: int) -> list[ast.stmt]:
        sites = [*range(first, len(self.sites))]
        return [self.guarded(body, f"except BaseException:\n  unfinished__({sites})\n  raise")] if sites else body

    def wrapped(self, node: ast.stmt) -> ast.stmt:
        site = len(self.sites)
        self.sites.append(ast.unparse(node)[:SHOWN])
        text = f"except BaseException as error_:\n  failed__({site}, error_)\nelse:\n  passed__({site})"
        return self.guarded([node], text)

    def guarded(self, body: list[ast.stmt], handlers: str) -> ast.stmt:
        (wrapper,) = ast.parse(f"try:\n  pass\n{handlers}").body
        assert isinstance(wrapper, ast.Try)
        wrapper.body = body
        return ast.fix_missing_locations(ast.copy_location(wrapper, body[0]))


def _is_assertion(node: ast.expr) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr.startswith(("assert", "fail"))


class Suite:
    """Tests and what has become of them. ``setup`` is code before the tests; ``helpers`` is the problem's own code,
    whose definitions, except the entry point's, are used in place of the program's."""

    def __init__(self, tests: list[str], setup: str = "", helpers: str = "", entry_point: str = ""):
        self.entry_point, self.setup = entry_point, ast.parse(setup)
        self.helpers = ast.parse(helpers)
        definitions = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
        self.helpers.body = [
            node
            for node in self.helpers.body
            if isinstance(node, definitions) and getattr(node, "name", None) != entry_point
        ]
        self.trees = [ast.parse(text) for text in tests]
        self.free = free_names([self.setup, *self.trees]) | ({entry_point} if entry_point else set())
        instrument = Instrument()
        for tree in self.trees:
            instrument.visit(tree)
        self.sites = instrument.sites
        self.passed, self.failed = set[int](), dict[int, str]()
        self.unfinished = set[int]()  # Tests in loops and helper functions that an error outside the tests ended
        self.outside = list[str]()  # Errors outside tests
        self.of_program = False  # The program raised an error that failed a test, or ended

    def run(self, program: Program, names: dict[str, bool]) -> dict[str, object]:
        """Run the tests against a program that defines ``names`` (true for callables). Return the verdict."""

        def failed(site: int, error: BaseException) -> None:
            self.failed.setdefault(site, self.described(self.sites[site], error, program))

        space: dict[str, Any] = {"passed__": self.passed.add, "failed__": failed}
        space |= {"unfinished__": self.unfinished.update, "__name__": "problem"}
        self.tried(program, lambda: exec(compile(self.helpers, "<problem>", "exec"), space))
        space["__name__"] = "tests"
        for name in self.free - space.keys():
            if names.get(name):
                space[name] = functools.partial(program.call, name)
            elif name in names:  # a module that the program imports, or a value; without a literal it stays unknown
                with contextlib.suppress(Exception, ProgramError):
                    is_module = name in sys.stdlib_module_names
                    space[name] = importlib.import_module(name) if is_module else program.ask({"name": name})[0]
        self.tried(program, lambda: exec(compile(self.setup, "<setup>", "exec"), space))
        for number, tree in enumerate(self.trees):
            self.tried(program, functools.partial(exec, compile(tree, f"<tests {number}>", "exec"), space))
        for call in self.functions(space):
            self.tried(program, call)
        for error in [*program.faults]:  # which the tests' own code has caught
            self.outside.append(self.described("outside the assertions", error, program))
        is_complete = not self.failed and not self.outside
        passed = len(self.passed - self.failed.keys() - self.unfinished)
        return {
            "share": float(bool(self.passed)) if is_complete else passed / (len(self.sites) + len(self.outside)),
            "failures": [*self.outside, *self.failed.values()][:SHOWN_FAILURES],
            "of_program": self.of_program,
        }

    def functions(self, space: dict[str, Any]) -> list[Any]:
        """Return calls of the tests' functions: ``check(entry point)``, ``test_…()`` and methods of TestCases."""
        calls = []
        # The program's functions may have such names, too.
        named = {name: value for name, value in space.items() if getattr(value, "__module__", "") == "tests"}
        if callable(named.get("check")) and self.entry_point in space and not self.uses_check():
            calls.append(functools.partial(named["check"], space[self.entry_point]))
        for name, value in named.items():
            if name.startswith("test_") and callable(value):
                calls.append(value)
            if isinstance(value, type) and hasattr(value, "assertEqual"):
                methods = [method for method in dir(value) if method.startswith("test")]
                calls += [functools.partial(run_method, value, method) for method in methods]
        return calls

    def uses_check(self) -> bool:
        """Return whether the tests themselves use ``check``, except below an ``if`` such as that of ``__main__``."""
        parts = [part for tree in self.trees for part in tree.body if not isinstance(part, ast.If)]
        nodes = (node for part in parts for node in ast.walk(part))
        return any(isinstance(node, ast.Name) and node.id == "check" for node in nodes)

    def tried(self, program: Program, call: Any) -> None:
        try:
            call()
        except BaseException as error:  # SystemExit too: the tests' own code may call the program anywhere
            self.outside.append(self.described("outside the assertions", error, program))

    def described(self, where: str, error: BaseException, program: Program) -> str:
        self.of_program |= hasattr(error, "of_program")
        if isinstance(error, ProgramError) and error in program.faults:
            program.faults.remove(error)
        text = clipped(str(error))
        name = "" if isinstance(error, ProgramError) else type(error).__name__ + (": " if text else "")
        return f"{where}: {name}{text}" + (f" ({program.last})" if program.last else "")


def run_method(case: Any, method: str) -> None:
    made = case(method)
    case.setUpClass()
    made.setUp()
    getattr(made, method)()
    made.tearDown()


def free_names(trees: list[ast.Module]) -> set[str]:
    """Return the names that the code reads and does not bind, without built-in ones."""
    loaded, bound = set[str](), set(dir(builtins))
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return loaded - bound


def judge(suite: dict[str, Any], names: dict[str, bool]) -> None:
    random.seed(0)
    send_line(f"verdict {json.dumps(Suite(**suite).run(Program(), names))}")
