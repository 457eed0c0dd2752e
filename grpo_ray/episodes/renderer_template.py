"""Conversations through the `renderers` package: a model's chat format in code, and its parser of replies."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_ray.config.episodes import EpisodesConfig
from grpo_ray.episodes.adapters import required
from grpo_ray.episodes.chat_template import ChatTemplate, Message, Tool
from grpo_ray.episodes.tool_calls import Parsed, ToolParser, checked, make_tool_parser

PARSER = "renderer"
# Of the calls in a reply; the environment answers one of a tool that does not exist.
WELL_FORMED = ("ok", "unknown_tool")
# Raised by renderers for messages and tokenizers that they do not take.
REFUSALS = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RuntimeError)


@contextlib.contextmanager
def refused(start: str, end: str = "") -> Iterator[None]:
    """Raise a ValueError for what a renderer does not take; its own message stands between these texts."""
    try:
        yield
    except REFUSALS as error:
        raise ValueError(f"{start}{error}{end}") from error


class RendererTemplate:
    """A renderer, for conversations that grow."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, renderer: Any) -> None:
        """
        Args:
            renderer: of `make_renderer`.
        """
        self.tokenizer = tokenizer
        self._renderer = renderer

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> tuple[int, ...]:
        """See `ChatTemplate.prompt`."""
        given = _with_names(messages)
        with refused("the renderer refuses the conversation: "):
            return tuple(self._renderer.render_ids(given, tools=_listed(tools), add_generation_prompt=True))

    def continued(
        self, messages: Sequence[Message], num_known: int, prompt: Sequence[int], reply: Sequence[int],
        tools: Sequence[Tool] | None = None,
    ) -> tuple[int, ...] | None:  # fmt: skip
        """See `ChatTemplate.continued`; a branch begins where the renderer finds no continuation."""
        new = _with_names(messages)[num_known:]
        with refused("the renderer refuses the conversation: "):
            bridged = self._renderer.bridge_to_next_turn(list(prompt), list(reply), new, tools=_listed(tools))
        known = (*prompt, *reply)
        # A renderer may cut the reply at a token that it takes for the end.
        if bridged is None or tuple(bridged.token_ids[: len(known)]) != known:
            return None
        return tuple(bridged.token_ids)

    def parse(self, token_ids: Sequence[int], prompt: Sequence[int], tools: Sequence[Tool]) -> Parsed:
        """Return the parsed reply, as a ToolParser does.

        Raises:
            ValueError: one of its calls is malformed.
        """
        found = self._renderer.parse_response(list(token_ids), tools=_listed(tools), prompt_ids=list(prompt))
        malformed = [call for call in found.tool_calls if call.status not in WELL_FORMED]
        if malformed:
            raise ValueError(f"a call is malformed ({malformed[0].status}): {malformed[0].raw}")
        calls = [(call.name, call.arguments) for call in found.tool_calls]
        return found.content or "", found.reasoning_content or "", calls


Template = ChatTemplate | RendererTemplate
"""The way from conversations to tokens."""


def make_template(
    settings: EpisodesConfig, tokenizer: PreTrainedTokenizerBase, end_token_ids: Sequence[int]
) -> tuple[Template, ToolParser | None]:
    """Return the configured template and parser of tool calls.

    Args:
        end_token_ids: tokens that end a reply of the model.

    Raises:
        ValueError: there is none of that name, or it does not fit tokenizer, end tokens or arguments.
    """
    if settings.renderer is None:
        template: Template = ChatTemplate(tokenizer, end_token_ids, settings.template_arguments)
    else:
        renderer = make_renderer(settings.renderer, tokenizer, end_token_ids, settings.template_arguments)
        template = RendererTemplate(tokenizer, renderer)
        if settings.tool_parser == PARSER:
            return template, checked(template.parse)
    if settings.tool_parser is None:
        return template, None
    try:
        return template, make_tool_parser(settings.tool_parser, tokenizer, end_token_ids)
    except ValueError as error:
        raise ValueError(f"episodes.{error}") from None


def make_renderer(
    name: str, tokenizer: PreTrainedTokenizerBase, end_token_ids: Sequence[int],
    arguments: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Return the renderer of that name, `auto` for the one that the package lists for the model.

    Args:
        end_token_ids: tokens that end a reply of the model.
        arguments: its variables, such as `enable_thinking`.

    Raises:
        ValueError: `check_renderer` does, the renderer does not fit the tokenizer or takes no such arguments,
            or one of its stop tokens does not end a reply.
    """
    configured = check_renderer(name)
    create = required("renderers").create_renderer
    model = tokenizer.name_or_path
    with refused(
        f"episodes.renderer: {name} does not fit the tokenizer of {model!r} (",
        "); name one that does, or remove it to use the tokenizer's chat template",
    ):
        renderer = create(tokenizer, configured)
    if renderer.config.name == "default":  # it renders as the chat template does, and never continues tokens
        raise ValueError(
            f"episodes.renderer: {name} finds no renderer for {model!r}; name one, or remove it to use the "
            "tokenizer's chat template"
        )
    if arguments:
        with refused("episodes.template_arguments: "):
            renderer = create(tokenizer, renderer.config, chat_template_kwargs=dict(arguments))
    unknown = sorted(set(renderer.get_stop_token_ids()) - set(end_token_ids))
    if unknown:
        tokens = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in unknown)
        raise ValueError(
            f"episodes.renderer: {name} ends replies with tokens that do not end the model's: {tokens}; add "
            "them to eos_token_id in the model's generation_config.json"
        )
    return renderer


def check_renderer(name: str) -> Any:
    """Return the package's settings for the renderer of that name.

    Raises:
        ValueError: the package cannot be imported, or has no such renderer.
    """
    try:
        return required("renderers", "episodes.renderer").config_from_name(name)
    except ImportError as error:
        raise ValueError(str(error)) from error
    except ValueError as error:
        raise ValueError(f"episodes.renderer: {error}") from error


def _listed(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    return [dict(tool) for tool in tools] if tools else None


def _with_names(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages, each tool's result with the tool's name, which gpt-oss and Gemma show."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    names = {call["id"]: call["function"]["name"] for call in calls if "id" in call}
    return [
        {"name": names[message["tool_call_id"]], **message}
        if message.get("tool_call_id") in names
        else dict(message)
        for message in messages
    ]
