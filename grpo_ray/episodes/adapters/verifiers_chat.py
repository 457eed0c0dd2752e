"""The plain chat loop of verifiers environments, inside the worker's process.

verifiers' own loops (`null`, `bash`) run as a program per episode, in an environment that `uv` installs.
"""

import json
from contextlib import AsyncExitStack
from types import ModuleType
from typing import Any

import aiohttp
from verifiers.v1 import Harness, HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

from grpo_ray.episodes.openai_server import CONTEXT_EXCEEDED
from grpo_ray.episodes.outcome import Status

HARNESS_ID = "grpo_ray_chat"
LIMITS = (Status.TRUNCATED_TURNS.value, CONTEXT_EXCEEDED)


class ChatConfig(HarnessConfig):
    """The configuration of the loop, which adds nothing to other loops'."""


class ChatHarness(Harness[ChatConfig]):
    """A conversation that runs the tools that a reply calls, until one calls none or at a limit."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:  # fmt: skip
        """Hold the conversation that begins with the task's prompt."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        opening = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
        messages += [message if isinstance(message, dict) else message_to_wire(message) for message in opening]
        async with AsyncExitStack() as stack:
            headers, no_limit = {"Authorization": f"Bearer {secret}"}, aiohttp.ClientTimeout(None)
            http = await stack.enter_async_context(aiohttp.ClientSession(headers=headers, timeout=no_limit))
            servers = {
                name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()
            }
            tools, places, connections = await connect_mcp({"mcpServers": servers}, stack)
            while (reply := await _reply(http, endpoint, ctx.model, messages, tools)) is not None:
                messages.append(reply)
                if not reply.get("tool_calls"):
                    break
                for call in reply["tool_calls"]:
                    content = await _result(connections, places, call["function"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        return ProgramResult(0, "", "")


async def _reply(
    http: aiohttp.ClientSession, endpoint: str, model: str, messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
) -> dict[str, Any] | None:  # fmt: skip
    """Return the next reply's message, or None at a limit of the episode: it is scored as it stands.

    Raises:
        RuntimeError: the request was refused.
    """
    body = {"model": model, "messages": messages, **({"tools": tools} if tools else {})}
    async with http.post(f"{endpoint}/chat/completions", json=body) as answer:
        text = await answer.text()
        if answer.status in (400, 413) and any(limit in text for limit in LIMITS):
            return None
        if answer.status != 200:
            raise RuntimeError(f"the model refused a turn: {answer.status} {text}")
        message: dict[str, Any] = (await answer.json())["choices"][0]["message"]
    return {name: value for name, value in message.items() if value is not None}


async def _result(connections: Any, places: dict[str, Any], function: dict[str, str]) -> Any:
    """Return the answer to a call, or its error as text."""
    if function["name"] not in places:
        return f"error: there is no tool {function['name']}"
    try:
        return await call_mcp(connections, places, function["name"], json.loads(function["arguments"]))
    except Exception as error:
        return f"error: {error}"


def plugin() -> ModuleType:
    """Return a module as verifiers looks for a harness: one that names its class in `__all__`."""
    module = ModuleType(HARNESS_ID, __doc__)
    vars(module).update(ChatHarness=ChatHarness, __all__=["ChatHarness"])
    return module
