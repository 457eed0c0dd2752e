"""The OpenAI endpoint of a session, asked by the openai client."""

import asyncio
import copy
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock, patch

import aiohttp
import openai
import pytest
from episode_players import QWEN25, TOOL, Scripted, chat_tokenizer, make_session
from hypothesis import given, settings
from hypothesis import strategies as st
from test_episodes_tools import CALL, parser_of

from grpo_ray.episodes.limits import Limits
from grpo_ray.episodes.openai_server import RETRY_HEADER, ChatServer
from grpo_ray.episodes.outcome import EpisodeResult, Status
from grpo_ray.episodes.runner import EpisodeRunner
from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example

Agent = Callable[[openai.AsyncOpenAI, Session], Coroutine[Any, Any, float]]
QUESTION = {"role": "user", "content": "where?"}


def play(agent: Agent, *replies: str, limits: Limits | None = None) -> tuple[EpisodeResult, Scripted]:
    """Run an episode that knows only the session's URL."""
    tokenizer = chat_tokenizer(QWEN25)
    texts = iter(replies)
    sampler = Scripted(tokenizer, lambda prompt: next(texts), "<|im_end|>")

    async def episode(session: Session, example: Example) -> float:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="none") as client:
            return await agent(client, session)

    async def run() -> EpisodeResult:
        server = ChatServer()
        await server.start()
        session = make_session(sampler, tokenizer, limits, parser_of("transformers", tokenizer))
        try:
            return await EpisodeRunner(episode, server=server).run(session, Example("", ""))
        finally:
            await server.stop()

    return asyncio.run(run()), sampler


def test_an_agent_with_tools_continues_its_tokens() -> None:
    async def agent(client: openai.AsyncOpenAI, session: Session) -> float:
        messages: list[Any] = [QUESTION]
        first = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])  # type: ignore
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or ()
        assert (call.type, call.function.name) == ("function", "look")
        assert json.loads(call.function.arguments) == {"place": "hier, dört"}
        assert first.usage is not None
        assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "nothing"}]
        second = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])  # type: ignore
        assert second.model == "policy"
        assert second.choices[0].message.content == "It is gone."
        assert second.choices[0].message.tool_calls is None
        assert second.choices[0].finish_reason == "stop"
        return 1.0

    result, sampler = play(agent, CALL % "hier, dört", "It is gone.")
    assert result.reward == 1.0, result.error
    (sequence,) = result.segments.sequences()
    assert sorted(set(sequence.turns[sequence.mask].tolist())) == [0, 1]
    assert sampler.prompts[1][: len(sampler.prompts[0])] == sampler.prompts[0]


def test_a_stream_gives_the_same_reply() -> None:
    async def agent(client: openai.AsyncOpenAI, session: Session) -> float:
        text, calls, reasons = "", [], []
        stream = await client.chat.completions.create(
            model="policy",
            messages=[QUESTION],  # type: ignore[list-item]
            tools=[TOOL],  # type: ignore[list-item]
            stream=True,
        )
        async for chunk in stream:
            delta = chunk.choices[0].delta
            text += delta.content or ""
            calls += delta.tool_calls or []
            reasons.append(chunk.choices[0].finish_reason)
        assert text.strip() == "I look."
        assert [json.loads(call.function.arguments) for call in calls] == [{"place": "here"}]
        assert reasons == [None, "tool_calls"]
        return 1.0

    result, _ = play(agent, f"I look.\n{CALL % 'here'}")
    assert result.reward == 1.0, result.error


def test_a_limit_ends_the_agent_at_once() -> None:
    async def agent(client: openai.AsyncOpenAI, session: Session) -> float:
        for _ in range(3):
            await client.chat.completions.create(model="policy", messages=[QUESTION])  # type: ignore[list-item]
        return 1.0

    result, sampler = play(agent, "a", "b", "c", limits=Limits(max_turns=2))
    assert (result.status, result.reward) == (Status.TRUNCATED_TURNS, 0.0)
    assert len(sampler.prompts) == 2


