"""The check of a conversation's history: each reply stands in it as it was sampled."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_ray.episodes.chat_template import normalized
from grpo_ray.tools.preflight.findings import Finding
from grpo_ray.tools.preflight.plays import Played


def history_findings(played: Played, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Yield a fault for each turn that shows an earlier reply otherwise than it was sampled."""
    for number, turn in enumerate(played.turns):
        if turn.asked.is_chat:
            yield from _edited(played, number)
        else:
            yield from _encoded_again(played, number, tokenizer)


def _edited(played: Played, number: int) -> Iterator[Finding]:
    """Find an assistant message that is not the reply which was sampled in its place."""
    said = played.turns[number].asked.messages
    earlier = [turn for turn in played.turns[:number] if turn.asked.is_chat]
    asked = [
        (length, turn.reply)
        for turn in earlier
        if said[: (length := len(turn.asked.messages))] == turn.asked.messages
        and [message["role"] for message in said[length : length + 1]] == ["assistant"]
    ]
    length = max((length for length, _ in asked), default=0)
    replies = [_content(reply.message) for own, reply in asked if own == length]
    shown = _content(said[length]) if replies else ""
    if not replies or shown in replies:
        return
    start = _first_difference(replies[-1], shown)
    first, last = max(0, start - 10), start + 40
    text = (
        f"{replies[-1][first:last]!r} was sampled, and {shown[first:last]!r} is in the conversation. Such a "
        "turn begins a branch: its prompt is computed again, and the policy reads what it did not say"
    )
    yield Finding("history_edited", text, token=shown[start:last], **played.at(number))


def _content(message: Mapping[str, Any]) -> str:
    """Return what an assistant's message says and calls, without the ids of calls."""
    plain = normalized(message)
    functions = [call["function"] for call in plain.get("tool_calls", ())]
    return str(plain["content"]) + "".join(f"{each['name']}({each['arguments']})" for each in functions)


def _encoded_again(played: Played, number: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Find a prompt that spells an earlier prompt and its reply with other tokens."""
    prompt = played.turns[number].prompt
    for earlier, before in enumerate(played.turns[:number]):
        known, length = (*before.prompt, *before.reply.token_ids), len(before.prompt)
        if prompt[: len(known)] == known or prompt[:length] != before.prompt:
            continue
        rest = tokenizer.decode(list(prompt[length:]), skip_special_tokens=True)
        if (kept := before.reply.text.strip()) and kept in rest:
            text = f"the prompt repeats the reply of turn {earlier} in other tokens than were sampled"
            differs = tokens_that_differ(known, prompt, tokenizer)
            yield Finding("retokenised", text, token=differs, **played.at(number))
            return


def tokens_that_differ(ours: Sequence[int], theirs: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of the first tokens in which the two differ."""
    start = _first_difference(ours, theirs)
    return " / ".join(tokenizer.decode(list(ids[start : start + 6])) for ids in (ours, theirs))


def _first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
