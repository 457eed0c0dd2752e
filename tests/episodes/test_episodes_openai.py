"""The OpenAI endpoint of a session, asked by the openai client."""

import asyncio
import copy
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import AsyncMock, patch

import aiohttp
import openai
import pytest
from episode_players import CALL, JSON, TOOL, Scripted, said, session_of
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.config.episodes import EpisodesConfig
from grpo_ray.episodes.openai_server import RETRY_HEADER, ChatServer
from grpo_ray.episodes.outcome import Status
from grpo_ray.episodes.session import Session

QUESTION = {"role": "user", "content": "where?"}
LOOK = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": '{"place": "here"}'}}


@dataclass
class Served:
    """A session at its URL, with clients for it."""

    session: Session
    sampler: Scripted
    client: openai.AsyncOpenAI
    http: aiohttp.ClientSession
    url: str

    async def ask(self, *messages: Any, **arguments: Any) -> Any:
        """Ask by OpenAI's client; default: a question."""
        given = {"messages": list(messages or [QUESTION]), **arguments}
        return await self.client.chat.completions.create(model="policy", **given)


@asynccontextmanager
async def serving(*replies: str, limits: EpisodesConfig | None = None) -> AsyncIterator[Served]:
    """Serve a session that gets these replies; default: always the same."""
    policy = said(*replies) if replies else lambda prompt: "gone"
    session, sampler = session_of("qwen2.5", policy, limits, parser="transformers")
    async with aclosing(ChatServer()) as server:
        await server.start()
        with server.serving(session):
            async with (
                openai.AsyncOpenAI(base_url=session.base_url, api_key="none") as client,
                aiohttp.ClientSession() as http,
            ):
                yield Served(session, sampler, client, http, f"{session.base_url}/chat/completions")


async def test_an_agent_with_tools_continues_its_tokens() -> None:
    async with serving(CALL % "hier, dört", "It is gone.") as served:
        first = await served.ask(QUESTION, tools=[TOOL])
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "look")
        assert json.loads(call.function.arguments) == {"place": "hier, dört"}
        assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
        result = {"role": "tool", "tool_call_id": call.id, "content": "nothing"}
        second = await served.ask(QUESTION, choice.message, result, tools=[TOOL])
    assert second.model == "policy"
    (choice,) = second.choices
    assert (choice.message.content, choice.message.tool_calls) == ("It is gone.", None)
    assert choice.finish_reason == "stop"
    (sequence,) = served.session.segments.sequences()
    assert sorted(set(sequence.turns[sequence.mask].tolist())) == [0, 1]
    before, after = served.sampler.prompts
    assert after[: len(before)] == before


@pytest.mark.parametrize("exempt", ["", "*", "localhost"])
async def test_no_proxy_is_asked_for_the_endpoint(monkeypatch: pytest.MonkeyPatch, exempt: str) -> None:
    for name, value in {"http_proxy": "http://127.0.0.1:1", "no_proxy": exempt, "NO_PROXY": ""}.items():
        monkeypatch.setenv(name, value)
    async with serving() as served:
        assert (await served.ask()).choices
    assert os.environ["no_proxy"] == {"": "127.0.0.1", "*": "*"}.get(exempt, "localhost,127.0.0.1")


async def test_a_stream_gives_the_same_reply_and_a_client_may_give_it_back_with_what_it_added() -> None:
    """The openai client's accumulated messages have an `index` at each call, and fields without a value."""
    async with serving(f"I look.\n{CALL % 'here'}", "It is gone.") as served:
        asked: Any = {"messages": [QUESTION], "tools": [TOOL], "stream_options": {"include_usage": True}}
        async with served.client.chat.completions.stream(model="policy", **asked) as stream:
            events = [event async for event in stream if event.type == "chunk"]
            final = await stream.get_final_completion()
        reasons = [choice.finish_reason for event in events for choice in event.chunk.choices]
        assert reasons == [None, "tool_calls"]
        assert final.usage.completion_tokens > 5
        message = final.choices[0].message.model_dump()
        (call,) = message["tool_calls"]
        assert "index" in call
        assert message["content"].strip() == "I look."
        assert json.loads(call["function"]["arguments"]) == {"place": "here"}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "nothing"}
        await served.ask(QUESTION, message, result, tools=[TOOL])
    assert len(served.session.segments.sequences()) == 1, "the second turn continues the first"


