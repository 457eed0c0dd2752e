"""What a device holds at its fullest, against what it has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

GIB = 2**30
Owner = Literal["Generator", "Learner", "host"]


@dataclass(frozen=True)
class Item:
    """Bytes that are there at the device's fullest moment; `note` says how they are counted."""

    name: str
    num_bytes: float
    note: str = ""
    process: str = ""
    """Whose they are, on a host that has several."""


@dataclass(frozen=True)
class Budget:
    """One device, or several that hold the same; or a moment of one."""

    owner: Owner
    device: str
    items: Sequence[Item]
    capacity_bytes: float | None
    """None: not known, so nothing is judged."""
    remarks: Sequence[str] = ()

    @property
    def needed_bytes(self) -> float:
        return sum(item.num_bytes for item in self.items)

    @property
    def missing_bytes(self) -> float:
        """0 where there is room for everything."""
        return 0.0 if self.capacity_bytes is None else max(0.0, self.needed_bytes - self.capacity_bytes)

    @property
    def fits(self) -> bool:
        return self.missing_bytes < 1  # less is how floats are rounded, where vLLM's cache takes what is left


def gib(num_bytes: float) -> str:
    """`12.3 GiB`, or MiB below one."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"
