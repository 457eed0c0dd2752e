"""The faults that plays show: each names its place and its cure."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_ray.episodes.chat_template import normalized
from grpo_ray.records.episode_metrics import Status
from grpo_ray.tools.preflight.plays import Play, Played, Turn

CUT = (Status.TRUNCATED_TURNS, Status.TRUNCATED_TOKENS)
CLOSE = 1e-3  # of logprobs that are sampled and recomputed with a cache and without


@dataclass(frozen=True)
class Finding:
    """A fault, or a note that may be meant."""

    name: str
    text: str
    cure: str
    example: int | None = None
    policy: str = ""
    turn: int | None = None
    token: str = ""  # the text of the tokens at fault
    place: str = ""  # file:line of the user's code
    is_note: bool = False

    @property
    def where(self) -> str:
        """The example, policy, turn, token and line, as far as they are known."""
        parts = (
            None if self.example is None else f"example {self.example}",
            f"policy {self.policy!r}" if self.policy else None,
            None if self.turn is None else f"turn {self.turn}",
            f"at {self.token!r}" if self.token else None,
            self.place or None,
        )
        return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class Plays:
    """The plays of a preflight."""

    first: Play = Play()  # all policies, the user's exceptions noted
    backwards: Play = Play()  # the scripts, the examples in reverse order; calls noted
    again: Play = Play()  # the scripts in the first order; the clocks are read, but not changed
    shifted: Play = Play()  # the scripts in the first order, under clocks that jump

    @property
    def failures(self) -> list[str]:
        return [each.failure for each in vars(self).values() if each.failure]


def play_findings(plays: Plays, is_reward: bool, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Yield each kind of fault once, at its first place."""
    if plays.failures:
        yield Finding("hangs", plays.failures[0], "await what takes long, and give each wait a limit")
        return
    episodes = [*plays.first.episodes.values()]
    groups = _by_example(episodes)
    raised = [*_first(_errors(episodes))]
    yield from raised
    yield from _first(_time_outs(episodes))
    varying = [*_first(_starts(groups, tokenizer))] or [*_first(_repeated(plays, groups, tokenizer))]
    yield from varying
    yield from _around(plays)
    yield from _first(_histories(episodes, tokenizer))
    yield from _lengths(groups)
    if not raised and not varying:
        yield from _rewards(groups, is_reward)
    if plays.first.difference > CLOSE:
        yield Finding(
            "tokens_differ",
            f"logprobs of the trained tokens, recomputed, differ by {plays.first.difference:.2g}",
            "report this with the environment: the session's tokens are not those that were sampled",
        )


