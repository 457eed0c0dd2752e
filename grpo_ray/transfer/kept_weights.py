"""The bytes of the last version, which a delta to the next one is made from and applied to.

The Learner and every Generator keep them, each in memory of its own.
"""

import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from grpo_ray.transfer.delta import apply, encode, fingerprint
from grpo_ray.transfer.messages import Delta, WeightSnapshot


class KeptWeights:
    """All bytes of one version, in memory that the next version reuses.

    `version` is None until all bytes of one are there, and while or after an update of them has failed: then
    only a whole snapshot is accepted. One thread uses the object at a time.
    """

    def __init__(self, allocate: Callable[[int], np.ndarray] = lambda size: np.empty(size, np.uint8)) -> None:
        """Keep nothing yet; `allocate` returns that many bytes of memory."""
        self._allocate = allocate
        self._data = np.empty(0, np.uint8)
        self.version: int | None = None

    def whole(self, snapshot: WeightSnapshot) -> np.ndarray:
        """Return all bytes of the snapshot, which are kept if a delta may follow; raises as `receive`."""
        return self.receive(snapshot) if snapshot.is_kept else snapshot.data

    def receive(self, snapshot: WeightSnapshot) -> np.ndarray:
        """Copy a whole snapshot, or apply a delta; return all bytes of its version, valid until the next.

        Raises:
            ValueError: the delta is one from another version than the kept one, which stays as it was; or it
                did not restore the bytes that the Learner has.
        """
        delta, base = snapshot.delta, self.version
        if delta is not None and delta.base_version != base:
            kept = "nothing" if base is None else f"version {base}"
            raise ValueError(
                f"version {snapshot.version} came as its difference from version {delta.base_version}, "
                f"but {kept} is kept here"
            )
        self.version = None
        if delta is None:
            if self._data.nbytes != snapshot.data.nbytes:
                self._data = self._allocate(snapshot.data.nbytes) if snapshot.data.nbytes else snapshot.data
            np.copyto(self._data, snapshot.data)
        else:
            apply(snapshot.data, self._data)
            if fingerprint(self._data) != delta.fingerprint:
                raise ValueError(
                    f"version {snapshot.version} was not restored from version {base}: its bytes differ from "
                    "the Learner's"
                )
        self.version = snapshot.version
        return self._data

    def delta_to(self, whole: WeightSnapshot) -> WeightSnapshot | None:
        """Return a later version as its difference from the kept one, and keep it instead.

        Returns:
            None if the whole is not larger, or no version is kept.
        """
        base, payload = self.version, None
        if base is not None and self._data.nbytes == whole.data.nbytes:
            payload = encode(self._data, whole.data)
        self.receive(whole)
        if base is None or payload is None:
            return None
        result = Delta(base, whole.data.nbytes, fingerprint(whole.data))
        return replace(whole, data=payload, checksum=zlib.crc32(payload.data), delta=result)
