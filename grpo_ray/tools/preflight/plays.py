"""Plays: episodes of all policies in a forked process, which begins with the modules as imported."""

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
import psutil
import torch

from grpo_ray.engines import derived_seed
from grpo_ray.episodes.chat_template import normalized
from grpo_ray.episodes.openai_server import ChatServer
from grpo_ray.episodes.renderer_template import make_template
from grpo_ray.episodes.runner import EpisodeRunner
from grpo_ray.episodes.segments import TrainedPath
from grpo_ray.episodes.session import Reply, Session
from grpo_ray.tasks.examples import Example
from grpo_ray.tools.preflight.policies import ASKED, Asked, ScriptedSampler, TinyPolicy, no_calls, scripts_of
from grpo_ray.tools.preflight.subject import Subject
from grpo_ray.tools.preflight.watch import Watch, shift_clocks
from grpo_ray.types import SamplingSettings

CURES = {
    "hangs": "await what takes long (an OpenAI client, too: AsyncOpenAI), and give each wait a limit",
    "crashes": "keep what may crash or exit in a process of its own",
    "raises": "return the reward of a wrong answer for a reply that cannot be read",
    "slow": "give each wait a limit of its own",
    "no_turn": "await session.chat or session.sample",
    "time_out_hidden": "let it raise (the episode then leaves its group), or raise the limit",
    "different_starts": "draw everything from random.Random(example.seed), which a group shares",
    "not_deterministic": "draw all that decides a turn or a reward from random.Random(example.seed)",
    "reads_clock": "let no clock decide a turn or a reward",
    "shared_state": "keep an episode's state in the episode function, and none in its module",
    "blocking_call": "await it (asyncio.sleep, an async client), or await asyncio.to_thread(...)",
    "left_behind": "close it in a `finally` or with `async with`, also if the episode is cancelled",
    "history_edited": "append reply.message as it is",
    "retokenised": "continue with (*prompt, *reply.token_ids, *session.encode(text))",
    "never_ends": "return when the task is solved or lost, and after a number of turns of your own",
    "growing_prompt": "append only what is new; the conversation already holds the rest",
    "satisfied_by_prompt": "grade what the response adds to the prompt, or ask for a form of answer",
    "cut_off_is_best": "return the reward of a failure when EpisodeEnded is raised, or let it pass",
    "constant_reward": "grade the truth with `grpo-ray reward`, and see where its answer is lost",
    "truth_earns_nothing": "grade the truth with `grpo-ray reward`, and see where its answer is lost",
    "no_reward_seen": "define solve(messages, example) in the module, which returns the next right reply",
    "calls_unread": "name the parser of the model's own format as episodes.tool_parser",
    "tokens_differ": "report this with the environment: these are not the tokens that were sampled",
    "no_generation_prompt": "end it with `{% if add_generation_prompt %}` and the header of a reply",
    "end_of_turn": "let a token of generation_config.json's eos_token_id follow the reply at once",
    "message_refused": "send no such message, or use a template that shows it",
    "message_dropped": "use a template that shows every message",
    "template_reads_clock": "fix the date by episodes.template_arguments, such as {date_string: 26 Jul 2024}",
}
PR_SET_CHILD_SUBREAPER = 36
DEADLINE_S = 120.0  # of a play; an episode's own limit is in `Subject.limits`
ENOUGH_S = 8.0  # of a play, after which it begins no further example
PATIENCE_S = 1.0  # for a process or a file that an episode is just closing
Kind = Literal["first", "backwards", "again", "shifted"]
"""A play: all policies, exceptions noted; then the scripts alone: with the examples in reverse order, blocking
calls and reads of clocks noted; once more; and under clocks that jump ahead whenever they are read."""


@dataclass(frozen=True)
class Finding:
    """A fault, or a note that may be meant."""

    name: str  # of CURES
    text: str
    example: int | None = None
    policy: str = ""
    turn: int | None = None
    token: str = ""  # the text of the tokens at fault
    place: str = ""  # file:line of the user's code
    is_note: bool = False

    @property
    def cure(self) -> str:
        return CURES[self.name]

    @property
    def where(self) -> str:
        """The example, policy, turn, token and line, as far as they are known."""
        parts = {
            "example {}": self.example, "policy {!r}": self.policy, "turn {}": self.turn, "at {!r}": self.token,
            "{}": self.place,
        }  # fmt: skip
        return ", ".join(part.format(value) for part, value in parts.items() if value not in (None, ""))

    def __str__(self) -> str:
        return f"{self.name}: {self.where}\n  {self.text}\n  cure: {self.cure}"


