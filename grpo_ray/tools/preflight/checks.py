"""The checks of plays, histories and templates: each yields its fault at the first place that shows it."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from statistics import median
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_ray.episodes.chat_template import normalized
from grpo_ray.records.episode_metrics import CUT, THEN_RAISED, Status
from grpo_ray.tools.preflight.plays import Finding, Kind, Play, Played
from grpo_ray.tools.preflight.subject import Subject

CLOSE = 1e-3  # of logprobs that are sampled and recomputed with a cache and without
OFTEN = 3  # times that a call must hold up the loop: libraries ask git for their version once
AIMLESS = ("empty", "wanderer", "random")  # policies that earn a good reward by chance alone
Groups = Sequence[list[Played]]  # one per example
Plays = Mapping[Kind, Play]


def play_findings(plays: Plays, is_reward: bool, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Yield each kind of fault once, at its first place."""
    failures = [each.failure for each in plays.values() if each.failure is not None]
    if failures:
        yield failures[0]
        return
    episodes = [*plays["first"].episodes.values()]
    by_example = defaultdict[int, list[Played]](list)
    for each in episodes:
        by_example[each.example].append(each)
    groups = [*by_example.values()]
    raised = [*_errors(episodes)]
    varying = [*islice(chain(_starts(groups, tokenizer), _varying(plays, groups, tokenizer)), 1)]
    edited = [finding for each in episodes for finding in history_findings(each, tokenizer)]
    found = (*raised, *_time_outs(episodes), *varying, *_around(plays), *edited, *_lengths(episodes))
    first: dict[str, Finding] = {}
    for finding in found:
        first.setdefault(finding.name, finding)
    yield from first.values()
    if not raised and not varying:
        yield from _rewards(groups, is_reward)
    if plays["first"].unread:
        call = plays["first"].unread[:100]
        text = f"the tool parser does not find a call as the chat template writes it: {call!r}"
        yield Finding("calls_unread", text)
    if plays["first"].difference > CLOSE:
        by = f"{plays['first'].difference:.2g}"
        yield Finding("tokens_differ", f"logprobs of the trained tokens, computed again, differ by {by}")


def _errors(episodes: Sequence[Played]) -> Iterator[Finding]:
    for each in episodes:
        at = each.at(-1)
        if each.status == Status.TRUNCATED_TIME:
            yield Finding("slow", f"an episode does not end: {each.error}", **at)
        elif each.status not in (Status.FINISHED, *CUT) or THEN_RAISED in each.error:
            said = f"after the reply {each.turns[-1].reply.text[:60]!r}" if each.turns else "at once"
            raised = each.error.strip().splitlines()[-1]
            at |= {"place": each.caught[-1][1]} if each.caught else {}
            yield Finding("raises", f"it raises {said}: {raised}", **at)
        elif not each.turns:
            yield Finding("no_turn", "the episode sampled no reply, so there is nothing to train", **at)


def _time_outs(episodes: Sequence[Played]) -> Iterator[Finding]:
    for each in episodes:
        places = [place for raised, place in each.caught if raised.startswith("TimeoutError")]
        if places and each.status == Status.FINISHED:
            text = f"a time-out was caught, and the episode returned {each.reward}: the policy is blamed for it"
            yield Finding("time_out_hidden", text, **{**each.at(-1), "place": places[0]})


