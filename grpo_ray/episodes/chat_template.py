"""From messages to tokens, through the tokenizer's own chat template.

A turn's prompt is the tokens so far and a suffix: the tokens that the new messages add. The suffix is cut from
a rendering of the whole conversation in which a sentinel stands for the last reply, so sampled tokens are
never decoded and encoded again.
"""

import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from grpo_ray.records.visible_text import encodable
from grpo_ray.tasks.prompts import check_shown

Message = Mapping[str, Any]
"""A message as in OpenAI's chat completions: role, content, tool_calls, tool_call_id."""
Tool = Mapping[str, Any]
"""A tool as there: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
ENCODED_BYTES = 32 * 2**20  # of texts to remember: the episodes of a group begin with one, and hints repeat
TOKEN_BYTES = 40  # of a token in a tuple, about
NUM_SHAPES = 4096
SENTINEL, PROBE = "grpo-ray-reply", "grpo-ray-message-"

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A cache of the values that were used last, up to a total size. Threads may share it."""

    def __init__(self, max_size: int, size_of: Callable[[K, V], int] = lambda key, value: 1) -> None:
        """
        Args:
            size_of: a value's size with its key, in the unit of `max_size`; default: entries.
        """
        self._max_size, self._size_of = max_size, size_of
        self._size = 0
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the key's value, made now unless it is here; two threads may make one at the same time."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            if key not in self._values:
                self._size += self._size_of(key, value)
            self._values[key] = value
            while self._size > self._max_size:
                self._size -= self._size_of(*self._values.popitem(last=False))
        return value


class ChatTemplate:
    """A tokenizer's chat template, for conversations that grow."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, end_token_ids: Sequence[int],
        arguments: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            end_token_ids: tokens that end a reply.
            arguments: further variables of the template, such as `enable_thinking`.
        """
        self.tokenizer = tokenizer
        self._end_tokens = {tokenizer.convert_ids_to_tokens(token): token for token in end_token_ids}
        self._arguments = dict(arguments or {})
        # From the shapes of conversations to the stand-in that works for them.
        self._shapes = Recent[tuple[Any, ...], int](NUM_SHAPES)
        self._texts = Recent[str, tuple[int, ...]](
            ENCODED_BYTES, lambda text, token_ids: len(text) + TOKEN_BYTES * len(token_ids)
        )

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> tuple[int, ...]:
        """Return the tokens of a whole conversation, up to the beginning of the next reply.

        Raises:
            ValueError: the template cannot show the messages.
        """
        text = self._render(messages, tools)
        check_shown(messages, text)
        return self._encoded(text)

    def continued(
        self, messages: Sequence[Message], num_known: int, prompt: Sequence[int], reply: Sequence[int],
        tools: Sequence[Tool] | None = None,
    ) -> tuple[int, ...] | None:  # fmt: skip
        """Return the next prompt, which begins with `prompt` and `reply`.

        None: a branch begins, since text of those tokens is dropped, or shown again.

        Args:
            num_known: messages that those tokens show, the reply included; the others are new.
            prompt: tokens of the turn that sampled the reply.

        Raises:
            ValueError: the template cannot show the messages.
        """
        dropped = self._dropped(messages, tools)
        is_dropped = dropped and not dropped <= self._dropped(messages[: num_known - 1], tools)
        if is_dropped or self._is_repeated(messages, num_known, tools):
            return None
        known = (*prompt, *reply)
        return known + self.suffix(messages, num_known, known[-1], tools)

    def suffix(
        self, messages: Sequence[Message], num_known: int, last_token: int, tools: Sequence[Tool] | None = None
    ) -> tuple[int, ...]:
        """Return the tokens that `messages[num_known:]` add after the reply `messages[num_known - 1]`.

        If the reply's last token is not the template's end token, because it was cut off, that one comes first.

        Raises:
            ValueError: the template refuses the messages, drops one of them, or leaves the reply open.
        """
        dummy = self._dummy(messages, num_known, tools)
        sentinel = f"{SENTINEL}-{secrets.token_hex(16)}"  # which no message holds
        renamed = [*messages[: num_known - 1], {**dummy, "content": sentinel}, *messages[num_known:]]
        end, behind = self._behind(renamed, sentinel, tools)
        return self._encoded(behind if last_token == self._end_tokens[end] else end + behind)

    def _dummy(
        self, messages: Sequence[Message], num_known: int, tools: Sequence[Tool] | None
    ) -> dict[str, Any]:
        """Return a stand-in for the last reply, behind which the template shows every new message.

        Some templates show a tool's result only after a reply with calls.
        """
        calls = messages[num_known - 1].get("tool_calls")
        plain = {"role": "assistant"}
        candidates = [plain, {**plain, "tool_calls": calls}] if calls else [plain]
        shape = len(candidates), num_known, bool(tools), *(message["role"] for message in messages)
        known, new = messages[: num_known - 1], messages[num_known:]

        def first_that_works() -> int:
            problems = [self._problem(known, candidate, new, tools) for candidate in candidates]
            if None not in problems:
                raise ValueError(problems[0])
            return problems.index(None)

        return candidates[self._shapes.get(shape, first_that_works)]

    def _problem(
        self, known: Sequence[Message], dummy: Mapping[str, Any], new: Sequence[Message],
        tools: Sequence[Tool] | None,
    ) -> str | None:  # fmt: skip
        """Return the reason that the text behind the stand-in is not exactly the new messages', or None."""
        probed = [{**message, "content": f"{PROBE}{number}."} for number, message in enumerate(new)]
        reply = {**dummy, "content": SENTINEL}
        if "tool_calls" in dummy:
            named = [{**call["function"], "arguments": {PROBE: "call"}} for call in dummy["tool_calls"]]
            reply["tool_calls"] = [
                {**call, "function": function}
                for call, function in zip(dummy["tool_calls"], named, strict=True)
            ]
        try:
            _, behind = self._behind([*known, reply, *probed], SENTINEL, tools)
        except ValueError as error:
            return str(error)
        for message in probed:
            if message["content"] not in behind:
                return f"the model's chat template does not show a message of role {message['role']!r} here"
        if behind.count(PROBE) > len(new):
            return "the model's chat template shows the reply's own calls behind its end"
        return None

    def _behind(
        self, messages: Sequence[Message], sentinel: str, tools: Sequence[Tool] | None
    ) -> tuple[str, str]:
        """Return the end token of the reply that is the sentinel, and the text behind it."""
        _, found, behind = self._render(messages, tools).rpartition(sentinel)
        if not found:
            raise ValueError(
                "the model's chat template drops an assistant message that stands before the new ones, so "
                "their tokens cannot be told apart; use a template that shows every message"
            )
        ends = sorted((behind.index(end), end) for end in self._end_tokens if end in behind)
        if not ends:
            raise ValueError(
                f"the model's chat template ends a reply with none of its ends {sorted(self._end_tokens)}; "
                "add the token that ends a reply to generation_config.json's eos_token_id"
            )
        start, end = ends[0]
        return end, behind[start + len(end) :]

    def _dropped(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> set[int]:
        """Return the places of assistant messages of which the template drops text other than white space.

        Templates of reasoning models drop the thoughts of earlier replies once the user speaks again.
        """
        shown = _squeezed(self._render(messages, tools))
        return {
            place
            for place, message in enumerate(messages)
            if message["role"] == "assistant"
            for text in (message["content"], message.get("reasoning_content", ""))
            if _squeezed(text) not in shown
        }

    def _is_repeated(self, messages: Sequence[Message], num_known: int, tools: Sequence[Tool] | None) -> bool:
        """Return True if behind the reply stands what came before it: Mistral's last user shows the tools."""

        def is_repeated() -> bool:
            known = [
                {**message, "content": PROBE} if message["role"] in ("system", "user") else message
                for message in messages[: num_known - 1]
            ]
            reply = {**self._dummy(messages, num_known, tools), "content": SENTINEL}
            named = [{**tool, "function": {**tool["function"], "name": PROBE}} for tool in tools or ()]
            return PROBE in self._behind([*known, reply, *messages[num_known:]], SENTINEL, named)[1]

        shape = num_known, bool(tools), *(message["role"] for message in messages)
        return bool(self._shapes.get(shape, is_repeated))

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> str:
        if not self.tokenizer.chat_template:
            raise ValueError(
                "session.chat needs the model's chat template, but its tokenizer has none; use "
                "session.sample, or a model that was trained on conversations"
            )
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, tokenize=False,
                add_generation_prompt=True, **self._arguments,
            )  # fmt: skip
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the model's chat template refuses the conversation: {error}") from error
        return text

    def _encoded(self, text: str) -> tuple[int, ...]:
        text = encodable(text)
        return self._texts.get(text, lambda: tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]))


