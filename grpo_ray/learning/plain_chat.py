"""A chat template for tiny models without one: the text of messages, line by line.

    What is 12 * 34?
    >
    <tool_call>{"name": "calculator", "arguments": {"expression": "12 * 34"}}</tool_call><|endoftext|>408
    >
    408<|endoftext|>

A reply begins on a line of its own, so the tokens of a transcript are those of its parts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ '>\\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}</tool_call>' }}"
    "{% endfor %}{{ eos_token }}"
    "{% else %}{{ message.content + '\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '>\\n' }}{% endif %}"
)
# As `apply_chat_template` does.
COMPILED = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE)
RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "\n>\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
        "content": {"close_pattern": r"<\|endoftext\|>|$", "repeats": True, "join": ""},
    },
}


def give_plain_chat(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer the template, and what transformers' parser needs to find tool calls in it."""
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE


def transcript(messages: Sequence[Mapping[str, Any]], end_token: str) -> str:
    """Return the messages as the template shows them, up to the next reply."""
    return COMPILED.render(messages=messages, eos_token=end_token, add_generation_prompt=True)
