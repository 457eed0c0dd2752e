"""The types that tasks are made of."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Pairs = list[tuple[str, str]]
"""(question, response) pairs that a tiny model is warmed up with."""
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Example:
    """A question, before any template, and the answer that rewards compare responses with."""

    question: str
    ground_truth: str
    place: str = field(default="", compare=False)  # its file and line, for messages; empty if generated
    task: str = ""  # the part of a mixture that it belongs to
    seed: int = field(default=0, compare=False)  # of an episode's environment: one per prompt and epoch
    facts: str = ""  # JSON: `row`, and the `fields` of question and answer, where code of the user's may ask
    response: str = field(default="", compare=False)  # of its row, where there is one for a warm-up to imitate

    @property
    def row(self) -> dict[str, Any]:
        """The columns of the example's row other than question and answer; empty for generated tasks."""
        row: dict[str, Any] = json.loads(self.facts).get("row", {}) if self.facts else {}
        return row


@dataclass(frozen=True)
class ExampleSets:
    """A task's examples, and notices about those that were left out."""

    train: Sequence[Example]
    validation: Sequence[Example]
    notices: tuple[str, ...] = ()


class Conversation(str):
    """A question given as messages, which the model's chat template renders.

    It is their JSON text, so that it is compared and stored like any question.
    """

    __slots__ = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        found: list[dict[str, str]] = json.loads(self)
        return found


def messages_of(place: str, field: str, value: list[Any]) -> list[dict[str, str]]:
    """Return a row's list of messages.

    Raises:
        ValueError: a message lacks a role or text, or has other fields, such as calls of tools.
    """
    for index, message in enumerate(value):
        items = message.items() if isinstance(message, dict) else ()
        given = {key: text for key, text in items if text is not None}  # Parquet fills in nulls
        is_text = set(given) == {"role", "content"} and isinstance(given["content"], str)
        if not is_text or given["role"] not in ROLES:
            raise ValueError(
                f"{place}: {field!r}[{index}] is {repr(message)[:80]}; each message must have a `role` of "
                f"{', '.join(ROLES)}, a `content` of text, and nothing else"
            )
    return [{key: message[key] for key in ("role", "content")} for message in value]


def conversation_of(place: str, field: str, value: list[Any]) -> Conversation:
    """Return a row's list of messages as a question.

    Raises:
        ValueError: as `messages_of`, or the last is not the user's, so there is nothing to answer.
    """
    messages = messages_of(place, field, value)
    roles = [message["role"] for message in messages]
    if roles[-1:] != ["user"] or "system" in roles[1:]:
        raise ValueError(
            f"{place}: {field!r} has messages of {', '.join(roles) or 'nothing'}; the last must be the user's, "
            "and a system message must be the first"
        )
    return Conversation(json.dumps(messages, ensure_ascii=False))
