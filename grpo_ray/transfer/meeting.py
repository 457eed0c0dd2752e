"""The place where both ends of a wire meet, in plain values; torch is loaded only to go there."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from grpo_ray.transfer.messages import CHUNK_BYTES

if TYPE_CHECKING:
    from grpo_ray.learning.rendezvous import SignedStore

Backend = Literal["gloo", "nccl"]


class WireError(RuntimeError):
    """A failure of a wire: its other end is gone or silent, or sent something else than was expected."""


@dataclass(frozen=True)
class Meeting:
    """The place where both ends of a wire find each other: a key in the Learner's store, and their secret."""

    host: str
    port: int
    key: str
    backend: Backend
    num_receivers: int
    timeout_s: float  # for joining, and for each transfer
    secret: bytes = field(repr=False)  # of this wire alone; it proves that a process is one of its ends
    chunk_bytes: int = CHUNK_BYTES

    def store(self) -> "SignedStore":
        """Connect to the Learner's store, and return the part of it that is this wire's.

        Raises:
            WireError: the Learner did not answer within `timeout_s`.
        """
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        from grpo_ray.learning.rendezvous import SignedStore

        limit = timedelta(seconds=self.timeout_s)
        try:
            store = PrefixStore(self.key, TCPStore(self.host, self.port, timeout=limit))
        except RuntimeError as error:
            raise WireError(f"no store at {self.host}:{self.port}: {error}") from error
        return SignedStore(store, self.secret)
