"""OpenAI's chat completions over HTTP, for agents that only know a URL.

Every session has a URL of its own with a random token in it, on the loopback interface. The run's sampling
settings hold: of a request only `messages`, `tools`, `stream` and a smaller `max_tokens` count.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from grpo_ray.episodes.chat_template import is_text
from grpo_ray.episodes.outcome import EpisodeEnded, Status
from grpo_ray.episodes.session import Reply, Session
from grpo_ray.episodes.tool_calls import has_name

HOST = "127.0.0.1"
MAX_REQUEST_BYTES = 64 * 2**20
BYTES_PER_CHAR = 6  # of JSON that escapes each character
OTHER_BYTES = 2**20  # of a request: tools, names, thoughts that the template drops
LINGERING_S = 1.0  # after the answer to a request that is too large, for the client to read it
TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content")
# Raised by templates and parsers for messages that they do not take.
REFUSALS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
RETRY_HEADER = "x-stainless-retry-count"  # how the openai client says that it asks again
CONTEXT_EXCEEDED = "context_length_exceeded"  # OpenAI's code, at which agents end or shorten their conversation


class ChatServer:
    """An HTTP server for the sessions of one process, on their own event loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._answers: dict[tuple[str, str], asyncio.Task[Reply]] = {}  # by token and request
        self._runner: web.AppRunner | None = None
        self._address = ""

    async def start(self) -> None:
        """Listen on a free port, which the programs of this process reach without a proxy from now on."""
        exempt = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
        if {"*", HOST}.isdisjoint(exempt.replace(",", " ").split()):
            os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{exempt},{HOST}".lstrip(",")
        app = web.Application()
        app.router.add_post("/{token}/v1/chat/completions", self._answer)
        app.router.add_route("*", "/{rest:.*}", _no_such_endpoint)
        self._runner = web.AppRunner(app, access_log=None, auto_decompress=False, lingering_time=LINGERING_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0).start()
        self._address = f"http://{HOST}:{self._runner.addresses[0][1]}"

    async def aclose(self) -> None:
        """Close all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    @contextlib.contextmanager
    def serving(self, session: Session) -> Iterator[None]:
        """Serve the session at its `base_url` as long as the context lasts."""
        token = secrets.token_urlsafe(32)
        self._sessions[token] = session
        session.served_at = f"{self._address}/{token}/v1"
        try:
            yield
        finally:
            session.served_at = None
            del self._sessions[token]
            for key in [key for key in self._answers if key[0] == token]:
                self._answers.pop(key).cancel()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        token = request.match_info["token"]
        session = self._sessions.get(token)
        if session is None:
            return _refusal(401, "there is no session with this token, or it has ended", "unknown_session")
        max_bytes = min(MAX_REQUEST_BYTES, OTHER_BYTES + BYTES_PER_CHAR * session.max_chars)
        try:
            if "Content-Encoding" in request.headers:
                raise ValueError("Content-Encoding: a session reads only requests that are not compressed")
            raw = await request.clone(client_max_size=max_bytes).read()
            body = _read(raw)
            reply = await self._reply(token, session, raw, body, int(request.headers.get(RETRY_HEADER, 0)))
        except web.HTTPRequestEntityTooLarge:
            limit = session.limits.max_tokens
            reason = f"a request of more than {max_bytes} bytes does not fit into {limit} tokens"
            return _end(413, await session.at_limit(Status.TRUNCATED_TOKENS, reason))
        except EpisodeEnded as end:
            return _end(400, end)  # clients do not ask again
        except REFUSALS as error:
            return _refusal(400, str(error) or type(error).__name__, "invalid_request")
        model = str(body.get("model", ""))
        if body.get("stream"):
            options = body.get("stream_options") or {}
            return await _stream(request, _chunks(reply, model, bool(options.get("include_usage"))))
        return web.json_response(_completion(reply, model))

    async def _reply(
        self, token: str, session: Session, raw: bytes, body: dict[str, Any], num_retries: int
    ) -> Reply:
        """Sample a reply; a request that the client sends again waits for the answer to the first."""
        key = token, hashlib.sha256(raw).hexdigest()
        if not num_retries or key not in self._answers:
            chat = session.chat(body["messages"], body.get("tools"), _max_tokens(body))
            self._answers[key] = asyncio.create_task(chat)
        return await asyncio.shield(self._answers[key])


def _read(raw: bytes) -> dict[str, Any]:
    """Return the request's body.

    Raises:
        ValueError: it is no object with messages, or asks for what a session cannot do.
        RecursionError: it is nested too deeply.
    """
    body = json.loads(raw)
    if not isinstance(body, dict) or not _has_objects(body.get("messages")):
        raise ValueError("the request must be an object with a list of messages")
    for message in body["messages"]:
        _check_message(message)
    for name, kind in (("stream", bool), ("stream_options", dict)):
        if not isinstance(body.get(name), kind | None):
            raise ValueError(f"{name} is {body[name]!r}; a session takes only what OpenAI's endpoint does")
    allowed = {"n": (None, 1), "tool_choice": (None, "auto"), "response_format": (None, {"type": "text"})}
    for name, values in allowed.items():
        if body.get(name) not in values:
            raise ValueError(f"{name}: a session supports only {json.dumps(values[1])}, not {body[name]!r}")
    return body


def _has_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _check_message(message: dict[str, Any]) -> None:
    if not isinstance(message.get("role"), str):
        raise ValueError("a message has no role, or one that is not text")
    content = message.get("content")
    if not isinstance(content, str | None) and not (_has_objects(content) and all(map(is_text, content))):
        raise ValueError("content: a message has content other than text; only text is supported")
    for name in TEXT_FIELDS:
        if not isinstance(message.get(name), str | None):
            raise ValueError(f"{name}: a message has {message[name]!r}; it is only text")
    calls = message.get("tool_calls") or []
    if not _has_objects(calls) or not all(map(_is_function_call, calls)):
        raise ValueError("tool_calls: a session takes functions, each only with a name and arguments")


def _is_function_call(call: dict[str, Any]) -> bool:
    function = call.get("function")
    has_id = isinstance(call.get("id"), str | None)
    return has_id and has_name(function) and isinstance(function.get("arguments"), str | dict)


def _max_tokens(body: dict[str, Any]) -> int | None:
    given = [body.get(name) for name in ("max_completion_tokens", "max_tokens")]
    for value in given:
        if value is not None and (type(value) is not int or value < 1):  # True is an int, too
            raise ValueError(f"max_tokens is {value!r}; it must be a positive whole number")
    return next((value for value in given if value is not None), None)


def _message(reply: Reply) -> dict[str, Any]:
    """Return the reply's message with the arguments of its tool calls as text."""
    message = {**reply.message, "content": reply.text or None}
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return message