def test_a_client_may_give_back_a_streamed_reply_with_what_it_added() -> None:
    """The openai client's accumulated messages have an `index` at each call, and fields without a value."""

    async def agent(client: openai.AsyncOpenAI, session: Session) -> float:
        messages: list[Any] = [QUESTION]
        async with client.chat.completions.stream(
            model="policy",
            messages=messages,
            tools=[TOOL],  # type: ignore[list-item]
            stream_options={"include_usage": True},
        ) as stream:
            final = await stream.get_final_completion()
        assert final.usage is not None
        assert final.usage.completion_tokens > 5
        message = final.choices[0].message.model_dump()
        assert "index" in message["tool_calls"][0]
        call = message["tool_calls"][0]
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "nothing"}]
        await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])  # type: ignore
        return 1.0

    result, _ = play(agent, CALL % "here", "It is gone.")
    assert result.reward == 1.0, result.error
    assert len(result.segments.sequences()) == 1, "the second turn continues the first"


def test_a_conversation_that_is_too_long_has_openais_code() -> None:
    """Agents end or shorten their conversation at it."""

    async def agent(client: openai.AsyncOpenAI, session: Session) -> float:
        long = [{"role": "user", "content": "where? " * 50}]
        with pytest.raises(openai.BadRequestError) as error:
            await client.chat.completions.create(model="policy", messages=long)  # type: ignore[arg-type]
        assert error.value.code == "context_length_exceeded"
        return 0.5

    result, _ = play(agent, limits=Limits(max_tokens=60))
    assert (result.status, result.reward) == (Status.TRUNCATED_TOKENS, 0.5)


def test_other_endpoints_say_which_one_there_is() -> None:
    async def agent(client: openai.AsyncOpenAI, session: Session) -> float:
        for call in (client.models.list(), client.responses.create(model="policy", input="where?")):
            with pytest.raises(openai.NotFoundError, match=r"answers only POST \.\.\./v1/chat/completions"):
                await call
        return 1.0

    result, _ = play(agent)
    assert result.reward == 1.0, result.error


def test_requests_that_a_session_cannot_answer_are_refused() -> None:
    async def agent(client: openai.AsyncOpenAI, session: Session) -> float:
        for arguments, message in (
            ({"n": 2}, "n: a session supports only 1, not 2"),
            ({"tool_choice": "required"}, 'supports only \\"auto\\"'),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text is supported"),
            ({"messages": [{"content": "hello"}]}, "a message has no role"),
            (
                {"messages": [{"role": ["user"], "content": "x"}]},
                "a message has no role, or one that is no text",
            ),
            ({"messages": [{"role": "user", "content": 5}]}, "only text is supported"),
            ({"messages": [{"role": "user", "content": ["x"]}]}, "only text is supported"),
            ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "only text is supported"),
            ({"messages": [{"role": "tool", "content": "x", "name": 3}]}, "name: a message has 3"),
            (
                {"messages": [{"role": "assistant", "content": "x", "reasoning_content": {}}]},
                "reasoning_content: a message has {}",
            ),
            ({"messages": ["hello"]}, "a list of messages"),
            (
                {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
                "each only with a name and arguments",
            ),
            ({"tools": ["look"]}, "only a list of objects"),
            ({"tools": [{}]}, "each with a function that has a name"),
            ({"max_tokens": -1}, "it must be a positive whole number"),
            ({"max_tokens": True}, "max_tokens is True; it must be a positive whole number"),
            ({"max_completion_tokens": 0}, "max_tokens is 0; it must be a positive whole number"),
            ({"extra_body": {"stream": "yes"}}, "stream is 'yes'; a session takes only"),
            ({"extra_body": {"stream_options": ["x"]}}, "stream_options is ['x']; a session takes only"),
        ):
            with pytest.raises(openai.BadRequestError) as error:
                await client.chat.completions.create(**{"model": "policy", "messages": [QUESTION], **arguments})
            assert message.replace("\\", "") in str(error.value)
        return 1.0

    result, sampler = play(agent)
    assert (result.reward, result.status) == (1.0, Status.FINISHED), result.error
    assert sampler.prompts == []


