"""The memory that a device needs at its peak, against the memory it has."""

from collections.abc import Sequence
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Item:
    """Bytes in use at the device's peak; `note` says how they are counted."""

    name: str
    num_bytes: float
    note: str = ""


@dataclass(frozen=True)
class Budget:
    """One device."""

    device: str
    items: Sequence[Item]
    capacity_bytes: float | None
    """None: unknown, so there is no verdict."""
    remark: str = ""

    @property
    def needed_bytes(self) -> float:
        return sum(item.num_bytes for item in self.items)

    @property
    def missing_bytes(self) -> float:
        """Bytes beyond the capacity; 0 where everything fits."""
        return 0.0 if self.capacity_bytes is None else max(0.0, self.needed_bytes - self.capacity_bytes)

    @property
    def fits(self) -> bool:
        return self.missing_bytes < 1  # below one byte is rounding, where vLLM's cache takes all that is left

    @property
    def largest(self) -> Item:
        return max(self.items, key=lambda item: item.num_bytes)


def gib(num_bytes: float) -> str:
    """Return `12.3 GiB`, or MiB below one."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"
