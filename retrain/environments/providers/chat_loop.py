"""The null harness of ``verifiers.v1`` in this process: alternates the model's answers and the taskset's tools.

The library's ``null`` harness starts a Python process for every rollout and downloads its packages. Here the loop of
its program runs in this process. The library finds the harness under the name ``retrain-chat``. Imported only where
verifiers is installed.
"""

from contextlib import AsyncExitStack
from types import ModuleType, SimpleNamespace

from verifiers.v1.clients import ModelContext  # pyright: ignore[reportMissingImports]
from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]
from verifiers.v1.harnesses.null import NullHarness  # pyright: ignore[reportMissingImports]
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE  # pyright: ignore[reportMissingImports]
from verifiers.v1.runtimes import ProgramResult, Runtime  # pyright: ignore[reportMissingImports]
from verifiers.v1.task import TaskData  # pyright: ignore[reportMissingImports]
from verifiers.v1.trace import Trace  # pyright: ignore[reportMissingImports]

__all__ = ["ChatLoop"]

_program = ModuleType("chat_program")
exec(CHAT_PROGRAM_SOURCE, vars(_program))  # its parts find each other only in the script that the library joins them to
# The program asks for streams. After a minute without an answer, a stream reports a refusal as another error.
vars(_program)["chat"] = lambda client, model, messages, tools: client.chat.completions.create(
    model=model, messages=messages, tools=tools or _program.omit
)
OPTIONS = {"bash": False, "edit": False, "search": False}  # the program's own tools


class ChatLoop(NullHarness):
    async def setup(self, runtime: Runtime) -> None:
        """Do nothing: there is no script to prepare."""

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
        args = SimpleNamespace(api_key=secret, tool_interception_url=tool_interception_url, **OPTIONS)
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(_program.httpx.AsyncClient(timeout=None, trust_env=False))
            client = _program.AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=http, max_retries=0)
            tools, places, connections = await _program.connect_mcp({"mcpServers": servers}, stack)
            compactor = _program.Compactor(client, ctx.model, tools, False, None)
            try:
                await _program.run_chat_loop(args, compactor, messages, places, connections, http)
            except _program.APIStatusError as error:
                return ProgramResult(exit_code=1, stdout="", stderr=error.response.text)
        return ProgramResult(exit_code=0, stdout="", stderr="")