async def test_a_limit_is_no_reason_to_ask_again_and_that_of_tokens_has_openais_code() -> None:
    """Agents end or shorten their conversation at the latter."""
    long = {"role": "user", "content": "where? " * 50}
    for limits, earlier, message, status, code in (
        (EpisodesConfig(max_turns=1), [QUESTION], QUESTION, Status.TRUNCATED_TURNS, "truncated_turns"),
        (EpisodesConfig(max_tokens=60), [], long, Status.TRUNCATED_TOKENS, "context_length_exceeded"),
    ):
        async with serving(limits=limits) as served:
            for answered in earlier:
                await served.ask(answered)
            with pytest.raises(openai.BadRequestError) as error:
                await served.ask(message)
        assert error.value.code == code
        assert served.session.ended.status is status


async def test_other_endpoints_say_which_one_there_is() -> None:
    async with serving() as served:
        for call in (served.client.models.list(), served.client.responses.create(model="policy", input="?")):
            with pytest.raises(openai.NotFoundError, match=r"answers only POST \.\.\./v1/chat/completions"):
                await call


async def test_requests_that_a_session_cannot_answer_are_refused() -> None:
    messages: tuple[tuple[Any, str], ...] = (
        ({"role": "user", "content": [{"type": "image_url"}]}, "only text is supported"),
        ({"role": ["user"], "content": "x"}, "a message has no role, or one that is not text"),
        ({"role": "user", "content": 5}, "only text is supported"),
        ({"role": "user", "content": [{"type": "text"}]}, "only text is supported"),
        ({"role": "tool", "content": "x", "name": 3}, "name: a message has 3"),
        ({"role": "assistant", "content": "x", "reasoning_content": {}}, "reasoning_content: a message has {}"),
        ("hello", "a list of messages"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "each only with a name and arguments"),
    )
    async with serving() as served:
        for arguments, message in (
            *(({"messages": [wrong]}, why) for wrong, why in messages),
            ({"n": 2}, "n: a session supports only 1, not 2"),
            ({"tool_choice": "required"}, 'supports only "auto"'),
            ({"tools": ["look"]}, "only a list of objects"),
            ({"tools": [{}]}, "each with a function that has a name"),
            ({"max_tokens": True}, "max_tokens is True; it must be a positive whole number"),
            ({"max_completion_tokens": 0}, "max_tokens is 0; it must be"),
            ({"extra_body": {"stream": "yes"}}, "stream is 'yes'; a session takes only"),
            ({"extra_body": {"stream_options": ["x"]}}, "stream_options is ['x']; a session takes only"),
        ):
            with pytest.raises(openai.BadRequestError) as error:
                await served.ask(**arguments)
            assert message in str(error.value)
    assert served.sampler.prompts == []
    assert served.session.ended is None


async def test_a_request_that_cannot_be_read_is_refused_and_the_next_one_answered() -> None:
    asked = json.dumps({"messages": [QUESTION]}).encode()
    async with serving() as served:
        for body, headers in (
            (b"[" * 100_000, {}),
            (b'{"messages": [{"role": "user", "content": "\xff"}]}', {}),
            (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": NaN}', {}),
            (asked, {RETRY_HEADER: "often"}),
            (asked, {"Content-Encoding": "gzip"}),
        ):
            async with served.http.post(served.url, data=body, headers=headers) as answer:
                assert answer.status == 400, await answer.text()
                assert (await answer.json())["error"]["message"]
            assert (await served.ask()).choices


async def test_what_a_template_or_parser_does_not_take_is_refused() -> None:
    errors = KeyError("name"), AttributeError("strip"), RecursionError()
    async with serving() as served:
        with patch.object(served.session, "chat", AsyncMock(side_effect=errors)):
            for error in errors:
                with pytest.raises(openai.BadRequestError) as refusal:
                    await served.ask()
                assert str(error) in str(refusal.value)


@pytest.mark.slow
async def test_a_request_that_is_too_large_ends_the_episode_unread() -> None:
    """The limit follows from max_tokens, not from the endpoint."""
    async with serving(limits=EpisodesConfig(max_tokens=4096)) as served:
        with patch.object(served.session, "chat", AsyncMock(side_effect=AssertionError("it was read"))):
            large = json.dumps({"messages": [{**QUESTION, "content": "x" * (60 * 2**20)}]})
            async with served.http.post(served.url, data=large) as answer:
                assert answer.status == 413
                assert (await answer.json())["error"]["code"] == "context_length_exceeded"
    assert served.session.ended.status is Status.TRUNCATED_TOKENS
    padded = json.dumps({"messages": [QUESTION]}).encode() + b" " * (3 * 2**20)
    for max_tokens, status in ((4096, 413), (10**6, 200)):
        async with serving(limits=EpisodesConfig(max_tokens=max_tokens)) as served:
            assert (await served.http.post(served.url, data=padded)).status == status


async def test_a_request_that_is_too_large_loses_no_reply_on_its_way() -> None:
    async with serving(limits=EpisodesConfig(max_tokens=64)) as served:
        with served.session._answering():
            asked = asyncio.ensure_future(served.http.post(served.url, data=b" " * 2**21))
            await asyncio.sleep(0.2)
            assert served.session.ended is None
        assert (await asked).status == 413


TEXT_PART = {"type": "text", "text": "x"}
REQUEST = {
    "model": "policy",
    "messages": [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [LOOK]},
        {"role": "tool", "tool_call_id": "call00000", "name": "look", "content": [TEXT_PART]},
        {"role": "assistant", "content": "hm", "reasoning_content": "so"},
        QUESTION,
    ],
    "tools": [TOOL], "max_tokens": 5, "stream": False, "stream_options": {"include_usage": True}, "n": 1,
}  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all values in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in _places(item, (*path, key)))]


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """Draw a request of which some values are replaced, dropped or cut."""
    body: Any = copy.deepcopy(REQUEST)
    for _ in range(draw(st.integers(0, 2))):
        *path, last = draw(st.sampled_from([place for place in _places(body) if place] or [("x",)]))
        parent = body
        for key in path:
            parent = parent[key]
        if draw(st.booleans()):
            parent[last] = draw(JSON)
        elif isinstance(body, dict):
            del parent[last]
    raw = json.dumps(body).encode()
    return raw[: draw(st.integers(0, len(raw)))] if draw(st.integers(0, 9)) == 0 else raw