def _completion(reply: Reply, model: str) -> dict[str, Any]:
    choice = {"index": 0, "message": _message(reply), "finish_reason": reply.finish_reason, "logprobs": None}
    return {**_header("chat.completion", model), "choices": [choice], "usage": _usage(reply)}


def _usage(reply: Reply) -> dict[str, int]:
    num_prompt, num_reply = reply.num_prompt_tokens, len(reply.token_ids)
    total = num_prompt + num_reply
    return {"prompt_tokens": num_prompt, "completion_tokens": num_reply, "total_tokens": total}


def _chunks(reply: Reply, model: str, with_usage: bool) -> list[dict[str, Any]]:
    """Return the reply as a stream: all of the message, its end, and its usage if that was asked for."""
    message = _message(reply)
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": n, **call} for n, call in enumerate(message["tool_calls"])]
    header = _header("chat.completion.chunk", model)
    parts: tuple[tuple[dict[str, Any], str | None], ...] = ((message, None), ({}, reply.finish_reason))
    chunks = [
        {**header, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        for delta, reason in parts
    ]
    return [*chunks, {**header, "choices": [], "usage": _usage(reply)}] if with_usage else chunks


def _header(kind: str, model: str) -> dict[str, Any]:
    name = f"chatcmpl-{secrets.token_hex(12)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


async def _stream(request: web.Request, chunks: list[dict[str, Any]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for data in (*map(json.dumps, chunks), "[DONE]"):
        await response.write(f"data: {data}\n\n".encode())
    return response


async def _no_such_endpoint(request: web.Request) -> web.Response:
    """Refuse what other endpoints of OpenAI's API would answer, such as its Responses."""
    message = f"a session answers only POST .../v1/chat/completions, not {request.method} to another path"
    return _refusal(404, message, "unknown_url")


def _end(status: int, end: EpisodeEnded) -> web.Response:
    code = CONTEXT_EXCEEDED if end.status is Status.TRUNCATED_TOKENS else end.status.value
    return _refusal(status, str(end), code)


def _refusal(status: int, message: str, code: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)
