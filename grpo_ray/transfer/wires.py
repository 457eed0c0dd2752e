"""Wires as WeightSync sees them: calls to both ends, the Learner's and the Generator's."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from grpo_ray.transfer.meeting import Meeting

GRACE_S = 5.0  # for the Generator's own error, after the Learner's that follows from it


class SendingLearner(Protocol):
    """The Learner's end of all wires (sender.py)."""

    def open_wire(self, name: str) -> Awaitable[Meeting]: ...
    def join_wire(self, name: str) -> Awaitable[None]: ...
    def send(self, name: str, version: int) -> Awaitable[None]: ...
    def drop_wire(self, name: str) -> Awaitable[None]: ...
    def release(self, version: int) -> Awaitable[None]: ...


class ReceivingGenerator(Protocol):
    @property
    def name(self) -> str: ...
    def join(self, meeting: Meeting) -> Awaitable[None]: ...


Phases = dict[str, Callable[[Any], Awaitable[Any]]]  # each one's call to a Generator


class Wires:
    """Connects Generators that are new, and has the Learner send whenever a Generator receives."""

    def __init__(self, learner: SendingLearner, phase: str) -> None:
        """
        Args:
            learner: the one that packs, if it is one of several ranks.
            phase: the phase in which Generators receive.
        """
        self._learner, self._phase = learner, phase
        self._joined: dict[str, ReceivingGenerator] = {}  # the process that joined last, by its name

    def around(self, phases: Mapping[str, Callable[[Any], Awaitable[Any]]], version: int) -> Phases:
        """Return the phases with the Learner's part in them.

        They raise what the calls raise; if both ends fail, the error of the Generator.
        """
        receive = phases[self._phase]

        async def transfer(generator: ReceivingGenerator) -> None:
            await both(receive(generator), self._learner.send(generator.name, version))

        with_transfer = {**phases, self._phase: transfer}

        async def stage(generator: ReceivingGenerator) -> None:
            await self._connect(generator)
            await with_transfer["stage"](generator)

        return {**with_transfer, "stage": stage}

    async def _connect(self, generator: ReceivingGenerator) -> None:
        name = generator.name
        if self._joined.get(name) is not generator:  # else a replacement would be sent to its predecessor
            meeting = await self._learner.open_wire(name)
            await both(generator.join(meeting), self._learner.join_wire(name))
            self._joined[name] = generator

    async def drop(self, name: str) -> None:
        """Close the wire of a Generator that failed."""
        self._joined.pop(name, None)
        await self._learner.drop_wire(name)

    async def release(self, version: int) -> None:
        """Let the Learner forget the versions before this one."""
        await self._learner.release(version)


async def both(received: Awaitable[Any], sent: Awaitable[Any]) -> None:
    """Wait for both ends; raise at once if one fails.

    The sender also fails when its receiver does, and often first, but the receiver's error has the cause.
    """
    receiving, sending = (asyncio.ensure_future(_awaited(end)) for end in (received, sent))
    sending.add_done_callback(lambda end: end.cancelled() or end.exception())  # not always asked for
    try:
        await asyncio.wait({receiving, sending}, return_when=asyncio.FIRST_EXCEPTION)
        if not receiving.done():
            await asyncio.wait({receiving}, timeout=GRACE_S)
        for end in (receiving, sending):
            if end.done():
                end.result()
    finally:
        receiving.cancel()  # the Learner's call ends by its own time limit


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer
