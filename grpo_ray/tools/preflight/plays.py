"""Plays: episodes of all policies in a forked process, which begins with the modules as imported."""

import asyncio
import contextvars
import ctypes
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import torch

from grpo_ray.engines import derived_seed
from grpo_ray.episodes.openai_server import ChatServer
from grpo_ray.episodes.renderer_template import make_template
from grpo_ray.episodes.runner import EpisodeRunner
from grpo_ray.episodes.segments import TrainedPath
from grpo_ray.episodes.session import Reply, Sampler, Session
from grpo_ray.tools.preflight.policies import (
    ASKED,
    Asked,
    Known,
    RandomSampler,
    ScriptedSampler,
    TinyPolicy,
    scripts_of,
)
from grpo_ray.tools.preflight.subject import Subject
from grpo_ray.tools.preflight.watch import Watch, Watched, shift_clocks
from grpo_ray.types import SamplingSettings

PR_SET_CHILD_SUBREAPER = 36
DEADLINE_S = 120.0  # of a play; an episode's own limit is in `Subject.limits`
ENOUGH_S = 8.0  # of a play, after which it begins no further example
NUM_RANDOM = 6  # episodes of the random policy per example; the tiny one plays two
PATIENCE_S = 1.0  # for a process or a file that an episode is just closing


@dataclass(frozen=True)
class Turn:
    """One sampled reply, and what was asked for it."""

    messages: list[dict[str, Any]] | None  # of `session.chat`; None for `session.sample`
    prompt: tuple[int, ...]
    reply: Reply
    segment: int
    place: str  # file:line of the user's code that asked


@dataclass(frozen=True)
class Played:
    """One episode that has ended."""

    example: int
    sample: int
    policy: str
    status: str
    reward: float | None
    turn_rewards: tuple[float, ...] | None
    error: str
    turns: list[Turn]
    paths: list[TrainedPath]
    caught: list[tuple[str, str]]  # exceptions that passed through the user's code: what, file:line

    @property
    def signature(self) -> tuple[Any, ...]:
        """The facts that must not differ between two plays of one script."""
        return self.status, self.reward, self.turn_rewards, [turn.prompt for turn in self.turns]


@dataclass(frozen=True)
class Play:
    """All episodes of a play, by (example, sample), and what was seen around them."""

    episodes: Mapping[tuple[int, int], Played] = field(default_factory=dict)
    blocking: Mapping[tuple[str, str], int] = field(default_factory=dict)  # number, by call and file:line
    drawn: list[tuple[str, str]] = field(
        default_factory=list
    )  # reads of a clock or of `random`: call, file:line
    left: list[str] = field(default_factory=list)  # processes, threads and files that outlive their episodes
    difference: float = 0.0  # largest, of logprobs that the tiny policy sampled and those recomputed
    failure: str = ""  # why the play did not end


class WatchedSession(Session):
    """A session that keeps what it was asked, and by which line."""

    def __init__(self, example: Any, watch: Watch, *args: Any) -> None:
        super().__init__(*args)
        self.turns: list[Turn] = []
        self._example, self._watch = example, watch

    async def chat(self, messages: Any, tools: Any = None, max_tokens: int | None = None) -> Reply:
        listed = [dict(message) for message in messages]
        place = self._watch.place_here()
        ASKING.set((listed, place))
        given = Asked(self._example, listed, [dict(tool) for tool in tools or ()], len(self.turns))
        ASKED.set(given)
        return await super().chat(messages, tools, max_tokens)

    async def sample(self, token_ids: Sequence[int], max_tokens: int | None = None) -> Reply:
        text = self._template.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        ASKING.set((None, self._watch.place_here()))
        ASKED.set(Asked(self._example, [{"role": "user", "content": text}], [], len(self.turns)))
        return await super().sample(token_ids, max_tokens)

    async def _sample(self, prompt: tuple[int, ...], *args: Any) -> tuple[int, Reply]:
        messages, place = ASKING.get()
        segment, reply = await super()._sample(prompt, *args)
        self.turns.append(Turn(messages, prompt, reply, segment, place))
        return segment, reply


ASKING = contextvars.ContextVar[tuple[list[dict[str, Any]] | None, str]](
    "messages, and the line that sent them"
)


