"""The order of batches: all groups are in one queue, by id, and each batch takes some from its front.

A batch takes the first `size` finished groups of its *window*, which is the first `size + lookahead - 1` groups
of the queue. With a look-ahead of 1 that is strict order. With a look-ahead of W a group can be overtaken, but
comes at most `ceil((W - 1) / size)` batches later than in strict order: the batch in which it is due waits for
it. Admission allows for that delay (staleness.py).

With `first_come` there is no window: a batch takes the groups that finished first; its caller cuts off others.

Groups without signal are dropped from the queue, at most `max_dropped` per batch (DAPO's dynamic sampling,
arXiv:2503.14476, Section 3.2, Eq. 11). In strict order a group is dropped only once it is certain that the
groups before it neither fill the batch nor use up the limit, so the drops do not depend on their order.

The GroupBook asks for a batch whenever a group finishes, so the window and the due groups are kept until the
queue changes, and the usual answer, that some group is missing, costs the same for a batch of any size.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import count, islice, takewhile


class BatchQueue:
    """The groups that are still to be trained, in order, as ids."""

    def __init__(self, size: int, lookahead: int = 1, first_come: bool = False, max_dropped: int = 0) -> None:
        self._size, self._lookahead = size, lookahead
        self._first_come, self._max_dropped = first_come, max_dropped
        self._max_delay = -(-(lookahead - 1) // size)  # batches
        self._head = 0  # the first group in the queue
        self._trained: set[int] = set()  # only ids after the head
        self._dropped: set[int] = set()  # dropped or set aside; only ids after the head
        self._num_dropped = 0  # since the last batch
        self._changed()

    def _changed(self) -> None:
        """Discard what was computed from the queue before it changed."""
        self._window: list[int] | None = None
        self._due: frozenset[int] | None = None
        self._missing: int | None = None  # a due group that had not finished

    def begin(self, waiting: Iterable[int], next_id: int) -> None:
        """Restore the queue of a resumed run: the groups `waiting`, and all from `next_id` on."""
        waiting = set(waiting)
        self._head = min(waiting, default=next_id)
        # Some others may have been dropped; counting all as trained makes groups due sooner, never later.
        self._trained, self._dropped = set(range(self._head, next_id)) - waiting, set()
        self._changed()

    def holds(self, group_id: int) -> bool:
        """Return whether the group has not been trained, dropped or set aside."""
        return group_id >= self._head and group_id not in self._trained and group_id not in self._dropped

    def window(self) -> list[int]:
        """Return the groups that the next batch can take, in strict or look-ahead order."""
        if self._window is None:
            self._window = list(islice(self._ids(), self._size + self._lookahead - 1))
        return self._window

    def is_awaited(self, group_id: int) -> bool:
        """Return whether the next batch can take the group."""
        return self.holds(group_id) and (self._first_come or group_id <= self.window()[-1])

    def train(self, group_ids: Iterable[int]) -> None:
        """Remove the groups of a batch; the next batch may drop `max_dropped` again."""
        self._trained.update(group_ids)
        self._num_dropped = 0
        self._advance()

    def leave(self, group_ids: Iterable[int]) -> None:
        """Remove groups that are dropped or set aside."""
        self._dropped.update(group_ids)
        self._advance()

    def _advance(self) -> None:
        while not self.holds(self._head):
            self._trained.discard(self._head)
            self._dropped.discard(self._head)
            self._head += 1
        self._changed()

    def batch(self, finished: Collection[int]) -> tuple[int, ...] | None:
        """Return the next batch, in order of ids; None while it is not complete.

        Args:
            finished: groups that may be taken, in the order of their arrival; membership should be cheap.
        """
        if len(finished) < self._size or (self._missing is not None and self._missing not in finished):
            return None
        if self._first_come:
            chosen = list(islice(filter(self.holds, finished), self._size))
        else:
            due = self._due_groups()
            self._missing = next((group_id for group_id in due if group_id not in finished), None)
            if self._missing is not None:
                return None
            others = (g for g in self.window() if g in finished and g not in due)
            chosen = [*due, *islice(others, self._size - len(due))]
        return tuple(sorted(chosen)) if len(chosen) == self._size else None

    def _due_groups(self) -> frozenset[int]:
        """Return the groups that the next batch must take: one batch later would exceed `_max_delay`.

        In strict order the group at position p is in batch `p // size`. As many groups have been trained as the
        earlier batches have positions, so the groups before position `num_trained + (1 - max_delay) * size` are
        due; those are never more than a batch holds.
        """
        if self._due is None:
            # Positions count from the head.
            num_before = len(self._trained) + (1 - self._max_delay) * self._size
            positions = islice((g for g in count(self._head) if g not in self._dropped), max(0, num_before))
            waiting = (group_id for group_id in positions if group_id not in self._trained)
            self._due = frozenset(islice(waiting, self._size))  # only after `begin` can there seem to be more
        return self._due

    def drop(self, has_signal: Mapping[int, bool]) -> tuple[int, ...]:
        """Remove the groups that leave the queue for lack of signal, and return them.

        Args:
            has_signal: for each finished group.
        """
        if not self._max_dropped:
            return ()
        dropped: list[int] = []
        num_kept = num_unknown = 0  # among the groups before this one
        last = max(has_signal, default=-1)
        is_strict = self._lookahead == 1 and not self._first_come
        for group_id in takewhile(lambda group_id: group_id <= last, self._ids()):
            if num_kept + num_unknown >= self._size or num_unknown + self._num_dropped >= self._max_dropped:
                break
            if group_id not in has_signal:
                num_unknown += is_strict  # otherwise drops depend on arrival anyway
            elif has_signal[group_id]:
                num_kept += 1
            else:
                dropped.append(group_id)
                self._num_dropped += 1
        if dropped:
            self.leave(dropped)
        return tuple(dropped)

    def _ids(self) -> Iterator[int]:
        """Iterate over the queue, which has no end."""
        return filter(self.holds, count(self._head))
