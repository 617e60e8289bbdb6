"""Runs a tested program inside a sandbox of its own, and calls its functions when the tests ask for it.

Requests and answers are lines of JSON (``literals``). The tests are in another process: nothing here knows an expected
value, and an answer says only what a call returned. Imports the standard library only.
"""

import json
import os
import random
import resource
import sys
import traceback
import types

from retrain.sandbox.literals import REQUESTS, NotLiteral, decode, encode, send_line

FRAMES = 8
MUTABLE = (list, dict, set, bytearray)
# Imported before the fork of each program, which then need not read them
PRELOADED = "bisect collections copy dataclasses datetime functools heapq itertools math operator re string typing"


def say(answer: dict[str, object]) -> None:
    send_line(json.dumps(answer))


def compiled(program: str, seconds: int) -> types.CodeType | None:
    """Limit the CPU time of this process and compile the program. On a syntax error, send it and return None."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    random.seed(0)
    try:
        return compile(program, "<program>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        print("".join(traceback.format_exception_only(error)), end="")
        say({"syntax": str(error)})
        return None


def answer_calls(program: str, seconds: int) -> None:
    """Run the program as the module ``solution``, send its names (true for callables), then answer calls."""
    if (code := compiled(program, seconds)) is None:
        return
    module = sys.modules["solution"] = types.ModuleType("solution")
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        report(error)
        say({"raised": str(error)})
        return
    say({"names": {str(name): callable(value) for name, value in module.__dict__.items()}})
    with os.fdopen(REQUESTS, "rb", closefd=False) as requests:
        for request in requests:
            answer = answer_to(module.__dict__, json.loads(request))
            sys.stdout.flush()
            say(answer)


def answer_to(names: dict[str, object], request: dict[str, object]) -> dict[str, object]:
    """Return the value of a name; if the request has arguments, call it and return its result with the arguments that
    it may have changed, or the exception."""
    try:
        found = names[str(request["name"])]
        if "arguments" not in request:
            return {"value": encode(found)}
        arguments, named = decode(request["arguments"]), decode(request["named"])
        value = found(*arguments, **named)  # type: ignore[operator]
        changed = [item if isinstance(item, MUTABLE) else None for item in (*arguments, *named.values())]
        return {"value": encode(value), "changed": encode(changed)}
    except NotLiteral as error:
        return {"type": str(error)}
    except BaseException as error:
        report(error)
        return {"raised": [kind.__name__ for kind in type(error).__mro__], "message": message_of(error)}


def message_of(error: BaseException) -> str:
    try:
        return str(error.args[0] if len(error.args) == 1 else error)[:2000]
    except BaseException:  # the program's own exception
        return ""


def report(error: BaseException) -> None:
    try:
        trace = error.__traceback__ and error.__traceback__.tb_next
        sys.stdout.write("".join(traceback.format_exception(type(error), error, trace, limit=-FRAMES)))
    except BaseException:
        os.write(1, f"{type(error).__name__}\n".encode())


def run_script(program: str, text: str, seconds: int) -> None:
    """Run the program as a script that reads ``text`` from its standard input. Only the traceback of an exception
    reaches standard error."""
    if (code := compiled(program, seconds)) is None:
        sys.exit(1)
    descriptor = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    os.write(descriptor, text.encode("utf-8", "replace"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.dup2(descriptor, 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    null, errors = os.open(os.devnull, os.O_RDWR), os.dup(2)
    os.dup2(null, 2)
    try:
        exec(code, module.__dict__)
    except BaseException:
        sys.stderr.flush()
        os.dup2(errors, 2)
        raise


for _name in PRELOADED.split():
    __import__(_name)
