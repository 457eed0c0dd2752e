"""Conversations: prompts are the template's, token for token, and sampled tokens are never encoded again."""

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from episode_players import LLAMA3, QWEN3, QWEN25, TEMPLATES, TOOL, Scripted, chat_tokenizer, make_session
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from grpo_ray.episodes.chat_template import ChatTemplate
from grpo_ray.episodes.session import Session

ENDS = {name: "<|eot_id|>" if name.startswith("llama") else "<|im_end|>" for name in TEMPLATES}
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
# Templates may trim what they show, so replies that are compared have a first and a last letter.
REPLIES = TEXTS.map(lambda text: f"a{text}z")

tokenizer_of = cache(lambda name: chat_tokenizer(TEMPLATES[name]))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def session_of(
    name: str, policy: Callable[[str], str | Sequence[int]], **settings: Any
) -> tuple[Session, Scripted]:
    tokenizer = tokenizer_of(name)
    sampler = Scripted(tokenizer, policy, ENDS[name])
    return make_session(sampler, tokenizer, **settings), sampler


async def converse(session: Session, turns: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Send each turn's messages after the replies so far; return the whole conversation."""
    messages: list[dict[str, Any]] = []
    for new in turns:
        messages += new
        messages.append((await session.chat(messages)).message)
    return messages


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(TEXTS, REPLIES), min_size=1, max_size=4))
def test_prompts_are_the_templates_own(name: str, turns: list[tuple[str, str]]) -> None:
    replies = iter([reply for _, reply in turns])
    session, sampler = session_of(name, lambda prompt: next(replies))
    messages = asyncio.run(converse(session, [[user(text)] for text, _ in turns]))
    for number, prompt in enumerate(sampler.prompts):
        assert prompt == rendered(tokenizer_of(name), messages[: 2 * number + 1])
    assert len(session.segments.sequences()) == 1


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(TEXTS, st.lists(st.integers(1, 250), max_size=8)), min_size=2, max_size=4))
def test_sampled_tokens_stay_whatever_they_are(name: str, turns: list[tuple[str, list[int]]]) -> None:
    """Random tokens are seldom what their text encodes to, and often no valid UTF-8."""
    tokenizer = tokenizer_of(name)
    end = tokenizer.convert_tokens_to_ids(ENDS[name])
    replies = iter([[*reply, end] for _, reply in turns])
    session, sampler = session_of(name, lambda prompt: next(replies))
    asyncio.run(converse(session, [[user(text)] for text, _ in turns]))
    (sequence,) = session.segments.sequences()
    for number, (_, reply) in enumerate(turns):
        assert sequence.response_token_ids[sequence.turns == number].tolist() == [*reply, end]
    for before, after, (_, reply) in zip(sampler.prompts, sampler.prompts[1:], turns, strict=False):
        assert after[: len(before) + len(reply) + 1] == (*before, *reply, end)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_reply_that_was_cut_off_gets_its_end(name: str) -> None:
    tokenizer = tokenizer_of(name)
    session, sampler = session_of(name, lambda prompt: "a long reply", max_tokens=3)
    asyncio.run(converse(session, [[user("hello")], [user("go on")]]))
    first, second = sampler.prompts
    end = tokenizer.convert_tokens_to_ids(ENDS[name])
    assert second[len(first) + 3] == end
    (sequence,) = session.segments.sequences()
    assert sequence.response_token_ids[3] == end
    assert sequence.mask[:4].tolist() == [True, True, True, False]


THINKING = [name for name in TEMPLATES if name.startswith("qwen3") and "instruct" not in name]


@pytest.mark.parametrize("name", THINKING)
def test_dropped_thoughts_open_a_branch(name: str) -> None:
    replies = iter(["<think>\nhm\n</think>\n\nyes", "<think>\nso\n</think>\n\nno"])
    session, sampler = session_of(name, lambda prompt: next(replies))
    messages = asyncio.run(converse(session, [[user("one")], [user("two")]]))
    tokenizer = tokenizer_of(name)
    assert sampler.prompts[1] == rendered(tokenizer, messages[:3])
    assert "hm" not in tokenizer.decode(list(sampler.prompts[1]))
    first, second = session.segments.sequences()
    assert "hm" in tokenizer.decode(first.response_token_ids[first.mask])
    assert second.mask.all()
    assert tokenizer.decode(second.response_token_ids) == "<think>\nso\n</think>\n\nno<|im_end|>"


@pytest.mark.parametrize("name", THINKING)
def test_thoughts_stay_while_only_tools_answer(name: str) -> None:
    replies = iter(["<think>\nhm\n</think>\n\nlet me see", "<think>\nso\n</think>\n\nit is", "fine"])
    session, sampler = session_of(name, lambda prompt: next(replies))
    result = {"role": "tool", "content": "a table"}
    messages = asyncio.run(converse(session, [[user("one")], [result, result], [user("sure?")]]))
    tokenizer = tokenizer_of(name)
    assert sampler.prompts[1] == rendered(tokenizer, messages[:4])
    assert sampler.prompts[2] == rendered(tokenizer, messages[:6])
    first, second = session.segments.sequences()
    assert first.turns[first.mask].max() == 1
    assert (second.turns == 2).all()


def test_an_edited_history_opens_a_branch() -> None:
    async def play() -> None:
        opening = [user("one")]
        first = await session.chat(opening)
        edited = {**first.message, "content": "edited"}
        await session.chat([*opening, edited, user("two")])
        await session.chat([*opening, first.message, user("three")])

    session, sampler = session_of("qwen2.5", lambda prompt: "reply")
    asyncio.run(play())
    tokenizer = tokenizer_of("qwen2.5")
    edited, kept = session.segments.sequences()
    assert "edited" in tokenizer.decode(list(edited.prompt_token_ids))
    assert edited.turns.max() == 1
    assert edited.mask.all()
    assert kept.prompt_token_ids == sampler.prompts[0]
    assert sorted(set(kept.turns[kept.mask].tolist())) == [0, 2]


