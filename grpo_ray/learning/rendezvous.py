"""The meeting of processes with a common secret: a store's values are signed, each seat of a group is proved.

`TCPStore`, gloo and NCCL authenticate no process: any can write to the store, and one that connects to a rank's
port first gets the place of another. So a value counts only with the secret's signature, which keeps addresses
true, and a group is used only after each process has answered every other's challenge. A relay between two of
them would need a forged address. Nothing is encrypted.
"""

import hmac
import secrets
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from grpo_ray.errors import FORGED

NUM_BYTES = 32  # of a secret, a challenge and its answer


def open_store(host: str, timeout_s: float = 300.0) -> TCPStore:
    """Return a store that listens at the address `host` alone, on a free port."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    limit = timedelta(seconds=timeout_s)
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach()
    )


class SignedStore(Store):
    """A store of which only values signed with the secret count. Each key is set once, so none is replayed.

    torch keeps no reference to this object itself: keep one for as long as a process group uses it.
    """

    def __init__(self, store: Store, secret: bytes) -> None:
        super().__init__()
        self._store: Any = store  # its type lacks much
        self._secret = secret
        self._clones: list[SignedStore] = []

    def clone(self) -> "SignedStore":
        self._clones.append(SignedStore(self._store.clone(), self._secret))
        return self._clones[-1]

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, self._signature(key, data) + data)

    def get(self, key: str) -> bytes:
        """Wait for the key's value.

        Raises:
            RuntimeError: it is not signed with the secret; or it did not come within the store's time limit.
        """
        signed = self._store.get(key)
        data: bytes = signed[NUM_BYTES:]
        if not hmac.compare_digest(signed[:NUM_BYTES], self._signature(key, data)):
            raise RuntimeError(f"the store's value of {key} was written by a process that {FORGED}")
        return data

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until the keys have values; raises like `get`."""
        self._store.wait(keys, *([timeout] if timeout else []))
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def _signature(self, key: str, data: bytes) -> bytes:
        return _mac(self._secret, b"value", key.encode(), data)


def prove(
    secret: bytes, group: str, rank: int, size: int, exchange: Callable[[Sequence[bytes]], Sequence[bytes]]
) -> None:
    """Check that each process of a group knows the secret, before anything else is sent in the group.

    Args:
        group: its name, which no other group of this secret has.
        exchange: sends the nth part (of `NUM_BYTES`) to the nth process; returns the parts that came.

    Raises:
        RuntimeError: one of them does not.
    """
    asked = [secrets.token_bytes(NUM_BYTES) for _ in range(size)]
    challenges = exchange(asked)

    def answer(of: int, to: int, challenge: bytes) -> bytes:
        return _mac(secret, b"seat", f"{group}/{of}/{to}".encode(), challenge)

    answers = exchange([answer(rank, other, challenges[other]) for other in range(size)])
    for other in range(size):
        expected = answer(other, rank, asked[other])
        if other != rank and not hmac.compare_digest(answers[other], expected):
            raise RuntimeError(f"seat {other} of {size} ({group}) is taken by a process that {FORGED}")


def _mac(secret: bytes, *parts: bytes) -> bytes:
    """Return the HMAC of the parts, each with its length, so that no two lists of parts are alike."""
    return hmac.digest(secret, b"".join(len(part).to_bytes(8, "big") + part for part in parts), "sha256")
