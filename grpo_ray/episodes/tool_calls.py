"""Tool calls in a reply, found by transformers' or vLLM's parsers."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from transformers import PreTrainedTokenizerBase

from grpo_ray.episodes.chat_template import Tool
from grpo_ray.records.json_lines import storable_json
from grpo_ray.records.visible_text import encodable

TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool, with its arguments by name."""

    id: str
    name: str
    arguments: Mapping[str, Any]


Parsed = tuple[str, str, list[tuple[str, Any]]]
"""The reply's text without its calls, thoughts that the parser told apart, and names and arguments of calls."""
ToolParser = Callable[[Sequence[int], Sequence[int], Sequence[Tool]], Parsed]
"""(reply's tokens, prompt's tokens, tools) to the parsed reply.

Raises:
    ValueError: the reply is malformed.
"""


def has_name(function: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def check_tools(tools: object) -> None:
    """Raise ValueError unless these are descriptions in OpenAI's form: no parser would find their calls."""
    each = tools if isinstance(tools, Sequence) else [None]
    if not all(isinstance(tool, Mapping) and has_name(tool.get("function")) for tool in each):
        raise ValueError("tools: a session takes only a list of objects, each with a function that has a name")


def make_tool_parser(
    name: str, tokenizer: PreTrainedTokenizerBase, end_token_ids: Collection[int] = ()
) -> ToolParser:
    """Return the parser of that name: `transformers`, or one of vLLM's (`hermes`, `llama3_json`, ...).

    Raises:
        ValueError: the tokenizer has no response template, or vLLM has no such parser.
    """
    if name == TRANSFORMERS:
        return checked(_transformers_parser(tokenizer))
    return checked(_vllm_parser(name, tokenizer, end_token_ids))


def checked(parse: ToolParser) -> ToolParser:
    """Return the parser with its promise held: any failure is a ValueError, names are text, and no text that it
    returns has a lone surrogate, which a model can write as JSON's `\\ud83d` in plain ASCII."""

    def parse_checked(token_ids: Sequence[int], prompt: Sequence[int], tools: Sequence[Tool]) -> Parsed:
        try:
            content, reasoning, calls = parse(token_ids, prompt, tools)
            found = [(encodable(name), json.loads(storable_json(arguments))) for name, arguments in calls]
            return encodable(content), encodable(reasoning), found
        except Exception as error:  # of many kinds: it reads whatever a model has written
            raise ValueError(f"{type(error).__name__}: {error}") from error

    return parse_checked


def _transformers_parser(tokenizer: PreTrainedTokenizerBase) -> ToolParser:
    schema = getattr(tokenizer, "response_template", None)
    if schema is None:
        raise ValueError(
            "tool_parser: the tokenizer has no response_template for transformers' parser; name one of vLLM's "
            "parsers instead, such as hermes"
        )

    def parse(token_ids: Sequence[int], prompt: Sequence[int], tools: Sequence[Tool]) -> Parsed:
        prefix, used = list(prompt), [dict(tool) for tool in tools]
        message = tokenizer.parse_response(list(token_ids), schema=dict(schema), prefix=prefix, tools=used)
        calls = [
            (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
        ]
        return message.get("content") or "", message.get("reasoning_content") or "", calls

    return parse


def _vllm_parser(name: str, tokenizer: PreTrainedTokenizerBase, end_token_ids: Collection[int]) -> ToolParser:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    try:
        parser_class = ToolParserManager.get_tool_parser(name)
    except KeyError:
        known = ", ".join([TRANSFORMERS, *sorted(ToolParserManager.list_registered())])
        raise ValueError(f"tool_parser: there is no parser {name!r}; choose from {known}") from None

    def parse(token_ids: Sequence[int], prompt: Sequence[int], tools: Sequence[Tool]) -> Parsed:
        request = ChatCompletionRequest.model_validate({"messages": [], "tools": list(tools)})
        # Without its end, as vLLM's server parses it: some parsers read calls only in the whole text.
        said = token_ids[:-1] if token_ids and token_ids[-1] in end_token_ids else token_ids
        text = tokenizer.decode(list(said), skip_special_tokens=False)
        found = parser_class(tokenizer, request.tools).extract_tool_calls(text, request)
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]
        return found.content or "", "", calls

    try:
        parse((), (), [{"type": "function", "function": {"name": "any"}}])
    except RuntimeError as error:  # it lacks one of the parser's tokens, or the parser reads no text
        raise ValueError(f"tool_parser: {name} does not fit the tokenizer: {error}") from error
    return parse
