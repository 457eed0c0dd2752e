"""The `renderers` package in place of the chat template: the same tokens, whole prefixes, branches, calls."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import episode_players as players
import pytest
import yaml
from episode_players import CALL, REPLIES, TEXTS, TOOL, TURNS, Scripted, chat_tokenizer, converse, said, user
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from grpo_ray.config import Config
from grpo_ray.config.episodes import EpisodesConfig
from grpo_ray.episodes.chat_template import ChatTemplate
from grpo_ray.episodes.checking import check_episodes, check_template
from grpo_ray.episodes.renderer_template import RendererTemplate, check_renderer, make_renderer, make_template
from grpo_ray.episodes.session import Session
from grpo_ray.types import SamplingSettings

MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
# Qwen3's own list of tools and its empty thought, which the players' template leaves out.
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n# Tools\\n\\nYou may call one or more functions to assist with the "
    "user query.\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}"
    "{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}"
    "{{ '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\\n<tool_call>\\n"
    '{"name": <function-name>, "arguments": <args-json-object>}'
    "\\n</tool_call><|im_end|>\\n' }}{% endif %}"
)
NO_THOUGHT = "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
RESULT = {"role": "tool", "content": "nothing", "tool_call_id": "call00000"}


@cache
def tokenizer_of_qwen3() -> PreTrainedTokenizerBase:
    tokenizer = chat_tokenizer(TOOLS + players.QWEN3 + NO_THOUGHT)
    tokenizer.add_tokens(list(MARKS))
    tokenizer.unk_token = None  # as Qwen3's; else the package takes <|endoftext|> for an unknown token
    return tokenizer


def ends_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]


def configured(**fields: Any) -> Any:
    tokenizer = tokenizer_of_qwen3()
    return make_template(EpisodesConfig(**fields), tokenizer, ends_of(tokenizer))


@cache
def renderer_of_qwen3(thinks: bool) -> RendererTemplate:
    pytest.importorskip("renderers")
    template, _ = configured(renderer="qwen3", template_arguments={"enable_thinking": thinks})
    return template


def chat_template(thinks: bool) -> ChatTemplate:
    tokenizer = tokenizer_of_qwen3()
    return ChatTemplate(tokenizer, ends_of(tokenizer), {"enable_thinking": thinks})


def play(
    template: ChatTemplate | RendererTemplate, replies: Sequence[str | Sequence[int]],
    turns: Sequence[Sequence[dict[str, Any]]], tools: Sequence[dict[str, Any]] = (), parser: Any = None,
    **changes: Any,
) -> tuple[Session, Scripted, list[dict[str, Any]]]:  # fmt: skip
    """Sample each reply after a turn's messages; `changes` are of the sampling settings."""
    sampler = Scripted(template.tokenizer, said(*replies), "<|im_end|>")
    own = replace(SamplingSettings(1, 1.0, 1.0, 0, 500), **changes)
    session = Session(sampler.sample, own, template, EpisodesConfig(max_tokens=5000), parser)
    return session, sampler, asyncio.run(converse(session, turns, tools))


def check_prefixes(session: Session, sampler: Scripted) -> None:
    """Assert that the session is one sequence, in which each prompt continues the one before and its reply."""
    (sequence,) = session.segments.sequences()
    for number, (before, after) in enumerate(zip(sampler.prompts, sampler.prompts[1:], strict=False)):
        reply = tuple(sequence.response_token_ids[sequence.turns == number].tolist())
        assert after[: len(before) + len(reply)] == before + reply


@pytest.mark.slow
@settings(max_examples=60)
@given(st.booleans(), TURNS)
def test_prompts_are_the_chat_templates_and_sampled_tokens_stay(thinks: bool, turns: list[Any]) -> None:
    end = ends_of(tokenizer_of_qwen3())[0]
    opened = [[user(text)] for text, _ in turns]
    replies = [reply if isinstance(reply, str) else [*reply, end] for _, reply in turns]
    assume(not thinks or all(isinstance(reply, str) for reply in replies))
    session, sampler, _ = play(renderer_of_qwen3(thinks), replies, opened)
    _, expected, _ = play(chat_template(thinks), replies, opened)
    assert sampler.prompts == expected.prompts
    if not thinks:  # else a new question shows the replies again, maybe in other tokens
        check_prefixes(session, sampler)
        (sequence,) = session.segments.sequences()
        for number, reply in enumerate(replies):
            sampled = sequence.response_token_ids[sequence.turns == number].tolist()
            assert isinstance(reply, str) or sampled == reply


