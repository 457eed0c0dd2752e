"""The two environments, played by scripts; and tool calls in replies."""

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from episode_players import CALL, QWEN25, TOOL, chat_tokenizer, play, said, session_of, tokenizer_of
from transformers import PreTrainedTokenizerBase

from grpo_ray.config.loading import load_config
from grpo_ray.episodes import calculator, guess_number
from grpo_ray.episodes.chat_template import ChatTemplate
from grpo_ray.episodes.outcome import Status
from grpo_ray.episodes.runner import EpisodeFn
from grpo_ray.episodes.session import Reply, Session
from grpo_ray.episodes.tool_calls import make_tool_parser
from grpo_ray.learning.plain_chat import give_plain_chat
from grpo_ray.learning.tiny_tokenizer import train_tokenizer
from grpo_ray.run.preparation import check_files
from grpo_ray.tasks.examples import Example
from grpo_ray.types import Episode

END = "<|endoftext|>"


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    pairs = [*guess_number.warmup_pairs(0, 200), *calculator.warmup_pairs(0, 200)]
    learned = train_tokenizer((prompt + reply for prompt, reply in pairs), vocab_size=400)
    give_plain_chat(learned)
    return learned


def played(episode: EpisodeFn, example: Example, policy: Callable[[str], str]) -> tuple[Episode, Any]:
    parser, ends = make_tool_parser("transformers", tokenizer()), [tokenizer().eos_token_id]
    session, sampler = session_of(tokenizer(), policy, parser=parser, end=END, ends=ends)
    return play(episode, session, example), sampler


def bisecting(prompt: str) -> str:
    """Halve the interval that the transcript leaves."""
    interval = guess_number.LOW, guess_number.HIGH
    for line in prompt.splitlines():
        guess, found, hint = line.partition(END)
        if not found:
            continue
        number = int(guess) + (1 if hint == "higher" else -1)  # any number on that side narrows alike
        interval = guess_number.narrowed(interval, int(guess), number)
    return str(guess_number.bisect(interval))


def test_halving_the_interval_always_wins() -> None:
    for number in range(guess_number.LOW, guess_number.HIGH + 1):
        result, sampler = played(guess_number.episode, Example("", str(number)), bisecting)
        assert (result.status, result.reward) == (Status.FINISHED, 1.0), result.error
        assert result.metrics["optimal"] == 1.0
        assert result.metrics["num_guesses"] == len(sampler.prompts) <= guess_number.TRIES
        (sequence,) = result.sequences
        whole = [*sequence.prompt_token_ids, *result.token_ids.tolist()]
        assert tokenizer().decode(whole).endswith(f">\n{number}{END}")


@pytest.mark.parametrize(("reply", "hint", "optimal"), [("three", "Say a number.", 0.0), ("16", "lower", 0.2)])
def test_a_reply_that_is_no_number_or_the_wrong_one_costs_a_try(reply: str, hint: str, optimal: float) -> None:
    result, sampler = played(guess_number.episode, Example("", "3"), lambda prompt: reply)
    assert result.reward == 0.0
    assert result.metrics == {"num_guesses": 5.0, "optimal": optimal}
    assert hint in tokenizer().decode(list(sampler.prompts[1]))


def test_optimal_guesses_leave_half() -> None:
    for guess, interval, expected in (
        (16, (1, 31), True), (15, (1, 31), False), (17, (1, 31), False), (2, (2, 3), True), (3, (2, 3), True),
        (4, (2, 3), False), (5, (5, 5), True), (9, (9, 12), False), (10, (9, 12), True), (11, (9, 12), True),
    ):  # fmt: skip
        assert guess_number.is_optimal(guess, interval) == expected


def test_the_calculator_must_be_called() -> None:
    def calling(prompt: str) -> str:
        if END in prompt:
            return prompt.splitlines()[2].partition(END)[2]  # the tool's result
        return calculator.call_text(prompt.splitlines()[0].removeprefix("What is ").removesuffix("?"))

    for example in calculator.examples(seed=0, num_train=20, num_validation=1).train:
        result, sampler = played(calculator.episode, example, calling)
        assert (result.status, result.reward, result.metrics["num_calls"]) == (Status.FINISHED, 1.0, 1.0)
        assert len(result.sequences) == 1
        trained = tokenizer().decode(result.token_ids[result.mask])
        called = calling(tokenizer().decode(list(sampler.prompts[0])))
        assert trained == called + END + example.ground_truth + END
    assert played(calculator.episode, example, lambda prompt: "7")[0].reward == 0.0
    endless = played(calculator.episode, example, lambda prompt: calculator.call_text("1 + 1"))[0]
    assert (endless.reward, endless.metrics["num_calls"]) == (0.0, 3.0)


