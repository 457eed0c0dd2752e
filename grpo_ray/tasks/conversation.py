"""Questions that are conversations: a row's list of messages, which the model's chat template renders."""

import json
from typing import Any

ROLES = ("system", "user", "assistant")


class Conversation(str):
    """A question given as messages: their JSON text, so that it is compared and stored like any question."""

    __slots__ = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        found: list[dict[str, str]] = json.loads(self)
        return found


def conversation_of(place: str, field: str, value: list[Any]) -> Conversation:
    """Return a row's list of messages as a question.

    Raises:
        ValueError: one is no message of text, or the last is not the user's, so there is nothing to answer.
    """
    messages = [_message(f"{place}: {field!r}[{index}]", message) for index, message in enumerate(value)]
    roles = [message["role"] for message in messages]
    if not roles or roles[-1] != "user":
        last = f"ends with a message of {roles[-1]!r}" if roles else "is an empty list"
        raise ValueError(f"{place}: {field!r} {last}; the last message must be the user's, to be answered")
    if "system" in roles[1:]:
        raise ValueError(f"{place}: {field!r} has a system message after its first; move it to the front")
    return Conversation(json.dumps(messages, ensure_ascii=False))


def _message(place: str, message: Any) -> dict[str, str]:
    items = message.items() if isinstance(message, dict) else ()
    given = {key: value for key, value in items if value is not None}  # Parquet has null for what others have
    if set(given) != {"role", "content"} or given["role"] not in ROLES:
        raise ValueError(
            f"{place} is {repr(message)[:80]}; each message must have a `role` of {', '.join(ROLES)}, a "
            "`content`, and nothing else"
        )
    content = given["content"]
    if not isinstance(content, str) or not content.strip():
        raise ValueError(f"{place}: its content is {repr(content)[:80]}; it must be text")
    return {"role": given["role"], "content": content}