@dataclass(frozen=True)
class Turn:
    """One sampled reply, and what was asked for it."""

    asked: Asked
    prompt: tuple[int, ...]
    reply: Reply


@dataclass(frozen=True)
class Played:
    """One episode that has ended."""

    example: int
    policy: str
    status: str
    reward: float | None
    turn_rewards: tuple[float, ...] | None
    error: str
    turns: list[Turn]
    paths: list[TrainedPath]
    caught: list[tuple[str, str]]  # exceptions that passed through the user's code: what, file:line

    def at(self, turn: int | None = None) -> dict[str, Any]:
        """Return the place of the episode, or of one of its turns (the last: -1), as arguments of a Finding."""
        at: dict[str, Any] = {"example": self.example, "policy": self.policy}
        if turn is None or not self.turns:
            return at
        return {**at, "turn": turn % len(self.turns), "place": self.turns[turn].asked.place}


@dataclass(frozen=True)
class Play:
    """All episodes of a play, by (example, sample), and what was seen around them."""

    episodes: Mapping[tuple[int, int], Played] = field(default_factory=dict)
    blocking: Mapping[tuple[str, str], int] = field(default_factory=dict)  # number, by call and file:line
    drawn: Sequence[tuple[str, str]] = ()  # reads of a clock or of `random`: call, file:line
    left: Sequence[str] = ()  # processes, threads and files that outlive their episodes
    unread: str = ""  # a tool call as the chat template writes it, which the parser does not find
    difference: float = 0.0  # largest, of logprobs that the tiny policy sampled and those recomputed
    failure: Finding | None = None  # if the play did not end


class WatchedSession(Session):
    """A session that keeps what it was asked, and by which line."""

    def __init__(self, example: Example, watch: Watch, *args: Any) -> None:
        super().__init__(*args)
        self.turns: list[Turn] = []
        self._example, self._watch = example, watch

    async def chat(self, messages: Any, tools: Any = None, max_tokens: int | None = None) -> Reply:
        self._note(list(map(normalized, messages)), tools or (), is_chat=True)
        return await super().chat(messages, tools, max_tokens)

    async def sample(self, token_ids: Sequence[int], max_tokens: int | None = None) -> Reply:
        text = self._template.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        self._note([{"role": "user", "content": text}], (), is_chat=False)
        return await super().sample(token_ids, max_tokens)

    def _note(self, messages: list[dict[str, Any]], tools: Sequence[Any], is_chat: bool) -> None:
        place = self._watch.place_of(sys._getframe(), through_package=True)
        ASKED.set(Asked(self._example, messages, [*tools], len(self.turns), is_chat, place))

    async def _sample(self, prompt: tuple[int, ...], *args: Any) -> tuple[int, Reply]:
        segment, reply = await super()._sample(prompt, *args)
        self.turns.append(Turn(ASKED.get(), prompt, reply))
        return segment, reply