REQUESTS = st.tuples(
    st.one_of(mutations(), mutations(), mutations(), st.binary(max_size=64)),
    st.dictionaries(
        st.sampled_from([RETRY_HEADER, "Content-Encoding", "Content-Type"]),
        st.sampled_from(["0", "1", "-1", "gzip", "9" * 5000, "text/plain; charset=nothing"]),
        max_size=1,
    ),
)


@pytest.mark.parametrize("num_requests", [60, pytest.param(2000, marks=pytest.mark.campaign)])
def test_no_request_is_an_error_of_the_server(num_requests: int) -> None:
    """And the next one is answered."""
    statuses: Counter[int] = Counter()

    async def send(served: Served, body: bytes, headers: dict[str, str]) -> None:
        async with served.http.post(served.url, data=body, headers=headers) as answer:
            text = await answer.text()
        statuses[answer.status] += 1
        assert answer.status in (200, 400), text
        async with served.http.post(served.url, json={"messages": [QUESTION]}) as answer:
            assert answer.status == 200, await answer.text()

    with asyncio.Runner() as runner:
        context = serving(limits=EpisodesConfig(max_turns=10**9))
        served = runner.run(context.__aenter__())

        @settings(max_examples=num_requests, database=None)
        @given(REQUESTS)
        def check(request: tuple[bytes, dict[str, str]]) -> None:
            runner.run(send(served, *request))

        try:
            check()
        finally:
            runner.run(context.__aexit__(None, None, None))
    assert min(statuses[200], statuses[400]) >= num_requests // 20, statuses


async def test_max_tokens_may_only_shorten_a_reply() -> None:
    async with serving("a long reply") as served:
        short = await served.ask(max_tokens=3)
    assert short.choices[0].finish_reason == "length"
    assert short.usage.completion_tokens == served.sampler.settings[0].max_tokens == 3


async def test_only_the_sessions_own_url_is_answered_and_only_while_it_runs() -> None:
    tokens = []
    for _ in range(2):
        async with serving() as served:
            assert served.session.base_url.startswith("http://127.0.0.1:")
            tokens.append(served.session.base_url.split("/")[3])
            other = served.session.base_url.replace(tokens[-1], "a" * len(tokens[-1]))
            with pytest.raises(openai.AuthenticationError, match="no session with this token"):
                await replace(served, client=served.client.with_options(base_url=other)).ask()
        with pytest.raises(ValueError, match="no server serves it"):
            _ = served.session.base_url
    assert tokens[0] != tokens[1]


async def test_a_request_sent_again_is_sampled_once() -> None:
    """A client that loses its connection asks again, with a header that says so."""
    texts = []
    async with serving("a", "b") as served:
        for retry in ("0", "1", "2", "0"):
            texts.append((await served.ask(extra_headers={RETRY_HEADER: retry})).choices[0].message.content)
    assert texts == ["a", "a", "a", "b"]
    assert len(served.sampler.prompts) == 2
