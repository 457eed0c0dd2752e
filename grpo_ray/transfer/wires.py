"""Wires as WeightSync sees them: calls to both ends, the Learner's and the Generator's."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from grpo_ray.transfer.messages import Meeting

T = TypeVar("T")
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
    @property
    def number(self) -> int:
        """The number of its process: each one that is started under a name gets another."""

    def join(self, meeting: Meeting) -> Awaitable[None]: ...


class Wires:
    """Connects Generators that are new, and has the Learner send whenever a Generator receives."""

    def __init__(self, learner: SendingLearner, call: str) -> None:
        """
        Args:
            learner: the one that packs, if it is one of several ranks.
            call: the call of the sync during which Generators receive, `stage` or `switch`.
        """
        self._learner, self._call = learner, call
        self._joined: dict[str, int] = {}  # the number of the process that joined last, by its name

    async def carry(
        self, call: str, generator: ReceivingGenerator, version: int, begin: Callable[[], Awaitable[T]]
    ) -> T:
        """Make a call of the sync with the Learner's part in it, and return the Generator's answer.

        Raises what the calls raise; if both ends fail, the error of the Generator.
        """
        if call == "stage":
            await self._connect(generator)
        if call != self._call:
            return await begin()
        return await both(begin(), self._learner.send(generator.name, version))

    async def _connect(self, generator: ReceivingGenerator) -> None:
        name = generator.name
        if self._joined.get(name) != generator.number:  # else a replacement would be sent to its predecessor
            meeting = await self._learner.open_wire(name)
            await both(generator.join(meeting), self._learner.join_wire(name))
            self._joined[name] = generator.number

    async def drop(self, name: str) -> None:
        """Close the wire of a Generator that failed."""
        self._joined.pop(name, None)
        await self._learner.drop_wire(name)

    async def release(self, version: int) -> None:
        """Let the Learner forget the versions before this one."""
        await self._learner.release(version)


async def both(received: Awaitable[T], sent: Awaitable[Any]) -> T:
    """Wait for both ends; return the receiver's result, or raise its error at once, the sender's after GRACE_S.

    The sender also fails when its receiver does, and often first, but the receiver's error has the cause.
    """
    receiving, sending = asyncio.ensure_future(received), asyncio.ensure_future(sent)
    sending.add_done_callback(lambda end: end.cancelled() or end.exception())  # not always asked for
    try:
        await asyncio.wait({receiving, sending}, return_when=asyncio.FIRST_EXCEPTION)
        if not receiving.done():
            await asyncio.wait({receiving}, timeout=GRACE_S)
        if receiving.done():
            receiving.result()
        sending.result()
        return receiving.result()
    finally:
        receiving.cancel()  # the Learner's call ends by its own time limit