@pytest.mark.slow
@settings(max_examples=40)
@given(TEXTS, st.lists(st.tuples(REPLIES, TEXTS, TEXTS), min_size=1, max_size=3))
def test_thoughts_and_results_continue_the_tokens(question: str, cycles: list[tuple[str, str, str]]) -> None:
    """While only tools answer; with the tools listed and the calls parsed."""
    pytest.importorskip("renderers")
    renderer, parser = configured(renderer="qwen3", tool_parser="renderer")
    turns = [[user(question)], *([{**RESULT, "content": text}] * 2 for _, _, text in cycles)]
    replies = [f"<think>\n{thought}\n</think>\n\nI look.\n{CALL % 'here'}" for thought, _, _ in cycles]
    replies.append("gone")
    session, sampler, messages = play(renderer, replies, turns, [TOOL], parser)
    _, expected, _ = play(chat_template(True), replies, turns, [TOOL], parser)
    assert sampler.prompts == expected.prompts
    check_prefixes(session, sampler)
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert calls == [{"name": "look", "arguments": {"place": "here"}}] * len(cycles)


def test_dropped_thoughts_open_a_branch() -> None:
    """A new question ends Qwen3's bridge; the prompt is then the format's own."""
    replies = ["<think>\nhm\n</think>\n\nyes", "no"]
    session, sampler, messages = play(renderer_of_qwen3(True), replies, [[user("one")], [user("two")]])
    _, expected, _ = play(chat_template(True), replies, [[user("one")], [user("two")]])
    assert sampler.prompts == expected.prompts
    assert sampler.prompts[1] == renderer_of_qwen3(True).prompt(messages[:3])
    first, second = session.segments.sequences()
    assert "hm" in tokenizer_of_qwen3().decode(first.response_token_ids)
    assert "hm" not in tokenizer_of_qwen3().decode(list(second.prompt_token_ids))
    assert second.mask.all()


@pytest.mark.parametrize(("reply", "added"), [("a long reply", "<|im_end|>"), ("<think>\nhm and hm and", "")])
def test_a_reply_that_was_cut_off_gets_its_end(reply: str, added: str) -> None:
    """The renderer also closes a thought, which the chat template leaves open."""
    turns = [[user("one")], [RESULT]]
    session, sampler, _ = play(renderer_of_qwen3(True), [reply] * 2, turns, max_tokens=4)
    _, expected, _ = play(chat_template(True), [reply] * 2, turns, max_tokens=4)
    tokenizer = tokenizer_of_qwen3()
    check_prefixes(session, sampler)
    kept = len(sampler.prompts[0]) + 4
    shown, plain = (tokenizer.decode(list(s.prompts[1][kept:])) for s in (sampler, expected))
    assert shown == (plain if added else f"</think>{plain}")
    assert plain.startswith("<|im_end|>")


def test_a_malformed_call_is_text() -> None:
    pytest.importorskip("renderers")
    renderer, parser = configured(renderer="qwen3", tool_parser="renderer")
    place = '{"name": "look", "arguments": {"place": \n</tool_call>'
    for malformed in (place, '{"nam": "look"}\n</tool_call>', "look"):
        text = f"{CALL % 'here'}\n<tool_call>\n{malformed}"
        _, _, messages = play(renderer, [text], [[user("one")]], [TOOL], parser)
        assert messages[1] == {"role": "assistant", "content": text}
        with pytest.raises(ValueError, match="a call is malformed"):
            parser(renderer.tokenizer(text)["input_ids"], [], [TOOL])