def play(
    subject: Subject, seed: int, order: Sequence[int], *, only_scripts: bool = True, watched: Watched = None,
    shifted: bool = False,
) -> Play:  # fmt: skip
    """Play the examples one after the other, all episodes of one at the same time, in a process of its own.

    Args:
        order: the examples' indices.
        only_scripts: leave out the random and the tiny policy.
        watched: note `exceptions` that pass through the user's code, or blocking `calls` and reads of clocks.
        shifted: let the user's clocks advance by 1,000 s whenever they are read.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_child, args=(sender, subject, seed, order, only_scripts, watched, shifted), daemon=False
    )
    process.start()
    sender.close()
    try:
        if not receiver.poll(DEADLINE_S):
            return Play(failure=f"a play of {len(order)} examples did not end within {DEADLINE_S:g} s")
        found: Play = receiver.recv()
        return found
    except EOFError:
        process.join()
        return Play(failure=f"the process in which episodes ran ended with exit status {process.exitcode}")
    finally:
        _end(process.pid)
        process.join()


def _end(pid: int | None) -> None:
    """End the process and all that its episodes have left running."""
    try:
        parent = psutil.Process(pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for each in family:
        try:
            each.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


def _child(
    sender: Connection, subject: Subject, seed: int, order: Sequence[int],
    only_scripts: bool, watched: Watched, shifted: bool,
) -> None:  # fmt: skip
    os.dup2(2, 1)  # what episodes print is not the command's own output
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(
        PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
    )  # processes that detach themselves stay in sight
    watch = Watch(subject.folders, subject.modules)
    random.seed()  # a fork repeats its parent's numbers, which a run would not
    np.random.seed()
    if shifted:
        shift_clocks(subject.modules)
    sender.send(asyncio.run(_play(subject, seed, order, only_scripts, watched, watch)))
    sender.close()


async def _play(
    subject: Subject, seed: int, order: Sequence[int], only_scripts: bool, watched: Watched, watch: Watch
) -> Play:
    server = ChatServer()
    await server.start()
    runners = {task: EpisodeRunner(each, server=server) for task, each in subject.episodes.items()}
    template, parser = make_template(subject.settings, subject.tokenizer, subject.end_token_ids)
    ends = subject.end_token_ids
    reply_end = subject.tokenizer.eos_token_id if subject.tokenizer.eos_token_id in ends else ends[0]
    tiny = TinyPolicy(subject, reply_end)
    episodes: dict[tuple[int, int], Played] = {}
    before = watch.left_open()

    async def one(index: int, sample: int, name: str, sampler: Sampler, known: Known) -> Played:
        example = subject.examples[index]
        own = derived_seed(seed, index, sample)
        settings = SamplingSettings(1, 1.0, 1.0, 0, subject.reply_tokens, (), ends, own)
        session = WatchedSession(example, watch, sampler, settings, template, subject.limits, known.parse)
        caught: list[tuple[str, str]] = []
        watch.caught.set(caught)
        result = await runners[example.task].run(session, example)
        return Played(
            index, sample, name, str(result.status), result.reward, result.turn_rewards, result.error,
            session.turns, result.segments.sequences(), caught,
        )  # fmt: skip

    with watch.noting(watched):
        started = time.monotonic()
        for index in order:
            if time.monotonic() - started > ENOUGH_S and episodes:
                break
            known = Known(parser)
            scripts = scripts_of(subject, seed)
            players: list[tuple[str, Sampler]] = [
                (name, ScriptedSampler(script, subject, known, reply_end)) for name, script in scripts
            ]
            if not only_scripts:
                players += [
                    ("random", RandomSampler(subject, reply_end, f"{seed}/{index}/{n}"))
                    for n in range(NUM_RANDOM)
                ]
                players += [("tiny", tiny)] * 2
            found = await asyncio.gather(
                *(one(index, n, name, sampler, known) for n, (name, sampler) in enumerate(players))
            )
            episodes |= {(index, each.sample): each for each in found}
    await server.stop()
    paths = [path for each in episodes.values() if each.policy == "tiny" for path in each.paths]
    difference = max(map(tiny.largest_difference, paths), default=0.0)
    left = await _left(watch, before, len(episodes))
    return Play(episodes, watch.blocking, watch.drawn, left, difference)


async def _left(watch: Watch, before: Mapping[str, int], num_episodes: int) -> list[str]:
    """Return what the episodes have left, after a little patience."""
    ends = time.monotonic() + PATIENCE_S
    while (found := watch.left_since(before, num_episodes)) and time.monotonic() < ends:
        await asyncio.sleep(0.05)
    return found
