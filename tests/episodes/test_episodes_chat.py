"""Conversations: prompts are the template's, token for token, and sampled tokens are never encoded again."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import episode_players as players
import numpy as np
import pytest
from episode_players import TURNS, chat_tokenizer, converse, said, session_of, tokenizer_of, user
from hypothesis import given, settings
from transformers import PreTrainedTokenizerBase

from grpo_ray.config.episodes import EpisodesConfig
from grpo_ray.episodes.chat_template import ChatTemplate, Recent
from grpo_ray.episodes.outcome import EpisodeEnded, Status
from grpo_ray.episodes.session import SHORT_CHARS, Session


def rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.slow
@pytest.mark.parametrize("name", players.TEMPLATES)
@settings(max_examples=40)
@given(TURNS)
def test_prompts_are_the_templates_own_and_sampled_tokens_stay(name: str, turns: list[Any]) -> None:
    tokenizer = tokenizer_of(name)
    end = tokenizer.convert_tokens_to_ids(players.ENDS[name])
    replies = [reply if isinstance(reply, str) else [*reply, end] for _, reply in turns]
    session, sampler = session_of(name, said(*replies))
    messages = asyncio.run(converse(session, [[user(text)] for text, _ in turns]))
    (sequence,) = session.segments.sequences()
    known: tuple[int, ...] = ()
    for number, (prompt, reply) in enumerate(zip(sampler.prompts, replies, strict=True)):
        if all(isinstance(said_before, str) for said_before in replies[:number]):
            assert prompt == rendered(tokenizer, messages[: 2 * number + 1])
        assert prompt[: len(known)] == known
        sampled = sequence.response_token_ids[sequence.turns == number].tolist()
        assert isinstance(reply, str) or sampled == reply
        known = (*prompt, *sampled)


@pytest.mark.parametrize("name", players.TEMPLATES)
def test_a_reply_that_was_cut_off_gets_its_end(name: str) -> None:
    tokenizer = tokenizer_of(name)
    session, sampler = session_of(name, lambda prompt: "a long reply", max_tokens=3)
    asyncio.run(converse(session, [[user("hello")], [user("go on")]]))
    first, second = sampler.prompts
    end = tokenizer.convert_tokens_to_ids(players.ENDS[name])
    assert second[len(first) + 3] == end
    (sequence,) = session.segments.sequences()
    assert sequence.response_token_ids[3] == end
    assert sequence.mask[:4].tolist() == [True, True, True, False]


THINKING = [name for name in players.TEMPLATES if name.startswith("qwen3") and "instruct" not in name]


@pytest.mark.parametrize("name", THINKING)
def test_dropped_thoughts_open_a_branch(name: str) -> None:
    session, sampler = session_of(name, said("<think>\nhm\n</think>\n\nyes", "<think>\nso\n</think>\n\nno"))
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
    replies = ["<think>\nhm\n</think>\n\nlet me see", "<think>\nso\n</think>\n\nit is"]
    tokenizer = tokenizer_of(name)
    pieces = [*"<think>", "Ċ", *"ok", "Ċ", *"</think>", "Ċ", *"four", players.ENDS[name]]
    spelled = tokenizer.convert_tokens_to_ids(pieces)  # no tokenizer would
    session, sampler = session_of(name, said(*replies, spelled, "fine"))
    result = {"role": "tool", "content": "a table"}
    messages = asyncio.run(converse(session, [[user("one")], [result, result], [user("sure?")], [result]]))
    for turn, num_messages in ((1, 4), (2, 6)):
        assert sampler.prompts[turn] == rendered(tokenizer, messages[:num_messages])
    first, second = session.segments.sequences()
    assert first.turns[first.mask].max() == 1
    assert set(second.turns[second.mask]) == {2, 3}


async def test_max_tokens_reaches_the_engine_as_an_int_or_is_refused() -> None:
    """A float would end the thread in which vLLM's engine reads requests, and it takes no NumPy integer."""
    session, sampler = session_of("qwen2.5", lambda prompt: "reply")
    await session.chat([user("one")], max_tokens=np.int64(3))
    assert type(sampler.settings[0].max_tokens) is int
    for call in (session.chat([user("one")], max_tokens=6 / 2), session.sample((1,), 6 / 2)):
        with pytest.raises(ValueError, match=r"max_tokens is 3\.0; give a whole number"):
            await call
    assert session.ended is None
    assert len(sampler.prompts) == 1


