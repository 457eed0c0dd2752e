"""SimulatedEngine: the time that an inference engine with continuous batching would take, without a model.

All running sequences advance together, at a speed that depends on their number. The engine therefore counts one
*position*: the tokens that a sequence running since the start would have by now. A sequence of L tokens that
joins at position p ends at p + L, so only arrivals, ends and syncs are events. Each costs little in any batch.
"""

import asyncio
import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from grpo_ray.engines.base import EngineDied
from grpo_ray.tools.simulation.speeds import Lengths, Speeds
from grpo_ray.transfer.messages import WeightSnapshot
from grpo_ray.types import Completion, SamplingSettings

ROUNDING = 1e-6  # tokens
TOKEN, LOGPROB = np.int32(0), np.float32(-1.0)  # of every token


@dataclass(eq=False)
class _Request:
    """A group's request; its first sequence to run computes the prompt."""

    done: "asyncio.Future[None]"
    num_prompt_tokens: int
    num_unfinished: int
    is_prefilled: bool = False


@dataclass(eq=False)
class _Sequence:
    """One response; it ends at position `start + length`."""

    request: _Request
    length: int
    start: float = 0.0
    first_version: int = 0
    versions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    def num_tokens(self, position: float) -> int:
        """Return the tokens that it has at a position."""
        return min(self.length, math.floor(position - self.start + ROUNDING))


