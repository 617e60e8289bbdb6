"""Minimal harness for ``verifiers.v1``: the loop of a rollout, which alternates the model's answers and tool calls.

It does the same as the library's ``null`` harness, but in this process: ``null`` starts a Python process for every
rollout and downloads its packages. The library finds it under the name ``retrain-chat``. This module is imported only
if verifiers is installed.
"""

import json
from contextlib import AsyncExitStack, suppress

import httpx
from verifiers.v1.clients import ModelContext  # pyright: ignore[reportMissingImports]
from verifiers.v1.configs.harness import HarnessConfig  # pyright: ignore[reportMissingImports]
from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]
from verifiers.v1.harness import Harness  # pyright: ignore[reportMissingImports]
from verifiers.v1.harnesses.utils.compaction import bound_tool_message  # pyright: ignore[reportMissingImports]
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp  # pyright: ignore[reportMissingImports]
from verifiers.v1.runtimes import ProgramResult, Runtime  # pyright: ignore[reportMissingImports]
from verifiers.v1.task import TaskData  # pyright: ignore[reportMissingImports]
from verifiers.v1.trace import Trace  # pyright: ignore[reportMissingImports]

from retrain.environments.providers.endpoint import CalledFunction, ChatMessage, ToolCall

__all__ = ["ChatLoop"]


class ChatLoopConfig(HarnessConfig):
    pass


class ChatLoop(Harness[ChatLoopConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, trust_env=False))
            client.headers["Authorization"] = f"Bearer {secret}"
            tools, places, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                reply = await client.post(f"{endpoint}/chat/completions", json=body)
                if reply.status_code != 200:
                    ends = "maximum context length" in reply.text  # a limit, not a fault
                    return ProgramResult(exit_code=0 if ends else 1, stdout="", stderr=reply.text)
                message = reply.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    answer = await _denied(client, tool_interception_url, call) if tool_interception_url else None
                    if answer is None:
                        answer = {
                            "role": "tool",
                            "tool_call_id": call["id"],
                            "content": await _called(call["function"], places, connections),
                            "name": call["function"]["name"],
                        }
                    messages.append(bound_tool_message(answer))


async def _called(
    function: CalledFunction, places: dict[str, tuple[str, str]], connections: dict[str, object]
) -> object:
    name = function["name"]
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except ValueError as error:
        return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        return f"error: tool arguments must be a JSON object, got {kind}; resend as an object"
    if name not in places:
        return f"error: unknown tool {name!r}"
    return await call_mcp(connections, places, name, arguments)


async def _denied(client: httpx.AsyncClient, url: str, call: ToolCall) -> ChatMessage | None:
    """Ask the task whether the tool may run. Return None if it may, else the message that replaces the tool's answer.
    Raises RuntimeError if the task ends the rollout."""
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    with suppress(ValueError):
        arguments = json.loads(arguments)
    reply = await client.post(url, json={"tool_call_id": call["id"], "name": function["name"], "arguments": arguments})
    decision = reply.raise_for_status().json()
    if decision["action"] == "stop":
        raise RuntimeError(decision["reason"])
    return decision["message"] if decision["action"] == "deny" else None
