"""Tools of OpenEnv's MCP environments: their schemas for the chat template, and what a call comes to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx

CALL_FIELDS = {"type", "tool_name", "arguments"}
"""Fields of an action that calls a tool (``CallToolAction``)."""


def may_have_tools(action_schema: Mapping[str, Any]) -> bool:
    """Return whether actions of this JSON schema are calls of tools: they have no field of the environment's own."""
    return set(action_schema.get("properties", {})) - {"metadata"} <= CALL_FIELDS


def listed_tools(url: str, timeout_s: float, trust_env: bool) -> list[dict[str, Any]]:
    """Return the tools of the server as JSON schemas of functions, each with its whole input schema; none where the
    environment has none.

    The request is MCP's ``tools/list`` outside of a session: a session that is opened over HTTP stays open on the
    server when this process is killed. Raises httpx.HTTPError, and ValueError for an answer that is no list of tools.
    """
    request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
    answer = httpx.post(f"{url}/mcp", json=request, timeout=timeout_s, trust_env=trust_env)
    answer.raise_for_status()
    content = answer.json()
    if not isinstance(content, Mapping) or "result" not in content:
        return []
    try:
        return [_function(tool) for tool in content["result"]["tools"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{url}/mcp answers tools/list with something else than tools") from error


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = tool.get("inputSchema") or tool.get("input_schema") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": function}


def call_of(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the action that calls a tool."""
    return {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}


def result_of(observation: Any) -> tuple[str, bool]:
    """Return what the model reads of a call, and whether the call failed."""
    if not isinstance(observation, Mapping):
        return _text(observation), False
    if error := observation.get("error"):
        return f"Error: {error.get('message') if isinstance(error, Mapping) else error}", True
    result = observation.get("result")
    if not isinstance(result, Mapping):
        return _text(result), False
    parts = result.get("content")
    texts = [part["text"] for part in parts if _is_text(part)] if isinstance(parts, list) else []
    if texts:
        text = "\n".join(texts)
    else:
        text = _text(result.get("data", result))
    failed = bool(result.get("is_error") or result.get("isError"))
    return (f"Error: {text}" if failed else text), failed


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "(no result)" if value is None else json.dumps(value, ensure_ascii=False, default=str)
