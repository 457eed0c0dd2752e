"""Tool calls in replies, by transformers' parser and by vLLM's."""

import asyncio
from typing import Any

import pytest
from episode_players import CALL, QWEN25, TOOL, Scripted, chat_tokenizer, said, session_of, tokenizer_of

from grpo_ray.episodes.session import Reply, Session
from grpo_ray.episodes.tool_calls import make_tool_parser
from grpo_ray.learning.plain_chat import give_plain_chat

PARSERS = ["transformers", pytest.param("hermes", marks=pytest.mark.vllm)]


def play(parser_name: str, *replies: str) -> tuple[list[Reply], Session, Scripted]:
    """Let each reply be answered by a result of the tool; return the replies."""
    session, sampler = session_of("qwen2.5", said(*replies), parser=parser_name)

    async def turns() -> list[Reply]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "where?"}]
        found = []
        for _ in replies:
            found.append(await session.chat(messages, tools=[TOOL]))
            messages += [found[-1].message, {"role": "tool", "content": "nothing"}]
        return found

    return asyncio.run(turns()), session, sampler


@pytest.mark.parametrize("parser", PARSERS)
def test_calls_are_found_and_their_tokens_stay(parser: str) -> None:
    first = f"I look.\n{CALL % 'here'}\n{CALL % 'there'}"
    replies, session, sampler = play(parser, first, "It is gone.")
    assert [(call.name, call.arguments) for call in replies[0].tool_calls] == [
        ("look", {"place": "here"}),
        ("look", {"place": "there"}),
    ]
    assert replies[0].text.strip() == "I look."
    assert replies[0].finish_reason == "tool_calls"
    assert len({call.id for call in replies[0].tool_calls}) == 2
    assert all(len(call.id) == 9 and call.id.isalnum() for call in replies[0].tool_calls)
    assert (replies[1].text, replies[1].tool_calls, replies[1].finish_reason) == ("It is gone.", (), "stop")
    # The call as it was sampled, with its own white space, stands in the next prompt.
    assert sampler.prompts[1][: len(sampler.prompts[0])] == sampler.prompts[0]
    (sequence,) = session.segments.sequences()
    trained = sequence.response_token_ids[sequence.turns == 0]
    assert tokenizer_of("qwen2.5").decode(trained) == f"{first}<|im_end|>"


async def test_thoughts_that_a_parser_tells_apart_stay_while_the_template_shows_them() -> None:
    """Also if an agent gives the history back without them, as clients of OpenAI's endpoint do."""
    thinking = f"<think>\nhm\n</think>\n\n{CALL % 'here'}"
    session, sampler = session_of("qwen3", said(thinking, "gone", "sure"), parser="transformers")

    messages: list[dict[str, Any]] = [{"role": "user", "content": "where?"}]
    for new in ({"role": "tool", "content": "nothing"}, {"role": "user", "content": "sure?"}, None):
        reply = await session.chat(messages, tools=[TOOL])
        assert reply.reasoning == ("hm" if reply.tool_calls else "")
        messages += [{**reply.message, "reasoning_content": None}, new or {}]
    first, second, third = (tokenizer_of("qwen3").decode(list(prompt)) for prompt in sampler.prompts)
    assert second.startswith(f"{first}<think>\nhm\n</think>")
    assert "hm" not in third
    assert [sorted(set(s.turns[s.mask].tolist())) for s in session.segments.sequences()] == [[0, 1], [2]]


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    "malformed",
    [
        '<tool_call>\n{"name": "look", "arguments": {"place": \n</tool_call>',
        '<tool_call>\n{"nam": "look"}\n</tool_call>',
        '<tool_call>\n{"name": "look", "arguments": 3}\n</tool_call>',
        "<tool_call>\nlook\n</tool_call>",
    ],
)
def test_a_malformed_call_is_text(parser: str, malformed: str) -> None:
    (reply,), _, _ = play(parser, malformed)
    assert (reply.text, reply.tool_calls, reply.finish_reason) == (malformed, (), "stop")


def test_without_tools_nothing_is_parsed() -> None:
    session, _ = session_of("qwen3", said(CALL % "here"), parser="transformers")
    reply = asyncio.run(session.chat([{"role": "user", "content": "where?"}]))
    assert (reply.text, reply.tool_calls) == (CALL % "here", ())


def test_the_tokenizers_own_response_template_is_used() -> None:
    tokenizer = chat_tokenizer(QWEN25)
    with pytest.raises(ValueError, match="tool_parser: the tokenizer has no response_template"):
        make_tool_parser("transformers", tokenizer)
    give_plain_chat(tokenizer)
    parse = make_tool_parser("transformers", tokenizer)
    prompt = tokenizer("where?\n>\n")["input_ids"]
    ids = tokenizer(f"hm {CALL % 'here'}<|endoftext|>")["input_ids"]
    assert parse(ids, prompt, [TOOL]) == ("hm", "", [("look", {"place": "here"})])


@pytest.mark.vllm
def test_a_parser_reads_the_reply_without_its_end() -> None:
    tokenizer = chat_tokenizer(QWEN25)
    parse = make_tool_parser("pythonic", tokenizer, end_token_ids=(tokenizer.eos_token_id,))
    ids = tokenizer(f"[look(place='here')]{tokenizer.eos_token}")["input_ids"]
    assert parse(ids, (), [TOOL]) == ("", "", [("look", {"place": "here"})])


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["openai", "llama3_json"])
def test_a_parser_that_does_not_fit_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"tool_parser: {name} does not fit the tokenizer"):
        make_tool_parser(name, chat_tokenizer(QWEN25))


@pytest.mark.vllm
def test_unknown_parsers_are_refused_with_the_known() -> None:
    with pytest.raises(ValueError, match=r"there is no parser 'hermess'; choose from transformers, .*hermes"):
        make_tool_parser("hermess", chat_tokenizer(QWEN25))