def _starts(groups: Groups, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    for group in groups:
        first, *others = [each for each in group if each.turns] or [group[0]]
        for other in others:
            ours, theirs = first.turns[0].prompt, other.turns[0].prompt
            if ours != theirs:
                text = "members of one group begin with different prompts, so their rewards cannot be compared"
                differs = tokens_that_differ(ours, theirs, tokenizer)
                yield Finding("different_starts", text, token=differs, **other.at(0))


def _varying(plays: Plays, groups: Groups, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Compare plays of one script: once more, within a group, in another order, and under other clocks."""
    drawn = sorted({f"{what} ({place})" for what, place in plays["backwards"].drawn})
    reads = f"; it reads {', '.join(drawn[:3])}" if drawn else ""
    is_random = any(what.startswith("random") for what in drawn)
    again = "reads_clock" if drawn and not is_random else "not_deterministic"
    shared = "not_deterministic" if is_random else "shared_state"  # chance may first show in another order
    group_pairs = [[each for each in group if each.policy == "right"][:2] for group in groups]
    for name, said, pairs in (
        (again, "played again, the same replies get", _pairs(plays["first"], plays["again"])),
        (shared, "two members of a group that say the same get", group_pairs),
        (shared, "after other episodes the same replies get", _pairs(plays["first"], plays["backwards"])),
        ("reads_clock", "under clocks that run faster the same replies get",
         _pairs(plays["first"], plays["shifted"])),
    ):  # fmt: skip
        for one, other in pairs:
            what, turn, token = _changed(one, other, tokenizer)
            if what and Status.TRUNCATED_TIME not in (one.status, other.status):  # which is told as slow
                text = f"{said} {what}{'' if name == 'shared_state' else reads}"
                yield Finding(name, text, token=token, **one.at(turn))


def _pairs(one: Play, other: Play) -> Iterator[Sequence[Played]]:
    """Return the episodes that both plays have, in pairs."""
    return ([played, other.episodes[key]] for key, played in one.episodes.items() if key in other.episodes)


def _changed(one: Played, other: Played, tokenizer: PreTrainedTokenizerBase) -> tuple[str, int, str]:
    """Return what differs between two plays of a script, with the turn and the tokens; "" if nothing does."""
    for number, (a, b) in enumerate(zip(one.turns, other.turns, strict=False)):
        if a.prompt != b.prompt:
            return "other messages", number, tokens_that_differ(a.prompt, b.prompt, tokenizer)
    if (one.reward, one.turn_rewards) != (other.reward, other.turn_rewards):
        return f"the rewards {one.reward} and {other.reward}", -1, ""
    is_same = one.status == other.status and len(one.turns) == len(other.turns)
    return "" if is_same else f"the ends {one.status} and {other.status}", -1, ""


def _around(plays: Plays) -> Iterator[Finding]:
    repeated = [call for call, number in plays["backwards"].blocking.items() if number >= OFTEN]
    for what, place in repeated[:1]:
        text = f"{what} holds up all episodes of its worker while it waits"
        yield Finding("blocking_call", text, place=place)
    for left in plays["first"].left[:1]:
        yield Finding("left_behind", f"episodes leave behind: {left}")


def _lengths(episodes: Sequence[Played]) -> Iterator[Finding]:
    if all(each.status in CUT for each in episodes):
        yield Finding("never_ends", f"each of {len(episodes)} episodes reaches the limit of turns or tokens")
    for each in episodes:
        added = [
            len(turn.prompt) - len(before.prompt) - len(before.reply.token_ids)
            for before, turn in pairwise(each.turns)
        ]
        is_growing = len(added) >= 3 and all(later > sooner for sooner, later in pairwise(added))
        if is_growing and added[-1] >= max(2 * added[0], added[0] + 60):
            text = f"each turn adds more tokens than the one before it: {', '.join(map(str, added[:6]))}"
            yield Finding("growing_prompt", text, **each.at(len(added)))
            return


def _rewards(groups: Groups, is_reward: bool) -> Iterator[Finding]:
    rewarded = ([each for each in group if each.reward is not None] for group in groups)
    graded = [group for group in rewarded if group]
    if any(len({each.reward for each in group}) > 1 for group in graded):
        yield from _right_answers(graded, is_reward)
    elif graded:
        yield _no_signal(graded, is_reward)
    for name, test, text in (
        ("satisfied_by_prompt", _is_echo_best, "repeating the prompt earns as much as the right answer"),
        ("cut_off_is_best", _is_cut_best, "an episode that talks on to its limit earns as much as the best: "
         "the policy learns never to finish"),
    ):  # fmt: skip
        found = [each for each in map(test, graded) if each is not None]
        if found and 2 * len(found) >= len(graded):
            yield Finding(name, text, **found[0].at(-1))


def _no_signal(graded: Groups, is_reward: bool) -> Finding:
    """Return the fault of rewards that are the same for all replies; a note if perhaps none was right."""
    episodes = [each for group in graded for each in group]
    values = sorted({each.reward or 0.0 for each in episodes})
    because, place = _caught(episodes)
    if not is_reward and max(values) <= 0 and not because:
        text = f"every reply earned {values[0]:g}; whether a better reward can be reached was not seen"
        return Finding("no_reward_seen", text, is_note=True)
    earned = ", ".join(f"{value:g}" for value in values[:3])
    text = f"every reply earns {earned}: right, wrong and empty ones{because}"
    return Finding("constant_reward", text, **episodes[0].at(), place=place)


def _right_answers(graded: Groups, is_reward: bool) -> Iterator[Finding]:
    """Find an example of which the truth earns no more than an empty reply, in any form of an answer."""
    for group in graded:
        right = [each for each in group if each.policy.startswith("right")]
        empty = [each.reward or 0.0 for each in group if each.policy == "empty"]
        best = max((each.reward or 0.0 for each in right), default=None)
        because, place = _caught(group)
        if best is not None and empty and best <= empty[0] and (is_reward or because):
            text = f"the truth earns {best:g}, as much as an empty reply{because}"
            yield Finding("truth_earns_nothing", text, **right[0].at(), place=place)
            return


def _caught(episodes: Sequence[Played]) -> tuple[str, str]:
    """Return the exception that the user's code caught on a right answer, for a message, and its place."""
    for each in episodes:
        if each.policy.startswith("right") and each.caught:
            return f"; on a right answer it catches {each.caught[0][0]}", each.caught[0][1]
    return "", ""


def _is_echo_best(group: list[Played]) -> Played | None:
    by_policy = {each.policy: each.reward for each in group if each.reward is not None}
    aimless = [reward for policy, reward in by_policy.items() if policy.startswith(AIMLESS)]
    earned = by_policy.get("echo")
    if earned is None or not aimless or earned < max(by_policy.values()) or earned <= median(aimless):
        return None
    return next(each for each in group if each.policy == "echo")


def _is_cut_best(group: list[Played]) -> Played | None:
    ended = [each.reward or 0.0 for each in group if each.status == Status.FINISHED]
    best = max((e for e in group if e.status in CUT), key=lambda each: each.reward or 0.0, default=None)
    if best is None or best.reward is None or not ended:
        return None
    return best if best.reward >= max(ended) and best.reward > min(ended) else None


HELLO, REPLY = {"role": "user", "content": "Hello."}, {"role": "assistant", "content": "A reply, in full."}
PROBES = (
    ("system", [{"role": "system", "content": "A system message."}, HELLO]),
    ("user", [HELLO, REPLY, {"role": "user", "content": "A second message."}]),
)


def template_findings(subject: Subject) -> Iterator[Finding]:
    """Yield what is wrong with the tokenizer's chat template, if there is one that prompts are made by."""
    tokenizer = subject.tokenizer
    if not tokenizer.chat_template or not subject.has_chat or subject.settings.renderer is not None:
        return
    arguments = subject.settings.template_arguments

    def shown(messages: list[dict[str, str]], is_prompt: bool = True) -> str:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=is_prompt, **arguments
        )
        return text

    if shown([HELLO]) == shown([HELLO], is_prompt=False):
        text = (
            "a prompt ends without the header of a reply, so the policy would sample the header, and train it"
        )
        yield Finding("no_generation_prompt", text, token=shown([HELLO])[-40:])
    ends = [tokenizer.convert_ids_to_tokens(token) for token in subject.end_token_ids]
    _, _, behind = shown([HELLO, REPLY, HELLO], is_prompt=False).partition(REPLY["content"])
    between, _, _ = behind.partition(HELLO["content"])
    first = min((between.index(end) for end in ends if end in between), default=None)
    if first is None:
        missed = f"none of the tokens that end one in sampling ({', '.join(ends)})"
        text = f"a reply ends with {missed}: no end is ever trained"
        yield Finding("end_of_turn", text, token=between[:40])
    elif first > 0:
        text = f"{between[:first]!r} stands between a reply and its end token; a sampled reply ends without it"
        yield Finding("end_of_turn", text, token=between[:first])
    for role, messages in PROBES:
        try:
            text = shown(messages)
        except Exception as error:  # the template's own
            yield Finding("message_refused", f"it refuses a {role} message: {error}", is_note=True)
            continue
        if lacking := [message["content"] for message in messages if message["content"] not in text]:
            yield Finding("message_dropped", f"it does not show {lacking[0]!r} next to a {role} message")
    if "strftime_now" in tokenizer.chat_template and "date_string" not in arguments:
        text = "it writes today's date: prompts change at midnight, and a resumed run differs"
        yield Finding("template_reads_clock", text, is_note=True)


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
