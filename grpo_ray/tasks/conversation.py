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
        ValueError: one is no message, or the last is not the user's, so there is nothing to answer.
    """
    for index, message in enumerate(value):
        items = message.items() if isinstance(message, dict) else ()
        given = {key: text for key, text in items if text is not None}  # Parquet fills in nulls
        if set(given) != {"role", "content"} or given["role"] not in ROLES:
            raise ValueError(
                f"{place}: {field!r}[{index}] is {repr(message)[:80]}; each message must have a `role` of "
                f"{', '.join(ROLES)}, a `content`, and nothing else"
            )
    messages = [{key: message[key] for key in ("role", "content")} for message in value]
    roles = [message["role"] for message in messages]
    if roles[-1:] != ["user"] or "system" in roles[1:]:
        raise ValueError(
            f"{place}: {field!r} has messages of {', '.join(roles) or 'nothing'}; the last must be the user's, "
            "to be answered, and a system message the first"
        )
    return Conversation(json.dumps(messages, ensure_ascii=False))
