"""A cache of bounded size for a worker that lives as long as its run."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The values that were used last, up to a total size. Threads may share it."""

    def __init__(self, max_size: int, size_of: Callable[[K, V], int] = lambda key, value: 1) -> None:
        """
        Args:
            size_of: a value's size with its key, in the unit of `max_size`; default: entries.
        """
        self._max_size, self._size_of = max_size, size_of
        self._size = 0
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the key's value, made now unless it is here; two threads may make one at the same time."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            if key not in self._values:
                self._size += self._size_of(key, value)
            self._values[key] = value
            while self._size > self._max_size:
                self._size -= self._size_of(*self._values.popitem(last=False))
        return value