@lru_cache(maxsize=4)
def token_bounds(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the number of token ids, and the most characters for which one token can stand.

    A token of a byte-level vocabulary is written with a letter per byte, so it stands for as many or fewer.
    """
    vocabulary = tokenizer.get_vocab()
    return 1 + max(vocabulary.values()), max(map(len, vocabulary))


def normalized(message: Message) -> dict[str, Any]:
    """Return the message as templates expect it, so that equal messages compare equal.

    Content is text, arguments of tool calls are objects, fields without a value are left out, and a developer's
    message, which most templates do not know, is the system's.

    Raises:
        ValueError: a role is missing, the content is not only text, or a tool call has no name or no JSON.
    """
    if "role" not in message:
        raise ValueError("a message has no role")
    content = "" if message.get("content") is None else message["content"]
    if not isinstance(content, str):
        parts = content if isinstance(content, list | tuple) else [content]
        if not all(map(is_text, parts)):
            raise ValueError(f"a message has the content {content!r:.80}; only text is supported")
        content = "".join(part["text"] for part in parts)
    rest = {key: value for key, value in message.items() if value not in (None, [])}
    if "tool_calls" in rest:
        rest["tool_calls"] = [_normalized_call(call) for call in rest["tool_calls"]]
    role = "system" if message["role"] == "developer" else message["role"]
    return {**rest, "role": role, "content": encodable(content)}


def is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _normalized_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not (isinstance(function, Mapping) and {"name", "arguments"} <= function.keys()):
        raise ValueError(f"a message has the tool call {call!r:.80}; give its function a name and arguments")
    arguments = function["arguments"]
    parsed = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    return {**call, "function": {**function, "arguments": parsed}}


def _squeezed(text: str) -> str:
    return "".join(text.split())
