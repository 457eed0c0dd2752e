"""Demonstrations for supervised steps: a prompt's tokens, and those of the response to imitate."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from grpo_ray.config.learner import SftConfig
from grpo_ray.tasks.examples import conversation_of, messages_of
from grpo_ray.tasks.files import read_rows, text_of
from grpo_ray.tasks.prompts import ChatTemplate, PromptTemplate, tokenized

MESSAGES = "messages"


class Demonstration(NamedTuple):
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    """The end token included."""


def plain_demonstration(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str) -> Demonstration:
    """Encode prompt and response apart, as in training, where the prompt's ids are fixed before sampling."""
    (prompt_ids,) = tokenized(None, tokenizer, [prompt])
    return Demonstration(tuple(prompt_ids), (*_encoded(tokenizer, response), tokenizer.eos_token_id))


def read_demonstrations(
    sft: SftConfig, template: PromptTemplate | None, tokenizer: PreTrainedTokenizerBase,
    end_token_ids: Sequence[int], max_tokens: int | None,
) -> list[Demonstration]:  # fmt: skip
    """Read and encode every row of the file.

    A response in a conversation has the tokens that the chat template writes for it, up to its end token.

    Args:
        template: the task's; None if it has none or several, and then only rows with `messages` are possible.
        max_tokens: longest prompt and response together.

    Raises:
        ValueError: names the file, the line and the fix.
    """
    found = []
    for place, row in read_rows(Path(sft.path), ()):
        if row.get("tools") not in (None, [], "", "[]"):
            raise ValueError(f"{place}: 'tools' cannot be imitated, only text; leave the row out")
        messages = row.get(MESSAGES) if row.get(sft.prompt_field) is None else None
        if messages is not None:
            if not tokenizer.chat_template:
                raise ValueError(
                    f"{place}: {MESSAGES!r} needs a model with a chat template; give prompt and response"
                )
            chat = template if isinstance(template, ChatTemplate) else ChatTemplate()
            made = _of_messages(place, messages, chat, tokenizer, end_token_ids)
        else:
            made = _of_fields(place, row, sft, template, tokenizer, end_token_ids)
        length = sum(map(len, made))
        if max_tokens is not None and length > max_tokens:
            raise ValueError(
                f"{place}: prompt and response have {length} tokens, but the model takes {max_tokens}; shorten "
                "the row, or leave it out"
            )
        found.append(made)
    if not found:
        raise ValueError(f"sft.path: {sft.path} holds no rows; give a file with at least one")
    return found


def _of_fields(
    place: str, row: Mapping[str, Any], sft: SftConfig, template: PromptTemplate | None,
    tokenizer: PreTrainedTokenizerBase, ends: Sequence[int],
) -> Demonstration:  # fmt: skip
    for setting, field in (("prompt_field", sft.prompt_field), ("response_field", sft.response_field)):
        if field not in row:
            raise ValueError(
                f"{place}: no field {field!r}; the fields are {', '.join(map(str, row))}. Set sft.{setting} to "
                f"one of these, or give rows with `{MESSAGES}`"
            )
    if template is None:
        raise ValueError(
            f"{place}: the task has no template for {sft.prompt_field!r}; give rows with `{MESSAGES}`"
        )
    question, response = (text_of(place, row, field) for field in (sft.prompt_field, sft.response_field))
    if isinstance(template, ChatTemplate):
        messages = [*template.messages(question), {"role": "assistant", "content": response}]
        return _of_messages(place, messages, template, tokenizer, ends)
    return plain_demonstration(tokenizer, template.render(question), response)


def _of_messages(
    place: str, messages: Any, template: ChatTemplate, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]
) -> Demonstration:
    """Encode a conversation; its last message is the response."""
    known = messages_of(place, MESSAGES, messages) if isinstance(messages, list) else []
    if [message["role"] for message in known[-2:]] != ["user", "assistant"]:
        raise ValueError(
            f"{place}: {MESSAGES!r} must end with a message of the user and the assistant's answer"
        )
    *before, last = known
    given = conversation_of(place, MESSAGES, before)
    prompt = template.render(given, tokenizer)
    written = [*template.messages(given), {"role": "assistant", "content": text_of(place, last, "content")}]
    whole: str = tokenizer.apply_chat_template(written, tokenize=False)
    if not whole.startswith(prompt):
        raise ValueError(
            f"{place}: the chat template writes the conversation differently once it is answered, so the "
            "response's tokens are unknown; give prompt and response, with another task.prompt"
        )
    prompt_ids, response_ids = _encoded(tokenizer, prompt), _encoded(tokenizer, whole.removeprefix(prompt))
    places = [index for index, token in enumerate(response_ids) if token in ends]
    if not places:  # the template ends a message with text alone
        return Demonstration(prompt_ids, (*response_ids, *ends[:1]))
    return Demonstration(prompt_ids, response_ids[: places[-1] + 1])


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
