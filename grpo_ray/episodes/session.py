"""A session: what an episode function talks to. It samples replies and owns every token of the episode."""

import asyncio
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from grpo_ray.config.episodes import EpisodesConfig
from grpo_ray.engines import derived_seed
from grpo_ray.episodes.chat_template import Message, Tool, normalized, token_bounds
from grpo_ray.episodes.outcome import EpisodeEnded, Status
from grpo_ray.episodes.renderer_template import Template
from grpo_ray.episodes.segments import Segments
from grpo_ray.episodes.tool_calls import ToolCall, ToolParser, check_tools
from grpo_ray.episodes.turn_box import Sample
from grpo_ray.records.visible_text import encodable
from grpo_ray.types import SamplingSettings
from grpo_ray.watch.event_loop import Changes

logger = logging.getLogger(__name__)
SHORT_CHARS = 64 * 1024  # of a conversation that becomes tokens in the loop; a longer one does in a thread


@dataclass(frozen=True)
class Reply:
    """One sampled turn."""

    text: str  # without tool calls; with thoughts, unless the parser of tool calls told them apart
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str  # "stop" | "length" | "tool_calls"
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    reasoning: str = ""
    turn: int = 0  # its place in `Outcome.turn_rewards`: of calls in flight at once, the first to end is first

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message, to append to the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True)
class _Turn:
    """A conversation that ends with a sampled reply, and the reply's segment."""

    messages: list[dict[str, Any]]
    keys: list[dict[str, Any]]  # of the messages
    tools: list[Tool]
    segment: int


class Session:
    """One episode's access to the policy; any number of its calls may be in flight."""

    def __init__(
        self, draw: Sample, settings: SamplingSettings, template: Template, limits: EpisodesConfig,
        tool_parser: ToolParser | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            draw: the way to a Generator; it samples one completion.
            settings: of each turn. The first turn draws with `settings.seed` itself, as a single request would,
                and each later one with a seed derived from it.
            limits: turns, tokens, seconds, and the rewards of episodes without one; other fields are not read.
            tool_parser: finds the tool calls in replies; None: `chat` accepts no tools.
        """
        self.segments = Segments()
        self.limits = limits
        self.ended: EpisodeEnded | None = None
        self.served_at: str | None = None  # set by the ChatServer that serves the session
        self._draw, self._settings = draw, settings
        self._template, self._tool_parser = template, tool_parser
        self.decode = template.tokenizer.decode
        self._vocabulary, token_chars = token_bounds(template.tokenizer)
        self.max_chars = limits.max_tokens * token_chars
        """Characters of a conversation beyond which no tokens of it fit into `limits.max_tokens`."""
        self._in_order = asyncio.Lock()  # calls get their seeds in order, also if a long one becomes tokens
        self._num_requests = 0
        self._num_in_flight, self._answers = 0, Changes()
        self._turns: list[_Turn] = []

    @property
    def base_url(self) -> str:
        """The URL of an OpenAI-compatible endpoint of this session alone.

        Raises:
            ValueError: no ChatServer serves the session.
        """
        if self.served_at is None:  # a client that is given None asks api.openai.com
            raise ValueError("the session has no base_url: no server serves it; give its runner a ChatServer")
        return self.served_at

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the text's tokens, special tokens included where their text stands."""
        return tuple(self._template.tokenizer(encodable(text), add_special_tokens=False)["input_ids"])

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, max_tokens: int | None = None
    ) -> Reply:
        """Sample the next reply of a conversation, which is given whole.

        A conversation that continues an earlier one of the session, with its reply, continues its tokens. Any
        other begins a branch: one in which messages were edited or tools changed, or in which the template no
        longer shows an earlier reply whole.

        Args:
            max_tokens: of the reply, if fewer than the run's; never below the run's `min_tokens`.

        Raises:
            EpisodeEnded: the episode has reached a limit, or its Generator failed.
            ValueError: the template or tool parser cannot deal with the messages; `max_tokens` is not whole.
        """
        if tools and self._tool_parser is None:
            raise ValueError("the session has tools but no parser for their calls; set a tool_parser")
        check_tools(tools or ())
        conversation, used = [normalized(message) for message in messages], deepcopy(list(tools or ()))
        keys = list(map(_key, conversation))
        # The turn with the longest conversation that begins this one, of equals the latest.
        begun = [t for t in self._turns if t.tools == used and keys[: len(t.keys)] == t.keys]
        turn = max(reversed(begun), key=lambda turn: len(turn.messages), default=None)
        if turn is not None:
            conversation[: len(turn.messages)] = turn.messages
        prompt = await self._chat_prompt(conversation, used, turn)
        segment, reply = await self._sample(prompt, used, max_tokens)
        said = normalized(reply.message)
        self._turns.append(_Turn([*conversation, said], [*keys, _key(said)], used, segment))
        return reply

    async def sample(self, token_ids: Sequence[int], max_tokens: int | None = None) -> Reply:
        """Sample a reply to a prompt of tokens.

        A prompt that begins with an earlier prompt and its reply continues them; any other begins a branch.

        Raises:
            EpisodeEnded: the episode has reached a limit, or its Generator failed.
            ValueError: the prompt is empty, the model has no such token, or `max_tokens` is not whole.
        """
        await self._turn_settings(len(token_ids))  # a prompt that is too long is not even copied
        prompt = tuple(map(int, token_ids))
        unknown = next((token for token in prompt if not 0 <= token < self._vocabulary), None)
        if unknown is not None:
            raise ValueError(f"the prompt has the token {unknown}; the model's are 0 to {self._vocabulary - 1}")
        _, reply = await self._sample(prompt, [], max_tokens)
        return reply

    def end(self, status: Status, reason: str) -> EpisodeEnded:
        """End the session: calls in flight and all later ones raise the first end, which is returned."""
        self.ended = self.ended or EpisodeEnded(status, reason)
        return self.ended

    async def _chat_prompt(
        self, conversation: list[dict[str, Any]], tools: list[Tool], turn: _Turn | None
    ) -> tuple[int, ...]:
        """Return the tokens of the conversation, which a thread makes if it is long.

        One that cannot fit is neither rendered nor made tokens.
        """
        # The template may drop thoughts of replies, and white space at the ends of messages.
        given = [message["content"].strip() for message in conversation if message["role"] != "assistant"]
        if (num_chars := sum(map(len, given))) > self.max_chars:
            limit = self.limits.max_tokens
            reason = f"messages of {num_chars} characters leave no room for a reply within {limit} tokens"
            raise await self.at_limit(Status.TRUNCATED_TOKENS, reason)

        def rendered() -> tuple[int, ...]:
            if turn is not None:
                known = self.segments.token_ids(turn.segment)
                start = len(known) - len(self.segments[turn.segment].token_ids)
                replied = len(turn.messages), known[:start], known[start:]
                if (prompt := self._template.continued(conversation, *replied, tools)) is not None:
                    return prompt
            return self._template.prompt(conversation, tools)

        async with self._in_order:
            if _num_chars(conversation) + _num_chars(tools) <= SHORT_CHARS:
                return rendered()
            return await asyncio.to_thread(rendered)

    async def _sample(
        self, prompt: tuple[int, ...], tools: Sequence[Tool], max_tokens: int | None
    ) -> tuple[int, Reply]:
        """Sample a turn; return its segment and its reply."""
        settings = await self._turn_settings(len(prompt))
        if max_tokens is not None:
            shorter = max(1, settings.min_tokens, min(_whole(max_tokens), settings.max_tokens))
            settings = replace(settings, max_tokens=shorter)
        before = self.segments.add_prompt(prompt)
        self._num_requests += 1  # only now: a call that was refused is not a turn
        with self._answering():
            try:
                completion = await self._draw(prompt, settings)
            except Exception as error:
                logger.exception("a turn could not be sampled")
                reason = f"{type(error).__name__}: {error}"
                raise self.end(Status.GENERATOR_ERROR, reason) from error
            if self.ended is not None:
                raise self.ended
            # The model's vocabulary may be larger than its tokenizer's.
            self._vocabulary = max(self._vocabulary, 1 + int(completion.token_ids.max(initial=0)))
            segment = self.segments.add_sample(before, completion)
        turn, token_ids = self.segments[segment].turn, tuple(completion.token_ids.tolist())
        text, reasoning, calls = self._parsed(completion.text, token_ids, prompt, tools, turn)
        reason = "tool_calls" if calls else completion.finish_reason
        return segment, Reply(text, calls, reason, token_ids, len(prompt), reasoning, turn)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        self._num_in_flight += 1
        try:
            yield
        finally:
            self._num_in_flight -= 1
            self._answers.announce()

    async def at_limit(self, status: Status, reason: str) -> EpisodeEnded:
        """End the session once the calls in flight have been answered, so that a limit loses no reply."""
        await self._answers.until(lambda: self.ended is not None or not self._num_in_flight)
        return self.end(status, reason)

    async def _turn_settings(self, prompt_length: int) -> SamplingSettings:
        """Return the settings of the next turn.

        Raises:
            EpisodeEnded: a limit leaves no room for it.
        """
        settings, limits = self._settings, self.limits
        if self.ended is not None:
            raise self.ended
        if self._num_requests >= limits.max_turns:
            reason = f"the episode has had its {limits.max_turns} turns"
            raise await self.at_limit(Status.TRUNCATED_TURNS, reason)
        room = min(settings.max_tokens, limits.max_tokens - prompt_length)
        if room < max(1, settings.min_tokens):
            reason = f"a prompt of {prompt_length} tokens leaves no room for a reply within {limits.max_tokens}"
            raise await self.at_limit(Status.TRUNCATED_TOKENS, reason)
        seed = settings.seed
        if seed is not None and self._num_requests > 0:
            seed = derived_seed(seed, self._num_requests)
        return replace(settings, num_samples=1, max_tokens=room, seed=seed)

    def _parsed(
        self, text: str, token_ids: Sequence[int], prompt: Sequence[int], tools: Sequence[Tool], turn: int
    ) -> tuple[str, str, tuple[ToolCall, ...]]:
        """Return the reply's text, thoughts and calls; it is all text without calls, or if one is malformed."""
        if not tools or self._tool_parser is None:
            return text, "", ()
        try:
            content, reasoning, found = self._tool_parser(token_ids, prompt, tools)
        except ValueError as error:
            logger.debug("a reply's tool calls are malformed: %s", error)
            return text, "", ()
        if not found or not all(isinstance(name, str) and isinstance(args, Mapping) for name, args in found):
            return text, "", ()
        # Nine letters and digits: some templates accept nothing else.
        ids = [f"call{turn % 1000:03}{number % 100:02}" for number in range(len(found))]
        return content, reasoning, tuple(ToolCall(id, *call) for id, call in zip(ids, found, strict=True))


def _whole(max_tokens: Any) -> int:
    try:
        return operator.index(max_tokens)  # an engine may take no other type, such as NumPy's
    except TypeError:
        raise ValueError(f"max_tokens is {max_tokens!r}; give a whole number") from None


def _num_chars(value: object) -> int:
    """Count the characters of all text in messages or tools."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_chars, value.values()))
    return sum(map(_num_chars, value)) if isinstance(value, list | tuple) else 0


def _key(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a message says, without what clients add to a reply (`index`) or drop (its thoughts)."""
    if message["role"] != "assistant":
        return dict(message)
    calls = message.get("tool_calls", ())
    functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    ids = [call.get("id") for call in calls]
    return {"role": "assistant", "content": message["content"], "functions": functions, "ids": ids}
