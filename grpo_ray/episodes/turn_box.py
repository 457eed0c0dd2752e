"""The turns of one worker's episodes in a Generator; many of them begin with one call, and end with another.

A call between processes costs about as much as a turn of 16 tokens by a tiny model. So a worker sends the turns
that came together in one call, and in return waits for any to finish: all that have are one answer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_ray.types import Completion, PackedRows, SamplingSettings, pack, unpack

Turn = tuple[tuple[int, ...], SamplingSettings]
"""The tokens of a turn's prompt, and its settings, which ask for one sample."""
Turns = Mapping[int, Turn]
"""Turns by the numbers that their worker gave them."""
Worker = tuple[str, str]
"""A worker's name, and a text that no other process under this name has."""
Sample = Callable[[tuple[int, ...], SamplingSettings], Awaitable[Completion]]


@dataclass(frozen=True)
class FinishedTurns:
    """The ends of turns since the last answer, by the number that their worker gave them."""

    ends: Mapping[int, Completion | Exception]

    def __reduce__(self) -> tuple[Any, ...]:
        completions = {number: end for number, end in self.ends.items() if isinstance(end, Completion)}
        errors = {number: end for number, end in self.ends.items() if number not in completions}
        return _turns_of, (list(completions), pack(list(completions.values())), errors)


def _turns_of(numbers: Sequence[int], packed: PackedRows, errors: Mapping[int, Exception]) -> FinishedTurns:
    return FinishedTurns({**dict(zip(numbers, unpack(packed), strict=True)), **errors})


class TurnBox:
    """The turns of one worker that a Generator runs, and those that it has not yet been told of."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ends: dict[int, Completion | Exception] = {}
        self._news = asyncio.Event()

    def begin(self, turns: Turns, cancelled: Collection[int]) -> None:
        """Begin these turns, and cancel those; a cancelled turn is never reported."""
        for number, turn in turns.items():
            self._running[number] = asyncio.create_task(self._run(number, *turn))
        for number in cancelled:
            if number in self._running:
                self._running.pop(number).cancel()
            self._ends.pop(number, None)

    async def finished(self) -> FinishedTurns:
        """Wait until a turn has finished; return all that have since the last call and were not cancelled."""
        await self._news.wait()
        self._news.clear()
        ends, self._ends = self._ends, {}
        return FinishedTurns(ends)

    def close(self) -> None:
        """Cancel every turn."""
        self.begin({}, list(self._running))
        self._news.set()

    async def _run(self, number: int, token_ids: tuple[int, ...], settings: SamplingSettings) -> None:
        try:
            self._ends[number] = await self._sample(token_ids, settings)
        except Exception as error:
            self._ends[number] = error
        self._running.pop(number, None)
        self._news.set()


class TurnBoxes:
    """The boxes of all workers."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._boxes: dict[str, tuple[str, TurnBox]] = {}  # by the worker's name, with its process
        self._closed: set[Worker] = set()  # processes that were replaced

    def of(self, worker: Worker) -> TurnBox:
        """Return the worker's box; that of an earlier process of the worker is closed.

        Raises:
            RuntimeError: the call is a late one of such an earlier process.
        """
        name, process = worker
        if worker in self._closed:
            raise RuntimeError(f"this process of {name} has been replaced, and its turns are cancelled")
        known, box = self._boxes.get(name, ("", None))
        if box is None or known != process:
            if box is not None:
                box.close()
                self._closed.add((name, known))
            box = TurnBox(self._sample)
            self._boxes[name] = process, box
        return box
