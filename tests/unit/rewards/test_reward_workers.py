import math
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from retrain.config import tasks
from retrain.errors import PluginError
from retrain.rewards import Grader, RewardResult, build_grader
from retrain.rewards.custom import CustomReward
from retrain.rewards.symbolic import MathReward, verifier
from retrain.rewards.workers import WorkerLimits, WorkerPool
from retrain.types import Problem
from retrain.util.answers import verdict_by_text

pytest.importorskip("math_verify", reason="the extra `math` is not installed")


@pytest.fixture
def nothing_left():
    """After the test no process that it started is there, grandchildren and zombies included."""
    before = set(psutil.Process().children(recursive=True))
    yield
    deadline = time.monotonic() + 30
    while left := set(psutil.Process().children(recursive=True)) - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.fixture(scope="module")
def grader():
    with build_grader(tasks.RewardSection.model_validate({"type": "math", "timeout_s": 20.0, "workers": 1})) as grader:
        yield grader


problem = partial(Problem, "p", "?")


def boxed(answer: str) -> str:
    return rf"Thus \boxed{{{answer}}}."


EQUALITIES = [
    ("70000", r"\$70,000.00", True),
    (r"\frac{1}{2}", "0.5", True),
    (r"\frac{1}{2}", r"\frac{2}{3}", False),
    ("x^2+2x+1", "(x+1)^2", True),
    ("(1, 2)", "(2,1)", False),
    (r"\text{(A)}", "A", True),
    ("5", "", False),
    ("", "5", False),
    (r"\over\over", r"\over \over", True),  # what no grammar reads is compared as text
    (r"\over\over", "1", False),
]


def test_math_equality(grader):
    results = grader.grade([(problem(reference), boxed(answer)) for reference, answer, _ in EQUALITIES])
    for (reference, answer, correct), result in zip(EQUALITIES, results, strict=True):
        assert (result.error, result.correct, result.total_reward) == (None, correct, correct), (reference, answer)


def test_what_text_decides_agrees_with_math_verify():
    equal, verdicts = verifier(), set()
    for reference in ("18", "-3", "0", "1000", "2.50", ".5"):
        for answer in ("18", "+18", "-3.0", "0.0", "1,000", "0.5", "−3"):
            verdict = verdict_by_text(reference, answer)
            verdicts.add(verdict)
            assert verdict is None or equal((reference, answer)) is verdict, (reference, answer)
    assert verdicts == {True, False, None}


def test_text_is_never_evaluated(grader, tmp_path):
    target = tmp_path / "made"
    attacks = [
        f"__import__('os').system('touch {target}')", f"open('{target}', 'w')",
        rf"\text{{__import__('os').system('touch {target}')}}",
        f"1+eval(\"__import__('os').system('touch {target}')\")", rf"\input{{{target}}}",
    ]  # fmt: skip
    pairs = [(problem(a), boxed("1")) for a in attacks] + [(problem("1"), boxed(a)) for a in attacks]
    results = grader.grade(pairs)
    assert all(result.correct is False for result in results)
    assert not target.exists()


def test_an_expression_that_explodes_is_cut_off_and_costs_one_completion():
    answers = [(r"\frac{1}{4}", "0.25"), ("9", "9^{9^{9^{9}}}"), (r"\frac{1}{4}", "0.25"), ("9", "9**9**9")]
    with Grader(MathReward(workers=1, timeout_s=1.0)) as grader:
        results = grader.grade([(problem(reference), boxed(answer)) for reference, answer in answers])
    assert [result.total_reward for result in results] == [1.0, None, 1.0, 0.0]
    assert "longer than 1 s" in (results[1].error or "")
    assert results[1].format_ok


def test_hostile_answers_leave_math_alive(grader):
    for answer in ("(" * 150, r"\frac{" * 50, "1" * 1_000_000, "{" * 100_000 + "}" * 100_000, "\ud800", "٣" * 50):
        attack, sane = grader.grade([(problem("42"), boxed(answer)), (problem(r"\frac{1}{8}"), boxed("0.125"))])
        assert attack.total_reward in (0.0, None)
        assert sane.total_reward == 1.0


REWARDS = '''
import os, signal, sys, time
from retrain.rewards import RewardResult

print("garbage on stdout", flush=True)
sys.stderr.write("garbage on stderr\\n")

def by_completion(completion, answer):
    """What the completion says is what happens."""
    os.write(1, b"\\x00\\x00\\xff\\xffgarbage")
    print("\\x1b[2J" * 1000)
    if completion == "raise":
        raise ValueError("boom\\nsecond line")
    if completion == "hang":
        while True:
            pass
    if completion == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, set(range(1, 32)))
        time.sleep(3600)
    if completion == "children":
        if os.fork() == 0:
            time.sleep(3600)
        while True:
            pass
    if completion == "exit":
        os._exit(3)
    if completion == "memory":
        hoard = []
        while True:
            hoard.append(bytearray(64 << 20))
    if completion == "nan":
        return float("nan")
    if completion == "flood":
        return RewardResult(1.0, sample_metrics={"x" * (17 << 20): 1.0})
    if completion == "result":
        return RewardResult(0.5, sample_metrics={"length": 6, "odd": float("inf")}, tags=("short",), correct=True)
    return float(completion == answer)

def fields(problem, prompt, completion, answer, tags, metadata, bonus=0.0):
    assert problem.answer == answer
    return len(completion) + len(prompt) / 10 + len(tags) / 100 + metadata["level"] / 1000 + bonus

def peers(said, ref):
    return said == ref

def nothing():
    return 1.0

def torch_free(completion, answer):
    return float(not {"torch", "transformers", "peft"} & set(sys.modules))

score = peers
'''


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    path.write_text(REWARDS, encoding="utf-8")
    return path


def custom(module: Path, function: str, **limits) -> Grader:
    section = {"type": "custom", "custom_module": str(module), "custom_function": function, "workers": 1, **limits}
    return build_grader(tasks.RewardSection.model_validate(section))


@pytest.mark.usefixtures("nothing_left")
def test_a_reward_that_misbehaves_costs_its_completion_only(module, capfd):
    expected = {
        "raise": "ValueError: boom second line (my_rewards.py:", "exit": "exit status 3", "nan": "returned nan",
        "flood": "sent an invalid reply", "hang": "longer than 1 s", "stubborn": "longer than 1 s",
        "children": "longer than 1 s",
    }  # fmt: skip
    completions = [completion for name in expected for completion in (name, "yes", "no")]
    with custom(module, "by_completion", timeout_s=1.0, workers=2) as grader:
        results = grader.grade([(problem("yes"), completion) for completion in completions])
    for completion, result in zip(completions, results, strict=True):
        if completion in expected:
            assert result.total_reward is None
            assert expected[completion] in (result.error or ""), (completion, result.error)
            assert (result.error or "").isprintable()
        else:
            assert (result.error, result.total_reward) == (None, float(completion == "yes"))
    assert capfd.readouterr() == ("", "")


def test_a_memory_bomb_is_stopped_by_its_limit(module, monkeypatch):
    monkeypatch.setattr("retrain.rewards.custom.MEMORY_BYTES", 512 << 20)
    with custom(module, "by_completion", timeout_s=60.0) as grader:
        bomb, after = grader.grade([(problem("yes"), "memory"), (problem("yes"), "yes")])
    assert bomb.total_reward is None
    assert "memory" in (bomb.error or "").lower()
    assert after.total_reward == 1.0


def test_results_come_back_whole(module):
    with custom(module, "by_completion") as grader:
        (result,) = grader.grade([(problem("yes"), "result")])
    expected = RewardResult(0.5, sample_metrics={"length": 6.0, "odd": math.inf}, tags=("short",), correct=True)
    assert result == replace(expected, components={"by_completion": 0.5})