async def test_an_edited_history_opens_a_branch() -> None:
    session, sampler = session_of("qwen2.5", lambda prompt: "reply")
    opening = [user("one")]
    first = await session.chat(opening)
    edited = {**first.message, "content": "edited"}
    await session.chat([*opening, edited, user("two")])
    await session.chat([*opening, first.message, user("three")])
    tokenizer = tokenizer_of("qwen2.5")
    edited, kept = session.segments.sequences()
    assert "edited" in tokenizer.decode(list(edited.prompt_token_ids))
    assert edited.turns.max() == 1
    assert edited.mask.all()
    assert kept.prompt_token_ids == sampler.prompts[0]
    assert sorted(set(kept.turns[kept.mask].tolist())) == [0, 2]


async def test_other_tools_open_a_branch() -> None:
    """Where the template lists the tools: at the beginning."""
    tokenizer = chat_tokenizer("{{ tools | tojson if tools else '' }}" + players.QWEN25)
    session, sampler = session_of(tokenizer, lambda _: "reply", parser=lambda *_: ("", "", []))
    for wrong in ([players.TOOL["function"]], [{"type": "function", "name": "look"}], [print], players.TOOL):
        with pytest.raises(ValueError, match="tools: a session takes only a list of objects, each with"):
            await session.chat([user("one")], tools=wrong)
    reply = await session.chat([user("one")])
    await session.chat([user("one"), reply.message, user("two")], tools=[players.TOOL])
    assert '"look"' in tokenizer.decode(list(sampler.prompts[1]))
    assert len(session.segments.sequences()) == 2


async def test_parallel_replies_to_one_conversation_are_branches() -> None:
    session, _ = session_of("llama3", said("a", "b", "a"))
    await asyncio.gather(*(session.chat([user("one")]) for _ in range(3)))
    sequences = session.segments.sequences()
    assert len({s.prompt_token_ids for s in sequences}) == 1
    assert sorted(int(s.turns[0]) for s in sequences) == [0, 1, 2]