def _calling(arguments: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
    }


@asynccontextmanager
async def serving(limits: Limits | None = None) -> AsyncIterator[tuple[Session, str, aiohttp.ClientSession]]:
    """Serve a session that always gets the same reply; give it, its endpoint and a client."""
    tokenizer = chat_tokenizer(QWEN25)
    sampler = Scripted(tokenizer, lambda prompt: "gone", "<|im_end|>")
    session, server = (
        make_session(sampler, tokenizer, limits, parser_of("transformers", tokenizer)),
        ChatServer(),
    )
    await server.start()
    server.open(session)
    try:
        async with aiohttp.ClientSession() as http:
            yield session, f"{session.base_url}/chat/completions", http
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"[" * 100_000, {}),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', {}),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": NaN}', {}),
        (json.dumps({"messages": [QUESTION]}).encode(), {RETRY_HEADER: "often"}),
        (b"not compressed", {"Content-Encoding": "gzip"}),
    ],
)
def test_a_request_that_cannot_be_read_is_refused_and_the_next_one_answered(
    body: bytes, headers: dict[str, str]
) -> None:
    async def ask() -> None:
        async with serving() as (_, url, http):
            async with http.post(url, data=body, headers=headers) as answer:
                assert answer.status == 400, await answer.text()
                assert (await answer.json())["error"]["message"]
            async with http.post(url, json={"messages": [QUESTION]}) as answer:
                assert answer.status == 200, await answer.text()

    asyncio.run(ask())


@pytest.mark.parametrize("error", [KeyError("name"), AttributeError("strip"), RecursionError()])
def test_what_a_template_or_parser_does_not_take_is_refused(error: Exception) -> None:
    async def ask() -> None:
        async with serving() as (session, url, http):
            with patch.object(session, "chat", AsyncMock(side_effect=error)):
                async with http.post(url, json={"messages": [QUESTION]}) as answer:
                    assert answer.status == 400
                    assert str(error) in (await answer.json())["error"]["message"]

    asyncio.run(ask())


@pytest.mark.slow
def test_a_request_that_is_too_large_ends_the_episode_unread() -> None:
    """The limit follows from max_tokens, not from the endpoint."""

    async def ask() -> None:
        limits = Limits(max_tokens=4096)
        async with serving(limits) as (session, url, http):
            read = AsyncMock(side_effect=AssertionError("it was read"))
            with patch.object(session, "chat", read):
                text = "x" * (60 * 2**20)
                async with http.post(
                    url, data=json.dumps({"messages": [{**QUESTION, "content": text}]})
                ) as answer:
                    assert answer.status == 413
                    assert (await answer.json())["error"]["code"] == "context_length_exceeded"
        assert session.ended is not None
        assert session.ended.status is Status.TRUNCATED_TOKENS
        padded = json.dumps({"messages": [QUESTION]}).encode() + b" " * (3 * 2**20)
        for max_tokens, status in ((4096, 413), (10**6, 200)):
            limits = Limits(max_tokens=max_tokens)
            async with serving(limits) as (_, url, http), http.post(url, data=padded) as answer:
                assert answer.status == status

    asyncio.run(ask())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
REQUEST = {
    "model": "policy",
    "messages": [
        QUESTION,
        _calling('{"place": "here"}'),
        {
            "role": "tool",
            "tool_call_id": "call00000",
            "name": "look",
            "content": [{"type": "text", "text": "x"}],
        },
        {"role": "assistant", "content": "hm", "reasoning_content": "so"},
        QUESTION,
    ],
    "tools": [TOOL],
    "max_tokens": 5,
    "stream": False,
    "stream_options": {"include_usage": True},
    "n": 1,
}


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

    async def ask(http: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str]) -> None:
        async with http.post(url, data=body, headers=headers) as answer:
            text = await answer.text()
        statuses[answer.status] += 1
        assert answer.status in (200, 400), text
        async with http.post(url, json={"messages": [QUESTION]}) as answer:
            assert answer.status == 200, await answer.text()

    with asyncio.Runner() as runner:
        limits = Limits(max_turns=10**9)
        context = serving(limits)
        _, url, http = runner.run(context.__aenter__())

        @settings(max_examples=num_requests, database=None)
        @given(REQUESTS)
        def check(request: tuple[bytes, dict[str, str]]) -> None:
            runner.run(ask(http, url, *request))

        try:
            check()
        finally:
            runner.run(context.__aexit__(None, None, None))
    assert min(statuses[200], statuses[400]) >= num_requests // 20, statuses