def test_renderers_that_do_not_fit_are_refused() -> None:
    pytest.importorskip("renderers")
    plain = chat_tokenizer(players.QWEN3)  # without the tokens of calls, as Qwen2.5 is without those of results
    plain.unk_token = None
    with pytest.raises(ValueError, match=r"episodes.renderer: qwen3 does not fit .*<tool_call>"):
        make_renderer("qwen3", plain, ends_of(plain))
    tokenizer = tokenizer_of_qwen3()
    with pytest.raises(ValueError, match=r"qwen3 ends replies .*<\|im_end\|> \(\d+\); add .*eos_token_id"):
        make_renderer("qwen3", tokenizer, [tokenizer.eos_token_id])
    with pytest.raises(ValueError, match=r"episodes.template_arguments: .*'thinking'.*enable_thinking"):
        configured(renderer="qwen3", template_arguments={"thinking": False})
    with pytest.raises(ValueError, match=r"episodes\.renderer: auto finds no renderer"):
        configured(renderer="auto")
    with pytest.raises(ValueError, match=r"episodes.renderer: .*qwen33.*'qwen3'"):
        check_renderer("qwen33")


def test_auto_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("renderers")
    tokenizer = tokenizer_of_qwen3()
    monkeypatch.setattr(tokenizer, "name_or_path", "Qwen/Qwen3-0.6B")
    renderer = make_renderer("auto", tokenizer, ends_of(tokenizer), {"enable_thinking": False})
    assert (renderer.config.name, renderer.config.enable_thinking) == ("qwen3", False)


def test_a_run_asks_for_the_renderer_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    data = yaml.safe_load((Path(__file__).parents[2] / "configs/guess-number.yaml").read_text())
    tokenizer = tokenizer_of_qwen3()

    def config(**fields: Any) -> Config:
        return Config.model_validate(data | {"episodes": data.get("episodes", {}) | fields})

    monkeypatch.setitem(sys.modules, "renderers", None)
    check_episodes(config())
    check_template(config(), tokenizer)
    for check in (check_episodes, lambda config: check_template(config, tokenizer)):
        with pytest.raises(ValueError, match=r"episodes\.renderer needs renderers, .*`make environments`"):
            check(config(renderer="qwen3"))


def test_a_parser_without_a_renderer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set episodes\.renderer"):
        EpisodesConfig(tool_parser="renderer")
    assert isinstance(configured()[0], ChatTemplate)


def test_what_a_renderer_is_given_and_what_is_taken_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bridge that changes earlier tokens begins a branch; without the package."""
    tokenizer = tokenizer_of_qwen3()

    def rendered(messages: Any, *, tools: Any = None, add_generation_prompt: bool) -> list[int]:
        """Show each message as its content and a full stop."""
        assert add_generation_prompt
        return list(tokenizer("".join(f"{message['content']}." for message in messages))["input_ids"])

    bridge = Mock(return_value=None)
    fake = Mock(bridge_to_next_turn=bridge, render_ids=rendered)
    fake.get_stop_token_ids.return_value = ends_of(tokenizer)[:1]
    package = SimpleNamespace(config_from_name=lambda name: name, create_renderer=lambda *_: fake)
    monkeypatch.setitem(sys.modules, "renderers", package)
    template, parser = configured(renderer="letters")
    assert parser is None
    call = {"id": "call00000", "function": {"name": "look", "arguments": {}}}
    conversation = [user("a"), {"role": "assistant", "content": "b", "tool_calls": [call]}, RESULT]
    assert template.prompt(conversation) == tuple(tokenizer("a.b.nothing.")["input_ids"])
    assert template.continued(conversation, 2, (1, 2), (3,), [TOOL]) is None
    bridge.assert_called_once_with([1, 2], [3], [{**RESULT, "name": "look"}], tools=[TOOL])
    for bridged, prompt in (([1, 2, 3, 4], (1, 2, 3, 4)), ([1, 2, 4], None)):
        bridge.return_value = SimpleNamespace(token_ids=bridged)
        assert template.continued(conversation, 2, (1, 2), (3,)) == prompt
    session, _, _ = play(template, ["b", "c"], [[user("a")], [user("d")]])
    # A reply ends with <|im_end|>, and the fake shows a full stop there.
    assert len(session.segments.sequences()) == 2
    fake.render_ids = Mock(side_effect=KeyError("bad"))
    with pytest.raises(ValueError, match="refuses the conversation: 'bad'"):
        template.prompt([user("bad")])