def test_other_tools_open_a_branch() -> None:
    """Where the template lists the tools: at the beginning."""

    async def play() -> None:
        reply = await session.chat([user("one")])
        await session.chat([user("one"), reply.message, user("two")], tools=[TOOL])

    tokenizer = chat_tokenizer("{{ tools | tojson if tools else '' }}" + QWEN25)
    sampler = Scripted(tokenizer, lambda prompt: "reply", "<|im_end|>")
    session = make_session(sampler, tokenizer, parser=lambda ids, prompt, tools: ("", "", []))
    asyncio.run(play())
    assert '"look"' in tokenizer.decode(list(sampler.prompts[1]))
    assert len(session.segments.sequences()) == 2


def test_parallel_replies_to_one_conversation_are_branches() -> None:
    async def play() -> None:
        await asyncio.gather(*(session.chat([user("one")]) for _ in range(3)))

    replies = iter(["a", "b", "a"])
    session, _ = session_of("llama3", lambda prompt: next(replies))
    asyncio.run(play())
    sequences = session.segments.sequences()
    assert len({s.prompt_token_ids for s in sequences}) == 1
    assert sorted(int(s.turns[0]) for s in sequences) == [0, 1, 2]


@pytest.mark.parametrize(
    ("template", "ends", "message"),
    [
        (None, "<|im_end|>", "requires the model's chat template, and its tokenizer has none"),
        ("{{ messages[-1].content }}", "<|im_end|>", "drops an assistant message that stands before"),
        (LLAMA3, "<|im_end|>", "ends a reply with none of its ends"),
        ("{{ raise_exception('no tools here') }}", "<|im_end|>", "refuses the conversation: no tools here"),
    ],
)
def test_templates_that_cannot_be_used_are_refused(template: str | None, ends: str, message: str) -> None:
    tokenizer = chat_tokenizer(QWEN3)
    tokenizer.chat_template = template
    chat = ChatTemplate(tokenizer, [tokenizer.convert_tokens_to_ids(ends)])
    conversation = [user("one"), {"role": "assistant", "content": "two"}, user("three")]
    with pytest.raises(ValueError, match=message):
        chat.suffix(conversation, 2, 0)


HIDES_TOOLS = (
    "{% for message in messages %}{% if message.role != 'tool' or CONDITION %}"
    "{{ message.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)


def test_a_template_that_hides_a_new_message_is_refused() -> None:
    """Else the policy would answer without the result that it asked for."""
    tokenizer = chat_tokenizer(HIDES_TOOLS.replace("CONDITION", "false"))
    chat = ChatTemplate(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    conversation = [user("one"), {"role": "assistant", "content": ""}, {"role": "tool", "content": "three"}]
    with pytest.raises(ValueError, match="does not show a message of role 'tool' here"):
        chat.suffix(conversation, 2, 0)


def test_a_result_that_is_shown_only_after_a_call_is_found() -> None:
    tokenizer = chat_tokenizer(HIDES_TOOLS.replace("CONDITION", "messages[loop.index0 - 1].tool_calls"))
    chat = ChatTemplate(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    call = {"type": "function", "id": "call00000", "function": {"name": "look", "arguments": {}}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    conversation = [user("one"), reply, {"role": "tool", "content": "three"}]
    for last_token, expected in (
        (0, "<|im_end|>three<|im_end|>"),
        (chat._end_tokens["<|im_end|>"], "three<|im_end|>"),
    ):
        assert tokenizer.decode(list(chat.suffix(conversation, 2, last_token))) == expected


def test_a_template_that_shows_calls_after_the_replys_end_is_refused() -> None:
    """Else the next prompt would hold the calls twice."""
    calls = "{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
    twice = "{{ message.content + '<|im_end|>' }}" + calls
    shown = HIDES_TOOLS.replace("CONDITION", "messages[loop.index0 - 1].tool_calls")
    tokenizer = chat_tokenizer(shown.replace("{{ message.content + '<|im_end|>' }}", twice))
    chat = ChatTemplate(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    call = {"type": "function", "id": "call00000", "function": {"name": "look", "arguments": {}}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.raises(ValueError, match="does not show a message of role 'tool' here"):
        chat.suffix([user("one"), reply, {"role": "tool", "content": "three"}], 2, 0)


def test_a_message_that_holds_the_sentinel_does_no_harm() -> None:
    session, sampler = session_of("qwen2.5", lambda prompt: "it is grpo-ray-reply")
    messages = asyncio.run(converse(session, [[user("grpo-ray-reply")], [user("grpo-ray-reply'")]]))
    assert sampler.prompts[1] == rendered(tokenizer_of("qwen2.5"), messages[:3])


def test_messages_are_read_as_clients_write_them() -> None:
    """Parts of text, fields without a value, and nothing that is not text."""

    async def play() -> None:
        first = await session.chat([{"role": "user", "content": [{"type": "text", "text": "one"}]}])
        echoed = {**first.message, "refusal": None, "tool_calls": []}
        await session.chat([user("one"), echoed, user("two")])
        with pytest.raises(ValueError, match="only text is supported"):
            await session.chat([{"role": "user", "content": [{"type": "image_url"}]}])
        with pytest.raises(ValueError, match="a message has no role"):
            await session.chat([{"content": "hello"}])
        with pytest.raises(ValueError, match="set a tool_parser"):
            await session.chat([user("one")], tools=[TOOL])

    session, _ = session_of("qwen2.5", lambda prompt: "reply")
    asyncio.run(play())
    assert len(session.segments.sequences()) == 1
