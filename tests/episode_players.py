"""Chat templates, a tokenizer, a scripted policy and sessions for tests of episodes."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from builders import make_settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from grpo_ray.config.episodes import EpisodesConfig
from grpo_ray.config.task import SortingTaskConfig
from grpo_ray.episodes.chat_template import ChatTemplate
from grpo_ray.episodes.openai_server import ChatServer
from grpo_ray.episodes.runner import EpisodeFn, EpisodeRunner
from grpo_ray.episodes.session import Session
from grpo_ray.episodes.tool_calls import ToolParser, make_tool_parser
from grpo_ray.learning.plain_chat import RESPONSE_TEMPLATE
from grpo_ray.learning.tiny_tokenizer import train_tokenizer
from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.sorting import warmup_pairs
from grpo_ray.types import Completion, Episode, SamplingSettings

SPECIAL = (
    "<|im_start|>", "<|im_end|>",
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
)  # fmt: skip

# The formats of Qwen2.5, Qwen3 and Llama 3, without their system prompts and lists of tools.
_TURN = "{{ '<|im_start|>' + message.role + '\\n' + content + calls.text + '<|im_end|>\\n' }}"
_TOOL_RESULT = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
)
_CALLS = (
    "{% set calls = namespace(text='') %}{% for call in message.tool_calls or [] %}"
    "{% set calls.text = calls.text + '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' %}"
    "{% endfor %}"
)
_START = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
QWEN25 = (
    "{% for message in messages %}{% set content = message.content %}" + _CALLS +
    "{% if message.role == 'tool' %}" + _TOOL_RESULT + "{% else %}" + _TURN + "{% endif %}{% endfor %}" + _START
)  # fmt: skip
# Replies before the last question lose their thoughts, and the last one gets an empty thought if it has none.
QWEN3 = (
    "{% set last = namespace(question=0) %}"
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{% set last.question = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = message.content %}" + _CALLS +
    "{% if message.role == 'assistant' %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1] if '</think>' in content else '' %}"
    "{% set thought = message.reasoning_content or thought %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{% if loop.index0 > last.question and (loop.last or thought) %}"
    "{% set content = '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content %}{% endif %}" +
    _TURN + "{% elif message.role == 'tool' %}" + _TOOL_RESULT + "{% else %}" + _TURN + "{% endif %}" +
    "{% endfor %}" + _START
)  # fmt: skip
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
    "{{ message.content | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
TEMPLATES = {"qwen2.5": QWEN25, "qwen3": QWEN3, "llama3": LLAMA3}
ENDS = {name: "<|eot_id|>" if name.startswith("llama") else "<|im_end|>" for name in TEMPLATES}
_PLACE = {"type": "object", "properties": {"place": {"type": "string"}}}
_LOOK = {"name": "look", "description": "Look at a place.", "parameters": _PLACE}
TOOL = {"type": "function", "function": _LOOK}
Policy = Callable[[str], str | Sequence[int]]
HELLO = Example("hello", "reply")
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
# Templates may trim what they show, so replies that are compared have a first and a last letter.
REPLIES = TEXTS.map(lambda text: f"a{text}z")
# Questions and replies. Random tokens are seldom what their text encodes to, and often no valid UTF-8.
TURNS = st.lists(st.tuples(TEXTS, REPLIES | st.lists(st.integers(1, 250), max_size=8)), min_size=1, max_size=4)
ANY_TEXTS = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates, too
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXTS, inner, max_size=3),
    max_leaves=8,
)
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "%s"}}\n</tool_call>'
_THOUGHTS = {"open": "<think>\n", "close": "\n</think>"}
_CONTENT = {"close_pattern": r"<\|im_end\|>|$", "repeats": True, "join": ""}
_FIELDS = {**RESPONSE_TEMPLATE["fields"], "reasoning_content": _THOUGHTS, "content": _CONTENT}
RESPONSE = {**RESPONSE_TEMPLATE, "start_anchor": "<|im_start|>assistant\n", "fields": _FIELDS}


def chat_tokenizer(template: str) -> PreTrainedTokenizerBase:
    """Learn a small tokenizer with the special tokens of all templates."""
    pairs = warmup_pairs(SortingTaskConfig(), seed=0, num_pairs=100)
    tokenizer = train_tokenizer((prompt + response for prompt, response in pairs), vocab_size=300)
    tokenizer.add_tokens(list(SPECIAL), special_tokens=True)
    tokenizer.bos_token = "<|begin_of_text|>"
    tokenizer.chat_template = template
    return tokenizer


tokenizer_of = cache(lambda name: chat_tokenizer(TEMPLATES[name]))


class Scripted:
    """A sampler that answers each prompt with a function of its text, and remembers the prompts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, policy: Policy, end: str = "") -> None:
        """`policy` returns a reply's text, to which `end` is added, or its tokens."""
        self._tokenizer, self._policy, self._end = tokenizer, policy, end
        self.prompts: list[tuple[int, ...]] = []
        self.settings: list[SamplingSettings] = []

    async def sample(self, prompt_token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        self.prompts.append(prompt_token_ids)
        self.settings.append(settings)
        reply = self._policy(self._tokenizer.decode(list(prompt_token_ids)))
        if isinstance(reply, str):
            reply = self._tokenizer(reply + self._end, add_special_tokens=False)["input_ids"]
        reason = "length" if len(reply) > settings.max_tokens else "stop"
        ids = np.array(reply[: settings.max_tokens], np.int32)
        version = len(self.prompts) - 1
        await asyncio.sleep(0)  # an engine answers later
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        logprobs = -0.01 * np.arange(1, len(ids) + 1, dtype=np.float32) - version
        return Completion(text, ids, logprobs, np.full(len(ids), version, np.int32), reason)


def make_session(
    sampler: Any, tokenizer: PreTrainedTokenizerBase, limits: EpisodesConfig | None = None,
    parser: ToolParser | None = None, ends: Sequence[int] | None = None, **changes: Any,
) -> Session:  # fmt: skip
    """Make a session; `changes` are of its sampling settings."""
    if ends is None:
        ends = tuple(map(tokenizer.convert_tokens_to_ids, ("<|im_end|>", "<|eot_id|>")))
    template = ChatTemplate(tokenizer, ends)
    settings = make_settings(**{"max_tokens": 500, **changes})
    return Session(sampler.sample, settings, template, limits or EpisodesConfig(max_tokens=5000), parser)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def converse(
    session: Session, turns: Sequence[Sequence[dict[str, Any]]], tools: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Send each turn's messages after the replies so far; return the whole conversation."""
    messages: list[dict[str, Any]] = []
    for new in turns:
        messages += new
        messages.append((await session.chat(messages, tools)).message)
    return messages


def said(*replies: str | Sequence[int]) -> Policy:
    """Return a policy that says these in turn."""
    left = iter(replies)
    return lambda prompt: next(left)


def session_of(
    tokenizer: str | PreTrainedTokenizerBase, policy: Policy, *arguments: Any,
    parser: str | ToolParser | None = None, end: str = "<|im_end|>", **changes: Any,
) -> tuple[Session, Scripted]:  # fmt: skip
    """Make a session and its sampler; further arguments are as for `make_session`.

    Args:
        tokenizer: or the name of one of `TEMPLATES`, which has its own end of a reply.
    """
    if isinstance(tokenizer, str):
        tokenizer, end = tokenizer_of(tokenizer), ENDS[tokenizer]
    sampler = Scripted(tokenizer, policy, end)
    if isinstance(parser, str):
        tokenizer.response_template = RESPONSE
        parser = make_tool_parser(parser, tokenizer)
    return make_session(sampler, tokenizer, *arguments, parser=parser, **changes), sampler


def play(episode: EpisodeFn, session: Session, example: Example = HELLO) -> Episode:
    """Play one episode; its session has a URL meanwhile."""

    async def run() -> Episode:
        async with contextlib.aclosing(ChatServer()) as server:
            await server.start()
            return await EpisodeRunner(episode, server=server).run(session, example)

    return asyncio.run(run())