@pytest.mark.parametrize(
    ("function", "reward"), [("fields", 4 + 0.5 + 0.02 + 0.003), ("peers", 0.0), ("torch_free", 1.0)]
)
def test_parameters_are_filled_by_name(module, function, reward):
    """A prompt of messages is text for a reward."""
    messages = ({"role": "system", "content": "a"}, {"role": "user", "content": "bc"})
    item = Problem("p", messages, "42", ("easy", "short"), {"level": 3, "odd": object()})
    with custom(module, function, name="mine") as grader:
        (result,) = grader.grade([(item, "\ud800four"[:4])])
    assert result.error is None
    assert result.components == {"mine": pytest.approx(reward)}


@pytest.mark.usefixtures("nothing_left")
def test_a_module_that_cannot_be_used_is_an_error_at_the_start(module, tmp_path):
    with pytest.raises(PluginError, match=r"my_rewards\.py.*no function 'absent'; it defines by_completion"):
        custom(module, "absent")
    with pytest.raises(PluginError, match="takes no parameters"):
        custom(module, "nothing")
    path = tmp_path / "broken.py"
    for source, reason in (
        ("import no_such_package\ndef score(c, a): return 1", "no_such_package"),
        ("raise SystemExit(4)", r"SystemExit: 4 \(broken\.py:1\)"),
        ("import os; os._exit(5)", r"cannot start: the reward's worker ended \(exit status 5\)"),
    ):
        path.write_text(source, encoding="utf-8")
        with pytest.raises(PluginError, match=reason) as caught:
            custom(path, "score")
        assert caught.value.exit_status == 2


@pytest.mark.usefixtures("nothing_left")
def test_components_in_workers_inherit_limits_and_are_closed(module):
    part = {"type": "custom", "custom_module": str(module), "custom_function": "by_completion", "weight": 0.5}
    section = {"type": "weighted", "timeout_s": 1.0, "workers": 1, "components": [{"type": "math"}, part]}
    with build_grader(tasks.RewardSection.model_validate(section)) as grader:
        fine, hung = grader.grade([(problem("1/2"), boxed("0.5")), (problem("1/2"), "hang")])
    assert (fine.total_reward, fine.components) == (1.0, {"math": 1.0, "by_completion": 0.0})
    assert (hung.total_reward, hung.components) == (None, {"math": 0.0, "by_completion": None})
    assert "by_completion: the reward took longer than 1 s" in (hung.error or "")


def test_a_worker_killed_between_two_steps_is_replaced(module):
    before = set(psutil.Process().children())
    with Grader(CustomReward(str(module), "by_completion", workers=2, timeout_s=20.0)) as grader:
        items = [(problem("yes"), "yes")] * 4
        grader.grade(items)
        for process in set(psutil.Process().children()) - before:
            process.send_signal(signal.SIGKILL)
            process.wait()
        results = grader.grade(items)
    assert [result.total_reward for result in results] == [1.0] * 4


def echo():
    """Entry of a pool in this file: sleeps for the job's seconds, then returns the job."""

    def grade(job):
        time.sleep(job[1])
        return job[0]

    return grade


def forger():
    """Entry of a pool in this file: writes a false reply on every socket it can find."""

    def grade(job):
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, job)
            except OSError:
                continue
        return 1.0

    return grade


def asked_to_end():
    """Entry of a pool in this file: the processes of a job are asked to end, and a program that it has started."""

    def grade(job):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        return [job, program.wait()]

    return grade


@pytest.fixture
def pool():
    """A function that starts a pool with an entry of this file; all are closed at the end."""
    with ExitStack() as stack:

        def start(entry: str, workers: int = 1, timeout_s: float = 20.0) -> WorkerPool:
            limits = WorkerLimits(timeout_s, memory_bytes=2 << 30)
            return stack.enter_context(closing(WorkerPool(f"{__name__}:{entry}", {}, workers=workers, limits=limits)))

        yield start


def test_replies_keep_the_order_of_jobs(pool):
    workers = pool("echo", workers=3)
    jobs = [(index, 0.02 * (index % 3)) for index in range(30)]
    assert [reply.value for reply in workers.map(jobs)] == list(range(30))


def test_what_asks_all_processes_of_a_job_to_end_costs_no_answer_and_still_ends_what_a_reward_started(pool):
    replies = pool("asked_to_end").map(["a", "b"])
    assert [reply.value for reply in replies] == [["a", -15], ["b", -15]]


def test_a_batch_that_only_times_out_is_given_up(pool, monkeypatch):
    monkeypatch.setattr("retrain.rewards.workers.MAX_TIMEOUTS_IN_A_ROW", 2)
    workers = pool("echo", timeout_s=1.0)
    replies = workers.map([(0, 600.0)] * 200)
    assert all("longer than 1 s" in (reply.error or "") for reply in replies[:2])
    assert all(reply.error == "not tried after 2 time-outs of 1 s in a row" for reply in replies[2:])
    assert workers.map([(1, 0.0)])[0].value == 1  # the next step tries again


def test_a_forged_reply_is_no_reply(pool):
    """Without an end, two at once, no JSON, no object."""
    forged = [b"\xff\xff\xff\xff", b"\x00\x00\x00\x02{}{}", b"\x00\x00\x00\x04oops", b"\x00\x00\x00\x0212"]
    for reply in pool("forger", timeout_s=1.0).map(forged):
        assert reply.value is None
        assert reply.error is not None


@pytest.mark.usefixtures("nothing_left")
def test_a_pool_works_again_after_it_was_closed_or_interrupted(pool):
    before = set(psutil.Process().children())
    workers = pool("echo")
    assert workers.map([("a", 0.0)])[0].value == "a"
    workers.close()
    assert set(psutil.Process().children()) == before
    assert workers.map([("b", 0.0)])[0].value == "b"

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            workers.map([("stale", 2.0)])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert workers.map([("c", 0.0)])[0].value == "c"


def test_a_worker_that_hangs_in_an_import_ends_without_the_trainer(tmp_path):
    (tmp_path / "hanging.py").write_text("while True:\n    pass\n")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        code = f"from retrain.rewards.workers import serve; serve({theirs.fileno()})"
        path = os.pathsep.join([str(tmp_path), *sys.path])
        worker = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=os.environ | {"PYTHONPATH": path}
        )
        limits = {"memory_bytes": 1 << 30, "start_s": 0.1}
        frame = pickle.dumps({"entry": "hanging:x", "arguments": {}, "subject": "the reward"} | limits)
        ours.sendall(struct.pack("!i", len(frame)) + frame)
    assert worker.wait(60) == -signal.SIGALRM


def test_a_reward_declares_the_ranges_of_its_numbers(tmp_path):
    path = tmp_path / "ranged.py"
    path.write_text(
        "reward_max = 2.0\n"
        "metrics_ranges = {'steps': {'min': 0, 'max': 20, 'invert': True}}\n"
        "def score(completion, answer):\n    return 1.0\n"
        "score.reward_min = -1.0\n"
        "def odd(completion, answer):\n    return 1.0\n"
        "odd.metrics_ranges = {'steps': {'min': 3, 'max': 1}}\n",
        encoding="utf-8",
    )
    total, steps = {"min": -1.0, "max": 2.0}, {"min": 0, "max": 20, "invert": True}
    with custom(path, "score") as grader:
        assert grader.ranges == {"reward": total, "score": total, "steps": steps}
    part = {"type": "custom", "custom_module": str(path), "name": "mine"}
    section = {"type": "weighted", "components": [{"type": "match"}, part], "workers": 1}
    with build_grader(tasks.RewardSection.model_validate(section)) as grader:
        assert grader.ranges == {"mine": total, "steps": steps}
    with pytest.raises(PluginError, match="have a min that is not below its max for 'steps'"):
        custom(path, "odd")