def test_the_calculator_takes_two_numbers() -> None:
    for arguments, result in (
        ({"expression": "12 * 34"}, "408"), ({"expression": " 7-10 "}, "-3"), ({"expression": "2**9"}, "error"),
        ({"expression": "__import__('os')"}, "error"), ({}, "error"), ({"expression": 3}, "error"),
    ):  # fmt: skip
        assert calculator.calculate(arguments).startswith(result)


@pytest.mark.parametrize("game", [guess_number, calculator])
def test_warmup_texts_are_what_a_session_shows(game: object) -> None:
    """Encoding a pair gives, token for token, the prompts and replies of a session that samples its replies."""
    pairs = game.warmup_pairs(seed=3, num_pairs=60)  # type: ignore[attr-defined]
    assert len(pairs) == 60
    assert pairs == game.warmup_pairs(seed=3, num_pairs=60)  # type: ignore[attr-defined]
    template = ChatTemplate(tokenizer(), [tokenizer().eos_token_id])
    num_later = 0
    for start, rest in pairs:
        question, *turns = (start + rest).split(">\n")
        messages = [{"role": "user", "content": question.removesuffix("\n")}]
        expected = template.prompt(messages)
        for turn in turns[:-1]:
            reply, _, told = turn.partition(END)
            new = {"role": "user", "content": told.removesuffix("\n")}
            messages += [{"role": "assistant", "content": reply}, new]
            expected += tuple(tokenizer()(reply + END)["input_ids"])
            expected += template.suffix(messages, len(messages) - 1, tokenizer().eos_token_id)
            num_later += 1
        expected += tuple(tokenizer()(turns[-1])["input_ids"])
        assert (*tokenizer()(start)["input_ids"], *tokenizer()(rest)["input_ids"]) == expected
    assert num_later > 10


def test_a_fifth_of_the_warmups_games_halve_the_interval() -> None:
    first = [rest.partition(END)[0] for _, rest in guess_number.warmup_pairs(seed=1, num_pairs=2000)]
    assert np.mean([guess == "16" for guess in first]) == pytest.approx(0.2 + 0.8 / 31, abs=0.03)


def test_examples_are_what_they_should_be() -> None:
    sets = guess_number.examples(seed=1)
    assert sorted(int(example.ground_truth) for example in sets.validation) == list(range(1, 32))
    assert {sum(e.ground_truth == str(n) for e in sets.train) for n in range(1, 32)} == {10}
    products = calculator.examples(seed=1)
    assert not {e.question for e in products.train} & {e.question for e in products.validation}
    assert (len(products.train), len(products.validation)) == (2000, 64)
    with pytest.raises(ValueError, match="there are only 4624 products of two numbers from 32 to 99"):
        calculator.examples(seed=0, num_train=8000)


@pytest.mark.usefixtures("model_cache")
@pytest.mark.parametrize("name", ["guess-number", "calculator"])
def test_the_configuration_passes_its_checks(name: str) -> None:
    config = load_config(f"configs/{name}.yaml")
    check_files(config)
    assert config.sampling.min_tokens == 1  # a guess is one digit, or two
    tiny = config.model.tiny
    assert tiny.hidden_size // tiny.num_heads == 32  # which vLLM's attention on a CPU has


# ---- tool calls in replies, by transformers' parser and by vLLM's ----


PARSERS = ["transformers", pytest.param("hermes", marks=pytest.mark.vllm)]


def replies_to(parser_name: str, *replies: str) -> tuple[list[Reply], Session, Any]:
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
    replies, session, sampler = replies_to(parser, first, "It is gone.")
    calls = [(call.name, call.arguments) for call in replies[0].tool_calls]
    assert calls == [("look", {"place": "here"}), ("look", {"place": "there"})]
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
def test_a_malformed_call_is_text(parser: str) -> None:
    for malformed in (
        '<tool_call>\n{"name": "look", "arguments": {"place": \n</tool_call>',
        '<tool_call>\n{"nam": "look"}\n</tool_call>',
        '<tool_call>\n{"name": "look", "arguments": 3}\n</tool_call>',
        "<tool_call>\nlook\n</tool_call>",
    ):
        (reply,), _, _ = replies_to(parser, malformed)
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
def test_parsers_that_do_not_fit_and_unknown_ones_are_refused() -> None:
    unknown = r"there is no parser 'hermess'; choose from transformers, .*hermes"
    misfits = [(name, f"tool_parser: {name} does not fit the tokenizer") for name in ("openai", "llama3_json")]
    for name, message in (*misfits, ("hermess", unknown)):
        with pytest.raises(ValueError, match=message):
            make_tool_parser(name, chat_tokenizer(QWEN25))
