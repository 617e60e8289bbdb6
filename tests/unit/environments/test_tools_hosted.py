"""The tools of ours in the processes that host them, as a run uses them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from retrain.config.tasks import Environment
from retrain.environments.hosted import Hosted
from retrain.environments.tools.sandbox import available
from retrain.types import Action, Problem


def said(text: str) -> Action:
    return Action([1], text, np.zeros(1), None, "stop")


def call(name: str, argument: str, value: str) -> Action:
    return said(f'<tool_call>\n{{"name": "{name}", "arguments": {{"{argument}": "{value}"}}}}\n</tool_call>')


@pytest.mark.skipif(available() is not None, reason=f"no sandbox: {available()}")
def test_python_in_a_sandbox_in_a_process():
    host = Hosted(Environment(tools=[{"tool": "python", "keep_state": True, "timeout_s": 2.0}], workers=2), None)
    try:
        assert not host.exact
        first, second = (host.start(Problem("p", "?", ""), 1) for _ in range(2))
        assert first.observe().tools[0]["function"]["name"] == "python"
        assert first.step(call("python", "code", "x = 6 * 7")).messages[0]["role"] == "tool"
        assert "42" in first.step(call("python", "code", "print(x)")).messages[0]["content"]
        assert "NameError" in second.step(call("python", "code", "print(x)")).messages[0]["content"]
        begun = time.monotonic()
        assert not second.step(call("python", "code", "while True: pass")).done
        assert time.monotonic() - begun < 20
        assert second.step(said("42")).done
        metrics = second.result().sample_metrics
        assert metrics["tools/total_tool_calls"] == 2
        first.close()
    finally:
        host.close()


def test_search_in_a_process(tmp_path):
    (tmp_path / "a.txt").write_text("Paris is the capital of France.", encoding="utf-8")
    (tmp_path / "b.txt").write_text("Lima is the capital of Peru.", encoding="utf-8")
    host = Hosted(Environment(tools=[{"tool": "search", "corpus": str(tmp_path), "k": 1}], workers=1), None)
    try:
        assert host.exact
        episode = host.start(Problem("p", "?", ""), 1)
        (answer,) = episode.step(call("search", "query", "capital of Peru")).messages
        assert "Lima" in answer["content"]
        assert "Paris" not in answer["content"]
    finally:
        host.close()
