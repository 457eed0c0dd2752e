"""The queue in front of the engines: which Generator samples a group, and since when its time counts.

An engine gets at most twice as many sequences as it runs at a time, so that it always has the next ones; or one
larger group, alone. The others wait here, and go to whichever Generator has room first. Inside an engine
groups are scheduled in order of arrival: a group's time limit starts once those before it fit into it, too.
"""

import asyncio
import contextlib
import heapq
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

from grpo_ray.core.clients import GeneratorClient

SURPLUS = 2  # sequences given to an engine, per sequence that it runs at a time


@dataclass(eq=False)
class Slot:
    """One group's slot in an engine."""

    num_sequences: int
    start_clock: Callable[[], None]
    is_scheduled: bool = False


@dataclass(eq=False)
class Incarnation:
    """One process under a Generator's name; the failures of an earlier one do not count against it."""

    client: GeneratorClient
    num_sequences: int = 0  # of the groups that it was given and has not finished
    slots: list[Slot] = field(default_factory=list)  # in order of arrival

    def schedule(self, max_num_seqs: int) -> None:
        """Start the clocks of the groups that the engine must have scheduled by now."""
        num_before = 0
        for slot in self.slots:
            num_before += slot.num_sequences
            if num_before > max_num_seqs and slot is not self.slots[0]:
                break
            if not slot.is_scheduled:
                slot.is_scheduled = True
                slot.start_clock()


class Dispatcher:
    """The Generators that serve, and the groups that wait for one, first come, first served."""

    def __init__(self, generators: Iterable[GeneratorClient], max_num_seqs: int) -> None:
        """`max_num_seqs`: sequences that an engine runs at a time."""
        self._max_num_seqs = max_num_seqs
        self.serving: dict[str, Incarnation] = {}  # those that serve now, by name
        self._loads: list[tuple[int, int, Incarnation]] = []  # a heap by sequences; some entries are outdated
        self._waiting: deque[tuple[int, asyncio.Future[Incarnation]]] = deque()
        for client in generators:
            self.add(client)

    def add(self, client: GeneratorClient) -> None:
        """Let a Generator serve."""
        generator = self.serving[client.name] = Incarnation(client)
        self._load(generator, 0)
        self._hand_out()

    def remove(self, name: str) -> None:
        """Give no more groups to a Generator; those that it has end by themselves, with an error."""
        del self.serving[name]

    @contextlib.asynccontextmanager
    async def room(self, num_sequences: int, is_alone: bool = False) -> AsyncIterator[Incarnation]:
        """Wait for the least busy Generator that has room, and hold the room while the block lasts.

        Args:
            is_alone: wait for an idle Generator, and let no other group join.
        """
        if is_alone:
            num_sequences = max(num_sequences, SURPLUS * self._max_num_seqs)
        room: asyncio.Future[Incarnation] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_sequences, room))
        self._hand_out()
        try:
            yield await room
        finally:
            if room.done() and not room.cancelled():  # also if the wait was cancelled as the room was given
                self._load(room.result(), -num_sequences)
                self._hand_out()

    @contextlib.asynccontextmanager
    async def slot(self, generator: Incarnation, num_sequences: int, limit_s: float) -> AsyncIterator[None]:
        """Raise TimeoutError if the block lasts `limit_s` from when the engine has scheduled the group."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as limit:  # wait_for can swallow a cancellation
            slot = Slot(num_sequences, lambda: limit.reschedule(loop.time() + limit_s))
            generator.slots.append(slot)
            generator.schedule(self._max_num_seqs)
            try:
                yield
            finally:
                generator.slots.remove(slot)
                generator.schedule(self._max_num_seqs)

    def _load(self, generator: Incarnation, num_sequences: int) -> None:
        """Add sequences to a Generator's load, and an entry to the heap, which stays in proportion to them."""
        generator.num_sequences += num_sequences
        heapq.heappush(self._loads, (generator.num_sequences, generator.client.number, generator))
        if len(self._loads) > 8 * len(self.serving) + 64:
            self._loads = [(each.num_sequences, each.client.number, each) for each in self.serving.values()]
            heapq.heapify(self._loads)

    def _least_busy(self) -> Incarnation:
        """Return the serving Generator with the fewest sequences, of several the one that serves longest."""
        while True:
            num_sequences, _, generator = self._loads[0]
            is_current = generator.num_sequences == num_sequences
            if is_current and self.serving.get(generator.client.name) is generator:
                return generator
            heapq.heappop(self._loads)

    def _hand_out(self) -> None:
        """Give the groups that wait to Generators with room, the oldest first."""
        while self._waiting and self.serving:
            num_sequences, room = self._waiting[0]
            if not room.done():
                generator = self._least_busy()
                has_room = generator.num_sequences + num_sequences <= SURPLUS * self._max_num_seqs
                if generator.num_sequences and not has_room:
                    return
                self._load(generator, num_sequences)
                room.set_result(generator)
            self._waiting.popleft()