class SimulatedEngine:
    """An engine behind the protocol of engines/base.py that only waits, on the event loop's clock."""

    def __init__(
        self, speeds: Speeds, lengths: Lengths, max_num_seqs: int, seed: int, recompute_kv: bool = True
    ) -> None:
        """
        Args:
            max_num_seqs: sequences that run at the same time; later ones wait in the order of their arrival.
            seed: of the lengths, and of the engine's death.
            recompute_kv: a sync discards the keys and values of running sequences, which are computed again.
        """
        self._speeds, self._lengths, self._max_num_seqs = speeds, lengths, max_num_seqs
        self._recompute_kv = recompute_kv
        self._rng = np.random.default_rng(seed)
        self._position, self._at = 0.0, 0.0  # and the time at which it was the position
        self._prefill_s = 0.0  # seconds before the next token of any sequence
        self._running: list[tuple[float, int, _Sequence]] = []  # a heap by end; the number breaks ties
        self._waiting: deque[_Sequence] = deque()
        self._num_started = 0
        self._switches: list[tuple[float, int]] = []
        """Position and new version of each, since the oldest sequence began."""
        self._version = 0
        self._is_paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._death: asyncio.TimerHandle | None = None
        self._is_dead = False
        self.on_timer = self._end_sequences
        """The timer's callback; its cost can be measured by wrapping it."""

    async def start(self, version: int) -> None:
        await asyncio.sleep(self._speeds.start_s)
        self._version, self._at = version, asyncio.get_running_loop().time()
        if self._speeds.generator_life_s is not None:
            life_s = float(self._rng.exponential(self._speeds.generator_life_s))
            self._death = asyncio.get_running_loop().call_later(life_s, self._die)

    async def generate(
        self, prompt_token_ids: tuple[int, ...], settings: SamplingSettings
    ) -> tuple[Completion, ...]:
        self._check_alive()
        drawn = self._lengths(self._rng, settings.num_samples)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request = _Request(done, len(prompt_token_ids), settings.num_samples)
        lengths = [max(settings.min_tokens, min(int(length), settings.max_tokens)) for length in drawn]
        sequences = [_Sequence(request, length) for length in lengths]
        self._advance()
        self._waiting.extend(sequences)
        self._continue()
        try:
            await done
        finally:
            if not done.done() or done.cancelled():
                self._advance()
                self._waiting = deque(s for s in self._waiting if s.request is not request)
                self._running = [entry for entry in self._running if entry[2].request is not request]
                heapq.heapify(self._running)
                self._continue()
        return tuple(
            _completion(sequence, is_cut=int(length) > settings.max_tokens)
            for sequence, length in zip(sequences, drawn, strict=True)
        )

    # The weight update

    async def stage(self, snapshot: WeightSnapshot) -> None:
        self._check_alive()
        await asyncio.sleep(self._speeds.stage_s)
        self._check_alive()

    async def pause(self) -> None:
        self._check_alive()
        token_s = self._speeds.token_s(len(self._running)) if self._running else 0.0
        self._advance()
        self._is_paused = True
        self._continue()
        await asyncio.sleep(token_s)  # the current token ends

    async def load(self) -> None:
        self._check_alive()
        await asyncio.sleep(self._speeds.load_s)

    async def finish(self, version: int) -> None:
        self._check_alive()
        oldest = min((sequence.start for _, _, sequence in self._running), default=self._position)
        self._switches = [switch for switch in self._switches if switch[0] >= oldest]
        self._switches.append((self._position, version))
        self._version = version
        if self._recompute_kv:
            kept = (s.request.num_prompt_tokens + s.num_tokens(self._position) for _, _, s in self._running)
            self._prefill_s += self._speeds.prefill_token_s * sum(kept)

    async def resume(self) -> None:
        self._check_alive()
        self._is_paused, self._at = False, asyncio.get_running_loop().time()
        self._continue()

    async def sleep(self) -> None:
        await asyncio.sleep(self._speeds.move_s)

    wake = sleep

    async def ping(self) -> None:
        self._check_alive()

    async def shutdown(self) -> None:
        self._die()

    # Continuous batching

    def _advance(self) -> None:
        """Bring the position up to now."""
        now = asyncio.get_running_loop().time()
        elapsed, self._at = now - self._at, now
        if self._is_paused or not self._running:
            return
        prefilling = min(elapsed, self._prefill_s)
        self._prefill_s -= prefilling
        self._position += (elapsed - prefilling) / self._speeds.token_s(len(self._running))

    def _continue(self) -> None:
        """Let waiting sequences join, and wait for the next end; call `_advance` before anything changes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while not self._is_paused and self._waiting and len(self._running) < self._max_num_seqs:
            self._join(self._waiting.popleft())
        if self._is_paused or not self._running:
            self._prefill_s = self._prefill_s if self._running else 0.0
            return
        num_tokens = max(0.0, self._running[0][0] - self._position)
        delay_s = self._prefill_s + num_tokens * self._speeds.token_s(len(self._running))
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.on_timer)

    def _join(self, sequence: _Sequence) -> None:
        if not sequence.request.is_prefilled:
            sequence.request.is_prefilled = True
            self._prefill_s += self._speeds.prefill_token_s * sequence.request.num_prompt_tokens
        sequence.start, sequence.first_version = self._position, self._version
        self._num_started += 1
        heapq.heappush(self._running, (sequence.start + sequence.length, self._num_started, sequence))

    def _end_sequences(self) -> None:
        self._timer = None
        self._advance()
        if self._running:  # the clock's rounding could stop at the end of a token of nanoseconds for ever
            self._position = max(self._position, self._running[0][0])
        while self._running and self._running[0][0] <= self._position + ROUNDING:
            _, _, sequence = heapq.heappop(self._running)
            sequence.versions = self._versions_of(sequence)
            sequence.request.num_unfinished -= 1
            if not sequence.request.num_unfinished and not sequence.request.done.done():
                sequence.request.done.set_result(None)
        self._continue()

    def _versions_of(self, sequence: _Sequence) -> np.ndarray:
        """Return the version of each token: those after a switch have the new one."""
        switches = [(position, v) for position, v in self._switches if v > sequence.first_version]
        if not switches:
            return np.broadcast_to(np.int32(sequence.first_version), (sequence.length,))  # takes no memory
        ends = [sequence.num_tokens(position) for position, _ in switches]
        counts = [after - before for before, after in pairwise((0, *ends, sequence.length))]
        return np.repeat(np.array([sequence.first_version, *(v for _, v in switches)], np.int32), counts)

    # Faults

    def _check_alive(self) -> None:
        if self._is_dead:
            raise EngineDied("the simulated engine has died")

    def _die(self) -> None:
        """Fail every request, and every later call."""
        self._is_dead = True
        for timer in (self._timer, self._death):
            if timer is not None:
                timer.cancel()
        sequences = [*(sequence for _, _, sequence in self._running), *self._waiting]
        for request in dict.fromkeys(sequence.request for sequence in sequences):
            if not request.done.done():
                request.done.set_exception(EngineDied("the simulated engine has died"))
        self._running, self._waiting = [], deque()


def _completion(sequence: _Sequence, is_cut: bool) -> Completion:
    shape = (sequence.length,)
    tokens, logprobs = np.broadcast_to(TOKEN, shape), np.broadcast_to(LOGPROB, shape)
    return Completion("", tokens, logprobs, sequence.versions, "length" if is_cut else "stop")
