"""The level of protection that a kernel offers against what an answer does to the process that grades it."""

from dataclasses import dataclass
from functools import lru_cache

from grpo_ray.rewards.isolation.landlock import landlock_version
from grpo_ray.rewards.isolation.seccomp import is_filter_available

TRUNCATES, CONNECTS, SIGNALS = 3, 4, 6  # versions of Landlock from which it denies them


@dataclass(frozen=True)
class Protection:
    """The kernel's parts that the sandbox uses: a version of Landlock (0: none), filters of system calls."""

    landlock: int
    has_filter: bool

    @property
    def gaps(self) -> tuple[str, ...]:
        """Abilities that code in a worker has although docs/threats.md denies them."""
        gaps = []
        if not self.landlock:
            gaps.append("read every file, and the memory and environment of processes, of this user")
        if self.has_filter:
            return tuple(gaps)
        if not self.landlock:
            gaps.append("remove and make files, execute programs")
        if self.landlock < TRUNCATES:
            gaps.append("truncate files")
        if self.landlock < CONNECTS:
            gaps.append("open TCP connections")
        if self.landlock < SIGNALS:
            gaps.append("signal processes")
        gaps.append("use sockets of other kinds, lock files, change their modes and other processes' limits")
        return tuple(gaps)

    @property
    def notices(self) -> tuple[str, ...]:
        """One line that states the gaps; none if there are none."""
        if not self.gaps:
            return ()
        landlock = f"Landlock {self.landlock}" if self.landlock else "no Landlock"
        calls = "a filter of system calls" if self.has_filter else "no filter of system calls"
        return (
            f"grading is less isolated on this machine ({landlock}, {calls}): code that an answer gets run in "
            f"a grading process could {'; '.join(self.gaps)} (docs/threats.md)",
        )


@lru_cache
def protection_here() -> Protection:
    """Return this machine's level."""
    return Protection(landlock_version(), is_filter_available())