def play(subject: Subject, seed: int, kind: Kind) -> Play:
    """Play the examples one after the other, all episodes of one at the same time, in a process of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryFile("w+") as crash:
        process = context.Process(target=_child, args=(sender, crash, subject, seed, kind))
        process.start()
        sender.close()
        try:
            ends_at = time.monotonic() + DEADLINE_S
            while time.monotonic() < ends_at:
                is_alive = process.is_alive()
                if receiver.poll(0.2):
                    found: Play = receiver.recv()
                    return found
                if not is_alive:  # a process that it left holds the pipe open
                    raise EOFError
            text = f"a play of {len(subject.examples)} examples did not end within {DEADLINE_S:g} s"
            return Play(failure=Finding("hangs", text))
        except EOFError:
            process.join(DEADLINE_S / 4)  # the kernel may still write its memory to a file
            return Play(failure=_crash(process.exitcode, crash, subject))
        finally:
            with contextlib.suppress(psutil.Error):
                for each in psutil.Process(process.pid).children(recursive=True):  # left by episodes
                    with contextlib.suppress(psutil.Error):
                        each.kill()
            process.kill()
            process.join()


def _crash(status: int | None, written: TextIO, subject: Subject) -> Finding:
    """Return how the process ended, and which line was running if a signal ended it."""
    if status is None or status >= 0:
        return Finding("crashes", f"the process in which episodes ran ended with exit status {status}")
    written.seek(0)
    running = written.read().partition("Current thread")[2].partition("\n\n")[0]
    frames = re.findall(r'File "(.*)", line (\d+) in', running)
    place = ":".join(frames[0]) if frames else "an unknown place"
    text = f"{signal.Signals(-status).name} ended the process in which episodes ran, in {place}"
    watch = Watch(subject.folders, subject.modules)
    own = next((f"{Path(file).name}:{line}" for file, line in frames if watch.is_own(file)), "")
    return Finding("crashes", text, place=own)


def _child(sender: Connection, crash: TextIO, subject: Subject, seed: int, kind: Kind) -> None:
    gc.freeze()  # garbage from before the fork may wait for threads that this process does not have
    faulthandler.disable()  # otherwise handlers that Ray put in its place would stay
    faulthandler.enable(crash)
    os.dup2(2, 1)  # what episodes print is not the command's own output
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends this process
    torch.set_num_threads(1)
    # Processes that detach themselves stay in sight.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    watch = Watch(subject.folders, subject.modules)
    random.seed()  # a fork repeats its parent's numbers, which a run would not
    np.random.seed()
    if kind == "shifted":
        shift_clocks(subject.modules)

    async def send() -> None:  # the loop's own end would wait for threads that episodes left
        sender.send(await _play(subject, seed, kind, watch))

    asyncio.run(send())


async def _play(subject: Subject, seed: int, kind: Kind, watch: Watch) -> Play:
    server = ChatServer()
    await server.start()
    runners = {task: EpisodeRunner(each, server=server) for task, each in subject.episodes.items()}
    ends = subject.end_token_ids
    template, own_parser = make_template(subject.settings, subject.tokenizer, ends)
    parser, reads_calls = own_parser or no_calls, own_parser is not None or not subject.is_configured
    tiny = TinyPolicy(subject, parser)
    players: list[tuple[str, ScriptedSampler | TinyPolicy]] = [
        (name, ScriptedSampler(script, subject, parser))
        for name, script in scripts_of(subject, seed, with_random=kind == "first")
    ]
    players += [("tiny", tiny)] * 2 if kind == "first" else []
    episodes: dict[tuple[int, int], Played] = {}
    before = watch.left_open()

    async def one(index: int, sample: int) -> None:
        example, (name, sampler) = subject.examples[index], players[sample]
        own = derived_seed(seed, index, sample)
        settings = SamplingSettings(1, 1.0, 1.0, 0, subject.reply_tokens, (), ends, own)
        parse = sampler.parse if reads_calls else None  # as in the run: it refuses tools
        limits = subject.limits(example.task)
        session = WatchedSession(example, watch, sampler.sample, settings, template, limits, parse)
        caught: list[tuple[str, str]] = []
        watch.caught.set(caught)
        result = await runners[example.task].run(session, example)
        episodes[index, sample] = Played(
            index, name, result.status, result.reward, result.turn_rewards, result.error,
            session.turns, session.segments.sequences(), caught,
        )  # fmt: skip

    with watch.noting({"first": "exceptions", "backwards": "calls"}.get(kind)):
        started = time.monotonic()
        for index in range(len(subject.examples))[:: -1 if kind == "backwards" else 1]:
            if not episodes or time.monotonic() - started < ENOUGH_S:
                await asyncio.gather(*(one(index, sample) for sample in range(len(players))))
    await server.aclose()
    paths = [path for each in episodes.values() if each.policy == "tiny" for path in each.paths]
    difference = max(map(tiny.largest_difference, paths), default=0.0)
    ends_at = time.monotonic() + PATIENCE_S
    while (left := watch.left_since(before, len(episodes))) and time.monotonic() < ends_at:
        await asyncio.sleep(0.05)
    unread = next((p.unread for _, p in players if isinstance(p, ScriptedSampler) and p.unread), "")
    return Play(dict(sorted(episodes.items())), watch.blocking, watch.drawn, left, unread, difference)