def test_templates_that_cannot_be_used_are_refused() -> None:
    tokenizer = chat_tokenizer(players.QWEN3)
    conversation = [user("one"), {"role": "assistant", "content": "two"}, user("three")]
    for template, message in (
        (None, "needs the model's chat template, but its tokenizer has none"),
        ("{{ messages[-1].content }}", "drops an assistant message that stands before"),
        (players.LLAMA3, "ends a reply with none of its ends"),
        ("{{ raise_exception('no tools here') }}", "refuses the conversation: no tools here"),
    ):
        tokenizer.chat_template = template
        chat = ChatTemplate(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")])
        with pytest.raises(ValueError, match=message):
            chat.suffix(conversation, 2, 0)


async def test_a_developer_is_the_system_and_an_unknown_role_is_refused() -> None:
    loop = "{% for m in messages if m.role in ['system', 'user'] %}"
    tokenizer = chat_tokenizer(loop + "{{ m.content }}{% endfor %}")
    session, sampler = session_of(tokenizer, lambda _: "reply")
    await session.chat([{"role": "developer", "content": "Be brief."}, user("one")])
    assert tokenizer.decode(list(sampler.prompts[0])) == "Be brief.one"
    with pytest.raises(ValueError, match=r"leaves out a message of role 'critic' \('No.'\)"):
        await session.chat([user("one"), {"role": "critic", "content": "No."}])


SHOWN = "{{ message.content + '<|im_end|>' }}"
CALLS = "{{ message.tool_calls | tojson if message.tool_calls else '' }}"
AFTER_A_CALL = "messages[loop.index0 - 1].tool_calls"
LOOK = {"type": "function", "id": "call00000", "function": {"name": "look", "arguments": {}}}


def after_a_result(shown: str, condition: str, calls: list[dict[str, Any]], last_token: str = "a") -> str:
    """Return the text of a tool's result, by a template that shows results only under a condition."""
    loop = f"{{% for message in messages %}}{{% if message.role != 'tool' or {condition} %}}"
    tokenizer = chat_tokenizer(f"{loop}{shown}{{% endif %}}{{% endfor %}}")
    end, last = tokenizer.convert_tokens_to_ids(["<|im_end|>", last_token])
    reply = {"role": "assistant", "content": "", "tool_calls": calls}
    conversation = [user("one"), reply, {"role": "tool", "content": "three"}]
    return tokenizer.decode(list(ChatTemplate(tokenizer, [end]).suffix(conversation, 2, last)))


def test_a_result_is_found_or_its_template_refused_if_it_hides_it_or_shows_calls_after_the_replys_end() -> None:
    assert after_a_result(SHOWN, AFTER_A_CALL, [LOOK]) == "<|im_end|>three<|im_end|>"
    assert after_a_result(SHOWN, AFTER_A_CALL, [LOOK], last_token="<|im_end|>") == "three<|im_end|>"
    for shown, condition, calls in (
        (SHOWN, "false", []),  # else the policy would answer without the result that it asked for
        (SHOWN + CALLS, AFTER_A_CALL, [LOOK]),  # else the next prompt would hold the calls twice
    ):
        with pytest.raises(ValueError, match="does not show a message of role 'tool' here"):
            after_a_result(shown, condition, calls)


@pytest.mark.parametrize("shown", ["messages[0].content", "tools | tojson"])
def test_what_stands_beside_the_last_message_opens_a_branch(shown: str) -> None:
    """There the templates of Mistral show the system prompt and the tools."""
    last = f"{{% if loop.last %}}{{{{ {shown} }}}}{{% endif %}}"
    tokenizer = chat_tokenizer(f"{{% for message in messages %}}{last}{SHOWN}{{% endfor %}}")
    session, sampler = session_of(tokenizer, lambda _: "reply", parser=lambda *_: ("", "", []))
    messages = asyncio.run(converse(session, [[user("one")], [user("two")]], [players.TOOL]))
    text = tokenizer.apply_chat_template(messages[:3], tools=[players.TOOL], tokenize=False)
    assert sampler.prompts[1] == tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert len(session.segments.sequences()) == 2


async def test_a_message_that_holds_the_sentinel_does_no_harm() -> None:
    session, sampler = session_of("qwen2.5", lambda prompt: "it is grpo-ray-reply")
    messages = await converse(session, [[user("grpo-ray-reply")], [user("grpo-ray-reply'")]])
    assert sampler.prompts[1] == rendered(tokenizer_of("qwen2.5"), messages[:3])


async def test_messages_are_read_as_clients_write_them() -> None:
    """Parts of text, fields without a value, and nothing that is not text."""
    session, _ = session_of("qwen2.5", lambda prompt: "reply")
    first = await session.chat([{"role": "user", "content": [{"type": "text", "text": "one"}]}])
    echoed = {**first.message, "refusal": None, "tool_calls": []}
    await session.chat([{**user(""), "content": {"type": "text", "text": "one"}}, echoed, user("two")])
    for other in ([{"type": "image_url"}], [{"type": "text"}], ["one"], 0, False, 7, {}):
        with pytest.raises(ValueError, match="only text is supported"):
            await session.chat([{"role": "user", "content": other}])
    with pytest.raises(ValueError, match="a message has no role"):
        await session.chat([{"content": "hello"}])
    for call in ("f", {"name": "f"}, {"function": {"name": "f"}}, {"function": {"arguments": {}}}):
        with pytest.raises(ValueError, match="give its function a name and arguments"):
            await session.chat([{"role": "assistant", "tool_calls": [call]}])
    with pytest.raises(ValueError, match="set a tool_parser"):
        await session.chat([user("one")], tools=[players.TOOL])
    assert len(session.segments.sequences()) == 1


# Long conversations


class Counting:
    """A tokenizer that records the texts it is given to render and to make tokens of, and the threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.encoded: list[tuple[int, bool]] = []  # characters, and whether in the event loop's thread
        self.num_rendered = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.encoded.append((len(text), threading.current_thread() is threading.main_thread()))
        return self._tokenizer(text, **options)

    def apply_chat_template(self, *arguments: Any, **options: Any) -> Any:
        self.num_rendered += 1
        return self._tokenizer.apply_chat_template(*arguments, **options)


def counted_session(limits: EpisodesConfig) -> tuple[Session, players.Scripted, Counting]:
    tokenizer = tokenizer_of("qwen2.5")
    counting: Any = Counting(tokenizer)
    sampler = players.Scripted(tokenizer, lambda prompt: "reply", "<|im_end|>")
    return players.make_session(sampler, counting, limits), sampler, counting


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_result_that_cannot_fit_is_neither_rendered_nor_made_tokens(is_first: bool) -> None:
    session, sampler, counting = counted_session(EpisodesConfig(max_tokens=4096))
    messages: list[dict[str, Any]] = []
    if not is_first:
        messages = [user("one"), (await session.chat([user("one")])).message]
    before = counting.num_rendered, len(counting.encoded)
    for _ in range(2):
        with pytest.raises(EpisodeEnded, match=r"messages of 104858\d characters leave no room .* 4096 tokens"):
            await session.chat([*messages, {"role": "tool", "content": "x" * 10 + " data" * 209_715}])
    assert (counting.num_rendered, len(counting.encoded)) == before
    assert session.ended.status is Status.TRUNCATED_TOKENS
    assert len(sampler.prompts) == (0 if is_first else 1)


def test_white_space_that_a_template_drops_is_no_reason_to_end() -> None:
    session, _ = session_of("llama3", said("reply"), EpisodesConfig(max_tokens=64))
    assert asyncio.run(session.chat([user("one" + " " * (session.max_chars + 1))])).text == "reply"


async def test_only_a_long_conversation_becomes_tokens_in_a_thread() -> None:
    session, sampler, counting = counted_session(EpisodesConfig(max_tokens=10**6))
    long = user("word " * (SHORT_CHARS // 5))
    await converse(session, [[user("one")], [long], [user("two")]])  # which is still long
    assert [is_here for _, is_here in counting.encoded] == [True, False, False]
    assert counting.encoded[1][0] > SHORT_CHARS - 5 > counting.encoded[2][0]
    assert sampler.prompts[2] == rendered(tokenizer_of("qwen2.5"), session._turns[-1].messages[:-1])


@pytest.mark.slow
async def test_calls_get_their_seeds_in_order_also_beside_a_long_one() -> None:
    """Else a resumed run would sample other replies than the first."""
    texts = ["a " * SHORT_CHARS, "b", "c " * SHORT_CHARS, "d"]
    session, sampler, _ = counted_session(EpisodesConfig(max_tokens=10**6))
    await asyncio.gather(*(session.chat([user(text)]) for text in texts))
    decode = tokenizer_of("qwen2.5").decode
    assert [decode(list(prompt)).split("user\n")[1][0] for prompt in sampler.prompts] == ["a", "b", "c", "d"]


async def test_a_prompt_of_tokens_that_the_model_does_not_have_is_refused() -> None:
    """The engine would fail on it, with all that it samples at the same time."""
    session, sampler = session_of("qwen2.5", lambda prompt: [5, size + 7], EpisodesConfig(max_turns=2))
    size = len(tokenizer_of("qwen2.5"))
    with pytest.raises(ValueError, match="the prompt is empty"):
        await session.sample([])
    for unknown in (-1, size, 10**6, 2**40):
        with pytest.raises(ValueError, match=rf"the token {unknown}; the model's are 0 to {size - 1}"):
            await session.sample([1, unknown])
    reply = await session.sample([1, size - 1])
    await session.sample([1, size - 1, *reply.token_ids, 2])  # what the model sampled is its own
    assert len(sampler.prompts) == 2  # as many as there may be: what was refused was no turn
    assert session.ended is None


async def test_a_turn_that_was_in_flight_when_the_session_ended_is_not_kept() -> None:
    def late(prompt: str) -> str:
        session.end(Status.CANCELLED, "enough")
        return "late"

    session, _ = session_of("qwen2.5", late)
    with pytest.raises(EpisodeEnded, match="enough"):
        await session.chat([user("one")])
    assert session.segments.num_turns == 0


# What a worker remembers


def test_a_cache_keeps_what_was_used_last_up_to_its_size() -> None:
    made: list[str] = []

    def get(key: str) -> str:
        return cache.get(key, lambda: made.append(key) or key)  # type: ignore[func-returns-value]

    cache: Recent[str, str] = Recent(6, lambda key, value: len(key))
    for key in ("aa", "bb", "cc", "aa", "dd", "aa", "bb"):
        assert get(key) == key
    assert made == ["aa", "bb", "cc", "dd", "bb"]
    assert get("a text beyond its size") == "a text beyond its size"
    assert cache._size == sum(map(len, cache._values)) <= 6


def test_a_workers_memory_does_not_grow_with_its_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_ray.episodes.chat_template.NUM_SHAPES", 16)
    monkeypatch.setattr("grpo_ray.episodes.chat_template.ENCODED_BYTES", 4096)
    tokenizer = tokenizer_of("qwen2.5")
    chat = ChatTemplate(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    for number in range(40):
        reply = {"role": "assistant", "content": "two"}
        assert chat.suffix([*[user("one")] * number, reply, user(f"{number} " * 20)], number + 1, 0)
    assert len(chat._shapes._values) == 16
    assert chat._texts._size <= 4096
    assert 0 < len(chat._texts._values) < 40
