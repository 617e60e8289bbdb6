import json
import socket
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from helpers.campaigns import run_cli
from helpers.servers import CAPITAL, JudgeServer, chat, judging, says

from retrain.config import tasks
from retrain.errors import UsageError
from retrain.rewards import RewardResult, build_grader
from retrain.rewards.judge import FAILURES_IN_A_ROW, JudgeEndpoint, JudgeReward, parse_score, question
from retrain.types import Problem

KEY = "sk-secret-0123456789"
server = judging


def judged(server: JudgeServer, *completions: str, problem: Problem = CAPITAL, **options: Any) -> list[RewardResult]:
    options = {"timeout_s": 5.0, "pause_s": 0.01, **options}
    reward = JudgeReward(JudgeEndpoint("judge-1", server.url, **options))
    return reward.grade_all([(problem, completion) for completion in completions or ("Paris",)])


def test_scores_come_back_in_order(server: JudgeServer) -> None:
    def respond(handler: Any, request: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        number = int(request["messages"][-1]["content"].rpartition("<response>\n")[2].split("\n")[0])
        time.sleep(0.05 if number % 3 == 0 else 0)
        return 200, chat(f" 0.{number:02d}\n"), {}

    server.respond = respond
    results = judged(server, *map(str, range(40)))
    assert [result.total_reward for result in results] == [number / 100 for number in range(40)]
    assert {request["model"] for request in server.requests} == {"judge-1"}
    assert all(request["temperature"] == 0 for request in server.requests)
    assert "Authorization" not in server.headers[0]


def test_the_question_holds_task_reference_and_response(server: JudgeServer) -> None:
    server.respond = says("1")
    nasty = Problem("p", ({"role": "user", "content": "Capital of France?"},), "Paris")
    (result,) = judged(server, "It is Paris\x00\ud800" + "x" * 50, problem=nasty)
    assert result.total_reward == 1.0
    text = server.requests[0]["messages"][-1]["content"]
    assert "Capital of France?" in text
    assert "Reference answer:\nParis" in text
    assert "It is Paris" in text
    assert "Reference" not in question(Problem("p", "Write a poem.", ""), "Roses")[-1]["content"]
    assert len(question(CAPITAL, "x" * 1_000_000)[-1]["content"]) < 30_000


@pytest.mark.parametrize(("text", "score"), [
    ("1", 1.0), ("<think>0.2 or 0.9?</think>\n0.9", 0.9), ("1.5", None), ("Score: 1", None),
    ("<think>never ends 1", None),
])  # fmt: skip
def test_scores_are_read_strictly(text: str, score: float | None) -> None:
    assert parse_score(text) == score


CUT_OFF = json.loads(chat("1"))
CUT_OFF["choices"][0]["finish_reason"] = "length"


@pytest.mark.parametrize(("body", "reason"), [
    (chat("It is a fine answer."), "not a number between 0 and 1"),
    (json.dumps(CUT_OFF).encode(), "was cut off (2048 tokens"),
    (b"[" * 100_000, "not a chat completion"),
    (b"x" * (2 << 20), "more than"),
])  # fmt: skip
def test_nonsense_is_null_and_not_asked_again(server: JudgeServer, body: bytes, reason: str) -> None:
    server.respond = lambda handler, request: (200, body, {})
    (result,) = judged(server)
    assert result.total_reward is None
    assert reason in (result.error or "")
    assert len(server.requests) == 1


@pytest.mark.parametrize("fault", [500, 429, "hangs up"])
def test_a_busy_or_broken_server_is_asked_again(server: JudgeServer, fault: int | str) -> None:
    def respond(handler: Any, request: Any) -> tuple[int, bytes, dict[str, str]] | None:
        if len(server.requests) % 3 == 0:
            return 200, chat("1"), {}
        if fault == "hangs up":
            handler.connection.shutdown(socket.SHUT_RDWR)
            return None
        return fault, b"try later", {"Retry-After": "0"}

    server.respond = respond
    assert judged(server)[0].total_reward == 1.0
    (result,) = judged(server, attempts=2)
    assert result.total_reward is None
    assert "failed 2 times, last: " in (result.error or "")
    assert len(server.requests) == 5


def test_a_long_retry_after_does_not_hold_the_run(server: JudgeServer) -> None:
    server.respond = lambda handler, request: (429, b"", {"Retry-After": "86400"})
    start = time.monotonic()
    judged(server, timeout_s=0.3, attempts=2)
    assert time.monotonic() - start < 5


def test_a_refusal_is_final_and_does_not_stop_the_others(server: JudgeServer) -> None:
    def respond(handler: Any, request: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        long = "too long" in request["messages"][-1]["content"]
        return (400, b"context length exceeded", {}) if long else (200, chat("1"), {})

    server.respond = respond
    results = judged(server, *["too long"] * 8, "Paris")
    assert [result.total_reward for result in results] == [None] * 8 + [1.0]
    assert "HTTP 400 context length exceeded" in (results[0].error or "")
    assert len(server.requests) == 9


@pytest.mark.parametrize("part", ["body", "headers", "nothing"])
def test_a_slow_or_dripping_server_does_not_hold_the_run(server: JudgeServer, part: str) -> None:
    """One byte in a while keeps every socket time-out happy; the limit is on the whole request."""

    def respond(handler: BaseHTTPRequestHandler, request: Any) -> None:
        if part == "body":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        try:
            while not server.stopped.wait(30 if part == "nothing" else 0.05):
                handler.wfile.write(b"H")
                handler.wfile.flush()
        except OSError:
            return

    server.respond = respond
    start = time.monotonic()
    (result,) = judged(server, timeout_s=0.5, attempts=1)
    assert "no answer within 0.5 s" in (result.error or "")
    assert time.monotonic() - start < 10


def test_when_nobody_is_there_the_batch_is_given_up_quickly(server: JudgeServer) -> None:
    with socket.socket() as taken:  # bound and never listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        reward = JudgeReward(JudgeEndpoint("m", url, workers=1, timeout_s=2.0, pause_s=0.05))
        results = reward.grade_all([(CAPITAL, "Paris")] * 500)
    assert all(result.total_reward is None for result in results)
    assert "failed 3 times, last: ConnectError" in (results[0].error or "")
    assert f"not tried after {FAILURES_IN_A_ROW} failures in a row" in (results[-1].error or "")


def test_the_key_goes_to_the_server_and_nowhere_else(server: JudgeServer, monkeypatch, capfd, caplog) -> None:
    caplog.set_level(0)
    server.respond = lambda handler, request: (401, f"wrong key {handler.headers['Authorization']}".encode(), {})
    keys = {"type": "judge", "judge_model": "m", "judge_url": server.url, "judge_api_key_env": "JUDGE_KEY"}
    section = tasks.RewardSection.model_validate(keys)
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(UsageError, match=r"export JUDGE_KEY="):
        build_grader(section)
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with build_grader(section) as grader:
        (result,) = grader.grade([(CAPITAL, "Paris")])
        assert KEY not in repr(vars(grader)) + repr(grader.reward)
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert result.components == {"judge": None}
    assert "HTTP 401 wrong key Bearer ***" in (result.error or "")
    assert KEY not in json.dumps(server.requests) + caplog.text + "".join(capfd.readouterr())


def test_check_finds_a_key_that_is_not_set(tmp_path, monkeypatch) -> None:
    keys = 'type = "judge"\njudge_model = "m"\njudge_api_key_env = "JUDGE_KEY"\n'
    server = '[inference]\nengine = "vllm"\nurl = "http://127.0.0.1:9"\napi_key_env = "JUDGE_KEY"\n'
    (tmp_path / "f.toml").write_text(f"[reward]\n{keys}[audit]\n{keys}{server}")
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    result = run_cli("check", tmp_path / "f.toml")
    assert (result.exit_code, result.output.splitlines()) == (2, [
        f'f.toml:{line}  {key}api_key_env  is "JUDGE_KEY": $JUDGE_KEY is not set: export JUDGE_KEY=…'
        for line, key in ((4, "reward.judge_"), (8, "audit.judge_"), (12, "inference."))
    ])  # fmt: skip
    monkeypatch.setenv("JUDGE_KEY", KEY)
    result = run_cli("check", tmp_path / "f.toml")
    assert result.exit_code == 0, result.output
