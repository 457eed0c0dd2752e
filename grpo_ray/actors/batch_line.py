"""Which groups make up the next batch: all groups stand in a line, in the order of their ids.

A batch takes the first `size` finished groups of its *window*, the first `size + lookahead - 1` of the line.
With a look-ahead of 1 that is strict order. With one of W a group can be overtaken, but comes at most
`ceil((W - 1) / size)` batches later than in strict order: the batch in which it is due waits for it. Admission
pays for those batches (staleness.py).

`first_come` has no window: the batch is whoever finished first, and its caller cuts the others off.

Groups without signal leave the line. In strict order they do so once it is sure that whoever is before them
will not take their place, so which are dropped does not depend on who finished first. At most `max_dropped`
leave it for a batch (DAPO's dynamic sampling, arXiv:2503.14476, Section 3.2, Eq. 11).
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import count, islice, takewhile


class BatchLine:
    def __init__(self, size: int, lookahead: int = 1, first_come: bool = False, max_dropped: int = 0) -> None:
        self._size, self._lookahead = size, lookahead
        self._first_come, self._max_dropped = first_come, max_dropped
        self._max_delay = -(-(lookahead - 1) // size)  # batches
        self._head = 0  # nobody before it stands in the line
        self._trained: set[int] = set()  # behind the head
        self._dropped: set[int] = set()  # or set aside, behind the head
        self._num_dropped = 0  # for the batch that comes next

    def begin(self, waiting: Iterable[int], next_id: int) -> None:
        """The line of a run that goes on: `waiting`, and everybody from `next_id` on."""
        waiting = set(waiting)
        self._head = min(waiting, default=next_id)
        # Some may have been dropped; counted as trained they make who was overtaken due sooner, never later.
        self._trained, self._dropped = set(range(self._head, next_id)) - waiting, set()

    def holds(self, group_id: int) -> bool:
        """It has not been trained, dropped or set aside."""
        return group_id >= self._head and group_id not in self._trained and group_id not in self._dropped

    def window(self) -> list[int]:
        """The groups that the next batch can be made of, in strict or look-ahead order."""
        return list(islice(self._ids(), self._size + self._lookahead - 1))

    def is_awaited(self, group_id: int) -> bool:
        """The next batch can hold it."""
        return self.holds(group_id) and (self._first_come or group_id <= self.window()[-1])

    def train(self, group_ids: Iterable[int]) -> None:
        """They are the batch; the next one may drop as many again."""
        self._trained.update(group_ids)
        self._num_dropped = 0
        self._advance()

    def leave(self, group_ids: Iterable[int]) -> None:
        """They are dropped or set aside."""
        self._dropped.update(group_ids)
        self._advance()

    def _advance(self) -> None:
        while not self.holds(self._head):
            self._trained.discard(self._head)
            self._dropped.discard(self._head)
            self._head += 1

    def batch(self, finished: Iterable[int]) -> tuple[int, ...] | None:
        """The next batch, in the line's order; None while it is not complete.

        Args:
            finished: groups that may be taken, in the order in which they came.
        """
        if self._first_come:
            chosen = list(islice(filter(self.holds, finished), self._size))
        else:
            present, due = set(finished), self._due()
            if not due <= present:
                return None
            others = [group_id for group_id in self.window() if group_id in present - due]
            chosen = [*due, *others[: self._size - len(due)]]
        return tuple(sorted(chosen)) if len(chosen) == self._size else None

    def _due(self) -> set[int]:
        """Those whom the next batch has to hold: the one after would be more than `_max_delay` late.

        In strict order the group at place p of the line is in batch `p // size`. As many groups as there are
        places before the next batch have been trained, so that who stands before place
        `num_trained + (1 - max_delay) * size` is due; those are never more than a batch holds.
        """
        num_before = len(self._trained) + (1 - self._max_delay) * self._size  # places are counted from the head
        places = islice((g for g in count(self._head) if g not in self._dropped), max(0, num_before))
        waiting = (group_id for group_id in places if group_id not in self._trained)
        return set(islice(waiting, self._size))  # only after `begin` there can seem to be more

    def drop(self, has_signal: Mapping[int, bool]) -> tuple[int, ...]:
        """Groups that leave the line for their lack of signal; `has_signal` is of the finished groups."""
        dropped: list[int] = []
        if not self._max_dropped:
            return ()
        num_kept = num_unknown = 0  # of those before
        last = max(has_signal, default=-1)
        is_strict = self._lookahead == 1 and not self._first_come
        for group_id in takewhile(lambda group_id: group_id <= last, self._ids()):
            if num_kept + num_unknown >= self._size or num_unknown + self._num_dropped >= self._max_dropped:
                break
            if group_id not in has_signal:
                num_unknown += is_strict  # elsewhere the order is that of arrival anyway
            elif has_signal[group_id]:
                num_kept += 1
            else:
                dropped.append(group_id)
                self._num_dropped += 1
        self.leave(dropped)
        return tuple(dropped)

    def _ids(self) -> Iterator[int]:
        """Everybody in the line; it has no end."""
        return filter(self.holds, count(self._head))