def test_max_tokens_may_only_shorten_a_reply() -> None:
    async def agent(client: openai.AsyncOpenAI, session: Session) -> float:
        short = await client.chat.completions.create(model="policy", messages=[QUESTION], max_tokens=3)  # type: ignore
        assert short.choices[0].finish_reason == "length"
        assert short.usage is not None
        return float(short.usage.completion_tokens)

    result, sampler = play(agent, "a long reply")
    assert result.reward == 3.0
    assert sampler.settings[0].max_tokens == 3


def test_only_the_sessions_own_url_is_answered_and_only_while_it_runs() -> None:
    urls: list[str] = []

    async def agent(client: openai.AsyncOpenAI, session: Session) -> float:
        urls.append(session.base_url)
        assert session.base_url.startswith("http://127.0.0.1:")
        token = session.base_url.split("/")[3]
        other = session.base_url.replace(token, "a" * len(token))
        async with openai.AsyncOpenAI(base_url=other, api_key="none") as stranger:
            with pytest.raises(openai.AuthenticationError, match="no session with this token"):
                await stranger.chat.completions.create(model="policy", messages=[QUESTION])  # type: ignore[list-item]
        return 1.0

    with pytest.raises(ValueError, match="no server serves it"):
        _ = make_session(None, chat_tokenizer(QWEN25)).base_url
    results = [play(agent)[0] for _ in range(2)]
    assert [result.reward for result in results] == [1.0, 1.0]
    assert urls[0].split("/")[3] != urls[1].split("/")[3]


def test_a_request_sent_again_is_sampled_once() -> None:
    """A client that loses its connection asks again, with a header that says so."""

    async def agent(client: openai.AsyncOpenAI, session: Session) -> float:
        url, body = f"{session.base_url}/chat/completions", {"messages": [QUESTION]}
        async with aiohttp.ClientSession() as http:
            texts = []
            for retry in ("0", "1", "2", "0"):
                async with http.post(url, json=body, headers={RETRY_HEADER: retry}) as answer:
                    texts.append((await answer.json())["choices"][0]["message"]["content"])
        assert texts == ["a", "a", "a", "b"]
        return 1.0

    result, sampler = play(agent, "a", "b")
    assert result.reward == 1.0, result.error
    assert len(sampler.prompts) == 2


@pytest.mark.slow
def test_each_of_many_sessions_gets_its_own_replies() -> None:
    tokenizer = chat_tokenizer(QWEN25)

    async def episode(session: Session, example: Example) -> float:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="none") as client:
            messages: list[Any] = [{"role": "user", "content": example.question}]
            reply = await client.chat.completions.create(model="policy", messages=messages)
            return float(reply.choices[0].message.content == f"to {example.question}")

    async def run() -> list[EpisodeResult]:
        server = ChatServer()
        await server.start()
        runner = EpisodeRunner(episode, server=server)

        def policy(prompt: str) -> str:
            return f"to {prompt.split('user')[1].split('<')[0].strip()}"

        sessions = [make_session(Scripted(tokenizer, policy, "<|im_end|>"), tokenizer) for _ in range(20)]
        runs = (runner.run(session, Example(str(number), "")) for number, session in enumerate(sessions))
        try:
            return await asyncio.gather(*runs)
        finally:
            await server.stop()

    assert [result.reward for result in asyncio.run(run())] == [1.0] * 20