def _first(found: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the first finding of each name."""
    seen = set()
    for each in found:
        if each.name not in seen:
            seen.add(each.name)
            yield each


def _by_example(episodes: Iterable[Played]) -> dict[int, list[Played]]:
    groups = defaultdict[int, list[Played]](list)
    for each in episodes:
        groups[each.example].append(each)
    return groups


def _at(played: Played, turn: int | None = None) -> dict[str, Any]:
    is_known = turn is not None and 0 <= turn < len(played.turns)
    place = played.turns[turn].place if turn is not None and is_known else ""
    return {
        "example": played.example, "policy": played.policy, "turn": turn if is_known else None, "place": place,
    }  # fmt: skip


# ---- ends ----


def _errors(episodes: Sequence[Played]) -> Iterator[Finding]:
    for each in episodes:
        last = len(each.turns) - 1
        said = each.turns[last].reply.text[:60] if each.turns else ""
        if each.status == Status.ENVIRONMENT_ERROR:
            raised = each.error.strip().splitlines()[-1]
            where = {
                **_at(each, last),
                "place": each.caught[-1][1] if each.caught else _at(each, last)["place"],
            }
            yield Finding(
                "raises",
                f"it raises after the reply {said!r}: {raised}",
                "return the reward of a wrong answer for a reply that cannot be read; an episode that raises "
                "is not trained, so the policy is better off with it than with being wrong",
                **where,
            )
        elif each.status == Status.TRUNCATED_TIME:
            yield Finding(
                "slow",
                f"an episode takes more than {20:g} s",
                "give each wait a limit of its own",
                **_at(each, last),
            )
        elif not each.turns:
            yield Finding(
                "no_turn", "the episode sampled no reply, so there is nothing to train", "await session.chat",
                **_at(each),
            )  # fmt: skip


def _time_outs(episodes: Sequence[Played]) -> Iterator[Finding]:
    for each in episodes:
        for raised, place in each.caught:
            if raised.startswith("TimeoutError") and each.status == Status.FINISHED:
                yield Finding(
                    "time_out_hidden",
                    f"a time-out was caught, and the episode returned {each.reward}: the policy is blamed for a "
                    "slow grader or tool",
                    "let it raise (the episode is then left out of its group), or raise the limit",
                    **{**_at(each, len(each.turns) - 1), "place": place},
                )


# ---- what varies ----


def _starts(groups: Mapping[int, list[Played]], tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    for group in groups.values():
        first, *others = [each for each in group if each.turns]
        for other in others:
            ours, theirs = first.turns[0].prompt, other.turns[0].prompt
            if ours != theirs:
                yield Finding(
                    "different_starts",
                    "members of one group begin with different prompts, so their rewards cannot be compared",
                    "draw everything from random.Random(example.seed), which a group shares",
                    token=_difference(ours, theirs, tokenizer),
                    **_at(other, 0),
                )


def _difference(ours: Sequence[int], theirs: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of the first tokens in which the two differ."""
    pairs = zip(ours, theirs, strict=False)
    start = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    return f"{tokenizer.decode(list(ours[start : start + 6]))} / {tokenizer.decode(list(theirs[start : start + 6]))}"


def _repeated(
    plays: Plays, groups: Mapping[int, list[Played]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Finding]:
    """Compare plays of one script: within a group, once more, in another order and under other clocks."""
    drawn = sorted({f"{what} ({place})" for what, place in plays.backwards.drawn})
    reads = f"; it reads {', '.join(drawn[:3])}" if drawn else ""
    is_clock = bool(drawn) and all(not what.startswith("random") for what in drawn)
    seeded = "draw from random.Random(example.seed), and read no clock, in all that decides a turn or a reward"
    state = "keep an episode's state in the episode function, and none in its module"
    for before, now in _pairs(plays.again, plays.first):
        what, turn, token = _changed(before, now, tokenizer)
        if what:
            yield Finding(
                "reads_clock" if is_clock else "not_deterministic",
                f"the same replies with the same seed lead to {what} in a second process{reads}", seeded,
                token=token, **_at(now, turn),
            )  # fmt: skip
            return
    for group in groups.values():
        first, second = [each for each in group if each.policy == "right"]
        what, turn, token = _changed(first, second, tokenizer)
        if what:
            yield Finding(
                "shared_state", f"two members of a group that say the same get {what}", state, token=token,
                **_at(second, turn),
            )  # fmt: skip
            return
    for play, name, said, cure in (
        (plays.backwards, "shared_state", "an episode's result depends on those that ran before it", state),
        (plays.shifted, "reads_clock", "under clocks that run faster the same replies lead to", seeded),
    ):
        for one, other in _pairs(plays.first, play):
            what, turn, token = _changed(one, other, tokenizer)
            if what:
                said_of = f"{said}: {what}{reads if name == 'reads_clock' else ''}"
                yield Finding(name, said_of, cure, token=token, **_at(one, turn))


def _pairs(one: Play, other: Play) -> Iterator[tuple[Played, Played]]:
    """Yield the episodes that both plays have."""
    for key, played in one.episodes.items():
        if key in other.episodes:
            yield played, other.episodes[key]


def _changed(one: Played, other: Played, tokenizer: PreTrainedTokenizerBase) -> tuple[str, int | None, str]:
    """Return what differs between two plays of a script, with the turn and the tokens; "" if nothing does."""
    if one.signature == other.signature:
        return "", None, ""
    for number, (a, b) in enumerate(zip(one.turns, other.turns, strict=False)):
        if a.prompt != b.prompt:
            return "other messages", number, _difference(a.prompt, b.prompt, tokenizer)
    last = len(one.turns) - 1
    if one.reward != other.reward or one.turn_rewards != other.turn_rewards:
        return f"the rewards {one.reward} and {other.reward}", last, ""
    return f"the ends {one.status!r} and {other.status!r}", last, ""


# ---- around episodes ----


def _around(plays: Plays) -> Iterator[Finding]:
    for what, place in plays.backwards.blocking[:1]:
        yield Finding(
            "blocking_call",
            f"{what} holds up every other episode of its worker while it waits",
            "await it (asyncio.sleep, an async client), or await asyncio.to_thread(...)",
            place=place,
        )
    for left in plays.first.left[:1]:
        yield Finding(
            "left_behind", f"episodes leave behind: {left}",
            "close it in a `finally` or with `async with`, also if the episode is cancelled",
        )  # fmt: skip


# ---- tokens ----


def _histories(episodes: Sequence[Played], tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    for each in episodes:
        for number, turn in enumerate(each.turns):
            earlier = each.turns[:number]
            if turn.messages is not None:
                yield from _edited(each, number, turn, earlier)
            else:
                yield from _encoded_again(each, number, turn, earlier, tokenizer)


def _edited(played: Played, number: int, turn: Turn, earlier: Sequence[Turn]) -> Iterator[Finding]:
    """Find an assistant message that is not the reply which was sampled at its place."""
    assert turn.messages is not None
    said = [normalized(message) for message in turn.messages]
    rivals = [
        before for before in earlier
        if before.messages is not None and len(before.messages) < len(said)
        and [normalized(message) for message in before.messages] == said[: len(before.messages)]
        and said[len(before.messages)]["role"] == "assistant"
    ]  # fmt: skip
    if not rivals:
        return
    length = max(len(before.messages or ()) for before in rivals)
    own = [before for before in rivals if len(before.messages or ()) == length]
    kept = [before for before in own if _content(before.reply.message) == _content(said[length])]
    if kept:
        return
    sampled, shown = _content(own[-1].reply.message), _content(said[length])
    start = next((n for n, (a, b) in enumerate(zip(sampled, shown, strict=False)) if a != b), 0)
    yield Finding(
        "history_edited",
        f"the reply of turn {earlier.index(own[-1])} is not the one that was sampled: "
        f"{sampled[max(0, start - 10) : start + 40]!r} became {shown[max(0, start - 10) : start + 40]!r}. Each "
        "such turn begins a branch: its prompt is computed again, and the policy reads what it did not say",
        "append reply.message as it is",
        token=shown[start : start + 40],
        **_at(played, number),
    )


def _content(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in normalized(message).get("tool_calls", ())]
    return str(normalized(message)["content"]) + "".join(
        f"{call['name']}{sorted(call['arguments'].items())}" for call in calls
    )


def _encoded_again(
    played: Played, number: int, turn: Turn, earlier: Sequence[Turn], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Finding]:
    """Find a prompt that spells an earlier prompt and its reply with other tokens."""
    for before in earlier:
        known = (*before.prompt, *before.reply.token_ids)
        if turn.prompt[: len(known)] == known or turn.prompt[: len(before.prompt)] != before.prompt:
            continue
        text = tokenizer.decode(list(known), skip_special_tokens=True)
        again = tokenizer.decode(list(turn.prompt), skip_special_tokens=True)
        kept = before.reply.text.strip()
        if again.startswith(text.rstrip()) or (kept and kept in again[len(text) - len(before.reply.text) :]):
            yield Finding(
                "retokenised",
                f"the prompt repeats the reply of turn {earlier.index(before)} in other tokens than were sampled",
                "continue with (*prompt, *reply.token_ids, *session.encode(text)); never encode a reply again",
                token=_difference(known[len(before.prompt) :], turn.prompt[len(before.prompt) :], tokenizer),
                **_at(played, number),
            )
            return


# ---- lengths ----


def _lengths(groups: Mapping[int, list[Played]]) -> Iterator[Finding]:
    episodes = [each for group in groups.values() for each in group]
    if all(each.status in CUT for each in episodes):
        yield Finding(
            "never_ends",
            f"no episode ends by itself; each of {len(episodes)} reaches the limit of turns or tokens",
            "return when the task is solved or lost, and after a number of turns of your own",
        )
    for each in episodes:
        added = [
            len(turn.prompt) - len(before.prompt) - len(before.reply.token_ids)
            for before, turn in zip(each.turns, each.turns[1:], strict=False)
        ]
        steps = [later - sooner for sooner, later in zip(added, added[1:], strict=False)]
        if len(added) >= 3 and min(steps) > 0 and added[-1] >= max(2 * added[0], added[0] + 60):
            yield Finding(
                "growing_prompt",
                f"each turn adds more tokens than the one before it: {', '.join(map(str, added[:6]))}",
                "append only what is new; the conversation already holds the rest",
                **_at(each, len(added)),
            )
            return


# ---- rewards ----


def _rewards(groups: Mapping[int, list[Played]], is_reward: bool) -> Iterator[Finding]:
    graded = {index: [e for e in group if e.reward is not None] for index, group in groups.items()}
    graded = {index: group for index, group in graded.items() if group}
    if not graded:
        return
    yield from _signal(graded, is_reward)
    yield from _majority("satisfied_by_prompt", graded, _is_echo_best, (
        "repeating the prompt earns as much as the right answer",
        "remove the prompt from the response before grading, or ask for an answer in a form of its own",
    ))  # fmt: skip
    yield from _majority("cut_off_is_best", graded, _is_cut_best, (
        "an episode that talks on to its limit earns as much as the best one that ends, so the policy learns "
        "never to finish",
        "return the reward of a failure when EpisodeEnded is raised, or let it pass (episodes.truncated_reward)",
    ))  # fmt: skip


def _signal(graded: Mapping[int, list[Played]], is_reward: bool) -> Iterator[Finding]:
    """Find rewards that are the same for all replies, so that every advantage is 0."""
    if any(len({each.reward for each in group}) > 1 for group in graded.values()):
        yield from _right_answers(graded, is_reward)
        return
    values = sorted({each.reward or 0.0 for group in graded.values() for each in group})
    first = next(iter(graded.values()))[0]
    caught = [
        pair for group in graded.values() for e in group if e.policy.startswith("right") for pair in e.caught
    ]
    if is_reward or values != [0.0] or caught:
        because = f"; on a right answer it catches {caught[0][0]}" if caught else ""
        yield Finding(
            "constant_reward",
            f"every reply earns {', '.join(f'{value:g}' for value in values[:3])}: right, wrong and empty "
            f"ones{because}",
            "grade the example's own truth with `grpo-ray reward`, and see where its answer is lost",
            **{**_at(first), "place": caught[0][1] if caught else ""},
        )
    else:
        yield Finding(
            "no_reward_seen",
            "no policy earned anything; whether the reward can be reached was not seen",
            "define solve(messages, example) in the module, which returns the next right reply",
            is_note=True,
        )


def _right_answers(graded: Mapping[int, list[Played]], is_reward: bool) -> Iterator[Finding]:
    """Find examples of which the truth earns no more than an empty reply, in any form of an answer."""
    for group in graded.values():
        right = [each for each in group if each.policy.startswith("right")]
        empty = [each.reward for each in group if each.policy == "empty" and each.reward is not None]
        best = max((each.reward for each in right if each.reward is not None), default=None)
        if best is None or not empty or best > empty[0]:
            continue
        caught = [pair for each in right for pair in each.caught]
        if is_reward or caught:
            because = f"; it catches {caught[0][0]}" if caught else ""
            yield Finding(
                "truth_earns_nothing",
                f"the truth earns {best:g}, as much as an empty reply{because}",
                "grade the example's own truth with `grpo-ray reward`, and see where its answer is lost",
                **{**_at(right[0]), "place": caught[0][1] if caught else ""},
            )
            return


def _majority(
    name: str, graded: Mapping[int, list[Played]], test: Callable[[list[Played]], Played | None],
    said: tuple[str, str],
) -> Iterator[Finding]:  # fmt: skip
    """Yield the finding if the test names an episode of at least half of the examples."""
    found = [each for each in map(test, graded.values()) if each is not None]
    if 2 * len(found) >= len(graded):
        yield Finding(name, *said, **_at(found[0], len(found[0].turns) - 1))


def _is_echo_best(group: list[Played]) -> Played | None:
    echo = next((each for each in group if each.policy == "echo"), None)
    rewards = [each.reward for each in group if each.reward is not None]
    empty = next((each.reward for each in group if each.policy == "empty" and each.reward is not None), None)
    if echo is None or echo.reward is None or empty is None:
        return None
    return echo if echo.reward >= max(rewards) and echo.reward > max(empty, median(rewards)) else None


def _is_cut_best(group: list[Played]) -> Played | None:
    ended = [each.reward for each in group if each.status == Status.FINISHED and each.reward is not None]
    cut = [each for each in group if each.status in CUT and each.reward is not None]
    best = max(cut, key=lambda each: each.reward or 0.0, default=None)
    if best is None or best.reward is None or not ended:
        return None
    return best if best.reward >= max(ended) and best.reward > min(ended) else None
