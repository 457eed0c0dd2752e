"""The check of a conversation's history: each reply stands in it as it was sampled."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_ray.episodes.chat_template import normalized
from grpo_ray.tools.preflight.findings import Finding
from grpo_ray.tools.preflight.plays import Turn


def history_findings(
    turns: Sequence[Turn], at: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Finding]:
    """Yield a fault for each turn that shows an earlier reply otherwise than it was sampled.

    Args:
        at: the episode's place.
    """
    for number, turn in enumerate(turns):
        where = {**at, "turn": number, "place": turn.place}
        if turn.messages is not None:
            yield from _edited(turn, turns[:number], where)
        else:
            yield from _encoded_again(turn, turns[:number], where, tokenizer)


def _edited(turn: Turn, earlier: Sequence[Turn], where: Mapping[str, Any]) -> Iterator[Finding]:
    """Find an assistant message that is not the reply which was sampled in its place."""
    said = [normalized(message) for message in turn.messages or ()]
    asked = [
        (len(before.messages), before)
        for before in earlier
        if before.messages is not None
        and [normalized(message) for message in before.messages] == said[: len(before.messages)]
        and [message["role"] for message in said[len(before.messages) :]][:1] == ["assistant"]
    ]
    length = max((length for length, _ in asked), default=0)
    replies = [_content(before.reply.message) for own, before in asked if own == length]
    shown = _content(said[length]) if replies else ""
    if not replies or shown in replies:
        return
    pairs = enumerate(zip(replies[-1], shown, strict=False))
    start = next((n for n, (a, b) in pairs if a != b), min(len(replies[-1]), len(shown)))
    first, last = max(0, start - 10), start + 40
    text = (
        f"{replies[-1][first:last]!r} was sampled, and {shown[first:last]!r} is in the conversation. Such a "
        "turn begins a branch: its prompt is computed again, and the policy reads what it did not say"
    )
    yield Finding("history_edited", text, token=shown[start:last], **where)


def _content(message: Mapping[str, Any]) -> str:
    """Return what an assistant's message says and calls, without the ids of calls."""
    plain = normalized(message)
    functions = [call["function"] for call in plain.get("tool_calls", ())]
    return str(plain["content"]) + "".join(f"{each['name']}({each['arguments']})" for each in functions)


def _encoded_again(
    turn: Turn, earlier: Sequence[Turn], where: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Finding]:
    """Find a prompt that spells an earlier prompt and its reply with other tokens."""
    for number, before in enumerate(earlier):
        known, length = (*before.prompt, *before.reply.token_ids), len(before.prompt)
        if turn.prompt[: len(known)] == known or turn.prompt[:length] != before.prompt:
            continue
        rest = tokenizer.decode(list(turn.prompt[length:]), skip_special_tokens=True)
        if (kept := before.reply.text.strip()) and kept in rest:
            pairs = enumerate(zip(known, turn.prompt, strict=False))
            start = next((n for n, (a, b) in pairs if a != b), len(turn.prompt))
            shown = " / ".join(tokenizer.decode(list(ids[start : start + 6])) for ids in (known, turn.prompt))
            text = f"the prompt repeats the reply of turn {number} in other tokens than were sampled"
            yield Finding("retokenised", text, token=shown, **where)
            return
